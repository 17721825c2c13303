"""A million requests, in bounded memory."""

import resource
from pathlib import Path

import pytest

from kvstrata.replay.simulate import replay_primary
from kvstrata.replay.synthesize import SyntheticTrace, Workload

pytestmark = pytest.mark.slow

GROWTH_BYTES_MAX = 16 * 2**20  # ten million blocks of 36 bytes would take 360 MB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_million_requests_take_no_more_memory_than_the_first_few() -> None:
    workload = Workload(
        num_requests=1_000_000, requests_per_s=50.0, turns=2.0, prompt_blocks=2, turn_blocks=1.0
    )
    sizes: list[int] = []
    result = replay_primary(
        SyntheticTrace(workload), "lru", 2000, on_progress=lambda _: sizes.append(resident_bytes())
    )
    assert result.requests == 1_000_000
    assert 0 < result.hit_ratio < 1
    num_first = len(sizes) // 20  # by then the primary is full and sessions are in full swing
    assert max(sizes[num_first:]) - max(sizes[:num_first]) < GROWTH_BYTES_MAX
