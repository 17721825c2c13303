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


SETTINGS = """
chunk_bytes = "64KiB"
prefill_tokens_per_s = 1000.0
[primary]
num_chunks = 4
policy = "lru"
[[tiers]]
type = "TYPE"
name = "below"
max_chunks = 16
"""


def settings_file(directory: Path, kind: str) -> Path:
    path = directory / f"{kind}.toml"
    path.write_text(SETTINGS.replace("TYPE", kind))
    return path


def test_replay_with_settings_counts_each_tier_real_or_modelled(
    trace: Path, tmp_path: Path
) -> None:
    memory, modelled = settings_file(tmp_path, "memory"), settings_file(tmp_path, "modelled")
    found = [
        json.loads(run("replay", trace, "--json", "--config", *args))
        for args in ((memory,), (memory, "--modelled"), (modelled,))
    ]
    for fields in found:
        assert fields.keys() >= REPLAY_FIELDS
        assert fields["tiers"].keys() == {"cpu", "below"}
        assert fields["tiers"]["below"]["hits"] > 0
        assert fields["ttft"]["saved_s"] > 0
        assert [t["hits"] for t in fields["tiers"].values()] == [
            t["hits"] for t in found[0]["tiers"].values()
        ]


def test_replay_writes_a_page_that_needs_nothing_else(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = run("replay", trace, "--config", settings_file(tmp_path, "modelled"), "--html", page)
    assert "below" in text
    content = page.read_text()
    assert content.count("<rect") >= 4
    assert "http" not in content.replace("http://www.w3.org", "")
    data = content.partition('id="replay">')[2].partition("</script>")[0]
    assert json.loads(data)["requests"] == 40


def test_replay_draws_a_picture(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    run("replay", trace, "--config", settings_file(tmp_path, "modelled"), "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sizes_stand_in_the_file_or_on_the_command_line(trace: Path, tmp_path: Path) -> None:
    path = settings_file(tmp_path, "modelled")
    with pytest.raises(ConfigError, match="in the file"):
        run("replay", trace, "--config", path, "--num-chunks", 3)
    with pytest.raises(ConfigError, match="need --config"):
        run("replay", trace, "--num-chunks", 3, "--html", tmp_path / "page.html")


def test_bench_manager_prints_one_json_object(trace: Path) -> None:
    fields = json.loads(run("bench", "manager", "--trace", trace, "--slots", 6, "--json"))
    assert fields.keys() >= BENCH_FIELDS
    assert (fields["requests"], fields["blocks"]) == (40, 120)
    assert fields["p50_us"] <= fields["p99_us"]
    assert fields["bytes_per_chunk"] > 36  # its keys, at least


def test_bench_manager_prints_a_table(trace: Path) -> None:
    assert "us/block" in run("bench", "manager", "--trace", trace, "--passes", 1)


def test_synthesize_writes_a_trace_that_plan_reads(tmp_path: Path) -> None:
    path, model = tmp_path / "made.jsonl.gz", tmp_path / "config.json"
    run("synthesize", path, "--requests", 200, "--tokens-per-block", 16)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    model.write_text(json.dumps({**layers, "torch_dtype": "float16"}))
    args = ("plan", path, "--model", model, "--ram", "256KiB,1MiB", "--disk", "0,2MiB")
    found = json.loads(run(*args, "--policies", "lru", "--json"))
    assert found["chunk_bytes"] == 16 * 2 * 2 * 64 * 2
    assert [cell["ram_tokens"] for cell in found["cells"]] == [16 * 32, 16 * 128] * 2
    assert {step["of"] for step in found["next_gib"]} == {"ram", "disk"}
    text = run(*args, "--policies", "lru")
    assert "bound" in text
    assert "what a GiB more brings" in text


def test_plan_needs_the_size_of_a_chunk(trace: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        run("plan", trace)
