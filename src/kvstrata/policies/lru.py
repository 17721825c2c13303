"""Least recently used, by request: tails leave before heads."""

from collections.abc import Iterable, Sequence
from itertools import islice

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, Evictable, EvictionPolicy, RequestTrail

BATCH_KEYS_MIN = 32


class LruPolicy(EvictionPolicy):
    """One queue of requests, least recently active first; within a request the last chunk first.

    A chunk belongs to the request that used it last, so an access costs one dictionary update for
    all of the request's keys and one move of the request, whatever its length. A key that moved on
    to a younger request stays in the old one's list until it is met there or swept; a sweep comes
    when the lists have grown by a multiple of what is tracked, so it costs a constant per access.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._trail_of: dict[OffloadKey, RequestTrail] = {}
        self._queue: dict[RequestTrail, None] = {}
        self._num_listed = 0  # keys in the lists of the queue, those that moved on included

    @override
    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float) -> None:
        trail_of, listed = self._trail_of, trail.keys
        self._leave_queue(trail)
        if not listed or listed == keys[: len(listed)]:
            trail.keys = list(keys)
        elif listed[: len(keys)] != keys:
            trail.keys = list(dict.fromkeys([*keys, *listed]))
        trail_of.update(dict.fromkeys([key for key in keys if key in trail_of], trail))
        self._join_queue(trail)

    @override
    def admit(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        num_free: int,
        evictable: Evictable,
        now_s: float,
    ) -> Admission:
        num_needed = len(keys) - num_free
        victims: list[OffloadKey] = []
        self._leave_queue(trail)  # what a request has stored is no victim of what it stores next
        if num_needed > 0:
            victims = self._choose(num_needed, evictable)
            self.remove(victims)
            self._trim()
        listed, num_admitted = trail.keys, min(len(keys), num_free + len(victims))
        admitted = keys if num_admitted == len(keys) else keys[:num_admitted]
        if listed[-len(keys) :] != keys:  # otherwise they are the tail of what it accessed
            known = set(listed)
            listed += [key for key in admitted if key not in known]
        self._trail_of.update(dict.fromkeys(admitted, trail))
        self._join_queue(trail)
        return Admission(num_admitted, victims)

    def _leave_queue(self, trail: RequestTrail) -> None:
        if trail in self._queue:
            del self._queue[trail]
            self._num_listed -= len(trail.keys)

    def _join_queue(self, trail: RequestTrail) -> None:
        if not trail.keys:
            return
        self._queue[trail] = None
        self._num_listed += len(trail.keys)
        if self._num_listed > 2 * len(self._trail_of) + self.capacity:
            self._sweep()

    def _sweep(self) -> None:
        trail_of, self._num_listed = self._trail_of, 0
        for trail in list(self._queue):
            trail.keys = [key for key in trail.keys if trail_of.get(key) is trail]
            self._num_listed += len(trail.keys)
            if not trail.keys:
                del self._queue[trail]

    def _trim(self) -> None:
        """Take what is gone off the ends of the oldest requests, so that no call meets it again."""
        trail_of, emptied = self._trail_of, []
        for trail in self._queue:
            keys = trail.keys
            before = len(keys)
            while keys and trail_of.get(keys[-1]) is not trail:
                keys.pop()
            self._num_listed -= before - len(keys)
            if keys:
                break
            emptied.append(trail)
        for trail in emptied:
            del self._queue[trail]

    def _choose(self, count: int, evictable: Evictable) -> list[OffloadKey]:
        trail_of = self._trail_of
        chosen: dict[OffloadKey, None] = {}
        for trail in self._queue:
            keys = trail.keys
            end = len(keys)
            while end and len(chosen) < count:
                start = max(0, end - max(count - len(chosen), BATCH_KEYS_MIN))
                batch = [key for key in reversed(keys[start:end]) if trail_of.get(key) is trail]
                if batch:
                    chosen.update(dict.fromkeys(evictable(batch)))
                end = start
            if len(chosen) >= count:
                break
        return list(islice(chosen, count))

    @override
    def choose(self, count: int, evictable: Evictable) -> Sequence[OffloadKey]:
        return self._choose(count, evictable)

    @override
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        trail_of = self._trail_of
        for key in keys:
            trail_of.pop(key, None)

    @override
    def clear(self) -> None:
        for trail in self._queue:
            trail.keys = []
        self._queue.clear()
        self._trail_of.clear()
        self._num_listed = 0

    @override
    def __len__(self) -> int:
        return len(self._trail_of)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._trail_of

    @override
    def check(self) -> None:
        assert self._num_listed == sum(len(trail.keys) for trail in self._queue)
        assert self._num_listed <= 2 * len(self._trail_of) + self.capacity
        assert all(trail.keys for trail in self._queue)
        for key, trail in self._trail_of.items():
            assert trail in self._queue
            assert key in trail.keys
