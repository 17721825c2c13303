"""The reference tier: it keeps chunks as bytes in this process; one thread copies them."""

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any, Self

import numpy as np
from typing_extensions import override

from kvstrata.core.errors import CorruptChunkError, TierClosedError
from kvstrata.core.events import OffloadingEvent, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.settings import parse_settings
from kvstrata.core.stats import Stats
from kvstrata.core.tier import DEFAULT_ENV, SecondaryTierManager, TierEnv
from kvstrata.tiers.chunk_format import NEVER_S, digest_namespace, encode_header, verify_chunk
from kvstrata.tiers.held_chunks import HeldChunk, HeldChunks
from kvstrata.tiers.jobs import Job, JobBook, Outcome
from kvstrata.tiers.memory_settings import MemorySettings
from kvstrata.tiers.recency import Trail, Trails

logger = logging.getLogger("kvstrata.memory")


@dataclass(slots=True, eq=False)
class _Work:
    """A job of which chunks are left to copy: those from `at` on, except `void` ones."""

    job: Job
    trail: Trail
    at: int = 0
    void: set[OffloadKey] = field(default_factory=set)

    def pending(self) -> set[OffloadKey]:
        return set(self.job.keys[self.at :]) - self.void


class MemoryTier(SecondaryTierManager):
    """Chunks in a dictionary, bounded, with expiry and eviction by recency.

    Jobs wait in two queues; the tier's thread copies their chunks one by one, loads first. It holds
    `_changed`, which guards everything, only between copies: no call waits for one.
    """

    def __init__(self, slots: SlotView, *, env: TierEnv = DEFAULT_ENV, **settings: Any) -> None:  # noqa: ANN401
        """Start empty. `settings` are those of `MemorySettings`."""
        parsed = parse_settings(MemorySettings, settings, env.path)
        self._max_bytes = parsed.capacity(slots.chunk_bytes, env.path) * slots.chunk_bytes
        self._slots = slots
        self._env = env
        self._digest = digest_namespace(env.namespace)
        self._changed = Condition()
        self._chunks = HeldChunks(self._max_bytes // slots.chunk_bytes, env.name, parsed.idle_s)
        self._trails = Trails()
        self._jobs = JobBook(slots.chunk_bytes)
        self._loads: deque[_Work] = deque()
        self._stores: deque[_Work] = deque()
        self._is_closed = False
        self._thread = Thread(target=self._work, name=f"kvstrata-{env.name}", daemon=True)
        self._thread.start()

    @classmethod
    @override
    def from_config(cls, slots: SlotView, settings: Mapping[str, Any], env: TierEnv) -> Self:
        return cls(slots, env=env, **settings)

    @classmethod
    @override
    def num_chunks_max(cls, settings: Mapping[str, Any], chunk_bytes: int, path: str) -> int | None:
        return parse_settings(MemorySettings, settings, path).capacity(chunk_bytes, path)

    @override
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        return self.lookup_many([key], ctx)[0]

    @override
    def lookup_many(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        with self._changed:
            self._chunks.expire(self._env.clock.wall_s())
            chunks = self._chunks
            found = [LookupResult.HIT if key in chunks else LookupResult.MISS for key in keys]
            coming = set[OffloadKey]().union(*[work.pending() for work in self._stores])
        if coming.isdisjoint(keys):
            return found
        return [
            LookupResult.HIT_PENDING if each is LookupResult.MISS and key in coming else each
            for key, each in zip(keys, found, strict=True)
        ]

    @override
    def submit_store(self, job: StoreJob) -> None:
        self._submit(job, self._stores)

    @override
    def submit_load(self, job: LoadJob) -> None:
        self._submit(job, self._loads)

    def _submit(self, job: Job, queue: deque[_Work]) -> None:
        with self._changed:
            if self._is_closed:
                raise TierClosedError(self._env.name, "is shut down")
            self._jobs.open(job, self._env.clock.now_s())
            if job.keys:
                queue.append(_Work(job, self._trails.of(job.req_context)))
                self._changed.notify_all()

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._changed:
            return self._jobs.take_results()

    @override
    def on_new_request(self, ctx: ReqContext) -> None:
        self._trails.start(ctx)

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        self._chunks.order.note_use(self._trails.of(ctx))
        self._trails.end(ctx)

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self._chunks.order.note_use(self._trails.of(ctx), keys, self._env.clock.wall_s())

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        with self._changed:
            self._chunks.expire(self._env.clock.wall_s())
            if self._chunks.order.is_behind:
                self._changed.notify_all()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        with self._changed:
            return self._chunks.events.take()

    @override
    def cancel(self, job_id: JobId) -> None:
        with self._changed:
            for work in (*self._loads, *self._stores):
                if work.job.job_id == job_id:
                    work.void.update(work.job.keys)

    @override
    def delete(self, keys: Collection[OffloadKey]) -> None:
        with self._changed:
            for work in self._stores:
                work.void.update(keys)
            self._chunks.remove(keys, RemovalReason.DELETED)

    @override
    def delete_prefix(self, prefix: bytes) -> None:
        with self._changed:
            storing = {key for work in self._stores for key in work.job.keys}
            self.delete([key for key in {*storing, *self._chunks} if key.startswith(prefix)])

    @override
    def drain_jobs(self, timeout_s: float) -> Collection[JobId]:
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs, timeout_s)
            return self._jobs.job_ids()

    @override
    def reset(self) -> None:
        with self._changed:
            self._void_all()
            self._chunks.clear()

    @override
    def get_stats(self) -> Stats:
        with self._changed:
            return Stats(
                gauges={
                    "num_resident": len(self._chunks),
                    "num_jobs": len(self._jobs),
                    "used_bytes": len(self._chunks) * self._slots.chunk_bytes,
                    "max_bytes": self._max_bytes,
                },
                counters={**self._jobs.counters, **self._chunks.counters()},
                jobs=self._jobs.snapshot(self._env.name, self._env.clock.now_s()),
                state="closed" if self._is_closed else "ok",
            )

    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        stuck = self.drain_jobs(timeout_s)
        with self._changed:
            self._void_all()
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()  # at most one copy away
        return stuck

    def check(self) -> None:
        """Assert every invariant."""
        with self._changed:
            self._chunks.check()
            queued = {work.job.job_id for work in (*self._loads, *self._stores)}
            assert queued == set(self._jobs.job_ids())

    # On the thread: the lock is held except while bytes move

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._loads or self._stores or self._chunks.order.is_behind):
                    if self._is_closed:
                        return
                    self._changed.wait()
                for _ in self._chunks.catch_up():
                    with self._unlocked():
                        pass  # whoever waits may go first
                queue = self._loads or self._stores
                if queue:
                    self._settle(queue[0], self._copy(queue[0]))
                    if queue[0].at == len(queue[0].job.keys):
                        queue.popleft()
                        self._changed.notify_all()

    def _copy(self, work: _Work) -> Outcome:
        """Copy the next chunk of a job."""
        key, slot = work.job.keys[work.at], work.job.slots[work.at]
        if key in work.void:
            return Outcome.FAILED
        try:
            if isinstance(work.job, StoreJob):
                expiries = work.job.expires_at_s
                return self._store(work, key, slot, expiries[work.at] if expiries else NEVER_S)
            return self._load(work, key, slot)
        except Exception:
            logger.exception("%s: a copy failed in a way that nobody expected", self._env.name)
            return Outcome.FAILED

    def _settle(self, work: _Work, outcome: Outcome) -> None:
        key = work.job.keys[work.at]
        work.at += 1
        expires_at_s = self._chunks.expires_at_s(key)
        self._jobs.settle(work.job.job_id, key, outcome, self._env.clock.now_s(), expires_at_s)

    def _load(self, work: _Work, key: OffloadKey, slot: int) -> Outcome:
        stored = self._chunks.get(key)
        if stored is None:
            return Outcome.FAILED
        try:
            with self._unlocked():
                row = self._slots[slot]
                _move(row, stored.payload)
                # What has arrived is checked, so that the copy itself is covered too.
                verify_chunk(stored.header, row, key, self._digest, self._env.name)
        except CorruptChunkError:
            self._chunks.remove([key], RemovalReason.CORRUPT)
            return Outcome.CORRUPT
        return Outcome.FAILED if key in work.void else Outcome.ARRIVED

    def _store(self, work: _Work, key: OffloadKey, slot: int, expires_at_s: float) -> Outcome:
        if key in self._chunks:
            return Outcome.PRESENT
        if not self._chunks.make_room(work.trail):
            return Outcome.REFUSED
        with self._unlocked():
            payload = np.empty(self._slots.chunk_bytes, np.uint8).data
            _move(payload, self._slots[slot])
            header = encode_header(key, payload, self._digest, expires_at_s)
        if key in work.void:
            return Outcome.FAILED
        chunk = HeldChunk(header, payload, expires_at_s)
        self._chunks.add(key, chunk, work.trail, self._env.clock.wall_s())
        return Outcome.ARRIVED

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    def _void_all(self) -> None:
        for work in (*self._loads, *self._stores):
            work.void.update(work.job.keys)


def _move(target: memoryview, source: memoryview) -> None:
    """Copy bytes without keeping other threads from running."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
