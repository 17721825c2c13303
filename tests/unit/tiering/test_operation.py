"""What an operator does to a running manager: reset, delete, attach, detach, shut down."""

import threading
import time
from collections.abc import Collection
from typing import Any

import pytest
from typing_extensions import override

from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.results import LookupResult
from kvstrata.core.tenants import TenantResolver
from kvstrata.testing import EVERY_KEY, FakeBackend, FakeTier, chain, pattern
from kvstrata.testing.manager_calls import begin_store, finish, load, store
from tests.tiering_world import CHUNK_BYTES, FAKE, World

AB, ABCD = chain("ab"), chain("abcd")
LONG = chain("abcdefghijklmnop")
MISS = LookupResult.MISS


def test_l03_an_old_copy_never_touches_new_content_after_a_reset() -> None:
    world = World(num_slots=4)
    world.put_below("a", AB)
    world.backends["a"].hold = True
    old, new = world.request("old"), world.request("new")
    world.lookup(AB, old)
    world.step()
    writing = begin_store(world.manager, chain("x"), old)
    world.manager.reset_cache()
    taken = store(world.manager, chain("pq"), new)
    world.manager.complete_store(writing, old)
    world.backends["a"].hold = False
    world.step()
    load(world.manager, taken, new)
    assert world.lookup(chain("x"), new) == 0
    for ctx in (old, new):
        finish(world.manager, ctx)
    world.assert_idle()


def test_l03_a_fetch_that_ends_after_the_reset_frees_its_slots() -> None:
    world = World(num_slots=2, tier={"type": "tests.unit.tiering.test_operation:StubbornTier"})
    world.put_below("a", AB)
    world.backends["a"].hold = True
    ctx = world.request("r")
    world.lookup(AB, ctx)
    world.step()
    world.manager.reset_cache()
    assert world.manager.prepare_store(chain("x"), ctx) is None, "the slots are still written to"
    world.backends["a"].hold = False
    world.step()
    assert store(world.manager, chain("x"), ctx) == chain("x")
    load(world.manager, chain("x"), ctx)


class StubbornTier(FakeTier):
    """Forgets its chunks at a reset, and runs its jobs to the end all the same."""

    @override
    def reset(self) -> None:
        queue, self._queue = self._queue, {}
        super().reset()
        self._queue = queue


def test_l04_after_a_reset_a_live_request_misses_and_does_not_wait() -> None:
    world = World(max_wait_s=1e6)
    world.put_below("a", AB)
    world.backends["a"].hold = True
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    world.step()
    world.manager.reset_cache()
    assert world.lookup(AB, ctx) == 0
    assert list(world.manager.lookup_states(AB, ctx)) == [MISS, MISS]
    assert world.stats.jobs == [] or not world.backends["a"].chunks
    world.manager.on_request_finished(ctx)
    world.assert_idle()


def test_l06_a_failing_tier_can_be_detached_under_load_and_another_attached() -> None:
    world = World(num_slots=12, tiers=("a", "bad"))
    world.backends["bad"].hold = True
    world.put_below("bad", ABCD)
    readers = [world.request(f"r{i}") for i in range(4)]
    for i, ctx in enumerate(readers):
        assert world.lookup(ABCD[i : i + 1], ctx) is None
    world.step()
    world.run("writer", chain("x"))
    assert len([job for job in world.stats.jobs if job.tier == "bad"]) == 5
    stuck = world.tiering.detach_tier("bad", timeout_s=1.0)
    assert len(stuck) == 0
    assert "bad" not in world.stats.tiers
    assert [world.lookup(ABCD[i : i + 1], ctx) for i, ctx in enumerate(readers)] == [0] * 4
    world.run("serves on", chain("y"))
    assert chain("y")[0] in world.below("a")
    backend = FakeBackend()
    backend.chunks[chain("z")[0]] = pattern(chain("z")[0], CHUNK_BYTES)
    world.tiering.attach_tier({"type": FAKE, "name": "good", "backend": backend})
    assert world.lookup(chain("z"), readers[0]) is None
    world.step()
    assert world.lookup(chain("z"), readers[0]) == 1
    for ctx in readers:
        finish(world.manager, ctx)
    world.assert_idle()
    with pytest.raises(KeyError):
        world.tiering.detach_tier("bad")
    with pytest.raises(ConfigError, match="tiers"):
        world.tiering.attach_tier({"type": FAKE, "name": "good"})


class StuckTier(FakeTier):
    """Can't end its jobs at shutdown, and says so."""

    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        return list(self._queue)


def test_slots_of_a_detached_tiers_stuck_load_come_back_only_when_it_ends() -> None:
    world = World(num_slots=4, tier={"type": "tests.unit.tiering.test_operation:StuckTier"})
    world.put_below("a", AB)
    world.backends["a"].hold = True
    ctx = world.request("r")
    world.lookup(AB, ctx)
    world.step()
    stuck = world.tiering.detach_tier("a", timeout_s=0.1)
    assert len(stuck) == 1
    assert world.lookup(AB, ctx) == 0
    assert store(world.manager, ABCD, ctx) == ABCD[:2]
    assert not world.manager.has_pending_work()
    world.backends["a"].hold = False
    world.step()
    world.step()
    load(world.manager, ABCD[:2], ctx)  # the late copy did not land here
    assert world.stats["num_free"] == 2
    finish(world.manager, ctx)
    world.assert_idle()


def test_l07_deleted_chunks_are_gone_everywhere_and_the_rest_stays() -> None:
    world = World(num_slots=8, tiers=("a", "b"))
    world.run("w", ABCD)
    ctx = world.request("r")
    spec = world.manager.prepare_load(ABCD[:2], ctx)
    world.manager.delete(ABCD[1:3], ctx)
    assert world.below("a") == world.below("b") == {ABCD[0], ABCD[3]}
    assert list(world.manager.lookup_states(ABCD, ctx))[1:3] == [MISS, MISS]
    assert world.manager.slots[spec.slots[1]] == pattern(ABCD[1], CHUNK_BYTES)
    world.manager.complete_load(ABCD[:2], ctx)
    finish(world.manager, ctx)
    world.assert_idle()
    assert world.stats["num_free"] == 8 - 2


def test_l07_a_chunk_deleted_on_its_way_down_does_not_come_back() -> None:
    world = World()
    world.backends["a"].hold = True
    ctx = world.request("r")
    store(world.manager, AB, ctx)
    world.manager.delete(AB[1:], ctx)
    world.backends["a"].hold = False
    finish(world.manager, ctx)
    world.assert_idle()
    assert world.below("a") == set(AB[:1])


def test_l07_a_tenants_chunks_on_their_way_up_and_down_do_not_come_back() -> None:
    world = World(num_slots=8)
    tag = TenantResolver().tag_of("t")
    below = [OffloadKey(tag + key) for key in chain("xy")]
    world.put_below("a", [*below, *chain("k")])
    world.backends["a"].hold = True
    writer, reader = world.request("w", tenant="t"), world.request("r", tenant="t")
    store(world.manager, AB, writer)
    assert world.lookup(chain("xy"), reader) is None
    world.step()
    world.manager.delete_tenant("t")
    world.backends["a"].hold = False
    world.step()
    assert world.lookup(chain("xy"), reader) == 0
    assert MISS is world.manager.lookup_states(AB, reader)[0]
    finish(world.manager, writer)
    finish(world.manager, reader)
    world.assert_idle()
    assert world.below("a") == set(chain("k"))


def test_a_chunk_stored_again_while_its_deleted_copy_ran_stays() -> None:
    world = World()
    world.backends["a"].hold = True
    ctx = world.request("r")
    store(world.manager, AB, ctx)
    world.manager.delete(AB, ctx)
    store(world.manager, AB, ctx)
    world.backends["a"].hold = False
    finish(world.manager, ctx)
    world.assert_idle()
    assert world.below("a") == set(AB)


def test_d18_shutdown_flushes_what_only_the_primary_holds_and_reports_it() -> None:
    backend = FakeBackend(is_persistent=True)
    world = World(
        num_slots=16,
        backends={"a": backend},
        tier={"write": "on_evict", "num_queued_chunks_max": 3},
    )
    world.run("w", LONG[:5])
    report = world.manager.shutdown(5.0)
    assert (report.num_flushed, report.num_abandoned, report.num_restorable) == (5, 0, 5)
    assert set(backend.chunks) == set(LONG[:5])
    assert world.manager.shutdown(5.0) == report


def test_d18_shutdown_with_a_held_tier_ends_and_names_what_was_lost() -> None:
    backend = FakeBackend(is_persistent=True, hold=True)
    world = World(num_slots=16, backends={"a": backend}, tier={"num_queued_chunks_max": 3})
    world.run("w", LONG[:5])
    report = world.manager.shutdown(0.05)
    assert (report.num_flushed, report.num_abandoned, report.num_restorable) == (0, 5, 0)


def test_shutdown_does_not_copy_into_tiers_that_end_with_the_process() -> None:
    world = World(num_slots=16, tier={"write": "on_evict"})
    world.run("w", LONG[:5])
    report = world.manager.shutdown(5.0)
    assert report.num_flushed == 0
    assert world.stores() == []


def test_shutdown_does_not_flush_into_a_tier_that_wants_only_what_is_used_again() -> None:
    backend = FakeBackend(is_persistent=True)
    world = World(num_slots=16, backends={"a": backend}, tier={"write": "on_reuse"})
    world.run("w", LONG[:5])
    assert world.manager.shutdown(5.0).num_flushed == 0


def test_after_a_reset_everything_is_stored_below_again() -> None:
    world = World()
    world.run("w", AB)
    world.manager.reset_cache()
    assert world.below("a") == set()
    world.run("again", AB)
    assert world.below("a") == set(AB)


def test_what_waits_for_a_detached_tier_is_a_miss() -> None:
    world = World(max_wait_s=1e6)
    world.put_below("a", AB)
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    world.tiering.detach_tier("a")
    assert world.stats["num_free"] == 4
    assert world.lookup(AB, ctx) == 0
    finish(world.manager, ctx)
    world.assert_idle()


def test_d13_only_whole_prefixes_count_as_restorable() -> None:
    backend = FakeBackend(is_persistent=True, fail_stores={LONG[2]})
    world = World(num_slots=16, backends={"a": backend}, tier={"num_failures_max": 99})
    world.run("w", LONG[:5])
    report = world.manager.shutdown(5.0)
    assert set(backend.chunks) == {*LONG[:2], *LONG[3:5]}
    assert (report.num_restorable, report.num_abandoned) == (2, 1)


class HangingTier(FakeTier):
    """Blocks in `shutdown`, holding on to its jobs, until the test lets it go."""

    release = threading.Event()

    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        self.release.wait()
        return ()


def test_c07_a_tier_that_hangs_in_shutdown_does_not_hang_the_manager() -> None:
    HangingTier.release.clear()
    kind = "tests.unit.tiering.test_operation:HangingTier"
    world = World(tiers=("a", "good"), each={"a": {"type": kind}})
    (handle, _) = world.tiering._handles
    assert isinstance(handle.tier, HangingTier)
    handle.tier.backend.hold = True
    world.run("w", AB)
    before = time.monotonic()
    report = world.manager.shutdown(0.1)
    took_s = time.monotonic() - before
    HangingTier.release.set()
    assert took_s < 30.0, "it came back"
    assert len(report.stuck_jobs) == 1
    assert world.backends["good"].calls["shutdown"] == 1


def test_c07_a_hanging_tier_can_be_detached_and_is_left_alone() -> None:
    HangingTier.release.clear()
    kind = "tests.unit.tiering.test_operation:HangingTier"
    world = World(tier={"type": kind})
    (handle,) = world.tiering._handles
    assert isinstance(handle.tier, HangingTier)
    backend = handle.tier.backend
    backend.hold = True
    world.run("w", AB)
    stuck = world.tiering.detach_tier("a", timeout_s=0.05)
    assert len(stuck) == 1
    num_polls = backend.calls["get_finished_jobs"]
    world.step()
    world.step()
    assert backend.calls["get_finished_jobs"] == num_polls
    HangingTier.release.set()
    assert handle.caller is not None
    handle.caller.join()
    world.step()
    world.step()
    assert world.stats["num_evictable"] == 2


@pytest.mark.parametrize(
    "config",
    [
        {"primary": {"bytes": 100}},
        {"tier": {"num_queued_chunks_max": 0}},
        {"tier": {"type": "memory", "max_bytes": 10}},
    ],
)
def test_h02_a_capacity_of_nothing_is_refused_at_the_start(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        World(**config)


def test_a_wrong_tier_leaves_nothing_behind() -> None:
    backend = FakeBackend()
    with pytest.raises(ConfigError, match=r"tiers\[1\]"):
        World(tiers=("a", "b"), backends={"a": backend}, each={"b": {"hodl": True}})
    assert backend.calls["shutdown"] == 1


def test_every_store_refused_at_shutdown_is_reported_not_retried_for_ever() -> None:
    backend = FakeBackend(is_persistent=True, fail_stores=EVERY_KEY)
    world = World(num_slots=16, backends={"a": backend})
    world.run("w", LONG[:5])
    report = world.manager.shutdown(5.0)
    assert (report.num_flushed, report.num_abandoned) == (0, 5)
