"""Hit counts and quality on public traces, by the rules of their publication.

The counts are exact: any correct implementation gives them. The targets hold for the default
policy and the simple one, and for how sessions are interleaved they are taken on other
interleavings than the published one as well.
"""

from functools import cache
from pathlib import Path

import pytest

from kvstrata.replay.simulate import Order, ReplayResult, replay_primary
from kvstrata.replay.trace import Interleaving, Trace, open_trace

pytestmark = pytest.mark.slow

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
AGENTIC = Interleaving(num_sessions=160, step_s=60.0, horizon_s=14_400.0, blocks_per_chunk=8)


@cache
def open_named(name: str) -> Trace:
    if name == "agentic":
        return open_trace(TRACES / "agentic_coding_sessions.jsonl.gz", AGENTIC)
    return open_trace(TRACES / f"mooncake_{name}.jsonl.gz")


@cache
def replayed(name: str, policy: str, num_chunks: int) -> ReplayResult:
    return replay_primary(open_named(name), policy, num_chunks)


CELLS = [  # trace, chunks, fifo root-first, lru root-first, lru tail-first, full blocks only, bound
    ("conversation", 3_656, 21_844, 22_703, 22_869, 23_775, 90_665),
    ("conversation", 18_279, 71_579, 80_323, 80_466, 81_758, 105_710),
    ("synthetic", 4_392, 30_055, 31_668, 31_973, 32_921, 61_707),
    ("agentic", 1_768, 393_120, 431_588, 500_086, 500_086, 1_109_452),
]
COUNTS = [
    (name, num_chunks, policy, hits)
    for name, num_chunks, *counts in CELLS
    for policy, hits in zip(
        ("fifo", "lru-root", "lru-tail", "tree-lru-full", "min"), counts, strict=True
    )
]


@pytest.mark.parametrize(("name", "num_chunks", "policy", "hits"), COUNTS)
def test_hits_are_exactly_those_of_any_correct_cache(
    name: str, num_chunks: int, policy: str, hits: int
) -> None:
    assert replayed(name, policy, num_chunks).hits == hits


def test_lru_is_tail_first_unless_told_otherwise() -> None:
    trace = open_named("conversation")
    assert replay_primary(trace, "lru", 3_656).hits == 22_869
    assert replay_primary(trace, "lru", 3_656, order=Order.ROOT_FIRST).hits == 22_703


TARGETS = [  # policy, trace, chunks, hits at least (%), writes at most per 100 blocks
    ("auto", "conversation", 3_656, 13.5, 30.0),
    ("auto", "conversation", 18_279, 29.0, 68.0),
    ("auto", "agentic", 1_768, 42.0, 15.0),
    ("hazard-p20", "conversation", 9_140, 20.5, 35.0),
    ("guard", "conversation", 3_656, 10.5, 100.0),
    ("guard", "agentic", 1_768, 42.0, 15.0),
    ("guard", "agentic", 4_420, 70.0, 100.0),
]


@pytest.mark.parametrize(("policy", "name", "num_chunks", "hits_min", "writes_max"), TARGETS)
def test_hits_and_writes_reach_their_targets(
    policy: str, name: str, num_chunks: int, hits_min: float, writes_max: float
) -> None:
    result = replayed(name, policy, num_chunks)
    assert 100 * result.hit_ratio >= hits_min
    assert result.writes_per_100 <= writes_max


NO_REGRESSION = [
    ("conversation", 36_558),
    ("synthetic", 8_785),
    ("agentic", 8_840),
    ("agentic", 17_679),
]


@pytest.mark.parametrize("policy", ["auto", "guard"])
@pytest.mark.parametrize(("name", "num_chunks"), NO_REGRESSION)
def test_a_large_tier_loses_nothing_against_lru(policy: str, name: str, num_chunks: int) -> None:
    lru, result = replayed(name, "lru-tail", num_chunks), replayed(name, policy, num_chunks)
    assert 100 * result.hit_ratio >= 100 * lru.hit_ratio - 0.5
    assert result.writes_per_100 <= lru.writes_per_100


@pytest.mark.parametrize("step_s", [20.0, 150.0])
def test_the_default_policy_leads_on_other_interleavings_too(step_s: float) -> None:
    how = Interleaving(num_sessions=100, step_s=step_s, horizon_s=10_000.0, blocks_per_chunk=16)
    trace = open_trace(TRACES / "agentic_coding_sessions.jsonl.gz", how)
    num_chunks = round(0.02 * trace.count_distinct())
    lru, arc, auto = (replay_primary(trace, name, num_chunks) for name in ("lru", "arc", "auto"))
    assert auto.hits > arc.hits > lru.hits
    assert auto.writes < arc.writes < lru.writes
