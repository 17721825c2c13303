"""Tracked chunks as a tree of runs with one history each, and the walk that finds victims in it."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Final

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Evictable, RequestTrail

USES_MAX: Final = 10  # counted no further


class Turn:
    """One request, as the tree remembers it on what the request used last.

    Attributes:
        group: For the policy: with the number of uses it decides in which queue a run waits.
        refused: The first chunk that the policy did not store for the request; None if there is
            none.
        seq: Number of the latest use when the request began.
    """

    __slots__ = ("group", "refused", "seq")

    def __init__(self, seq: int) -> None:
        """Belong to the first group."""
        self.group = 0
        self.seq = seq
        self.refused: OffloadKey | None = None


class Run:
    """Chunks that follow each other and were used by the same requests.

    `seq` numbers uses, so it orders runs by their last one; -1 once the run is gone. A run without
    keys is one that lost them to `remove` while it has children.
    """

    __slots__ = ("keys", "num_children", "parent", "queue", "seq", "turn", "used_s", "uses")

    def __init__(self, keys: list[OffloadKey], parent: "Run | None", turn: Turn, uses: int) -> None:
        """Make a run without children that is in no queue yet."""
        self.keys = keys
        self.parent = parent
        self.turn = turn
        self.uses = uses
        self.num_children = 0
        self.queue = 0
        self.seq = 0
        self.used_s = 0.0


class PrefixTree:
    """Runs of chunks, children below parents; the runs without children wait in queues.

    The work of a use goes with the number of runs on its path, not of chunks. Each queue is a heap,
    least recently used first; an entry is stale when its run was used since, got children or left.
    """

    def __init__(self, num_queues: int) -> None:
        """Start without chunks."""
        self.run_of: dict[OffloadKey, Run] = {}
        self.heaps: list[list[tuple[int, int, Run]]] = [[] for _ in range(num_queues)]
        self._num_runs = 0
        self._num_entries = 0
        self.seq = 0  # of the latest use
        self._next_entry = count().__next__

    def runs_along(self, keys: list[OffloadKey]) -> tuple[list[Run], list[OffloadKey]]:
        """Return the runs that these keys make up, and the keys that are not tracked.

        Runs that the keys share only in part are split first.
        """
        run_of = self.run_of
        runs: list[Run] = []
        missing: list[OffloadKey] = []
        start, end = 0, len(keys)
        while start < end:
            run = run_of.get(keys[start])
            if run is None:
                found = next(filter(run_of.__contains__, keys[start + 1 :]), None)
                until = end if found is None else keys.index(found, start + 1)
                missing += keys[start:until]
                start = until
                continue
            if run.keys[0] != keys[start]:
                self._split(run, run.keys.index(keys[start]))
            length = len(run.keys)
            if keys[start : start + length] != run.keys:
                length = common_length(keys[start : start + length], run.keys)
                run = self._split(run, length)
            runs.append(run)
            start += length
        return runs, missing

    def _split(self, run: Run, length: int) -> Run:
        """Cut a run; the new one, which is returned, has the first `length` chunks."""
        upper = Run(run.keys[:length], run.parent, run.turn, run.uses)
        upper.queue, upper.seq, upper.used_s = run.queue, run.seq, run.used_s
        upper.num_children = 1
        run.keys = run.keys[length:]
        run.parent = upper
        self.run_of.update(dict.fromkeys(upper.keys, upper))
        self._num_runs += 1
        return upper

    def use(self, run: Run, turn: Turn, queue: int, now_s: float) -> None:
        """Make a run the most recently used one, in this queue."""
        run.turn, run.queue, run.used_s = turn, queue, now_s
        self.seq += 1
        run.seq = self.seq
        if not run.num_children:
            self.push(run)
        self.sweep_if_due()

    def push(self, run: Run) -> None:
        """Put a run into its queue, by its last use."""
        heapq.heappush(self.heaps[run.queue], (run.seq, self._next_entry(), run))
        self._num_entries += 1

    def pop(self, queue: int) -> None:
        """Take the first entry out of a queue."""
        heapq.heappop(self.heaps[queue])
        self._num_entries -= 1

    def sweep_if_due(self) -> None:
        """Drop stale entries once there are as many as runs, so a constant number a push."""
        if self._num_entries <= 2 * self._num_runs + 64:
            return
        self._num_entries = 0
        for queue, heap in enumerate(self.heaps):
            live = {
                run: entry
                for entry in heap
                if not (run := entry[2]).num_children and run.seq == entry[0]
            }
            self.heaps[queue] = list(live.values())
            heapq.heapify(self.heaps[queue])
            self._num_entries += len(live)

    def insert(self, keys: list[OffloadKey], parent: "Run | None", turn: Turn, uses: int) -> Run:
        """Track new chunks below a run, as part of it where they share its history. Then use it."""
        if parent and parent.turn is turn and parent.uses == uses and not parent.num_children:
            run = parent
            run.keys += keys
        else:
            run = Run(keys, parent, turn, uses)
            self._num_runs += 1
            if parent:
                parent.num_children += 1
        self.run_of.update(dict.fromkeys(keys, run))
        return run

    def adopt(self, key: OffloadKey, parent: Run) -> None:
        """Put the run that begins with this key below another one, which follows it no longer."""
        run = self.run_of.get(key)
        if run is None or run is parent or run.keys[0] != key or run.parent is parent:
            return
        above: Run | None = parent
        while above:
            if above is run:
                return
            above = above.parent
        parent.num_children += 1
        self._leave_parent(run)
        run.parent = parent

    def _leave_parent(self, run: Run) -> None:
        parent, run.parent = run.parent, None
        if parent is None:
            return
        parent.num_children -= 1
        if not parent.num_children:
            if parent.keys:
                self.push(parent)
            else:
                self._detach(parent)

    def _detach(self, run: Run) -> None:
        """Take out a run that has neither keys nor children."""
        run.seq = -1
        self._num_runs -= 1
        self._leave_parent(run)

    def cut(self, run: Run, num_keys: int) -> None:
        """Forget the last chunks of a run without children."""
        for key in run.keys[-num_keys:]:
            del self.run_of[key]
        del run.keys[-num_keys:]
        if not run.keys:
            self._detach(run)

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks wherever they are; what was below them stays below what was above."""
        lost: dict[Run, set[OffloadKey]] = {}
        for key in keys:
            run = self.run_of.pop(key, None)
            if run is not None:
                lost.setdefault(run, set()).add(key)
        for run, gone in lost.items():
            run.keys = [key for key in run.keys if key not in gone]
            if not run.keys and not run.num_children:
                self._detach(run)

    def clear(self) -> None:
        """Forget all chunks."""
        self.run_of.clear()
        self.heaps = [[] for _ in self.heaps]
        self._num_runs = self._num_entries = 0

    def check(self) -> None:
        """Assert every invariant."""
        runs = set(self.run_of.values())
        for run in list(runs):
            above = run.parent
            while above:
                runs.add(above)
                above = above.parent
        assert len(runs) == self._num_runs
        assert self._num_entries == sum(map(len, self.heaps)) <= 2 * self._num_runs + 64
        children = dict.fromkeys(runs, 0)
        for run in runs:
            if run.parent:
                children[run.parent] += 1
        waiting = {
            (queue, entry[0], entry[2]) for queue, heap in enumerate(self.heaps) for entry in heap
        }
        for run in runs:
            assert run.num_children == children[run]
            assert all(self.run_of[key] is run for key in run.keys)
            assert run.keys or run.num_children
            assert run.num_children or (run.queue, run.seq, run) in waiting
        assert sum(len(run.keys) for run in runs) == len(self.run_of)


class VictimWalk:
    """Finds chunks that should leave: the worst first, children before parents, as far as they may.

    It takes entries out of the tree's queues as it goes and changes nothing else; `finish` or
    `abandon` ends it.
    """

    def __init__(
        self,
        tree: PrefixTree,
        evictable: Evictable,
        rank: Callable[[Run], float],
        trail: RequestTrail | None = None,
    ) -> None:
        """Begin at the worst run.

        Args:
            tree: Where to look.
            evictable: Which chunks may leave.
            rank: The worth of a run that is at the front of its queue.
            trail: The request that needs room, whose own chunks stay.
        """
        self._tree = tree
        self._evictable = evictable
        self._rank = rank
        self._trail = trail
        self._spared: set[OffloadKey] = set()
        self._taken: dict[Run, int] = {}  # how many keys, from the end
        self._children_left: dict[Run, int] = {}  # of runs that lose children in this walk
        self._aside: set[Run] = set()  # taken out of their queues
        self._fronts: dict[int, tuple[float, int, Run]] = {}
        self._unseen = {queue for queue, heap in enumerate(tree.heaps) if heap}
        self.chosen: list[OffloadKey] = []

    def best(self) -> tuple[float, Run] | None:
        """Return the worst run of which something may be taken, and its rank."""
        while True:
            for queue in self._unseen:
                self._find_front(queue)
            self._unseen.clear()
            if not self._fronts:
                return None
            rank, _, run = min(self._fronts.values())
            if len(run.keys) > self._taken.get(run, 0):
                return rank, run
            self._set_aside(run)
            self._let_go(run)

    def _find_front(self, queue: int) -> None:
        heap = self._tree.heaps[queue]
        self._fronts.pop(queue, None)
        while heap:
            seq, _, run = heap[0]
            is_leaf = not self._children_left.get(run, run.num_children)
            if is_leaf and run.seq == seq and run not in self._aside:
                if not self._is_spared(run):
                    self._fronts[queue] = (self._rank(run), seq, run)
                    return
                self._aside.add(run)
            self._tree.pop(queue)

    def _is_spared(self, run: Run) -> bool:
        trail = self._trail
        if trail is None or not isinstance(trail.state, Turn) or run.seq <= trail.state.seq:
            return False
        if run.turn is trail.state:
            return True
        if not self._spared:
            self._spared = set(trail.keys)
        return bool(run.keys) and run.keys[-1] in self._spared

    def _set_aside(self, run: Run) -> None:
        self._tree.pop(run.queue)
        self._aside.add(run)
        self._unseen.add(run.queue)

    def _let_go(self, run: Run) -> None:
        """Note that nothing is left of a run: its parent may be next."""
        parent = run.parent
        if parent is None:
            return
        left = self._children_left.get(parent, parent.num_children) - 1
        self._children_left[parent] = left
        if not left:
            self._tree.push(parent)
            self._unseen.add(parent.queue)

    def take(self, run: Run, num_keys: int) -> int:
        """Choose up to so many chunks from the end of the run that `best` returned."""
        keys, taken = run.keys, self._taken.get(run, 0)
        end = len(keys) - taken
        batch = keys[max(0, end - num_keys) : end]
        batch.reverse()
        allowed = self._evictable(batch)
        num_taken = len(batch) if len(allowed) == len(batch) else common_length(batch, allowed)
        self.chosen += batch[:num_taken]
        self._taken[run] = taken + num_taken
        if num_taken < len(batch):
            self._set_aside(run)
        return num_taken

    def finish(self) -> dict[Run, list[OffloadKey]]:
        """Let the chosen chunks go; return them by run."""
        tree = self._tree
        gone = {run: run.keys[-num_keys:] for run, num_keys in self._taken.items() if num_keys}
        for run, keys in gone.items():
            tree.cut(run, len(keys))
        self.abandon()
        return gone

    def abandon(self) -> None:
        """Put everything back."""
        for run in self._aside:
            if run.seq >= 0 and not run.num_children:
                self._tree.push(run)
        self._tree.sweep_if_due()


def common_length(left: Sequence[OffloadKey], right: Sequence[OffloadKey]) -> int:
    """Return how many leading keys are equal."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
