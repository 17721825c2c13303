"""Files that are written and have not appeared: some appear together, under one lock."""

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from typing_extensions import override

from kvstrata.tiers.fs.settings import FsSettings
from kvstrata.tiers.fs.workers import Lane, Workers

T = TypeVar("T")

NUM_PUBLISHED: Final = 8
"""So many files appear at a time, while there are more to be written."""

_WAITING_SHARE: Final = 16
_AMPLE_BYTES: Final = 2**62


def num_published(settings: FsSettings, file_bytes: int) -> int:
    """Return how many files may appear at a time; in a small tier each by itself.

    What waits to appear holds room and can't be evicted, so no more than a sixteenth may wait:
    that much in each thread's hands, and once more for those that wait for others.
    """
    num_files_max = (settings.max_bytes or _AMPLE_BYTES) // file_bytes
    num_waiting_max = num_files_max // _WAITING_SHARE // (settings.num_threads + 1)
    return max(1, min(NUM_PUBLISHED, num_waiting_max))


class Publisher(Generic[T]):
    """Collects what threads have written until it is worth the lock that all processes share.

    It is also the operation that publishes the rest: one thread that finds no store to do runs it.
    """

    def __init__(
        self, publish_all: Callable[[list[T]], None], num_at_a_time: int, workers: Workers
    ) -> None:
        """Start with nothing.

        Args:
            publish_all: Publishes some. Thread: any, several at a time.
            num_at_a_time: With 1 every thread publishes its own.
            workers: Those that write; a few of their files may wait until one has nothing to do.
        """
        self._publish_all = publish_all
        self._num_at_a_time = num_at_a_time
        self._workers = workers
        self._lock = threading.Lock()
        self._waiting: list[T] = []
        self._is_queued = False  # to publish the rest

    @override
    def __str__(self) -> str:
        return "letting written files appear"

    def publish(self, written: T) -> None:
        """Publish something and what waits, or let it wait for more. Thread: one of the workers."""
        with self._lock:
            self._waiting.append(written)
            if len(self._waiting) < self._num_at_a_time:
                is_queued, self._is_queued = self._is_queued, True
                batch = []
            else:
                is_queued = True
                batch, self._waiting = self._waiting, []
        if not is_queued:  # no need to wake a thread: this one is about to have nothing to do
            self._workers.submit(Lane.PUBLISH, iter([self]), 0)
        if batch:
            self._publish_all(batch)

    def run(self, page: memoryview) -> None:
        """Publish what waits."""
        del page
        with self._lock:
            self._is_queued = False
            batch, self._waiting = self._waiting, []
        if batch:
            self._publish_all(batch)

    def fail(self) -> None:
        """Do nothing: who fails all jobs knows what was written."""
