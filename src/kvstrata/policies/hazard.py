"""Keep what is most likely to be used again soon, as learned from the rhythm of sessions."""

from bisect import bisect_right
from collections import OrderedDict
from itertools import groupby
from typing import Final

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import RequestTrail
from kvstrata.core.request import SessionHint
from kvstrata.policies.prefix_tree import USES_MAX, Run, Turn
from kvstrata.policies.reuse_curve import EDGES_S, ReuseCurves
from kvstrata.policies.tree_policy import TreePolicy

_GAPS_S: Final = (8.0, 16.0, 32.0, 64.0, 128.0)
_FIRST, _CONTINUES, _OVER = 0, len(_GAPS_S) + 2, len(_GAPS_S) + 3  # groups; the gaps' in between
_NUM_GROUPS: Final = len(_GAPS_S) + 4
_KIND_OF_USES: Final = (0, 0, *(1,) * (USES_MAX - 2), 2)  # once, a few times, often
_NUM_KINDS: Final = 3
_OFTEN: Final = 2
_NUM_ENDS_MAX: Final = 8192


class HazardPolicy(TreePolicy):
    """A chunk is worth the most uses per second that holding it longer can bring.

    Chunks are classed by the time between the two last turns of the session that used them last,
    and by how many requests used them; per class a curve of the times to the next use is learned.
    The least worthy chunk leaves, and a new one that is worth no more is refused.

    The turn before is found by content alone: it ended with the deepest chunk that is also the last
    one of an earlier request. A hint that the session continues, or is over, is a class of its own.
    """

    uses_chance_min = 0.0
    """Refuse chunks whose chance of use within the victim's idle time is less."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, _NUM_GROUPS * _NUM_KINDS)
        self._curves = ReuseCurves(_NUM_GROUPS, _NUM_KINDS)
        self._ends: OrderedDict[OffloadKey, float] = OrderedDict()  # last chunks of requests

    @override
    def _begin_turn(self, turn: Turn, trail: RequestTrail, keys: list[OffloadKey]) -> None:
        ends, now_s = self._ends, self._now_s
        last = next(filter(ends.__contains__, reversed(keys)), None)
        match trail.session:
            case SessionHint.CONTINUES:
                turn.group = _CONTINUES
            case SessionHint.OVER:
                turn.group = _OVER
            case None if last is not None:
                turn.group = bisect_right(_GAPS_S, now_s - ends[last]) + 1
        if len(keys) > 1:
            ends[keys[-1]] = now_s
            ends.move_to_end(keys[-1])
            if len(ends) > _NUM_ENDS_MAX:
                ends.popitem(last=False)
        self._curves.note_use(keys, now_s)
        self._curves.update_if_due(now_s)

    @override
    def _learn(self, turn: Turn, keys: list[OffloadKey], runs: list[tuple[int, int]]) -> None:
        end = 0
        for queue, alike in groupby(runs, lambda run: run[1]):
            length = sum(num for num, _ in alike)
            end += length
            self._curves.sample(keys[end - 1], queue, length, self._now_s)

    @override
    def _queue_for(self, turn: Turn, uses: int) -> int:
        return turn.group * _NUM_KINDS + _KIND_OF_USES[uses]

    @override
    def _worth(self, run: Run) -> float:
        age = bisect_right(EDGES_S, self._now_s - run.used_s) - 1
        return self._curves.value.rates[run.queue][age]

    @override
    def _refuses(self, turn: Turn, queue: int, worth: float, victim: Run) -> bool:
        value = self._curves.value
        if value.rates[queue][0] <= worth:
            return True
        age = bisect_right(EDGES_S, self._now_s - victim.used_s) - 1
        return 1.0 - value.survival[queue][age] < self.uses_chance_min


class LeanHazardPolicy(HazardPolicy):
    """Stores only what has a fair chance to be used in time: for tiers that wear with writing."""

    uses_chance_min = 0.2
