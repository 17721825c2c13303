"""Replays through the production manager."""

import json
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import pytest
from typing_extensions import override

from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import OffloadKey
from kvstrata.replay.bounds import offline_bound
from kvstrata.replay.simulate import Order, Partial, UnbackedSlots, replay_primary
from kvstrata.replay.trace import Trace, TraceRequest
from kvstrata.testing.chunks import chain


class PathTrace(Trace):
    """One request a second, each a path of letters; a lower-case last letter is a partial block."""

    tokens_per_chunk = 16

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    @override
    def requests(self) -> Iterator[TraceRequest]:
        for number, path in enumerate(self._paths):
            is_partial = path[-1].islower()
            num_tokens = 16 * len(path) - 9 * is_partial
            yield TraceRequest(float(number), chain(path), num_tokens, is_partial)


def random_paths(seed: int, num_requests: int = 120) -> list[str]:
    rng = random.Random(seed)
    return [
        "".join(rng.choice("ABC") for _ in range(rng.randint(1, 4))) for _ in range(num_requests)
    ]


def plain_lru_hits(paths: Sequence[str], num_chunks: int, *, tail_first: bool) -> int:
    kept: OrderedDict[OffloadKey, None] = OrderedDict()
    num_hits = 0
    for path in paths:
        keys = chain(path)
        num_hits += next((i for i, key in enumerate(keys) if key not in kept), len(keys))
        for key in reversed(keys) if tail_first else keys:
            if key in kept:
                kept.move_to_end(key)
            else:
                if len(kept) >= num_chunks:
                    kept.popitem(last=False)
                kept[key] = None
    return num_hits


@pytest.mark.parametrize("num_chunks", [4, 9, 20])
@pytest.mark.parametrize("seed", range(3))
def test_lru_has_the_hits_of_a_plain_one_in_either_order(num_chunks: int, seed: int) -> None:
    paths = random_paths(seed)
    trace = PathTrace(paths)
    tail = replay_primary(trace, "lru-tail", num_chunks)
    root = replay_primary(trace, "lru", num_chunks, order=Order.ROOT_FIRST)
    assert tail.hits == plain_lru_hits(paths, num_chunks, tail_first=True)
    assert root.hits == plain_lru_hits(paths, num_chunks, tail_first=False)


def test_the_result_adds_up_and_is_json() -> None:
    result = replay_primary(PathTrace(["AB", "ABC", "ABc"]), "lru", 8)
    assert (result.requests, result.blocks, result.hits, result.writes) == (3, 8, 4, 4)
    assert result.hit_ratio == 0.5
    assert result.writes_per_100 == 50.0
    assert result.seconds == 2.0
    assert result.token_hit_ratio == pytest.approx(4 * 16 / (16 * 8 - 9))
    fields = json.loads(json.dumps(result.as_json()))
    assert fields["tiers"] == {"cpu": {"hits": 4, "writes": 4}}
    assert fields["accesses_per_s"] > 0


def test_partial_blocks_are_stored_or_skipped_as_told() -> None:
    trace = PathTrace(["ABc", "ABc"])
    assert replay_primary(trace, "lru", 8).hits == 3
    assert replay_primary(trace, "lru", 8, partial=Partial.SKIP).hits == 2
    assert replay_primary(trace, "hazard", 8).hits == 2


@pytest.mark.parametrize("policy", ["arc", "auto", "fifo", "guard", "hazard", "lru"])
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_the_offline_bound(policy: str, seed: int) -> None:
    trace = PathTrace(random_paths(seed))
    bound = offline_bound(trace, 6)
    result = replay_primary(trace, policy, 6)
    assert 0 < result.hits <= bound.num_hits
    assert replay_primary(trace, "min", 6).hits == bound.num_hits


def best_possible_hits(paths: Sequence[str], num_chunks: int) -> int:
    """Try every set of chunks to keep after each request."""
    best: dict[frozenset[OffloadKey], int] = {frozenset(): 0}
    for path in paths:
        keys = chain(path)
        following: dict[frozenset[OffloadKey], int] = {}
        for kept, hits in best.items():
            total = hits + next((i for i, key in enumerate(keys) if key not in kept), len(keys))
            for choice in _subsets(sorted(kept | set(keys)), num_chunks):
                following[choice] = max(following.get(choice, -1), total)
        best = following
    return max(best.values())


def _subsets(keys: Sequence[OffloadKey], num_max: int) -> Iterator[frozenset[OffloadKey]]:
    for mask in range(1 << len(keys)):
        if mask.bit_count() <= num_max:
            yield frozenset(key for i, key in enumerate(keys) if mask >> i & 1)


@pytest.mark.parametrize("seed", range(12))
def test_the_offline_bound_is_what_the_best_choice_of_chunks_can_hit(seed: int) -> None:
    rng = random.Random(seed)
    paths = ["".join(rng.choice("AB") for _ in range(rng.randint(1, 2))) for _ in range(7)]
    for num_chunks in (1, 2, 3):
        bound = offline_bound(PathTrace(paths), num_chunks)
        assert bound.num_hits == best_possible_hits(paths, num_chunks)


def test_an_unknown_policy_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="hazard"):
        replay_primary(PathTrace(["A"]), "hazzard", 4)


def test_slots_without_memory_give_no_bytes() -> None:
    slots = UnbackedSlots(3)
    assert len(slots) == slots.num_slots == 3
    with pytest.raises(TypeError):
        slots[0]
    with pytest.raises(TypeError):
        slots.row(0)
