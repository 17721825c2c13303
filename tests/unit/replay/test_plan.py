"""Planning: sizes in bytes and tokens, and what they bring."""

import json
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvstrata.build import build_manager
from kvstrata.core.clock import VirtualClock
from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.events import PRIMARY_MEDIUM, EventKind
from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.replay.geometry import ModelGeometry
from kvstrata.replay.plan import DISK, Planner, config_of, next_gib, sizes_of
from kvstrata.replay.simulate import replay_primary
from kvstrata.replay.synthesize import SyntheticTrace, Workload

NOTHING_NEW = ScheduleEndContext((), ())
TRACE = SyntheticTrace(Workload(num_requests=400, num_prompts=3, gap_s=20.0))
CHUNK_BYTES = 5000  # a row takes 8192, a file 12288
LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def test_the_bytes_of_a_token_follow_from_the_models_config(tmp_path: Path) -> None:
    assert ModelGeometry.parse(LLAMA).token_bytes == 32 * 2 * 8 * 128 * 2 == 131_072
    assert ModelGeometry.parse(LLAMA, "fp8").token_bytes == 65_536
    assert ModelGeometry.parse({"text_config": LLAMA}).token_bytes == 131_072
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert ModelGeometry.parse(latent).token_bytes == 61 * 576 * 2
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelGeometry.read(tmp_path) == ModelGeometry.parse(LLAMA)


@pytest.mark.parametrize("wrong", [{}, {**LLAMA, "torch_dtype": "int3"}])
def test_a_config_that_does_not_say_enough_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--model"):
        ModelGeometry.parse(wrong)


def held_when_full(config: Config) -> dict[str, int]:
    """Store chunk after chunk until every medium has evicted one; return what each held by then."""
    manager = build_manager(config, chunk_bytes=CHUNK_BYTES, namespace="test", clock=VirtualClock())
    held: Counter[str] = Counter()
    full: dict[str, int] = {}
    for number in count():
        ctx = ReqContext(str(number))
        manager.on_new_request(ctx)
        output = manager.prepare_store([OffloadKey(number.to_bytes(36, "big"))], ctx)
        assert output is not None
        manager.complete_store(output.keys_to_store, ctx)
        manager.on_request_finished(ctx)
        manager.on_schedule_end(NOTHING_NEW)
        while manager.has_pending_work():
            manager.on_schedule_end(NOTHING_NEW)
        for event in manager.take_events():
            if event.kind is EventKind.REMOVED:
                full.setdefault(event.medium, held[event.medium])
            held[event.medium] += len(event.keys)
        if len(full) == 1 + len(config.tiers):
            break
    manager.shutdown()
    return full


@pytest.mark.parametrize("disk_bytes", [0, 100_000, 12_288 * 9 + 4096])
def test_planned_capacity_is_what_a_running_manager_holds_until_it_evicts(
    disk_bytes: int, tmp_path: Path
) -> None:
    # Field report Q06.
    sizes = sizes_of(300_000, disk_bytes, CHUNK_BYTES)
    config = config_of("lru", 300_000, disk_bytes)
    for tier in config.tiers:
        settings = {**tier.settings, "root": str(tmp_path)}
        config = replace(config, tiers=(replace(tier, settings=settings),))
    full = held_when_full(config)
    assert sizes.ram_chunks == full[PRIMARY_MEDIUM] == 300_000 // 8192
    assert sizes.disk_chunks == full.get(DISK, 0)
    assert sizes.disk_chunks == {0: 0, 100_000: 7}.get(disk_bytes, 9)


def test_a_plan_tells_hits_bound_and_tokens_of_every_size() -> None:
    rams = [8192 * n for n in (20, 50, 200)]
    told: list[str] = []
    cells = list(Planner(TRACE, CHUNK_BYTES, told.append).cells(["lru", "guard"], rams, [0]))
    assert [(cell.policy, cell.ram_chunks) for cell in cells] == [
        (policy, num) for policy in ("lru", "guard") for num in (20, 50, 200)
    ]
    for cell in cells:
        assert cell.ram_tokens == 512 * cell.ram_chunks
        assert 0 < cell.hit_ratio <= cell.bound <= 1
        expected = replay_primary(TRACE, cell.policy, cell.ram_chunks)
        assert cell.hit_ratio == expected.hit_ratio
    assert len([doing for doing in told if "bound" in doing]) == 3  # once for each size
    assert len(told) == 9


def test_a_disk_adds_hits_below_the_primary() -> None:
    alone, both = Planner(TRACE, CHUNK_BYTES).cells(["lru"], [8192 * 20], [0, 12_288 * 200])
    assert alone.disk_hit_ratio == 0 < both.disk_hit_ratio
    assert both.hit_ratio == both.ram_hit_ratio + both.disk_hit_ratio > alone.hit_ratio
    assert both.hit_ratio <= both.bound
    assert both.disk_bytes_per_day > 0


def test_the_next_gib_is_the_slope_between_two_sizes() -> None:
    cells = list(Planner(TRACE, 2**26).cells(["lru"], [2**30, 3 * 2**30], [0]))
    (step,) = next_gib(cells)
    assert (step["of"], step["policy"], step["from_bytes"]) == ("ram", "lru", 2**30)
    assert step["hit_points"] == 100 * (cells[1].hit_ratio - cells[0].hit_ratio) / 2
    assert step["hit_tokens_per_s"] > 0
