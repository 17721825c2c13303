"""Lookups that reach below the primary: who fetches what, who waits, and for how long."""

import pytest

from kvstrata.core.errors import ContractError
from kvstrata.core.results import LookupResult
from kvstrata.testing import EVERY_KEY, chain, numbered_key, pattern, poison
from kvstrata.testing.manager_calls import begin_store, finish
from kvstrata.tiering.survey import NUM_ASKED_MAX
from tests.tiering_world import CHUNK_BYTES, World

AB, ABCD = chain("ab"), chain("abcd")
LONG = chain("abcdefghijklmnop")
HIT, MISS = LookupResult.HIT, LookupResult.MISS


def test_what_a_tier_has_is_fetched_and_loaded() -> None:
    world = World()
    world.put_below("a", AB)
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    assert world.loads() == []
    world.step()
    assert [list(job.keys) for job in world.loads()] == [AB]
    assert world.lookup(AB, ctx) == 2
    world.load(AB, ctx)
    world.manager.on_request_finished(ctx)
    world.assert_idle()


def test_tiers_are_asked_in_order_and_each_gives_what_the_others_lack() -> None:
    world = World(tiers=("a", "b"))
    world.put_below("a", ABCD[:2])
    world.put_below("b", ABCD)
    ctx = world.request("r")
    assert world.lookup(ABCD, ctx) is None
    world.step()
    assert [list(job.keys) for job in world.loads("a")] == [ABCD[:2]]
    assert [list(job.keys) for job in world.loads("b")] == [ABCD[2:]]
    assert world.lookup(ABCD, ctx) == 4
    world.load(ABCD, ctx)


def test_a03_a_failed_fetch_is_a_miss_and_its_slot_is_never_read() -> None:
    world = World()
    world.put_below("a", ABCD)
    world.backends["a"].short = {ABCD[2]}
    ctx = world.request("r")
    assert world.lookup(ABCD, ctx) is None
    world.step()
    assert world.lookup(ABCD, ctx) == 2
    assert list(world.manager.lookup_states(ABCD[2:3], ctx)) == [MISS]
    with pytest.raises(ContractError):
        world.manager.prepare_load(ABCD[:3], ctx)
    world.load(ABCD[:2], ctx)
    record = world.tiering.request_record(ctx)
    assert record is not None
    assert record.num_missed == 2, "the engine is told what to compute"
    assert world.tier()["failed_load_chunks"] == 1
    assert world.stats["num_free"] == 1
    world.manager.on_request_finished(ctx)
    world.assert_idle()


def test_a05_no_slot_is_reported_as_loaded_that_nobody_wrote() -> None:
    world = World(num_slots=4)
    keys = chain("abc")
    world.put_below("a", keys)
    other = world.request("other")
    busy = begin_store(world.manager, chain("xy"), other)
    for slot in range(4):
        if bytes(world.manager.slots[slot]) not in {pattern(key, CHUNK_BYTES) for key in busy}:
            poison(world.manager.slots[slot])
    ctx = world.request("r")
    assert world.lookup(keys, ctx) is None
    world.step()
    assert world.lookup(keys, ctx) == 2
    world.load(keys[:2], ctx)  # compares the bytes


def test_a07_a_long_session_comes_back_from_below_during_churn() -> None:
    world = World(num_slots=8, tier={"num_queued_chunks_max": 64})
    session = [key for i in range(30) for key in chain(chr(97 + i % 26) * (i + 1))[-1:]]
    for i in range(0, 30, 5):
        world.run(f"session {i}", session[i : i + 5])
        world.step()
    for i in range(200):
        world.run(f"short {i}", chain(f"{i}")[-1:])
    assert set(session) <= world.below("a")
    for i in range(0, 30, 6):
        ctx = world.request(f"again {i}")
        batch = session[i : i + 6]
        assert world.lookup(batch, ctx) is None
        world.step()
        world.run(f"churn {i}", chain(f"churn {i}")[-1:])
        assert world.lookup(batch, ctx) == 6
        world.load(batch, ctx)
        world.manager.on_request_finished(ctx)
    world.assert_idle()


def test_c01_a_failed_fetch_is_tried_once_for_a_request() -> None:
    world = World(max_wait_s=1e6, tier={"cooldown_s": 2.0})
    world.backends["a"].lie = {AB[0]}
    ctx = world.request("r")
    for _ in range(20):
        world.lookup(AB, ctx)
        world.step(by_s=1.0)
    assert len(world.loads()) == 1
    assert world.lookup(AB, ctx) == 0
    world.run("writer", AB)
    assert world.lookup(AB, ctx) == 2


def test_a_chunk_that_failed_is_not_tried_by_everybody_in_turn() -> None:
    world = World(tier={"cooldown_s": 10.0})
    world.put_below("a", AB)
    world.backends["a"].fail_loads = {AB[0]}
    for i in range(5):
        ctx = world.request(f"r{i}")
        world.lookup(AB, ctx)
        world.step()
        assert world.lookup(AB, ctx) == 0
    assert len(world.loads()) == 1
    world.clock.advance(10.0)
    world.backends["a"].fail_loads = set()
    ctx = world.request("later")
    assert world.lookup(AB, ctx) is None
    world.step()
    assert world.lookup(AB, ctx) == 2


def test_c05_many_requests_for_one_prefix_are_one_read() -> None:
    world = World(num_slots=12)
    keys = chain("abcdefghij")
    world.put_below("a", keys)
    world.backends["a"].hold = True
    waiting = [world.request(f"r{i}") for i in range(50)]
    for _ in range(3):
        assert [world.lookup(keys, ctx) for ctx in waiting] == [None] * 50
        world.step()
    world.backends["a"].hold = False
    world.step()
    for ctx in waiting:
        assert world.lookup(keys, ctx) == 10
        world.load(keys, ctx)
    assert world.backends["a"].loaded == keys


def test_when_the_one_that_fetches_goes_the_others_still_get_the_chunks() -> None:
    world = World()
    world.put_below("a", AB)
    first, second = world.request("first"), world.request("second")
    assert world.lookup(AB, first) is None
    assert world.lookup(AB, second) is None
    world.manager.on_request_finished(first)
    assert world.lookup(AB, second) is None
    world.step()
    assert world.lookup(AB, second) == 2


def test_c06_with_every_slot_pinned_both_ways_answer_at_once() -> None:
    world = World(num_slots=4)
    world.run("writer", ABCD)
    world.put_below("a", chain("xy"))
    reader = world.request("reader")
    world.manager.prepare_load(ABCD, reader)
    ctx = world.request("r")
    assert world.manager.prepare_store(chain("pq"), ctx) is None
    assert world.lookup(chain("xy"), ctx) == 0


def test_g02_a_tier_that_does_not_answer_costs_one_deadline() -> None:
    world = World(max_wait_s=1.0)
    world.put_below("a", AB)
    world.backends["a"].lookup_delay_s = 10.0
    ctx = world.request("r")
    waited_s = 0.0
    while world.lookup(AB, ctx) is None:
        world.step(by_s=0.25)
        waited_s += 0.25
    assert waited_s == 1.0
    world.clock.advance(10.0)
    assert world.lookup(AB, ctx) == 0, "the deadline is the request's, not the lookup's"
    later = world.request("later")
    assert world.lookup(AB, later) is None
    world.step()
    assert world.lookup(AB, later) == 2, "the late answer is used"


def test_h06_a_lookup_that_timed_out_is_asked_again() -> None:
    world = World(max_wait_s=1.0)
    world.put_below("a", AB)
    world.backends["a"].lookup_delay_s, world.backends["a"].hold_lookups = 0.0, True
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    world.step(by_s=1.0)
    assert world.lookup(AB, ctx) == 0
    world.backends["a"].hold_lookups = False
    later = world.request("later")
    assert world.lookup(AB, later) is None
    world.step()
    assert world.lookup(AB, later) is None
    world.step()
    assert world.lookup(AB, later) == 2


def test_a_batch_of_lookups_is_one_call_and_one_probe() -> None:
    """G01."""
    world = World(num_slots=600)
    keys = chain("z" * 500)
    world.backends["a"].lookup_delay_s = 0.0
    ctx = world.request("r")
    assert world.lookup(keys, ctx) is None
    world.step()
    assert world.backends["a"].calls["lookup_many"] == 1
    assert world.backends["a"].probes == [frozenset(keys)]


def test_after_the_deadline_the_ready_part_is_used() -> None:
    world = World(tiers=("a", "b"), max_wait_s=2.0)
    world.put_below("a", ABCD[:2])
    world.put_below("b", ABCD[2:])
    world.backends["b"].hold = True
    ctx = world.request("r")
    assert world.lookup(ABCD, ctx) is None
    world.step(by_s=1.0)
    assert world.lookup(ABCD, ctx) is None
    world.step(by_s=1.0)
    assert world.lookup(ABCD, ctx) == 2
    world.load(ABCD[:2], ctx)
    world.backends["b"].hold = False
    world.manager.on_request_finished(ctx)
    world.assert_idle()


def test_what_arrives_after_the_deadline_is_kept_but_not_pinned() -> None:
    world = World(max_wait_s=1.0, hold_s=1e6)
    world.put_below("a", AB)
    world.backends["a"].hold = True
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    world.step(by_s=2.0)
    assert world.lookup(AB, ctx) == 0
    world.backends["a"].hold = False
    world.step()
    world.step()
    assert world.stats["num_evictable"] == world.stats["num_resident"] == 2


def test_fetched_chunks_are_kept_until_their_request_comes_or_time_is_up() -> None:
    world = World(hold_s=6.0)
    world.put_below("a", AB)
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    world.step()
    world.step()
    assert world.stats["num_evictable"] == 0
    world.step(by_s=6.0)
    world.step()
    assert world.stats["num_evictable"] == 2


def test_fetched_chunks_of_a_request_that_was_aborted_are_not_kept() -> None:
    for when in ("reserved", "submitted", "arrived"):
        world = World(hold_s=1e6)
        world.put_below("a", AB)
        world.backends["a"].hold = when == "submitted"
        ctx = world.request("r")
        assert world.lookup(AB, ctx) is None
        if when != "reserved":
            world.step()
        if when == "arrived":
            assert world.lookup(AB, ctx) == 2
        world.manager.on_request_finished(ctx)
        world.backends["a"].hold = False
        world.assert_idle()
        assert len(world.loads()) == (when != "reserved")


def test_what_was_kept_for_a_request_is_let_go_at_the_end_of_the_step_in_which_it_loads() -> None:
    world = World(hold_s=1e6)
    world.put_below("a", AB)
    ctx = world.request("r")
    world.lookup(AB, ctx)
    world.step()
    assert world.lookup(AB, ctx) == 2
    world.load(AB[:1], ctx)
    assert world.stats["num_evictable"] == 0, "another group of layers may load in this step"
    world.step()
    assert world.stats["num_evictable"] == 2


def test_a_request_does_not_push_out_what_was_fetched_for_itself() -> None:
    world = World(num_slots=4, hold_s=1e6)
    world.put_below("a", ABCD)
    ctx = world.request("r")
    world.lookup(ABCD, ctx)
    world.step()
    assert world.lookup(ABCD, ctx) == 4
    assert world.manager.prepare_store(chain("x"), ctx) is None
    assert world.lookup(ABCD, ctx) == 4


def test_the_queue_in_front_counts_when_loading_is_weighed_against_computing() -> None:
    world = World(num_slots=16, max_wait_s=1e6)
    world.backends["a"].delay_s = 1.0
    world.put_below("a", chain("abcdwxyz0123"))
    for path in ("abcd", "wxyz", "0123"):
        world.put_below("a", chain(path))
    first = world.request("first")
    world.lookup(ABCD, first)
    world.step(by_s=1.0)
    assert world.lookup(ABCD, first) == 4
    world.manager.set_prefill_rate(3.0)  # four chunks: 1.3 s, loading takes 1 s
    assert world.lookup(chain("wxyz"), world.request("second")) is None
    world.step()
    assert world.lookup(chain("0123"), world.request("third")) == 0


def test_a_request_that_has_finished_is_served_from_the_primary_only() -> None:
    world = World()
    world.put_below("a", ABCD)
    world.run("writer", chain("xy"))
    ctx = world.request("r")
    world.manager.on_request_finished(ctx)
    assert world.lookup(ABCD, ctx) == 0
    assert world.lookup(chain("xy"), ctx) == 2
    assert world.loads() == []
    world.assert_idle()


def test_g04_waiting_requests_do_not_evict_each_others_chunks_before_they_are_read() -> None:
    world = World(num_slots=8, max_wait_s=1e6, hold_s=1e6)
    prompts = [chain(f"{letter}bcdefgh") for letter in "0123456789"]
    for prompt in prompts:
        world.put_below("a", prompt)
    waiting = {i: world.request(f"r{i}") for i in range(10)}
    num_loaded = 0
    runner = world.request("runner")
    num_stored = 0
    for _ in range(200):
        for i, ctx in list(waiting.items()):
            count = world.lookup(prompts[i], ctx)
            if count is not None:
                world.load(prompts[i][:count], ctx)
                num_loaded += count
                world.manager.on_request_finished(ctx)
                del waiting[i]
        if num_stored < 5:
            taken = begin_store(world.manager, chain("X" * (num_stored + 1))[-1:], runner)
            if taken:
                world.manager.complete_store(taken, runner)
            num_stored += len(taken)
        world.step()
        if not waiting:
            break
    assert not waiting
    assert num_loaded >= 75
    assert len(world.backends["a"].loaded) <= 1.2 * num_loaded
    assert num_stored == 5


def test_a_running_request_finds_room_among_chunks_that_are_kept_for_others() -> None:
    world = World(hold_s=1e6, max_wait_s=1e6)
    world.put_below("a", ABCD)
    ctx, runner = world.request("r"), world.request("runner")
    assert world.lookup(ABCD, ctx) is None
    world.step()
    assert begin_store(world.manager, chain("x"), runner) == chain("x")
    assert world.stats["given_way_chunks"] == 1
    world.manager.complete_store(chain("x"), runner)
    assert world.lookup(ABCD, ctx) in {3, None}, "the last of its chunks went, not the first"


def test_g05_a_prefix_larger_than_the_primary_is_usable() -> None:
    world = World(num_slots=4)
    world.put_below("a", LONG)
    ctx = world.request("r")
    assert list(world.manager.lookup_states(LONG, ctx)) == [LookupResult.HIT_PENDING] * 16
    assert world.stats["num_writing"] == 0, "asking promotes nothing"
    assert world.lookup(LONG, ctx) is None
    world.step()
    assert world.lookup(LONG, ctx) == 4
    world.load(LONG[:4], ctx)
    world.step()
    world.manager.on_request_finished(ctx)
    again = world.request("again")
    assert world.lookup(LONG, again) in {4, None}


def test_a_prompt_larger_than_the_primary_can_be_stored_through_it() -> None:
    world = World(num_slots=4)
    ctx = world.request("r")
    world.manager.touch(LONG, ctx)
    for _ in range(20):
        offered = [key for key in LONG if key not in world.below("a")]
        taken = begin_store(world.manager, offered, ctx)
        if taken:
            world.manager.complete_store(taken, ctx)
        world.step()
    assert world.below("a") == set(LONG)


def test_q02_a_prefetch_leaves_chunks_resident_and_evictable() -> None:
    world = World()
    world.put_below("a", AB)
    ctx = world.request("prefetch", priority=0)
    world.lookup(AB, ctx)
    world.step()
    world.manager.on_request_finished(ctx)
    world.step()
    assert world.stats["num_resident"] == world.stats["num_evictable"] == 2
    assert list(world.manager.lookup_states(AB, ctx)) == [HIT, HIT]
    assert world.lookup(AB, world.request("r")) == 2


def test_q02_prefetched_chunks_give_way_to_what_is_asked_for() -> None:
    world = World()
    world.put_below("a", LONG[:8])
    prefetch = world.request("prefetch")
    assert world.lookup(LONG[:4], prefetch) is None
    states = list(world.manager.lookup_states(LONG[:4], prefetch))
    assert states == [LookupResult.HIT_PENDING] * 4, "it can be seen on its way"
    world.step()
    assert world.lookup(LONG[:4], prefetch) == 4
    finish(world.manager, prefetch)
    demand = world.request("demand")
    assert world.lookup(LONG[4:8], demand) is None
    world.step()
    assert world.lookup(LONG[4:8], demand) == 4
    world.load(LONG[4:8], demand)
    finish(world.manager, demand)
    world.assert_idle()


def test_q02_a_prefetch_that_fails_harms_nobody() -> None:
    world = World()
    world.put_below("a", ABCD)
    world.backends["a"].fail_loads = EVERY_KEY
    prefetch = world.request("prefetch")
    assert world.lookup(ABCD, prefetch) is None
    world.step()
    assert world.lookup(ABCD, prefetch) == 0
    finish(world.manager, prefetch)
    world.assert_idle()
    assert world.stats["num_free"] == 4
    world.backends["a"].fail_loads = frozenset()
    world.run("demand", AB)
    again = world.request("again")
    assert world.lookup(AB, again) == 2
    world.load(AB, again)


def test_q04_few_chunks_are_not_worth_waiting_for() -> None:
    keys = chain("abc")
    for limit, expected in ((2, 2), (0, None)):
        world = World(num_wait_chunks_min=limit)
        world.run("writer", keys[:2], store_tiers=[])
        world.put_below("a", keys)
        assert world.lookup(keys, world.request("r")) == expected


def test_loading_is_weighed_against_computing_with_what_was_measured() -> None:
    world = World(num_slots=8, max_wait_s=1e6, tokens_per_chunk=100)
    world.backends["a"].delay_s = 2.0
    world.put_below("a", chain("abcd"))
    ctx = world.request("first")
    assert world.lookup(ABCD, ctx) is None, "nothing is known yet, so it is tried"
    world.step(by_s=2.0)
    assert world.lookup(ABCD, ctx) == 4
    assert world.tier()["read_bytes_per_s"] == 4 * CHUNK_BYTES / 2.0
    world.load(ABCD, ctx)
    world.put_below("a", chain("wxyz"))
    world.manager.set_prefill_rate(400.0)  # four chunks in a second, loading takes two
    assert world.lookup(chain("wxyz"), world.request("fast engine")) == 0
    world.manager.set_prefill_rate(100.0)
    assert world.lookup(chain("wxyz"), world.request("slow engine")) is None


def test_a_tier_that_was_slow_once_is_measured_again() -> None:
    world = World(num_slots=8, max_wait_s=1e6, prefill_tokens_per_s=4.0)
    world.backends["a"].delay_s = 20.0
    world.put_below("a", [*ABCD, *chain("wxyz")])
    ctx = world.request("first")
    world.lookup(ABCD, ctx)
    world.step(by_s=20.0)
    assert world.lookup(ABCD, ctx) == 4
    assert world.lookup(chain("wxyz"), world.request("second")) == 0
    world.clock.advance(60.0)
    assert world.lookup(chain("wxyz"), world.request("third")) is None


def test_k07_the_record_says_where_a_requests_chunks_came_from_and_how_long_it_took() -> None:
    world = World(num_slots=8)
    keys = chain("abcdef")
    world.run("writer", keys[:2], store_tiers=[])
    world.put_below("a", keys[2:5])
    world.backends["a"].delay_s = 1.5
    ctx = world.request("r")
    world.clock.advance(3.0)
    world.lookup(keys, ctx)
    world.step(new=["r"], by_s=1.5)
    assert world.lookup(keys, ctx) == 5
    world.load(keys[:5], ctx)
    record = world.tiering.request_record(ctx)
    assert record is not None
    assert record.num_chunks_from == {"cpu": 2, "a": 3}
    assert (record.num_missed, record.waited_s, record.queued_s) == (1, 1.5, 3.0)


def test_a_chunk_deleted_or_reset_while_it_is_fetched_does_not_appear() -> None:
    for how in ("delete", "reset"):
        world = World()
        world.put_below("a", AB)
        world.backends["a"].hold = True
        ctx = world.request("r")
        assert world.lookup(AB, ctx) is None
        world.step()
        if how == "delete":
            world.manager.delete(AB, ctx)
        else:
            world.manager.reset_cache()
        assert list(world.manager.lookup_states(AB, ctx)) == [MISS, MISS]
        world.backends["a"].hold = False
        world.step()
        assert world.lookup(AB, ctx) == 0
        world.manager.on_request_finished(ctx)
        world.assert_idle()


def test_o04_a_fetched_chunk_keeps_the_end_that_it_was_stored_with() -> None:
    world = World()
    world.run("writer", AB, ttl_s=60)
    world.flood(4)
    world.clock.advance(50.0)
    ctx = world.request("reader")
    assert world.lookup(AB, ctx) is None
    world.step()
    assert world.lookup(AB, ctx) == 2
    world.clock.advance(11.0)
    assert world.lookup(AB, ctx) == 0
    assert world.below("a") == set() or world.lookup(AB, world.request("later")) == 0


def test_every_key_lied_about_costs_a_request_one_try() -> None:
    world = World()
    world.backends["a"].lie = EVERY_KEY
    ctx = world.request("r")
    assert world.lookup(ABCD, ctx) is None
    world.step()
    assert world.lookup(ABCD, ctx) == 0
    assert world.tier()["failed_load_chunks"] == 4


def test_a_chunk_deleted_before_its_fetch_began_can_be_fetched_anew_in_the_same_step() -> None:
    world = World(num_slots=4)
    world.put_below("a", AB)
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    world.manager.delete(AB, ctx)
    world.put_below("a", AB)  # somebody else stores it
    assert world.lookup(AB, ctx) is None
    world.step()
    assert [list(job.keys) for job in world.loads()] == [AB]
    assert world.lookup(AB, ctx) == 2
    world.load(AB, ctx)
    world.manager.on_request_finished(ctx)
    world.assert_idle()


def test_the_ready_part_of_a_prefix_does_not_make_room_for_the_rest_of_it() -> None:
    world = World(num_slots=4)
    world.run("old", AB, store_tiers=[])
    world.run("young", chain("yz"), store_tiers=[])
    world.put_below("a", ABCD)
    ctx = world.request("r")
    assert world.lookup(ABCD, ctx) is None
    world.step()
    assert world.lookup(ABCD, ctx) == 4
    world.load(ABCD, ctx)


def test_a_very_long_prefix_is_asked_for_and_fetched_in_pieces_and_each_chunk_once() -> None:
    keys = [numbered_key(i) for i in range(2 * NUM_ASKED_MAX + 100)]
    world = World(num_slots=len(keys))
    world.put_below("a", keys)
    ctx = world.request("r")
    assert world.lookup(keys, ctx) is None
    assert world.stats["num_writing"] == NUM_ASKED_MAX
    assert world.lookup(keys, ctx) is None, "it goes on from there, also within the step"
    assert world.tier()["lookup_chunks"] == 2 * NUM_ASKED_MAX
    while (count := world.lookup(keys, ctx)) is None:
        world.step()
    assert count == len(keys)
    assert world.backends["a"].loaded == keys
    world.load(keys, ctx)
    finish(world.manager, ctx)
    world.assert_idle()


def test_a_gap_in_a_long_prefix_ends_what_is_fetched() -> None:
    keys = [numbered_key(i) for i in range(NUM_ASKED_MAX + 100)]
    world = World(num_slots=len(keys))
    world.put_below("a", [key for key in keys if key != keys[NUM_ASKED_MAX + 10]])
    ctx = world.request("r")
    while (count := world.lookup(keys, ctx)) is None:
        world.step()
    assert count == NUM_ASKED_MAX + 10
    assert world.backends["a"].loaded == keys[:count]


def test_a_piece_of_a_very_long_prefix_is_not_taken_for_all_there_is() -> None:
    keys = [numbered_key(i) for i in range(NUM_ASKED_MAX + 100)]
    world = World(num_slots=len(keys), num_wait_chunks_min=NUM_ASKED_MAX + 50)
    world.put_below("a", keys)
    assert world.lookup(keys, world.request("r")) is None
    assert world.lookup(keys[NUM_ASKED_MAX:], world.request("short")) == 0


def test_chunks_behind_one_that_a_tier_still_looks_for_do_not_take_its_slot() -> None:
    world = World(num_slots=2)
    world.put_below("a", ABCD)
    backend, ctx = world.backends["a"], world.request("r")
    backend.hold_lookups, backend.lie = True, set(ABCD[1:])  # only the first is not known yet
    assert world.lookup(ABCD, ctx) is None
    world.step()
    assert world.loads() == []
    backend.hold_lookups, backend.lie = False, set()
    assert world.lookup(ABCD, ctx) is None
    world.step()
    world.step()
    assert world.lookup(ABCD, ctx) == 2
    assert [list(job.keys) for job in world.loads()] == [ABCD[:2]]
