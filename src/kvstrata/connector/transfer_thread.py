"""A thread that runs copy jobs one after the other, loads before stores."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum

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


class TransferThread:
    """Runs tasks on one thread. Every task ends in exactly one result, whatever it raises.

    Thread: any, except where noted.
    """

    def __init__(self, name: str, cpus: Collection[int] | None = None) -> None:
        """Start the thread.

        Args:
            name: Of the thread.
            cpus: What it may run on; None: what its creator may. An engine that binds its own
                thread to one core would otherwise bind this one to the same.
        """
        self._cpus = cpus
        self._changed = threading.Condition()
        self._queues: tuple[deque[Task], ...] = tuple(deque() for _ in Urgency)
        self._open: set[JobId] = set()
        self._results: list[CopyResult] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task, urgency: Urgency) -> None:
        """Queue a task. Blocks: never.

        Raises:
            OffloadError: The thread was closed.
        """
        with self._changed:
            if self._is_closing:
                raise OffloadError("the transfer thread is closed")
            self._open.add(task.job.job_id)
            self._queues[urgency].append(task)
            self._changed.notify_all()

    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> Collection[JobId]:
        """Run these jobs first, and return when they are over; unknown ids are.

        Returns those that are not over after `timeout_s`, empty if all are.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            awaited = self._open.intersection(job_ids)
            if awaited:
                self._hurry(awaited)
            while awaited and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
                awaited &= self._open
            return awaited

    def _hurry(self, job_ids: Collection[JobId]) -> None:
        for queue in self._queues[Urgency.LOAD :]:
            moved = [task for task in queue if task.job.job_id in job_ids]
            if moved:
                kept = [task for task in queue if task.job.job_id not in job_ids]
                queue.clear()
                queue.extend(kept)
                self._queues[Urgency.AWAITED].extend(moved)

    def take_results(self) -> list[CopyResult]:
        """Return the results since the last call. Blocks: never."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def wait_for_results(self, timeout_s: float) -> None:
        """Return once there is a result to take or no job is open, at the latest in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or not self._open, timeout_s)

    def close(self, timeout_s: float) -> Collection[JobId]:
        """End the thread after what is queued; return the jobs that did not end in time."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            return set(self._open)

    def _run(self) -> None:
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)
        while (task := self._next()) is not None:
            try:
                failed = task.run()
            except Exception:
                logger.exception("job %d failed", task.job.job_id)
                failed = frozenset(slot for copies in task.job.copies for slot in copies.slots)
            with self._changed:
                self._open.discard(task.job.job_id)
                self._results.append(CopyResult(task.job.job_id, failed))
                self._changed.notify_all()

    def _next(self) -> Task | None:
        with self._changed:
            while True:
                for queue in self._queues:
                    if queue:
                        return queue.popleft()
                if self._is_closing:
                    return None
                self._changed.wait()
