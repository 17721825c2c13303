"""Threads that run a tier's requests: urgent lanes first, each lane within its bound."""

import heapq
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import IntEnum
from itertools import count
from typing import Final

logger = logging.getLogger("kvstrata.object")

Task = Callable[[], None]


class Lane(IntEnum):
    """What a task does; a lower number goes first."""

    LOAD = 0
    PROBE = 1
    STORE = 2
    UPKEEP = 3


_WITH_PAYLOAD: Final = (Lane.LOAD, Lane.STORE)

_NUM_CALLS_MAX: Final = 4
"""Threads that one thread wakes or starts at one time; one after the other would take long."""


class WorkerPool:
    """At most `num_threads_max` threads, started as they are needed, kept until `close`.

    A task never raises: what it lets out is logged and lost. Thread: any.
    """

    def __init__(
        self, name: str, num_threads_max: int, num_payloads_max: int, num_max: Mapping[Lane, int]
    ) -> None:
        """Start nothing yet.

        Args:
            name: Of the threads.
            num_threads_max: Tasks that run at one time.
            num_payloads_max: How many of them may be loads and stores.
            num_max: Further bounds, by lane.
        """
        self._name = name
        self._num_threads_max = num_threads_max
        self._num_payloads_max = num_payloads_max
        self._num_max = num_max
        self._waiting: dict[Lane, deque[Task]] = {lane: deque() for lane in Lane}
        self._later: list[tuple[float, int, Lane, Task]] = []  # a heap, by time
        self._order = count()
        self._held: Counter[Lane] = Counter()
        self._running: Counter[Lane] = Counter()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_closed = False
        self._wake = threading.Condition()

    def submit(self, lane: Lane, *tasks: Task, delay_s: float = 0.0) -> None:
        """Queue tasks, to begin no sooner than `delay_s` from now; after `close` they are lost."""
        with self._wake:
            if self._is_closed:
                return
            if delay_s <= 0:
                self._waiting[lane].extend(tasks)
                self._call_threads()
                return
            due_s = time.monotonic() + delay_s
            for task in tasks:
                heapq.heappush(self._later, (due_s, next(self._order), lane, task))
            self._call_thread()  # one has to wake up in time

    def _call_threads(self) -> None:
        """Let some threads look for tasks, as many as may run. Who finds one calls more."""
        num_free = {lane: self._num_free(lane) for lane in self._waiting}
        num_ready = sum(min(len(self._waiting[lane]), free) for lane, free in num_free.items())
        for _ in range(min(num_ready, _NUM_CALLS_MAX)):
            self._call_thread()

    def _call_thread(self) -> None:
        if self._num_idle:
            self._wake.notify()
        elif len(self._threads) < self._num_threads_max:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def hold(self, lane: Lane) -> None:
        """Begin no more tasks of a lane until it was released as often as it was held."""
        with self._wake:
            self._held[lane] += 1

    def release(self, lane: Lane) -> None:
        """Take back one `hold`."""
        with self._wake:
            self._held[lane] -= 1
            self._call_threads()

    def num_running(self) -> int:
        """Return how many tasks run now."""
        with self._wake:
            return self._running.total()

    def close(self, timeout_s: float) -> bool:
        """Drop what waits and let running tasks end; say whether all threads are gone.

        Nothing stops a request that runs: it ends at the latest with its own timeout.
        """
        with self._wake:
            self._is_closed = True
            for lane in Lane:
                self._waiting[lane].clear()
            self._later.clear()
            self._wake.notify_all()
            threads = list(self._threads)
        until_s = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self) -> None:
        ended: Lane | None = None
        while (found := self._next(ended)) is not None:
            ended, task = found
            try:
                task()
            except BaseException:  # the top of a worker thread; a panic of obstore is no Exception
                logger.exception("%s: a task failed in a way that nobody foresaw", self._name)
            del task, found

    def _next(self, ended: Lane | None) -> tuple[Lane, Task] | None:
        """Note that a task of a lane ended, and wait for one that may run; None: closed."""
        with self._wake:
            if ended is not None:
                self._running[ended] -= 1
            while not self._is_closed:
                pause_s = self._take_due()
                lane = self._next_lane()
                if lane is not None:
                    task = self._waiting[lane].popleft()
                    self._running[lane] += 1
                    # A thread that is woken for nothing costs more than many a task.
                    if self._next_lane() is not None:
                        self._call_threads()
                    return lane, task
                self._num_idle += 1
                self._wake.wait(pause_s)
                self._num_idle -= 1
            return None

    def _take_due(self) -> float | None:
        """Queue the tasks whose time has come; return how long it is to the next one."""
        while self._later:
            pause_s = self._later[0][0] - time.monotonic()
            if pause_s > 0:
                return pause_s
            _, _, lane, task = heapq.heappop(self._later)
            self._waiting[lane].append(task)
        return None

    def _next_lane(self) -> Lane | None:
        """Return the most urgent lane of those that have a task which may run."""
        for lane, waiting in self._waiting.items():
            if waiting and self._num_free(lane) > 0:
                return lane
        return None

    def _num_free(self, lane: Lane) -> int:
        """Return how many more tasks of a lane may run now."""
        if self._held[lane]:
            return 0
        num_free = self._num_max.get(lane, self._num_threads_max) - self._running[lane]
        if lane in _WITH_PAYLOAD:
            num_payloads = sum(self._running[each] for each in _WITH_PAYLOAD)
            num_free = min(num_free, self._num_payloads_max - num_payloads)
        return max(0, num_free)
