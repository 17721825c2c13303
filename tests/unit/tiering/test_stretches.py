"""Many keys are looked at run by run, with the same answer as one by one."""

import random

from kvstrata.testing import numbered_key
from kvstrata.testing.manager_calls import begin_store, finish, store
from kvstrata.tiering.stretches import in_common, resident_among, there_among
from tests.tiering_world import World

KEYS = [numbered_key(i) for i in range(12)]


def test_what_can_be_loaded_is_found_among_what_is_written_and_what_is_not_there() -> None:
    world = World(num_slots=12)
    table = world.tiering.inner.store.table
    ctx = world.request("w")
    store(world.manager, KEYS[:4], ctx)
    writing = begin_store(world.manager, KEYS[:7], ctx)
    other = world.request("o")
    store(world.manager, [KEYS[0], *KEYS[9:11]], other)
    rng = random.Random(7)
    for _ in range(100):
        some = rng.sample(KEYS, rng.randint(0, 12))
        for keys in (some, sorted(some, key=KEYS.index)):
            one_by_one = [k for k in keys if k in {*KEYS[:4], *KEYS[9:11]}]
            assert resident_among(keys, table) == one_by_one
    world.manager.complete_store(writing, ctx)
    assert resident_among(KEYS, table) == [*KEYS[:7], *KEYS[9:11]]
    finish(world.manager, ctx)


def test_the_common_stretch_ends_where_run_and_keys_part() -> None:
    world = World(num_slots=12)
    ctx = world.request("w")
    store(world.manager, KEYS[:4], ctx)
    run = world.tiering.inner.store.table.find(KEYS[0])
    assert run is not None
    assert in_common(run, KEYS[:4]) == KEYS[:4]
    assert in_common(run, KEYS[2:6]) == KEYS[2:4]
    assert in_common(run, [KEYS[1], KEYS[2], KEYS[7]]) == KEYS[1:3]


def test_what_has_a_slot_is_found_without_what_got_its_slots_last() -> None:
    world = World(num_slots=12)
    table = world.tiering.inner.store.table
    ctx = world.request("w")
    store(world.manager, KEYS[:4], ctx)
    other = world.request("o")
    store(world.manager, [KEYS[0], *KEYS[9:11]], other)
    begin_store(world.manager, KEYS[:6], ctx)
    new = begin_store(world.manager, [*KEYS[:4], *KEYS[7:9]], other)
    assert set(new) == set(KEYS[7:9])
    there = {*KEYS[:6], *KEYS[9:11]}
    rng = random.Random(8)
    for _ in range(100):
        some = rng.choices(KEYS, k=rng.randint(0, 20))
        for keys in (some, sorted(some, key=KEYS.index)):
            one_by_one = [key for key in dict.fromkeys(keys) if key in there]
            assert there_among(keys, table, new) == one_by_one
    assert set(there_among(KEYS, table, ())) == {*there, *new}
