"""What a step tells, by content: who goes first, what is withdrawn, what stays, what tiers hear."""

from kvstrata.core.request import ScheduleEndContext
from kvstrata.core.results import LookupResult
from kvstrata.testing import chain
from kvstrata.testing.manager_calls import begin_store, finish, store
from tests.tiering_world import World

AB, ABCD = chain("ab"), chain("abcd")


def waiting_world() -> World:
    """Five requests that wait for a chunk each: e (new, 90), d (new), c, b (90), a in age order."""
    world = World(num_slots=8, max_wait_s=1e6)
    for letter, hints in (
        ("a", {}),
        ("b", {"priority": 90}),
        ("c", {}),
        ("d", {}),
        ("e", {"priority": 90}),
    ):
        world.put_below("a", chain(letter))
        ctx = world.request(letter, **hints)
        assert world.lookup(chain(letter), ctx) is None
    return world


def order(world: World) -> list[str]:
    return [job.req_context.req_id for job in world.loads() if job.req_context]


def test_new_requests_go_first_then_by_priority_then_by_age() -> None:
    world = waiting_world()
    world.step(new=["d", "e"])
    assert order(world) == ["e", "d", "b", "a", "c"]


def test_without_new_requests_priority_and_age_decide() -> None:
    world = waiting_world()
    world.step()
    assert order(world) == ["b", "e", "a", "c", "d"]


def test_promotions_of_a_preempted_request_are_withdrawn_if_not_yet_submitted() -> None:
    world = waiting_world()
    world.step(preempted=["b", "c"])
    assert order(world) == ["e", "a", "d"]
    assert world.stats["withdrawn_promotion_chunks"] == 2
    assert world.stats["num_free"] == 8 - 3
    world.step()
    assert world.lookup(chain("b"), world.tiering._views["b"].ctx) is None, "it may come back"
    world.step()
    assert order(world) == ["e", "a", "d", "b"]


def test_what_was_submitted_for_a_preempted_request_goes_on() -> None:
    world = World()
    world.put_below("a", AB)
    world.backends["a"].hold = True
    ctx = world.request("r")
    world.lookup(AB, ctx)
    world.step()
    world.step(preempted=["r"])
    assert len(world.stats.jobs) == 1
    world.backends["a"].hold = False
    world.step()
    assert world.lookup(AB, ctx) == 2


def test_chunks_of_a_preempted_request_stay_whatever_others_store() -> None:
    world = World(num_slots=8)
    ctx = world.request("victim")
    store(world.manager, ABCD, ctx)
    world.step(preempted=["victim"])
    world.flood(16)
    assert list(world.manager.lookup_states(ABCD, ctx)) == [LookupResult.HIT] * 4
    assert world.lookup(ABCD, ctx) == 4
    finish(world.manager, ctx)
    world.flood(16)
    assert LookupResult.HIT not in world.manager.lookup_states(ABCD, world.request("later"))


def test_a_preempted_request_gets_a_new_deadline() -> None:
    world = World(max_wait_s=1.0)
    world.put_below("a", AB)
    world.backends["a"].hold_lookups = True
    ctx = world.request("r")
    assert world.lookup(AB, ctx) is None
    world.step(by_s=1.0)
    assert world.lookup(AB, ctx) == 0
    world.step(preempted=["r"])
    world.backends["a"].hold_lookups = False
    assert world.lookup(AB, ctx) is None
    world.step()
    assert world.lookup(AB, ctx) == 2


def test_chunks_that_wait_for_admission_are_stored_for_a_preempted_request() -> None:
    world = World(filter={"store_threshold": 2})
    ctx = world.request("r")
    assert store(world.manager, AB, ctx) == []
    world.step(preempted=["r"])
    assert store(world.manager, AB, ctx) == AB
    world.step()
    assert world.below("a") == set(AB)


def test_b01_b02_a_store_of_a_preempted_request_ends_before_its_chunk_can_be_read() -> None:
    world = World()
    ctx = world.request("r")
    taken = begin_store(world.manager, AB, ctx)
    world.step(preempted=["r"])
    assert world.lookup(AB, ctx) == 0
    assert world.manager.has_pending_work()
    world.manager.complete_store(taken, ctx)
    assert world.lookup(AB, ctx) == 2
    world.load(AB, ctx)
    finish(world.manager, ctx)
    world.assert_idle()


def test_every_tier_hears_the_same_context() -> None:
    world = World(tiers=("a", "b"), each={"b": {"write": "never"}})
    world.request("new")
    world.request("old")
    context = ScheduleEndContext(["new"], ["old", "stranger"])
    world.manager.on_schedule_end(context)
    assert world.backends["a"].contexts == world.backends["b"].contexts == [context]


def test_tiers_hear_it_after_the_loads_of_the_step_were_submitted() -> None:
    world = World()
    world.put_below("a", AB)
    ctx = world.request("r")
    world.lookup(AB, ctx)
    world.step(new=["r"])  # the fake copies when it hears of the end of the step
    assert world.lookup(AB, ctx) == 2


def test_queue_time_is_recorded_once() -> None:
    world = World()
    ctx = world.request("r")
    world.step(by_s=2.0)
    world.step(new=["r"], by_s=5.0)
    world.step(new=["r"])
    record = world.tiering.request_record(ctx)
    assert record is not None
    assert record.queued_s == 2.0


def test_a_step_retires_all_finished_jobs_with_one_poll() -> None:
    """C12."""
    world = World(num_slots=16)
    contexts = [world.request(f"r{i}") for i in range(10)]
    for i, ctx in enumerate(contexts):
        world.put_below("a", chain(str(i)))
        world.lookup(chain(str(i)), ctx)
    world.step()
    before = world.backends["a"].calls["get_finished_jobs"]
    assert world.lookup(chain("0"), contexts[0]) == 1
    assert world.backends["a"].calls["get_finished_jobs"] == before + 1
    assert world.stats.jobs == []
    assert [world.lookup(chain(str(i)), contexts[i]) for i in range(10)] == [1] * 10
    assert world.backends["a"].calls["get_finished_jobs"] == before + 1


def test_has_pending_work_says_whether_steps_are_needed() -> None:
    world = World()
    world.put_below("a", AB)
    assert not world.manager.has_pending_work()
    ctx = world.request("r")
    world.lookup(AB, ctx)
    assert world.manager.has_pending_work()
    world.step()
    assert world.manager.has_pending_work()
    world.step()
    assert not world.manager.has_pending_work()
