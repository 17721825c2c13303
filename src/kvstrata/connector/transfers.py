"""Who runs copy jobs, and in which order: a thread beside the engine, or the engine itself."""

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum

from typing_extensions import override

from kvstrata.connector.messages import CopyJob, CopyResult
from kvstrata.core.errors import OffloadError
from kvstrata.core.keys import JobId

logger = logging.getLogger("kvstrata.connector")


class Urgency(IntEnum):
    """Which queue a task is in; a lower number runs first."""

    AWAITED = 0  # a step waits for it
    LOAD = 1
    STORE = 2


@dataclass(frozen=True, slots=True)
class Task:
    """A job and the call that copies it: returns the slots that failed."""

    job: CopyJob
    run: Callable[[], frozenset[int]]


class Transfers(ABC):
    """Runs tasks. Every task ends in exactly one result, whatever it raises."""

    @abstractmethod
    def submit(self, task: Task, urgency: Urgency) -> None:
        """Take in a task.

        Args:
            task: A load or a store.
            urgency: `LOAD` or `STORE`, as the task is.

        Raises:
            OffloadError: After `close`.
        """

    @abstractmethod
    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> Collection[JobId]:
        """Run these jobs first, and return when they are over; unknown ids are.

        Returns those that are not over after `timeout_s`, empty if all are.
        """

    @abstractmethod
    def take_results(self) -> list[CopyResult]:
        """Return the results since the last call. Blocks: never."""

    @abstractmethod
    def wait_for_results(self, timeout_s: float) -> None:
        """Return once there is a result to take or no job is open, at the latest in time."""

    @abstractmethod
    def close(self, timeout_s: float) -> Collection[JobId]:
        """Run what was taken in and no more; return the jobs that did not end in time."""


def run_task(task: Task) -> CopyResult:
    """Run one task; one that raises has failed with all its slots, and is logged."""
    try:
        failed = task.run()
    except Exception:
        logger.exception("job %d failed", task.job.job_id)
        failed = frozenset(slot for copies in task.job.copies for slot in copies.slots)
    return CopyResult(task.job.job_id, failed)


class InlineTransfers(Transfers):
    """Runs each task where it is submitted, while the engine waits."""

    def __init__(self) -> None:
        self._results: list[CopyResult] = []

    @override
    def submit(self, task: Task, urgency: Urgency) -> None:
        self._results.append(run_task(task))

    @override
    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> Collection[JobId]:
        return ()

    @override
    def take_results(self) -> list[CopyResult]:
        results, self._results = self._results, []
        return results

    @override
    def wait_for_results(self, timeout_s: float) -> None:
        return

    @override
    def close(self, timeout_s: float) -> Collection[JobId]:
        return ()


Queues = tuple[deque[Task], ...]


class TransferThread(Transfers):
    """Runs tasks on a thread of its own: awaited ones first, then loads, then stores.

    With two threads one runs the loads and the other the stores: a store that waits for the step
    which fills its blocks then holds up no load.
    """

    def __init__(
        self, name: str, cpus: Collection[int] | None = None, *, num_threads: int = 1
    ) -> None:
        """Start the threads.

        Args:
            name: Of the threads.
            cpus: What they may run on; None: what their creator may. An engine that binds its own
                thread to one core would otherwise bind these to the same.
            num_threads: 1 or 2.
        """
        self._cpus = cpus
        self._changed = threading.Condition()
        # One queue for each urgency and thread; those of one thread are in order.
        self._queues: tuple[Queues, ...] = tuple(
            tuple(deque() for _ in Urgency) for _ in range(num_threads)
        )
        self._queues_of = {Urgency.LOAD: self._queues[0], Urgency.STORE: self._queues[-1]}
        self._open: set[JobId] = set()
        self._results: list[CopyResult] = []
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(queues,), name=name, daemon=True)
            for queues in self._queues
        ]
        for thread in self._threads:
            thread.start()

    @override
    def submit(self, task: Task, urgency: Urgency) -> None:
        with self._changed:
            if self._is_closing:
                raise OffloadError("the transfer thread is closed")
            self._open.add(task.job.job_id)
            self._queues_of[urgency][urgency].append(task)
            self._changed.notify_all()

    @override
    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> Collection[JobId]:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            awaited = self._open.intersection(job_ids)
            if awaited:
                self._hurry(awaited)
            while awaited and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
                awaited &= self._open
            return awaited

    def is_awaited(self, job_id: JobId) -> bool:
        """Say whether somebody waits for this job, which has not started."""
        with self._changed:
            awaited = (task for queues in self._queues for task in queues[Urgency.AWAITED])
            return any(task.job.job_id == job_id for task in awaited)

    def _hurry(self, job_ids: Collection[JobId]) -> None:
        for queues in self._queues:
            for queue in queues[Urgency.LOAD :]:
                moved = [task for task in queue if task.job.job_id in job_ids]
                if moved:
                    kept = [task for task in queue if task.job.job_id not in job_ids]
                    queue.clear()
                    queue.extend(kept)
                    queues[Urgency.AWAITED].extend(moved)

    @override
    def take_results(self) -> list[CopyResult]:
        with self._changed:
            results, self._results = self._results, []
            return results

    @override
    def wait_for_results(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._results or not self._open, timeout_s)

    @override
    def close(self, timeout_s: float) -> Collection[JobId]:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._changed:
            return set(self._open)

    def _run(self, queues: Queues) -> None:
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)
        while (task := self._next(queues)) is not None:
            result = run_task(task)
            with self._changed:
                self._open.discard(task.job.job_id)
                self._results.append(result)
                self._changed.notify_all()

    def _next(self, queues: Queues) -> Task | None:
        with self._changed:
            while True:
                for queue in queues:
                    if queue:
                        return queue.popleft()
                if self._is_closing:
                    return None
                self._changed.wait()
