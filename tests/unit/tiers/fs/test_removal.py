"""Many files are removed by several threads, and what happened is known of each."""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.core.clock import SystemClock
from kvstrata.testing.tier_calls import pause
from kvstrata.tiers.fs.removal import NUM_ALONE_MAX, NUM_HELPERS, Removal
from kvstrata.tiers.fs.workers import Workers
from tests.disks import HookedDisk

NAMES = [f"{i}" for i in range(20)]


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(NUM_HELPERS, "test", SystemClock())
    yield workers
    assert workers.close(60.0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[HookedDisk]:
    disk = HookedDisk(tmp_path)
    for name in NAMES:
        (tmp_path / name).write_bytes(b"x")
    yield disk
    disk.close()


def left(disk: HookedDisk) -> set[str]:
    """Return which of the files are there."""
    return {path.name for path in disk.root.iterdir() if path.is_file()}


def test_threads_of_the_tier_help_and_all_is_gone_when_it_is_finished(
    disk: HookedDisk, workers: Workers
) -> None:
    meeting = threading.Barrier(1 + NUM_HELPERS, timeout=60.0)
    first = threading.local()
    mine = threading.current_thread()

    def meet() -> None:
        if not hasattr(first, "has_met"):
            first.has_met = True
            meeting.wait()  # nobody gets past it before all are here
            while threading.current_thread() is not mine and disk.calls["remove"] <= len(NAMES):
                pause()  # who helps ends last

    disk.before["remove"] = meet
    removal = Removal(disk, [*NAMES, "not there"])
    removal.finish(workers)
    assert removal.were_there == [True] * len(NAMES) + [False]
    assert left(disk) == set()


@pytest.mark.parametrize("names", [NAMES, NAMES[:NUM_ALONE_MAX]])
def test_one_thread_does_it_where_nobody_helps(
    disk: HookedDisk, workers: Workers, names: list[str]
) -> None:
    removal = Removal(disk, names)
    removal.finish(None if names is NAMES else workers)
    assert removal.were_there == [True] * len(names)
    assert left(disk) == set(NAMES) - set(names)
    assert workers.is_idle()


def test_after_an_error_no_more_are_removed_and_it_says_which_are(
    disk: HookedDisk, workers: Workers
) -> None:
    def fail() -> None:
        if disk.calls["remove"] >= 7:
            raise OSError(errno.EIO, "injected")

    disk.before["remove"] = fail
    removal = Removal(disk, NAMES)
    removal.finish(workers)
    assert removal.error is not None
    gone = {name for name, there in zip(NAMES, removal.were_there, strict=True) if there}
    assert left(disk) == set(NAMES) - gone
    assert 0 < len(gone) < 7
    assert removal.were_there.count(None) == len(NAMES) - len(gone)
    assert disk.calls["remove"] <= 7 + NUM_HELPERS


def test_who_helps_too_late_finds_nothing_to_do(disk: HookedDisk) -> None:
    removal = Removal(disk, NAMES)
    removal.finish(None)
    removal.run(memoryview(b""))
    assert disk.calls["remove"] == len(NAMES)
