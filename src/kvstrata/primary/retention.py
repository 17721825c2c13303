"""When chunks must be gone."""

import heapq
from itertools import count

from kvstrata.core.policy import Run


class Expiry:
    """Runs by the wall time at which they must be gone; `watched` is a heap of them."""

    def __init__(self) -> None:
        self.watched: list[tuple[float, int, Run]] = []
        self._serial = count()

    def add(self, run: Run) -> None:
        """Watch a run, or a part of one that was split; without `expires_at_s` it is ignored."""
        if run.expires_at_s is not None:
            heapq.heappush(self.watched, (run.expires_at_s, next(self._serial), run))

    def take_due(self, wall_s: float) -> list[Run]:
        """Return the runs whose time has come and that are still there."""
        due = []
        while self.watched and self.watched[0][0] <= wall_s:
            at_s, _, run = heapq.heappop(self.watched)
            if run.keys and not run.is_dropped and run.expires_at_s == at_s:
                due.append(run)
        return due

    def sweep(self, num_max: int) -> None:
        """Forget runs that left early, if there are more than `num_max` entries."""
        if len(self.watched) > num_max:
            self.watched = [
                item for item in self.watched if item[2].keys and not item[2].is_dropped
            ]
            heapq.heapify(self.watched)
