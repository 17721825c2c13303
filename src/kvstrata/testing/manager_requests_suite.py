"""What every manager has to keep about requests: ends, preemption, hints, numbers, events."""

import random
from typing import TYPE_CHECKING

import pytest

from kvstrata.core.errors import ContractError
from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.metrics import PRIMARY_METRICS
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.testing.chunks import chain
from kvstrata.testing.manager_base import (
    CHUNK_BYTES,
    HOUR_S,
    NUM_CHUNKS,
    ManagerSuiteBase,
    assert_idle,
    assert_usable,
    keys_of,
    primary_events,
)
from kvstrata.testing.manager_calls import (
    begin_store,
    end_step,
    finish,
    load,
    look_up,
    start,
    store,
    verify,
)

if TYPE_CHECKING:
    from kvstrata.core.keys import OffloadKey

ABC = chain("abc")
ABCD = chain("abcd")


class ManagerRequestsSuite(ManagerSuiteBase):
    """Requests, steps, hints, numbers and events."""

    def test_a_live_request_cannot_start_again(self, manager: OffloadingManager) -> None:
        ctx = start(manager, "r")
        store(manager, ABC, ctx)
        with pytest.raises(ContractError):
            manager.on_new_request(ReqContext("r"))
        load(manager, ABC, ctx)
        finish(manager, ctx)
        finish(manager, start(manager, "r"))
        assert_idle(manager)

    def test_a_request_that_was_never_scheduled_leaves_nothing(
        self, manager: OffloadingManager
    ) -> None:
        # Field report B03.
        ctx = start(manager, "r")
        assert look_up(manager, ABC, ctx) == 0
        manager.on_request_finished(ctx)
        manager.on_request_finished(ctx)
        manager.on_request_finished(ReqContext("stranger"))
        end_step(manager, preempted=["stranger", "r"], new=["stranger", "r"])
        assert_idle(manager)
        assert_usable(manager)

    def test_lookups_without_loads_pin_nothing(self, manager: OffloadingManager) -> None:
        # Field report B08.
        writer = start(manager, "writer")
        store(manager, ABCD, writer)
        finish(manager, writer)
        for number in range(300):
            ctx = start(manager, f"r{number}", tenant="t") if number % 3 else start(manager, "r")
            look_up(manager, ABCD, ctx)
            manager.touch(ABCD, ctx)
            finish(manager, ctx)
        assert_idle(manager)
        assert look_up(manager, ABCD, writer) == 4

    def test_copies_outlive_their_request_and_end_once(self, manager: OffloadingManager) -> None:
        # Field report B12.
        ctx = start(manager, "r")
        store(manager, ABC, ctx)
        manager.prepare_load(ABC, ctx)
        writing = begin_store(manager, ABCD, ctx)
        manager.on_request_finished(ctx)
        assert manager.has_pending_work()
        assert manager.get_stats()["num_requests"] == 1
        manager.complete_load(ABC, ctx)
        manager.complete_store(writing, ctx)
        end_step(manager)
        assert_idle(manager)
        late = manager.get_stats()["late_completions"]
        manager.complete_load(ABC, ctx)
        manager.complete_store(writing, ctx)
        manager.complete_store(chain("xyz"), ReqContext("forgotten"), failed=set(chain("xyz")))
        assert manager.get_stats()["late_completions"] == late + 3
        assert_idle(manager)
        assert look_up(manager, ABCD, start(manager, "other")) == 4

    def test_a_finished_request_may_still_offer_its_last_chunk(
        self, manager: OffloadingManager
    ) -> None:
        # Field report B04.
        ctx = start(manager, "r")
        store(manager, ABC, ctx)
        finish(manager, ctx)
        taken = begin_store(manager, ABCD, ctx)
        if taken:
            manager.complete_store(taken, ctx)
        end_step(manager)
        assert_idle(manager)
        assert look_up(manager, ABCD, start(manager, "other")) == 3 + len(taken)

    def test_an_id_can_be_used_again_while_old_copies_run(self, manager: OffloadingManager) -> None:
        old = start(manager, "r")
        writing = begin_store(manager, ABC, old)
        manager.on_request_finished(old)
        new = start(manager, "r")
        assert look_up(manager, ABC[:0], new) == 0
        manager.complete_store(writing, old)
        assert look_up(manager, ABC, new) == 3
        load(manager, ABC, new)
        finish(manager, new)
        assert_idle(manager)

    def test_reset_forgets_chunks_and_protection(self, manager: OffloadingManager) -> None:
        # Field report L04 and J07.
        ctx = start(manager, "r")
        store(manager, ABCD, ctx)
        end_step(manager, preempted=["r"])
        primary_events(manager)
        manager.reset_cache()
        assert [event.kind for event in primary_events(manager)] == [EventKind.CLEARED]
        stats = manager.get_stats()
        assert (stats["num_resident"], stats["num_protected"]) == (0, 0)
        assert stats["num_free"] == NUM_CHUNKS
        assert manager.lookup(ABCD, ctx) == 0
        assert list(manager.lookup_states(ABCD, ctx)) == [LookupResult.MISS] * 4
        finish(manager, ctx)
        assert_usable(manager)

    def test_store_false_keeps_a_request_out(self, manager: OffloadingManager) -> None:
        ctx = ReqContext("private", {"kvstrata": {"store": False}})
        assert manager.on_new_request(ctx).store is False
        assert store(manager, ABC, ctx) == []
        other = start(manager, "other")
        assert look_up(manager, ABC, other) == 0
        assert store(manager, ABC, other) == ABC
        assert look_up(manager, ABC, ctx) == 3
        load(manager, ABC, ctx)

    def test_ttl_ends_a_chunk(self, manager: OffloadingManager) -> None:
        ctx, other = start(manager, "short", ttl_s=60), start(manager, "long")
        store(manager, ABC, ctx)
        store(manager, chain("xy"), other)
        primary_events(manager)
        self.clock.advance(59.0)
        assert look_up(manager, ABC, other) == 3
        self.clock.advance(2.0)
        assert look_up(manager, ABC, other) == 0
        end_step(manager)
        events = primary_events(manager)
        assert sorted(keys_of(events, EventKind.REMOVED)) == sorted(ABC)
        assert {event.reason for event in events} == {RemovalReason.EXPIRED}
        assert look_up(manager, chain("xy"), other) == 2
        assert store(manager, ABC, other) == ABC
        self.clock.advance(HOUR_S)
        end_step(manager)
        assert look_up(manager, ABC, other) == 3

    def test_ttl_does_not_disturb_a_load(self, manager: OffloadingManager) -> None:
        ctx = start(manager, "short", ttl_s=60)
        store(manager, ABC, ctx)
        spec = manager.prepare_load(ABC, ctx)
        self.clock.advance(61.0)
        end_step(manager)
        self.flood(manager, "0123456789")
        verify(manager, ABC, spec.slots)
        manager.complete_load(ABC, ctx)
        finish(manager, ctx)
        assert_idle(manager)

    def test_a_deleted_chunk_that_a_load_still_reads_does_not_expire_once_more(
        self, manager: OffloadingManager
    ) -> None:
        ctx = start(manager, "short", ttl_s=60)
        store(manager, ABC, ctx)
        manager.prepare_load(ABC, ctx)
        manager.delete(ABC, ctx)
        self.clock.advance(61.0)
        end_step(manager)
        manager.complete_load(ABC, ctx)
        finish(manager, ctx)
        assert_idle(manager)
        assert manager.get_stats()["expired_chunks"] == 0

    def test_high_priority_outlives_a_flood(self, manager: OffloadingManager) -> None:
        ctx = start(manager, "important", priority=90)
        store(manager, ABCD, ctx)
        finish(manager, ctx)
        self.flood(manager, "0123456789")
        assert look_up(manager, ABCD, start(manager, "reader")) == 4

    def test_retention_ranges_hold_for_their_tokens(self, manager: OffloadingManager) -> None:
        ctx = start(manager, "r", retention=[{"start": 0, "end": 2, "priority": 90, "ttl_s": 600}])
        store(manager, ABCD, ctx)
        finish(manager, ctx)
        for letter in "01234567":
            other = start(manager, f"other {letter}")
            store(manager, chain(letter), other)
            finish(manager, other)
        reader = start(manager, "reader")
        assert look_up(manager, ABCD[:2], reader) == 2
        self.clock.advance(601.0)
        assert look_up(manager, ABCD, reader) == 0

    def test_bad_hints_are_counted_and_harm_nothing(self, manager: OffloadingManager) -> None:
        before = manager.get_stats()["hint_errors"]
        ctx = start(manager, "r", priorty=90, ttl_s=-1, priority="high", store="no")
        assert manager.get_stats()["hint_errors"] == before + 4
        assert store(manager, ABC, ctx) == ABC
        load(manager, ABC, ctx)

    def test_load_limit_zero_loads_nothing(self, manager: OffloadingManager) -> None:
        store(manager, ABC, start(manager, "writer"))
        ctx = ReqContext("r", {"kvstrata": {"max_load_tokens": 0}})
        assert manager.on_new_request(ctx).load is False
        assert look_up(manager, ABC, ctx) == 0

    def test_asking_for_states_events_and_stats_changes_nothing(
        self, manager: OffloadingManager
    ) -> None:
        ctx = start(manager, "r", ttl_s=60)
        store(manager, ABC, ctx)
        end_step(manager)
        self.clock.advance(61.0)
        list(manager.take_events())
        before = manager.get_stats()
        assert list(manager.lookup_states(chain("abcx"), ctx)) == [LookupResult.MISS] * 4
        assert list(manager.take_events()) == []
        after = manager.get_stats()
        assert (before.gauges, before.counters) == (after.gauges, after.counters)

    def test_events_follow_what_happened(self, manager: OffloadingManager) -> None:
        # Field report J02, J03 and J08.
        ctx = start(manager, "r")
        begin_store(manager, ABC, ctx)
        assert primary_events(manager) == []
        manager.complete_store(ABC, ctx, failed={ABC[1]})
        assert keys_of(primary_events(manager), EventKind.STORED) == [ABC[0], ABC[2]]
        store(manager, [ABC[0]], ctx)
        manager.prepare_load([ABC[0]], ctx)
        manager.complete_load([ABC[0]], ctx, failed={ABC[0]})
        assert primary_events(manager) == []
        manager.delete([ABC[2]], ctx)
        events = primary_events(manager)
        assert keys_of(events, EventKind.REMOVED) == [ABC[2]]
        assert [event.reason for event in events] == [RemovalReason.DELETED]
        finish(manager, ctx)
        taken = self.flood(manager, "0123456789")
        events = primary_events(manager)
        assert keys_of(events, EventKind.STORED) == taken
        reasons = {event.reason for event in events if event.kind is EventKind.REMOVED}
        assert reasons <= {RemovalReason.EVICTED, RemovalReason.DEMOTED}
        if len(taken) > NUM_CHUNKS - 1:
            assert ABC[0] in keys_of(events, EventKind.REMOVED)

    def test_gauges_say_what_is_where(self, manager: OffloadingManager) -> None:
        # Field report K01.
        ctx = start(manager, "r")
        keys = chain("abcdef")
        store(manager, keys, ctx)
        names = ("num_slots", "num_resident", "num_pinned", "num_free", "num_evictable")
        stats = manager.get_stats()
        assert [stats[name] for name in names] == [NUM_CHUNKS, 6, 0, 2, 6]
        manager.prepare_load(keys[:2], ctx)
        begin_store(manager, chain("x"), ctx)
        busy = manager.get_stats()
        assert [busy[name] for name in names] == [NUM_CHUNKS, 6, 2, 1, 4]
        assert busy["num_writing"] == 1
        assert [stats[name] for name in names] == [NUM_CHUNKS, 6, 0, 2, 6]
        assert stats["requested_bytes"] == NUM_CHUNKS * CHUNK_BYTES
        assert {metric.name for metric in PRIMARY_METRICS} <= {*stats.gauges, *stats.counters}

    def test_counters_add_up_and_never_decrease(self, manager: OffloadingManager) -> None:
        # Field report K04 and K05.
        rng = random.Random(0)
        seen = dict(manager.get_stats().counters)
        for number in range(200):
            ctx = start(manager, f"r{number}")
            keys = chain(rng.choice("pqrs") + rng.choice("tu") + rng.choice("vwxyz"))
            num_hits = look_up(manager, keys, ctx)
            load(manager, keys[:num_hits], ctx)
            self.clock.advance(60.0)
            store(manager, keys, ctx, failed=rng.sample(keys, number % 2))
            finish(manager, ctx)
            counters = manager.get_stats().counters
            assert all(counters[name] >= count for name, count in seen.items())
            seen = dict(counters)
        assert_idle(manager)
        assert seen["lookup_chunks"] == 600
        assert 0 < seen["hit_chunks"] == seen["loaded_chunks"] < 600
        assert seen["loaded_bytes"] == seen["loaded_chunks"] * CHUNK_BYTES
        assert seen["stored_bytes"] == seen["stored_chunks"] * CHUNK_BYTES
        settled = ("stored", "failed_store", "present", "refused")
        assert seen["offered_chunks"] == sum(seen[f"{name}_chunks"] for name in settled)

    def test_a_long_mix_of_aborts_ends_with_every_slot_accounted_for(
        self, manager: OffloadingManager
    ) -> None:
        # Field report F07.
        rng = random.Random(1)
        pending: list[tuple[ReqContext, list[OffloadKey]]] = []
        for number in range(500):
            self.clock.advance(rng.choice((0.0, 1.0, 600.0)))
            ctx = start(manager, f"r{number}")
            keys = chain("".join(rng.choice("mn") for _ in range(5)))
            num_hits = look_up(manager, keys, ctx)
            if num_hits and rng.random() < 0.7:
                load(manager, keys[:num_hits], ctx)
            if rng.random() < 0.8 and (taken := begin_store(manager, keys, ctx)):
                pending.append((ctx, taken))
            manager.on_request_finished(ctx)
            while pending and rng.random() < 0.5:
                old, taken = pending.pop(rng.randrange(len(pending)))
                manager.complete_store(taken, old, failed=set(rng.sample(taken, 1)))
            end_step(manager, new=[ctx.req_id])
        for old, taken in pending:
            manager.complete_store(taken, old)
        end_step(manager)
        assert_idle(manager)
        assert_usable(manager)

    def test_shutdown_answers_the_same_again(self, manager: OffloadingManager) -> None:
        ctx = start(manager, "r")
        store(manager, ABC, ctx)
        finish(manager, ctx)
        assert manager.shutdown(10.0) == manager.shutdown(10.0)
