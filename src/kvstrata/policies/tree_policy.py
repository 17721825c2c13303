"""The common part of tree policies: which requests used what, who makes room, who is refused."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, Evictable, EvictionPolicy, RequestTrail
from kvstrata.policies.ghosts import UseCounts
from kvstrata.policies.prefix_tree import USES_MAX, PrefixTree, Run, Turn, VictimWalk


class TreePolicy(EvictionPolicy):
    """Keeps chunks in a prefix tree and asks its subclass what a run is worth.

    Runs of chunks with one history wait in one of several queues. Victims come from the front of
    the queue that is worth least now; new chunks that are worth no more are refused, and with them
    all that follow in their request.
    """

    is_tree = True

    def __init__(self, capacity: int, num_queues: int) -> None:
        super().__init__(capacity)
        self._tree = PrefixTree(num_queues)
        self._counts = UseCounts(capacity)
        self._now_s = 0.0

    @abstractmethod
    def _begin_turn(self, turn: Turn, trail: RequestTrail, keys: list[OffloadKey]) -> None:
        """Learn from the first access of a request, before its uses are counted."""

    @abstractmethod
    def _learn(self, turn: Turn, keys: list[OffloadKey], runs: list[tuple[int, int]]) -> None:
        """Learn from the first access of a request, after its uses are counted.

        Args:
            turn: The request.
            keys: Its chunks, root first.
            runs: (number of chunks, queue) of its runs, in order; together they are `keys`.
        """

    @abstractmethod
    def _queue_for(self, turn: Turn, uses: int) -> int:
        """Return the queue for chunks with so many uses, the last one by this request."""

    @abstractmethod
    def _worth(self, run: Run) -> float:
        """Return what a run that is at the front of its queue is worth now."""

    @abstractmethod
    def _refuses(self, turn: Turn, queue: int, worth: float, victim: Run) -> bool:
        """Say whether new chunks must not displace a victim that is worth so much."""

    def _turn_of(self, trail: RequestTrail) -> Turn:
        turn = trail.state
        if not isinstance(turn, Turn):
            turn = trail.state = Turn()
        return turn

    @override
    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float) -> None:
        self._now_s = now_s
        keys = list(keys)
        turn, is_first = self._turn_of(trail), not trail.keys
        if not keys:
            return
        if is_first:
            self._begin_turn(turn, trail, keys)
        seen: list[tuple[int, int]] = []
        for part, is_new in self._parts(trail, keys):
            self._use(turn, part, seen, is_new=is_new)
        if is_first:
            self._learn(turn, keys, seen)

    @staticmethod
    def _parts(
        trail: RequestTrail, keys: list[OffloadKey]
    ) -> Iterator[tuple[list[OffloadKey], bool]]:
        """Cut keys into parts that the request used before and that it did not, and note them."""
        listed = trail.keys
        num_listed = len(listed)
        if not num_listed or listed == keys[:num_listed]:
            trail.keys = keys
            if num_listed:
                yield keys[:num_listed], False
            if num_listed < len(keys):
                yield keys[num_listed:], True
        elif listed[: len(keys)] == keys:
            yield keys, False
        else:
            known = set(listed)
            for is_known, part in groupby(keys, known.__contains__):
                added = list(part)
                if not is_known:
                    trail.keys += added
                yield added, not is_known

    def _use(
        self, turn: Turn, keys: list[OffloadKey], seen: list[tuple[int, int]], *, is_new: bool
    ) -> None:
        tree, now_s = self._tree, self._now_s
        runs, missing = tree.runs_along(keys)
        for run in runs:
            if is_new and run.uses < USES_MAX:
                run.uses += 1
            queue = self._queue_for(turn, run.uses)
            tree.use(run, turn, queue, now_s)
            seen.append((len(run.keys), queue))
        if missing and is_new:
            self._counts.note(missing, USES_MAX)
            seen += [
                (end - start, self._queue_for(turn, uses))
                for start, end, uses in self._counts.runs(missing)
            ]

    @override
    def admit(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        num_free: int,
        evictable: Evictable,
        now_s: float,
    ) -> Admission:
        self._now_s = now_s
        keys, turn = list(keys), self._turn_of(trail)
        if trail.keys[-len(keys) :] != keys:
            for part, is_new in self._parts(trail, keys):
                if is_new:
                    self._counts.note(part, USES_MAX)
        walk = VictimWalk(self._tree, evictable, self._worth, set(trail.keys))
        admitted: list[tuple[list[OffloadKey], int]] = []
        num_left, is_refusal = num_free, False
        for start, end, uses in self._counts.runs(keys):
            num_wanted = end - start
            if num_wanted > num_left:
                num_found, is_refusal = self._make_room(walk, turn, uses, num_wanted - num_left)
                num_left += num_found
            if num_stored := min(num_wanted, num_left):
                admitted.append((keys[start : start + num_stored], uses))
            num_left -= num_stored
            if num_stored < num_wanted:
                break
        for run, gone in walk.finish().items():
            if run.uses > 1:
                self._counts.set(gone, run.uses)
        self._insert(trail, turn, admitted)
        return Admission(sum(len(part) for part, _ in admitted), walk.chosen, is_refusal)

    def _make_room(self, walk: VictimWalk, turn: Turn, uses: int, count: int) -> tuple[int, bool]:
        """Take victims that are worth less than a new chunk with so many uses."""
        queue, num_found = self._queue_for(turn, uses), 0
        while num_found < count:
            best = walk.best()
            if best is None:
                return num_found, False
            if self._refuses(turn, queue, *best):
                return num_found, True
            num_found += walk.take(best[1], count - num_found)
        return num_found, False

    def _insert(
        self, trail: RequestTrail, turn: Turn, admitted: list[tuple[list[OffloadKey], int]]
    ) -> None:
        """Track new chunks, each below the one before it in the request, wherever that is."""
        tree, listed = self._tree, trail.keys
        keys = [key for part, _ in admitted for key in part]
        if not keys:
            return
        place = listed.index(keys[0])
        is_one_piece = listed[place : place + len(keys)] == keys
        place_of = {} if is_one_piece else {key: i for i, key in enumerate(listed)}
        for part, uses in admitted:
            start = 0
            while start < len(part):
                end = len(part)
                if not is_one_piece:
                    place, end = place_of[part[start]], start + 1
                    while end < len(part) and place_of[part[end]] == place + end - start:
                        end += 1
                parent = tree.run_of.get(listed[place - 1]) if place else None
                queue = self._queue_for(turn, uses)
                run = tree.insert(part[start:end], parent, turn, uses, queue)
                tree.use(run, turn, queue, self._now_s)
                place += end - start
                start = end
                if place < len(listed):
                    tree.adopt(listed[place], run)

    @override
    def choose(self, count: int, evictable: Evictable) -> Sequence[OffloadKey]:
        walk = VictimWalk(self._tree, evictable, self._worth)
        while len(walk.chosen) < count and (best := walk.best()):
            walk.take(best[1], count - len(walk.chosen))
        walk.abandon()
        return walk.chosen

    @override
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        self._tree.remove(keys)

    @override
    def clear(self) -> None:
        self._tree.clear()
        self._counts.clear()

    @override
    def __len__(self) -> int:
        return len(self._tree.run_of)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._tree.run_of

    @override
    def check(self) -> None:
        self._tree.check()
