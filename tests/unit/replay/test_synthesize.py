"""Synthetic traces: sessions that repeat their past, the same for the same seed."""

from itertools import pairwise
from pathlib import Path

import pytest

from kvstrata.replay.simulate import replay_primary
from kvstrata.replay.synthesize import SyntheticTrace, Workload
from kvstrata.replay.trace import open_trace

SMALL = Workload(num_requests=500, requests_per_s=5.0, gap_s=10.0, num_prompts=3, prompt_blocks=2)


def test_equal_seeds_make_equal_traces_and_others_do_not() -> None:
    first, again = (list(SyntheticTrace(SMALL).requests()) for _ in range(2))
    assert first == again
    assert len(first) == 500
    assert first != list(SyntheticTrace(Workload(num_requests=500, seed=2)).requests())


def test_requests_come_by_time_at_the_rate_that_was_asked_for() -> None:
    times = [r.at_s for r in SyntheticTrace(Workload(num_requests=9000)).requests()]
    assert all(before <= after for before, after in pairwise(times))
    assert 5000 / (times[8999] - times[3999]) == pytest.approx(10.0, rel=0.2)  # once in full swing


def test_sessions_repeat_their_past_and_share_system_prompts() -> None:
    requests = list(SyntheticTrace(SMALL).requests())
    assert len({tuple(r.keys[:2]) for r in requests}) == 3
    longest = max(requests, key=lambda r: len(r.keys))
    turns = [r.keys for r in requests if r.keys[2] == longest.keys[2]]
    assert len(turns) > 1
    assert all(more[: len(less)] == less for less, more in pairwise(turns))
    assert replay_primary(SyntheticTrace(SMALL), "min", 10_000).hit_ratio > 0.5


@pytest.mark.parametrize("name", ["trace.jsonl"])
def test_a_written_trace_reads_as_the_same_paths(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("w") as file:
        SyntheticTrace(SMALL).write(file)
    trace = open_trace(path)
    assert trace.tokens_per_chunk == 512
    for read, made in zip(trace.requests(), SyntheticTrace(SMALL).requests(), strict=True):
        assert read.keys == made.keys
        assert read.num_tokens == made.num_tokens
        assert read.at_s == pytest.approx(made.at_s, abs=0.001)
