"""The reference tier: it keeps chunks as bytes in this process, and copies at the end of a step."""

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from typing_extensions import override

from kvstrata.core.errors import ConfigError, CorruptChunkError, TierClosedError
from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.settings import optional, parse_bytes, parse_count, parse_settings, setting
from kvstrata.core.stats import Stats
from kvstrata.core.tier import DEFAULT_ENV, SecondaryTierManager, TierEnv
from kvstrata.tiers.chunk_format import NEVER_S, digest_namespace, encode_header, verify_chunk
from kvstrata.tiers.jobs import Job, JobBook, Outcome
from kvstrata.tiers.recency import RecencyOrder, Trail, Trails

STEP_BYTES_MAX: Final = 8 * 2**20
"""What one step copies at most, one chunk apart: the scheduler waits for it."""


_COUNTED: Final = (RemovalReason.EVICTED, RemovalReason.EXPIRED, RemovalReason.DELETED)


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """How much the tier keeps; the tighter of the two bounds holds."""

    max_chunks: int = setting(parse_count(), 1024)
    max_bytes: int | None = setting(optional(parse_bytes), None)


class _Stored(NamedTuple):
    header: bytes
    payload: bytes
    expires_at_s: float


class _Copy(NamedTuple):
    job: Job
    key: OffloadKey
    slot: int
    expires_at_s: float
    trail: Trail


def _capacity(settings: MemorySettings, chunk_bytes: int, path: str) -> int:
    if settings.max_bytes is None:
        return settings.max_chunks
    if settings.max_bytes < chunk_bytes:
        raise ConfigError(
            f"{path}.max_bytes", f"{settings.max_bytes} holds no chunk of {chunk_bytes} bytes"
        )
    return min(settings.max_chunks, settings.max_bytes // chunk_bytes)


class MemoryTier(SecondaryTierManager):
    """Chunks in a dictionary, bounded, with expiry and eviction by recency.

    A job's chunks wait in a queue until `on_schedule_end` or `drain_jobs` copies them, loads first.
    """

    def __init__(self, slots: SlotView, *, env: TierEnv = DEFAULT_ENV, **settings: Any) -> None:  # noqa: ANN401
        """Start empty. `settings` are those of `MemorySettings`."""
        parsed = parse_settings(MemorySettings, settings, env.path)
        self._capacity = _capacity(parsed, slots.chunk_bytes, env.path)
        self._slots = slots
        self._env = env
        self._digest = digest_namespace(env.namespace)
        self._order = RecencyOrder()
        self._chunks: dict[OffloadKey, _Stored] = {}
        self._expiries: list[tuple[float, OffloadKey]] = []  # a heap; may name what has left
        self._trails = Trails()
        self._jobs = JobBook(slots.chunk_bytes)
        self._loads: deque[_Copy] = deque()
        self._stores: deque[_Copy] = deque()
        self._storing: Counter[OffloadKey] = Counter()  # queued stores by key
        self._events: list[OffloadingEvent] = []
        self._removed: Counter[RemovalReason] = Counter()
        self._is_closed = False

    @classmethod
    @override
    def from_config(cls, slots: SlotView, settings: Mapping[str, Any], env: TierEnv) -> Self:
        return cls(slots, env=env, **settings)

    @classmethod
    @override
    def num_chunks_max(cls, settings: Mapping[str, Any], chunk_bytes: int, path: str) -> int | None:
        return _capacity(parse_settings(MemorySettings, settings, path), chunk_bytes, path)

    @override
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        self._expire()
        if key in self._chunks:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if self._storing[key] else LookupResult.MISS

    @override
    def submit_store(self, job: StoreJob) -> None:
        expiries = job.expires_at_s or [NEVER_S] * len(job.keys)
        self._submit(job, self._stores, expiries)
        self._storing.update(job.keys)

    @override
    def submit_load(self, job: LoadJob) -> None:
        self._submit(job, self._loads, [NEVER_S] * len(job.keys))

    def _submit(self, job: Job, queue: deque[_Copy], expiries: Sequence[float]) -> None:
        if self._is_closed:
            raise TierClosedError(self._env.name, "is shut down")
        self._jobs.open(job, self._env.clock.now_s())
        trail = self._trails.of(job.req_context)
        queue.extend(
            _Copy(job, key, slot, expires_at_s, trail)
            for key, slot, expires_at_s in zip(job.keys, job.slots, expiries, strict=True)
        )

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return self._jobs.take_results()

    @override
    def on_new_request(self, ctx: ReqContext) -> None:
        self._trails.start(ctx)

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        self._order.use(self._trails.of(ctx))
        self._trails.end(ctx)

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self._order.use(self._trails.of(ctx), keys)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._expire()
        self._copy(STEP_BYTES_MAX)

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    @override
    def cancel(self, job_id: JobId) -> None:
        self._abandon([copy for copy in self._stores if copy.job.job_id == job_id])
        self._abandon([copy for copy in self._loads if copy.job.job_id == job_id])

    @override
    def delete(self, keys: Collection[OffloadKey]) -> None:
        self._abandon([copy for copy in self._stores if copy.key in keys])
        self._remove(keys, RemovalReason.DELETED)

    @override
    def drain_jobs(self, timeout_s: float) -> Collection[JobId]:
        deadline_s = self._env.clock.now_s() + timeout_s
        while (self._loads or self._stores) and self._env.clock.now_s() <= deadline_s:
            self._copy(STEP_BYTES_MAX)
        return self._jobs.job_ids()

    @override
    def reset(self) -> None:
        self._abandon([*self._loads, *self._stores])
        if self._chunks:
            cleared = OffloadingEvent(EventKind.CLEARED, (), self._env.name, RemovalReason.CLEARED)
            self._events.append(cleared)
        self._chunks.clear()
        self._order.clear()

    @override
    def get_stats(self) -> Stats:
        num_chunks = len(self._chunks)
        used_bytes = num_chunks * self._slots.chunk_bytes
        removed = {f"{why.value}_chunks": self._removed[why] for why in _COUNTED}
        return Stats(
            gauges={
                "num_resident": num_chunks,
                "num_jobs": len(self._jobs),
                "used_bytes": used_bytes,
                "max_bytes": self._capacity * self._slots.chunk_bytes,
            },
            counters={**self._jobs.counters, **removed},
            jobs=self._jobs.snapshot(self._env.name, self._env.clock.now_s()),
            state="closed" if self._is_closed else "ok",
        )

    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        stuck = self.drain_jobs(timeout_s)
        self._abandon([*self._loads, *self._stores])
        self._is_closed = True
        return stuck

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self._chunks) <= self._capacity
        assert all(key in self._order for key in self._chunks)
        assert len(self._order) == len(self._chunks)
        queued = {copy.job.job_id for copy in (*self._loads, *self._stores)}
        assert queued == set(self._jobs.job_ids())

    def _copy(self, bytes_max: int) -> None:
        """Run queued copies, loads first, until about `bytes_max` bytes have moved."""
        for _ in range(max(1, bytes_max // self._slots.chunk_bytes)):
            if self._loads:
                copy = self._loads.popleft()
                outcome = self._load(copy)
            elif self._stores:
                copy = self._stores.popleft()
                outcome = self._store(copy)
            else:
                return
            self._settle(copy, outcome)

    def _settle(self, copy: _Copy, outcome: Outcome) -> None:
        stored = self._chunks.get(copy.key)
        expires_at_s = NEVER_S if stored is None else stored.expires_at_s
        now_s = self._env.clock.now_s()
        self._jobs.settle(copy.job.job_id, copy.key, outcome, now_s, expires_at_s)
        if isinstance(copy.job, StoreJob):
            self._storing[copy.key] -= 1
            if not self._storing[copy.key]:
                del self._storing[copy.key]

    def _load(self, copy: _Copy) -> Outcome:
        stored = self._chunks.get(copy.key)
        if stored is None:
            return Outcome.FAILED
        self._slots[copy.slot][:] = stored.payload
        try:  # what has arrived is checked, so that the copy itself is covered too
            verify_chunk(
                stored.header, self._slots[copy.slot], copy.key, self._digest, self._env.name
            )
        except CorruptChunkError:
            self._remove([copy.key], RemovalReason.CORRUPT)
            return Outcome.CORRUPT
        return Outcome.ARRIVED

    def _store(self, copy: _Copy) -> Outcome:
        if copy.key in self._chunks:
            return Outcome.PRESENT
        if len(self._chunks) == self._capacity:
            victims = self._order.choose(1, copy.trail, lambda _key: True)
            if not victims:
                return Outcome.REFUSED
            self._remove(victims, RemovalReason.EVICTED)
        payload = bytes(self._slots[copy.slot])
        header = encode_header(copy.key, payload, self._digest, copy.expires_at_s)
        self._chunks[copy.key] = _Stored(header, payload, copy.expires_at_s)
        self._order.add(copy.trail, copy.key)
        heapq.heappush(self._expiries, (copy.expires_at_s, copy.key))
        self._events.append(OffloadingEvent(EventKind.STORED, (copy.key,), self._env.name))
        return Outcome.ARRIVED

    def _remove(self, keys: Iterable[OffloadKey], reason: RemovalReason) -> None:
        gone = [key for key in keys if self._chunks.pop(key, None)]
        self._order.remove(gone)
        self._removed[reason] += len(gone)
        if gone:
            removed = OffloadingEvent(EventKind.REMOVED, gone, self._env.name, reason)
            self._events.append(removed)

    def _expire(self) -> None:
        now_s = self._env.clock.wall_s()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, key = heapq.heappop(self._expiries)
            stored = self._chunks.get(key)
            if stored and stored.expires_at_s <= now_s:
                self._remove([key], RemovalReason.EXPIRED)

    def _abandon(self, copies: Iterable[_Copy]) -> None:
        for copy in copies:
            queue = self._stores if isinstance(copy.job, StoreJob) else self._loads
            queue.remove(copy)
            self._settle(copy, Outcome.FAILED)
