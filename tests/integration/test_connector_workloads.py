"""Random workloads on a toy engine: whatever happens, no token is computed from wrong bytes."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from kvstrata.connector import (
    GroupKind,
    KVGroup,
    SchedulerOffloadConfig,
    TensorLayout,
    make_copier,
)
from kvstrata.connector.device_copier import DeviceCopier
from kvstrata.core.memory import SlotView
from kvstrata.testing.tier_calls import pause
from tests.fake_device import FakeDevice
from tests.fs_world import quick_dir
from tests.integration.workloads import FaultyTier
from tests.toy_engine import Below, MakeCopier, ToyEngine, ToySettings

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


def play(
    toy: ToySettings,
    num_requests: int = 12,
    abort_rate: float = 0.1,
    *,
    below: Below | None = None,
    copier: MakeCopier = make_copier,
) -> ToyEngine:
    engine = ToyEngine(toy, below=below, make_copier=copier)
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


# The same over what else may be behind the primary, and in front of it.


class Files(Below):
    """A file-system tier; copies and lookups take the time they take."""

    clock = None

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    @override
    def settings(self) -> Mapping[str, Any]:
        return {"tiers": [{"type": "fs", "root": str(self.root), "max_bytes": "4MiB"}]}

    @override
    def next_step(self) -> None:
        pause()


@settings(max_examples=40, deadline=None)
@given(toy_settings(), st.integers(0, 10**6))
def test_no_token_is_computed_from_bytes_of_a_faulty_tier(toy: ToySettings, seed: int) -> None:
    play(toy, below=FaultyTier(seed)).close()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(toy_settings(), st.integers(0, 10**6))
def test_no_token_is_computed_from_bytes_of_a_faulty_tier_at_length(
    toy: ToySettings, seed: int
) -> None:
    play(toy, num_requests=25, below=FaultyTier(seed)).close()


@pytest.mark.parametrize("seed", range(8))
def test_no_token_is_computed_from_bytes_of_files(seed: int) -> None:
    groups = [(KVGroup(4, 2),), (KVGroup(8, 1), KVGroup(4, 1, GroupKind.WINDOW, 12))][seed % 2]
    toy = ToySettings(
        groups,
        num_blocks=60 * len(groups),
        num_slots=12,
        num_ranks=1 + seed // 2 % 2,
        knows_capacity=True,
        with_threads=seed // 4 == 1,
        seed=seed,
    )
    with quick_dir() as root:
        first = play(toy, 25, below=Files(root))
        num_stored = first.manager.get_stats().tiers["fs"]["stored_chunks"]
        first.close()
        second = play(toy, 25, below=Files(root))  # the same requests after a restart
        num_loaded = second.manager.get_stats().tiers["fs"]["loaded_chunks"]
        second.close()
    assert num_stored > 0
    assert num_loaded > 0


@settings(max_examples=25, deadline=None)
@given(toy_settings(), st.integers(0, 10**6), st.sampled_from([1, 400, 1 << 20]))
def test_no_token_is_computed_from_wrong_bytes_of_a_device(
    toy: ToySettings, seed: int, staging_bytes: int
) -> None:
    devices: list[FakeDevice] = []

    def make_device_copier(
        slots: SlotView,
        config: SchedulerOffloadConfig,
        rank: int,
        tensors: Sequence[Sequence[Any]],
        layouts: Sequence[TensorLayout],
    ) -> DeviceCopier:
        device = FakeDevice(random.Random(seed + rank))
        device.num_registered_max = (seed + rank) % 2  # so that not every rank can pin its rows
        devices.append(device)
        return DeviceCopier(
            slots, config, rank, tensors, layouts, device=device, staging_bytes=staging_bytes
        )

    play(toy, copier=make_device_copier).close()
    assert not any(device.registered for device in devices)
