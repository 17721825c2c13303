"""Replays through a primary and tiers, real and modelled."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvstrata.core.config import Config, FilterConfig
from kvstrata.core.errors import ConfigError
from kvstrata.replay.tiered import Assumptions, TieredReplay, as_modelled, replay_config
from kvstrata.replay.trace import Trace, TraceRequest
from kvstrata.testing.chunks import chain

CHUNK_BYTES = 4096


class RandomTrace(Trace):
    """Random paths at random times, the same each time it is read."""

    tokens_per_chunk = 16

    def __init__(self, seed: int, num_requests: int = 60, gap_s: float = 1.5) -> None:
        self._seed, self._num_requests, self._gap_s = seed, num_requests, gap_s

    @override
    def requests(self) -> Iterator[TraceRequest]:
        rng, at_s = random.Random(self._seed), 0.0
        for _ in range(self._num_requests):
            at_s += rng.uniform(0.5, 1.5) * self._gap_s
            keys = chain("".join(rng.choice("ABCD") for _ in range(rng.randint(1, 5))))
            yield TraceRequest(at_s, keys, 16 * len(keys), is_partial=False)


def settings(tier: dict[str, Any], policy: str = "lru", num_chunks: int = 6) -> Config:
    primary = {"num_chunks": num_chunks, "policy": policy}
    return Config.parse({"primary": primary, "tiers": [{"name": "below", **tier}]})


def counts(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out what depends on how fast this machine is, and the drive's nominal size."""
    tiers = {
        name: {k: v for k, v in tier.items() if k != "drive_writes_per_day"}
        for name, tier in found["tiers"].items()
    }
    return {**{k: found[k] for k in ("hits", "writes", "refused", "token_hit_ratio")}, **tiers}


@pytest.mark.parametrize("policy", ["lru", "arc", "guard", "hazard"])
@pytest.mark.parametrize("write", ["through", "on_reuse"])
@pytest.mark.parametrize("kind", ["memory", "fs"])
def test_modelled_and_real_tiers_agree_on_hits_evictions_and_bytes(
    kind: str, write: str, policy: str, tmp_path: Path
) -> None:
    limits: dict[str, Any] = {"max_chunks": 12}
    if kind == "fs":
        limits = {"root": str(tmp_path), "max_bytes": 4096 + 12 * 8192}
    config = settings({"type": kind, "write": write, **limits}, policy)
    trace = RandomTrace(seed=len(policy))
    real = counts(replay_config(trace, config, CHUNK_BYTES))
    instant = {"read_bytes_per_s": "1000TB", "write_bytes_per_s": "1000TB", "latency_s": 0}
    model = as_modelled(config, CHUNK_BYTES, instant)
    modelled = counts(replay_config(trace, model, CHUNK_BYTES))
    assert real == modelled
    assert real["below"]["hits"] > 0
    assert real["below"]["read_bytes"] > 0
    assert write == "on_reuse" or real["below"]["evicted"] > 0


MODELLED = {"type": "modelled", "max_chunks": 64, "latency_s": "1ms"}


def test_the_result_adds_up_and_is_json() -> None:
    found = replay_config(RandomTrace(1), settings(MODELLED), CHUNK_BYTES)
    assert json.loads(json.dumps(found)) == found
    assert sum(tier["hits"] for tier in found["tiers"].values()) == found["hits"]
    assert sum(row["requests"] for row in found["timeline"]) == found["requests"] == 60
    below = found["tiers"]["below"]
    assert below["written_bytes"] == (below["num_resident"] + below["evicted"]) * CHUNK_BYTES
    assert sum(found["tiers"]["cpu"]["eviction_ages"].values()) == found["tiers"]["cpu"]["evicted"]


def test_a_slow_tier_makes_requests_wait_and_saves_less_time() -> None:
    trace, times = RandomTrace(2), Assumptions(prefill_tokens_per_s=100.0)
    fast, slow = (
        replay_config(trace, settings(tier), CHUNK_BYTES, assumptions=times)
        for tier in (MODELLED, {**MODELLED, "latency_s": "50ms"})
    )
    assert fast["hits"] == slow["hits"]
    assert 0 < fast["ttft"]["wait_s"] < slow["ttft"]["wait_s"]
    assert slow["ttft"]["saved_s"] < fast["ttft"]["saved_s"] < fast["ttft"]["without_s"]


def test_requests_wait_side_by_side() -> None:
    busy = RandomTrace(3, gap_s=0.01)
    found = replay_config(busy, settings({**MODELLED, "latency_s": "1s"}), CHUNK_BYTES)
    assert found["requests"] == 60
    assert found["ttft"]["wait_max_s"] < 6.0  # one after the other, it would be half a minute


def test_the_bandwidth_of_a_modelled_tier_is_shared() -> None:
    narrow = {**MODELLED, "read_bytes_per_s": CHUNK_BYTES}  # a chunk a second
    found = replay_config(RandomTrace(4, gap_s=30.0), settings(narrow), CHUNK_BYTES)
    num_loaded = found["tiers"]["below"]["read_bytes"] / CHUNK_BYTES
    assert found["ttft"]["wait_s"] == pytest.approx(num_loaded, rel=0.01)


def test_object_stores_are_billed_by_the_request() -> None:
    config = settings({**MODELLED, "stands_for": "object"})
    prices = Assumptions(put_price=1.0, get_price=0.5)
    found = replay_config(RandomTrace(1), config, CHUNK_BYTES, assumptions=prices)
    below = found["tiers"]["below"]
    assert below["put_requests"] == below["written_bytes"] / CHUNK_BYTES
    assert below["request_cost"] == below["put_requests"] + below["get_requests"] / 2
    assert (
        "request_cost" not in replay_config(RandomTrace(1), settings(MODELLED), 1)["tiers"]["below"]
    )


def test_a_modelled_object_store_is_still_billed() -> None:
    config = settings({"type": "object", "url": "memory://bucket", "max_bytes": "1MiB"})
    model = as_modelled(config, CHUNK_BYTES)
    below = replay_config(RandomTrace(1), model, CHUNK_BYTES)["tiers"]["below"]
    assert below["put_requests"] > 0
    assert below["request_cost"] > 0


class OneOffs(Trace):
    """100 prompts that come once, and 5 that come again and again between them."""

    tokens_per_chunk = 16

    @override
    def requests(self) -> Iterator[TraceRequest]:
        for number in range(200):
            path = chr(1000 + number) + "x" if number % 2 else "ABCDE"[number // 2 % 5] + "y"
            yield TraceRequest(float(number), chain(path), 32, is_partial=False)


def test_one_off_prompts_write_nothing_through_the_reuse_filter() -> None:
    # Field report G13.
    tier = {"name": "below", **MODELLED}
    config = Config.parse(
        {
            "primary": {"num_chunks": 16, "policy": "lru"},
            "tiers": [tier],
            "filter": {"store_threshold": 2, "num_tracked_max": 40},
        }
    )
    replay = TieredReplay(OneOffs(), config, CHUNK_BYTES)
    stats = replay.run()
    assert stats.tiers["below"]["stored_bytes"] == 5 * 2 * CHUNK_BYTES
    assert stats["num_tracked_offers"] <= 40
    assert replay.tally.num_hits >= 5 * 2 * 17
    unfiltered = replay_config(OneOffs(), replace(config, filter=FilterConfig()), CHUNK_BYTES)
    assert unfiltered["tiers"]["below"]["written_bytes"] >= 100 * 2 * CHUNK_BYTES


def test_a_tier_without_a_bound_can_not_be_modelled() -> None:
    config = settings({"type": "fs", "root": "/nowhere", "max_bytes": "unlimited"})
    with pytest.raises(ConfigError, match="max_bytes"):
        as_modelled(config, CHUNK_BYTES)
    with pytest.raises(ConfigError, match="max_chunks"):
        replay_config(RandomTrace(1), settings({"type": "modelled"}), CHUNK_BYTES)
