"""Shows that the tier suite notices tiers which break a promise."""

import inspect
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvstrata.core.errors import TierClosedError
from kvstrata.core.events import EventKind, OffloadingEvent
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.stats import Stats
from kvstrata.testing import FakeClock, FakeTier, SecondaryTierSuite


class WritesAgain(FakeTier):
    @override
    def submit_store(self, job: StoreJob) -> None:
        for key in job.keys:
            self.backend.chunks.pop(key, None)
        super().submit_store(job)


class ServesOther(FakeTier):
    @override
    def submit_load(self, job: LoadJob) -> None:
        super().submit_load(LoadJob(job.job_id, job.keys, job.slots[::-1]))


class WritesBeside(FakeTier):
    @override
    def submit_load(self, job: LoadJob) -> None:
        self._slots[job.slots[0] - 1][:1] = b"x"
        super().submit_load(job)


class FailsAllTogether(FakeTier):
    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        for result in super().get_finished_jobs():
            job = next(job for job in self.backend.jobs if job.job_id == result.job_id)
            yield JobResult(result.job_id, frozenset(job.keys) if result.failed else frozenset())


class ReportsTwice(FakeTier):
    last: Sequence[JobResult] = ()

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        again, self.last = self.last, results
        return [*results, *again]


class RemembersMisses(FakeTier):
    @override
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        missed = self.__dict__.setdefault("missed", set())
        answer = super().lookup(key, ctx)
        if answer is LookupResult.MISS:
            missed.add(key)
        return LookupResult.MISS if key in missed else answer


class SaysHitToAll(FakeTier):
    @override
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        return LookupResult.HIT


class NeverExpires(FakeTier):
    @override
    def submit_store(self, job: StoreJob) -> None:
        super().submit_store(StoreJob(job.job_id, job.keys, job.slots))


class DeletesNothing(FakeTier):
    @override
    def delete(self, keys: Collection[OffloadKey]) -> None:
        pass


class ResetsOnlyWhatIsThere(FakeTier):
    @override
    def reset(self) -> None:
        self.backend.chunks.clear()


class ForgetsJobsAtShutdown(FakeTier):
    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        self._queue.clear()
        return super().shutdown(timeout_s)


class StaysOpen(FakeTier):
    @override
    def submit_store(self, job: StoreJob) -> None:
        try:
            super().submit_store(job)
        except TierClosedError:
            self._fail(job)


class AnnouncesAttempts(FakeTier):
    @override
    def submit_store(self, job: StoreJob) -> None:
        super().submit_store(job)
        self._events.append(OffloadingEvent(EventKind.STORED, job.keys, self.name))


class CountsPresentAsStored(FakeTier):
    @override
    def get_stats(self) -> Stats:
        stats = super().get_stats()
        stored = stats["stored_chunks"] + stats["present_chunks"]
        return Stats(stats.gauges, {**stats.counters, "stored_chunks": stored})


BROKEN: list[tuple[type[FakeTier], str]] = [
    (WritesAgain, "test_a_present_chunk_is_not_written_again_and_counts_as_stored"),
    (ServesOther, "test_load_brings_back_the_stored_bytes"),
    (WritesBeside, "test_load_writes_no_other_slot"),
    (FailsAllTogether, "test_partly_missing_load_fails_only_the_missing"),
    (ReportsTwice, "test_every_job_has_exactly_one_result"),
    (RemembersMisses, "test_a_miss_is_not_remembered_once_the_chunk_was_stored"),
    (SaysHitToAll, "test_an_unknown_chunk_is_a_miss"),
    (SaysHitToAll, "test_a_chunk_that_is_here_becomes_a_hit"),
    (NeverExpires, "test_an_expired_chunk_is_never_served"),
    (DeletesNothing, "test_delete_removes_those_chunks_at_once_and_no_others"),
    (ResetsOnlyWhatIsThere, "test_jobs_in_flight_at_a_reset_end_and_leave_nothing"),
    (ForgetsJobsAtShutdown, "test_shutdown_leaves_a_result_for_every_job"),
    (StaysOpen, "test_after_shutdown_jobs_are_refused"),
    (AnnouncesAttempts, "test_events_tell_what_happened_and_nothing_else"),
    (CountsPresentAsStored, "test_stores_are_counted_where_they_went"),
]


def run(tier_class: type[FakeTier], test: str, tmp_path: Path) -> None:
    class Suite(SecondaryTierSuite):
        @override
        def make_tier(self, slots: SlotView, tmp_path: Path) -> FakeTier:
            return tier_class(slots, clock=self.clock)

    suite = Suite()
    suite.clock = FakeClock()
    slots = suite.make_slots()
    fixtures = {"tier": suite.make_tier(slots, tmp_path), "slots": slots}
    check: Any = getattr(suite, test)
    check(**{name: fixtures[name] for name in inspect.signature(check).parameters})


@pytest.mark.parametrize(
    ("tier_class", "test"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_the_suite_notices(tier_class: type[FakeTier], test: str, tmp_path: Path) -> None:
    run(FakeTier, test, tmp_path)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(tier_class, test, tmp_path)
