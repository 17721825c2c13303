"""Several processes on one root: same keys, one cap, and restarts under other hash seeds."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.tiers.fs.root import FsRoot
from tests.disks import bytes_below, chunk_files
from tests.fs_world import FILE_BYTES, World, cap, quick_dir

REPOSITORY = Path(__file__).parents[4]
STORE = """
import sys
from pathlib import Path
from tests.fs_world import World
world = World(Path(sys.argv[1]))
tier = world.open(max_bytes=int(sys.argv[2]))
numbers = [int(number) for number in sys.argv[3:]]
for start in range(0, len(numbers), 4):
    world.store(*numbers[start:start + 4])
assert tier.get_stats().state == "ok"
world.close()
"""


def start(root: Path, max_bytes: int, *numbers: int, seed: str = "random") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STORE, str(root), str(max_bytes), *map(str, numbers)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": seed},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def root() -> Iterator[Path]:
    with quick_dir() as path:
        yield path / "kv"


def test_another_process_with_another_hash_seed_finds_everything(root: Path) -> None:
    process = start(root, cap(32), *range(8), seed="1")
    assert process.communicate()[1] == ""
    world = World(root)
    world.open()
    assert world.hits(*range(8)) == set(range(8))
    assert world.load(*range(8)) == set()
    world.close()


@pytest.mark.slow
def test_four_processes_that_store_the_same_chunks_do_not_disturb_each_other(root: Path) -> None:
    processes = [start(root, cap(64), *range(32)) for _ in range(4)]
    assert [process.communicate()[1] for process in processes] == [""] * 4
    world = World(root)
    world.open(max_bytes=cap(64))
    assert world.load(*range(32)) == set()
    assert len(chunk_files(root)) == 32
    world.tier.check()
    world.close()


@pytest.mark.slow
def test_processes_share_one_cap(root: Path) -> None:
    processes = [start(root, cap(6), *range(i * 8, i * 8 + 8)) for i in range(4)]
    above: list[int] = []
    while any(process.poll() is None for process in processes):
        with suppress(ConfigError), FsRoot(root) as seen:  # until the first one has made it
            above += [used for used in [seen.totals().disk_bytes] if used > cap(6)]
    assert [process.communicate()[1] for process in processes] == [""] * 4
    assert above == []
    assert bytes_below(root) <= cap(6)
    world = World(root)
    world.open(max_bytes=cap(6))
    world.tier.check()
    world.close()


@pytest.mark.slow
def test_ten_thousand_files_are_taken_on_without_opening_one(root: Path) -> None:
    world = World(root)
    world.open(max_bytes=cap(20_000))
    world.store(0)
    path = world.path_of(0)
    for i in range(10_000):
        fan = path.parent.parent.parent / f"{i & 15:x}" / f"{i >> 4 & 15:x}"
        fan.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (fan / f"{i:08x}.chunk").open("wb") as file:
            file.truncate(FILE_BYTES)
    world.reopen(max_bytes=cap(20_000))
    assert world.tier.get_stats()["num_resident"] == 10_001
    assert world.disk.calls["open"] == world.disk.calls["read"] == 0
    world.close()
