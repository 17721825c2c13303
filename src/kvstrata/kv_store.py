"""`KVStore`: put and get chunks without a scheduler, over the same manager that engines use."""

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from typing_extensions import Buffer

from kvstrata.build import build_manager
from kvstrata.config_sources import load_config
from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError, ContractError
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager, ShutdownReport, SuspendMode
from kvstrata.core.request import HINTS_PARAM, ReqContext, ScheduleEndContext
from kvstrata.core.results import LookupResult
from kvstrata.core.stats import Stats

POLL_S: Final = 0.001
NOTHING_NEW: Final = ScheduleEndContext((), ())


class KVStore:
    """Chunks by key, in host memory and the configured tiers.

    Keys name chunks in prefix order, as everywhere: `put` keeps the first ones where not all fit,
    and `get` returns the longest prefix there is. Safe to use from several threads; one call works
    at a time. Use it in a `with` block, or call `close`; afterwards all but `get_stats` and `close`
    raise ContractError. A forked child must not use it: it has neither its threads nor its memory.
    """

    def __init__(self, manager: OffloadingManager, *, max_wait_s: float = 5.0) -> None:
        """Drive a manager; it is owned, and nobody else may call it."""
        self._manager = manager
        self._max_wait_s = max_wait_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._serial = itertools.count()
        self._prefetches: dict[ReqContext, Sequence[OffloadKey]] = {}

    @property
    def chunk_bytes(self) -> int:
        """Size of every row."""
        return self._manager.slots.chunk_bytes

    def put(
        self,
        keys: Sequence[OffloadKey],
        rows: Sequence[Buffer],
        hints: Mapping[str, Any] | None = None,
    ) -> int:
        """Store chunks; return how many of them, from the first on, are kept somewhere afterwards.

        Args:
            keys: In prefix order.
            rows: `rows[i]` holds the `chunk_bytes` bytes of `keys[i]`; copied before the call ends.
            hints: As in `kv_transfer_params["kvstrata"]`.

        Raises:
            ValueError: A row has another size, or there are more or fewer rows than keys.

        Blocks: for the copies, and up to `max_wait_s` for room. Tiers are filled afterwards; see
        `flush`.
        """
        views = self._views(keys, rows)
        with self._working(), self._request(hints) as ctx:
            self._manager.touch(keys, ctx)
            deadline_s = time.monotonic() + self._max_wait_s
            begin = 0
            while begin < len(keys) and time.monotonic() < deadline_s:
                num_there = self._put_some(keys[begin:], views[begin:], ctx)
                begin += num_there
                if not num_there and not self._manager.has_pending_work():
                    break  # refused, or full of what may not leave
                if not num_there:
                    self._step_and_sleep()
            return begin

    def _put_some(
        self, keys: Sequence[OffloadKey], views: Sequence[memoryview], ctx: ReqContext
    ) -> int:
        """Store what finds room now; return how many of the first keys are there afterwards."""
        manager = self._manager
        piece = keys[: max(1, manager.slots.num_slots // 2)]
        output = manager.prepare_store(piece, ctx)
        if output is not None:
            view_of = dict(zip(piece, views, strict=False))
            lost = set(output.keys_to_store)
            try:
                for key, slot in zip(output.keys_to_store, output.store_spec.slots, strict=True):
                    manager.slots[slot][:] = view_of[key]
                    lost.discard(key)
            finally:  # the user may interrupt
                manager.complete_store(output.keys_to_store, ctx, lost)
        self._step()
        states = manager.lookup_states(piece, ctx)
        return next(
            (i for i, s in enumerate(states) if s in {LookupResult.MISS, LookupResult.RETRY}),
            len(piece),
        )

    def get(
        self,
        keys: Sequence[OffloadKey],
        rows: Sequence[Buffer],
        hints: Mapping[str, Any] | None = None,
    ) -> int:
        """Load chunks; return the length of the prefix that was loaded.

        Args:
            keys: In prefix order.
            rows: Writable buffers of `chunk_bytes`; `rows[i]` gets `keys[i]`. Those past the
                returned length are untouched.
            hints: As in `kv_transfer_params["kvstrata"]`.

        Raises:
            ValueError: A row has another size or can't be written, or there are more or fewer rows
                than keys.

        Blocks: for the copies, and up to `max_wait_s` for each stretch that tiers have to fetch.
        """
        views = self._views(keys, rows)
        for i, view in enumerate(views):
            if view.readonly:
                raise ValueError(f"rows[{i}] can't be written")
        begin, count = 0, 1
        with self._working():
            while count and begin < len(keys):
                with self._request(hints) as ctx:
                    count = self._get_some(keys[begin:], views[begin:], ctx)
                self._step()
                begin += count
        return begin

    def _get_some(
        self, keys: Sequence[OffloadKey], views: Sequence[memoryview], ctx: ReqContext
    ) -> int:
        """Load as much as is there at one time: all of it, unless the primary is too small."""
        manager = self._manager
        deadline_s = time.monotonic() + self._max_wait_s
        count = manager.lookup(keys, ctx)
        while not count and time.monotonic() < deadline_s:
            if count == 0 and not manager.has_pending_work():
                break  # otherwise slots may come free that a fetch needs
            self._step_and_sleep()
            count = manager.lookup(keys, ctx)
        count = count or 0
        if count:
            manager.touch(keys, ctx)
            found = keys[:count]
            spec = manager.prepare_load(found, ctx)
            try:
                for view, slot in zip(views, spec.slots, strict=False):
                    view[:] = manager.slots[slot]
            finally:
                manager.complete_load(found, ctx)
        return count

    def contains(
        self, keys: Sequence[OffloadKey], hints: Mapping[str, Any] | None = None
    ) -> list[bool]:
        """Say for each key whether it can be loaded or fetched. Blocks: up to `max_wait_s`."""
        self._check_keys(keys)
        with self._working(), self._request(hints) as ctx:
            deadline_s = time.monotonic() + self._max_wait_s
            states = self._manager.lookup_states(keys, ctx)
            while LookupResult.RETRY in states and time.monotonic() < deadline_s:
                self._step_and_sleep()
                states = self._manager.lookup_states(keys, ctx)
            return [state in {LookupResult.HIT, LookupResult.HIT_PENDING} for state in states]

    def delete_tenant(self, tenant: str) -> None:
        """Forget every chunk that was stored for a tenant, in every tier, also by earlier runs.

        `tenant` is what the settings make of a request: the hint, or what they read instead.
        """
        with self._working():
            self._manager.delete_tenant(tenant)
            self._step()

    def suspend(self, mode: SuspendMode = SuspendMode.RELEASE, timeout_s: float = 10.0) -> None:
        """Come to rest, and give host memory back unless told otherwise; the next call wakes up.

        Blocks: at most about `timeout_s`.
        """
        with self._working():
            self._manager.suspend(mode, timeout_s)

    def set_epoch(self, epoch: str, timeout_s: float = 10.0) -> None:
        """Serve nothing any more that was stored before, in another epoch of the model's weights.

        The setting `weights_epoch` says it at the next start.

        Raises:
            ConfigError: A tier could not be opened anew; it is left out.

        Blocks: at most about `timeout_s`, and for tiers to start.
        """
        with self._working():
            self._manager.set_epoch(epoch, timeout_s)

    def delete(self, keys: Sequence[OffloadKey], hints: Mapping[str, Any] | None = None) -> None:
        """Forget chunks in every tier; see also `delete_tenant` and `clear`."""
        self._check_keys(keys)
        with self._working():
            with self._request(hints) as ctx:
                self._manager.delete(keys, ctx)
            self._step()

    def clear(self) -> None:
        """Forget everything in this namespace, in every tier."""
        with self._working():
            self._manager.reset_cache()
            self._step()

    def prefetch(self, keys: Sequence[OffloadKey], hints: Mapping[str, Any] | None = None) -> None:
        """Begin to fetch chunks into host memory. Returns at once; later calls carry it on.

        What is fetched is not held: it may leave again like any other chunk.
        """
        self._check_keys(keys)
        with self._working():
            ctx = self._begin(hints)
            self._prefetches[ctx] = keys
            self._carry_on(ctx)
            self._step()

    def _carry_on(self, ctx: ReqContext) -> None:
        """Let a prefetch ask again; it ends when there is nothing more to wait for."""
        if self._manager.lookup(self._prefetches[ctx], ctx) is not None:
            del self._prefetches[ctx]
            self._manager.on_request_finished(ctx)

    def _step(self) -> None:
        self._manager.on_schedule_end(NOTHING_NEW)
        for ctx in list(self._prefetches):
            self._carry_on(ctx)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until tiers have taken what they were given; False if that takes longer."""
        deadline_s = time.monotonic() + timeout_s
        with self._working():
            self._step()
            while self._prefetches or self._manager.has_pending_work():
                if time.monotonic() > deadline_s:
                    return False
                self._step_and_sleep()
            return True

    def get_stats(self) -> Stats:
        """Return a snapshot of use and counters."""
        return self._manager.get_stats()

    def close(self, timeout_s: float = 10.0) -> ShutdownReport:
        """Flush, stop tiers, give memory back; a second call returns the same report."""
        with self._lock:
            self._is_closed = True
            return self._manager.shutdown(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise ContractError("the store is closed")
            yield

    @contextmanager
    def _request(self, hints: Mapping[str, Any] | None) -> Iterator[ReqContext]:
        """One request, which ends whatever happens."""
        ctx = self._begin(hints)
        try:
            yield ctx
        finally:
            self._manager.on_request_finished(ctx)

    def _begin(self, hints: Mapping[str, Any] | None) -> ReqContext:
        params = {HINTS_PARAM: hints} if hints is not None else None
        ctx = ReqContext(f"kv-store-{next(self._serial)}", params)
        self._manager.on_new_request(ctx)
        return ctx

    def _step_and_sleep(self) -> None:
        self._step()
        time.sleep(POLL_S)

    def _views(self, keys: Sequence[OffloadKey], rows: Sequence[Buffer]) -> list[memoryview]:
        self._check_keys(keys)
        if len(keys) != len(rows):
            raise ValueError(f"{len(keys)} keys, but {len(rows)} rows")
        views = [memoryview(row).cast("B") for row in rows]
        for i, view in enumerate(views):
            if view.nbytes != self.chunk_bytes:
                raise ValueError(f"rows[{i}] has {view.nbytes} bytes, not {self.chunk_bytes}")
        return views

    @staticmethod
    def _check_keys(keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            if not isinstance(key, bytes):
                raise TypeError(f"a key is bytes, not {type(key).__name__}")


def open_store(source: Mapping[str, Any] | Config | str | Path) -> KVStore:
    """Open the store that a mapping, a Config or a file describes; `kvstrata.open` is this.

    Raises:
        ConfigError: A setting is wrong or missing; `chunk_bytes` is required here.
    """
    config = load_config(source)
    if config.chunk_bytes is None:
        raise ConfigError("chunk_bytes", "is required: the size of every chunk")
    manager = build_manager(
        config, chunk_bytes=config.chunk_bytes, namespace=config.namespace, shared=False
    )
    return KVStore(manager, max_wait_s=config.max_wait_s)
