"""Long random walks over the whole primary: hints, tenants, quotas, lifetimes, new weights."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from kvstrata.build import POLICIES, build_manager
from kvstrata.core.delegate import find_manager
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager, SuspendMode
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.core.tenants import TenantResolver
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.testing import OffloadingManagerSuite, chain, poison
from kvstrata.testing.manager_machine import ManagerMachine

WORLDS = (
    ("abcdefgh", "abcx", "abcdxy", "ab", "a", "pqrst", "pqz", "yz", "y", "m", "n"),
    ("abcd", "abx", "y"),
    ("abc", "z"),
)
TAGS = {name: TenantResolver().tag_of(name) for name in ("small", "large")}
HINTS: tuple[dict[str, Any], ...] = (
    *({},) * 4,
    {"priority": 10},
    {"priority": 90},
    {"priority": 70},
    {"ttl_s": 5.0},
    {"priority": 90, "ttl_s": 20.0},
    {"retention": [{"start": 1, "end": 3, "priority": 90, "ttl_s": 5.0}]},
    {"retention": [{"start": 0, "end": 2, "priority": 10}, {"start": 1, "priority": 80}]},
    {"retention": [{"start": 0, "end": 1, "ttl_s": 50.0}], "ttl_s": 7.0},
    {"store": False},
    {"max_load_tokens": 2},
    {"tenant": "small"},
    {"tenant": "small", "priority": 80},
    {"tenant": "large"},
    {"tenant": "large", "ttl_s": 9.0},
    {"session": "over"},
    {"session": "continues"},
)
WAITS_S = (0.0,) * 8 + (0.5, 1.0, 3.0, 20.0, 99.0)


class PrimaryWalk(ManagerMachine):
    """One to twelve slots, a few or two dozen chunks of three tenants, up to six requests.

    Every choice follows from the seed.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = self.rng = random.Random(seed)
        self.paths = rng.choice(WORLDS)
        self.keys = sorted({key for path in self.paths for key in chain(path)})
        self.num_slots = rng.choice((1, 2, 3, 4, 5, 8, 12))
        self.num_requests = rng.choice((2, 4, 6))
        self.has_quotas = rng.random() < 0.5
        self.epoch = 0
        tenants = {"small": {"quota": 0.4}, "large": {"quota": 0.7, "ttl_s": 30.0}}
        config = {
            "primary": {
                "num_chunks": self.num_slots,
                "policy": rng.choice(POLICIES.names()),
                "priority_share": rng.choice((1.0, 0.75, 0.4)),
                "protect_share": rng.choice((1.0, 0.5, 0.2)),
                "zero_freed": rng.random() < 0.3,
                **({"idle_s": 40.0} if rng.random() < 0.3 else {}),
            },
            "tenants": tenants if self.has_quotas else {},
        }

        class Suite(OffloadingManagerSuite):
            @override
            def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
                return build_manager(
                    config, chunk_bytes=chunk_bytes, namespace="walk", clock=self.clock
                )

        self.suite = Suite()
        self.begin()
        primary = find_manager(self.manager, CPUOffloadingManager)
        assert primary is not None
        self.store = primary.store

    def number(self) -> int:
        return self.rng.randrange(self.num_requests)

    def some_keys(self) -> list[OffloadKey]:
        """Return a part of a prompt, or keys in any order."""
        rng, prompt = self.rng, chain(self.rng.choice(self.paths))
        if rng.random() < 0.2:
            return rng.choices(self.keys, k=rng.randint(1, 6))
        start = rng.randrange(len(prompt)) if rng.random() < 0.3 else 0
        return prompt[start : rng.randint(start + 1, len(prompt)) if rng.random() < 0.4 else None]

    def few_of(self, keys: list[OffloadKey], rate: float) -> set[OffloadKey]:
        return {key for key in keys if self.rng.random() < rate}

    @override
    def expected_state(self, key: OffloadKey) -> LookupResult:
        run = self.store.table.find(key)
        due_s = run.expires_at_s if run is not None else None
        is_due = due_s is not None and due_s <= self.clock.wall_s()
        return LookupResult.MISS if is_due else super().expected_state(key)

    def expire(self) -> None:
        """Let leave what is due."""
        self.manager.lookup([], ReqContext("nobody"))
        self.note_removals()
        self.forget_writing(lambda key: key not in self.store.table)

    def forget_writing(self, is_gone: Callable[[OffloadKey], bool]) -> None:
        """Note that chunks were dropped that were being written; no event tells of it."""
        self.writing = {key for key in self.writing if not is_gone(key)}

    # What a request does

    @override
    def lookup(self, number: int, keys: list[OffloadKey]) -> None:
        super().lookup(number, keys)
        self.expire()

    def begin_request(self, number: int) -> None:
        request = self.known[number]
        if request.is_known:
            return
        hints = self.rng.choice(HINTS)
        request.ctx = ReqContext(request.ctx.req_id, {"kvstrata": hints} if hints else None)
        request.tag = TAGS.get(hints.get("tenant", ""), b"")
        request.is_barred = False
        self.manager.on_new_request(request.ctx)
        request.is_live = True

    def load_what_is_here(self, number: int) -> None:
        request = self.known[number]
        keys = [key for key in self.some_keys() if request.named([key])[0] in self.resident]
        if keys:
            if self.rng.random() < 0.5:
                self.touch(number, keys)
            self.prepare_load(number, keys)

    def end_a_load(self, number: int) -> None:
        request, rng = self.known[number], self.rng
        loading = [key for key, _ in request.loading()]
        named = request.named(self.some_keys())
        if loading and rng.random() < 0.8:
            whole = list(rng.choice(request.loads))
            some = rng.sample(loading, min(len(loading), rng.randint(1, 3)))
            named = whole if rng.random() < 0.6 else some
        keys = request.own(named)
        self.complete_load(number, keys, self.few_of(keys, 0.2))

    def offer(self, number: int, keys: list[OffloadKey]) -> None:
        """Offer chunks; what is due leaves before, so that the model knows."""
        self.expire()
        table, priority = self.store.table, self.known[number].ctx.hints.priority
        before = {key: run.priority for key in self.resident if (run := table.find(key))}
        self.prepare_store(number, keys)
        for key, was in before.items():
            assert key in self.resident or was <= priority, "a chunk of a higher class left"

    def end_a_store(self, number: int) -> None:
        request, rng = self.known[number], self.rng
        named = request.named(self.some_keys())
        if rng.random() < 0.8:
            writing = [key for key, _ in request.stores]
            named = rng.sample(writing, rng.randint(0, len(writing)))
        keys = request.own(named)
        self.complete_store(number, keys, self.few_of(keys, 0.1))

    def serve(self, number: int) -> None:
        """Play a whole request, or most of it."""
        request, rng = self.known[number], self.rng
        if request.loads or request.stores:
            return
        self.begin_request(number)
        keys = chain(rng.choice(self.paths))
        self.lookup(number, keys)
        self.touch(number, keys)
        named = request.named(keys)
        num_here = next((i for i, key in enumerate(named) if key not in self.resident), len(keys))
        if num_here and rng.random() < 0.6:
            self.prepare_load(number, keys[:num_here])
        for i in range(0, len(keys), rng.choice((1, 2, 8))):
            self.clock.advance(rng.choice((0.0, 0.0, 0.1, 1.0)))
            self.offer(number, keys if rng.random() < 0.5 else keys[i : i + 2])
        self.check()
        if rng.random() < 0.7:
            self.complete_what_is_open(number, set())
        if rng.random() < 0.8:
            self.finish(number)

    # What an operator does, and time

    def step(self, number: int) -> None:
        others = [i for i in range(self.num_requests) if self.rng.random() < 0.2]
        self.end(set(others), {number} if self.rng.random() < 0.5 else set(), 0.0)
        self.expire()
        self.clock.advance(self.rng.choice(WAITS_S))

    def delete_some(self, number: int) -> None:
        keys = self.some_keys()[:3]
        self.delete(set(keys), number)
        states = self.manager.lookup_states(keys, self.known[number].ctx)
        assert LookupResult.HIT not in states

    def delete_prefix(self, number: int) -> None:
        prefix = self.rng.choice([*TAGS.values(), b"a", b"abc", b"p", self.some_keys()[0]])
        self.manager.delete_prefix(prefix)
        self.forget_writing(lambda key: key.startswith(prefix))

    def delete_tenant(self, number: int) -> None:
        name = self.rng.choice(list(TAGS))
        self.manager.delete_tenant(name)
        self.forget_writing(lambda key: key.startswith(TAGS[name]))

    def suspend(self, number: int) -> None:
        mode = self.rng.choice(list(SuspendMode))
        self.manager.suspend(mode)
        if mode is not SuspendMode.KEEP:
            self.forget_writing(lambda _key: True)
            for slot in set(range(self.num_slots)) - {slot for _, slot in self.copies()}:
                poison(self.manager.slots[slot])  # their pages are new

    def set_epoch(self, number: int) -> None:
        if self.rng.random() < 0.5:
            self.epoch += 1
            self.forget_writing(lambda _key: True)
            for request in self.known:
                request.is_barred = request.is_known
        self.manager.set_epoch(str(self.epoch) if self.epoch else "")

    # The walk

    def check(self) -> None:
        """Compare everything, also what only the table knows."""
        self.model_and_manager_agree()
        for request in self.known:
            request.is_barred = request.is_barred and request.is_known
        runs = self.store.table.all_runs()[0]
        assert {key for run in runs if run.owner is None for key in run.keys} == self.resident
        assert {key for run in runs if run.owner is not None for key in run.keys} == self.writing
        assert len(self.store.expiry.watched) <= 4 * self.num_slots + 200

    def steps(self) -> list[tuple[float, Callable[[int], object]]]:
        """Return what may be done, and how often."""
        return [
            (5, self.begin_request),
            (4, self.finish),
            (8, lambda number: self.touch(number, self.some_keys())),
            (6, lambda number: self.lookup(number, self.some_keys())),
            (2, lambda number: self.prepare_load(number, self.some_keys())),
            (6, self.load_what_is_here),
            (8, self.end_a_load),
            (10, lambda number: self.offer(number, self.some_keys())),
            (10, self.end_a_store),
            (12, self.serve),
            (8, self.step),
            (3, self.delete_some),
            (0.3, self.delete_prefix),
            (0.3, self.delete_tenant),
            (0.3, lambda _number: self.reset()),
            (0.3, self.suspend),
            (0.4, self.set_epoch),
        ]

    def end_everything(self) -> None:
        """End what is open; nothing may be left over."""
        for number in range(self.num_requests):
            self.complete_what_is_open(number, set())
            self.finish(number)
        self.step(0)
        self.check()
        stats = self.manager.get_stats()
        assert stats["num_requests"] == stats["num_pinned"] == stats["num_protected"] == 0
        assert stats["num_free"] + stats["num_evictable"] == self.num_slots


def walk(seed: int, num_steps: int) -> None:
    """Take random steps and compare everything after each."""
    machine = PrimaryWalk(seed)
    weights, actions = zip(*machine.steps(), strict=True)
    try:
        for action in machine.rng.choices(actions, weights, k=num_steps):
            action(machine.number())
            machine.check()
        machine.end_everything()
    finally:
        machine.teardown()


@settings(max_examples=10, phases=[Phase.generate])
@given(st.integers(0, 2**32))
def test_no_walk_over_the_primary_goes_astray(seed: int) -> None:
    walk(seed, 100)


@pytest.mark.slow
@settings(max_examples=300, phases=[Phase.generate])
@given(st.integers(0, 2**32))
def test_no_long_walk_over_the_primary_goes_astray(seed: int) -> None:
    walk(seed, 500)
