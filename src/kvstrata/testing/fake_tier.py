"""A secondary tier in memory that copies for real and misbehaves on demand."""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, Final, Self

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.errors import TierClosedError
from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.settings import check_known
from kvstrata.core.stats import JobStats, Stats
from kvstrata.core.tier import SecondaryTierManager, TierEnv
from kvstrata.testing.clock import FakeClock

Job = StoreJob | LoadJob


class _EveryKey(Container[OffloadKey]):
    @override
    def __contains__(self, key: object) -> bool:
        return True


EVERY_KEY: Final[Container[OffloadKey]] = _EveryKey()
"""What a switch is set to when it is to hold for all keys."""

NO_KEY: Final[Container[OffloadKey]] = frozenset()


@dataclass(slots=True)
class FakeBackend:
    """What is behind a `FakeTier`: its chunks, its switches, and a record of what was asked.

    It outlives the tier: give it to a second one to play a restart or a shared store. Every switch
    may be turned at any time.

    Attributes:
        hold: No copy starts; jobs wait.
        delay_s: Copies start this long after their job was submitted.
        lookup_delay_s: A number: keys are answered with RETRY until that long after the end of the
            step in which they were asked for. None: answered at once.
        hold_lookups: Keys are answered with RETRY.
        fail_stores: Chunks whose store fails; nothing of them is kept.
        fail_loads: Chunks whose load fails; no byte is copied.
        short: Chunks of which half is copied, either way; reported as failed.
        corrupt: Chunks that are found damaged when they are loaded: wrong bytes land in the slot,
            the key is reported as failed and corrupt, and the chunk is removed.
        lie: Chunks that lookups call a HIT whether they are here or not.
        error: Raised by every request-scoped call while it is set, which a tier must never do.
        is_persistent: What the tier says of itself.
        chunks: What is stored, by key.
        expires_at_s: When chunks have to be gone, in seconds since 1970.
        calls: Calls by name of method.
        probes: Keys of each batch of probes.
        jobs: Jobs in the order in which they were submitted.
        stored: Chunks copied in, in order. loaded: Chunks copied out, in order.
        contexts: What each end of a step was told.
    """

    hold: bool = False
    delay_s: float = 0.0
    lookup_delay_s: float | None = None
    hold_lookups: bool = False
    fail_stores: Container[OffloadKey] = NO_KEY
    fail_loads: Container[OffloadKey] = NO_KEY
    short: Container[OffloadKey] = NO_KEY
    corrupt: Container[OffloadKey] = NO_KEY
    lie: Container[OffloadKey] = NO_KEY
    error: Exception | None = None
    is_persistent: bool = False
    chunks: dict[OffloadKey, bytes] = field(default_factory=dict)
    expires_at_s: dict[OffloadKey, float] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    probes: list[frozenset[OffloadKey]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    stored: list[OffloadKey] = field(default_factory=list)
    loaded: list[OffloadKey] = field(default_factory=list)
    contexts: list[ScheduleEndContext] = field(default_factory=list)


class FakeTier(SecondaryTierManager):
    """A tier whose copies run when it is polled, at the end of a step, or when it is drained.

    It has no threads: what happens depends on the calls, the clock and `backend` only. In a
    configuration it is `{"type": "kvstrata.testing:FakeTier", "backend": backend}`, or with
    switches by name, such as `"hold": True`.
    """

    def __init__(
        self,
        slots: SlotView,
        *,
        backend: FakeBackend | None = None,
        name: str = "fake",
        clock: Clock | None = None,
    ) -> None:
        self.backend = FakeBackend() if backend is None else backend
        self.is_persistent = self.backend.is_persistent
        self.name = name
        self._slots = slots
        self._clock = FakeClock() if clock is None else clock
        self._queue: dict[JobId, tuple[Job, float]] = {}
        self._finished: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._asked: dict[OffloadKey, None] = {}
        self._known_at_s: dict[OffloadKey, float] = {}
        self._counters: Counter[str] = Counter()
        self._is_closed = False

    @classmethod
    @override
    def from_config(cls, slots: SlotView, settings: Mapping[str, Any], env: TierEnv) -> Self:
        switches = [item.name for item in fields(FakeBackend)]
        check_known(settings, ["backend", *switches], env.path)
        settings = dict(settings)
        backend = settings.pop("backend", None) or FakeBackend()
        for name, value in settings.items():
            setattr(backend, name, value)
        return cls(slots, backend=backend, name=env.name, clock=env.clock)

    @override
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        self._note("lookup")
        if key in self.backend.lie:
            return LookupResult.HIT
        if self.backend.hold_lookups or not self._is_known(key):
            self._asked[key] = None
            return LookupResult.RETRY
        return LookupResult.HIT if self._has(key) else LookupResult.MISS

    @override
    def lookup_many(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        self._note("lookup_many")
        return [self.lookup(key, ctx) for key in keys]

    @override
    def submit_store(self, job: StoreJob) -> None:
        self._submit("submit_store", job)

    @override
    def submit_load(self, job: LoadJob) -> None:
        self._submit("submit_load", job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self.backend.calls["get_finished_jobs"] += 1
        self._run_due()
        finished, self._finished = self._finished, []
        return finished

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self._note("touch")

    @override
    def on_new_request(self, ctx: ReqContext) -> None:
        self._note("on_new_request")

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        self._note("on_request_finished")

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._note("on_schedule_end")
        self.backend.contexts.append(context)
        delay_s = self.backend.lookup_delay_s
        if self._asked and not self.backend.hold_lookups and delay_s is not None:
            self.backend.probes.append(frozenset(self._asked))
            known_at_s = self._clock.now_s() + delay_s
            self._known_at_s |= dict.fromkeys(self._asked, known_at_s)
            self._asked = {}
        self._run_due()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    @override
    def cancel(self, job_id: JobId) -> None:
        self.backend.calls["cancel"] += 1
        if job_id in self._queue:
            self._fail(self._queue.pop(job_id)[0])

    @override
    def delete(self, keys: Collection[OffloadKey]) -> None:
        self._note("delete")
        for key in keys:
            self._remove(key, RemovalReason.DELETED)

    @override
    def delete_prefix(self, prefix: bytes) -> None:
        self._note("delete_prefix")
        for key in [key for key in self.backend.chunks if key.startswith(prefix)]:
            self._remove(key, RemovalReason.DELETED)

    @override
    def drain_jobs(self, timeout_s: float) -> Collection[JobId]:
        self.backend.calls["drain_jobs"] += 1
        self._run_due()
        return list(self._queue)

    @override
    def reset(self) -> None:
        self.backend.calls["reset"] += 1
        for job_id in list(self._queue):
            self._fail(self._queue.pop(job_id)[0])
        if self.backend.chunks:
            self._events.append(
                OffloadingEvent(EventKind.CLEARED, (), self.name, RemovalReason.CLEARED)
            )
        self.backend.chunks.clear()
        self.backend.expires_at_s.clear()

    @override
    def get_stats(self) -> Stats:
        names = {"stored": 0, "present": 0, "failed_store": 0, "loaded": 0, "failed_load": 0}
        names |= {"corrupt": 0, "expired": 0, "deleted": 0}
        counters = {f"{name}_chunks": self._counters[name] for name in names}
        for name in ("stored", "loaded"):
            counters[f"{name}_bytes"] = self._counters[name] * self._slots.chunk_bytes
        now_s = self._clock.now_s()
        return Stats(
            gauges={
                "num_resident": len(self.backend.chunks),
                "used_bytes": sum(map(len, self.backend.chunks.values())),
                "num_jobs": len(self._queue),
            },
            counters=counters,
            jobs=tuple(self._job_stats(*queued, now_s) for queued in self._queue.values()),
            state="closed" if self._is_closed else "ok",
        )

    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        self.backend.calls["shutdown"] += 1
        self._run_due()
        stuck = list(self._queue)
        for job_id in stuck:
            self._fail(self._queue.pop(job_id)[0])
        self._is_closed = True
        return stuck

    def _job_stats(self, job: Job, submitted_s: float, now_s: float) -> JobStats:
        kind = "store" if isinstance(job, StoreJob) else "load"
        req_id = job.req_context.req_id if job.req_context else None
        return JobStats(job.job_id, kind, self.name, len(job.keys), now_s - submitted_s, req_id)

    def _note(self, call: str) -> None:
        self.backend.calls[call] += 1
        if self.backend.error is not None:
            raise self.backend.error

    def _submit(self, call: str, job: Job) -> None:
        self._note(call)
        if self._is_closed:
            raise TierClosedError(self.name, "is shut down")
        assert len(job.keys) == len(job.slots), "each key has its slot"
        assert job.job_id not in self._queue, f"job {job.job_id} is in flight already"
        self.backend.jobs.append(job)
        self._queue[job.job_id] = (job, self._clock.now_s())

    def _run_due(self) -> None:
        if self.backend.hold:
            return
        started_s = self._clock.now_s() - self.backend.delay_s
        for job_id, (job, submitted_s) in list(self._queue.items()):
            if submitted_s <= started_s:
                del self._queue[job_id]
                if isinstance(job, StoreJob):
                    self._run_store(job)
                else:
                    self._run_load(job)

    def _run_store(self, job: StoreJob) -> None:
        failed = set()
        for i, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            if self._has(key):
                self._counters["present"] += 1
            elif key in self.backend.fail_stores or key in self.backend.short:
                failed.add(key)
            else:
                self.backend.chunks[key] = bytes(self._slots[slot])
                if job.expires_at_s is not None and job.expires_at_s[i] < inf:
                    self.backend.expires_at_s[key] = job.expires_at_s[i]
                self.backend.stored.append(key)
                self._known_at_s[key] = -inf
                self._counters["stored"] += 1
                self._events.append(OffloadingEvent(EventKind.STORED, (key,), self.name))
        self._finish(job, failed)

    def _run_load(self, job: LoadJob) -> None:
        failed, corrupt = set(), set()
        for key, slot in zip(job.keys, job.slots, strict=True):
            if not self._has(key) or key in self.backend.fail_loads:
                failed.add(key)
                continue
            payload = self.backend.chunks[key]
            if key in self.backend.short:
                half = len(payload) // 2
                self._slots[slot][:half] = payload[:half]
                failed.add(key)
            elif key in self.backend.corrupt:
                self._slots[slot][:] = bytes(byte ^ 0xFF for byte in payload)
                corrupt.add(key)
                self._remove(key, RemovalReason.CORRUPT)
            else:
                self._slots[slot][:] = payload
                self.backend.loaded.append(key)
                self._counters["loaded"] += 1
        lasts = self.backend.expires_at_s
        expiries = {key: lasts[key] for key in job.keys if key in lasts}
        self._finish(job, failed | corrupt, corrupt, expiries)

    def _finish(
        self,
        job: Job,
        failed: set[OffloadKey],
        corrupt: Collection[OffloadKey] = (),
        expires_at_s: Mapping[OffloadKey, float] | None = None,
    ) -> None:
        kind = "failed_store" if isinstance(job, StoreJob) else "failed_load"
        self._counters[kind] += len(failed)
        self._finished.append(
            JobResult(job.job_id, frozenset(failed), frozenset(corrupt), expires_at_s or {})
        )

    def _fail(self, job: Job) -> None:
        self._finish(job, set(job.keys))

    def _is_known(self, key: OffloadKey) -> bool:
        if self.backend.lookup_delay_s is None:
            return True
        return self._known_at_s.get(key, inf) <= self._clock.now_s()

    def _has(self, key: OffloadKey) -> bool:
        if self.backend.expires_at_s.get(key, inf) <= self._clock.wall_s():
            self._remove(key, RemovalReason.EXPIRED)
        return key in self.backend.chunks

    def _remove(self, key: OffloadKey, reason: RemovalReason) -> None:
        self.backend.expires_at_s.pop(key, None)
        if self.backend.chunks.pop(key, None) is not None:
            self._counters[reason.value] += 1
            self._events.append(OffloadingEvent(EventKind.REMOVED, (key,), self.name, reason))
