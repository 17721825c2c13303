"""Tiers that fail: skipped, probed, taken back; nothing they do reaches the engine."""

import logging

import pytest
from typing_extensions import override

from kvstrata.core.errors import TierUnavailableError
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, LookupResult
from kvstrata.testing import EVERY_KEY, FakeTier, chain
from kvstrata.testing.manager_calls import finish, store
from tests.tiering_world import World

AB = chain("ab")
AWAY = TierUnavailableError("a", "is away")


def read(world: World, letter: str) -> int | None:
    """Let a new request look for a chunk that the tier has, and load it."""
    key = chain(letter)
    world.put_below("a", key)
    ctx = world.request(f"reads {letter}")
    count = world.lookup(key, ctx)
    if count is None:
        world.step()
        count = world.lookup(key, ctx)
    finish(world.manager, ctx)
    return count


def test_g08_a_breaker_opens_probes_once_and_closes_by_itself() -> None:
    world = World(num_slots=16, tier={"num_failures_max": 3, "cooldown_s": 10.0})
    backend = world.backends["a"]
    backend.fail_loads = EVERY_KEY
    for letter in "abc":
        assert world.tier().state == "ok"
        assert read(world, letter) == 0
    assert world.tier().state == "open"
    num_asked, num_jobs = backend.calls["lookup_many"], len(backend.jobs)
    assert read(world, "d") == 0
    assert (backend.calls["lookup_many"], len(backend.jobs)) == (num_asked, num_jobs)
    world.clock.advance(10.0)
    assert read(world, "e") == 0, "the probe fails"
    assert read(world, "f") == 0
    assert len(backend.jobs) == num_jobs + 1
    assert world.tier().state == "open"
    backend.fail_loads = set()
    world.clock.advance(10.0)
    assert read(world, "g") == 1
    assert world.tier().state == "ok"
    assert read(world, "h") == 1
    assert world.tier()["times_opened"] == 1


def test_only_one_probe_is_let_through_at_a_time() -> None:
    world = World(num_slots=16, tier={"num_failures_max": 1, "cooldown_s": 10.0})
    backend = world.backends["a"]
    backend.fail_loads = EVERY_KEY
    read(world, "a")
    world.clock.advance(10.0)
    backend.hold = True
    num_jobs = len(backend.jobs)
    for letter in "pqrs":
        world.put_below("a", chain(letter))
        world.lookup(chain(letter), world.request(letter))
    world.step()
    assert len(backend.jobs) == num_jobs + 1
    assert world.tier().state == "probing"


def test_a_probe_that_is_lost_is_followed_by_another() -> None:
    world = World(num_slots=16, tier={"num_failures_max": 1, "cooldown_s": 10.0}, max_wait_s=1e6)
    backend = world.backends["a"]
    backend.fail_loads = EVERY_KEY
    read(world, "a")
    world.clock.advance(10.0)
    backend.hold = True
    read(world, "b")
    backend.fail_loads = set()
    world.clock.advance(10.0)
    num_jobs = len(backend.jobs)
    read(world, "c")
    assert len(backend.jobs) == num_jobs + 1


def test_a_tier_that_takes_no_stores_is_still_read() -> None:
    world = World(num_slots=8, tier={"num_failures_max": 2, "num_store_tries": 1})
    world.backends["a"].fail_stores = EVERY_KEY
    for letter in "xyz":
        world.run(letter, chain(letter))
    world.step()
    assert world.tier().state == "read_only"
    assert read(world, "a") == 1
    world.backends["a"].fail_stores = set()
    world.step(by_s=10.0)
    world.assert_idle()
    assert world.tier().state == "ok"
    assert chain("z")[0] in world.below("a"), "what waited in the primary goes down after all"


def test_damaged_chunks_are_not_taken_for_a_tier_that_does_not_work() -> None:
    world = World(num_slots=16, tier={"num_failures_max": 1})
    world.backends["a"].corrupt = EVERY_KEY
    for letter in "abc":
        assert read(world, letter) == 0
    assert world.tier().state == "ok"
    world.backends["a"].corrupt = set()
    world.manager.reset_cache()
    world.step()
    assert read(world, "a") == 1, "a reset forgets what was wrong with a chunk as well"


def test_other_tiers_go_on_when_one_is_skipped() -> None:
    world = World(num_slots=8, tiers=("a", "b"))
    world.backends["a"].error = AWAY
    world.put_below("b", AB)
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    world.step()
    assert world.lookup(AB, ctx) == 2
    store(world.manager, chain("x"), ctx)
    finish(world.manager, ctx)
    assert chain("x")[0] in world.below("b")


def test_an_outage_is_one_story_in_the_log_and_a_counter(caplog: pytest.LogCaptureFixture) -> None:
    world = World(tier={"num_failures_max": 3, "cooldown_s": 10.0})
    world.backends["a"].error = AWAY
    with caplog.at_level(logging.INFO):
        for i in range(50):
            ctx = world.request(f"r{i}")
            assert world.lookup(chain("z"), ctx) == 0
            store(world.manager, AB, ctx)
            finish(world.manager, ctx)
        world.backends["a"].error = None
        world.step(by_s=10.0)
        world.assert_idle()
    assert world.tier()["errors"] > 50
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 8
    assert any("works again" in record.message for record in caplog.records)


def test_c03_a_silent_tier_makes_nobody_wait_twice() -> None:
    world = World(num_slots=8, max_wait_s=1.0, tier={"num_failures_max": 1})
    world.put_below("a", AB)
    world.backends["a"].hold = True
    first = world.request("first")
    assert world.lookup(AB, first) is None
    world.step(by_s=1.0)
    assert world.lookup(AB, first) == 0
    (job,) = world.stats.jobs
    world.tiering.fail_job(job.job_id)
    world.step()
    assert world.lookup(AB, world.request("second")) == 0


class RudeTier(FakeTier):
    """Breaks the contract in every way that has no bytes in it."""

    @override
    def get_finished_jobs(self) -> list[JobResult]:
        results = list(super().get_finished_jobs())
        strangers = [JobResult(JobId(10**6), frozenset(AB)), JobResult(JobId(0))]
        return [
            *(JobResult(r.job_id, r.failed | {OffloadKey(b"who?")}) for r in results),
            *results,
            *strangers,
        ]

    @override
    def lookup_many(self, keys: object, ctx: ReqContext) -> list[LookupResult]:
        return [LookupResult.HIT]


def test_results_given_twice_or_for_unknown_jobs_are_counted_and_ignored() -> None:
    world = World(tier={"type": "tests.unit.tiering.test_health:RudeTier"})
    world.run("r", AB)
    world.assert_idle()
    counters = world.tiering._handles[0].counters
    assert counters.unknown_results >= 3
    assert (counters.stored_chunks, counters.failed_store_chunks) == (2, 0)
    assert world.lookup(chain("xyz"), world.request("other")) == 0
    assert world.tier()["errors"] >= 1


@pytest.mark.parametrize(
    "call",
    [
        "lookup_many",
        "submit_store",
        "submit_load",
        "get_finished_jobs",
        "touch",
        "on_new_request",
        "on_request_finished",
        "on_schedule_end",
        "take_events",
        "cancel",
        "delete",
        "drain_jobs",
        "reset",
        "get_stats",
        "shutdown",
    ],
)
def test_whatever_call_of_a_tier_raises_the_engine_sees_nothing(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(num_slots=4, max_wait_s=1.0)
    world.put_below("a", chain("xy"))
    (handle,) = world.tiering._handles

    def fails(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError(call)

    monkeypatch.setattr(handle.tier, call, fails)
    for i in range(8):
        ctx = world.request(f"r{i}")
        for keys in (chain("xy"), AB):
            while world.lookup(keys, ctx) is None:
                world.step(by_s=0.5)
        store(world.manager, AB, ctx)
        world.step(preempted=[ctx.req_id])
        world.manager.delete(AB[1:], ctx)
        finish(world.manager, ctx)
        assert world.stats.tiers["a"].counters["errors"] >= 0
        world.tiering.check()
    world.manager.reset_cache()
    ctx = world.request("after reset")
    assert world.lookup(chain("xy"), ctx) in {0, None}
    finish(world.manager, ctx)
    monkeypatch.undo()
    for _ in range(3):
        world.step(by_s=20.0)
    assert not world.stats.jobs
    world.run("healed", AB)
    world.assert_idle()
    assert world.below("a") >= set(AB)


def test_a_tier_that_could_not_be_reset_is_not_read_before_it_could(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.put_below("a", AB)
    (handle,) = world.tiering._handles

    def fails() -> None:
        raise RuntimeError("not now")

    monkeypatch.setattr(handle.tier, "reset", fails)
    world.manager.reset_cache()
    world.step()
    assert world.lookup(AB, world.request("r")) == 0
    monkeypatch.undo()
    world.step()
    assert world.below("a") == set()
    world.run("w", AB)
    assert world.below("a") == set(AB)


def test_deleted_chunks_of_a_tier_that_cannot_delete_are_not_found_again() -> None:
    world = World(num_slots=4, tier={"type": "tests.unit.tiering.test_health:KeepingTier"})
    world.run("w", AB)
    ctx = world.request("r")
    world.manager.delete(AB[1:], ctx)
    world.flood(4)
    assert world.lookup(AB, ctx) is None
    world.step()
    assert world.lookup(AB, ctx) == 1
    assert store(world.manager, AB, ctx) == AB[1:]
    finish(world.manager, ctx)
    world.flood(4)
    later = world.request("later")
    assert world.lookup(AB, later) is None
    world.step()
    assert world.lookup(AB, later) == 2


class KeepingTier(FakeTier):
    @override
    def delete(self, keys: object) -> None:
        raise NotImplementedError

    @override
    def delete_prefix(self, prefix: bytes) -> None:
        raise NotImplementedError


def test_a_tenant_deleted_from_a_tier_that_cannot_delete_is_not_found_again() -> None:
    world = World(num_slots=4, tier={"type": "tests.unit.tiering.test_health:KeepingTier"})
    world.put_below("a", [OffloadKey(b"12" + AB[0]), OffloadKey(b"13" + AB[0])])
    world.tiering.delete_prefix(b"12")
    ctx = world.request("r")
    assert world.tiering.lookup([OffloadKey(b"12" + AB[0])], ctx) == 0
    assert world.tiering.lookup([OffloadKey(b"13" + AB[0])], ctx) is None
    world.manager.reset_cache()
    world.put_below("a", [OffloadKey(b"12" + AB[0])])
    assert world.tiering.lookup([OffloadKey(b"12" + AB[0])], world.request("later")) is None


def test_f08_a_lost_completion_is_listed_and_can_be_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(max_wait_s=1e6)
    world.put_below("a", AB)
    world.backends["a"].hold = True
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    world.step(by_s=7.0)
    (job,) = world.stats.jobs
    assert (job.kind, job.tier, job.num_chunks, job.age_s, job.req_id) == ("load", "a", 2, 7.0, "r")
    (handle,) = world.tiering._handles
    monkeypatch.setattr(handle.tier, "cancel", lambda _job_id: None)
    world.tiering.fail_job(job.job_id)
    assert world.lookup(AB, ctx) == 0
    assert not world.manager.has_pending_work()
    assert world.stats["num_free"] == 2, "the copy may still write there"
    with pytest.raises(KeyError):
        world.tiering.fail_job(JobId(12345))
    world.backends["a"].hold = False
    world.manager.on_request_finished(ctx)
    world.assert_idle()
    assert world.stats["num_free"] == 4


def test_a_failed_store_job_frees_its_chunks_when_the_tier_answers() -> None:
    world = World()
    world.backends["a"].hold = True
    world.run("w", AB)
    (job,) = world.stats.jobs
    world.tiering.fail_job(job.job_id)
    world.assert_idle()
    assert world.stats["num_evictable"] == 2
