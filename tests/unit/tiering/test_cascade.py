"""What goes down to which tier, when, and what happens if a tier can't take it."""

from typing import Any

import pytest

from kvstrata.testing import EVERY_KEY, FakeBackend, chain
from kvstrata.testing.manager_calls import begin_store, finish, start, store
from tests.tiering_world import World

AB, ABCD = chain("ab"), chain("abcd")
LONG = chain("abcdefghijklmnop")


def test_through_writes_at_once() -> None:
    world = World()
    world.run("r", AB)
    assert world.below("a") == set(AB)
    assert world.tier()["stored_chunks"] == 2
    world.assert_idle()


def test_never_writes_nothing_and_reads() -> None:
    world = World(tier={"write": "never"})
    world.put_below("a", chain("xy"))
    world.run("r", AB)
    world.flood(4)
    assert world.stores() == []
    assert world.lookup(chain("xy"), world.request("reader")) is None


def test_on_reuse_writes_what_a_second_request_uses() -> None:
    world = World(num_slots=8, tier={"write": "on_reuse"})
    ctx = world.request("first")
    store(world.manager, AB, ctx)
    store(world.manager, ABCD, ctx)  # offers the first ones again, being the same request
    finish(world.manager, ctx)
    assert world.below("a") == set()
    reader = world.request("loads")
    assert world.lookup(AB, reader) == 2
    world.load(AB, reader)
    finish(world.manager, reader)
    assert world.below("a") == set(AB)
    offers = world.request("offers")
    store(world.manager, ABCD[:3], offers)
    finish(world.manager, offers)
    assert world.below("a") == set(ABCD[:3])


def test_on_evict_writes_what_is_about_to_leave_and_only_that() -> None:
    world = World(num_slots=8, tier={"write": "on_evict"})
    world.run("first", ABCD)
    world.step()
    assert world.below("a") == set(), "there is room"
    for letter in "uvwxyz":
        world.run(letter, chain(letter))
    assert set(ABCD[2:]) <= world.below("a")
    assert world.tier()["dropped_store_chunks"] == 0
    assert len(world.below("a")) < 10


def test_on_evict_copies_no_further_ahead_while_a_slow_tier_is_at_it() -> None:
    backend = FakeBackend(hold=True)
    world = World(num_slots=8, backends={"a": backend}, tier={"write": "on_evict"})
    world.run("first", chain("abcdefgh"))
    for _ in range(5):
        world.step()
    assert [list(job.keys) for job in world.stores()] == [chain("abcdefgh")[7:]]
    backend.hold = False
    world.step()
    assert world.below("a") == set(chain("abcdefgh")[7:])


def test_on_evict_leaves_out_what_its_request_kept_out_of_the_tier() -> None:
    world = World(num_slots=4, tier={"write": "on_evict"})
    world.run("private", AB, store_tiers=[])
    world.flood(8)
    assert world.below("a") == set()
    assert world.tier()["dropped_store_chunks"] == 0


def test_on_evict_counts_what_left_without_a_copy() -> None:
    world = World(num_slots=8, tier={"write": "on_evict"})
    world.run("first", chain("abcdefgh"))
    world.run("burst", chain("stuvwxyz"))
    assert len(world.below("a") & set(chain("abcdefgh"))) == 1
    assert world.tier()["dropped_store_chunks"] == 7


def test_q03_a_request_chooses_its_tiers_for_load_and_for_store() -> None:
    world = World(tiers=("t1", "t2"))
    world.put_below("t1", AB)
    world.put_below("t2", AB)
    ctx = world.request("r", load_tiers=["t2"], store_tiers=[])
    assert world.lookup(AB, ctx) is None
    world.step()
    assert world.lookup(AB, ctx) == 2
    assert world.backends["t1"].calls["lookup_many"] == 0
    assert len(world.loads("t2")) == 1
    store(world.manager, chain("x"), ctx)
    finish(world.manager, ctx)
    assert world.stores("t1") == world.stores("t2") == []
    world.run("other", chain("y"))
    assert chain("y")[0] in world.below("t1") & world.below("t2")


def test_a_chunk_that_one_request_kept_out_of_a_tier_goes_there_when_another_offers_it() -> None:
    for write in ("through", "on_reuse"):
        world = World(tier={"write": write})
        world.run("private", AB, store_tiers=[])
        assert world.below("a") == set()
        other = world.request("other")
        assert store(world.manager, AB, other) == []
        finish(world.manager, other)
        assert world.below("a") == set(AB)


def test_b15_a_chunk_that_is_being_written_goes_to_the_tier_of_a_second_request_too() -> None:
    all_hints: tuple[dict[str, Any], ...] = ({}, {"store_tiers": []})
    for hints in all_hints:
        world = World()
        first = start(world.manager, "first", **hints)
        second = world.request("second")
        taken = begin_store(world.manager, AB, first)
        assert begin_store(world.manager, AB, second) == []
        world.step()
        assert world.manager.has_pending_work()
        world.manager.complete_store(taken, first)
        finish(world.manager, second)
        finish(world.manager, first)
        assert world.below("a") == set(AB)
        world.assert_idle()


def test_a_wish_for_a_chunk_whose_writing_failed_is_forgotten() -> None:
    world = World()
    first, second = world.request("first", store_tiers=[]), world.request("second")
    taken = begin_store(world.manager, AB, first)
    begin_store(world.manager, AB, second)
    world.manager.complete_store(taken, first, failed=set(taken))
    world.step()
    assert world.tier()["num_behind"] == 0
    store(world.manager, AB, first)
    finish(world.manager, first)
    assert world.below("a") == set()


def test_g03_a_slow_tier_drops_its_own_stores_and_others_go_on() -> None:
    world = World(num_slots=8, tiers=("fast", "slow"), each={"slow": {"num_queued_chunks_max": 4}})
    world.backends["slow"].hold = True
    for i in range(100):
        ctx = world.request(f"r{i}")
        store(world.manager, chain("q" * (i + 1))[-1:], ctx)
        finish(world.manager, ctx)
        assert world.tier("slow")["num_storing"] <= 4
        assert world.tier("slow")["num_behind"] <= 8
    assert len(world.below("fast")) == 100
    assert world.tier("fast")["dropped_store_chunks"] == 0
    num_dropped = world.tier("slow")["dropped_store_chunks"]
    assert num_dropped >= 88
    world.step()
    assert world.stats["num_evictable"] == 4, "the slow one keeps no more than its queue"
    world.backends["slow"].hold = False
    world.step()
    world.step()
    world.step()
    assert len(world.below("slow")) == 100 - num_dropped, "what stayed in the primary follows"
    world.run("later", chain("Z"))
    assert chain("Z")[0] in world.below("slow")
    world.assert_idle()


def test_d13_what_a_tier_gets_late_it_gets_from_the_head_on() -> None:
    world = World(num_slots=16, tier={"num_queued_chunks_max": 2})
    world.backends["a"].delay_s = 1.0
    ctx = world.request("r")
    for i in range(0, 16, 2):
        store(world.manager, LONG[: i + 2], ctx)
        world.step(by_s=0.6)
    for _ in range(20):
        there = [key in world.below("a") for key in LONG]
        assert there == sorted(there, reverse=True), "no tail without its head"
        world.step(by_s=0.6)
    assert world.below("a") == set(LONG)
    assert world.tier()["dropped_store_chunks"] == 0


def test_d14_what_can_be_restored_is_what_was_not_reported_as_dropped() -> None:
    world = World(num_slots=4, tier={"num_queued_chunks_max": 2, "num_failures_max": 99})
    world.backends["a"].hold = True
    ctx = world.request("r")
    num_stored = 0
    for i in range(16):
        num_stored += len(store(world.manager, LONG[i : i + 1], ctx))
        world.step()
    world.backends["a"].hold = False
    finish(world.manager, ctx)
    world.assert_idle()
    assert len(world.below("a")) == num_stored - world.tier()["dropped_store_chunks"]


def test_a_failed_store_is_tried_again_within_the_budget() -> None:
    world = World(tier={"num_store_tries": 3, "num_failures_max": 99})
    world.backends["a"].fail_stores = {AB[1]}
    world.run("r", AB)
    world.assert_idle()
    assert [list(job.keys) for job in world.stores()] == [AB, AB[1:], AB[1:]]
    assert world.tier()["retried_store_chunks"] == 2
    assert world.below("a") == {AB[0]}
    world.backends["a"].fail_stores = set()
    world.run("next", chain("x"))
    other = world.request("other")
    store(world.manager, AB, other)
    finish(world.manager, other)
    assert world.below("a") == {*AB, *chain("x")}, "offered again, stored again"


def test_a_retry_leaves_out_what_has_left_meanwhile() -> None:
    world = World(tier={"num_store_tries": 2})
    world.backends["a"].hold, world.backends["a"].fail_stores = True, EVERY_KEY
    ctx = world.request("r")
    store(world.manager, AB, ctx)
    world.manager.delete(AB[:1], ctx)
    world.backends["a"].hold = False
    finish(world.manager, ctx)
    world.assert_idle()
    assert [list(job.keys) for job in world.stores()] == [AB, AB[1:]]


def test_chunks_are_pinned_exactly_while_a_tier_reads_them() -> None:
    world = World(num_slots=2)
    world.backends["a"].hold = True
    world.run("r", AB)
    assert world.stats["num_evictable"] == 0
    ctx = world.request("other")
    assert world.manager.prepare_store(chain("x"), ctx) is None
    world.backends["a"].hold = False
    world.step()
    world.step()
    assert world.stats["num_evictable"] == 2
    assert store(world.manager, chain("x"), ctx) == chain("x")


def test_what_a_tier_has_lost_goes_there_again_when_it_is_offered() -> None:
    world = World(num_slots=8, tier={"type": "memory", "max_chunks": 2})
    world.run("first", AB)
    world.settle()
    world.run("second", chain("xy"))
    world.settle()
    assert world.tier()["evicted_chunks"] == 2
    other = world.request("other")
    assert store(world.manager, AB, other) == []
    finish(world.manager, other)
    world.settle()
    assert world.tier()["stored_chunks"] == 6


def test_k02_both_directions_count_alike() -> None:
    world = World(num_slots=8)
    for i, letter in enumerate("abcde"):
        world.run(f"w{i}", chain(letter))
    world.flood(8)
    for letter in "abc":
        ctx = world.request(letter)
        world.lookup(chain(letter), ctx)
        world.step()
        assert world.lookup(chain(letter), ctx) == 1
        world.load(chain(letter), ctx)
        finish(world.manager, ctx)
    tier = world.tier()
    assert (tier["stored_chunks"], tier["loaded_chunks"]) == (5, 3)
    assert (tier["stored_bytes"], tier["loaded_bytes"]) == (5 * 64, 3 * 64)
    assert (tier["store_jobs"], tier["load_jobs"]) == (5, 3)


@pytest.mark.parametrize("fails", [False, True])
def test_k06_every_job_adds_its_time_failed_or_not(fails: bool) -> None:
    world = World()
    backend = world.backends["a"]
    backend.delay_s = 2.0
    world.put_below("a", chain("x"))
    if fails:
        backend.fail_stores = backend.fail_loads = EVERY_KEY
    ctx = world.request("r")
    world.lookup(chain("x"), ctx)
    store(world.manager, AB, ctx)
    world.step(by_s=2.0)
    world.step()
    tier = world.tier()
    assert (tier["store_jobs"], tier["load_jobs"]) == (1, 1)
    assert (tier["store_s"], tier["load_s"]) == (2.0, 2.0)


def test_k05_queried_is_primary_plus_tiers_plus_miss() -> None:
    world = World(num_slots=8)
    world.run("w", AB)
    world.put_below("a", ABCD)
    keys = chain("abcdef")
    num_queried = num_primary = num_tier = num_missed = 0
    for i in range(10):
        ctx = world.request(f"r{i}")
        count = world.lookup(keys, ctx)
        if count is None:
            world.step()
            count = world.lookup(keys, ctx)
        assert count == 4
        world.load(keys[:count], ctx)
        record = world.tiering.request_record(ctx)
        assert record is not None
        num_queried += len(keys)
        num_primary += record.num_chunks_from["cpu"]
        num_tier += record.num_chunks_from.get("a", 0)
        num_missed += record.num_missed
        finish(world.manager, ctx)
    assert (num_queried, num_primary, num_tier, num_missed) == (60, 38, 2, 20)


def test_one_backend_shared_by_two_worlds_serves_both() -> None:
    backend = FakeBackend(is_persistent=True)
    first = World(backends={"a": backend})
    first.run("w", AB)
    first.manager.shutdown(1.0)
    second = World(backends={"a": backend})
    ctx = second.request("r")
    assert second.lookup(AB, ctx) is None
    second.step()
    assert second.lookup(AB, ctx) == 2
    second.load(AB, ctx)
