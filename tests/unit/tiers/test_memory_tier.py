"""The reference tier: bounds, order of leaving, expiry, and the thread that copies."""

import threading
from typing import Any

import pytest
from typing_extensions import override

from kvstrata.core.errors import ConfigError
from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.core.keys import JobId
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult, StoreJob
from kvstrata.core.tier import TierEnv
from kvstrata.testing import FakeClock, FakeRegion, numbered_key, pattern
from kvstrata.testing.tier_calls import (
    IDLE_STEP,
    PATIENCE_S,
    load,
    look_up,
    store,
    submit_load,
    submit_store,
    wait_for,
)
from kvstrata.tiers.memory import MemoryTier

CHUNK_BYTES = 1_000
KEYS = [numbered_key(i) for i in range(16)]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def make(clock: FakeClock, chunk_bytes: int = CHUNK_BYTES, **settings: object) -> MemoryTier:
    slots = FakeRegion(16, chunk_bytes)
    for i in range(8):
        slots[i][:] = pattern(KEYS[i], chunk_bytes)
    return MemoryTier(slots, env=TierEnv("memory", "test", clock, "tiers[0]"), **settings)


def here(tier: MemoryTier) -> set[int]:
    return {i for i in range(8) if look_up(tier, KEYS[i]) is LookupResult.HIT}


def test_it_never_holds_more_than_told_and_keeps_the_newest(clock: FakeClock) -> None:
    tier = make(clock, max_chunks=3)
    for i in range(6):
        store(tier, i, {KEYS[i]: i})
        tier.check()
    assert here(tier) == {3, 4, 5}
    assert tier.get_stats()["evicted_chunks"] == 3
    assert tier.get_stats()["used_bytes"] == tier.get_stats()["max_bytes"] == 3 * CHUNK_BYTES


def test_the_tighter_bound_holds(clock: FakeClock) -> None:
    tier = make(clock, max_chunks=5, max_bytes=2 * CHUNK_BYTES + 1)
    for i in range(4):
        store(tier, i, {KEYS[i]: i})
    assert here(tier) == {2, 3}
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.max_bytes: 999 holds no chunk"):
        make(clock, max_bytes=CHUNK_BYTES - 1)


def test_a_touch_keeps_a_chunk_longer(clock: FakeClock) -> None:
    tier = make(clock, max_chunks=2)
    store(tier, 1, {KEYS[0]: 0})
    store(tier, 2, {KEYS[1]: 1})
    tier.touch([KEYS[0]], ReqContext("r"))
    store(tier, 3, {KEYS[2]: 2})
    assert here(tier) == {0, 2}


def test_tails_leave_before_heads(clock: FakeClock) -> None:
    tier = make(clock, max_chunks=4)
    ctx = ReqContext("r")
    tier.on_new_request(ctx)
    for i in (2, 0, 3, 1):
        tier.touch(KEYS[:4], ctx)
        submit_store(tier, i, {KEYS[i]: i}, ctx=ctx)
        wait_for(tier, i)
    tier.on_request_finished(ctx)
    store(tier, 8, {KEYS[6]: 6, KEYS[7]: 7})
    assert here(tier) == {0, 1, 6, 7}


def test_a_request_does_not_push_out_its_own_head_nor_what_is_worth_more(clock: FakeClock) -> None:
    tier = make(clock, max_chunks=2)
    ctx = ReqContext("high", {"kvstrata": {"priority": 80}})
    tier.on_new_request(ctx)
    tier.submit_store(StoreJob(JobId(1), KEYS[:4], [0, 1, 2, 3], ctx))
    assert wait_for(tier, 1)[1].failed == {KEYS[2], KEYS[3]}
    assert store(tier, 2, {KEYS[5]: 5}).failed == {KEYS[5]}
    assert here(tier) == {0, 1}
    assert tier.get_stats()["refused_chunks"] == 3


def test_a_chunk_stored_again_has_its_new_lifetime(clock: FakeClock) -> None:
    tier = make(clock)
    store(tier, 1, {KEYS[0]: 0}, [clock.wall_s() + 10.0])
    clock.advance(10.0)
    assert here(tier) == set()
    store(tier, 2, {KEYS[0]: 0}, [clock.wall_s() + 10.0])
    clock.advance(9.0)
    assert here(tier) == {0}
    clock.advance(1.0)
    tier.on_schedule_end(IDLE_STEP)
    removed = [event.reason for event in tier.take_events() if event.kind is EventKind.REMOVED]
    assert removed == [RemovalReason.EXPIRED] * 2


class HeldRegion(FakeRegion):
    """Rows that copies of some slots can't read before `may_go` is set."""

    def __init__(self, num_slots: int, chunk_bytes: int, held: int) -> None:
        super().__init__(num_slots, chunk_bytes)
        self.held = held
        self.is_reached, self.may_go = threading.Event(), threading.Event()

    @override
    def __getitem__(self, slot: Any) -> Any:
        if slot == self.held and threading.current_thread() is not threading.main_thread():
            self.is_reached.set()
            assert self.may_go.wait(PATIENCE_S)
        return super().__getitem__(slot)


def stuck_in_a_store(clock: FakeClock) -> tuple[MemoryTier, HeldRegion]:
    """Return a tier in the middle of storing KEYS[1], with more stores behind it."""
    slots = HeldRegion(16, CHUNK_BYTES, held=1)
    for i in range(8):
        slots[i][:] = pattern(KEYS[i], CHUNK_BYTES)
    tier = MemoryTier(slots, env=TierEnv("memory", "test", clock, "tiers[0]"))
    store(tier, 1, {KEYS[0]: 0})
    submit_store(tier, 10, {KEYS[i]: i for i in range(1, 4)})
    assert slots.is_reached.wait(PATIENCE_S)
    return tier, slots


def test_no_call_copies_payload_or_waits_for_a_copy(clock: FakeClock) -> None:
    tier, slots = stuck_in_a_store(clock)
    ctx = ReqContext("r")
    assert tier.lookup(KEYS[2], ctx) is LookupResult.HIT_PENDING
    submit_load(tier, 2, {KEYS[0]: 9})
    tier.touch(KEYS[:4], ctx)
    tier.on_schedule_end(IDLE_STEP)
    tier.cancel(JobId(2))
    tier.delete([KEYS[2]])
    assert tier.lookup(KEYS[2], ctx) is LookupResult.MISS
    assert tier.drain_jobs(0.0) == [10, 2]
    assert not list(tier.get_finished_jobs())
    assert tier.get_stats()["num_jobs"] == 2
    slots.may_go.set()
    results = wait_for(tier, 2, 10)
    assert results[2].failed == {KEYS[0]}, "it was cancelled"
    assert results[10].failed == {KEYS[2]}, "it was deleted on its way"
    assert here(tier) == {0, 1, 3}


def test_a_load_goes_before_the_stores_that_wait(clock: FakeClock) -> None:
    tier, slots = stuck_in_a_store(clock)
    submit_store(tier, 11, {KEYS[4]: 4})
    submit_load(tier, 2, {KEYS[0]: 9})
    slots.may_go.set()
    assert not tier.drain_jobs(PATIENCE_S)
    assert [result.job_id for result in tier.get_finished_jobs()] == [2, 10, 11]
    assert slots[9] == pattern(KEYS[0], CHUNK_BYTES)


def test_a_chunk_that_is_being_copied_at_a_reset_does_not_appear(clock: FakeClock) -> None:
    tier, slots = stuck_in_a_store(clock)
    tier.reset()
    slots.may_go.set()
    assert wait_for(tier, 10)[10].failed == set(KEYS[1:4])
    assert here(tier) == set()
    tier.check()


def test_a_copy_that_raises_fails_its_chunk_and_no_other(clock: FakeClock) -> None:
    tier = make(clock)
    submit_store(tier, 1, {KEYS[0]: 0, KEYS[1]: 99, KEYS[2]: 2})  # there is no slot 99
    assert wait_for(tier, 1)[1].failed == {KEYS[1]}
    assert here(tier) == {0, 2}


def test_shutdown_ends_the_thread(clock: FakeClock) -> None:
    tier = make(clock)
    num_before = threading.active_count()
    tier.shutdown()
    tier.shutdown()
    assert threading.active_count() == num_before - 1


def test_durations_are_counted_for_every_job(clock: FakeClock) -> None:
    tier = make(clock)
    store(tier, 1, {KEYS[0]: 0})
    load(tier, 2, {KEYS[0]: 9})
    load(tier, 3, {KEYS[1]: 9})
    stats = tier.get_stats()
    assert (stats["store_jobs"], stats["load_jobs"]) == (1, 2)
    assert (stats["stored_bytes"], stats["loaded_bytes"]) == (CHUNK_BYTES, CHUNK_BYTES)
