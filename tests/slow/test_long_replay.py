"""A million requests, in bounded memory."""

import resource

import pytest

from kvstrata.replay.simulate import replay_primary
from kvstrata.replay.synthesize import SyntheticTrace, Workload

pytestmark = pytest.mark.slow


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_million_requests_take_no_more_memory_than_a_hundred_thousand() -> None:
    shape = {"requests_per_s": 50.0, "turns": 2.0, "prompt_blocks": 2, "turn_blocks": 1.5}
    few = SyntheticTrace(Workload(num_requests=100_000, **shape))  # type: ignore[arg-type]
    replay_primary(few, "lru", 2000)
    before_kib = peak_kib()
    many = SyntheticTrace(Workload(num_requests=1_000_000, **shape))  # type: ignore[arg-type]
    result = replay_primary(many, "lru", 2000)
    assert result.requests == 1_000_000
    assert 0 < result.hit_ratio < 1
    assert peak_kib() - before_kib < 16 * 1024
