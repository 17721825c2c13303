"""`kvstrata bench p2p` on a few small chunks."""

import json

import pytest
from typer.testing import CliRunner

from kvstrata.cli.main import app


def run(*args: str) -> str:
    small = ("--chunk-size", "64KiB", "--chunks", "4", "--rounds", "3", "--connections", "2")
    result = CliRunner().invoke(app, ["bench", "p2p", *small, *args])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_prints_the_speed_of_a_pull_beside_that_of_a_socket() -> None:
    found = json.loads(run("--json"))
    assert 0 < found["load_GBps"] <= found["fastest_load_GBps"]
    assert 0 < found["socket_GBps"] <= found["fastest_socket_GBps"]
    assert found["ratio"] == pytest.approx(found["load_GBps"] / found["socket_GBps"], abs=0.05)
    assert found["lookup_ms"] > 0
    assert (found["num_chunks"], found["chunk_bytes"], found["num_connections"]) == (4, 65536, 2)
    assert "of the socket" in run()
