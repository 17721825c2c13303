"""Threads that run operations, the urgent ones first, and know how long each has been running."""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Protocol

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.tiers.fs.chunk_file import new_page

logger = logging.getLogger("kvstrata.fs")


class Lane(IntEnum):
    """Kinds of operations; lower ones are taken first."""

    LOAD = 0
    CHORE = 1  # probes and removals
    STORE = 2
    PUBLISH = 3  # what stores have left to be done
    IDLE = 4  # what can wait


class Operation(Protocol):
    """Something to do that may block."""

    def run(self, page: memoryview) -> None:
        """Do it; `page` is 4096 aligned bytes to work with."""
        ...

    def fail(self) -> None:
        """Note that it won't be done, or that it raised. Thread: any."""
        ...

    @override
    def __str__(self) -> str:
        """Return a few words for the log, however many chunks it is about."""
        ...


@dataclass(slots=True)
class _Running:
    operation: Operation
    started_s: float
    lane: Lane


class Workers:
    """A fixed number of threads over five lanes of operations.

    A lane holds iterators, so that submitting thousands of operations costs one call. There is one
    thread more than may store at a time: a load never waits for stores, not even if they all do.
    """

    def __init__(self, num_storing_max: int, name: str, clock: Clock) -> None:
        self._clock = clock
        self._num_stores_max = num_storing_max
        self._lanes: dict[Lane, deque[Iterator[Operation]]] = {lane: deque() for lane in Lane}
        self._running: dict[int, _Running] = {}  # by thread
        self._num_stores = 0
        self._condition = threading.Condition()
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"kvstrata-{name}-{i}", daemon=True)
            for i in range(num_storing_max + 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: Lane, operations: Iterator[Operation], num_operations: int = 1) -> None:
        """Queue operations behind those of their lane; about so many are to come."""
        with self._condition:
            self._lanes[lane].append(operations)
            self._condition.notify(num_operations)

    def submit_next(self, lane: Lane, operations: Iterator[Operation], num_operations: int) -> None:
        """Queue operations before those of their lane."""
        with self._condition:
            self._lanes[lane].appendleft(operations)
            self._condition.notify(num_operations)

    def take_queued(self, lane: Lane) -> Iterator[Operation]:
        """Take all operations of a lane that have not started."""
        with self._condition:
            taken, self._lanes[lane] = self._lanes[lane], deque()
        return chain.from_iterable(taken)

    def overdue(self, deadline_s: float) -> list[Operation]:
        """Return the operations that have been running for so long, except idle ones.

        Takes no lock: it is called at each step.
        """
        now_s = self._clock.now_s()
        return [
            each.operation
            for each in list(self._running.values())
            if now_s - each.started_s >= deadline_s and each.lane is not Lane.IDLE
        ]

    def is_idle(self) -> bool:
        """Say whether nothing runs and nothing is queued."""
        with self._condition:
            return not self._running and not any(self._lanes.values())

    def close(self, timeout_s: float) -> bool:
        """End the threads once their operation is done; False if one is still running then."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        ends_s = time.monotonic() + timeout_s  # threads take real time, whatever the clock says
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        page = new_page()
        while (operation := self._take(number)) is not None:
            try:
                operation.run(page)
            except Exception:
                logger.exception("%s failed in a way that nobody expected", operation)
                operation.fail()

    def _take(self, number: int) -> Operation | None:
        """Note that a thread has done its operation, if it had one, and wait for the next."""
        with self._condition:
            done = self._running.pop(number, None)
            has_stored = done is not None and done.lane >= Lane.STORE
            self._num_stores -= has_stored
            while True:
                for lane, queue in self._lanes.items():
                    operation = self._next_of(lane) if queue else None
                    if operation is None:
                        continue
                    self._running[number] = _Running(operation, self._clock.now_s(), lane)
                    if has_stored and lane < Lane.STORE:
                        self._condition.notify()  # a store may have waited, and this takes none
                    return operation
                if self._is_closing:
                    return None
                has_stored = False
                self._condition.wait()

    def _next_of(self, lane: Lane) -> Operation | None:
        is_store = lane >= Lane.STORE
        if is_store and self._num_stores >= self._num_stores_max:
            return None
        queue = self._lanes[lane]
        while queue:
            operation = next(queue[0], None)
            if operation is not None:
                self._num_stores += is_store
                return operation
            queue.popleft()
        return None
