"""Least recently used, but what has been idle for only a short time is not displaced."""

from collections.abc import Sequence
from math import inf
from typing import Final, cast

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, Evictable, RequestTrail
from kvstrata.core.request import SessionHint
from kvstrata.policies.lru import LruPolicy
from kvstrata.policies.reuse_curve import ReuseCurves

_NUM_USES_SAMPLED_MAX: Final = 3  # an end that more requests held is no session's


class _Use:
    """When a request used its chunks last, and the first chunk that was refused to it."""

    __slots__ = ("at_s", "refused")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
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
        self._curves = ReuseCurves()
        self._idle_min_s = 0.0
        self._is_refusal = False  # of the admission in hand

    @override
    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float) -> None:
        use = trail.state
        if isinstance(use, _Use):
            use.at_s = now_s
        else:
            trail.state = _Use(now_s)
            if keys:
                self._learn(keys, now_s)
        super().access(trail, keys, now_s)

    def _learn(self, keys: Sequence[OffloadKey], now_s: float) -> None:
        curves, end = self._curves, keys[-1]
        curves.note_use(keys, now_s)
        if curves.mark_end(end, now_s).num_uses <= _NUM_USES_SAMPLED_MAX:
            curves.sample(end, 0, 1, now_s)
        if curves.update_if_due(now_s):
            self._idle_min_s = curves.horizon_s()

    @override
    def admit(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        num_free: int,
        evictable: Evictable,
        now_s: float,
    ) -> Admission:
        use = trail.state
        if not isinstance(use, _Use):
            use = trail.state = _Use(now_s)
        use.at_s = now_s
        if use.refused is not None and use.refused not in keys:
            return Admission(0, (), is_refusal=True)  # of no use without the one before
        self._is_refusal = False
        admission = super().admit(trail, keys, num_free, evictable, now_s)
        use.refused = keys[admission.num_admitted] if self._is_refusal else None
        return admission._replace(is_refusal=self._is_refusal)

    @override
    def _make_room(
        self, trail: RequestTrail, count: int, evictable: Evictable, now_s: float
    ) -> Sequence[OffloadKey]:
        if trail.session is SessionHint.CONTINUES:
            return self.choose(count, evictable)
        chosen: list[OffloadKey] = []
        idle_min_s = inf if trail.session is SessionHint.OVER else self._idle_min_s
        for owner in self._queue:
            num_missing = count - len(chosen)
            if not num_missing:
                break
            if now_s - cast("_Use", owner.state).at_s < idle_min_s:
                self._is_refusal = True
                break
            chosen += evictable(list(reversed(owner.live)))[:num_missing]
        return chosen
