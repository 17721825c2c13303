"""Every hint, over every type of tier: what the request asked for is what happens."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.testing import chain
from kvstrata.testing.manager_calls import finish, look_up, start, store
from tests.tiering_world import FAKE, World

AB = chain("ab")
MISS = LookupResult.MISS
KINDS = ("fake", "memory", "fs")


class HintWorld(World):
    """A world over one tier of some type, which may work on threads of its own."""

    def __init__(self, kind: str, root: Path, num_slots: int = 4) -> None:
        settings = {
            "fake": {"type": FAKE},
            "memory": {"type": "memory"},
            "fs": {"type": "fs", "root": str(root), "max_bytes": "1MiB", "direct": "off"},
        }
        super().__init__(num_slots, tier=settings[kind], max_wait_s=100.0)

    def keep_below(self, req_id: str, **hints: object) -> None:
        """Let a request store its chunks, and push them out of the primary."""
        ctx = start(self.manager, req_id, **hints)
        store(self.manager, AB, ctx)
        finish(self.manager, ctx)
        self.settle()
        self.flood(int(self.stats["num_slots"]))
        self.settle()

    def found(self, req_id: str, **hints: object) -> int:
        """Return how many chunks a request can load, having verified them."""
        ctx = start(self.manager, req_id, **hints)
        count = look_up(self.manager, AB, ctx)
        if not hints.get("tenant"):
            self.load(AB[:count], ctx)
        finish(self.manager, ctx)
        self.settle()
        return count


def tenant(world: HintWorld) -> None:
    world.keep_below("w", tenant="a")
    assert world.found("other", tenant="b") == 0
    assert world.found("nobody") == 0
    assert world.found("own", tenant="a") == 2


def priority(world: HintWorld) -> None:
    ctx = start(world.manager, "w", priority=90)
    store(world.manager, AB, ctx)
    finish(world.manager, ctx)
    world.settle()
    world.flood(8)
    assert list(world.manager.lookup_states(AB, ctx)) == [LookupResult.HIT] * 2
    assert world.tier()["stored_chunks"] == 2


def ttl_s(world: HintWorld) -> None:
    world.keep_below("w", ttl_s=60)
    world.clock.advance(59.0)
    assert world.found("early") == 2
    world.clock.advance(2.0)
    assert world.found("late") == 0


def retention(world: HintWorld) -> None:
    world.keep_below(
        "w", retention=[{"start": 0, "end": 1, "ttl_s": 600}, {"start": 1, "ttl_s": 5}]
    )
    assert world.found("early") == 2
    world.clock.advance(6.0)
    assert world.found("late") == 1
    world.clock.advance(600.0)
    assert world.found("very late") == 0


def load_tiers(world: HintWorld) -> None:
    world.keep_below("w")
    assert world.found("none", load_tiers=[]) == 0
    assert world.found("another", load_tiers=["b"]) == 0
    assert world.found("this", load_tiers=["a"]) == 2


def store_tiers(world: HintWorld) -> None:
    world.keep_below("none", store_tiers=[])
    assert world.found("r") == 0
    world.keep_below("this", store_tiers=["a"])
    assert world.found("s") == 2


def store_false(world: HintWorld) -> None:
    world.keep_below("w", store=False)
    assert world.found("r") == 0
    assert world.tier()["stored_chunks"] == 0


def max_wait_s(world: HintWorld) -> None:
    world.keep_below("w")
    hasty = start(world.manager, "hasty", max_wait_s=0)
    assert world.lookup(AB, hasty) == 0
    patient = start(world.manager, "patient", max_wait_s=1e9)
    assert world.lookup(AB, patient) is None
    view = world.tiering._views["patient"]
    assert view.deadline_s == world.clock.now_s() + 100.0, "the operator's limit holds"
    finish(world.manager, hasty)
    finish(world.manager, patient)
    world.settle()


def max_load_tokens(world: HintWorld) -> None:
    world.keep_below("w")
    assert world.found("nothing", max_load_tokens=0) == 0
    assert world.found("one", max_load_tokens=1) == 1
    assert world.found("all", max_load_tokens=2) == 2


def peer(world: HintWorld) -> None:
    world.keep_below("w", peer="somewhere:1234")
    assert world.found("r", peer="somewhere:1234") == 2
    assert world.stats["hint_errors"] == 0


CHECKS = (
    tenant,
    priority,
    ttl_s,
    retention,
    load_tiers,
    store_tiers,
    store_false,
    max_wait_s,
    max_load_tokens,
    peer,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_hint_acts_over_every_type_of_tier(
    check: Callable[[HintWorld], None], kind: str, tmp_path: Path
) -> None:
    world = HintWorld(kind, tmp_path)
    try:
        check(world)
    finally:
        world.manager.shutdown(10.0)


@pytest.mark.parametrize("kind", KINDS)
def test_o04_nothing_of_a_tenant_outlives_its_ttl_even_where_it_was_promoted(
    kind: str, tmp_path: Path
) -> None:
    world = HintWorld(kind, tmp_path)
    world.keep_below("w", ttl_s=60)
    world.clock.advance(50.0)
    ctx = start(world.manager, "reader")
    assert look_up(world.manager, AB, ctx) == 2
    world.load(AB, ctx)
    world.clock.advance(11.0)
    assert look_up(world.manager, AB, ctx) == 0
    finish(world.manager, ctx)
    world.settle()
    assert world.tier()["num_resident"] == 0
    world.manager.shutdown(10.0)


def test_a_tenant_gets_only_the_tiers_that_it_was_granted() -> None:
    world = World(
        tiers=("a", "b"), tenants={"small": {"tiers": ["b"]}, "default": {"tiers": ["a", "b"]}}
    )
    ctx = world.request("w", tenant="small", load_tiers=["a", "b"], store_tiers=["a", "b"])
    store(world.manager, AB, ctx)
    finish(world.manager, ctx)
    assert (len(world.below("a")), len(world.below("b"))) == (0, 2)
    ctx = world.request("r", tenant="small", load_tiers=["a"])
    world.lookup(chain("zz"), ctx)
    assert world.backends["a"].calls["lookup_many"] == 0


def test_o01_a_client_cannot_reach_a_tenant_by_choosing_its_name() -> None:
    world = World(tenant_from="param:gateway_tenant")

    def request(req_id: str, tenant: str, claimed: str) -> ReqContext:
        params = {"gateway_tenant": tenant, "kvstrata": {"tenant": claimed}}
        ctx = ReqContext(req_id, params)
        world.manager.on_new_request(ctx)
        return ctx

    owner = request("owner", "a", "a")
    store(world.manager, AB, owner)
    finish(world.manager, owner)
    thief, same = request("thief", "b", "a"), request("same", "a", "b")
    assert look_up(world.manager, AB, thief) == 0
    assert list(world.manager.lookup_states(AB, thief)) == [MISS, MISS]
    assert look_up(world.manager, AB, same) == 2


def test_bad_tier_names_and_values_are_counted_and_harm_nothing() -> None:
    world = World()
    ctx = world.request("r", load_tiers="a", max_wait_s=-1, retention=[{"from": 1}], peer=7)
    assert world.stats["hint_errors"] == 4
    world.put_below("a", AB)
    assert look_up(world.manager, AB, ctx) == 2


def test_q01_a_chunk_with_priority_and_ttl_survives_a_flood_and_then_ages() -> None:
    world = World(num_slots=8)
    keys = chain("abcd")
    ctx = world.request("keep", priority=90, ttl_s=60)
    store(world.manager, keys, ctx)
    finish(world.manager, ctx)
    for i in range(20):
        world.run(f"low {i}", chain("z" * (i + 1))[-1:], priority=10)
    assert list(world.manager.lookup_states(keys, ctx)) == [LookupResult.HIT] * 4
    world.clock.advance(61.0)
    world.step()
    assert LookupResult.HIT not in world.manager.lookup_states(keys, ctx)
    for i in range(10):
        pinned = world.request(f"high {i}", priority=100)
        store(world.manager, chain("y" * (i + 1))[-1:], pinned)
        finish(world.manager, pinned)
    assert store(world.manager, chain("x"), world.request("plain")) == chain("x")
