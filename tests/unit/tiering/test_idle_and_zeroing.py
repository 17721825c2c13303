"""O04: chunks that nobody uses leave after a while; what was freed is overwritten when asked."""

import os
from pathlib import Path
from typing import Any

import pytest

from kvstrata.core.delegate import find_manager
from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.core.results import LookupResult
from kvstrata.primary.tidying import TidyOffloadingManager
from kvstrata.testing import chain, numbered_key
from kvstrata.testing.manager_calls import finish, look_up, start, store
from kvstrata.testing.tier_calls import NUM_POLLS_MAX, pause
from tests.disks import chunk_files
from tests.tiering_world import FAKE, World

AB, KEPT = chain("ab"), chain("k")


def tiers(root: Path) -> dict[str, dict[str, Any]]:
    return {
        "memory": {"type": "memory", "idle_s": 60},
        "fs": {"type": "fs", "root": str(root), "max_bytes": "1MiB", "direct": "off", "idle_s": 60},
    }


class IdleWorld(World):
    """A primary and a tier that both let unused chunks go after a minute."""

    def __init__(self, kind: str, root: Path, **primary: object) -> None:
        config = {"num_chunks": 8, "policy": "lru", "idle_s": 60, **primary}
        super().__init__(8, tier=tiers(root)[kind], primary=config)

    def use(self, req_id: str) -> None:
        """Let a request load and touch the kept chunk."""
        ctx = start(self.manager, req_id)
        assert look_up(self.manager, KEPT, ctx) == 1
        self.manager.touch(KEPT, ctx)
        self.load(KEPT, ctx)
        finish(self.manager, ctx)
        self.settle()

    def wait_for_residents(self, count: int) -> None:
        for _ in range(NUM_POLLS_MAX):
            self.step()
            if self.tier()["num_resident"] == count:
                return
            pause()
        raise AssertionError(f"{self.tier()['num_resident']} are still there, not {count}")


@pytest.mark.parametrize("kind", ["memory", "fs"])
def test_o04_unused_chunks_leave_every_tier_and_used_ones_stay(kind: str, tmp_path: Path) -> None:
    world = IdleWorld(kind, tmp_path)
    world.run("w", AB)
    world.run("k", KEPT)
    world.settle()
    for i in range(7):
        world.clock.advance(10.0)
        world.use(f"use {i}")
    world.wait_for_residents(1)
    states = list(world.tiering.inner.lookup_states([*AB, *KEPT], start(world.manager, "s")))
    assert [state.value for state in states] == ["miss", "miss", "hit"]
    assert world.stats["expired_chunks"] == world.tier()["expired_chunks"] == 2
    assert look_up(world.manager, AB, start(world.manager, "r")) == 0
    removed = {
        (event.medium, key)
        for event in world.manager.take_events()
        if event.kind is EventKind.REMOVED and event.reason is RemovalReason.EXPIRED
        for key in event.keys
    }
    assert removed == {(medium, key) for medium in ("cpu", "a") for key in AB}
    world.manager.shutdown(10.0)


def test_o04_a_fixed_lifetime_ends_however_often_a_chunk_is_used(tmp_path: Path) -> None:
    world = IdleWorld("memory", tmp_path)
    world.run("k", KEPT, ttl_s=35)
    world.settle()
    for i in range(3):
        world.clock.advance(10.0)
        world.use(f"use {i}")
    world.clock.advance(10.0)
    assert look_up(world.manager, KEPT, start(world.manager, "late")) == 0
    world.manager.shutdown(10.0)


def test_o04_chunks_that_were_unused_in_earlier_runs_leave_at_the_next_start(
    tmp_path: Path,
) -> None:
    world = IdleWorld("fs", tmp_path)
    world.run("w", AB)
    world.settle()
    world.manager.shutdown(10.0)
    later = IdleWorld("fs", tmp_path)
    later.clock.advance(61.0)
    assert later.tier()["num_resident"] == 2
    later.wait_for_residents(0)
    assert chunk_files(tmp_path) == []
    later.manager.shutdown(10.0)


def test_o04_a_prefetched_chunk_that_nobody_uses_leaves_too() -> None:
    primary = {"num_chunks": 8, "policy": "lru", "idle_s": 60}
    world = World(8, tier={"type": FAKE}, primary=primary)
    world.put_below("a", AB)
    ctx = world.request("prefetch")
    assert look_up(world.manager, AB, ctx) == 2
    finish(world.manager, ctx)
    for _ in range(10):
        world.step(by_s=10.0)
    assert world.stats["num_resident"] == 0
    assert world.below("a") == set(AB), "each tier has its own setting"


def test_what_is_remembered_of_uses_stays_bounded() -> None:
    primary = {"num_chunks": 8, "policy": "lru", "idle_s": 60}
    world = World(8, primary=primary)
    tidy = find_manager(world.manager, TidyOffloadingManager)
    assert tidy is not None
    world.run("k", KEPT)
    ctx = world.request("r")
    for i in range(100):
        world.manager.touch([numbered_key(i)], ctx)
        assert tidy.num_remembered <= 4 * 8 + 2
    for _ in range(6):
        world.step(by_s=7.6)
    assert list(world.manager.lookup_states(KEPT, ctx)) == [LookupResult.HIT]


@pytest.mark.parametrize("zero_freed", [True, False])
def test_o04_freed_slots_are_overwritten_when_asked(zero_freed: bool) -> None:
    primary = {"num_chunks": 8, "policy": "lru", "zero_freed": zero_freed}
    world = World(8, primary=primary)
    ctx = world.request("w")
    store(world.manager, [*AB, *KEPT], ctx)
    spec = world.manager.prepare_load(AB[:1], ctx)
    secret = bytes(world.manager.slots[spec.slots[0]])
    world.manager.delete(AB, ctx)
    world.step()
    rows = [bytes(row) for row in world.manager.slots[:]]
    assert secret in rows, "a copy still reads it"
    world.manager.complete_load(AB[:1], ctx)
    failing = world.manager.prepare_store(chain("f"), ctx)
    assert failing is not None
    half_written = failing.store_spec.slots[0]
    world.manager.slots[half_written][:] = b"x" * len(secret)
    world.step()
    assert bytes(world.manager.slots[half_written]) == b"x" * len(secret), "it is being written"
    world.manager.complete_store(chain("f"), ctx, failed=set(chain("f")))
    world.step()
    rows = [bytes(row) for row in world.manager.slots[:]]
    assert rows.count(bytes(len(secret))) == (7 if zero_freed else 5)
    assert (secret in rows) is not zero_freed
    finish(world.manager, ctx)


@pytest.mark.parametrize("zero_removed", [True, False])
def test_o04_removed_files_are_overwritten_when_asked(zero_removed: bool, tmp_path: Path) -> None:
    settings = tiers(tmp_path)["fs"] | {"zero_removed": zero_removed}
    world = World(8, tier=settings)
    world.run("w", AB)
    world.settle()
    files = [path.open("rb") for path in chunk_files(tmp_path)]
    sizes = [os.fstat(file.fileno()).st_size for file in files]
    world.manager.delete(AB, world.request("d"))
    while chunk_files(tmp_path):
        world.step()
        pause()
    contents = [file.read() for file in files]
    assert [content == bytes(len(content)) for content in contents] == [zero_removed] * 2
    assert list(map(len, contents)) == sizes
    for file in files:
        file.close()
    world.manager.shutdown(10.0)
