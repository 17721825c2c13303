"""What the primary alone does with requests of all kinds, beyond what every manager promises."""

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.build import build_manager
from kvstrata.core.events import EventKind
from kvstrata.core.keys import OffloadKey, make_offload_key
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.namespace import HashExtras, hash_blocks
from kvstrata.core.request import ReqContext
from kvstrata.testing import FakeClock, chain, numbered_key, pattern
from kvstrata.testing.manager_base import assert_idle
from kvstrata.testing.manager_calls import (
    begin_store,
    end_step,
    finish,
    load,
    look_up,
    start,
    store,
)


def build(clock: FakeClock, num_chunks: int = 8, **primary: object) -> OffloadingManager:
    return build_manager(
        {"primary": {"num_chunks": num_chunks, "policy": "lru", **primary}},
        chunk_bytes=100,
        namespace="test",
        clock=clock,
    )


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def manager(clock: FakeClock) -> OffloadingManager:
    return build(clock)


def keys_with(extras: HashExtras) -> list[OffloadKey]:
    hashes = hash_blocks(range(8), 4, extras)
    return [make_offload_key(block, group) for group in (0, 1) for block in hashes]


def test_keys_with_salts_adapters_and_groups_leave_no_pins(clock: FakeClock) -> None:
    # Field report B09.
    manager = build(clock, num_chunks=64)
    every = [
        HashExtras(adapter=adapter, tenant=tenant, salt=salt)
        for adapter in (None, "x")
        for tenant in (None, "x")
        for salt in (None, "x", "y")
    ]
    for i, extras in enumerate(every * 20):
        ctx, keys = start(manager, f"r{i}"), keys_with(extras)
        num_hits = look_up(manager, keys, ctx)
        assert num_hits in {0, 4}
        if i % 3 == 0:
            load(manager, keys[:num_hits], ctx)
        store(manager, keys, ctx)
        finish(manager, ctx)
    assert_idle(manager)
    assert manager.get_stats()["num_resident"] == 4 * len(every)


@given(st.permutations(chain("abcdefgh")))
@settings(max_examples=20, derandomize=True)
def test_tails_leave_first_whatever_order_copies_end_in(order: list[OffloadKey]) -> None:
    # Field report G10.
    manager = build(FakeClock())
    keys = chain("abcdefgh")
    ctx = start(manager, "r")
    manager.touch(keys, ctx)
    begin_store(manager, keys, ctx)
    for key in order:
        manager.complete_store([key], ctx)
    finish(manager, ctx)
    other = start(manager, "other")
    manager.touch(chain("xy"), other)
    output = manager.prepare_store(chain("xy"), other)
    assert output is not None
    assert set(output.evicted_keys) == set(keys[6:])


def test_requests_in_turn_both_count_as_recent(clock: FakeClock) -> None:
    # Field report G11.
    manager = build(clock, num_chunks=12)
    for letters in ("wxyz", "abcd", "efgh"):
        ctx = start(manager, letters)
        store(manager, chain(letters), ctx)
        finish(manager, ctx)
    first, second = start(manager, "first"), start(manager, "second")
    for i in range(1, 5):
        for ctx, letters in ((first, "abcd"), (second, "efgh")):
            look_up(manager, chain(letters)[:i], ctx)
            manager.touch(chain(letters)[:i], ctx)
    finish(manager, first)
    finish(manager, second)
    newcomer = start(manager, "newcomer")
    store(manager, chain("stuv"), newcomer)
    assert look_up(manager, chain("abcd"), newcomer) == 4
    assert look_up(manager, chain("efgh"), newcomer) == 4
    assert look_up(manager, chain("wxyz"), newcomer) == 0


def test_a_request_that_grows_never_displaces_its_own_head(clock: FakeClock) -> None:
    manager = build(clock, num_chunks=6)
    ctx, keys = start(manager, "grows"), chain("abcdefgh")
    store(manager, keys[:4], ctx)
    sharing = start(manager, "shares the head")
    look_up(manager, keys[:2], sharing)
    manager.touch(keys[:2], sharing)
    finish(manager, sharing)
    for i in range(4, 8):
        taken = begin_store(manager, [keys[i]], ctx)
        if taken:
            manager.complete_store(taken, ctx)
    assert look_up(manager, keys, ctx) == 6


def test_a_head_that_came_back_belongs_to_no_later_chunk(clock: FakeClock) -> None:
    manager = build(clock, num_chunks=3)
    first, second = start(manager, "first"), start(manager, "second")
    store(manager, chain("abc"), first, failed=chain("a"))
    assert begin_store(manager, chain("a"), first) == chain("a")
    manager.complete_store(chain("a"), first)
    assert store(manager, chain("axy"), second) == chain("axy")[1:]
    assert look_up(manager, chain("axy"), second) == 3


def test_handles_that_are_kept_hold_no_more_than_themselves(clock: FakeClock) -> None:
    # Field report F06.
    manager = build(clock, num_chunks=64)
    kept: list[object] = []

    def rounds(first: int, last: int) -> None:
        for number in range(first, last):
            ctx = ReqContext(f"r{number}")
            manager.on_new_request(ctx)
            keys = [numbered_key(2 * number), numbered_key(2 * number + 1)]
            output = manager.prepare_store(keys, ctx)
            assert output is not None
            manager.complete_store(output.keys_to_store, ctx)
            if number % 10 == 0:
                kept.append((output.store_spec, manager.slots[output.store_spec.slots[0]]))
            finish(manager, ctx)
            list(manager.take_events())

    rounds(0, 500)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        rounds(500, 3_500)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 300 * 1_000, "more than 1,000 bytes for each of 300 kept handles"


def test_managers_of_one_configuration_share_nothing(clock: FakeClock) -> None:
    # Field report E13.
    one, two = build(clock), build(clock)
    keys = chain("ab")
    first, second = start(one, "r"), start(two, "r")
    store(one, keys, first)
    assert look_up(two, keys, second) == 0
    store(two, chain("xy"), second)
    load(one, keys, first)
    load(two, chain("xy"), second)
    one.shutdown()
    load(two, chain("xy"), second)
    two.shutdown()


def test_stats_name_what_was_asked_for_and_what_is_taken(manager: OffloadingManager) -> None:
    # Field report F04.
    stats = manager.get_stats()
    assert stats["requested_bytes"] == 800
    assert stats["reserved_bytes"] == 8 * 4_096


def test_a_lost_completion_shows_and_can_be_failed_by_hand(
    manager: OffloadingManager, clock: FakeClock
) -> None:
    # Field report F08.
    stuck, other = start(manager, "stuck"), start(manager, "other")
    keys = chain("abc")
    manager.prepare_store(keys, stuck)
    manager.on_request_finished(stuck)
    clock.advance(100.0)
    store(manager, chain("xy"), other)
    manager.prepare_load(chain("xy"), other)
    clock.advance(20.0)
    store_job, load_job = manager.get_stats().jobs
    assert (store_job.kind, store_job.num_chunks, store_job.req_id) == ("store", 3, "stuck")
    assert (load_job.kind, load_job.num_chunks, load_job.req_id) == ("load", 2, "other")
    assert (store_job.age_s, load_job.age_s) == (120.0, 20.0)
    assert store_job.tier == load_job.tier == "cpu"
    manager.complete_store(keys, stuck, failed=keys)
    manager.complete_load(chain("xy"), other)
    assert list(manager.get_stats().jobs) == []
    assert manager.get_stats()["num_free"] == 6


def test_events_nobody_takes_are_bounded_and_counted(clock: FakeClock) -> None:
    manager = build(clock, num_events_max=3)
    ctx = start(manager, "r")
    for letter in "abcde":
        store(manager, chain(letter), ctx)
    stats = manager.get_stats()
    assert (stats["num_events"], stats["dropped_events"]) == (3, 2)
    events = list(manager.take_events())
    assert [list(event.keys) for event in events] == [chain(letter) for letter in "cde"]
    assert {event.kind for event in events} == {EventKind.STORED}
    assert manager.get_stats()["num_events"] == 0


def test_protection_can_be_switched_off(clock: FakeClock) -> None:
    manager = build(clock, protect_share=0)
    ctx = start(manager, "victim")
    store(manager, chain("abcd"), ctx)
    end_step(manager, preempted=["victim"])
    assert manager.get_stats()["num_protected"] == 0
    assert manager.get_stats()["num_evictable"] == 4


def test_protection_covers_heads_first_and_several_requests(clock: FakeClock) -> None:
    manager = build(clock)
    first, second = start(manager, "first"), start(manager, "second")
    store(manager, chain("abc"), first)
    store(manager, chain("wxyz"), second)
    end_step(manager, preempted=["first", "second"])
    assert manager.get_stats()["num_protected"] == 4
    for letter in "0123456789":
        other = start(manager, letter)
        store(manager, chain(letter), other)
        finish(manager, other)
    assert look_up(manager, chain("abc"), first) == 3
    assert look_up(manager, chain("wxyz"), second) == 1


def test_a_chunk_that_two_preempted_requests_share_stays_for_the_second(clock: FakeClock) -> None:
    manager = build(clock)
    first, second = start(manager, "first"), start(manager, "second")
    store(manager, chain("ab"), first)
    manager.touch(chain("ab"), second)
    end_step(manager, preempted=["first", "second"])
    manager.on_request_finished(first)
    for letter in "0123456789":
        other = start(manager, letter)
        store(manager, chain(letter), other)
        finish(manager, other)
    assert look_up(manager, chain("ab"), second) == 2


def test_a_load_limit_counts_tokens(clock: FakeClock) -> None:
    manager = build_manager(
        {"primary": {"num_chunks": 8, "policy": "lru"}, "tokens_per_chunk": 16},
        chunk_bytes=100,
        namespace="test",
        clock=clock,
    )
    store(manager, chain("abcd"), start(manager, "writer"))
    for limit, expected in ((0, 0), (15, 0), (16, 1), (47, 2), (64, 4), (1_000, 4)):
        ctx = start(manager, f"limit {limit}", max_load_tokens=limit)
        assert look_up(manager, chain("abcd"), ctx) == expected


def test_keys_of_any_size_and_chunks_of_odd_bytes_survive(clock: FakeClock) -> None:
    # Field report H05: bytes are opaque.
    rng = random.Random(0)
    manager = build_manager(
        {"primary": {"num_chunks": 4, "policy": "lru"}}, chunk_bytes=777, namespace="n", clock=clock
    )
    ctx = start(manager, "r")
    keys = [
        make_offload_key(rng.randbytes(size), group) for size, group in ((1, 0), (64, 2**32 - 1))
    ]
    store(manager, keys, ctx)
    spec = manager.prepare_load(keys, ctx)
    for key, slot in zip(keys, spec.slots, strict=True):
        assert manager.slots[slot] == pattern(key, 777)
    manager.complete_load(keys, ctx)


def test_shutdown_gives_the_memory_back_and_leaves_views_alone(clock: FakeClock) -> None:
    manager = build(clock)
    ctx = start(manager, "r")
    store(manager, chain("a"), ctx)
    view = manager.slots[manager.prepare_load(chain("a"), ctx).slots[0]]
    report = manager.shutdown(1.0)
    assert report.num_abandoned == 0
    assert view == pattern(chain("a")[0], 100)
