"""Holds the package to the house rules, and shows of each rule that it can fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.source_rules import (
    CHECKS,
    OPTIONAL,
    banned_name_violations,
    broad_except_violations,
    core_violations,
    direction_violations,
    docstring_violations,
    foreign_text,
    optional_violations,
    overridden_tests,
    size_violations,
    tier_violations,
    untested_implementations,
)

Check = Callable[[str, str], list[str]]

PROJECT = Path(__file__).parent.parent
PACKAGE = PROJECT / "src" / "kvstrata"


def sources(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_keeps_the_rule(check: Check) -> None:
    found = [line for path, source in sources(PACKAGE).items() for line in check(path, source)]
    assert not found, "\n".join([check.__doc__ or "", *found])


def test_no_subclass_of_a_suite_overrides_a_test() -> None:
    found = overridden_tests(sources(PACKAGE / "testing"), sources(PROJECT / "tests"))
    assert not found, "\n".join(found)


def test_every_implementation_runs_its_suite() -> None:
    conformance = PROJECT / "tests" / "conformance"
    if not conformance.exists():
        pytest.skip("there is no conformance test yet")
    found = untested_implementations(sources(PACKAGE), sources(conformance))
    assert not found, "\n".join(found)


BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
{statement}
"""


def run_without_optional_packages(statement: str) -> subprocess.CompletedProcess[str]:
    script = BLOCKER.format(blocked=sorted(OPTIONAL), statement=statement)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=PROJECT
    )


@pytest.mark.parametrize("module", ["kvstrata", "kvstrata.testing", "kvstrata.cli.main"])
def test_imports_with_no_optional_package_installed(module: str) -> None:
    path = PACKAGE.parent.joinpath(*module.split("."))
    if not (path / "__init__.py").exists() and not path.with_suffix(".py").exists():
        pytest.skip(f"there is no {module} yet")
    done = run_without_optional_packages(f"import {module}")
    assert done.returncode == 0, done.stderr


def test_the_blocker_blocks() -> None:
    assert "obstore is blocked" in run_without_optional_packages("import obstore").stderr


def test_no_text_names_a_path_of_this_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
        cwd=PROJECT,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.decode().split("\0"):
        path = PROJECT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            found += foreign_text(name, content.decode(errors="replace"))
    assert not found, "\n".join(found)


def function(name: str, lines: int) -> str:
    return f"class C:\n    def {name}(self):\n" + "        a = 1\n" * (lines - 1)


BAD = [
    (direction_violations, "core/keys.py", "import kvstrata.tiers.fs"),
    (direction_violations, "core/keys.py", "from kvstrata import ReqContext"),
    (
        direction_violations,
        "core/keys.py",
        "def f():\n    from kvstrata.build import build_manager",
    ),
    (direction_violations, "policies/lru.py", "from kvstrata.primary.slots import SlotTable"),
    (direction_violations, "policies/lru.py", "from kvstrata import primary"),
    (direction_violations, "tiers/fs/tier.py", "from ...tiering import promotion"),
    (direction_violations, "tiering/manager.py", "import_module('kvstrata.tiers.memory')"),
    (direction_violations, "testing/tiers.py", "from kvstrata.tiers import memory"),
    (direction_violations, "replay/trace.py", "from kvstrata.connector import scheduler"),
    (direction_violations, "engine/model.py", "from kvstrata.integrations import vllm"),
    (direction_violations, "cli/main.py", "from kvstrata.testing import FakeClock"),
    (direction_violations, "__init__.py", "from kvstrata.engine import Engine"),
    (direction_violations, "helpers.py", ""),
    (
        direction_violations,
        "primary/manager.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvstrata.tiers import fs",
    ),
    (tier_violations, "tiers/fs/tier.py", "from kvstrata.tiers.memory import MemoryTier"),
    (tier_violations, "tiers/memory.py", "from kvstrata.tiers import fs"),
    (tier_violations, "tiers/p2p/tier.py", "from ..fs import chunk_file"),
    (tier_violations, "tiers/shared.py", "from kvstrata.tiers.fs import chunk_file"),
    (optional_violations, "primary/manager.py", "import torch"),
    (optional_violations, "core/keys.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
    (optional_violations, "connector/worker.py", "from vllm.config import VllmConfig"),
    (optional_violations, "integrations/sglang.py", "import vllm"),
    (optional_violations, "tiers/fs/tier.py", "import obstore"),
    (optional_violations, "cli/main.py", "importlib.import_module('redis')"),
    (core_violations, "core/keys.py", "import xxhash"),
    (size_violations, "core/keys.py", "a = 1\n" * 401),
    (size_violations, "core/keys.py", function("run", 61)),
    (size_violations, "core/keys.py", function("__init__", 31)),
    (docstring_violations, "core/keys.py", "a = 1"),
    (docstring_violations, "core/__init__.py", ""),
    (docstring_violations, "core/keys.py", '"""Keys"""'),
    (docstring_violations, "core/keys.py", '"""Makes keys. Splits keys."""'),
    (docstring_violations, "core/keys.py", '"""Makes keys.\nSplits keys."""'),
    (broad_except_violations, "core/keys.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (broad_except_violations, "core/keys.py", "try:\n    f()\nexcept:\n    pass"),
    (
        broad_except_violations,
        "core/keys.py",
        "try:\n    f()\nexcept (E, BaseException):\n    pass",
    ),
    (broad_except_violations, "core/keys.py", "with contextlib.suppress(Exception):\n    f()"),
    (banned_name_violations, "core/keys.py", "block_size = 1"),
    (banned_name_violations, "core/keys.py", "def f(gpu_block_size): ..."),
    (banned_name_violations, "core/keys.py", "self.block_size: int = 1"),
    (banned_name_violations, "core/keys.py", "def parse_util(): ..."),
    (banned_name_violations, "core/keys.py", "from torch import utils"),
    (banned_name_violations, "core/utils.py", ""),
    (banned_name_violations, "util/keys.py", ""),
]

GOOD = [
    (direction_violations, "core/keys.py", "import numpy\nfrom kvstrata.core import errors"),
    (direction_violations, "tiering/manager.py", "from kvstrata.core.tier import Tier"),
    (direction_violations, "build.py", "from kvstrata.tiers.fs import tier"),
    (direction_violations, "cli/main.py", "import kvstrata\nfrom kvstrata import build_manager"),
    (direction_violations, "__init__.py", "from kvstrata.build import build_manager"),
    (tier_violations, "tiers/fs/tier.py", "from kvstrata.tiers.fs import chunk_file"),
    (
        tier_violations,
        "tiers/fs/tier.py",
        "import kvstrata.tiers\nfrom ..chunk_header import Header",
    ),
    (tier_violations, "build.py", "from kvstrata.tiers import fs, memory"),
    (optional_violations, "primary/region.py", "import torch"),
    (optional_violations, "integrations/vllm.py", "import torch\nimport vllm"),
    (optional_violations, "tiers/object/client.py", "import obstore"),
    (core_violations, "core/keys.py", "import os, numpy, typing_extensions"),
    (core_violations, "tiers/fs/tier.py", "import xxhash"),
    (core_violations, "core/keys.py", "if TYPE_CHECKING:\n    import _typeshed"),
    (size_violations, "core/keys.py", "a = 1\n" * 400),
    (size_violations, "core/keys.py", function("run", 60)),
    (size_violations, "core/keys.py", function("__init__", 30)),
    (docstring_violations, "core/keys.py", '"""Makes keys of 1.5 kinds.\n\nSplits keys. Too."""'),
    (docstring_violations, "core/_keys.py", "a = 1"),
    (broad_except_violations, "core/keys.py", "try:\n    f()\nexcept OSError:\n    pass"),
    (broad_except_violations, "core/keys.py", "try:\n    f()\nexcept BaseException:\n    raise"),
    (broad_except_violations, "integrations/x.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (banned_name_violations, "core/keys.py", "memory_utilization = config.block_size"),
    (banned_name_violations, "core/keys.py", "from vllm.utils import x\nf(block_size=1)"),
]


@pytest.mark.parametrize(("check", "path", "source"), BAD)
def test_a_breach_is_found(check: Check, path: str, source: str) -> None:
    assert check(path, source)


@pytest.mark.parametrize(("check", "path", "source"), GOOD)
def test_what_is_allowed_is_not_reported(check: Check, path: str, source: str) -> None:
    assert check(path, source) == []


def test_every_check_has_a_bad_example() -> None:
    assert {check for check, _, _ in BAD} == set(CHECKS)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("see /" + "work/main", True),
        ("root = '/" + "work'", True),
        ("file:///" + "work/x", True),
        ("https://" + "pypi." + "org/simple", True),
        ("files." + "pythonhosted." + "org", True),
        ("scheduler/worker.py, src/work/x, net/worker", False),
        ("https://github.com/vllm-project/vllm", False),
    ],
)
def test_foreign_text_is_told_from_ours(text: str, is_found: bool) -> None:
    assert bool(foreign_text("README.md", text)) is is_found


SUITES = {
    "tier_suite.py": "class BaseSuite:\n def test_a(self): ...\nclass TierSuite(BaseSuite): ..."
}


@pytest.mark.parametrize(
    "source",
    [
        "class TestFs(TierSuite):\n def test_a(self): ...",
        "class TestFs(testing.TierSuite):\n test_a = None",
        "class Own(TierSuite): ...\nclass TestFs(Own):\n def test_a(self): ...",
    ],
)
def test_an_overridden_conformance_test_is_found(source: str) -> None:
    assert overridden_tests(SUITES, {"conformance/test_fs.py": source})


def test_a_suite_may_be_extended() -> None:
    source = "class TestFs(TierSuite):\n def make(self): ...\n def test_b(self): ..."
    assert overridden_tests(SUITES, {"conformance/test_fs.py": source}) == []


PACKAGE_WITH_TIERS = {
    "core/tier.py": "class SecondaryTierManager(ABC):\n @abstractmethod\n def f(self): ...",
    "tiers/base.py": "class FileTier(SecondaryTierManager):\n @abstractmethod\n def f(self): ...",
    "tiers/fs/tier.py": "class FsTier(FileTier): ...",
}


def test_an_implementation_without_a_suite_is_found() -> None:
    other = {"test_memory.py": "class TestMemory(TierSuite):\n make = MemoryTier"}
    mentioned_only = {"test_fs.py": "FsTier()"}
    assert untested_implementations(PACKAGE_WITH_TIERS, other)
    assert untested_implementations(PACKAGE_WITH_TIERS, mentioned_only)


def test_an_implementation_with_a_suite_is_accepted() -> None:
    suite = {"test_fs.py": "class TestFs(TierSuite):\n def make(self): return FsTier()"}
    assert untested_implementations(PACKAGE_WITH_TIERS, suite) == []
