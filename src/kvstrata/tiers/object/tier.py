"""The object tier: what the scheduler sees of chunks in a bucket or directory."""

import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Self

from typing_extensions import override

from kvstrata.core.errors import TierClosedError
from kvstrata.core.events import OffloadingEvent, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.settings import parse_settings
from kvstrata.core.stats import Stats
from kvstrata.core.tier import DEFAULT_ENV, SecondaryTierManager, TierEnv
from kvstrata.tiers.chunk_format import HEADER_BYTES
from kvstrata.tiers.jobs import Outcome
from kvstrata.tiers.object.board import Board
from kvstrata.tiers.object.client import ObjectClient
from kvstrata.tiers.object.inventory import Inventory
from kvstrata.tiers.object.loads import Loads
from kvstrata.tiers.object.local_clients import DirectoryClient, MemoryClient
from kvstrata.tiers.object.lookups import Lookups
from kvstrata.tiers.object.removal import Removals
from kvstrata.tiers.object.settings import ObjectSettings
from kvstrata.tiers.object.startup import probe_store
from kvstrata.tiers.object.stores import Stores

_CLIENTS: Final = {"file": DirectoryClient, "memory": MemoryClient}


class ObjectTier(SecondaryTierManager):
    """Chunks as objects of any store that obstore speaks to.

    Requests run on the tier's own threads; calls of the scheduler touch memory only. A load ends
    at its deadline at the latest, whatever the request does. An interpreter that exits without
    `shutdown` drops what is queued and waits for requests that run, at most their timeout.
    """

    def __init__(
        self,
        slots: SlotView,
        *,
        env: TierEnv = DEFAULT_ENV,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        """Open the store and look whether it can be used. `settings`: see `ObjectSettings`.

        Raises:
            ConfigError: A setting is wrong or the store can't be used; the text names the setting.
        """
        parsed = parse_settings(ObjectSettings, settings, env.path)
        parsed.check(HEADER_BYTES + slots.chunk_bytes, env.path)
        kind = _CLIENTS.get(parsed.scheme, ObjectClient)
        client = kind(parsed, env.name, env.path)
        probe_store(client, parsed, env.path)
        self.is_persistent = parsed.scheme != "memory"
        self.accepts_stores = not parsed.read_only
        self._board = Board(slots, env, parsed, client)
        self._removals = Removals(self._board)
        self._inventory = Inventory(self._board, self._removals)
        self._lookups = Lookups(self._board, self._removals)
        self._loads = Loads(self._board, self._removals)
        self._stores = Stores(self._board, self._removals)
        # Also at the interpreter's exit, before it is too late for threads to come back.
        weakref.finalize(self, self._board.pool.close, parsed.request_timeout_s + 1.0)

    @classmethod
    @override
    def from_config(cls, slots: SlotView, settings: Mapping[str, Any], env: TierEnv) -> Self:
        return cls(slots, env=env, **settings)

    @classmethod
    @override
    def num_chunks_max(cls, settings: Mapping[str, Any], chunk_bytes: int, path: str) -> int | None:
        limit_bytes = parse_settings(ObjectSettings, settings, path).max_bytes
        return None if limit_bytes is None else limit_bytes // (HEADER_BYTES + chunk_bytes)

    @override
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        return self.lookup_many((key,), ctx)[0]

    @override
    def lookup_many(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        with self._board.lock:
            return self._lookups.look_up(keys, ctx)

    @override
    def submit_store(self, job: StoreJob) -> None:
        with self._board.lock:
            self._check_open()
            self._stores.submit(job)

    @override
    def submit_load(self, job: LoadJob) -> None:
        with self._board.lock:
            self._check_open()
            self._loads.submit(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._board.lock:
            self._board.expire_due()
            return self._board.jobs.take_results()

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        with self._board.lock:
            self._board.index.touch(self._board.names_of(keys), self._board.env.clock.wall_s())

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        with self._board.lock:
            self._board.expire_due()
            self._removals.expire()
            self._lookups.end_step()
            self._inventory.end_step()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        with self._board.lock:
            return self._board.events.take()

    @override
    def cancel(self, job_id: JobId) -> None:
        with self._board.lock:
            self._board.give_up(self._board.open_copies(job_id))

    @override
    def delete(self, keys: Collection[OffloadKey]) -> None:
        board = self._board
        with board.lock:
            board.give_up([c for c in board.open_copies() if c.is_store and c.key in keys])
            self._removals.remove(board.names_of(keys), RemovalReason.DELETED)

    @override
    def delete_prefix(self, prefix: bytes) -> None:
        """Remove chunks by the start of their keys, as far as an object's path holds the key."""
        with self._board.lock:
            self._removals.remove_prefix(prefix)

    @override
    def drain_jobs(self, timeout_s: float) -> Collection[JobId]:
        with self._board.lock:
            return self._board.wait_until_idle(timeout_s)

    @override
    def reset(self) -> None:
        with self._board.lock:
            self._removals.reset()

    @override
    def get_stats(self) -> Stats:
        """Return a snapshot. Its notes say who owns the capacity: this tier or the store."""
        board = self._board
        with board.lock:
            gauges: dict[str, float] = {
                "num_resident": len(board.index),
                "used_bytes": board.index.used_bytes,
                "num_jobs": len(board.jobs),
                "num_queued_stores": board.storing.total(),
                "num_queued_stores_max": board.settings.num_queued_stores_max,
                "num_queued_loads": board.loading.total(),
                "num_lookups": self._lookups.num_waiting(),
                "num_lookups_max": board.settings.num_lookups_max,
                "num_requests": board.pool.num_running(),
                "num_requests_max": board.settings.num_threads_max,
            }
            if board.settings.cap_bytes is None:
                owner = "owned by the store: its lifecycle rules remove objects"
                if board.settings.read_only:
                    owner = "owned by those that write: this tier only reads"
                gauges["num_resident_max"] = board.settings.num_known_max
            else:
                owner = "owned here: the least recently used objects are removed"
                gauges["max_bytes"] = board.settings.cap_bytes
                gauges["is_counted"] = self._inventory.is_known
            return Stats(
                gauges=gauges,
                counters={
                    **board.jobs.counters,
                    **board.counters,
                    **board.health.counters,
                    "dropped_events": board.events.num_dropped,
                },
                jobs=board.jobs.snapshot(board.env.name, board.env.clock.now_s()),
                state="closed" if board.is_closed else board.health.state,
                notes={"capacity": owner, "url": board.settings.url},
            )

    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        board = self._board
        with board.lock:
            if board.is_closed:
                return ()
            until_s = time.monotonic() + timeout_s
            stuck = board.wait_until_idle(timeout_s)
            board.wait_until_removed(until_s)  # what was deleted must not come back
            board.is_closed = True
            for copy in board.open_copies():
                board.settle(copy, Outcome.FAILED)
        board.pool.close(0.1)
        return stuck

    def check(self) -> None:
        """Assert every invariant."""
        self._board.check()

    def _check_open(self) -> None:
        if self._board.is_closed:
            raise TierClosedError(self._board.env.name, "is shut down")
