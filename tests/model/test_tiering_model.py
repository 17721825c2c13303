"""Drives the whole manager over two tiers that hold, fail, lie, delay and damage: no wrong byte."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from typing_extensions import override

from kvstrata.build import build_manager
from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.testing import FakeBackend, FakeClock, chain, pattern, poison
from kvstrata.testing.manager_calls import check, end_step, verify

PROMPTS = (chain("abc"), chain("abd"), chain("ef"))
KEYS = sorted({key for prompt in PROMPTS for key in prompt})
NUM_SLOTS = 4
CHUNK_BYTES = 48
STEPS_PER_EXAMPLE = 50

requests = st.sampled_from(range(3))
tiers = st.sampled_from(range(2))
key_sets = st.sets(st.sampled_from(KEYS), max_size=3)


class Request:
    def __init__(self, name: str) -> None:
        self.ctx = ReqContext(name)
        self.is_live = False
        self.loads: list[tuple[list[OffloadKey], list[int]]] = []
        self.stores: list[tuple[list[OffloadKey], list[int]]] = []


class TieringMachine(RuleBasedStateMachine):
    num_steps: ClassVar = 0

    @initialize(lookup_delay_s=st.sampled_from((None, 0.0, 0.1)))
    def begin(self, lookup_delay_s: float | None) -> None:
        self.clock = FakeClock()
        self.backends = [FakeBackend(), FakeBackend(lookup_delay_s=lookup_delay_s)]
        fake = "kvstrata.testing:FakeTier"
        self.manager = build_manager(
            {
                "primary": {"num_chunks": NUM_SLOTS, "policy": "lru"},
                "tiers": [
                    {"type": fake, "name": "one", "backend": self.backends[0]},
                    {"type": fake, "name": "two", "backend": self.backends[1], "write": "on_evict"},
                ],
            },
            chunk_bytes=CHUNK_BYTES,
            namespace="model",
            clock=self.clock,
        )
        self.requests = [Request(f"r{i}") for i in range(3)]

    @rule(number=requests)
    def start(self, number: int) -> None:
        request = self.requests[number]
        if not request.is_live:
            request.ctx = ReqContext(request.ctx.req_id)
            self.manager.on_new_request(request.ctx)
            request.is_live = True

    @rule(number=requests)
    def finish(self, number: int) -> None:
        self.manager.on_request_finished(self.requests[number].ctx)
        self.requests[number].is_live = False

    @rule(number=requests, prompt=st.sampled_from(PROMPTS))
    def look_up_and_load(self, number: int, prompt: Sequence[OffloadKey]) -> None:
        request = self.requests[number]
        self.manager.touch(prompt, request.ctx)
        count = self.manager.lookup(prompt, request.ctx)
        if count:
            keys = list(prompt[:count])
            slots = list(self.manager.prepare_load(keys, request.ctx).slots)
            verify(self.manager, keys, slots)
            request.loads.append((keys, slots))

    @rule(number=requests, failed=key_sets)
    def complete_loads(self, number: int, failed: set[OffloadKey]) -> None:
        request = self.requests[number]
        for keys, slots in request.loads:
            verify(self.manager, keys, slots)
            self.manager.complete_load(keys, request.ctx, failed & set(keys))
        request.loads.clear()

    @rule(number=requests, prompt=st.sampled_from(PROMPTS))
    def begin_store(self, number: int, prompt: Sequence[OffloadKey]) -> None:
        request = self.requests[number]
        output = self.manager.prepare_store(prompt, request.ctx)
        if output is None or not output.keys_to_store:
            return
        keys, slots = list(output.keys_to_store), list(output.store_spec.slots)
        open_slots = {
            slot
            for other in self.requests
            for _, used in other.loads + other.stores
            for slot in used
        }
        assert not open_slots & set(slots), "a slot that a copy still uses"
        for slot in slots:
            poison(self.manager.slots[slot])
        request.stores.append((keys, slots))

    @rule(number=requests, failed=key_sets)
    def complete_stores(self, number: int, failed: set[OffloadKey]) -> None:
        request = self.requests[number]
        for keys, slots in request.stores:
            for key, slot in zip(keys, slots, strict=True):
                if key not in failed:
                    self.manager.slots[slot][:] = pattern(key, CHUNK_BYTES)
            self.manager.complete_store(keys, request.ctx, failed & set(keys))
        request.stores.clear()

    @rule(tier=tiers, switch=st.sampled_from(("hold", "hold_lookups")))
    def toggle(self, tier: int, switch: str) -> None:
        backend = self.backends[tier]
        setattr(backend, switch, not getattr(backend, switch))

    @rule(
        tier=tiers,
        switch=st.sampled_from(("fail_stores", "fail_loads", "short", "corrupt", "lie")),
        keys=key_sets,
    )
    def misbehave(self, tier: int, switch: str, keys: set[OffloadKey]) -> None:
        setattr(self.backends[tier], switch, frozenset(keys))

    @rule(tier=tiers, delay_s=st.sampled_from((0.0, 0.5, 20.0)))
    def delay(self, tier: int, delay_s: float) -> None:
        self.backends[tier].delay_s = delay_s

    @rule(tier=tiers, keys=key_sets)
    def lose(self, tier: int, keys: set[OffloadKey]) -> None:
        for key in keys:
            self.backends[tier].chunks.pop(key, None)

    @rule(
        new=st.sets(requests),
        preempted=st.sets(requests),
        by_s=st.sampled_from((0.0, 0.2, 3.0, 70.0)),
    )
    def end_step(self, new: set[int], preempted: set[int], by_s: float) -> None:
        end_step(self.manager, [f"r{i}" for i in new], [f"r{i}" for i in preempted])
        self.clock.advance(by_s)

    @rule(keys=key_sets, number=requests)
    def delete(self, keys: set[OffloadKey], number: int) -> None:
        self.manager.delete(sorted(keys), self.requests[number].ctx)

    @rule()
    def reset(self) -> None:
        self.manager.reset_cache()

    @invariant()
    def nothing_is_wrong(self) -> None:
        type(self).num_steps += 1
        if not hasattr(self, "manager"):
            return
        check(self.manager)
        for request in self.requests:
            for keys, slots in request.loads:
                verify(self.manager, keys, slots)
        for backend in self.backends:
            for key, payload in backend.chunks.items():
                assert payload == pattern(key, CHUNK_BYTES), "wrong bytes below"

    @override
    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.come_to_rest()
            self.manager.shutdown(1.0)

    def come_to_rest(self) -> None:
        """Heal the tiers and settle all: every slot is accounted for, no job is stuck."""
        for backend in self.backends:
            backend.hold = backend.hold_lookups = False
            backend.delay_s = 0.0
        for number, request in enumerate(self.requests):
            self.complete_loads(number, set())
            self.complete_stores(number, set())
            self.manager.on_request_finished(request.ctx)
        for _ in range(20):
            end_step(self.manager)
            self.clock.advance(30.0)
        assert not self.manager.has_pending_work()
        stats = self.manager.get_stats()
        assert list(stats.jobs) == []
        assert stats["num_requests"] == 0
        assert stats["num_writing"] == stats["num_pinned"] == stats["num_protected"] == 0
        assert stats["num_free"] + stats["num_evictable"] == NUM_SLOTS


def run_steps(num_examples: int) -> int:
    machine = type("Machine", (TieringMachine,), {"num_steps": 0})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=STEPS_PER_EXAMPLE,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return int(machine.num_steps)  # type: ignore[attr-defined]


def test_no_order_of_calls_and_faults_serves_wrong_bytes() -> None:
    assert run_steps(15) > 200


@pytest.mark.slow
def test_no_order_of_very_many_calls_and_faults_serves_wrong_bytes() -> None:
    assert run_steps(2_500) >= 100_000
