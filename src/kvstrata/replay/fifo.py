"""First in, first out: a policy to compare with in replays."""

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


class FifoPolicy(EvictionPolicy):
    """One queue of runs in the order in which they were stored; uses change nothing."""

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
        pass

    @override
    def admit(
        self, trail: RequestTrail, keys: Sequence[OffloadKey], num_free: int, now_s: float
    ) -> Admission:
        victims = self._choose(len(keys) - num_free, trail.runs)
        for run, count in victims:
            if count == len(run.keys):
                self._queue.remove(run)
        return Admission(min(len(keys), num_free + sum(count for _, count in victims)), victims)

    def _choose(self, count: int, kept: Sequence[Run]) -> list[Victim]:
        victims: list[Victim] = []
        run = self._queue.oldest
        while run is not None and count > 0:
            if not run.num_holds and run.owner is None and run not in kept:
                num_taken = min(count, len(run.keys))
                victims.append((run, num_taken))
                count -= num_taken
            run = run.younger
        return victims

    @override
    def insert(self, trail: RequestTrail, run: Run, now_s: float) -> None:
        self._queue.add_youngest(run)

    @override
    def split(self, head: Run, tail: Run) -> None:
        self._queue.add_younger(head, than=tail)

    @override
    def choose(self, count: int) -> Sequence[Victim]:
        return self._choose(count, ())

    @override
    def remove(self, run: Run) -> None:
        self._queue.remove(run)

    @override
    def clear(self) -> None:
        self._queue = RunQueue()

    @override
    def runs(self) -> list[Run]:
        return self._queue.check()
