"""Random workloads on a toy engine: whatever happens, no token is computed from wrong bytes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.connector import GroupKind, KVGroup
from tests.toy_engine import ToyEngine, ToySettings

TOKENS_PER_BLOCK = 4


def prompts(rng: random.Random, num: int) -> list[list[int]]:
    """Prompts of which many share a prefix."""
    stems = [[rng.randrange(50) for _ in range(rng.randint(1, 60))] for _ in range(3)]
    made = []
    for _ in range(num):
        stem = rng.choice(stems)
        head = stem[: rng.randint(0, len(stem))]
        made.append(head + [rng.randrange(50) for _ in range(rng.randint(1, 20))])
    return made


def play(toy: ToySettings, num_requests: int = 12, abort_rate: float = 0.1) -> ToyEngine:
    engine = ToyEngine(toy)
    rng = random.Random(toy.seed + 1)
    for i, prompt in enumerate(prompts(rng, num_requests)):
        engine.add(f"r{i}", prompt, rng.randint(1, 12))
        for _ in range(rng.randint(0, 3)):
            engine.step()
            for transfers in engine.transfers:
                transfers.run_some(rng)
        if rng.random() < abort_rate:
            engine.abort(f"r{rng.randint(0, i)}")
    engine.finish()
    return engine


@st.composite
def toy_groups(draw: st.DrawFn) -> tuple[KVGroup, ...]:
    kinds = draw(st.lists(st.sampled_from(["full", "window"]), min_size=1, max_size=3))
    groups = []
    for kind in kinds:
        per_block = draw(st.sampled_from([TOKENS_PER_BLOCK, 2 * TOKENS_PER_BLOCK]))
        span = draw(st.integers(1, 4))
        if kind == "full":
            groups.append(KVGroup(per_block, span))
        else:
            window = draw(st.integers(1, 40))
            groups.append(KVGroup(per_block, span, GroupKind.WINDOW, window))
    return tuple(groups)


@st.composite
def toy_settings(draw: st.DrawFn) -> ToySettings:
    groups = draw(toy_groups())
    return ToySettings(
        groups,
        TOKENS_PER_BLOCK,
        num_blocks=draw(st.integers(30 * len(groups), 60 * len(groups))),
        num_slots=draw(st.integers(1, 60)),
        num_ranks=draw(st.integers(1, 2)),
        is_replicated=draw(st.booleans()),
        tokens_per_step=draw(st.integers(5, 60)),
        failure_rate=draw(st.sampled_from([0.0, 0.0, 0.2])),
        with_local_cache=len(groups) == 1
        and groups[0].kind is GroupKind.FULL
        and groups[0].tokens_per_block == TOKENS_PER_BLOCK
        and draw(st.booleans()),
        knows_capacity=True,
        seed=draw(st.integers(0, 10**6)),
    )


@settings(max_examples=40, deadline=None)
@given(toy_settings())
def test_no_token_is_computed_from_wrong_bytes(toy: ToySettings) -> None:
    play(toy)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(toy_settings())
def test_no_token_is_computed_from_wrong_bytes_at_length(toy: ToySettings) -> None:
    play(toy, num_requests=25)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_copies_on_threads_give_the_same_bytes(num_ranks: int) -> None:
    for seed in range(4):
        groups = (KVGroup(4, 2), KVGroup(8, 1, GroupKind.WINDOW, 20))
        toy = ToySettings(
            groups,
            num_blocks=80,
            num_slots=30,
            num_ranks=num_ranks,
            knows_capacity=True,
            with_threads=True,
            seed=seed,
        )
        play(toy).close()
