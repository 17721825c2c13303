"""Keep what is most likely to be used again soon, as learned from the rhythm of sessions."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, Evictable, EvictionPolicy, RequestTrail
from kvstrata.core.request import SessionHint
from kvstrata.policies.prefix_tree import USES_MAX, PrefixTree, Run, Turn, VictimWalk
from kvstrata.policies.reuse_curve import EDGES_S, ReuseCurves
from kvstrata.policies.use_counts import UseCounts

_GAPS_S: Final = (8.0, 16.0, 32.0, 64.0, 128.0)
# Groups: 0 for a session's first turn, then one for each gap between turns, then the hints'.
_CONTINUES, _OVER = len(_GAPS_S) + 2, len(_GAPS_S) + 3
_NUM_GROUPS: Final = len(_GAPS_S) + 4
_KIND_OF_USES: Final = (0, 0, *(1,) * (USES_MAX - 2), 2)  # once, a few times, often
_NUM_KINDS: Final = 3


class HazardPolicy(EvictionPolicy):
    """A chunk is worth the most uses per second that holding it longer can bring.

    Chunks are classed by the time between the two last turns of the session that used them last,
    and by how many requests used them; per class a curve of the times to the next use is learned.
    The least worthy chunk without children leaves. A new one that is worth no more is refused, and
    with it all that follow in its request.

    The turn before is found by content alone: it ended with the deepest chunk that is also the last
    one of an earlier request. A hint that the session continues, or is over, is a group of its own.
    """

    is_tree = True
    uses_chance_min = 0.0
    """Refuse chunks whose chance of use within the victim's idle time is less."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._tree = PrefixTree(_NUM_GROUPS * _NUM_KINDS)
        self._counts = UseCounts(capacity, USES_MAX)
        self._curves = ReuseCurves(_NUM_GROUPS, _NUM_KINDS)
        self._value = self._curves.value()
        self._now_s = 0.0

    @override
    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float) -> None:
        self._now_s = now_s
        keys = list(keys)
        if not keys:
            return
        if isinstance(trail.state, Turn):
            for part, is_new in _parts(trail, keys):
                self._use(trail.state, part, is_new=is_new)
            return
        turn = trail.state = self._begin_turn(trail, keys)
        trail.keys = keys
        self._sample(keys, self._use(turn, keys, is_new=True))

    def _begin_turn(self, trail: RequestTrail, keys: list[OffloadKey]) -> Turn:
        curves, now_s = self._curves, self._now_s
        turn = Turn(self._tree.seq)
        met = curves.note_use(keys, now_s)
        turn_before_s = next((mark.end_s for mark in reversed(met) if mark.end_s >= 0), None)
        if trail.session is SessionHint.CONTINUES:
            turn.group = _CONTINUES
        elif trail.session is SessionHint.OVER:
            turn.group = _OVER
        elif turn_before_s is not None:
            turn.group = bisect_right(_GAPS_S, now_s - turn_before_s) + 1
        if len(keys) > 1:
            curves.mark_end(keys[-1], now_s)
        if curves.update_if_due(now_s):
            self._value = curves.value()
        return turn

    def _sample(self, keys: list[OffloadKey], runs: list[tuple[int, int]]) -> None:
        """Watch one chunk for each stretch of chunks of one class."""
        end = 0
        for class_idx, alike in groupby(runs, lambda run: run[1]):
            length = sum(num for num, _ in alike)
            end += length
            self._curves.sample(keys[end - 1], class_idx, length, self._now_s)

    def _use(self, turn: Turn, keys: list[OffloadKey], *, is_new: bool) -> list[tuple[int, int]]:
        """Count a use and make it the latest; return (number of chunks, class) of each run."""
        tree, now_s = self._tree, self._now_s
        first_class = turn.group * _NUM_KINDS
        runs, missing = tree.runs_along(keys)
        found: list[tuple[int, int]] = []
        for run in runs:
            if is_new and run.uses < USES_MAX:
                run.uses += 1
            class_idx = first_class + _KIND_OF_USES[run.uses]
            tree.use(run, turn, class_idx, now_s)
            found.append((len(run.keys), class_idx))
        if missing and is_new:
            found += [
                (end - start, first_class + _KIND_OF_USES[uses])
                for start, end, uses in self._counts.runs(missing)
            ]
        return found

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
        keys, turn = list(keys), trail.state
        if not isinstance(turn, Turn):
            turn = trail.state = Turn(self._tree.seq)
        if trail.keys[-len(keys) :] != keys:
            for _ in _parts(trail, keys):  # notes those that it did not access
                pass
        if turn.refused is not None and turn.refused not in keys:
            self._counts.set(keys, 1)
            return Admission(0, (), is_refusal=True)  # of no use without the one before
        walk = VictimWalk(self._tree, evictable, self._worth, trail)
        num_admitted, num_left, is_refusal = 0, num_free, False
        pieces: list[tuple[list[OffloadKey], int]] = []
        for start, end, uses in self._counts.runs(keys):
            num_wanted = end - start
            if num_wanted > num_left:
                num_found, is_refusal = self._make_room(walk, turn, uses, num_wanted - num_left)
                num_left += num_found
            num_stored = min(num_wanted, num_left)
            if num_stored:
                pieces.append((keys[start : start + num_stored], uses))
                num_admitted += num_stored
                num_left -= num_stored
            if num_stored < num_wanted:
                self._counts.set(keys[start + num_stored : end], uses)
                self._counts.set(keys[end:], 1)
                break
        turn.refused = keys[num_admitted] if is_refusal else None
        for run, gone in walk.finish().items():
            self._counts.set(gone, run.uses)
        self._insert(trail, turn, pieces)
        return Admission(num_admitted, walk.chosen, is_refusal)

    def _make_room(self, walk: VictimWalk, turn: Turn, uses: int, count: int) -> tuple[int, bool]:
        """Take victims that are worth less than a new chunk with so many uses.

        Returns how many there are, and whether more would have been there for a better chunk.
        """
        class_idx, num_found = turn.group * _NUM_KINDS + _KIND_OF_USES[uses], 0
        rates, survival = self._value.rates[class_idx], self._value.survival[class_idx]
        while num_found < count:
            best = walk.best()
            if best is None:
                return num_found, False
            worth, victim = best
            idle = bisect_right(EDGES_S, self._now_s - victim.used_s) - 1
            if rates[0] <= worth or 1.0 - survival[idle] < self.uses_chance_min:
                return num_found, True
            num_found += walk.take(victim, count - num_found)
        return num_found, False

    def _worth(self, run: Run) -> float:
        age = bisect_right(EDGES_S, self._now_s - run.used_s) - 1
        return self._value.rates[run.queue][age]

    def _insert(
        self, trail: RequestTrail, turn: Turn, pieces: list[tuple[list[OffloadKey], int]]
    ) -> None:
        """Track new chunks, each below the one before it in the request, wherever that is."""
        tree, listed = self._tree, trail.keys
        place_of: dict[OffloadKey, int] | None = None
        for piece, uses in pieces:
            keys = piece
            while keys:
                place = listed.index(keys[0])
                if keys == listed[place : place + len(keys)]:
                    part = keys
                else:
                    place_of = place_of or {key: i for i, key in enumerate(listed)}
                    end = 1
                    while end < len(keys) and place_of[keys[end]] == place + end:
                        end += 1
                    part = keys[:end]
                parent = tree.run_of.get(listed[place - 1]) if place else None
                run = tree.insert(part, parent, turn, uses)
                tree.use(run, turn, turn.group * _NUM_KINDS + _KIND_OF_USES[uses], self._now_s)
                if place + len(part) < len(listed):
                    tree.adopt(listed[place + len(part)], run)
                keys = keys[len(part) :]

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


class LeanHazardPolicy(HazardPolicy):
    """Stores only what has a fair chance to be used in time: for tiers that wear with writing."""

    uses_chance_min = 0.2


def _parts(trail: RequestTrail, keys: list[OffloadKey]) -> Iterator[tuple[list[OffloadKey], bool]]:
    """Cut keys into parts that the request used before and that it did not; note the latter."""
    listed = trail.keys
    num_listed = len(listed)
    if listed == keys[:num_listed]:
        trail.keys = keys
        if num_listed:
            yield listed, False
        if num_listed < len(keys):
            yield keys[num_listed:], True
    elif listed[: len(keys)] == keys:
        yield keys, False
    else:
        known = set(listed)
        for is_known, group in groupby(keys, known.__contains__):
            part = list(group)
            if not is_known:
                trail.keys += part
            yield part, not is_known
