"""What every manager has to keep for preempted requests: their chunks, within bounds."""

from kvstrata.core.manager import OffloadingManager
from kvstrata.testing.chunks import chain
from kvstrata.testing.manager_base import (
    HOUR_S,
    NUM_CHUNKS,
    ManagerSuiteBase,
    assert_idle,
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
)

ABC = chain("abc")
ABCD = chain("abcd")


class ManagerPreemptionSuite(ManagerSuiteBase):
    """Preempted requests."""

    def test_chunks_of_a_preempted_request_stay_until_it_ends(
        self, manager: OffloadingManager
    ) -> None:
        ctx = start(manager, "victim")
        assert store(manager, ABCD, ctx) == ABCD
        end_step(manager, preempted=["victim"])
        protect_s = 59.0
        for letter in "0123456789":
            self.clock.advance(protect_s / 10)
            other = start(manager, f"other {letter}")
            store(manager, chain(letter), other)
            finish(manager, other)
        assert all(is_hit(manager, key, ctx) for key in ABCD)
        assert look_up(manager, ABCD, ctx) == 4
        load(manager, ABCD, ctx)
        finish(manager, ctx)
        assert_idle(manager)

    def test_protection_ends_with_time_and_leaves_room_for_others(
        self, manager: OffloadingManager
    ) -> None:
        ctx = start(manager, "victim")
        keys = chain("abcdefgh")
        assert store(manager, keys, ctx) == keys
        end_step(manager, preempted=["victim"])
        assert manager.get_stats()["num_protected"] <= NUM_CHUNKS / 2
        assert manager.get_stats()["num_evictable"] >= NUM_CHUNKS / 2
        self.clock.advance(HOUR_S)
        end_step(manager)
        assert manager.get_stats()["num_protected"] == 0
        assert manager.get_stats()["num_evictable"] == NUM_CHUNKS

    def test_protection_ends_when_the_request_is_back_or_gone(
        self, manager: OffloadingManager
    ) -> None:
        ctx = start(manager, "victim")
        store(manager, ABCD, ctx)
        for come_back in (
            lambda: look_up(manager, ABCD, ctx),
            lambda: end_step(manager, new=["victim"]),
            lambda: manager.on_request_finished(ctx),
        ):
            end_step(manager, preempted=["victim"])
            assert manager.get_stats()["num_protected"] == 4
            assert manager.get_stats()["num_pinned"] == 0
            come_back()
            assert manager.get_stats()["num_protected"] == 0
        end_step(manager)
        assert_idle(manager)

    def test_chunks_still_being_written_for_a_preempted_request_are_protected_too(
        self, manager: OffloadingManager
    ) -> None:
        ctx = start(manager, "victim")
        manager.touch(ABCD, ctx)
        assert begin_store(manager, ABCD, ctx) == ABCD
        end_step(manager, preempted=["victim"])
        manager.complete_store(ABCD[:2], ctx)
        manager.complete_store(ABCD[2:], ctx)
        for letter in "0123456789":
            other = start(manager, f"other {letter}")
            store(manager, chain(letter), other)
            finish(manager, other)
        assert look_up(manager, ABCD, ctx) == 4

    def test_a_preempted_request_may_store_the_rest_and_keeps_all(
        self, manager: OffloadingManager
    ) -> None:
        ctx = start(manager, "victim")
        store(manager, ABC, ctx)
        end_step(manager, preempted=["victim"])
        assert begin_store(manager, ABCD, ctx) == ABCD[3:]
        manager.complete_store(ABCD[3:], ctx)
        assert manager.get_stats()["num_protected"] == 4
        for letter in "0123456789":
            other = start(manager, f"other {letter}")
            store(manager, chain(letter), other)
            finish(manager, other)
        assert look_up(manager, ABCD, ctx) == 4
