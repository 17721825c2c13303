"""What every manager has to keep about stores and loads: who gets which slot, and when."""

import pytest

from kvstrata.core.errors import ContractError
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager
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
    is_hit,
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

ABC = chain("abc")
A, AB, _ = ABC


class ManagerCopiesSuite(ManagerSuiteBase):
    """Stores and loads."""

    def test_slots_are_writable_memory_of_one_chunk_each(self, manager: OffloadingManager) -> None:
        assert len(manager.slots) == manager.slots.num_slots == NUM_CHUNKS
        for i in range(NUM_CHUNKS):
            assert len(manager.slots[i]) == CHUNK_BYTES
            manager.slots[i][:] = bytes([i]) * CHUNK_BYTES
        assert [manager.slots[i][0] for i in range(NUM_CHUNKS)] == list(range(NUM_CHUNKS))

    def test_another_request_loads_the_stored_bytes(self, manager: OffloadingManager) -> None:
        first = start(manager, "first")
        assert store(manager, ABC, first) == ABC
        finish(manager, first)
        second = start(manager, "second")
        assert look_up(manager, ABC, second) == 3
        load(manager, ABC, second)
        finish(manager, second)
        assert_idle(manager)

    def test_lookup_counts_the_prefix_and_stops_at_the_first_gap(
        self, manager: OffloadingManager
    ) -> None:
        ctx = start(manager, "r")
        store(manager, ABC, ctx)
        assert look_up(manager, [A, AB, *chain("x"), ABC[2]], ctx) == 2
        assert look_up(manager, [*chain("x"), A], ctx) == 0
        assert look_up(manager, [], ctx) == 0

    def test_a_chunk_being_written_cannot_be_loaded_yet(self, manager: OffloadingManager) -> None:
        writer, reader = start(manager, "writer"), start(manager, "reader")
        store(manager, [A], writer)
        assert begin_store(manager, ABC, writer) == ABC[1:]
        assert manager.lookup(ABC, reader) in {1, None}
        states = [LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.HIT_PENDING]
        assert list(manager.lookup_states(ABC, reader)) == states
        with pytest.raises(ContractError):
            manager.prepare_load(ABC, reader)
        assert manager.get_stats()["num_pinned"] == 0
        manager.complete_store(ABC[1:], writer)
        assert look_up(manager, ABC, reader) == 3

    def test_a_stored_chunk_is_found_while_its_request_still_runs(
        self, manager: OffloadingManager
    ) -> None:
        # Field report B14.
        writer, reader = start(manager, "writer"), start(manager, "reader")
        begin_store(manager, ABC, writer)
        manager.complete_store([A], writer)
        assert is_hit(manager, A, reader)
        load(manager, [A], reader)
        manager.complete_store(ABC[1:], writer)
        assert look_up(manager, ABC, reader) == 3

    def test_a_failed_store_loses_exactly_the_failed_chunks(
        self, manager: OffloadingManager
    ) -> None:
        # Field report A04, for the primary.
        ctx = start(manager, "r")
        store(manager, ABC, ctx, failed=[AB])
        assert [is_hit(manager, key, ctx) for key in ABC] == [True, False, True]
        assert look_up(manager, ABC, ctx) == 1
        stats = manager.get_stats()
        assert stats["num_free"] == NUM_CHUNKS - 2
        assert stats["failed_store_chunks"] == 1
        assert store(manager, ABC, ctx) == [AB]
        load(manager, ABC, ctx)

    def test_a_failed_load_keeps_the_chunk(self, manager: OffloadingManager) -> None:
        ctx = start(manager, "r")
        store(manager, ABC, ctx)
        manager.prepare_load(ABC, ctx)
        manager.complete_load(ABC, ctx, failed={AB})
        stats = manager.get_stats()
        assert (stats["failed_load_chunks"], stats["loaded_chunks"]) == (1, 2)
        assert stats["num_pinned"] == 0
        load(manager, ABC, ctx)

    def test_present_and_pending_chunks_are_not_stored_again(
        self, manager: OffloadingManager
    ) -> None:
        # Field report B11, across requests.
        first, second = start(manager, "first"), start(manager, "second")
        store(manager, [A], first)
        assert begin_store(manager, [A, AB], first) == [AB]
        assert begin_store(manager, ABC, second) == ABC[2:]
        manager.complete_store([AB], first)
        manager.complete_store(ABC[2:], second)
        output = manager.prepare_store(ABC, second)
        assert output is not None
        assert (len(output.keys_to_store), len(output.store_spec.slots)) == (0, 0)
        assert look_up(manager, ABC, second) == 3

    def test_repeated_keys_are_one_copy_each(self, manager: OffloadingManager) -> None:
        # Field report B11.
        ctx = start(manager, "r")
        assert store(manager, [A, A, AB, A, AB], ctx) == [A, AB]
        spec = manager.prepare_load([A, A, AB], ctx)
        verify(manager, [A, A, AB], spec.slots)
        assert manager.get_stats()["num_pinned"] == 2
        manager.complete_load([A, A, AB], ctx)
        assert manager.get_stats()["num_pinned"] == 0
        finish(manager, ctx)
        assert_idle(manager)

    @pytest.mark.parametrize("keys", [[A, A], [A, AB, A], [A, AB, A, AB, AB]])
    def test_repeated_keys_are_held_once_after_a_touch_that_repeats_them(
        self, manager: OffloadingManager, keys: list[OffloadKey]
    ) -> None:
        ctx = start(manager, "r")
        store(manager, [A, AB], ctx)
        num_free = manager.get_stats()["num_free"]
        manager.touch(keys, ctx)
        verify(manager, keys, manager.prepare_load(keys, ctx).slots)
        manager.reset_cache()
        distinct = list(dict.fromkeys(keys))
        assert manager.get_stats()["num_free"] == num_free + 2 - len(distinct)
        manager.complete_load(distinct, ctx)
        assert manager.get_stats()["num_free"] == num_free + 2

    def test_a_chunk_loaded_twice_is_pinned_until_both_loads_end(
        self, manager: OffloadingManager
    ) -> None:
        ctx = start(manager, "r")
        store(manager, [A], ctx)
        manager.prepare_load([A], ctx)
        manager.prepare_load([A], ctx)
        manager.complete_load([A], ctx)
        assert manager.get_stats()["num_pinned"] == 1
        manager.complete_load([A], ctx)
        assert manager.get_stats()["num_pinned"] == 0
        with pytest.raises(ContractError):
            manager.complete_load([A], ctx)

    def test_a_load_completed_twice_leaves_the_pins_of_others(
        self, manager: OffloadingManager
    ) -> None:
        # Field report B10.
        first, second = start(manager, "first"), start(manager, "second")
        store(manager, [A], first)
        manager.prepare_load([A], first)
        spec = manager.prepare_load([A], second)
        manager.complete_load([A], first)
        with pytest.raises(ContractError):
            manager.complete_load([A], first)
        assert manager.get_stats()["num_pinned"] == 1
        manager.on_request_finished(first)
        self.flood(manager, "0123456789")
        verify(manager, [A], spec.slots)
        manager.complete_load([A], second)
        assert manager.get_stats()["num_pinned"] == 0

    def test_settling_what_was_not_prepared_changes_nothing(
        self, manager: OffloadingManager
    ) -> None:
        first, second = start(manager, "first"), start(manager, "second")
        begin_store(manager, [A, AB], first)
        for ctx, keys in ((second, [A]), (first, [A, *chain("x")]), (second, chain("x"))):
            with pytest.raises(ContractError):
                manager.complete_store(keys, ctx)
        assert manager.get_stats()["num_writing"] == 2
        manager.complete_store([A, AB], first)
        with pytest.raises(ContractError):
            manager.complete_store([A], first)
        manager.prepare_load([A], first)
        for ctx, keys in ((second, [A]), (first, [A, AB])):
            with pytest.raises(ContractError):
                manager.complete_load(keys, ctx)
        assert manager.get_stats()["num_pinned"] == 1
        manager.complete_load([A], first)
        load(manager, [A, AB], second)

    def test_loading_what_is_not_there_pins_nothing(self, manager: OffloadingManager) -> None:
        ctx = start(manager, "r")
        store(manager, [A], ctx)
        with pytest.raises(ContractError):
            manager.prepare_load([A, *chain("x")], ctx)
        assert manager.get_stats()["num_pinned"] == 0
        finish(manager, ctx)
        assert_idle(manager)

    def test_evicted_chunks_are_named_and_gone(self, manager: OffloadingManager) -> None:
        ctx = start(manager, "old")
        old = chain("abcdefgh")
        assert store(manager, old, ctx) == old
        finish(manager, ctx)
        self.clock.advance(HOUR_S)
        ctx = start(manager, "new")
        manager.touch(chain("xy"), ctx)
        output = manager.prepare_store(chain("xy"), ctx)
        assert output is not None
        assert set(output.evicted_keys) == set(old[NUM_CHUNKS - len(output.keys_to_store) :])
        for key in output.evicted_keys:
            with pytest.raises(ContractError):
                manager.prepare_load([key], ctx)
        manager.complete_store(output.keys_to_store, ctx)

    def test_what_is_being_copied_is_never_evicted(self, manager: OffloadingManager) -> None:
        ctx = start(manager, "r")
        store(manager, ABC, ctx)
        spec = manager.prepare_load(ABC, ctx)
        writing = begin_store(manager, chain("wxyz"), ctx)
        self.flood(manager, "0123456789")
        verify(manager, ABC, spec.slots)
        manager.complete_load(ABC, ctx)
        manager.complete_store(writing, ctx)
        assert look_up(manager, chain("wxyz"), ctx) == 4
        load(manager, chain("wxyz"), ctx)

    def test_a_primary_full_of_copies_has_no_room_until_one_ends(
        self, manager: OffloadingManager
    ) -> None:
        # Field report C06.
        ctx, other = start(manager, "r"), start(manager, "other")
        keys = chain("abcdefgh")
        store(manager, keys, ctx)
        manager.prepare_load(keys, ctx)
        manager.touch(chain("x"), other)
        assert manager.prepare_store(chain("x"), other) is None
        assert look_up(manager, chain("x"), other) == 0
        manager.complete_load(keys, ctx)
        finish(manager, ctx)
        self.clock.advance(HOUR_S)
        assert store(manager, chain("x"), other) == chain("x")

    def test_more_than_the_primary_holds_is_stored_from_the_head(
        self, manager: OffloadingManager
    ) -> None:
        ctx = start(manager, "r")
        keys = chain("abcdefghijkl")
        assert store(manager, keys, ctx) == keys[:NUM_CHUNKS]
        assert look_up(manager, keys, ctx) == NUM_CHUNKS
        load(manager, keys[:NUM_CHUNKS], ctx)

    def test_reset_during_copies_keeps_old_and_new_bytes_apart(
        self, manager: OffloadingManager
    ) -> None:
        # Field report L03.
        old, new = start(manager, "old"), start(manager, "new")
        store(manager, ABC, old)
        spec = manager.prepare_load(ABC, old)
        writing = begin_store(manager, chain("wx"), old)
        manager.reset_cache()
        assert manager.lookup(ABC, new) == 0
        assert manager.lookup(chain("wx"), old) == 0
        taken = store(manager, chain("wxyz"), new)
        verify(manager, ABC, spec.slots)
        manager.complete_store(writing, old)
        manager.complete_load(ABC, old)
        assert taken == chain("wxyz")[: len(taken)]
        assert len(taken) >= NUM_CHUNKS - len(ABC) - len(writing)
        load(manager, taken, new)
        for ctx in (old, new):
            finish(manager, ctx)
        assert_idle(manager)
        assert_usable(manager)

    def test_deleted_chunks_are_gone_and_their_readers_undisturbed(
        self, manager: OffloadingManager
    ) -> None:
        # Field report L07.
        ctx, other = start(manager, "r"), start(manager, "other")
        store(manager, ABC, ctx)
        spec = manager.prepare_load([AB], ctx)
        manager.delete([AB, ABC[2], *chain("x")], other)
        assert look_up(manager, ABC, other) == 1
        self.flood(manager, "0123456789")
        verify(manager, [AB], spec.slots)
        manager.complete_load([AB], ctx)
        end_step(manager)
        assert manager.get_stats()["num_pinned"] == 0

    def test_a_load_of_a_chunk_that_left_and_came_back_ends_only_itself(
        self, manager: OffloadingManager
    ) -> None:
        first, second = start(manager, "first"), start(manager, "second")
        store(manager, [A], first)
        spec = manager.prepare_load([A], first)
        manager.delete([A], second)
        store(manager, [A], second)
        manager.prepare_load([A], second)
        store(manager, chain("x"), second)
        manager.delete(chain("x"), second)
        manager.complete_load([A], second)
        finish(manager, second)
        self.flood(manager, "0123456789")
        verify(manager, [A], spec.slots)
        manager.complete_load([A], first)
        finish(manager, first)
        assert_idle(manager)

    def test_a_load_ends_by_its_keys_before_older_ones_that_share_some(
        self, manager: OffloadingManager
    ) -> None:
        ctx, other = start(manager, "r"), start(manager, "other")
        store(manager, [A], other)
        old = manager.prepare_load([A], ctx)
        manager.delete([A], other)
        store(manager, [A, AB], other)
        manager.prepare_load([A, AB], ctx)
        manager.complete_load([AB, A], ctx)
        self.flood(manager, "0123456789")
        verify(manager, [A], old.slots)
        manager.complete_load([A], ctx)
        finish(manager, ctx)

    def test_a_load_that_ended_leaves_an_older_one_whole(self, manager: OffloadingManager) -> None:
        ctx, other = start(manager, "r"), start(manager, "other")
        store(manager, [A, AB], other)
        manager.prepare_load([A, AB], ctx)
        manager.prepare_load([A], ctx)
        manager.complete_load([A], ctx)
        manager.delete([A], other)
        store(manager, [A], other)
        new = manager.prepare_load([A, AB], ctx)
        manager.complete_load([A, AB], ctx)
        manager.delete([A], other)
        self.flood(manager, "0123456789")
        verify(manager, [A, AB], new.slots)
        manager.complete_load([A, AB], ctx)
        finish(manager, ctx)

    @pytest.mark.parametrize("read", [[], [A]])
    def test_a_chunk_whose_head_was_deleted_is_stored_all_the_same(
        self, manager: OffloadingManager, read: list[OffloadKey]
    ) -> None:
        ctx, reader = start(manager, "r"), start(manager, "reader")
        begin_store(manager, ABC, ctx)
        manager.complete_store([A], ctx)
        manager.prepare_load(read, reader)  # the slot stays taken until that ends
        manager.delete([A], ctx)
        manager.complete_load(read, reader)
        manager.complete_store(ABC[1:], ctx)
        end_step(manager)
        assert [is_hit(manager, key, ctx) for key in ABC] == [False, True, True]
        load(manager, ABC[1:], ctx)

    def test_copies_of_nothing_leave_nothing_open(self, manager: OffloadingManager) -> None:
        ctx, stranger = start(manager, "r"), ReqContext("stranger")
        for each in (ctx, stranger):
            assert list(manager.prepare_load([], each).slots) == []
            assert store(manager, [], each) == []
        assert not manager.has_pending_work()
        finish(manager, ctx)
        assert_idle(manager)

    def test_requests_that_were_never_announced_are_served_and_forgotten(
        self, manager: OffloadingManager
    ) -> None:
        stranger = ReqContext("stranger")
        assert look_up(manager, ABC, stranger) == 0
        assert store(manager, ABC, stranger) == ABC
        load(manager, ABC, stranger)
        end_step(manager)
        assert_idle(manager)
