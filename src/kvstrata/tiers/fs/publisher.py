"""Files that are written and have not appeared: threads leave them to the one that is at it."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic, TypeVar

T = TypeVar("T")


class Publisher(Generic[T]):
    """Publishes what several threads have written, as much as there is under one lock.

    To let a file appear takes the lock that all processes share. While one thread holds it, others
    leave their files and go on writing; it publishes those as well before it stops.
    """

    def __init__(self, publish_all: Callable[[list[T]], None], num_waiting_max: int) -> None:
        """Start with nothing.

        Args:
            publish_all: Publishes some; one call at a time. It should not raise; if it does, nobody
                is at it any more, and what others have left waits for the next one.
            num_waiting_max: How many may be left to another thread; who comes then waits for it.
                With 0 every thread publishes its own.
        """
        self._publish_all = publish_all
        self._num_waiting_max = num_waiting_max
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._is_busy = False

    def publish(self, written: T) -> None:
        """Publish something, or leave it to the thread that does so at the moment."""
        with self._changed:
            while self._is_busy and len(self._waiting) >= self._num_waiting_max:
                self._changed.wait()
            self._waiting.append(written)
            if self._is_busy:
                return
            self._is_busy = True
        with ExitStack() as undo:
            undo.callback(self._stop)
            while batch := self._take():
                self._publish_all(batch)
            undo.pop_all()

    def _take(self) -> list[T]:
        """Take what is there; if that is nothing, nobody is at it any more."""
        with self._changed:
            batch, self._waiting = self._waiting, []
            self._is_busy = bool(batch)
            self._changed.notify_all()
            return batch

    def _stop(self) -> None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
