"""Random workloads for the tiny model, and copies that run late or fail, by seed."""

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from typing_extensions import override

from kvstrata.build import build_manager
from kvstrata.connector.messages import CopyResult
from kvstrata.connector.transfers import Task, Transfers, Urgency, run_task
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.engine.engine import Engine, EngineConfig
from kvstrata.engine.model import KVGroup, PagedKV, Transformer
from kvstrata.engine.request import Request, Sampling, Status
from kvstrata.engine.scheduler import SchedulerLimits
from kvstrata.engine.tiny import tiny_config, tiny_weights
from kvstrata.testing import FakeBackend, FakeClock

VOCAB_SIZE = 128

GROUPS: tuple[tuple[KVGroup, ...], ...] = (
    (KVGroup((0, 1), 4),),
    (KVGroup((0,), 4), KVGroup((1,), 4, window=11)),
    (KVGroup((0,), 4), KVGroup((1,), 8)),
    (KVGroup((0,), 8), KVGroup((1,), 4, window=18), KVGroup((2,), 12)),
)


@cache
def make_model(groups: tuple[KVGroup, ...]) -> Transformer:
    """Return the model of these groups; models are equal for equal groups."""
    config = tiny_config(groups, vocab_size=VOCAB_SIZE)
    return Transformer(config, tiny_weights(config, seed=7))


class LateTransfers(Transfers):
    """Copies that run when the seed says so, at the latest when a step has to wait for them.

    Loads may fail, then their blocks hold garbage; stores may fail, then nothing was copied.
    """

    def __init__(self, seed: int, *, failure_rate: float = 0.0, late_rate: float = 0.9) -> None:
        self._random = np.random.default_rng(seed)
        self._failure_rate = failure_rate
        self._late_rate = late_rate
        self._queue: dict[JobId, tuple[Task, Urgency]] = {}
        self._results: list[CopyResult] = []
        self.num_waited = 0
        self.num_failed = 0
        self.kv: PagedKV | None = None

    @override
    def submit(self, task: Task, urgency: Urgency) -> None:
        self._queue[task.job.job_id] = (task, urgency)

    @override
    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> Collection[JobId]:
        for job_id in job_ids:
            if job_id in self._queue:
                self.num_waited += 1
                self._run(job_id)
        return ()

    @override
    def take_results(self) -> list[CopyResult]:
        for job_id in list(self._queue):
            if self._random.random() >= self._late_rate:
                self._run(job_id)
        results, self._results = self._results, []
        return results

    @override
    def wait_for_results(self, timeout_s: float) -> None:
        return

    @override
    def close(self, timeout_s: float) -> Collection[JobId]:
        for job_id in list(self._queue):
            self._run(job_id)
        return ()

    def _run(self, job_id: JobId) -> None:
        task, urgency = self._queue.pop(job_id)
        if self._random.random() >= self._failure_rate:
            self._results.append(run_task(task))
            return
        self.num_failed += 1
        slots = {slot for copies in task.job.copies for slot in copies.slots}
        failed = frozenset(slot for slot in slots if self._random.random() < 0.5)
        if urgency is Urgency.LOAD:
            run_task(task)
            self._spoil(task, failed)
        else:
            failed = frozenset(slots)
        self._results.append(CopyResult(job_id, failed))

    def _spoil(self, task: Task, failed: Collection[int]) -> None:
        assert self.kv is not None
        for copies in task.job.copies:
            for block_id, slot in zip(copies.block_ids, copies.slots, strict=True):
                if slot in failed:
                    self.kv.blocks[copies.group_idx][block_id] = 1e3


class UnfencedTransfers(LateTransfers):
    """The same without the fence: a step does not wait for copies of blocks that it overwrites."""

    @override
    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> Collection[JobId]:
        return ()


class SomeKeys(Container[OffloadKey]):
    """About one key in `share`, by its own bytes and a seed."""

    def __init__(self, seed: int, share: int) -> None:
        self._seed = seed
        self._share = share

    @override
    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        return (key[0] + self._seed) % self._share == 0


class FaultyTier:
    """A tier's backend whose switches the seed turns, and the clock that the manager goes by."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.clock = FakeClock()
        self.backend = FakeBackend(
            lookup_delay_s=0.0,
            delay_s=0.01,
            fail_stores=SomeKeys(seed, 29),
            fail_loads=SomeKeys(seed + 1, 29),
            short=SomeKeys(seed + 2, 29),
            corrupt=SomeKeys(seed + 3, 29),
            lie=SomeKeys(seed + 4, 29),
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        """What makes a manager use it."""
        tier = {"type": "kvstrata.testing:FakeTier", "backend": self.backend, "cooldown_s": 0.05}
        return {"tiers": [tier], "max_wait_s": 0.2}

    def next_step(self) -> None:
        """Let time pass, and hold back copies and lookups now and then."""
        self.clock.advance(0.01)
        self.backend.hold = bool(self._random.random() < 0.3)
        self.backend.hold_lookups = bool(self._random.random() < 0.3)


@dataclass(frozen=True, slots=True)
class Workload:
    """Rounds of requests. A prompt is a prefix of the round before, or of a shared text, and more.

    `prompts[i][j]` is (index of the request to continue or -1, tokens to keep, new tokens);
    `abort_steps[i][j]` is the step of the round in which the request is aborted, if any.
    """

    groups: tuple[KVGroup, ...]
    config: EngineConfig
    num_primary_chunks: int
    policy: str
    prompts: list[list[tuple[int, int, list[int]]]]
    samplings: list[list[Sampling]]
    abort_steps: list[list[int | None]]


@dataclass(slots=True)
class Outcome:
    """What a run gave: tokens of every request, and what happened on the way."""

    outputs: list[list[list[int]]] = field(default_factory=list)
    was_aborted: list[list[bool]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def random_workload(seed: int) -> Workload:
    """Return the workload of a seed: pressure on engine blocks and slots is common in it."""
    random = np.random.default_rng(seed)
    groups = GROUPS[seed % len(GROUPS)]
    spans = tuple(int(n) for n in random.integers(1, 5, len(groups)))
    num_tokens_max = 86  # of any request, output included
    room = random.uniform(1.0, 2.0) * num_tokens_max
    num_blocks = tuple(int(room // g.tokens_per_block) + 2 for g in groups)
    limits = SchedulerLimits(int(random.integers(6, 60)), int(random.integers(2, 8)))
    num_rounds, num_requests = 4, int(random.integers(3, 8))
    prompts, samplings, abort_steps = [], [], []
    for index in range(num_rounds):
        prompts.append(
            [
                (
                    int(random.integers(-1, num_requests)) if index else -1,
                    int(random.integers(0, 50)),
                    [int(t) for t in random.integers(0, VOCAB_SIZE, random.integers(1, 12))],
                )
                for _ in range(num_requests)
            ]
        )
        samplings.append(
            [
                Sampling(int(random.integers(1, 24)), float(random.integers(0, 2)), seed=seed + i)
                for i in range(num_requests)
            ]
        )
        abort_steps.append(
            [
                int(random.integers(0, 12)) if random.random() < 0.12 else None
                for _ in range(num_requests)
            ]
        )
    return Workload(
        groups,
        EngineConfig(num_blocks, spans, limits),
        int(random.integers(2, 90)),
        "auto" if seed % 5 == 0 else "lru",
        prompts,
        samplings,
        abort_steps,
    )


def run_workload(
    workload: Workload,
    engine: Engine,
    expected: Outcome | None = None,
    tier: FaultyTier | None = None,
) -> Outcome:
    """Run all rounds.

    Args:
        workload: The requests.
        engine: What they run on.
        expected: What a run without offloading gave; prompts continue it, and aborts happen.
        tier: To be told of every step.
    """
    outcome = Outcome()
    shared = [int(t) for t in np.random.default_rng(0).integers(0, VOCAB_SIZE, 60)]
    texts: list[list[int]] = []
    for index, prompts in enumerate(workload.prompts):
        requests = []
        for (parent, num_kept, new), sampling in zip(
            prompts, workload.samplings[index], strict=True
        ):
            base = shared if parent < 0 else texts[parent]
            requests.append(engine.add_request([*base[:num_kept], *new], sampling))
        _run_round(engine, requests, workload.abort_steps[index] if expected else [], tier)
        outcome.outputs.append([r.output for r in requests])
        outcome.was_aborted.append([r.status is Status.ABORTED for r in requests])
        for name in ("engine", "loaded", "computed", "preemptions"):
            total = sum(getattr(r.counts, name) for r in requests)
            outcome.counts[name] = outcome.counts.get(name, 0) + total
        outputs = (expected or outcome).outputs[index]
        texts = [
            [*r.tokens[: r.num_prompt_tokens], *output]
            for r, output in zip(requests, outputs, strict=True)
        ]
    return outcome


def _run_round(
    engine: Engine,
    requests: list[Request],
    abort_steps: list[int | None],
    tier: FaultyTier | None,
) -> None:
    step = 0
    while engine.has_work:
        for request, abort_step in zip(requests, abort_steps, strict=False):
            if abort_step == step:
                engine.abort(request.req_id)
        if tier:
            tier.next_step()
        engine.step()
        for pool in engine.tables.pools:
            pool.check()
        if engine.connector:
            engine.connector.check()
        step += 1
        assert step < 3000, "the engine makes no progress"


def make_reference(workload: Workload) -> Outcome:
    """Run the workload without offloading, pressure or aborts."""
    config = replace(
        workload.config,
        num_blocks=tuple(400 for _ in workload.groups),
        limits=SchedulerLimits(256, 16),
    )
    return run_workload(workload, Engine(make_model(workload.groups), config))


def make_offloading_engine(
    workload: Workload, transfers: LateTransfers, tier: FaultyTier | None = None
) -> Engine:
    """Make the engine under test over a manager with a tiny primary, tinier over a tier."""
    model = make_model(workload.groups)
    num_chunks = workload.num_primary_chunks
    if tier:
        num_chunks = max(2, num_chunks // 5)
    manager = build_manager(
        {
            "primary": {"num_chunks": num_chunks, "policy": workload.policy},
            **(tier.settings if tier else {}),
        },
        chunk_bytes=workload.config.chunk_bytes(model.config),
        namespace=workload.config.namespace(model.config, revision="test"),
        clock=tier.clock if tier else None,
    )
    engine = Engine(model, workload.config, manager, transfers=transfers)
    transfers.kv = engine.kv
    return engine


def differences(expected: Outcome, found: Outcome) -> int:
    """Return how many requests differ; an aborted one may only be shorter."""
    count = 0
    for one, other, aborted in zip(expected.outputs, found.outputs, found.was_aborted, strict=True):
        for tokens, output, is_aborted in zip(one, other, aborted, strict=True):
            count += output != (tokens[: len(output)] if is_aborted else tokens)
    return count


def assert_nothing_is_held(engine: Engine, workload: Workload) -> None:
    """No block, pin or job is left of requests that are over."""
    for pool, count in zip(engine.tables.pools, workload.config.num_blocks, strict=True):
        assert pool.num_free == count - 1
    assert engine.connector is not None
    stats = engine.connector.manager.get_stats()
    assert stats["num_pinned"] == stats["num_writing"] == stats["num_requests"] == 0
