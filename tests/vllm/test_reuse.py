"""Prompts that the engine's own blocks can't hold come back from offload, token for token."""

from pathlib import Path

import pytest

from tests.vllm.engine import Tokens, engine, prompts

PRIMARY = {"primary": {"num_chunks": 100}}
BATCH = prompts(6, 1500, seed=1)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Tokens:
    with engine(tiny_model, None) as plain:
        return plain.run_each(BATCH)


def test_the_second_round_is_served_from_offload_with_the_same_tokens(
    tiny_model: Path, expected: Tokens
) -> None:
    with engine(tiny_model, PRIMARY) as ours:
        assert ours.run_each(BATCH) == expected
        assert ours.scheduler.get_stats()["primary_tokens"] == 0
        assert ours.run_each(BATCH) == expected
        assert ours.scheduler.get_stats()["primary_tokens"] == 6 * 1408
