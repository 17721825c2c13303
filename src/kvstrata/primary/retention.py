"""When chunks must be gone."""

import heapq
from itertools import count

from kvstrata.core.policy import Run


class Expiry:
    """Runs by the wall time at which they must be gone."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Run]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, run: Run) -> None:
        """Watch a run, or a part of one that was split; without `expires_at_s` it is ignored."""
        if run.expires_at_s is not None:
            heapq.heappush(self._heap, (run.expires_at_s, next(self._serial), run))

    def take_due(self, wall_s: float) -> list[Run]:
        """Return the runs whose time has come and that are still there."""
        due = []
        while self._heap and self._heap[0][0] <= wall_s:
            at_s, _, run = heapq.heappop(self._heap)
            if run.keys and not run.is_dropped and run.expires_at_s == at_s:
                due.append(run)
        return due

    def sweep(self, num_max: int) -> None:
        """Forget runs that left early, if there are more than `num_max` entries."""
        if len(self._heap) > num_max:
            self._heap = [item for item in self._heap if item[2].keys and not item[2].is_dropped]
            heapq.heapify(self._heap)
