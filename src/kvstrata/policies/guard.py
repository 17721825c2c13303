"""Least recently used, but what has been idle for only a short time is not displaced."""

from typing import Final

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import RequestTrail
from kvstrata.core.request import SessionHint
from kvstrata.policies.prefix_tree import Run, Turn
from kvstrata.policies.reuse_curve import ReuseCurves
from kvstrata.policies.tree_policy import TreePolicy

_USES_SAMPLED_MAX: Final = 3  # more often used ends are not those of sessions
_COMMON, _FINISHED = range(2)  # queues


class GuardPolicy(TreePolicy):
    """A new chunk may displace only a chunk that has been idle for T; otherwise it is refused.

    T is learned: the holding time that gives the most hits per chunk and second, as the last chunks
    of requests show. Where the tier turns over more slowly than that, this is LRU.

    A request that says its session is over displaces nothing, and the chunks that only it used
    leave first; one that says its session continues is stored as by LRU.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_queues=2)
        self._curves = ReuseCurves()
        self._idle_min_s = 0.0

    @override
    def _begin_turn(self, turn: Turn, trail: RequestTrail, keys: list[OffloadKey]) -> None:
        turn.group = _FINISHED if trail.session is SessionHint.OVER else _COMMON
        turn.is_urgent = trail.session is SessionHint.CONTINUES
        self._curves.note_use(keys, self._now_s)

    @override
    def _learn(self, turn: Turn, keys: list[OffloadKey], runs: list[tuple[int, int]]) -> None:
        run = self._tree.run_of.get(keys[-1])
        uses = run.uses if run else self._counts.get(keys[-1])
        if uses <= _USES_SAMPLED_MAX:
            self._curves.sample(keys[-1], 0, 1, self._now_s)
        if self._curves.update_if_due(self._now_s):
            self._idle_min_s = self._curves.value.horizons_s[0][0]

    @override
    def _queue_for(self, turn: Turn, uses: int) -> int:
        return turn.group if uses == 1 else _COMMON

    @override
    def _worth(self, run: Run) -> float:
        return -1.0 if run.queue == _FINISHED else 0.0

    @override
    def _refuses(self, turn: Turn, queue: int, worth: float, victim: Run) -> bool:
        if victim.queue == _FINISHED or turn.is_urgent:
            return False
        return queue == _FINISHED or self._now_s - victim.used_s < self._idle_min_s
