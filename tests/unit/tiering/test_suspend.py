"""L01, L02, L05: an engine that sleeps and wakes up, and one that gets other weights."""

from pathlib import Path
from typing import Any

import pytest

import kvstrata
from kvstrata.core.manager import SuspendMode
from kvstrata.core.results import LookupResult
from kvstrata.testing import EVERY_KEY, chain, pattern
from kvstrata.testing.manager_calls import begin_store, finish, look_up, store
from tests.host_memory import taken_bytes
from tests.tiering_world import World

AB, ABCDE = chain("ab"), chain("abcde")
KEEP, RELEASE, FORGET = SuspendMode.KEEP, SuspendMode.RELEASE, SuspendMode.FORGET
HIT, MISS = LookupResult.HIT, LookupResult.MISS


def held_world() -> World:
    world = World(num_slots=8, tiers=("a", "b"))
    world.put_below("a", chain("xy"))
    world.backends["a"].hold = True
    return world


@pytest.mark.parametrize("mode", SuspendMode)
def test_l01_jobs_in_flight_end_and_the_next_lookup_and_load_work(mode: SuspendMode) -> None:
    world = held_world()
    reader, writer = world.request("reader"), world.request("writer")
    assert world.lookup(chain("xy"), reader) is None
    store(world.manager, AB, writer)
    taken = begin_store(world.manager, chain("k"), writer)
    world.step()
    world.manager.suspend(mode, timeout_s=0.0)
    assert world.lookup(chain("xy"), reader) == 0, "it goes on without what it waited for"
    world.backends["a"].hold = False
    world.manager.complete_store(taken, writer)
    finish(world.manager, writer)
    finish(world.manager, reader)
    world.assert_idle()
    world.run("next", chain("pq"))
    again = world.request("again")
    assert look_up(world.manager, chain("pq"), again) == 2
    world.load(chain("pq"), again)
    finish(world.manager, again)
    world.assert_idle()


@pytest.mark.parametrize(("mode", "state"), [(KEEP, HIT), (RELEASE, MISS), (FORGET, MISS)])
def test_l02_chunks_stay_where_the_mode_says_so(mode: SuspendMode, state: LookupResult) -> None:
    world = World(num_slots=8)
    world.run("w", ABCDE)
    world.manager.suspend(mode)
    ctx = world.request("r")
    assert [*world.tiering.inner.lookup_states(ABCDE, ctx)] == [state] * 5
    assert look_up(world.manager, ABCDE, ctx) == (0 if mode is FORGET else 5)
    assert world.below("a") == (set() if mode is FORGET else set(ABCDE))


def test_what_only_the_primary_holds_is_copied_to_a_lasting_tier_before_memory_goes() -> None:
    world = World(num_slots=8, tier={"write": "on_evict", "is_persistent": True})
    world.run("w", ABCDE)
    assert world.below("a") == set()
    world.manager.suspend(KEEP)
    assert world.below("a") == set()
    world.manager.suspend(RELEASE)
    assert world.below("a") == set(ABCDE)
    ctx = world.request("r")
    assert look_up(world.manager, ABCDE, ctx) == 5
    world.load(ABCDE, ctx)


def settings(root: Path, **more: object) -> dict[str, Any]:
    tier = {"type": "fs", "root": str(root), "max_bytes": "1GiB"}
    primary = {"num_chunks": 64, "policy": "lru"}
    return {"chunk_bytes": 2**18, "primary": primary, "tiers": [tier], **more}


def rows(keys: list[kvstrata.OffloadKey], salt: bytes = b"") -> list[bytes]:
    return [pattern(kvstrata.OffloadKey(salt + key), 2**18) for key in keys]


def test_host_memory_is_given_back_and_taken_again(tmp_path: Path) -> None:
    keys = chain("abcdefghijklmnop")
    with kvstrata.open(settings(tmp_path)) as opened:
        before = taken_bytes()
        opened.put(keys, rows(keys))
        taken = taken_bytes() - before
        assert taken >= 16 * 2**18
        opened.suspend(RELEASE)
        assert taken_bytes() - before < taken / 8
        loaded = [bytearray(2**18) for _ in keys]
        assert opened.get(keys, loaded) == 16
        assert [bytes(row) for row in loaded] == rows(keys)


def contents(opened: kvstrata.KVStore, keys: list[kvstrata.OffloadKey]) -> list[bytes]:
    loaded = [bytearray(2**18) for _ in keys]
    count = opened.get(keys, loaded)
    return [bytes(row) for row in loaded[:count]]


def test_l05_nothing_of_the_old_weights_is_served_and_a_restart_knows_the_epoch(
    tmp_path: Path,
) -> None:
    with kvstrata.open(settings(tmp_path)) as opened:
        opened.put(AB, rows(AB))
        opened.set_epoch("2")
        assert contents(opened, AB) == []
        assert opened.put(AB, rows(AB, b"new")) == 2
        assert contents(opened, AB) == rows(AB, b"new")
    with kvstrata.open(settings(tmp_path, weights_epoch="2")) as opened:
        assert contents(opened, AB) == rows(AB, b"new")
        opened.set_epoch("3")
        assert contents(opened, AB) == []
        opened.set_epoch("")
        assert contents(opened, AB) == rows(AB), "the first weights are back, and their chunks"


def test_l05_the_place_of_old_epochs_is_used_again(tmp_path: Path) -> None:
    config = settings(tmp_path)
    config["tiers"][0]["max_bytes"] = 6 * (2**18 + 8192)
    with kvstrata.open(config) as opened:
        opened.put(ABCDE, rows(ABCDE))
        assert opened.flush()
        opened.set_epoch("2")
        opened.put(ABCDE, rows(ABCDE, b"new"))
        assert opened.flush()
        assert opened.get_stats().tiers["fs"]["stored_chunks"] == 5
    with kvstrata.open(config | {"weights_epoch": "2"}) as opened:
        assert contents(opened, ABCDE) == rows(ABCDE, b"new")


def test_l05_a_request_that_began_with_the_old_weights_stores_nothing_any_more() -> None:
    world = World(num_slots=8)
    old = world.request("old")
    taken = begin_store(world.manager, AB, old)
    world.manager.set_epoch("2")
    world.manager.complete_store(taken, old)
    assert store(world.manager, chain("abc"), old) == []
    finish(world.manager, old)
    new = world.request("old")
    assert world.lookup(AB, new) == 0
    assert store(world.manager, AB, new) == AB
    finish(world.manager, new)
    world.assert_idle()


def test_setting_the_same_epoch_again_changes_nothing() -> None:
    world = World(num_slots=8)
    world.manager.set_epoch("2")
    world.run("w", AB)
    world.manager.set_epoch("2")
    assert world.lookup(AB, world.request("r")) == 2


def test_l05_jobs_of_the_old_epoch_end_without_effect() -> None:
    world = World(num_slots=8)
    world.put_below("a", chain("xy"))
    world.backends["a"].fail_loads = EVERY_KEY
    world.backends["a"].hold = True
    ctx = world.request("r")
    assert world.lookup(chain("xy"), ctx) is None
    world.step()
    world.backends["a"].chunks.clear()  # a fake knows no namespaces: play that it does
    world.manager.set_epoch("2", timeout_s=0.0)
    assert world.lookup(chain("xy"), ctx) == 0
    finish(world.manager, ctx)
    world.assert_idle()
    assert world.stats["num_free"] == 8
