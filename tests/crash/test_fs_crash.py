"""A process that uses an fs tier is killed at every step of a store, and at random instants."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.core.keys import JobId
from kvstrata.core.results import StoreJob
from kvstrata.testing.tier_calls import wait_for
from tests.crash.fs_child import BATCH_CAP_CHUNKS, CAP_CHUNKS
from tests.disks import bytes_below, chunk_files
from tests.fs_world import World, cap, quick_dir

REPOSITORY = Path(__file__).parents[2]


class Forker:
    """The process that makes children to kill."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.fs_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def start(self, kind: str, root: Path, number: int) -> int:
        """Start a child; return its process id."""
        assert self._process.stdin
        self._process.stdin.write(f"{kind} {root} {number}\n")
        self._process.stdin.flush()
        return int(self._read())

    def wait(self) -> int:
        """Wait for the child to end; return its exit code."""
        return int(self._read())

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture
def root() -> Iterator[Path]:
    with quick_dir() as path:
        yield path / "kv"


def assert_whole(root: Path, cap_chunks: int = CAP_CHUNKS) -> set[int]:
    """Reopen; assert that whatever is there is whole and right, and return it."""
    world = World(root)
    tier = world.open(max_bytes=cap(cap_chunks))
    tier.check()
    assert tier.get_stats()["used_bytes"] == bytes_below(root) <= cap(cap_chunks)
    found = world.hits(*range(32))
    assert len(found) == len(chunk_files(root)) <= cap_chunks
    assert world.load(*found) == set()
    assert tier.get_stats()["corrupt_chunks"] == 0
    world.close()
    return found


def fill(root: Path) -> None:
    world = World(root)
    world.open(max_bytes=cap(CAP_CHUNKS))
    world.store(*range(CAP_CHUNKS))
    world.close()


@pytest.mark.parametrize("start", range(0, 24, 2))
def test_death_at_any_step_leaves_each_chunk_whole_or_absent(
    forker: Forker, root: Path, start: int
) -> None:
    fill(root)
    for number in range(start, 10_000, 24):
        for half in (number, number + 1):
            forker.start("step", root, half)
            if forker.wait() == 0:
                assert {20, 21} <= assert_whole(root)
                return
            assert_whole(root)
            fill(root)
    raise AssertionError("the store never got through")


def test_death_while_chunks_appear_together_leaves_each_whole_or_absent(
    forker: Forker, root: Path
) -> None:
    fill(root)
    found: set[frozenset[int]] = set()
    for number in range(10_000):
        forker.start("batch", root, number)
        is_through = forker.wait() == 0
        there = assert_whole(root, BATCH_CAP_CHUNKS) & {20, 21}
        found.add(frozenset(there))
        if is_through:
            assert there == {20, 21}
            break
        if there:
            shutil.rmtree(root)
            fill(root)
    assert found == {frozenset(), frozenset({20}), frozenset({20, 21})}


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_death_at_random_instants_leaves_whole_chunks_and_right_accounts(
    forker: Forker, root: Path, batch: int
) -> None:
    rng = random.Random(batch)
    for number in range(20):
        pid = forker.start("loop", root, number)
        threading.Event().wait(rng.uniform(0.0, 0.15))
        os.kill(pid, signal.SIGKILL)
        assert forker.wait() == -signal.SIGKILL
        assert_whole(root)


def test_a_dead_writers_temporaries_go_and_a_live_ones_stay(root: Path) -> None:
    live = World(root)
    live.open()
    live.disk.uses_unnamed = False
    directory = root / ".kvstrata" / "tmp"
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "200-1").write_bytes(bytes(1000))
    (directory / "notes").write_text("mine")
    with live.disk.held("write"):
        live.tier.submit_store(StoreJob(JobId(100), [live.keys[0]], [0]))
        while not live.disk.calls["write"]:
            threading.Event().wait(0.001)
        other = World(root)
        other.open()
        names = sorted(path.name for path in directory.iterdir())
        assert len(names) == 2
        assert "200-1" not in names
        assert "notes" in names
        other.close()
    assert not wait_for(live.tier, 100)[100].failed
    assert live.load(0) == set()
    assert [path.name for path in directory.iterdir()] == ["notes"]
    live.tier.check()  # the other one's recount kept what was reserved
    live.close()
