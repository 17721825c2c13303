"""A tier without bytes for replays: it knows what it would hold, and when copies would end."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple, Self

from typing_extensions import override

from kvstrata.core.clock import VirtualClock
from kvstrata.core.errors import ConfigError, TierClosedError
from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.settings import (
    optional,
    parse_bytes,
    parse_count,
    parse_seconds,
    parse_settings,
    setting,
)
from kvstrata.core.stats import Stats
from kvstrata.core.tier import SecondaryTierManager, TierEnv

Job = StoreJob | LoadJob
MODELLED: Final = "modelled"
"""What a tier's `type` says in a replay's settings to get this one."""

_COUNTERS: Final = (
    *("store_jobs", "load_jobs", "stored_chunks", "stored_bytes", "loaded_chunks", "loaded_bytes"),
    *("failed_store_chunks", "failed_load_chunks", "present_chunks", "refused_chunks"),
    *("evicted_chunks", "deleted_chunks"),
)


@dataclass(frozen=True, slots=True)
class ModelledSettings:
    """What the tier is like; the tighter of the two bounds holds, one is required."""

    max_bytes: int | None = setting(optional(parse_bytes), None)
    max_chunks: int | None = setting(optional(parse_count()), None)
    read_bytes_per_s: int = setting(parse_bytes, 5 * 10**9)
    write_bytes_per_s: int = setting(parse_bytes, 2 * 10**9)
    latency_s: float = setting(parse_seconds, 0.0001)  # of each job, before its first byte

    def capacity(self, chunk_bytes: int, path: str) -> int:
        """Return how many chunks fit.

        Raises:
            ConfigError: There is no bound, or not one chunk fits.
        """
        bounds = [] if self.max_chunks is None else [self.max_chunks]
        if self.max_bytes is not None:
            bounds.append(self.max_bytes // chunk_bytes)
        if not bounds or min(bounds) < 1:
            raise ConfigError(path, f"needs max_bytes or max_chunks for at least {chunk_bytes} B")
        return min(bounds)


class _Lane:
    """One direction: jobs one behind the other, each after the tier's latency."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_at_s = 0.0

    def end_of(self, num_bytes: int, now_s: float) -> float:
        """Return when a job that is given now will be done."""
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s
        return self._free_at_s + self._latency_s


Trail = dict[OffloadKey, None]
"""What a request used or stored here, in prefix order."""


class _Run(NamedTuple):
    """A job in flight, ordered by its end."""

    end_s: float
    serial: int
    job: Job
    trail: Trail


class ModelledTier(SecondaryTierManager):
    """Keys in place of chunks, bounded, the longest unused leaving first, tails before heads.

    A job ends when its clock says so: latency, and bytes at a rate, behind the jobs before it. A
    `VirtualClock` is told when that is. Nothing is read from slots or written to them, so what is
    promoted from here must not be used by an engine. Priorities and lifetimes are ignored.
    """

    def __init__(self, slots: SlotView, settings: ModelledSettings, env: TierEnv) -> None:
        self._capacity = settings.capacity(slots.chunk_bytes, env.path)
        self._chunk_bytes = slots.chunk_bytes
        self._env = env
        self._chunks: OrderedDict[OffloadKey, None] = OrderedDict()  # longest unused first
        self._trails: dict[str, Trail] = {}
        self._reads = _Lane(settings.read_bytes_per_s, settings.latency_s)
        self._writes = _Lane(settings.write_bytes_per_s, settings.latency_s)
        self._running: list[_Run] = []  # a heap
        self._storing: Counter[OffloadKey] = Counter()
        self._serial = count()
        self._results: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._is_closed = False

    @classmethod
    @override
    def from_config(cls, slots: SlotView, settings: Mapping[str, Any], env: TierEnv) -> Self:
        return cls(slots, parse_settings(ModelledSettings, settings, env.path), env)

    @classmethod
    @override
    def num_chunks_max(cls, settings: Mapping[str, Any], chunk_bytes: int, path: str) -> int | None:
        return parse_settings(ModelledSettings, settings, path).capacity(chunk_bytes, path)

    @override
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        return self.lookup_many([key], ctx)[0]

    @override
    def lookup_many(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        self._end_due()
        order, storing = self._chunks, self._storing
        return [
            LookupResult.HIT
            if key in order
            else LookupResult.HIT_PENDING
            if key in storing
            else LookupResult.MISS
            for key in keys
        ]

    @override
    def submit_store(self, job: StoreJob) -> None:
        self._submit(job, self._writes)
        self._storing.update(job.keys)

    @override
    def submit_load(self, job: LoadJob) -> None:
        self._submit(job, self._reads)

    def _submit(self, job: Job, lane: _Lane) -> None:
        if self._is_closed:
            raise TierClosedError(self._env.name, "is shut down")
        end_s = lane.end_of(len(job.keys) * self._chunk_bytes, self._env.clock.now_s())
        ctx = job.req_context
        trail = self._trails.get(ctx.req_id, {}) if ctx is not None else {}
        heapq.heappush(self._running, _Run(end_s, next(self._serial), job, trail))
        if isinstance(self._env.clock, VirtualClock):
            self._env.clock.set_alarm(end_s)

    def _end_due(self) -> None:
        now_s = self._env.clock.now_s()
        while self._running and self._running[0].end_s <= now_s:
            self._end(heapq.heappop(self._running))

    def _end(self, run: _Run) -> None:
        """Settle a job whose time has come."""
        job, counters = run.job, self._counters
        if isinstance(job, LoadJob):
            failed = [key for key in job.keys if key not in self._chunks]
            kind, done, num_done = "load", "loaded", len(job.keys) - len(failed)
        else:
            self._forget_storing(job)
            stored, failed = self._store(job.keys, run.trail)
            kind, done, num_done = "store", "stored", len(stored)
            if stored:
                event = OffloadingEvent(EventKind.STORED, stored, self._env.name)
                self._events.append(event)
        counters[f"{kind}_jobs"] += 1
        counters[f"failed_{kind}_chunks"] += len(failed)
        counters[f"{done}_chunks"] += num_done
        counters[f"{done}_bytes"] += num_done * self._chunk_bytes
        self._results.append(JobResult(job.job_id, frozenset(failed)))

    def _forget_storing(self, job: StoreJob) -> None:
        for key in job.keys:
            self._storing[key] -= 1
            if not self._storing[key]:
                del self._storing[key]

    def _store(
        self, keys: Sequence[OffloadKey], trail: Trail
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Take chunks in; return those that were not here, and those that found no room."""
        chunks, stored, failed = self._chunks, [], []
        for key in keys:
            if key in chunks:
                self._counters["present_chunks"] += 1
                continue
            if len(chunks) == self._capacity:
                victim = next((each for each in chunks if each not in trail), None)
                if victim is None:
                    failed.append(key)
                    continue
                self._remove([victim], RemovalReason.EVICTED)
            chunks[key] = trail[key] = None
            stored.append(key)
        self._counters["refused_chunks"] += len(failed)
        return stored, failed

    def _remove(self, keys: Iterable[OffloadKey], reason: RemovalReason) -> None:
        gone = [key for key in keys if key in self._chunks]
        for key in gone:
            del self._chunks[key]
        self._counters[f"{reason.value}_chunks"] += len(gone)
        if gone:
            removed = OffloadingEvent(EventKind.REMOVED, gone, self._env.name, reason)
            self._events.append(removed)

    def _use(self, trail: Trail) -> None:
        chunks = self._chunks
        for key in reversed(trail):
            if key in chunks:
                chunks.move_to_end(key)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._end_due()
        results, self._results = self._results, []
        return results

    @override
    def on_new_request(self, ctx: ReqContext) -> None:
        self._trails[ctx.req_id] = {}

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        self._use(self._trails.pop(ctx.req_id, {}))

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        trail = self._trails.get(ctx.req_id, {})
        earlier = list(trail)
        trail.clear()
        trail.update(dict.fromkeys([*keys, *earlier]))
        self._use(trail)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._end_due()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    @override
    def cancel(self, job_id: JobId) -> None:
        self._abandon([run for run in self._running if run.job.job_id == job_id])

    def _abandon(self, runs: list[_Run]) -> None:
        for run in runs:
            self._running.remove(run)
            if isinstance(run.job, StoreJob):
                self._forget_storing(run.job)
            self._results.append(JobResult(run.job.job_id, frozenset(run.job.keys)))
        heapq.heapify(self._running)

    @override
    def delete(self, keys: Collection[OffloadKey]) -> None:
        deleted, storing = set(keys), [r for r in self._running if isinstance(r.job, StoreJob)]
        self._abandon([run for run in storing if not deleted.isdisjoint(run.job.keys)])
        self._remove(keys, RemovalReason.DELETED)

    @override
    def drain_jobs(self, timeout_s: float) -> Collection[JobId]:
        """End all jobs as if their time had come: nobody waits for modelled bytes."""
        while self._running:
            self._end(heapq.heappop(self._running))
        return ()

    @override
    def reset(self) -> None:
        self._abandon(list(self._running))
        if self._chunks:
            cleared = OffloadingEvent(EventKind.CLEARED, (), self._env.name, RemovalReason.CLEARED)
            self._events.append(cleared)
        self._chunks.clear()

    @override
    def get_stats(self) -> Stats:
        num_chunks = len(self._chunks)
        return Stats(
            gauges={
                "num_resident": num_chunks,
                "num_jobs": len(self._running),
                "used_bytes": num_chunks * self._chunk_bytes,
                "max_bytes": self._capacity * self._chunk_bytes,
            },
            counters=dict(self._counters),
            state="closed" if self._is_closed else "ok",
        )

    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        if not self._is_closed:
            self.drain_jobs(timeout_s)
            self._is_closed = True
        return ()
