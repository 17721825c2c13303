"""Few blocks, many requests: preemption, failed loads and aborts change no token."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Tokens, engine, prompts
from tests.vllm.faulty import (
    FailFirstConnector,
    FailSomeConnector,
    FailWholeConnector,
    LateConnector,
    UnfencedConnector,
    named,
)
from tests.vllm.models import save_tiny_gemma

PRIMARY = {"primary": {"num_chunks": 400, "policy": "lru"}}
# Sixteen requests grow to 400 tokens, 13 blocks; the pool holds nine of them at that size.
FEW: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 120, "max_model_len": 1024}
NUM_NEW = 160
STEPS = (1, 2, 5, 9, 30, 60)


def batch(seed: int) -> Tokens:
    return prompts(16, 240, seed, num_shared=0)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[int, Tokens]:
    with engine(tiny_model, None, **{**FEW, "num_gpu_blocks_override": 400}) as plain:
        return {seed: plain.run(batch(seed), NUM_NEW) for seed in (1, 2, 3)}


def test_preempted_requests_continue_with_the_same_tokens(
    tiny_model: Path, expected: dict[int, Tokens]
) -> None:
    with engine(tiny_model, PRIMARY, named(LateConnector), **FEW) as ours:
        for seed, tokens in expected.items():
            assert ours.run(batch(seed), NUM_NEW) == tokens
            ours.llm.reset_prefix_cache()
        assert ours.counter("vllm:num_preemptions") >= 3
        assert ours.scheduler.get_stats()["resumed_tokens"] > 0


def test_without_the_fence_the_same_requests_get_other_tokens(
    tiny_model: Path, expected: dict[int, Tokens]
) -> None:
    with engine(tiny_model, PRIMARY, named(UnfencedConnector), **FEW) as unfenced:
        wrong = 0
        for seed, tokens in expected.items():
            wrong += unfenced.run(batch(seed), NUM_NEW) != tokens
            unfenced.llm.reset_prefix_cache()
        assert wrong


@pytest.mark.parametrize("kind", [FailSomeConnector, FailFirstConnector, FailWholeConnector])
def test_failed_loads_are_computed_again_and_nobody_starves(
    tiny_model: Path, expected: dict[int, Tokens], kind: type[Any]
) -> None:
    with engine(tiny_model, PRIMARY, named(kind), max_num_batched_tokens=512, **FEW) as ours:
        for _ in range(2):
            for seed, tokens in expected.items():
                assert ours.run(batch(seed), NUM_NEW) == tokens
                ours.llm.reset_prefix_cache()
        assert ours.scheduler.get_stats()["failed_load_tokens"] > 0


def test_aborted_requests_leave_nothing_behind(
    tiny_model: Path, expected: dict[int, Tokens]
) -> None:
    with engine(tiny_model, PRIMARY, named(LateConnector), **FEW) as ours:
        tokens = batch(1)
        ours.run(tokens, NUM_NEW)
        ours.llm.reset_prefix_cache()
        victims = range(0, 16, 3)
        # In the first steps they load; later ones run, wait, or are preempted.
        aborts = {step: partial(ours.abort, i) for step, i in zip(STEPS, victims, strict=True)}
        done = ours.steps(tokens, NUM_NEW, aborts)
        assert ours.scheduler.get_stats()["primary_tokens"] > 0
        assert done == {i: expected[1][i] for i in range(16) if i not in victims}


def test_running_requests_whose_blocks_are_reset_continue_with_the_same_tokens(
    tiny_model: Path, expected: dict[int, Tokens]
) -> None:
    enough = {**FEW, "num_gpu_blocks_override": 300}
    with engine(tiny_model, PRIMARY, named(LateConnector), **enough) as ours:

        def reset() -> None:
            assert ours.core.scheduler.reset_prefix_cache(reset_running_requests=True)

        done = ours.steps(batch(2), NUM_NEW, {40: reset})
        assert [done[i] for i in range(16)] == expected[2]
        assert ours.counter("vllm:num_preemptions") >= 16


def test_failed_loads_of_several_groups_are_computed_again(tmp_path: Path) -> None:
    model = save_tiny_gemma(tmp_path / "gemma")
    tokens = prompts(6, 420, seed=4, num_shared=96)
    options: dict[str, Any] = {"block_size": 32, "max_model_len": 1024}
    with engine(model, None, num_gpu_blocks_override=400, **options) as plain:
        first = plain.run(tokens, 40)
    with engine(model, PRIMARY, named(FailSomeConnector), num_gpu_blocks_override=70,
                **options) as ours:  # fmt: skip
        for _ in range(3):
            assert ours.run(tokens, 40) == first
            ours.llm.reset_prefix_cache()
        assert ours.scheduler.get_stats()["failed_load_tokens"] > 0
