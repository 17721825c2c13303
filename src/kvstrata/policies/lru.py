"""Least recently used, by request: tails leave before heads."""

from collections.abc import Iterable, Sequence

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, Evictable, EvictionPolicy, RequestTrail


class LruPolicy(EvictionPolicy):
    """One queue of requests, least recently active first; within a request the last chunk first.

    A chunk belongs to the request that used it last: it is in that one's `live`, in prefix order.
    An access moves the request to the young end of the queue and its chunks with it, however many
    they are.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._trail_of: dict[OffloadKey, RequestTrail] = {}
        self._queue: dict[RequestTrail, None] = {}  # those that own chunks, the oldest first

    @override
    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float) -> None:
        trail_of = self._trail_of
        tracked = list(filter(trail_of.__contains__, keys))
        # Where a chunk is missing in front of others, one that comes back must find its place.
        trail.keys = [] if tracked == keys[: len(tracked)] else list(keys)
        if tracked:
            self._disown(tracked)
            trail_of.update(dict.fromkeys(tracked, trail))
            own = trail.live  # stored by the request beyond these keys
            trail.live = dict.fromkeys(tracked)
            trail.live.update(own)
        self._make_youngest(trail)

    @override
    def admit(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        num_free: int,
        evictable: Evictable,
        now_s: float,
    ) -> Admission:
        self._queue.pop(trail, None)  # what a request has stored is no victim of what it stores
        victims: Sequence[OffloadKey] = ()
        if len(keys) > num_free:
            victims = self.choose(len(keys) - num_free, evictable)
            self.remove(victims)
            keys = keys[: num_free + len(victims)]
        added = dict.fromkeys(keys)
        if trail.keys:
            both = trail.live.keys() | added.keys()
            trail.live = {key: None for key in trail.keys if key in both} | trail.live
        trail.live.update(added)
        self._trail_of.update(dict.fromkeys(keys, trail))
        self._make_youngest(trail)
        return Admission(len(keys), victims)

    def _make_youngest(self, trail: RequestTrail) -> None:
        self._queue.pop(trail, None)
        if trail.live:
            self._queue[trail] = None

    def _disown(self, keys: Iterable[OffloadKey]) -> None:
        """Take chunks from the requests that have them."""
        trail_of, queue = self._trail_of, self._queue
        for key in keys:
            trail = trail_of[key]
            live = trail.live
            del live[key]
            if not live:
                queue.pop(trail, None)

    @override
    def choose(self, count: int, evictable: Evictable) -> Sequence[OffloadKey]:
        chosen: list[OffloadKey] = []
        for trail in self._queue:
            num_missing = count - len(chosen)
            if not num_missing:
                break
            chosen += evictable(list(reversed(trail.live)))[:num_missing]
        return chosen

    @override
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        trail_of = self._trail_of
        tracked = list(filter(trail_of.__contains__, keys))
        self._disown(tracked)
        for key in tracked:
            del trail_of[key]

    @override
    def clear(self) -> None:
        for trail in self._queue:
            trail.live = {}
        self._queue.clear()
        self._trail_of.clear()

    @override
    def __len__(self) -> int:
        return len(self._trail_of)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._trail_of

    @override
    def check(self) -> None:
        assert sum(len(trail.live) for trail in self._queue) == len(self._trail_of)
        for key, trail in self._trail_of.items():
            assert key in trail.live
            assert trail in self._queue
