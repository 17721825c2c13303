"""`kvstrata bench object` on a directory."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("obstore")

from kvstrata.cli.main import app


def run(*args: str) -> str:
    result = CliRunner().invoke(app, ["bench", "object", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_prints_four_speeds_and_leaves_nothing_behind(tmp_path: Path) -> None:
    small = ("--chunk-bytes", "64KiB", "--chunks", "4", "--rounds", "1", "--requests", "2")
    found = json.loads(run("--url", f"file://{tmp_path}", *small, "--json"))
    speeds = ("store_GBps", "load_GBps", "plain_store_GBps", "plain_load_GBps")
    assert all(found[name] > 0 for name in speeds)
    assert (found["num_chunks"], found["chunk_bytes"]) == (4, 65536)
    assert "plain obstore" in run("--url", f"file://{tmp_path}", *small)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
