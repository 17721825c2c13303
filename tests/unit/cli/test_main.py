"""The `kvstrata` command as a process sees it: what it ends with."""

import json
import os
import sys
from pathlib import Path

import pytest

from kvstrata.cli.main import main


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["replay", "trace.jsonl", "--num-chunks", "6"],
        ["replay", "trace.jsonl", "--num-chunks", "6", "--json"],
    ],
)
def test_output_that_nobody_reads_ends_the_command_quietly(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(json.dumps({"timestamp": 0, "input_length": 9, "hash_ids": [0]}))
    monkeypatch.setattr(sys, "argv", ["kvstrata", *arguments])
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as end:
            main()
        monkeypatch.undo()
    assert end.value.code == 1
    assert not capfd.readouterr().err.strip()
