"""Any order of calls into the whole manager, over tiers that hold, fail, lie and delay.

Real bytes: what a store is given is written when it completes and follows from the key; whatever
the manager says can be loaded is verified, as long as it is being loaded. What a tier reads is
verified too, since it keeps it. Slots that nothing uses are poison.
"""

import random
from collections.abc import Callable, Collection, Container
from typing import Any

import pytest
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
from kvstrata.core.delegate import find_manager
from kvstrata.core.errors import ConfigError, TierUnavailableError
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.manager import SuspendMode
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, LookupResult
from kvstrata.testing import EVERY_KEY, FakeBackend, FakeClock, FakeTier, chain, pattern, poison
from kvstrata.testing.machines import machine_settings
from kvstrata.testing.manager_calls import end_step
from kvstrata.tiering.manager import TieringOffloadingManager

CHUNK_BYTES = 32
KEYS = (*chain("abc"), *chain("ax")[1:], *chain("yz"), *chain("pqr"))
PROMPTS = (chain("abc"), chain("ax"), chain("yz"), chain("ab"), chain("pqr"))
NUM_REQUESTS = 3

prompts = st.sampled_from(PROMPTS)
requests = st.integers(0, NUM_REQUESTS - 1)
policies = st.sampled_from(("through", "through", "on_evict", "on_reuse", "never"))
few_keys = st.sets(st.sampled_from(KEYS), max_size=2)
HINTS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"priority": 10},
    {"priority": 90, "ttl_s": 5.0},
    {"ttl_s": 50.0},
    {"retention": [{"start": 1, "end": 2, "priority": 90, "ttl_s": 5.0}]},
    {"store_tiers": []},
    {"store_tiers": ["t0"]},
    {"load_tiers": ["t0"]},
    {"load_tiers": []},
    {"max_wait_s": 2.0},
    {"max_wait_s": 0.0},
    {"max_load_tokens": 1},
    {"store": False},
    {"tenant": "other"},
)
MISDEEDS = ("hold", "hold_lookups", "is_rude", "is_short", "error", "delay_s", "lookup_delay_s")
KEY_MISDEEDS = ("fail_stores", "fail_loads", "short", "corrupt", "lie")
MODES = tuple(SuspendMode)
hints = st.sampled_from(HINTS)


class Misbehaving(FakeTier):
    """A FakeTier that also breaks the contract: answers twice, for others, or too short."""

    @override
    def get_finished_jobs(self) -> Collection[JobResult]:
        results = list(super().get_finished_jobs())
        if results and getattr(self.backend, "is_rude", False):
            results += [results[0], JobResult(JobId(10**6)), JobResult(JobId(-1))]
        return results

    @override
    def lookup_many(self, keys: Any, ctx: ReqContext) -> list[LookupResult]:
        answers = list(super().lookup_many(keys, ctx))
        return answers[:-1] if getattr(self.backend, "is_short", False) else answers


class RudeBackend(FakeBackend):
    is_rude = False
    is_short = False


class _Request:
    def __init__(self, number: int) -> None:
        self.req_id = f"r{number}"
        self.ctx = ReqContext(self.req_id)
        self.is_live = False
        self.storing: dict[OffloadKey, int] = {}
        self.loading: list[tuple[list[OffloadKey], list[int]]] = []
        self.closed: list[tuple[ReqContext, dict[OffloadKey, int]]] = []

    @property
    def tag(self) -> bytes:
        return b"other" if self.ctx.hints.tenant else b""


class TieringMachine(RuleBasedStateMachine):
    """Nine chunks, three requests, two to four slots, one or two tiers."""

    num_tiers = 2

    @initialize(
        num_slots=st.integers(2, 4),
        threshold=st.sampled_from((1, 1, 1, 2)),
        writes=st.tuples(policies, policies),
        num_queued=st.sampled_from((1, 3, 100)),
        policy=st.sampled_from(("lru", "auto", "arc")),
    )
    def begin(
        self,
        num_slots: int,
        threshold: int,
        writes: tuple[str, str],
        num_queued: int,
        policy: str,
    ) -> None:
        self.clock = FakeClock()
        self.backends = [RudeBackend() for _ in range(self.num_tiers)]
        self.tier_settings = [
            {
                "type": "tests.model.test_tiering_machine:Misbehaving",
                "name": f"t{i}",
                "backend": backend,
                "write": writes[i],
                "num_queued_chunks_max": num_queued,
                "cooldown_s": 2.0,
            }
            for i, backend in enumerate(self.backends)
        ]
        self.manager = build_manager(
            {
                "primary": {"num_chunks": num_slots, "policy": policy},
                "filter": {"store_threshold": threshold},
                "tiers": self.tier_settings,
                "max_wait_s": 4.0,
                "hold_s": 6.0,
            },
            chunk_bytes=CHUNK_BYTES,
            namespace="machine",
            clock=self.clock,
        )
        for slot in range(num_slots):
            poison(self.manager.slots[slot])
        tiering = find_manager(self.manager, TieringOffloadingManager)
        assert tiering is not None
        self.tiering = tiering
        self.num_slots = num_slots
        self.requests = [_Request(i) for i in range(NUM_REQUESTS)]
        self.waits_since: dict[str, float] = {}

    # The engine

    @rule(number=requests, wishes=hints)
    def start(self, number: int, wishes: dict[str, Any]) -> None:
        request = self.requests[number]
        if not request.is_live and not request.storing and not request.loading:
            request.ctx = ReqContext(request.req_id, {"kvstrata": wishes} if wishes else None)
            self.manager.on_new_request(request.ctx)
            request.is_live = True
            self.waits_since.pop(request.req_id, None)

    @rule(number=requests)
    def finish(self, number: int) -> None:
        self.manager.on_request_finished(self.requests[number].ctx)
        self.requests[number].is_live = False

    @rule(number=requests, prompt=prompts, will_load=st.booleans())
    def lookup(self, number: int, prompt: list[OffloadKey], will_load: bool) -> None:
        request = self.requests[number]
        count = self.manager.lookup(prompt, request.ctx)
        now_s = self.clock.now_s()
        if count is None:
            assert request.is_live, "only live requests wait"
            since_s = self.waits_since.setdefault(request.req_id, now_s)
            assert now_s - since_s <= 4.0, "a request waited past its deadline"
            return
        assert 0 <= count <= len(prompt)
        states = self.manager.lookup_states(prompt[:count], request.ctx)
        assert list(states) == [LookupResult.HIT] * count
        if will_load and count:
            spec = self.manager.prepare_load(prompt[:count], request.ctx)
            assert len(set(spec.slots)) == count
            request.loading.append((prompt[:count], list(spec.slots)))
            self.verify()

    @rule(number=requests, prompt=prompts)
    def touch(self, number: int, prompt: list[OffloadKey]) -> None:
        self.manager.touch(prompt, self.requests[number].ctx)

    @rule(number=requests, failed=few_keys)
    def complete_load(self, number: int, failed: set[OffloadKey]) -> None:
        request = self.requests[number]
        if request.loading:
            self.verify()
            keys, _ = request.loading.pop(0)
            self.manager.complete_load(keys, request.ctx, failed & set(keys))

    @rule(number=requests, prompt=prompts)
    def prepare_store(self, number: int, prompt: list[OffloadKey]) -> None:
        request = self.requests[number]
        busy = self.busy_slots()
        output = self.manager.prepare_store(prompt, request.ctx)
        if output is None:
            return
        slots = list(output.store_spec.slots)
        assert len(output.keys_to_store) == len(set(slots)) == len(slots)
        assert not busy & set(slots), "a slot that a copy still uses"
        assert not set(output.keys_to_store) & set(request.storing)
        for key, slot in zip(output.keys_to_store, slots, strict=True):
            poison(self.manager.slots[slot])
            request.storing[key] = slot
        self.verify()

    @rule(number=requests, keys=st.sets(st.sampled_from(KEYS), min_size=1), failed=few_keys)
    def complete_store(self, number: int, keys: set[OffloadKey], failed: set[OffloadKey]) -> None:
        request = self.requests[number]
        done = [key for key in request.storing if key in keys]
        if done:
            self.write_and_complete(request, done, failed & set(done))

    def write_and_complete(
        self, request: _Request, keys: list[OffloadKey], failed: Collection[OffloadKey] = ()
    ) -> None:
        for key in keys:
            slot = request.storing.pop(key)
            if key not in failed:
                self.manager.slots[slot][:] = self.content(key, request)
        self.manager.complete_store(keys, request.ctx, frozenset(failed))

    @rule(new=st.sets(requests), preempted=st.sets(requests), by_s=st.sampled_from((0.0, 1.0, 7.0)))
    def end(self, new: set[int], preempted: set[int], by_s: float) -> None:
        end_step(self.manager, [f"r{i}" for i in new], [f"r{i}" for i in preempted])
        for i in preempted:
            self.waits_since.pop(f"r{i}", None)
        self.clock.advance(by_s)

    @rule()
    def end_quietly(self) -> None:
        end_step(self.manager)

    @rule(number=requests, prompt=prompts, wishes=hints)
    def serve(self, number: int, prompt: list[OffloadKey], wishes: dict[str, Any]) -> None:
        """Play a whole request, as far as nothing of it is under way."""
        self.start(number, wishes)
        self.touch(number, prompt)
        self.lookup(number, prompt, will_load=True)
        self.prepare_store(number, prompt)
        self.end({number}, set(), 0.0)
        self.complete_store(number, set(KEYS), set())
        self.complete_load(number, set())
        self.finish(number)
        self.end_quietly()

    # The operator

    @rule(keys=few_keys, number=requests)
    def delete(self, keys: set[OffloadKey], number: int) -> None:
        request = self.requests[number]
        self.manager.delete(sorted(keys), request.ctx)
        states = self.manager.lookup_states(sorted(keys), request.ctx)
        lies = any(key in b.lie for b in self.backends for key in keys)
        held = any(b.hold for b in self.backends)
        assert LookupResult.HIT not in states
        assert lies or held or set(states) <= {LookupResult.MISS, LookupResult.RETRY}

    @rule()
    def reset(self) -> None:
        self.manager.reset_cache()
        for request in self.requests:
            states = self.manager.lookup_states(KEYS, request.ctx)
            assert LookupResult.HIT not in states

    @rule(mode=st.sampled_from(SuspendMode))
    def suspend(self, mode: SuspendMode) -> None:
        self.manager.suspend(mode, timeout_s=0.0)
        if mode is SuspendMode.FORGET:
            states = self.manager.lookup_states(KEYS, self.requests[0].ctx)
            assert LookupResult.HIT not in states

    @rule(number=requests)
    def delete_tenant(self, number: int) -> None:
        self.manager.delete_tenant("other")
        ctx = self.requests[number].ctx
        if ctx.hints.tenant:
            assert LookupResult.HIT not in self.manager.lookup_states(KEYS, ctx)

    @rule(pick=st.integers(0, 99))
    def fail_job(self, pick: int) -> None:
        jobs = self.manager.get_stats().jobs
        if jobs:
            self.tiering.fail_job(jobs[pick % len(jobs)].job_id)
        else:
            with pytest.raises(KeyError):
                self.tiering.fail_job(JobId(10**9))

    @rule(tier=st.integers(0, 1))
    def detach(self, tier: int) -> None:
        name = f"t{tier % self.num_tiers}"
        if name in self.manager.get_stats().tiers:
            self.tiering.detach_tier(name, timeout_s=0.0)
        else:
            with pytest.raises(KeyError):
                self.tiering.detach_tier(name, timeout_s=0.0)

    @rule(tier=st.integers(0, 1))
    def attach(self, tier: int) -> None:
        """Bring a detached tier back, with what is behind it."""
        number = tier % self.num_tiers
        if f"t{number}" in self.manager.get_stats().tiers:
            with pytest.raises(ConfigError, match="is taken"):
                self.tiering.attach_tier(self.tier_settings[number])
        else:
            self.tiering.attach_tier(self.tier_settings[number])

    # The tiers

    @rule(tier=st.integers(0, 1), what=st.sampled_from(MISDEEDS))
    def misbehave(self, tier: int, what: str) -> None:
        backend = self.backends[tier % self.num_tiers]
        if what == "error":
            backend.error = None if backend.error else TierUnavailableError("t", "is away")
        elif what == "delay_s":
            backend.delay_s = 2.0 - backend.delay_s
        elif what == "lookup_delay_s":
            backend.lookup_delay_s = 3.0 if backend.lookup_delay_s is None else None
        else:
            setattr(backend, what, not getattr(backend, what))

    @rule(
        tier=st.integers(0, 1),
        what=st.sampled_from(KEY_MISDEEDS),
        keys=st.one_of(few_keys, st.just(EVERY_KEY)),
    )
    def misbehave_for(self, tier: int, what: str, keys: Container[OffloadKey]) -> None:
        setattr(self.backends[tier % self.num_tiers], what, keys)

    @rule(tier=st.integers(0, 1))
    def heal(self, tier: int) -> None:
        self.heal_tier(self.backends[tier % self.num_tiers])

    @staticmethod
    def heal_tier(backend: RudeBackend) -> None:
        backend.hold = backend.hold_lookups = backend.is_rude = backend.is_short = False
        backend.fail_stores = backend.fail_loads = backend.short = backend.corrupt = frozenset()
        backend.lie = frozenset()
        backend.delay_s, backend.lookup_delay_s, backend.error = 0.0, None, None

    # What must always hold

    def content(self, key: OffloadKey, request: _Request) -> bytes:
        return pattern(OffloadKey(request.tag + key), CHUNK_BYTES)

    def busy_slots(self) -> set[int]:
        loading = {slot for r in self.requests for _, slots in r.loading for slot in slots}
        return loading | {slot for r in self.requests for slot in r.storing.values()}

    def verify(self) -> None:
        for request in self.requests:
            for keys, slots in request.loading:
                for key, slot in zip(keys, slots, strict=True):
                    assert self.manager.slots[slot] == self.content(key, request), "wrong bytes"

    def poison_free_slots(self) -> None:
        here, dropped = self.tiering.inner.store.table.all_runs()
        used = {slot for run in here + dropped for slot in run.slots}
        assert self.busy_slots() <= used
        for slot in set(range(self.num_slots)) - used:
            poison(self.manager.slots[slot])

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.tiering.check()
        self.poison_free_slots()
        self.verify()
        stats = self.manager.get_stats()
        assert 0 <= stats["num_free"] <= self.num_slots
        plain = {pattern(key, CHUNK_BYTES) for key in KEYS}
        other = {pattern(OffloadKey(b"other" + key), CHUNK_BYTES) for key in KEYS}
        for backend in self.backends:
            for key, content in backend.chunks.items():
                suffix = next(k for k in KEYS if key.endswith(k))
                is_plain = suffix == key
                expected = key if is_plain else OffloadKey(b"other" + suffix)
                assert content in (plain if is_plain else other)
                assert content == pattern(expected, CHUNK_BYTES), "a tier got wrong bytes"
        for tier in stats.tiers.values():
            assert all(value >= 0 for value in tier.counters.values())

    @override
    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for backend in self.backends:
            self.heal_tier(backend)
        for request in self.requests:
            while request.loading:
                self.complete_load(self.requests.index(request), set())
            self.write_and_complete(request, list(request.storing))
            self.finish(self.requests.index(request))
        for _ in range(30):
            end_step(self.manager)
            self.clock.advance(11.0)
        stats = self.manager.get_stats()
        assert not stats.jobs, "a job is stuck"
        assert not self.manager.has_pending_work()
        assert stats["num_requests"] == stats["num_promotions"] == 0
        assert stats["num_pinned"] == stats["num_writing"] == stats["num_protected"] == 0
        assert stats["num_free"] + stats["num_evictable"] == self.num_slots
        assert all(tier.state == "ok" or True for tier in stats.tiers.values())
        self.manager.shutdown(1.0)


class OneTierMachine(TieringMachine):
    num_tiers = 1


def walk(machine: TieringMachine, seed: int, num_steps: int) -> None:
    """Take random steps; likelier ones more often, so that a long walk gets somewhere."""
    rng = random.Random(seed)
    writes = ("through", "through", "on_evict", "on_reuse", "never")
    machine.begin(
        rng.choice((2, 3, 4)),
        rng.choice((1, 1, 1, 2)),
        (rng.choice(writes), rng.choice(writes)),
        rng.choice((1, 3, 100)),
        rng.choice(("lru", "auto", "arc")),
    )

    def number() -> int:
        return rng.randrange(NUM_REQUESTS)

    def some(count: int) -> set[OffloadKey]:
        return set(rng.sample(KEYS, rng.randint(0, count)))

    steps: list[tuple[int, Callable[[], object]]] = [
        (4, lambda: machine.start(number(), rng.choice(HINTS))),
        (3, lambda: machine.finish(number())),
        (10, lambda: machine.lookup(number(), rng.choice(PROMPTS), will_load=rng.random() < 0.7)),
        (3, lambda: machine.touch(number(), rng.choice(PROMPTS))),
        (6, lambda: machine.complete_load(number(), some(1))),
        (6, lambda: machine.prepare_store(number(), rng.choice(PROMPTS))),
        (8, lambda: machine.complete_store(number(), {*KEYS} - some(2), some(1))),
        (9, lambda: machine.serve(number(), rng.choice(PROMPTS), rng.choice(HINTS))),
        (8, machine.end_quietly),
        (8, lambda: machine.end({number()}, {number()} - {0}, rng.choice((0.0, 0.0, 1.0, 7.0)))),
        (1, lambda: machine.delete(some(2), number())),
        (1, lambda: machine.reset() if rng.random() < 0.3 else None),
        (1, lambda: machine.misbehave(rng.randrange(2), rng.choice(MISDEEDS))),
        (2, lambda: machine.misbehave_for(rng.randrange(2), rng.choice(KEY_MISDEEDS), some(2))),
        (3, lambda: machine.heal(rng.randrange(2))),
        (1, lambda: machine.fail_job(rng.randrange(100))),
        (1, lambda: machine.detach(rng.randrange(2)) if rng.random() < 0.5 else None),
        (2, lambda: machine.attach(rng.randrange(2))),
        (1, lambda: machine.suspend(rng.choice(MODES)) if rng.random() < 0.5 else None),
        (1, lambda: machine.delete_tenant(number()) if rng.random() < 0.5 else None),
    ]
    weights = [weight for weight, _ in steps]
    try:
        for _, step in rng.choices(steps, weights, k=num_steps):
            step()
            machine.nothing_is_wrong()
    except BaseException:
        machine.manager.shutdown(0.0)
        raise
    machine.teardown()


@pytest.mark.hypothesis
@pytest.mark.parametrize("machine", [OneTierMachine, TieringMachine])
def test_no_order_of_calls_and_failures_gives_wrong_bytes_or_stuck_slots(
    machine: type[TieringMachine],
) -> None:
    run_state_machine_as_test(machine, settings=machine_settings(30))


@pytest.mark.parametrize("seed", range(10))
def test_long_walks_end_with_every_job_and_slot_accounted_for(seed: int) -> None:
    walk(OneTierMachine() if seed % 3 == 0 else TieringMachine(), seed, 400)


@pytest.mark.parametrize("seed", [1094, 1161])
def test_walks_that_once_led_astray(seed: int) -> None:
    walk(TieringMachine(), seed, 1_000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_hundred_thousand_steps_stay_clean(seed: int) -> None:
    for part in range(5):
        walk(OneTierMachine() if part == 0 else TieringMachine(), 10 * seed + part, 1_000)
