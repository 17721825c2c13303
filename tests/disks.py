"""Disks that do the real thing and can be told to hold, fail or miscount."""

import errno
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from typing_extensions import override

from kvstrata.tiers.fs.disk import FileStat, FoundFile, OpenFile
from kvstrata.tiers.fs.real_disk import RealDisk
from kvstrata.tiers.fs.settings import DirectMode


def refuse_direct_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file be opened for direct I/O, as on file systems that have none."""
    real_open = os.open

    def refuse(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "injected")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


def refuse_direct_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be opened for direct I/O, but not written."""
    real_pwritev = os.pwritev

    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "injected")
        return real_pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)


class HookedDisk(RealDisk):
    """Real files; `before[operation]` runs before each operation of that name, and may raise.

    `calls` counts operations. `free` replaces the free space. `short` takes bytes off what a write
    says it wrote.
    """

    def __init__(self, root: Path, direct: DirectMode = DirectMode.AUTO) -> None:
        self.before: dict[str, Callable[[], None]] = {}
        self.calls: Counter[str] = Counter()
        self.free: int | None = None
        self.short = 0
        self._gate = threading.Event()
        self._gate.set()
        super().__init__(root, direct)

    def fail_with(self, number: int, *operations: str) -> None:
        """Let operations raise OSError of this number, until they are healed."""

        def fail() -> None:
            raise OSError(number, "injected")

        self.before |= dict.fromkeys(operations, fail)

    def heal(self) -> None:
        """Let everything work again."""
        self.before.clear()

    def hold(self, *operations: str) -> None:
        """Let operations wait until `release`."""
        self._gate.clear()
        self.before |= dict.fromkeys(operations, self._wait)

    def release(self) -> None:
        """Let waiting operations go on, and new ones pass."""
        self.before.clear()
        self._gate.set()

    @contextmanager
    def held(self, *operations: str) -> Iterator[None]:
        """Hold operations inside of the context."""
        self.hold(*operations)
        try:
            yield
        finally:
            self.release()

    def _wait(self) -> None:
        assert self._gate.wait(60.0)

    def _note(self, operation: str) -> None:
        self.calls[operation] += 1
        self.before.get(operation, lambda: None)()

    @override
    def create(self, near: str) -> OpenFile:
        self._note("create")
        return super().create(near)

    @override
    def write(self, file: OpenFile, buffers: Sequence[memoryview]) -> int:
        self._note("write")
        return super().write(file, buffers) - self.short

    @override
    def set_times(self, file: OpenFile | str, used_at_s: float, expires_at_s: float) -> None:
        self._note("set_times")
        super().set_times(file, used_at_s, expires_at_s)

    @override
    def publish(self, file: OpenFile, path: str) -> bool:
        self._note("publish")
        return super().publish(file, path)

    @override
    def open(self, path: str) -> OpenFile:
        self._note("open")
        return super().open(path)

    @override
    def read(self, file: OpenFile, buffers: Sequence[memoryview]) -> int:
        self._note("read")
        return super().read(file, buffers)

    @override
    def stat(self, path: str) -> FileStat | None:
        self._note("stat")
        return super().stat(path)

    @override
    def remove(self, path: str) -> bool:
        self._note("remove")
        return super().remove(path)

    @override
    def scan(self) -> Iterator[FoundFile]:
        self._note("scan")
        return super().scan()

    @override
    def free_bytes(self) -> int:
        return super().free_bytes() if self.free is None else self.free


def chunk_files(root: Path) -> list[Path]:
    """Return the files of chunks below a root, oldest use first."""
    return sorted(root.glob("v1-*/*/*/*.chunk"), key=lambda path: path.stat().st_mtime_ns)


def bytes_below(root: Path) -> int:
    """Return the sizes of all files below a directory."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
