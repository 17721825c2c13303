"""One secondary tier as the orchestrator sees it: its health, its speed, its jobs."""

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

from kvstrata.core.clock import Clock
from kvstrata.core.config import TierConfig, WritePolicy
from kvstrata.core.errors import TierError
from kvstrata.core.events import OffloadingEvent
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.stats import JobStats, Stats
from kvstrata.core.tier import SecondaryTierManager

logger = logging.getLogger("kvstrata.tiering")

T = TypeVar("T")

NUM_HIDDEN_MAX: Final = 65_536
RATE_WEIGHT: Final = 0.2  # of the newest job, in the averages of rate and latency


class Health(Enum):
    """Whether a tier is used: `OPEN` skips it, `PROBING` lets one job through to see."""

    OK = "ok"
    OPEN = "open"
    PROBING = "probing"


@dataclass(frozen=True, slots=True)
class InFlight:
    """A job that a tier has: what it copies, for whom, since when, and who gets the result."""

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
    errors: int = 0
    times_opened: int = 0
    store_s: float = 0.0
    load_s: float = 0.0


class TierHandle:
    """Calls a tier so that nothing it does wrong leaves as an exception, and keeps count.

    `bit` identifies the tier in masks of tiers.
    """

    def __init__(
        self, tier: SecondaryTierManager, config: TierConfig, bit: int, clock: Clock
    ) -> None:
        """Take a tier; it is owned."""
        self.tier = tier
        self.config = config
        self.name = config.name
        self.bit = bit
        self.jobs: dict[JobId, InFlight] = {}
        self.num_storing = 0
        self.counters = TierCounters()
        self.bytes_per_s: float | None = None
        self.latency_s: float | None = None
        self.hidden: dict[OffloadKey, None] = {}  # deleted, in a tier that can't delete
        self._clock = clock
        self._health = Health.OK
        self._num_failures = 0
        self._open_until_s = 0.0

    @property
    def wants_stores(self) -> bool:
        """Whether any chunk is ever to go into this tier."""
        return self.config.write is not WritePolicy.NEVER

    def is_usable(self) -> bool:
        """Say whether the tier may be asked; after its rest, one probe at a time."""
        if self._health is Health.OK:
            return True
        if self._health is Health.OPEN and self._clock.now_s() >= self._open_until_s:
            self._health = Health.PROBING
            logger.info("tier %s: trying again", self.name)
        return self._health is Health.PROBING and not self.jobs

    def _succeeded(self) -> None:
        if self._health is not Health.OK:
            logger.info("tier %s: works again", self.name)
        self._health = Health.OK
        self._num_failures = 0

    def _failed(self, why: object) -> None:
        self._num_failures += 1
        is_probe = self._health is Health.PROBING
        if is_probe or self._num_failures >= self.config.num_failures_max:
            self._open_until_s = self._clock.now_s() + self.config.cooldown_s
            if self._health is Health.OK:
                self.counters.times_opened += 1
                logger.warning(
                    "tier %s: skipped for %.1f s after %d failures in a row: %s",
                    self.name,
                    self.config.cooldown_s,
                    self._num_failures,
                    why,
                )
            self._health = Health.OPEN

    def _call(self, call: Callable[[], T], otherwise: T) -> T:
        """Call into the tier; whatever it raises is counted and logged, never passed on."""
        try:
            return call()
        except Exception as error:
            self.counters.errors += 1
            logger.warning("tier %s: %s: %s", self.name, type(error).__name__, error)
            self._failed(error)
            return otherwise

    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        """Ask for many keys; a tier that can't answer has none of them."""
        misses: Sequence[LookupResult] = [LookupResult.MISS] * len(keys)
        answers = self._call(lambda: self.tier.lookup_many(keys, ctx), misses)
        if self.hidden:
            answers = [
                LookupResult.MISS if key in self.hidden else answer
                for key, answer in zip(keys, answers, strict=True)
            ]
        self.counters.lookups += 1
        self.counters.lookup_chunks += len(keys)
        self.counters.hit_chunks += list(answers).count(LookupResult.HIT)
        return answers

    def submit_store(self, job: StoreJob, owner: Hashable) -> bool:
        """Start a store; False where the tier did not take it."""
        return self._submit(job, owner, lambda: self.tier.submit_store(job))

    def submit_load(self, job: LoadJob, owner: Hashable) -> bool:
        """Start a load; False where the tier did not take it."""
        return self._submit(job, owner, lambda: self.tier.submit_load(job))

    def _submit(self, job: StoreJob | LoadJob, owner: Hashable, submit: Callable[[], None]) -> bool:
        # Known before it starts, so that a result can't come for a job that nobody knows.
        self.jobs[job.job_id] = InFlight(job, owner, self._clock.now_s())

        def call() -> bool:
            submit()
            return True

        is_taken = self._call(call, otherwise=False)
        if not is_taken:
            del self.jobs[job.job_id]
        elif isinstance(job, StoreJob):
            self.num_storing += len(job.keys)
            for key in job.keys if self.hidden else ():
                self.hidden.pop(key, None)
        return is_taken

    def take_finished(self, chunk_bytes: int) -> list[tuple[InFlight, JobResult]]:
        """Return the jobs that ended, each with its one result; others' results are ignored."""
        ended = []
        results: Iterable[JobResult] = self._call(lambda: list(self.tier.get_finished_jobs()), [])
        for result in results:
            in_flight = self.jobs.pop(result.job_id, None)
            if in_flight is None:
                self.counters.errors += 1
                continue
            self._account(in_flight, result, chunk_bytes)
            ended.append((in_flight, result))
        return ended

    def _account(self, in_flight: InFlight, result: JobResult, chunk_bytes: int) -> None:
        counters, num_chunks = self.counters, len(in_flight.job.keys)
        num_failed = len(result.failed)
        num_bytes = (num_chunks - num_failed) * chunk_bytes
        took_s = self._clock.now_s() - in_flight.since_s
        counters.corrupt_chunks += len(result.corrupt)
        if isinstance(in_flight.job, StoreJob):
            self.num_storing -= num_chunks
            counters.store_jobs += 1
            counters.store_s += took_s
            counters.stored_chunks += num_chunks - num_failed
            counters.stored_bytes += num_bytes
            counters.failed_store_chunks += num_failed
        else:
            counters.load_jobs += 1
            counters.load_s += took_s
            counters.loaded_chunks += num_chunks - num_failed
            counters.loaded_bytes += num_bytes
            counters.failed_load_chunks += num_failed
            if num_bytes and took_s > 0:
                self._learn(num_bytes, took_s)
        if num_failed < num_chunks or result.corrupt:
            self._succeeded()
        elif num_chunks:
            self._failed(f"{in_flight.kind} of {num_chunks} chunks")

    def _learn(self, num_bytes: int, took_s: float) -> None:
        """Update the averages that `expected_load_s` uses."""
        rate = num_bytes / took_s
        if self.bytes_per_s is None or self.latency_s is None:
            self.bytes_per_s, self.latency_s = rate, took_s
            return
        self.bytes_per_s += RATE_WEIGHT * (rate - self.bytes_per_s)
        self.latency_s += RATE_WEIGHT * (took_s - self.latency_s)

    def expected_load_s(self, num_bytes: int) -> float | None:
        """Return how long so many bytes would take from now, queue included; None if unknown."""
        if self.bytes_per_s is None:
            return None
        return num_bytes / self.bytes_per_s

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
        self._call(lambda: self.tier.on_schedule_end(context), None)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the tier's events."""
        return self._call(lambda: list(self.tier.take_events()), [])

    def delete(self, keys: Collection[OffloadKey]) -> None:
        """Remove chunks; a tier that can't gets them hidden instead, within a bound."""
        try:
            self.tier.delete(keys)
        except (NotImplementedError, TierError) as error:
            logger.warning("tier %s: hides what it can't delete: %s", self.name, error)
            self.hidden.update(dict.fromkeys(keys))
            while len(self.hidden) > NUM_HIDDEN_MAX:
                del self.hidden[next(iter(self.hidden))]

    def reset(self) -> None:
        """Forget every chunk."""
        self._call(self.tier.reset, None)

    def drain(self, timeout_s: float) -> Collection[JobId]:
        """Wait for the jobs in flight; return those that are still there."""
        return self._call(lambda: self.tier.drain_jobs(timeout_s), list(self.jobs))

    def shutdown(self, timeout_s: float) -> Collection[JobId]:
        """Stop the tier; return the jobs that could not be ended."""
        return self._call(lambda: self.tier.shutdown(timeout_s), list(self.jobs))

    def get_stats(self) -> Stats:
        """Return the tier's own snapshot with the orchestrator's counters beside it."""
        own = self._call(self.tier.get_stats, Stats(state="error"))
        now_s = self._clock.now_s()
        counters = self.counters
        names = TierCounters.__dataclass_fields__
        return Stats(
            gauges={
                **own.gauges,
                "num_jobs": len(self.jobs),
                "num_storing": self.num_storing,
                "num_queued_chunks_max": self.config.num_queued_chunks_max,
                "read_bytes_per_s": self.bytes_per_s or 0.0,
                "read_latency_s": self.latency_s or 0.0,
            },
            counters={**{name: getattr(counters, name) for name in names}, **own.counters},
            jobs=[
                JobStats(
                    job_id,
                    item.kind,
                    self.name,
                    len(item.job.keys),
                    now_s - item.since_s,
                    item.job.req_context.req_id if item.job.req_context else None,
                )
                for job_id, item in list(self.jobs.items())
            ],
            state=own.state if self._health is Health.OK else self._health.value,
        )
