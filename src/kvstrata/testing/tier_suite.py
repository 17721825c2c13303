"""What a secondary tier has to keep that stores and loads: the promises of `core.tier` as tests."""

import random
from math import inf

import pytest

from kvstrata.core.events import EventKind, OffloadingEvent
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, LookupResult
from kvstrata.core.tier import SecondaryTierManager
from kvstrata.testing.chunks import poison
from kvstrata.testing.reading_tier_suite import ReadingTierSuite
from kvstrata.testing.tier_calls import (
    IDLE_STEP,
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


class SecondaryTierSuite(ReadingTierSuite):
    """All that a tier promises which stores and loads."""

    def test_store_fails_nothing_and_leaves_the_slots_alone(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        assert store(tier, 1, {A: 0, B: 1}) == JobResult(JobId(1))
        assert slots[0] == self.bytes_of(A)
        assert slots[1] == self.bytes_of(B)

    def test_a_present_chunk_is_not_written_again_and_counts_as_stored(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        # Field report K03.
        store(tier, 1, {A: 0})
        poison(slots.row(0))
        assert store(tier, 2, {A: 0}).failed == frozenset()
        assert load(tier, 3, {A: 5}).failed == frozenset()
        assert slots[5] == self.bytes_of(A)

    def test_two_stores_of_one_chunk_at_once_both_succeed(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        slots[4][:] = slots[0]
        submit_store(tier, 1, {A: 0, B: 1})
        submit_store(tier, 2, {A: 4, C: 2})
        results = wait_for(tier, 1, 2)
        assert not results[1].failed
        assert not results[2].failed
        assert load(tier, 3, {A: 5, B: 6, C: 7}).failed == frozenset()
        assert [slots[i] == self.bytes_of(key) for i, key in ((5, A), (6, B), (7, C))] == [True] * 3

    def test_a_stored_chunk_can_be_loaded_while_its_request_ends(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        ctx = ReqContext("short-lived")
        tier.on_new_request(ctx)
        submit_store(tier, 1, {A: 0}, ctx=ctx)
        tier.on_request_finished(ctx)
        assert wait_for(tier, 1)[1].failed == frozenset()
        assert look_up(tier, A) is LookupResult.HIT

    def test_a_miss_is_not_remembered_once_the_chunk_was_stored(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        # Field report H06.
        assert look_up(tier, A) is LookupResult.MISS
        store(tier, 1, {A: 0})
        assert look_up(tier, A) is LookupResult.HIT

    def test_delete_removes_those_chunks_at_once_and_no_others(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        store(tier, 1, {A: 0, B: 1})
        try:
            tier.delete((A, E))
        except NotImplementedError:
            pytest.skip("the tier does not delete single chunks")
        assert look_up(tier, A) is LookupResult.MISS
        assert look_up(tier, B) is LookupResult.HIT
        assert load(tier, 2, {A: 5, B: 6}).failed == {A}
        assert store(tier, 3, {A: 0}).failed == frozenset()
        assert look_up(tier, A) is LookupResult.HIT

    def test_delete_by_prefix_removes_those_chunks_at_once_and_no_others(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        # Field report L07: all chunks of a tenant, also those on their way.
        if type(tier).delete_prefix is SecondaryTierManager.delete_prefix:
            pytest.skip("the tier does not delete by prefix")
        one, two, other = (OffloadKey(tag + key) for tag, key in ((b"1", A), (b"1", B), (b"2", A)))
        store(tier, 1, {one: 0, two: 1, other: 2})
        expected = bytes(slots[2])
        tier.delete_prefix(b"1")
        assert look_up(tier, one) is look_up(tier, two) is LookupResult.MISS
        assert look_up(tier, other) is LookupResult.HIT
        assert load(tier, 2, {one: 5, two: 6, other: 7}).failed == {one, two}
        assert slots[7] == expected
        assert store(tier, 3, {one: 0}).failed == frozenset()
        assert look_up(tier, one) is LookupResult.HIT

    def test_reset_forgets_every_chunk(self, tier: SecondaryTierManager, slots: SlotView) -> None:
        store(tier, 1, {A: 0, B: 1})
        tier.reset()
        assert look_up(tier, A) is LookupResult.MISS
        assert load(tier, 2, {A: 5, B: 6}).failed == {A, B}
        assert store(tier, 3, {A: 0}).failed == frozenset()
        assert load(tier, 4, {A: 5}).failed == frozenset()
        assert slots[5] == self.bytes_of(A)

    def test_jobs_in_flight_at_a_reset_end_and_leave_nothing(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        store(tier, 1, {A: 0})
        submit_store(tier, 2, {B: 1, C: 2})
        submit_load(tier, 3, {A: 5})
        tier.reset()
        results = wait_for(tier, 2, 3)
        assert results[3].failed or slots[5] == self.bytes_of(A)
        assert [look_up(tier, key) for key in (A, B, C)] == [LookupResult.MISS] * 3

    def test_an_expired_chunk_is_never_served(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        store(tier, 1, {A: 0, B: 1}, expires_at_s=(1.0, inf))
        assert look_up(tier, A) is LookupResult.MISS
        assert load(tier, 2, {A: 5, B: 6}).failed == {A}

    def test_a_chunk_leaves_when_its_time_has_come(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        at_s = self.clock.wall_s() + 60.0
        num_reads = self.clock.num_reads
        store(tier, 1, {A: 0, B: 1}, expires_at_s=(at_s, inf))
        assert look_up(tier, A) is LookupResult.HIT
        if self.clock.num_reads == num_reads:
            pytest.skip("the tier does not use the suite's clock")
        self.clock.advance(59.0)
        assert load(tier, 2, {A: 5}).failed == frozenset()
        self.clock.advance(2.0)
        assert look_up(tier, A) is LookupResult.MISS
        assert load(tier, 3, {A: 5, B: 6}).failed == {A}

    def test_events_tell_what_happened_and_nothing_else(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        # Field report J02.
        if type(tier).take_events is SecondaryTierManager.take_events:
            pytest.skip("the tier reports no events")

        def happened() -> list[tuple[EventKind, OffloadKey]]:
            events: list[OffloadingEvent] = list(tier.take_events())
            assert all((e.reason is None) == (e.kind is EventKind.STORED) for e in events)
            return [(event.kind, key) for event in events for key in event.keys]

        submit_store(tier, 1, {A: 0, B: 1})
        wait_for(tier, 1)
        assert sorted(happened(), key=str) == sorted(
            [(EventKind.STORED, A), (EventKind.STORED, B)], key=str
        )
        store(tier, 2, {A: 0})
        load(tier, 3, {A: 5, E: 6})
        assert happened() == []
        tier.reset()
        wait_for(tier)
        assert EventKind.STORED not in {kind for kind, _ in happened()}

    def test_stores_are_counted_where_they_went(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        if "stored_chunks" not in tier.get_stats().counters:
            pytest.skip("the tier counts nothing")
        store(tier, 1, {A: 0, B: 1})
        store(tier, 2, {B: 1, C: 2})
        stats = tier.get_stats()
        assert stats["stored_chunks"] == 3
        assert stats["stored_bytes"] == 3 * self.chunk_bytes
        assert stats["present_chunks"] == 1
        assert stats["failed_store_chunks"] == 0
        assert stats["num_resident"] == 3

    def test_no_store_waits_for_the_backend(
        self, tier: SecondaryTierManager, slots: SlotView
    ) -> None:
        with self.held(tier):
            assert returns(lambda: submit_store(tier, 1, {A: 0, B: 1}))
            assert returns(lambda: tier.on_schedule_end(IDLE_STEP))
            assert returns(lambda: tier.lookup(A, ReqContext("impatient")))
            assert list(tier.get_finished_jobs()) == []
            assert list(tier.take_events()) == []
        assert wait_for(tier, 1)[1].failed == frozenset()

    @pytest.mark.parametrize("seed", range(3))
    def test_no_order_of_jobs_brings_wrong_bytes(
        self, tier: SecondaryTierManager, slots: SlotView, seed: int
    ) -> None:
        rng = random.Random(seed)
        stored: set[OffloadKey] = set()
        for job_id in range(0, 120, 2):
            keys = rng.sample((A, B, C, D), rng.randint(1, 3))
            if rng.random() < 0.5:
                submit_store(tier, job_id, {key: (A, B, C, D).index(key) for key in keys})
                stored |= set(keys) - wait_for(tier, job_id)[job_id].failed
            for slot in range(4, 8):
                poison(slots.row(slot))
            wanted = dict(zip(rng.sample((A, B, C, D, E), 4), range(4, 8), strict=True))
            result = load(tier, job_id + 1, wanted)
            assert result.failed == set(wanted) - stored
            for key in set(wanted) - result.failed:
                assert slots[wanted[key]] == self.bytes_of(key)
