"""What every secondary tier has to keep, also one that only reads what others hold."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvstrata.core.errors import TierClosedError
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LookupResult
from kvstrata.core.tier import SecondaryTierManager
from kvstrata.testing.chunks import FakeRegion, pattern, poison
from kvstrata.testing.clock import FakeClock
from kvstrata.testing.tier_calls import (
    IDLE_STEP,
    PATIENCE_S,
    A,
    B,
    C,
    D,
    E,
    load,
    look_up,
    returns,
    store,
    submit_load,
    submit_store,
    wait_for,
)


class ReadingTierSuite:
    """What holds for every tier, also for one that only reads what others hold.

    Override `make_tier` and, in a tier that does not store, `stock`. Give the tier `self.clock`
    where it takes a clock. Where the backend can be made to wait, override `held` as well.
    """

    chunk_bytes: int = 5_000  # not a multiple of anything
    num_slots: int = 8
    clock: FakeClock

    def make_tier(self, slots: SlotView, tmp_path: Path) -> SecondaryTierManager:
        """Return the tier, empty, working on these slots."""
        raise NotImplementedError

    def stock(
        self, tier: SecondaryTierManager, slots: SlotView, chunks: Mapping[OffloadKey, int]
    ) -> None:
        """Bring each key's bytes from its slot to where the tier finds them."""
        assert store(tier, -1, chunks).failed == frozenset()

    def held(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        """Return a context in which the backend answers nothing, neither copies nor probes."""
        pytest.skip("the suite is not told how to hold this tier's backend")

    @pytest.fixture(autouse=True)
    def _clock(self) -> None:
        self.clock = FakeClock()

    def make_slots(self) -> SlotView:
        """Return slots 0 to 3 with the bytes of A, B, C and D, and poisoned ones after them."""
        slots = FakeRegion(self.num_slots, self.chunk_bytes)
        for i, key in enumerate((A, B, C, D)):
            slots[i][:] = pattern(key, self.chunk_bytes)
        return slots

    @pytest.fixture
    def slots(self) -> SlotView:
        return self.make_slots()

    @pytest.fixture
    def tier(self, slots: SlotView, tmp_path: Path) -> Iterator[SecondaryTierManager]:
        tier = self.make_tier(slots, tmp_path)
        yield tier
        tier.shutdown(PATIENCE_S)

    def bytes_of(self, key: OffloadKey) -> bytes:
        return pattern(key, self.chunk_bytes)

    def test_load_brings_back_the_stored_bytes(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        self.stock(tier, slots, {A: 0, B: 1})
        poison(slots.row(0))
        poison(slots.row(1))
        assert load(tier, 1, {B: 5, A: 6}).failed == frozenset()
        assert slots[5] == self.bytes_of(B)
        assert slots[6] == self.bytes_of(A)

    def test_load_writes_no_other_slot(self, tier: SecondaryTierManager, slots: SlotView) -> None:
        # Field report A09.
        self.stock(tier, slots, {A: 0})
        for i in range(self.num_slots):
            poison(slots.row(i))
        poisoned = bytes(slots[0])
        assert load(tier, 1, {A: 5}).failed == frozenset()
        assert all(slots[i] == poisoned for i in range(self.num_slots) if i != 5)

    def test_an_unknown_chunk_is_a_miss(self, tier: SecondaryTierManager) -> None:
        assert look_up(tier, E) is LookupResult.MISS

    def test_a_chunk_that_is_here_becomes_a_hit(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        self.stock(tier, slots, {A: 0})
        assert look_up(tier, A) is LookupResult.HIT
        assert look_up(tier, E) is LookupResult.MISS

    def test_lookup_of_many_agrees_with_lookup_of_each(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        self.stock(tier, slots, {A: 0, B: 1})
        keys = (A, E, B, A)
        expected = [look_up(tier, key) for key in keys]
        assert list(tier.lookup_many(keys, ReqContext("many"))) == expected
        assert list(tier.lookup_many((), ReqContext("many"))) == []

    def test_partly_missing_load_fails_only_the_missing(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        # Field report A05.
        self.stock(tier, slots, {A: 0, C: 2})
        assert load(tier, 1, {A: 4, E: 5, C: 6}).failed == {E}
        assert slots[4] == self.bytes_of(A)
        assert slots[6] == self.bytes_of(C)

    def test_every_job_has_exactly_one_result(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        self.stock(tier, slots, {A: 0, B: 1})
        for job_id in range(1, 7):
            submit_load(tier, job_id, {(A, B, E)[job_id % 3]: 4 + job_id % 4})
        results = wait_for(tier, *range(1, 7))
        assert all((results[i].failed == {E}) == (i % 3 == 2) for i in results)
        for _ in range(3):
            tier.on_schedule_end(IDLE_STEP)
            assert list(tier.get_finished_jobs()) == []

    def test_a_job_outlives_its_request(self, tier: SecondaryTierManager, slots: SlotView) -> None:
        self.stock(tier, slots, {A: 0})
        ctx = ReqContext("short-lived")
        tier.on_new_request(ctx)
        submit_load(tier, 1, {A: 5}, ctx)
        tier.on_request_finished(ctx)
        assert wait_for(tier, 1)[1].failed == frozenset()
        assert slots[5] == self.bytes_of(A)

    def test_a_cancelled_job_has_its_one_result(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        self.stock(tier, slots, {A: 0})
        submit_load(tier, 1, {A: 5})
        tier.cancel(JobId(1))
        tier.cancel(JobId(99))
        result = wait_for(tier, 1)[1]
        assert result.failed <= {A}
        assert result.failed or slots[5] == self.bytes_of(A)

    def test_notes_about_unknown_chunks_and_requests_are_harmless(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        self.stock(tier, slots, {A: 0})
        tier.touch((E, A), ReqContext("stranger"))
        tier.on_request_finished(ReqContext("stranger"))
        tier.on_schedule_end(ScheduleEndContext(("stranger",), ("stranger",)))
        assert load(tier, 1, {A: 5}).failed == frozenset()

    def test_drain_waits_for_every_job_and_keeps_its_result(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        self.stock(tier, slots, {A: 0})
        for job_id in (1, 2, 3):
            submit_load(tier, job_id, {A: 3 + job_id})
        assert list(tier.drain_jobs(PATIENCE_S)) == []
        results = sorted(tier.get_finished_jobs(), key=lambda result: result.job_id)
        assert [result.job_id for result in results] == [1, 2, 3]
        assert all(slots[i] == self.bytes_of(A) for i in (4, 5, 6))
        assert list(tier.drain_jobs(PATIENCE_S)) == []

    def test_shutdown_leaves_a_result_for_every_job(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        self.stock(tier, slots, {A: 0, B: 1})
        for job_id in range(1, 5):
            submit_load(tier, job_id, {A: 4, B: 5} if job_id == 1 else {A: 4 + job_id % 4})
        stuck = tier.shutdown(PATIENCE_S)
        assert set(stuck) <= {1, 2, 3, 4}
        results = [result.job_id for result in tier.get_finished_jobs()]
        assert sorted(results) == [1, 2, 3, 4]

    def test_after_shutdown_jobs_are_refused(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        assert list(tier.shutdown(PATIENCE_S)) == []
        assert list(tier.shutdown(PATIENCE_S)) == []
        with pytest.raises(TierClosedError):
            submit_load(tier, 1, {A: 5})
        with pytest.raises(TierClosedError):
            submit_store(tier, 2, {A: 0})
        assert list(tier.get_finished_jobs()) == []

    def test_loads_are_counted_where_they_went(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        # Field report K02.
        if "loaded_chunks" not in tier.get_stats().counters:
            pytest.skip("the tier counts nothing")
        self.stock(tier, slots, {A: 0, B: 1, C: 2})
        before = tier.get_stats()
        load(tier, 1, {A: 4, B: 5, C: 6})
        load(tier, 2, {E: 7})
        after = tier.get_stats()
        assert after["loaded_chunks"] - before["loaded_chunks"] == 3
        assert after["loaded_bytes"] - before["loaded_bytes"] == 3 * self.chunk_bytes
        assert after["failed_load_chunks"] - before["failed_load_chunks"] == 1
        assert after["num_jobs"] == 0

    def test_no_call_waits_for_the_backend(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        self.stock(tier, slots, {A: 0})
        ctx = ReqContext("impatient")
        with self.held(tier):
            for call in (
                lambda: submit_load(tier, 1, {A: 5}, ctx),
                lambda: tier.lookup_many((E, A), ctx),
                lambda: tier.on_schedule_end(IDLE_STEP),
                lambda: tier.lookup(E, ctx),
                lambda: tier.touch((A,), ctx),
                tier.get_finished_jobs,
                tier.take_events,
                tier.get_stats,
                lambda: tier.cancel(JobId(99)),
                lambda: tier.on_request_finished(ctx),
            ):
                assert returns(call), f"{call} waits"
            assert list(tier.get_finished_jobs()) == []
            assert list(tier.drain_jobs(0.0)) == [1]
        assert wait_for(tier, 1)[1].failed == frozenset()
        assert slots[5] == self.bytes_of(A)
