"""Least recently used, but what has been idle for only a short time is not displaced."""

from collections.abc import Sequence
from math import inf
from typing import Final

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, RequestTrail, Run
from kvstrata.core.request import SessionHint
from kvstrata.policies.lru import LruPolicy
from kvstrata.policies.reuse_curve import ReuseCurves

_NUM_USES_SAMPLED_MAX: Final = 3  # an end that more requests held is no session's


class _Turn:
    """What the policy remembers of a request: the first chunk that was refused to it, if any."""

    __slots__ = ("refused",)

    def __init__(self) -> None:
        self.refused: OffloadKey | None = None


class GuardPolicy(LruPolicy):
    """A new chunk may displace only a chunk that has been idle for T; otherwise it is refused.

    T is learned: the holding time that gives the most hits per chunk and second, as the last chunks
    of requests show. Where the tier turns over more slowly than that, this is LRU.

    A request whose session is over displaces nothing; one whose session continues is stored as by
    LRU.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._curves = ReuseCurves(capacity)
        self._idle_min_s = 0.0

    @override
    def access(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        runs: Sequence[Run],
        now_s: float,
    ) -> None:
        if trail.state is None and keys:
            trail.state = _Turn()
            self._learn(keys, now_s)
        for run in runs:
            run.used_s = now_s
        super().access(trail, keys, runs, now_s)

    def _learn(self, keys: Sequence[OffloadKey], now_s: float) -> None:
        curves, end = self._curves, keys[-1]
        curves.note_use(keys, now_s)
        if curves.mark_end(end, now_s).num_uses <= _NUM_USES_SAMPLED_MAX:
            curves.sample(end, 0, 1, now_s)
        if curves.update_if_due(now_s):
            self._idle_min_s = curves.horizon_s()

    @override
    def admit(
        self, trail: RequestTrail, keys: Sequence[OffloadKey], num_free: int, now_s: float
    ) -> Admission:
        turn: _Turn | None = trail.state
        if turn is None:
            turn = trail.state = _Turn()
        if not num_free and turn.refused is not None and turn.refused not in keys:
            return 0, (), True  # of no use without the one before
        turn.refused = None
        num_missing = len(keys) - num_free
        if num_missing <= 0:
            return len(keys), (), False
        victims, num_found, is_refusal = [], 0, False
        for run, count in self._choose(num_missing, trail.runs)[0]:
            if now_s - run.used_s < self._idle_min_for(trail.session):
                is_refusal = True
                break
            victims.append((run, count))
            num_found += count
            if count == len(run.keys):
                self._queue.remove(run)
        num_admitted = num_free + num_found
        turn.refused = keys[num_admitted] if is_refusal else None
        return num_admitted, victims, is_refusal

    def _idle_min_for(self, session: SessionHint | None) -> float:
        match session:
            case SessionHint.CONTINUES:
                return 0.0
            case SessionHint.OVER:
                return inf
        return self._idle_min_s

    @override
    def insert(self, trail: RequestTrail, run: Run, now_s: float) -> None:
        super().insert(trail, run, now_s)
        run.used_s = now_s
        for used in trail.runs:
            used.used_s = now_s

    @override
    def split(self, head: Run, tail: Run) -> None:
        super().split(head, tail)
        head.used_s = tail.used_s
