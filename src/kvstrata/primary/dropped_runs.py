"""Runs that left the table while copies were still using their slots."""

from collections.abc import Hashable

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Run


class DroppedRuns:
    """Dropped runs, the first to go first, each with the epoch of the table when it went.

    Nearly always there are none: `runs` is empty, and nobody calls anything here.
    """

    def __init__(self) -> None:
        self.runs: list[tuple[int, Run]] = []

    def add(self, epoch: int, run: Run) -> None:
        """Add a run that is dropped now."""
        run.is_dropped = True
        self.runs.append((epoch, run))

    def add_head(self, head: Run, tail: Run) -> None:
        """Add the first part of a dropped run that was split."""
        epoch = next(epoch for epoch, run in self.runs if run is tail)
        self.runs.append((epoch, head))
        self.runs.sort(key=lambda item: item[0])

    def remove(self, run: Run) -> None:
        """Forget a run whose slots nothing uses any more."""
        self.runs = [item for item in self.runs if item[1] is not run]

    def writes_of(self, owner: Hashable) -> set[OffloadKey]:
        """Return the dropped chunks that the owner is still writing.

        It must not write them again before it has settled them: nobody could tell which of the two
        copies a completion is about.
        """
        return {key for _, run in self.runs if run.owner is owner for key in run.keys}

    def find_write(self, owner: Hashable, key: OffloadKey) -> Run | None:
        """Return the run with this key that the owner is writing."""
        return next((r for _, r in self.runs if r.owner is owner and key in r.keys), None)

    def find_held(self, key: OffloadKey, epoch: int) -> Run | None:
        """Return the first run with this key that was resident, and was dropped since an epoch."""
        runs = (run for dropped, run in self.runs if dropped >= epoch and run.owner is None)
        return next((run for run in runs if key in run.keys), None)
