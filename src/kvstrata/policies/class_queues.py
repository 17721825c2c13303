"""Runs without children in one queue per class, and the walk that finds victims among them."""

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from math import inf
from typing import Final

from kvstrata.core.policy import Run, Victim
from kvstrata.policies.reuse_curve import EDGES_S

USES_MAX: Final = 10  # counted no further

_next_use = count(1).__next__  # never the same in two queues: a run may move from one to another
_next_number = count().__next__

Rates = Sequence[Sequence[float]]
"""What runs are worth, per class and age bin (`EDGES_S`)."""


class Standing:
    """What the policy knows of a run: `run.state` while it is tracked.

    Attributes:
        uses: Requests that used it.
        class_idx: Which queue it waits in, once it has no children.
        seq: Number of its last use, so it orders runs by recency.
        number: Orders the parts of a run that was split: the last part leaves first.
        queues: The queues that it belongs to.
    """

    __slots__ = ("class_idx", "number", "queues", "seq", "uses")

    def __init__(self, queues: "ClassQueues", uses: int, class_idx: int, seq: int) -> None:
        self.queues = queues
        self.number = _next_number()
        self.uses = uses
        self.class_idx = class_idx
        self.seq = seq


class ClassQueues:
    """A heap of runs per class, least recently used first.

    An entry is stale when its run was used since, has children, or left. A run without children has
    an entry that is not. A run gets one whenever it may have lost its last child, so the table need
    not say when it has.

    Attributes:
        heaps: By class: (number of the last use, number of the run, run).
        fronts: By class, the first run that may leave, as found last: what it is worth, its entry.
        unsure: Classes whose front may be another by now.
    """

    def __init__(self) -> None:
        """Start without runs."""
        self.heaps: defaultdict[int, list[tuple[int, int, Run]]] = defaultdict(list)
        self.fronts: dict[int, tuple[float, int, int, Run]] = {}
        self.unsure: set[int] = set()
        self.tracked: set[Run] = set()
        self._rates: Rates = ()  # what the fronts' worth was read from
        self._sure_until_s = 0.0  # when the first of them is worth something else
        self._num_entries = 0

    def add(self, run: Run, uses: int, class_idx: int) -> None:
        """Track a run without children, as the most recently used one."""
        self.tracked.add(run)
        standing = run.state = Standing(self, uses, class_idx, _next_use())
        self.push(run, standing)
        if self._num_entries > 3 * len(self.tracked) // 2 + 64:
            self._sweep()
        parent = run.parent
        if parent is not None and parent.state is not None:
            parent.state.queues.doubt(parent, parent.state.class_idx)

    def add_head(self, head: Run, tail: Run) -> None:
        """Track the first part of a run that was split, with the standing of the rest."""
        standing: Standing = tail.state
        self.tracked.add(head)
        head.used_s = tail.used_s
        head.state = Standing(self, standing.uses, standing.class_idx, standing.seq)

    def use(self, run: Run, standing: Standing, class_idx: int) -> None:
        """Make a run the most recently used one, of this class."""
        self.doubt(run, standing.class_idx)
        standing.seq, standing.class_idx = _next_use(), class_idx
        if not run.num_children:
            self.push(run, standing)
            if self._num_entries > 3 * len(self.tracked) // 2 + 64:
                self._sweep()

    def push(self, run: Run, standing: Standing) -> None:
        """Put a run into its queue, by its last use."""
        class_idx = standing.class_idx
        heap = self.heaps[class_idx]
        heapq.heappush(heap, (standing.seq, standing.number, run))
        self._num_entries += 1
        if heap[0][2] is run:
            self.unsure.add(class_idx)

    def pop(self, class_idx: int) -> None:
        """Take the first entry out of a queue."""
        heapq.heappop(self.heaps[class_idx])
        self._num_entries -= 1

    def forget(self, run: Run) -> None:
        """Track a run no longer; its parent may be without children when the caller is done."""
        self.tracked.discard(run)
        if run.state is not None:
            self.doubt(run, run.state.class_idx)
        run.state = None
        parent = run.parent
        if parent is not None and parent.state is not None:
            parent.state.queues.push(parent, parent.state)

    def doubt(self, run: Run, class_idx: int) -> None:
        """Look for another front when one is needed, if the run is the front of its class."""
        front = self.fronts.get(class_idx)
        if front is not None and front[3] is run:
            self.unsure.add(class_idx)

    def begin_walk(self, rates: Rates, now_s: float) -> None:
        """Doubt all fronts if what they are worth has changed."""
        if rates is not self._rates or now_s >= self._sure_until_s:
            self._rates, self._sure_until_s = rates, inf
            self.unsure.update(self.heaps)

    def find_fronts(
        self, aside: set[Run], kept: Collection[Run], children_of: Mapping[Run, int], now_s: float
    ) -> None:
        """Find the fronts that are unsure; one loop, as it runs for every store.

        Args:
            aside: Runs that are out of the queues for now; those that may not leave are added.
            kept: Runs that may not leave.
            children_of: Numbers of children where they differ from what runs say.
            now_s: The time.
        """
        heaps, fronts = self.heaps, self.fronts
        for class_idx in self.unsure:
            heap = heaps[class_idx]
            fronts.pop(class_idx, None)
            while heap:
                seq, number, run = heap[0]
                standing: Standing | None = run.state
                if (
                    standing is None
                    or standing.seq != seq
                    or (children_of.get(run, run.num_children) if children_of else run.num_children)
                    or (aside and run in aside)
                ):
                    self.pop(class_idx)
                elif run.num_holds or run in kept:
                    aside.add(run)
                    self.pop(class_idx)
                else:
                    age = bisect_right(EDGES_S, now_s - run.used_s)
                    fronts[class_idx] = (self._rates[class_idx][age - 1], seq, number, run)
                    if age < len(EDGES_S):
                        self._sure_until_s = min(self._sure_until_s, run.used_s + EDGES_S[age])
                    break
        self.unsure.clear()

    def _sweep(self) -> None:
        """Drop stale entries; comes after as many pushes as there are runs."""
        self._num_entries = 0
        for class_idx, heap in self.heaps.items():
            live = {
                run: (seq, number, run)
                for seq, number, run in heap
                if not run.num_children and run.state is not None and run.state.seq == seq
            }
            self.heaps[class_idx] = list(live.values())
            heapq.heapify(self.heaps[class_idx])
            self._num_entries += len(live)

    def clear(self) -> None:
        """Forget all runs."""
        for run in self.tracked:
            run.state = None
        self.tracked.clear()
        self.heaps.clear()
        self.fronts.clear()
        self.unsure.clear()
        self._num_entries = 0

    def check(self) -> None:
        """Assert every invariant."""
        assert self._num_entries == sum(map(len, self.heaps.values()))
        waiting = {(i, seq, run) for i, heap in self.heaps.items() for seq, _, run in heap}
        for run in self.tracked:
            standing: Standing = run.state
            assert standing.queues is self
            assert run.num_children or (standing.class_idx, standing.seq, run) in waiting
        for class_idx in self.heaps.keys() - self.unsure:
            live = (entry for entry in self.heaps[class_idx] if not entry[2].num_children)
            first = min((e for e in live if e[2].state and e[2].state.seq == e[0]), default=None)
            front = self.fronts.get(class_idx)
            assert (first and first[2]) is (front and front[3])


class VictimWalk:
    """Finds chunks that should leave: the least worthy first, children before parents.

    It takes entries out of the queues as it goes and changes nothing else; `end` puts back what may
    still be needed.
    """

    def __init__(
        self,
        queues: ClassQueues,
        rates: Rates,
        now_s: float,
        kept: Sequence[Run] = (),
    ) -> None:
        """Begin at the least worthy run.

        Args:
            queues: Where to look.
            rates: What runs are worth.
            now_s: The time.
            kept: Runs that stay whatever they are worth.
        """
        self._queues = queues
        self._now_s = now_s
        self._kept = kept
        self._taken: dict[Run, int] = {}  # how many chunks, from the end
        self._num_children: dict[Run, int] = {}  # left, of runs that lose children in this walk
        self._aside: set[Run] = set()  # taken out of their queues
        queues.begin_walk(rates, now_s)

    def best(self) -> tuple[float, Run] | None:
        """Return the least worthy run that may leave, and what it is worth."""
        queues, kept = self._queues, self._kept
        fronts, unsure = queues.fronts, queues.unsure
        while True:
            if unsure:
                queues.find_fronts(self._aside, kept, self._num_children, self._now_s)
            if not fronts:
                return None
            worth, _, _, run = min(fronts.values())
            if not (run.num_holds or run in kept):
                return worth, run
            unsure.add(run.state.class_idx)

    def take(self, run: Run, num_chunks: int) -> int:
        """Choose up to so many chunks from the end of the run that `best` returned."""
        taken = self._taken.get(run, 0)
        num_left = len(run.keys) - taken
        if num_left > num_chunks:
            self._taken[run] = taken + num_chunks
            return num_chunks
        self._taken[run] = taken + num_left
        self._let_go(run)
        return num_left

    def _let_go(self, run: Run) -> None:
        """Note that nothing is left of a run: its parent may be next."""
        queues, parent, class_idx = self._queues, run.parent, run.state.class_idx
        queues.pop(class_idx)
        queues.unsure.add(class_idx)
        self._aside.add(run)
        if parent is None or parent.state is None:
            return
        left = self._num_children.get(parent, parent.num_children) - 1
        self._num_children[parent] = left
        if not left and parent.state.queues is queues:
            queues.push(parent, parent.state)

    @property
    def victims(self) -> list[Victim]:
        """What was taken, in order."""
        return list(self._taken.items())

    def end(self) -> None:
        """Put back the runs that were set aside and are still tracked."""
        for run in self._aside:
            if run.state is not None:
                self._queues.push(run, run.state)
