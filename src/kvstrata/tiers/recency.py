"""The order in which a tier evicts when it is given no other policy: least recently used first."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, Evictable, EvictionPolicy, RequestTrail

_BATCH = 64


class RecencyPolicy(EvictionPolicy):
    """Least recently used first, lower priorities before higher ones, tails before heads.

    It admits whatever it finds room for. A request makes no room with chunks of a higher priority,
    nor with its own.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._orders: dict[int, OrderedDict[OffloadKey, None]] = {}  # by priority, oldest first
        self._priority: dict[OffloadKey, int] = {}

    @override
    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float) -> None:
        if len(keys) >= len(trail.keys) or trail.keys[: len(keys)] != list(keys):
            trail.keys = list(keys)
        self._refresh(trail)

    @override
    def admit(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        num_free: int,
        evictable: Evictable,
        now_s: float,
    ) -> Admission:
        victims = self._choose(len(keys) - num_free, trail, evictable)
        self.remove(victims)
        admitted = keys[: max(0, num_free) + len(victims)]
        for key in admitted:
            self._priority[key] = trail.priority
            self._orders.setdefault(trail.priority, OrderedDict())[key] = None
        known = set(trail.keys)
        trail.keys += [key for key in admitted if key not in known]
        self._refresh(trail)
        return Admission(len(admitted), victims)

    @override
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            priority = self._priority.pop(key, None)
            if priority is not None:
                del self._orders[priority][key]

    @override
    def clear(self) -> None:
        self._orders.clear()
        self._priority.clear()

    @override
    def __len__(self) -> int:
        return len(self._priority)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._priority

    @override
    def check(self) -> None:
        listed = {key: prio for prio, order in self._orders.items() for key in order}
        assert listed == self._priority
        assert sum(map(len, self._orders.values())) == len(listed)

    def _refresh(self, trail: RequestTrail) -> None:
        """Make the request's chunks the most recent ones, its head the very last to leave."""
        for key in reversed(trail.keys):
            old = self._priority.get(key)
            if old is None:
                continue
            if old < trail.priority:
                del self._orders[old][key]
                self._priority[key] = trail.priority
                self._orders.setdefault(trail.priority, OrderedDict())[key] = None
            else:
                self._orders[old].move_to_end(key)

    def _choose(self, count: int, trail: RequestTrail, evictable: Evictable) -> list[OffloadKey]:
        own = set(trail.keys)
        victims: list[OffloadKey] = []
        for priority in sorted(p for p in self._orders if p <= trail.priority):
            oldest = (key for key in self._orders[priority] if key not in own)
            while len(victims) < count and (batch := list(islice(oldest, _BATCH))):
                victims += list(evictable(batch))[: count - len(victims)]
        return victims
