"""Events: per medium, only after success, on every path, with a reason for what left."""

from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.testing import chain
from kvstrata.testing.manager_calls import begin_store, finish, load, store
from tests.tiering_world import World

AB, ABCD = chain("ab"), chain("abcd")


def events(world: World) -> list[OffloadingEvent]:
    world.step()
    return list(world.manager.take_events())


def seen(found: list[OffloadingEvent], kind: EventKind, medium: str) -> list[bytes]:
    return [key for e in found if (e.kind, e.medium) == (kind, medium) for key in e.keys]


def reasons(found: list[OffloadingEvent], medium: str) -> dict[bytes, RemovalReason | None]:
    return {
        key: e.reason
        for e in found
        if (e.kind, e.medium) == (EventKind.REMOVED, medium)
        for key in e.keys
    }


def test_j03_chunks_are_announced_once_by_store_and_by_promotion_and_when_they_leave() -> None:
    world = World()
    world.run("w", AB)
    found = events(world)
    assert seen(found, EventKind.STORED, "cpu") == AB
    assert seen(found, EventKind.STORED, "a") == AB
    world.flood(4)
    assert set(reasons(events(world), "cpu")) >= set(AB)
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    assert seen(events(world), EventKind.STORED, "cpu") == []
    assert world.lookup(AB, ctx) == 2
    load(world.manager, AB, ctx)
    found = events(world)
    assert seen(found, EventKind.STORED, "cpu") == AB
    assert seen(found, EventKind.STORED, "a") == []


def test_j02_nothing_is_announced_that_failed_or_did_not_change() -> None:
    world = World(num_slots=8)
    world.backends["a"].fail_stores = {ABCD[1]}
    world.backends["a"].fail_loads = {chain("x")[0]}
    world.put_below("a", chain("x"))
    ctx = world.request("w")
    taken = begin_store(world.manager, ABCD, ctx)
    world.manager.complete_store(taken, ctx, failed={ABCD[3]})
    found = events(world)
    found += events(world)
    assert seen(found, EventKind.STORED, "cpu") == ABCD[:3]
    assert seen(found, EventKind.STORED, "a") == [ABCD[0], ABCD[2]]
    world.lookup(chain("x"), ctx)
    world.step()
    assert world.lookup(chain("x"), ctx) == 0
    store(world.manager, ABCD[:1], ctx)
    load(world.manager, ABCD[:1], ctx)
    assert [e for e in events(world) if e.kind is EventKind.STORED] == []


def test_j07_a_reset_is_one_event_for_each_medium_that_had_something() -> None:
    world = World(num_slots=8, tiers=("a", "kept"), each={"kept": {"write": "never"}})
    world.run("w", ABCD)
    events(world)
    world.manager.reset_cache()
    found = [e for e in events(world) + events(world) if e.kind is EventKind.CLEARED]
    assert sorted(e.medium for e in found) == ["a", "cpu"]
    assert {e.reason for e in found} == {RemovalReason.CLEARED}


def test_j08_every_removal_says_why() -> None:
    world = World(num_slots=4, tier={"write": "through"})
    world.run("private", chain("x"), store_tiers=[])
    world.run("shared", chain("y"))
    world.flood(4)
    left = reasons(events(world), "cpu")
    assert left[chain("x")[0]] is RemovalReason.EVICTED
    assert left[chain("y")[0]] is RemovalReason.DEMOTED
    world.run("short", chain("z"), ttl_s=5)
    ctx = world.request("r")
    store(world.manager, chain("p"), ctx)
    world.step()
    world.manager.delete(chain("p"), ctx)
    left = reasons(events(world), "cpu")
    assert left[chain("p")[0]] is RemovalReason.DELETED
    world.clock.advance(6.0)
    found = events(world)
    assert reasons(found, "cpu")[chain("z")[0]] is RemovalReason.EXPIRED


def test_a_corrupt_chunk_below_leaves_its_medium_and_never_enters_the_primary() -> None:
    world = World()
    world.put_below("a", AB)
    world.backends["a"].corrupt = {AB[1]}
    ctx = world.request("r")
    world.lookup(AB, ctx)
    world.step()
    assert world.lookup(AB, ctx) == 1
    found = events(world)
    assert reasons(found, "a") == {AB[1]: RemovalReason.CORRUPT}
    assert seen(found, EventKind.STORED, "cpu") == AB[:1]
    assert world.tier()["corrupt_chunks"] == 1
    finish(world.manager, ctx)


def test_taking_events_changes_nothing_else() -> None:
    world = World()
    world.put_below("a", AB)
    ctx = world.request("r")
    world.lookup(AB, ctx)
    world.step()
    before = world.stats
    world.manager.take_events()
    after = world.stats
    assert before.counters == after.counters
    assert {k: v for k, v in before.gauges.items() if k != "num_events"} == {
        k: v for k, v in after.gauges.items() if k != "num_events"
    }
