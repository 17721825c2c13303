"""What every policy does in a primary: order within a prefix, recency, uses, scans, hints."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvstrata.build import build_manager
from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.testing import FakeClock
from kvstrata.testing.chunks import chain, numbered_key

POLICIES = ["arc", "guard", "hazard", "lru"]


class World:
    """A manager, its clock, and requests that finish at once."""

    def __init__(self, policy: str, num_chunks: int) -> None:
        self.clock = FakeClock()
        config = {"primary": {"num_chunks": num_chunks, "policy": policy}}
        self.manager = build_manager(config, chunk_bytes=64, namespace="test", clock=self.clock)
        self._num_requests = 0

    def begin(self, session: str | None = None) -> ReqContext:
        self._num_requests += 1
        params: dict[str, Any] = {"kvstrata": {"session": session}} if session else {}
        ctx = ReqContext(f"r{self._num_requests}", params)
        self.manager.on_new_request(ctx)
        return ctx

    def use(self, keys: Sequence[OffloadKey], session: str | None = None) -> list[OffloadKey]:
        """Let a request use chunks and store what is new; return what was stored."""
        ctx = self.begin(session)
        self.manager.touch(keys, ctx)
        stored = self.store(keys, ctx)
        self.manager.on_request_finished(ctx)
        return stored

    def store(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[OffloadKey]:
        output = self.manager.prepare_store(keys, ctx)
        if output is None:
            return []
        self.manager.complete_store(output.keys_to_store, ctx)
        return list(output.keys_to_store)

    def resident(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        states = self.manager.lookup_states(keys, ReqContext("asks"))
        hits = [state is LookupResult.HIT for state in states]
        return [key for key, is_hit in zip(keys, hits, strict=True) if is_hit]


@pytest.mark.parametrize("policy", POLICIES)
def test_tails_leave_first_when_copies_end_in_any_order(policy: str) -> None:  # G10
    world = World(policy, 8)
    keys, ctx = chain("abcdefgh"), world.begin()
    world.manager.touch(keys, ctx)
    output = world.manager.prepare_store(keys, ctx)
    assert output is not None
    for i in (3, 7, 0, 5, 1, 6, 2, 4):
        world.manager.complete_store([keys[i]], ctx)
    world.manager.on_request_finished(ctx)
    world.clock.advance(10_000)
    world.use(chain("xy"))
    assert world.resident(keys) == keys[:6]


@pytest.mark.parametrize("policy", ["arc", "guard", "hazard", "lru"])
def test_interleaved_requests_both_refresh_their_chunks(policy: str) -> None:  # G11
    world = World(policy, 12)
    for path in ("abcd", "efgh", "ijkl"):
        world.use(chain(path))
        world.clock.advance(1)
    first, second = world.begin(), world.begin()
    for num_keys in (1, 3, 4):
        world.manager.touch(chain("abcd")[:num_keys], first)
        world.manager.touch(chain("efgh")[:num_keys], second)
        world.clock.advance(1)
    world.manager.on_request_finished(second)
    world.manager.on_request_finished(first)
    world.clock.advance(1_000)
    world.use(chain("wxyz"))
    assert world.resident(chain("abcd") + chain("efgh")) == chain("abcd") + chain("efgh")


def victims_after(policy: str, num_touches: int) -> list[OffloadKey]:
    """Let a request live long, then a flood come by; return what is left after each newcomer."""
    world = World(policy, 6)
    world.use(chain("ab"))
    world.use(chain("ab"))
    ctx = world.begin()
    for _ in range(num_touches):
        world.manager.touch(chain("cd"), ctx)
    world.store(chain("cd"), ctx)
    for _ in range(num_touches):
        world.manager.touch(chain("cd"), ctx)
    world.manager.on_request_finished(ctx)
    left: list[OffloadKey] = []
    for number in range(30):
        world.clock.advance(600)
        world.use([numbered_key(number)])
        left += world.resident(chain("ab") + chain("cd"))
    return left


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_request_counts_as_one_use(policy: str) -> None:  # G14
    assert victims_after(policy, 500) == victims_after(policy, 1)


def hot_chunks_left_after_a_scan(policy: str) -> int:
    world = World(policy, 8)
    hot = [numbered_key(1_000 + i) for i in range(4)]
    for round_ in range(50):
        for key in hot:
            world.use([key])
        if round_ >= 40:  # the scan: ten cold chunks each time
            for number in range(10 * round_, 10 * round_ + 10):
                world.use([numbered_key(number)])
        world.clock.advance(4)
    return len(world.resident(hot))


@pytest.mark.parametrize("policy", ["arc", "hazard"])
def test_a_scan_of_cold_chunks_leaves_hot_ones_alone(policy: str) -> None:  # Q09
    assert hot_chunks_left_after_a_scan(policy) == 4


def test_a_scan_of_cold_chunks_clears_an_lru() -> None:  # Q09
    assert hot_chunks_left_after_a_scan("lru") == 0


def test_a_policy_of_the_users_own_is_found_by_its_path() -> None:  # Q09
    path = "kvstrata.policies.arc:ArcPolicy"
    assert hot_chunks_left_after_a_scan(path) == 4


def test_children_leave_before_parents_under_hazard_whoever_used_them_last() -> None:
    world = World("hazard", 6)
    world.use(chain("abc"))
    world.clock.advance(50)
    world.use(chain("abd"))
    for number in range(20):
        world.clock.advance(5_000)
        world.use([numbered_key(number)])
        left = set(world.resident([*chain("abc"), *chain("abd")]))
        for path in ("abc", "abd"):
            flags = [key in left for key in chain(path)]
            assert flags == sorted(flags, reverse=True)


@pytest.mark.parametrize("policy", ["guard", "hazard"])
def test_what_follows_a_refused_chunk_is_refused_too(policy: str) -> None:
    world = World(policy, 4)
    for _ in range(40):
        world.use(chain("abcd"))
        world.clock.advance(4)
    ctx = world.begin()
    world.manager.touch(chain("xyz"), ctx)
    assert world.store(chain("xyz")[:1], ctx) == []
    world.clock.advance(50_000)
    assert world.store(chain("xyz")[1:], ctx) == []
    assert world.store(chain("xyz"), ctx) == chain("xyz")


@pytest.mark.parametrize("policy", ["guard"])
def test_a_session_that_is_over_displaces_nothing_and_one_that_continues_does(policy: str) -> None:
    world = World(policy, 4)
    world.use(chain("abcd"))
    world.clock.advance(50_000)
    assert world.use(chain("xy"), session="over") == []
    assert world.use(chain("xy"), session="continues") == chain("xy")


def test_hazard_learns_what_the_sessions_hint_means() -> None:
    world = World("hazard", 8)
    for number in range(600):
        continues, over = numbered_key(2 * number), numbered_key(2 * number + 1)
        world.use([continues], session="continues")
        world.use([over], session="over")
        world.clock.advance(10)
        world.use([continues], session="continues")
        world.clock.advance(10)
    world.use([numbered_key(9_000)], session="continues")
    world.use([numbered_key(9_001)], session="over")
    world.clock.advance(1)
    for number in range(10_000, 10_006):
        world.use([numbered_key(number)], session="continues")
    assert world.resident([numbered_key(9_000), numbered_key(9_001)])[:1] == [numbered_key(9_000)]


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_that_are_being_written_are_no_victims(policy: str) -> None:
    world = World(policy, 2)
    writer = world.begin()
    assert world.manager.prepare_store(chain("ab"), writer) is not None
    world.clock.advance(10_000)
    assert world.use(chain("x")) == []
    world.manager.complete_store(chain("ab"), writer)
    assert world.resident(chain("ab")) == chain("ab")
