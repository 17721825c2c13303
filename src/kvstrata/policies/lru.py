"""Least recently used: tails leave before heads."""

from collections.abc import Sequence

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import (
    Admission,
    EvictionPolicy,
    RequestTrail,
    Run,
    RunQueue,
    Victim,
)


class LruPolicy(EvictionPolicy):
    """One queue of runs, least recently used first; a request's first run is its youngest."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue = RunQueue()

    @override
    def access(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        runs: Sequence[Run],
        now_s: float,
    ) -> None:
        self._make_youngest(runs)

    def _make_youngest(self, runs: Sequence[Run]) -> None:
        make_youngest = self._queue.make_youngest
        for run in reversed(runs):
            make_youngest(run)

    @override
    def admit(
        self, trail: RequestTrail, keys: Sequence[OffloadKey], num_free: int, now_s: float
    ) -> Admission:
        num_missing = len(keys) - num_free
        if num_missing <= 0:
            return len(keys), (), False
        victims, num_missing = self._choose(num_missing, trail.runs)
        remove = self._queue.remove
        for run, count in victims:
            if count == len(run.keys):
                remove(run)
        return len(keys) - num_missing, victims, False

    def _choose(self, count: int, kept: Sequence[Run]) -> tuple[list[Victim], int]:
        """Name the oldest chunks that may leave; return how many of `count` are missing, too."""
        victims = []
        run = self._queue.oldest
        while run is not None and count:
            if not run.num_holds and run not in kept:
                num_chunks = min(len(run.keys), count)
                victims.append((run, num_chunks))
                count -= num_chunks
            run = run.younger
        return victims, count

    @override
    def insert(self, trail: RequestTrail, run: Run, now_s: float) -> None:
        queue, runs = self._queue, trail.runs
        if runs and runs[0] is queue.youngest:  # nobody came since the request's last access
            queue.add_older(run, than=runs[-1])
            return
        queue.add_youngest(run)
        self._make_youngest(runs)

    @override
    def split(self, head: Run, tail: Run) -> None:
        self._queue.add_younger(head, than=tail)

    @override
    def join(self, head: Run, tail: Run) -> bool:
        self._queue.remove(tail)
        return True

    @override
    def choose(self, count: int) -> Sequence[Victim]:
        return self._choose(count, ())[0]

    @override
    def remove(self, run: Run) -> None:
        self._queue.remove(run)

    @override
    def clear(self) -> None:
        self._queue = RunQueue()

    @override
    def runs(self) -> list[Run]:
        return self._queue.check()
