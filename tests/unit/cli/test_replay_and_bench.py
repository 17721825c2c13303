"""The verbs `replay` and `bench manager`, as a user calls them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli.main import app
from kvstrata.core.errors import ConfigError

REPLAY_FIELDS = {
    "requests",
    "blocks",
    "hits",
    "hit_ratio",
    "writes_per_100",
    "accesses_per_s",
    "tiers",
}
BENCH_FIELDS = {
    "requests",
    "blocks",
    "hit_ratio",
    "blocks_per_s",
    "us_per_block",
    "p50_us",
    "p99_us",
    "bytes_per_chunk",
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 100 * i, "input_length": 1536, "hash_ids": [0, 1 + i % 5, 10 + i % 5]}
        for i in range(40)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def run(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("size", [("--num-chunks", 6), ("--share", 0.5)])
def test_replay_prints_one_json_object(trace: Path, size: tuple[str, object]) -> None:
    fields = json.loads(run("replay", trace, "--policy", "lru", *size, "--json"))
    assert fields.keys() >= REPLAY_FIELDS
    assert (fields["requests"], fields["blocks"]) == (40, 120)
    assert fields["num_chunks"] == 6
    assert fields["hit_ratio"] == fields["hits"] / fields["blocks"]


def test_replay_prints_a_table(trace: Path) -> None:
    text = run("replay", trace, "--num-chunks", 6)
    assert "hit ratio" in text
    assert "120" in text


def test_replay_needs_one_size(trace: Path) -> None:
    for sizes in ((), ("--num-chunks", 1, "--share", 0.1)):
        with pytest.raises(ConfigError, match="exactly one"):
            run("replay", trace, *sizes)


def test_bench_manager_prints_one_json_object(trace: Path) -> None:
    fields = json.loads(run("bench", "manager", "--trace", trace, "--slots", 6, "--json"))
    assert fields.keys() >= BENCH_FIELDS
    assert (fields["requests"], fields["blocks"]) == (40, 120)
    assert fields["p50_us"] <= fields["p99_us"]
    assert fields["bytes_per_chunk"] > 36  # its keys, at least


def test_bench_manager_prints_a_table(trace: Path) -> None:
    assert "us/block" in run("bench", "manager", "--trace", trace, "--passes", 1)
