"""One secondary tier as the orchestrator sees it: its health, its speed, its jobs, its chunks."""

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from kvstrata.core.clock import Clock
from kvstrata.core.config import TierConfig, WritePolicy
from kvstrata.core.events import OffloadingEvent
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.stats import JobStats, Stats
from kvstrata.core.tier import SecondaryTierManager
from kvstrata.tiering.breaker import Breaker, BreakerState
from kvstrata.tiering.read_speed import ReadSpeed

if TYPE_CHECKING:
    from threading import Thread

logger = logging.getLogger("kvstrata.tiering")

T = TypeVar("T")

NUM_HIDDEN_MAX: Final = 65_536
NUM_HIDDEN_PREFIXES_MAX: Final = 256
NEVER_S: Final = float("inf")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A job that a tier has: what it copies, since when, and who gets the result."""

    job: StoreJob | LoadJob
    owner: Hashable
    since_s: float

    @property
    def kind(self) -> str:
        """The copy's direction, "store" or "load"."""
        return "store" if isinstance(self.job, StoreJob) else "load"


@dataclass(slots=True)
class TierCounters:
    """Totals since start, in chunks where the name does not say otherwise."""

    lookups: int = 0
    lookup_chunks: int = 0
    hit_chunks: int = 0
    stored_chunks: int = 0
    failed_store_chunks: int = 0
    dropped_store_chunks: int = 0
    retried_store_chunks: int = 0
    loaded_chunks: int = 0
    failed_load_chunks: int = 0
    corrupt_chunks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_jobs: int = 0
    load_jobs: int = 0
    unknown_results: int = 0
    errors: int = 0
    store_s: float = 0.0
    load_s: float = 0.0


class TierHandle:
    """Calls a tier so that nothing it does wrong leaves as an exception, and keeps count.

    Loads and stores have a breaker each: a tier that is full can still be read.

    Attributes:
        jobs: What it has not ended yet.
        abandoned: Jobs among them that an operator gave up; only their slots are still waited for.
        below: Resident chunks that the tier has or is getting. Kept by `Cascades`, as the next two.
        barred: Resident chunks that no request yet wants in this tier.
        caller: The thread that stops or drains the tier; while it runs, nobody else calls.
        behind: Resident chunks that it should get and has no room for now, in order, with the
            request on whose behalf; also those that are still being written.
    """

    def __init__(
        self, tier: SecondaryTierManager, config: TierConfig, chunk_bytes: int, clock: Clock
    ) -> None:
        """Take a tier; it is owned."""
        self.tier = tier
        self.config = config
        self.name = config.name
        self.jobs: dict[JobId, InFlight] = {}
        self.abandoned: set[JobId] = set()
        self.below: set[OffloadKey] = set()
        self.barred: set[OffloadKey] = set()
        self.behind: dict[OffloadKey, ReqContext | None] = {}
        self.caller: Thread | None = None
        self.counters = TierCounters()
        self.speed = ReadSpeed()
        self._chunk_bytes = chunk_bytes
        self._clock = clock
        self._num_storing = self._num_loading = 0
        self._hidden: dict[OffloadKey, float] = {}  # not to be asked for, until when
        self._hidden_prefixes: tuple[bytes, ...] = ()
        self._must_reset = False
        self._stuck: set[JobId] | None = None  # what a tier that has stopped could not end
        self._own_stats = Stats()
        limits = config.num_failures_max, config.cooldown_s, clock
        self._loads = Breaker(f"tier {self.name}, loads", *limits)
        self._stores = Breaker(f"tier {self.name}, stores", *limits)

    @property
    def wants_stores(self) -> bool:
        """Whether any chunk is ever to go into this tier."""
        return self.tier.accepts_stores and self.config.write is not WritePolicy.NEVER

    @property
    def has_open_jobs(self) -> bool:
        """Whether the tier has jobs that somebody waits for."""
        return len(self.jobs) > len(self.abandoned)

    def can_load(self) -> bool:
        """Say whether the tier may be asked now."""
        return not self._must_reset and self._loads.lets_through()

    def room_for_stores(self) -> int:
        """Return how many chunks may be submitted for storing now."""
        if self._must_reset or not self._stores.lets_through():
            return 0
        return max(0, self.config.num_queued_chunks_max - self._num_storing)

    def _call(self, call: Callable[[], T], otherwise: T, breaker: Breaker | None = None) -> T:
        """Call into the tier; whatever it raises is counted and logged, never passed on."""
        try:
            return call()
        except Exception as error:
            breaker = breaker or self._loads
            # One line where it begins; the breaker tells what becomes of it.
            level = logging.WARNING if breaker.state is BreakerState.OK else logging.DEBUG
            logger.log(level, "tier %s: %s: %s", self.name, type(error).__name__, error)
            self.counters.errors += 1
            breaker.note_failed_call(error)
            return otherwise

    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[LookupResult]:
        """Ask for many keys; a tier that can't answer has none of them."""

        def call() -> list[LookupResult]:
            answers = list(self.tier.lookup_many(keys, ctx))
            if len(answers) != len(keys):
                raise ValueError(f"lookup_many gave {len(answers)} answers for {len(keys)} keys")
            self._loads.note_answer()
            return answers

        answers = self._call(call, [LookupResult.MISS] * len(keys))
        if self._hidden and not self._hidden.keys().isdisjoint(keys):
            now_s = self._clock.now_s()
            answers = [
                LookupResult.MISS if self._hidden.get(key, 0.0) > now_s else answer
                for key, answer in zip(keys, answers, strict=True)
            ]
        if self._hidden_prefixes:
            answers = [
                LookupResult.MISS if key.startswith(self._hidden_prefixes) else answer
                for key, answer in zip(keys, answers, strict=True)
            ]
        self.counters.lookups += 1
        self.counters.lookup_chunks += len(keys)
        self.counters.hit_chunks += answers.count(LookupResult.HIT)
        return answers

    def submit_store(self, job: StoreJob, owner: Hashable) -> bool:
        """Start a store; False where the tier did not take it."""
        is_taken = self._submit(job, owner, lambda: self.tier.submit_store(job), self._stores)
        if is_taken:
            self._num_storing += len(job.keys)
            for key in job.keys if self._hidden else ():
                self._hidden.pop(key, None)
        return is_taken

    def submit_load(self, job: LoadJob, owner: Hashable) -> bool:
        """Start a load; False where the tier did not take it."""
        if not self.can_load():  # another job is the probe
            return False
        is_taken = self._submit(job, owner, lambda: self.tier.submit_load(job), self._loads)
        self._num_loading += len(job.keys) if is_taken else 0
        return is_taken

    def _submit(
        self,
        job: StoreJob | LoadJob,
        owner: Hashable,
        submit: Callable[[], None],
        breaker: Breaker,
    ) -> bool:
        # Known before it starts, so that a result can't come for a job that nobody knows.
        self.jobs[job.job_id] = InFlight(job, owner, self._clock.now_s())
        breaker.note_try()

        def call() -> bool:
            submit()
            return True

        is_taken = self._call(call, otherwise=False, breaker=breaker)
        if not is_taken:
            del self.jobs[job.job_id]
        return is_taken

    def take_finished(self) -> list[tuple[InFlight, JobResult]]:
        """Return the jobs that ended, each with its one result; others' results are ignored.

        Once the tier has stopped, what it neither answered nor called stuck ends as failed.
        """
        if self.caller is not None and self.caller.is_alive():
            return []
        results: list[JobResult] = []
        self._call(lambda: results.extend(self.tier.get_finished_jobs()), None)
        if self._stuck is not None:
            answered = {result.job_id for result in results}
            results += [
                JobResult(job_id, frozenset(in_flight.job.keys))
                for job_id, in_flight in self.jobs.items()
                if job_id not in self._stuck and job_id not in answered
            ]
        ended = []
        for result in results:
            in_flight = self.jobs.get(result.job_id)
            if in_flight is None:
                self.counters.unknown_results += 1
            else:
                ended.append(self._end(in_flight, result))
        return ended

    def _end(self, in_flight: InFlight, result: JobResult) -> tuple[InFlight, JobResult]:
        job = in_flight.job
        del self.jobs[job.job_id]
        self.abandoned.discard(job.job_id)
        if result.failed and not result.failed.issubset(job.keys):
            self.counters.errors += 1
            result = JobResult(job.job_id, result.failed.intersection(job.keys), result.corrupt)
        self._account(in_flight, result)
        return in_flight, result

    def _account(self, in_flight: InFlight, result: JobResult) -> None:
        counters, num_chunks = self.counters, len(in_flight.job.keys)
        num_failed = len(result.failed)
        num_bytes = (num_chunks - num_failed) * self._chunk_bytes
        now_s = self._clock.now_s()
        took_s = now_s - in_flight.since_s
        counters.corrupt_chunks += len(result.corrupt)
        if isinstance(in_flight.job, StoreJob):
            breaker = self._stores
            self._num_storing -= num_chunks
            counters.store_jobs += 1
            counters.store_s += took_s
            counters.stored_chunks += num_chunks - num_failed
            counters.stored_bytes += num_bytes
            counters.failed_store_chunks += num_failed
        else:
            breaker = self._loads
            self._num_loading -= num_chunks
            counters.load_jobs += 1
            counters.load_s += took_s
            counters.loaded_chunks += num_chunks - num_failed
            counters.loaded_bytes += num_bytes
            counters.failed_load_chunks += num_failed
            self._hide(result.failed, now_s + self.config.cooldown_s)
            if num_bytes and took_s > 0:
                self.speed.learn(num_bytes, took_s, now_s)
        if num_failed < num_chunks or result.corrupt:
            breaker.note_success()
        else:
            breaker.note_failure(f"{in_flight.kind} of {num_chunks} chunks")

    def _hide(self, keys: Collection[OffloadKey], until_s: float) -> None:
        """Do not ask for chunks before that time or before they have been stored again."""
        for key in keys:
            until_s = max(until_s, self._hidden.pop(key, 0.0))
            self._hidden[key] = until_s
        while len(self._hidden) > NUM_HIDDEN_MAX:
            del self._hidden[next(iter(self._hidden))]

    def expected_load_s(self, num_chunks: int) -> float | None:
        """Return how long loading so many chunks takes from now, queue included; None: unknown."""
        num_bytes = (num_chunks + self._num_loading) * self._chunk_bytes
        return self.speed.expected_s(num_bytes, self._clock.now_s())

    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Note one use."""
        self._call(lambda: self.tier.touch(keys, ctx), None)

    def on_new_request(self, ctx: ReqContext) -> None:
        """Tell the tier of a new request."""
        self._call(lambda: self.tier.on_new_request(ctx), None)

    def on_request_finished(self, ctx: ReqContext) -> None:
        """Tell the tier that a request ended."""
        self._call(lambda: self.tier.on_request_finished(ctx), None)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Let the tier start what it deferred."""
        if self._must_reset:
            self.reset()
        self._call(lambda: self.tier.on_schedule_end(context), None)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the tier's events."""
        if self.caller is not None and self.caller.is_alive():
            return []
        return self._call(lambda: list(self.tier.take_events()), [])

    def cancel(self, job_id: JobId) -> None:
        """Ask the tier to give up on a job; its result still follows."""
        self._call(lambda: self.tier.cancel(job_id), None)

    def delete(self, keys: Collection[OffloadKey]) -> None:
        """Remove chunks; in a tier that can't, they get hidden instead, within a bound."""
        try:
            self.tier.delete(keys)
        except Exception as error:
            logger.warning("tier %s: hides what it can't delete: %s", self.name, error)
            self._hide(keys, NEVER_S)

    def delete_prefix(self, prefix: bytes) -> None:
        """Remove all chunks with such keys; a tier that can't is never asked for them again."""
        try:
            self.tier.delete_prefix(prefix)
        except Exception as error:
            logger.warning("tier %s: hides what it can't delete: %s", self.name, error)
            self._hidden_prefixes += (prefix,) if prefix not in self._hidden_prefixes else ()
            if len(self._hidden_prefixes) > NUM_HIDDEN_PREFIXES_MAX:
                self.reset()

    def reset(self) -> None:
        """Forget every chunk; a tier that can't is neither read nor written until it can."""

        def call() -> bool:
            self.tier.reset()
            return False

        self._must_reset = self._call(call, otherwise=True)
        self._hidden.clear()
        self._hidden_prefixes = ()

    def drain(self, timeout_s: float) -> None:
        """Wait for the jobs in flight."""
        self._call(lambda: self.tier.drain_jobs(timeout_s), None)

    def shutdown(self, timeout_s: float) -> None:
        """Stop the tier."""
        self._stuck = self._call(lambda: set(self.tier.shutdown(timeout_s)), set(self.jobs))

    def get_stats(self) -> Stats:
        """Return the tier's own snapshot with the orchestrator's counters beside it. Thread: any.

        `state` says "read_only" while stores are skipped, "open" or "probing" while loads are.
        """
        try:
            self._own_stats = self.tier.get_stats()
        except Exception as error:
            logger.warning("tier %s: no statistics: %s", self.name, error)
        own, now_s = self._own_stats, self._clock.now_s()
        counters = {name: getattr(self.counters, name) for name in TierCounters.__slots__}
        counters["times_opened"] = self._loads.num_opened + self._stores.num_opened
        return Stats(
            gauges={
                **own.gauges,
                "num_jobs": len(self.jobs),
                "num_storing": self._num_storing,
                "num_queued_chunks_max": self.config.num_queued_chunks_max,
                "num_behind": len(self.behind),
                "num_hidden": len(self._hidden),
                "num_hidden_max": NUM_HIDDEN_MAX,
                "read_bytes_per_s": self.speed.bytes_per_s,
                "read_latency_s": self.speed.latency_s,
            },
            counters={**counters, **own.counters},
            jobs=[self._job_stats(item, now_s) for item in list(self.jobs.values())],
            notes=own.notes if self.tier.accepts_stores else {**own.notes, "stores": "none"},
            state=self._state(own.state),
        )

    def _job_stats(self, item: InFlight, now_s: float) -> JobStats:
        ctx, job = item.job.req_context, item.job
        req_id = ctx.req_id if ctx else None
        age_s = now_s - item.since_s
        return JobStats(job.job_id, item.kind, self.name, len(job.keys), age_s, req_id)

    def _state(self, own: str) -> str:
        if self._loads.state is not BreakerState.OK:
            return str(self._loads.state.value)
        if own == "ok" and self._stores.state is not BreakerState.OK:
            return "read_only"
        return own
