"""Keep what is most likely to be used again soon, as learned from the rhythm of sessions."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, EvictionPolicy, RequestTrail, Run, Victim
from kvstrata.core.request import SessionHint
from kvstrata.policies.class_queues import USES_MAX, ClassQueues, Standing, VictimWalk
from kvstrata.policies.reuse_curve import EDGES_S, ReuseCurves
from kvstrata.policies.use_counts import UseCounts

_GAPS_S: Final = (8.0, 16.0, 32.0, 64.0, 128.0)
# Groups: 0 for a session's first turn, then one for each gap between turns, then the hints'.
_CONTINUES, _OVER = len(_GAPS_S) + 2, len(_GAPS_S) + 3
_NUM_GROUPS: Final = len(_GAPS_S) + 4
_KIND_OF_USES: Final = (0, 0, *(1,) * (USES_MAX - 2), 2)  # once, a few times, often
_NUM_KINDS: Final = 3


class _Turn:
    """What the policy remembers of a request.

    Attributes:
        first_class: The class of chunks that only this request used; with more uses, those after.
        num_counted: Of the chunks from a root on, how many this request's use was counted for.
        refused: The first chunk that was not stored for it; None if there is none.
        at_s: When it used its chunks last.
        path: Chunks that were not tracked when it asked last, and `uses`, in stretches, of these.
    """

    __slots__ = ("at_s", "first_class", "num_counted", "path", "refused", "uses")

    def __init__(self, at_s: float) -> None:
        self.first_class = 0
        self.num_counted: dict[OffloadKey, int] = {}
        self.refused: OffloadKey | None = None
        self.at_s = at_s
        self.path: Sequence[OffloadKey] = ()
        self.uses: list[tuple[int, int, int]] = []


class HazardPolicy(EvictionPolicy):
    """A chunk is worth the most uses per second that holding it longer can bring.

    Chunks are classed by the time between the two last turns of the session that used them last,
    and by how many requests used them; per class a curve of the times to the next use is learned.
    The least worthy run without children leaves. A new chunk that is worth no more is refused, and
    with it all that follow in its request.

    The turn before is found by content alone: it ended with the deepest chunk that is also the last
    one of an earlier request. A hint that the session continues, or is over, is a group of its own.
    """

    is_tree = True
    uses_chance_min = 0.0
    """Refuse chunks whose chance of use within the victim's idle time is less."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queues = ClassQueues()
        self._counts = UseCounts(capacity, USES_MAX)
        self._curves = ReuseCurves(capacity, _NUM_GROUPS, _NUM_KINDS)
        self._value = self._curves.value()
        self._now_s = 0.0

    @override
    def access(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        runs: Sequence[Run],
        now_s: float,
    ) -> None:
        self._now_s = now_s
        if not keys:
            return
        turn: _Turn | None = trail.state
        is_first = turn is None
        if turn is None:
            turn = trail.state = self._begin_turn(trail, keys)
        turn.at_s = now_s
        num_counted = turn.num_counted.get(keys[0], 0)
        turn.num_counted[keys[0]] = max(num_counted, len(keys))
        found: list[tuple[int, int]] = []
        num_covered = 0
        for run in runs:
            standing: Standing = run.state
            num_covered += len(run.keys)
            if num_covered > num_counted and standing.uses < USES_MAX:
                standing.uses += 1
            class_idx = turn.first_class + _KIND_OF_USES[standing.uses]
            self._queues.use(run, standing, class_idx)
            run.used_s = now_s
            found.append((len(run.keys), class_idx))
        if is_first:
            missing = _missing(keys, runs, num_covered)
            found += [
                (end - start, turn.first_class + _KIND_OF_USES[uses])
                for start, end, uses in self._uses_of(turn, missing)
            ]
            self._sample(keys, found)

    def _uses_of(self, turn: _Turn, keys: Sequence[OffloadKey]) -> list[tuple[int, int, int]]:
        """Return the uses of chunks in stretches; a request asks for the same ones repeatedly."""
        if turn.path != keys:
            turn.path, turn.uses = list(keys), list(self._counts.runs(keys))
        return turn.uses

    def _begin_turn(self, trail: RequestTrail, keys: Sequence[OffloadKey]) -> _Turn:
        curves, now_s, group = self._curves, self._now_s, 0
        met = curves.note_use(keys, now_s)
        turn_before_s = None
        for mark in met:
            if mark.end_s >= 0:
                turn_before_s = mark.end_s
        if trail.session is SessionHint.CONTINUES:
            group = _CONTINUES
        elif trail.session is SessionHint.OVER:
            group = _OVER
        elif turn_before_s is not None:
            group = bisect_right(_GAPS_S, now_s - turn_before_s) + 1
        if len(keys) > 1:
            curves.mark_end(keys[-1], now_s)
        if curves.update_if_due(now_s):
            self._value = curves.value()
        turn = _Turn(now_s)
        turn.first_class = group * _NUM_KINDS
        return turn

    def _sample(self, keys: Sequence[OffloadKey], found: list[tuple[int, int]]) -> None:
        """Watch one chunk for each stretch of chunks of one class."""
        if not self._curves.is_sampling:
            return
        end, last = 0, len(found) - 1
        length = 0
        for i, (num, class_idx) in enumerate(found):
            length += num
            if i == last or found[i + 1][1] != class_idx:
                end += length
                self._curves.sample(keys[end - 1], class_idx, length, self._now_s)
                length = 0

    @override
    def admit(
        self, trail: RequestTrail, keys: Sequence[OffloadKey], num_free: int, now_s: float
    ) -> Admission:
        self._now_s = now_s
        turn: _Turn | None = trail.state
        if turn is None:
            turn = trail.state = _Turn(now_s)
        if not num_free and turn.refused is not None and turn.refused not in keys:
            return 0, (), True  # of no use without the one before
        walk = VictimWalk(self._queues, self._value.rates, now_s, trail.runs)
        num_admitted, num_left, is_refusal = 0, num_free, False
        for start, end, uses in self._uses_of(turn, keys):
            num_wanted = end - start
            if num_wanted > num_left:
                class_idx = turn.first_class + _KIND_OF_USES[uses]
                num_found, is_refusal = self._make_room(walk, class_idx, num_wanted - num_left)
                num_left += num_found
            num_stored = min(num_wanted, num_left)
            num_admitted += num_stored
            num_left -= num_stored
            if num_stored < num_wanted:
                self._counts.set(keys[start + num_stored : end], uses)
                self._counts.set(keys[end:], 1)
                break
        turn.refused = keys[num_admitted] if is_refusal else None
        victims = walk.victims
        for run, count in victims:
            self._counts.set(run.keys[-count:], run.state.uses)
            if count == len(run.keys):
                self._queues.forget(run)
        walk.end()
        return num_admitted, victims, is_refusal

    def _make_room(self, walk: VictimWalk, class_idx: int, count: int) -> tuple[int, bool]:
        """Take victims that are worth less than a new chunk of this class.

        Returns how many there are, and whether more would have been there for a better chunk.
        """
        worth_new, num_found = self._value.rates[class_idx][0], 0
        while num_found < count:
            best = walk.best()
            if best is None:
                return num_found, False
            worth, victim = best
            if worth_new <= worth or (
                self.uses_chance_min and not self._is_likely_used(class_idx, victim)
            ):
                return num_found, True
            num_found += walk.take(victim, count - num_found)
        return num_found, False

    def _is_likely_used(self, class_idx: int, victim: Run) -> bool:
        """Say whether a new chunk has a chance to be used within the victim's idle time."""
        idle = bisect_right(EDGES_S, self._now_s - victim.used_s) - 1
        return 1.0 - self._value.survival[class_idx][idle] >= self.uses_chance_min

    def _worth(self, run: Run, class_idx: int) -> float:
        return self._value.rates[class_idx][bisect_right(EDGES_S, self._now_s - run.used_s) - 1]

    def _note_leaving(self, run: Run, count: int) -> None:
        """Remember the uses of the last chunks of a run."""
        if run.state is not None:
            self._counts.set(run.keys[-count:], run.state.uses)

    @override
    def insert(self, trail: RequestTrail, run: Run, now_s: float) -> None:
        turn: _Turn | None = trail.state
        if turn is None:
            turn = trail.state = _Turn(now_s)
        if turn.at_s < now_s:
            turn.at_s = now_s
            for used in trail.runs:
                if used.state is not None:
                    self._queues.use(used, used.state, used.state.class_idx)
                    used.used_s = now_s
        uses = self._most_uses(turn, run.keys)
        run.used_s = now_s
        self._queues.add(run, uses, turn.first_class + _KIND_OF_USES[uses])

    def _most_uses(self, turn: _Turn, keys: Sequence[OffloadKey]) -> int:
        """Return how many uses the longest stretch of these chunks has."""
        stretches = self._uses_of(turn, keys)
        if len(stretches) == 1:
            return stretches[0][2]
        return max([(end - start, uses) for start, end, uses in stretches])[1]

    @override
    def split(self, head: Run, tail: Run) -> None:
        self._queues.add_head(head, tail)

    @override
    def join(self, head: Run, tail: Run) -> bool:
        first: Standing = head.state
        second: Standing = tail.state
        if (first.uses, first.class_idx) != (second.uses, second.class_idx):
            return False
        first.seq, head.used_s = second.seq, tail.used_s
        self._queues.forget(tail)
        return True

    @override
    def choose(self, count: int) -> Sequence[Victim]:
        walk = VictimWalk(self._queues, self._value.rates, self._now_s)
        while count and (best := walk.best()):
            count -= walk.take(best[1], count)
        walk.end()
        return walk.victims

    @override
    def remove(self, run: Run) -> None:
        self._note_leaving(run, len(run.keys))
        self._queues.forget(run)

    @override
    def clear(self) -> None:
        self._queues.clear()
        self._counts.clear()

    @override
    def runs(self) -> list[Run]:
        worth_now = [
            (self._worth(run, run.state.class_idx), run.state.seq, run.state.number, run)
            for run in self._queues.tracked
            if run.state is not None
        ]
        return [run for *_, run in sorted(worth_now)]

    @override
    def check(self) -> None:
        super().check()
        self._queues.check()


class LeanHazardPolicy(HazardPolicy):
    """Stores only what has a fair chance to be used in time: for tiers that wear with writing."""

    uses_chance_min = 0.2


def _missing(
    keys: Sequence[OffloadKey], runs: Sequence[Run], num_covered: int
) -> Sequence[OffloadKey]:
    """Return the keys that are in none of the runs, which have so many chunks together."""
    if not runs or keys[num_covered - 1] == runs[-1].keys[-1]:
        return keys[num_covered:]
    tracked = {key for run in runs for key in run.keys}
    return [key for key in keys if key not in tracked]
