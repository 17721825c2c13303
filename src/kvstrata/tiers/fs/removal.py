"""Removal of many files at a time, with the help of whoever has nothing more urgent to do."""

import threading
from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from kvstrata.tiers.fs.disk import Disk
from kvstrata.tiers.fs.workers import Lane, Workers

NUM_HELPERS: Final = 3
NUM_ALONE_MAX: Final = 4
"""So few files are removed by one thread."""


class Removal:
    """Files that one thread wants gone, and that others help it remove; they may come too late.

    A file system that is mounted with `discard` and has no journal tells the disk of free blocks
    while it removes a file: that waits for the disk, behind all that is being written.
    """

    def __init__(self, disk: Disk, paths: Sequence[str]) -> None:
        self.were_there: list[bool | None] = [None] * len(paths)  # None: not removed
        self.error: OSError | None = None
        self._disk = disk
        self._paths = paths
        self._changed = threading.Condition()
        self._next = 0
        self._num_at_it = 0

    @override
    def __str__(self) -> str:
        return f"removing {len(self._paths)} files"

    def finish(self, workers: Workers | None) -> None:
        """Remove all, together with threads of the tier if there are any.

        After an `error` no others are removed; `were_there` says which are gone.
        """
        if workers is not None and len(self._paths) > NUM_ALONE_MAX:
            workers.submit(Lane.CHORE, iter([self] * NUM_HELPERS), NUM_HELPERS)
        self._work()
        with self._changed:
            while self._num_at_it:
                self._changed.wait()

    def run(self, page: memoryview) -> None:
        """Help."""
        del page
        self._work()

    def fail(self) -> None:
        """Do nothing: the others go on."""

    def _work(self) -> None:
        while (number := self._take()) is not None:
            try:
                self.were_there[number] = self._disk.remove(self._paths[number])
            except OSError as error:
                with self._changed:
                    self.error, self._next = error, len(self._paths)
            finally:
                with self._changed:
                    self._num_at_it -= 1
                    self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            number = self._next
            if number >= len(self._paths):
                return None
            self._next += 1
            self._num_at_it += 1
            return number
