"""The file-system tier: it answers from memory, and hands everything slow to its own threads."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

from typing_extensions import override

from kvstrata.core.errors import TierClosedError
from kvstrata.core.events import OffloadingEvent
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.settings import parse_settings
from kvstrata.core.stats import Stats
from kvstrata.core.tier import DEFAULT_ENV, SecondaryTierManager, TierEnv
from kvstrata.tiers.fs.copies import Copies
from kvstrata.tiers.fs.disk import Disk
from kvstrata.tiers.fs.index import Entry
from kvstrata.tiers.fs.layout import ChunkDir
from kvstrata.tiers.fs.ledger import LEDGER_BYTES
from kvstrata.tiers.fs.probes import Probes
from kvstrata.tiers.fs.real_disk import RealDisk
from kvstrata.tiers.fs.settings import (
    FsSettings,
    OnClose,
    parse_fs_settings,
    require_max_bytes,
)
from kvstrata.tiers.fs.store import ChunkStore
from kvstrata.tiers.fs.upkeep import Upkeep
from kvstrata.tiers.fs.workers import Lane, Workers
from kvstrata.tiers.fs.zeroing_disk import ZeroingDisk
from kvstrata.tiers.recency import Trails


class FsTier(SecondaryTierManager):
    """Chunks as files below one directory; see `FsSettings` for what can be set.

    What it holds outlives the process and is shared with every other process that uses the root
    with the same namespace. Starting scans the root: it takes on what is there.
    """

    is_persistent = True

    def __init__(
        self,
        slots: SlotView,
        *,
        env: TierEnv = DEFAULT_ENV,
        disk: Disk | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        """Open the root. `settings` are those of `FsSettings`; `disk` replaces the real one.

        Raises:
            ConfigError: A setting is wrong, or the root can't be used.
        """
        self._settings = parse_fs_settings(settings, env.path)
        self._env = env
        kind = ZeroingDisk if self._settings.zero_removed else RealDisk
        self._disk = disk or kind.open_root(self._settings, env.path)
        self._store = ChunkStore(self._disk, self._settings, env, slots.chunk_bytes)
        self._index = self._store.index
        self._store.sweep.helpers = self._workers = Workers(
            self._settings.num_threads, env.name, env.clock
        )
        self._copies = Copies(self._store, self._workers, slots, self._settings, env)
        self._probes = Probes(self._workers, self._store.probe, env.clock)
        self._upkeep = Upkeep(self._store, self._workers, self._settings, env.clock)
        self._trails = Trails()
        self._is_closed = False
        self._upkeep.make_fan()

    @classmethod
    @override
    def from_config(cls, slots: SlotView, settings: Mapping[str, Any], env: TierEnv) -> Self:
        require_max_bytes(settings, env.path)
        return cls(slots, env=env, **settings)

    @classmethod
    @override
    def num_chunks_max(cls, settings: Mapping[str, Any], chunk_bytes: int, path: str) -> int | None:
        limit_bytes = parse_settings(FsSettings, settings, path).max_bytes
        if limit_bytes is None:
            return None
        return max(0, limit_bytes - LEDGER_BYTES) // ChunkDir.of("", chunk_bytes).file_bytes

    @override
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        return self.lookup_many([key], ctx)[0]

    @override
    def lookup_many(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        if self._is_closed or self._copies.is_hung:
            return [LookupResult.MISS] * len(keys)
        wall_s = self._env.clock.wall_s()
        entries = self._index.find(keys)
        results = [LookupResult.HIT] * len(keys)
        if None in entries:
            absent = iter(self._look_for_absent(keys, entries, ctx))
            results = [next(absent) if each is None else LookupResult.HIT for each in entries]
        if self._index.has_due(wall_s):
            for i, entry in enumerate(entries):
                if entry is not None and entry.expires_at_s <= wall_s:
                    results[i] = LookupResult.MISS
        if prefixes := self._store.leaving_prefixes():
            for i, key in enumerate(keys):
                if key.startswith(prefixes):
                    results[i] = LookupResult.MISS
        return results

    def _look_for_absent(
        self, keys: Sequence[OffloadKey], entries: Sequence[Entry | None], ctx: ReqContext
    ) -> Sequence[LookupResult]:
        """Answer for the keys without entry, in order: all at once where that can be."""
        absent = [key for key, entry in zip(keys, entries, strict=True) if entry is None]
        may_probe = self._store.may_have_more() and not self._store.is_wiping()
        if not may_probe and not self._copies.is_storing_any(absent):
            return [LookupResult.MISS] * len(absent)
        results = []
        for key in absent:
            if self._copies.is_storing(key):
                results.append(LookupResult.HIT_PENDING)
            elif not may_probe or self._index.is_leaving(key):
                results.append(LookupResult.MISS)
            else:
                results.append(self._probes.lookup(key, ctx))
        return results

    @override
    def submit_store(self, job: StoreJob) -> None:
        self._check_open()
        self._copies.submit_store(job, self._trails.of(job.req_context))

    @override
    def submit_load(self, job: LoadJob) -> None:
        self._check_open()
        self._copies.submit_load(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._copies.check_deadlines()
        return self._copies.take_results()

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self._index.touch(self._trails.of(ctx), keys, self._env.clock.wall_s())

    @override
    def on_new_request(self, ctx: ReqContext) -> None:
        self._trails.start(ctx)
        self._probes.start_request(ctx)

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        self._index.touch(self._trails.of(ctx), ())
        self._trails.end(ctx)
        self._probes.end_request(ctx)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._copies.check_deadlines()
        self._probes.start()
        self._upkeep.start_what_is_due()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._store.journal.take_events()

    @override
    def cancel(self, job_id: JobId) -> None:
        self._copies.cancel(job_id)

    @override
    def delete(self, keys: Collection[OffloadKey]) -> None:
        self._copies.void_keys(keys)
        self._upkeep.delete(list(keys))

    @override
    def delete_prefix(self, prefix: bytes) -> None:
        self._copies.void_prefix(prefix)
        self._upkeep.delete_prefix(prefix)

    @override
    def drain_jobs(self, timeout_s: float) -> Collection[JobId]:
        return self._copies.wait_until_idle(timeout_s)

    @override
    def reset(self) -> None:
        self._copies.void_all()
        self._upkeep.wipe()

    @override
    def get_stats(self) -> Stats:
        counters, jobs, state = self._copies.stats()
        return Stats(
            gauges={
                "num_resident": len(self._index),
                "num_jobs": len(jobs),
                "used_bytes": self._store.sweep.used_bytes(),
                "max_bytes": self._settings.max_bytes or 0,
                "direct_io": float(self._disk.uses_direct),
            },
            counters={**counters, **self._store.journal.counters()},
            jobs=jobs,
            state="closed" if self._is_closed else state,
        )

    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        if self._is_closed:
            return ()
        self._is_closed = True
        stuck = self._copies.wait_until_idle(timeout_s)
        self._copies.fail_all()
        self._workers.take_queued(Lane.IDLE)
        self._upkeep.mark()
        if not stuck and self._settings.on_close is OnClose.DELETE:
            self._upkeep.wipe()
        if self._workers.close(timeout_s):
            self._store.close()
            self._disk.close()
        return stuck

    def is_idle(self) -> bool:
        """Say whether nothing runs or is queued, upkeep included."""
        return self._workers.is_idle()

    def check(self) -> None:
        """Assert every invariant. Only while no operation runs."""
        self._index.check()
        self._store.check()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierClosedError(self._env.name, "is shut down")
