"""What a step tells, by content, through every type of tier: order, withdrawal, protection."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
from typing_extensions import override

from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadJob, LookupResult
from kvstrata.core.tier import SecondaryTierManager, TierEnv
from kvstrata.testing import FakeTier, chain
from kvstrata.testing.manager_calls import finish, look_up, start, store
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.memory import MemoryTier
from kvstrata.tiers.object.tier import ObjectTier
from tests.tiering_world import World

AB, ABCD = chain("ab"), chain("abcd")
HERE = "tests.unit.tiering.test_step_context_tiers"
HIT = LookupResult.HIT


class Recording(SecondaryTierManager):
    """Notes for whom loads were submitted, in order, and what each step told."""

    @override
    def submit_load(self, job: LoadJob) -> None:
        assert job.req_context is not None
        RECORDS[self.__class__.__name__].loads_for.append(job.req_context.req_id)
        super().submit_load(job)  # type: ignore[safe-super]

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        RECORDS[self.__class__.__name__].contexts.append(context)
        super().on_schedule_end(context)

    @classmethod
    @override
    def from_config(cls, slots: SlotView, settings: Mapping[str, Any], env: TierEnv) -> Self:
        rest = {name: value for name, value in settings.items() if name != "backend"}
        return super().from_config(slots, rest, env)


class Record:
    def __init__(self) -> None:
        self.loads_for: list[str] = []
        self.contexts: list[ScheduleEndContext] = []


RECORDS: dict[str, Record] = {}


class RecordingFake(Recording, FakeTier):
    pass


class RecordingMemory(Recording, MemoryTier):
    pass


class RecordingFs(Recording, FsTier):
    pass


class RecordingObject(Recording, ObjectTier):
    pass


def settings(kind: str, root: Path) -> dict[str, Any]:
    more: dict[str, dict[str, Any]] = {
        "RecordingFs": {"root": str(root), "max_bytes": "1GiB", "direct": "off"},
        "RecordingObject": {"url": "memory://", "max_bytes": "1GiB"},
    }
    return {"type": f"{HERE}:{kind}"} | more.get(kind, {})


class StepWorld(World):
    """Eight slots over one recording tier of some type."""

    def __init__(self, kind: str, root: Path, **config: Any) -> None:  # noqa: ANN401
        self.record = RECORDS[kind] = Record()
        super().__init__(8, tier=settings(kind, root), max_wait_s=1e6, **config)

    def wait_for_all(self) -> dict[str, ReqContext]:
        """Start requests a to e that wait for a chunk each; b and e have priority."""
        for letter in "abcde":
            self.run(f"w{letter}", chain(letter))
            self.settle()
        self.flood(8)
        self.settle()
        contexts = {}
        for letter in "abcde":
            hints = {"priority": 90} if letter in "be" else {}
            contexts[letter] = start(self.manager, letter, **hints)
            assert self.lookup(chain(letter), contexts[letter]) is None
        self.record.loads_for.clear()
        return contexts


@pytest.fixture(params=["RecordingFake", "RecordingMemory", "RecordingFs", "RecordingObject"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StepWorld]:
    world = StepWorld(request.param, tmp_path)
    yield world
    world.manager.shutdown(10.0)


def test_loads_of_new_requests_go_first_then_by_priority_then_by_age(world: StepWorld) -> None:
    contexts = world.wait_for_all()
    world.step(new=["d", "e"])
    assert world.record.loads_for == ["e", "d", "b", "a", "c"]
    world.settle()
    for letter, ctx in contexts.items():
        assert world.lookup(chain(letter), ctx) == 1
        world.load(chain(letter), ctx)


def test_loads_of_preempted_requests_are_withdrawn_and_their_slots_free(world: StepWorld) -> None:
    contexts = world.wait_for_all()
    num_free = world.stats["num_free"] + world.stats["num_evictable"]
    world.step(new=["a"], preempted=["b", "c"])
    assert world.record.loads_for == ["a", "e", "d"]
    assert world.stats["num_free"] + world.stats["num_evictable"] >= num_free + 2
    world.settle()
    assert world.tier()["loaded_chunks"] == 3
    assert look_up(world.manager, chain("b"), contexts["b"]) == 1, "it comes back as if new"
    assert world.record.loads_for == ["a", "e", "d", "b"]
    world.load(chain("b"), contexts["b"])


def test_a_load_that_was_submitted_goes_on_when_its_request_is_preempted(world: StepWorld) -> None:
    contexts = world.wait_for_all()
    world.step()
    world.step(preempted=["a"])
    world.settle()
    assert list(world.manager.lookup_states(chain("a"), contexts["a"])) == [HIT]
    world.load(chain("a"), contexts["a"])


def test_chunks_of_a_preempted_request_stay_and_leave_when_it_ends(world: StepWorld) -> None:
    victim = world.request("victim")
    store(world.manager, ABCD, victim)
    world.step(new=["victim"])
    world.settle()
    world.step(preempted=["victim"])
    world.flood(16)
    world.settle()
    assert list(world.manager.lookup_states(ABCD, victim)) == [HIT] * 4
    assert world.record.loads_for == []
    finish(world.manager, victim)
    world.flood(16)
    world.settle()
    later = world.request("later")
    assert HIT not in world.tiering.inner.lookup_states(ABCD, later)
    assert look_up(world.manager, ABCD, later) == 4, "the tier has them"
    world.load(ABCD, later)


def test_the_tier_hears_every_step_as_it_was_told(world: StepWorld) -> None:
    world.request("new")
    world.request("old")
    context = ScheduleEndContext(["new"], ["old", "stranger"])
    world.manager.on_schedule_end(context)
    world.step()
    assert world.record.contexts == [context, ScheduleEndContext((), ())]


@pytest.mark.parametrize("kind", ["RecordingFake", "RecordingMemory", "RecordingFs"])
def test_chunks_that_wait_for_admission_go_down_when_their_request_is_preempted(
    kind: str, tmp_path: Path
) -> None:
    world = StepWorld(kind, tmp_path, filter={"store_threshold": 2})
    ctx = world.request("r")
    assert store(world.manager, AB, ctx) == []
    world.step(preempted=["r"])
    assert store(world.manager, AB, ctx) == AB
    finish(world.manager, ctx)
    world.settle()
    assert world.tier()["stored_chunks"] == 2
    world.manager.shutdown(10.0)
