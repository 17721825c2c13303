"""The same tokens come out with offloading on and off, whatever happens on the way."""

from collections import Counter

import pytest

from tests.integration.workloads import (
    FaultyTier,
    LateTransfers,
    UnfencedTransfers,
    assert_nothing_is_held,
    differences,
    make_offloading_engine,
    make_reference,
    random_workload,
    run_workload,
)

NUM_FAST = 12
NUM_ALL = 200
BATCH = 25


def check_workload(seed: int) -> Counter[str]:
    """Run a seed's workload with offloading: late copies, in turn failing ones and a bad tier."""
    workload = random_workload(seed)
    expected = make_reference(workload)
    transfers = LateTransfers(seed, failure_rate=(0.0, 0.15)[seed // 4 % 2])
    tier = FaultyTier(seed) if seed // 8 % 2 else None
    engine = make_offloading_engine(workload, transfers, tier)
    found = run_workload(workload, engine, expected, tier)
    assert differences(expected, found) == 0, f"seed {seed}"
    assert_nothing_is_held(engine, workload)
    engine.close()
    happened = Counter(found.counts)
    happened["waited"] = transfers.num_waited
    happened["failed"] = transfers.num_failed
    happened["aborted"] = sum(map(sum, found.was_aborted))
    happened["promoted"] = len(tier.backend.loaded) if tier else 0
    return happened


@pytest.mark.parametrize("seed", range(NUM_FAST))
def test_a_random_workload_gives_the_same_tokens(seed: int) -> None:
    check_workload(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_ALL, BATCH))
def test_many_random_workloads_give_the_same_tokens(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        total += check_workload(seed)
    for name in ("loaded", "preemptions", "waited", "failed", "aborted", "promoted"):
        assert total[name] > 0, f"no workload had any {name}"


@pytest.mark.slow
def test_without_the_fence_tokens_differ() -> None:
    """The workloads would show a missing fence: the other tests here prove something."""
    num_different = 0
    for seed in range(BATCH):
        workload = random_workload(seed)
        expected = make_reference(workload)
        engine = make_offloading_engine(workload, UnfencedTransfers(seed))
        num_different += differences(expected, run_workload(workload, engine, expected))
        engine.close()
    assert num_different > 0
