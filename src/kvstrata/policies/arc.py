"""Adaptive replacement (ARC): balances what was used once against what was used again."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, Evictable, EvictionPolicy, RequestTrail

_NUM_ASKED_MIN: Final = 32


class _List(IntEnum):
    """The lists of the algorithm: resident or ghosts, used once or more often."""

    ONCE = 0  # T1
    OFTEN = 1  # T2
    ONCE_GHOSTS = 2  # B1
    OFTEN_GHOSTS = 3  # B2


class _Batch:
    """Chunks that came into a list together, the last to leave first."""

    __slots__ = ("keys", "place")

    def __init__(self, place: _List, keys: list[OffloadKey]) -> None:
        self.place = place
        self.keys = keys


class ArcPolicy(EvictionPolicy):
    """ARC after Megiddo and Modha, for the chunks of a request at a time.

    A list is a queue of batches. A chunk is in the batch that `_batch_of` says; older batches that
    still name it are cleaned when they come to the front, or swept when there are too many.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._batch_of: dict[OffloadKey, _Batch] = {}  # resident
        self._ghost_of: dict[OffloadKey, _Batch] = {}
        self._queues: tuple[deque[_Batch], ...] = tuple(deque() for _ in _List)
        self._sizes = [0] * len(_List)
        self._num_named = 0  # keys in all batches, those that moved on included
        self._once_target = 0.0  # p

    def _put(self, place: _List, keys: list[OffloadKey]) -> None:
        """Make these the youngest of a list; they are in none."""
        if not keys:
            return
        batch = _Batch(place, keys)
        where = self._batch_of if place <= _List.OFTEN else self._ghost_of
        where.update(dict.fromkeys(keys, batch))
        self._queues[place].append(batch)
        self._sizes[place] += len(keys)
        self._num_named += len(keys)

    def _pull(self, keys: list[OffloadKey]) -> None:
        """Take resident chunks out of their lists, to be put into another one at once."""
        for batch, num_keys in Counter(map(self._batch_of.__getitem__, keys)).items():
            self._sizes[batch.place] -= num_keys

    @override
    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float) -> None:
        tracked = list(filter(self._batch_of.__contains__, keys))
        used = trail.state if isinstance(trail.state, set) else set()
        trail.state = used
        if used:
            again = [key for key in tracked if key in used]
            self._refresh(again)
            tracked = [key for key in tracked if key not in used]
        used.update(keys)
        self._pull(tracked)
        self._put(_List.OFTEN, tracked)
        self._sweep_if_due()

    def _refresh(self, keys: list[OffloadKey]) -> None:
        """Make chunks the youngest of the list that they are in."""
        batch_of = self._batch_of
        for place in (_List.ONCE, _List.OFTEN):
            there = [key for key in keys if batch_of[key].place is place]
            self._pull(there)
            self._put(place, there)

    @override
    def admit(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        num_free: int,
        evictable: Evictable,
        now_s: float,
    ) -> Admission:
        ghost_of = self._ghost_of
        known = [] if ghost_of.keys().isdisjoint(keys) else [k for k in keys if k in ghost_of]
        if known:
            self._adapt(known)
        num_needed = len(keys) - num_free
        victims: list[OffloadKey] = []
        if num_needed > 0:
            num_once = self._sizes[_List.ONCE] + len(keys) - len(known) - int(self._once_target)
            own = trail.state if isinstance(trail.state, set) else set()
            victims = self._choose(num_needed, num_once, _sparing(evictable, own))
            self._bury(victims)
        admitted = list(keys[: num_free + len(victims)])
        again = [key for key in known if key in set(admitted)]
        for key in again:
            self._sizes[ghost_of.pop(key).place] -= 1
        once = [key for key in admitted if key not in set(again)] if again else admitted
        self._put(_List.OFTEN, again)
        self._put(_List.ONCE, once)
        used = trail.state if isinstance(trail.state, set) else set()
        used.update(admitted)
        trail.state = used
        self._trim_ghosts()
        self._sweep_if_due()
        return Admission(len(admitted), victims)

    def _adapt(self, known: list[OffloadKey]) -> None:
        """Shift the balance towards the list whose ghosts are asked for."""
        num_once, num_often = (self._sizes[i] for i in (_List.ONCE_GHOSTS, _List.OFTEN_GHOSTS))
        for key in known:
            if self._ghost_of[key].place is _List.ONCE_GHOSTS:
                self._once_target += max(1.0, num_often / num_once)
            else:
                self._once_target -= max(1.0, num_once / num_often)
            self._once_target = min(float(self.capacity), max(0.0, self._once_target))

    def _choose(self, count: int, num_once: int, evictable: Evictable) -> list[OffloadKey]:
        """Name victims: up to `num_once` of those used once, then others, then any."""
        first = self._oldest(_List.ONCE, min(count, max(0, num_once)), evictable)
        chosen = first + self._oldest(_List.OFTEN, count - len(first), evictable)
        if len(chosen) < count and len(first) == max(0, num_once):
            num_more = count - len(chosen) + len(first)
            chosen[: len(first)] = self._oldest(_List.ONCE, num_more, evictable)
        return chosen

    def _oldest(self, place: _List, count: int, evictable: Evictable) -> list[OffloadKey]:
        """Return up to `count` chunks of a list that may leave, the oldest first."""
        chosen: list[OffloadKey] = []
        batch_of = self._batch_of
        for batch in self._queues[place]:
            if len(chosen) >= count:
                break
            keys = batch.keys
            end = len(keys)
            while end and len(chosen) < count:
                start = max(0, end - max(count - len(chosen), _NUM_ASKED_MIN))
                mine = [k for k in reversed(keys[start:end]) if batch_of.get(k) is batch]
                chosen += evictable(mine)[: count - len(chosen)]
                end = start
        return chosen

    def _bury(self, keys: list[OffloadKey]) -> None:
        """Turn resident chunks into ghosts."""
        for ghosts, place in ((_List.ONCE_GHOSTS, _List.ONCE), (_List.OFTEN_GHOSTS, _List.OFTEN)):
            gone = [key for key in keys if self._batch_of[key].place is place]
            gone.reverse()  # the last of a batch leaves first
            self._put(ghosts, gone)
            self._sizes[place] -= len(gone)
        for key in keys:
            del self._batch_of[key]
        self._drop_stale_fronts()

    def _drop_stale_fronts(self) -> None:
        for place in (_List.ONCE, _List.OFTEN):
            self._clean_front(place, self._batch_of)

    def _clean_front(self, place: _List, where: dict[OffloadKey, _Batch]) -> None:
        """Take what moved on off the end of the oldest batches."""
        queue = self._queues[place]
        while queue:
            batch = queue[0]
            keys = batch.keys
            before = len(keys)
            while keys and where.get(keys[-1]) is not batch:
                keys.pop()
            self._num_named -= before - len(keys)
            if keys:
                return
            queue.popleft()

    def _trim_ghosts(self) -> None:
        """Keep as many ghosts of each kind as the algorithm does."""
        sizes, capacity = self._sizes, self.capacity
        self._forget(_List.ONCE_GHOSTS, capacity - sizes[_List.ONCE])
        self._forget(_List.OFTEN_GHOSTS, 2 * capacity - sum(sizes[: _List.OFTEN_GHOSTS]))

    def _forget(self, place: _List, num_max: int) -> None:
        queue, ghost_of = self._queues[place], self._ghost_of
        while self._sizes[place] > max(0, num_max):
            self._clean_front(place, ghost_of)
            batch = queue[0]
            while batch.keys and self._sizes[place] > max(0, num_max):
                key = batch.keys.pop()
                self._num_named -= 1
                if ghost_of.get(key) is batch:
                    del ghost_of[key]
                    self._sizes[place] -= 1

    def _sweep_if_due(self) -> None:
        """Drop the names of chunks that moved on when they are as many as those that did not."""
        num_live = len(self._batch_of) + len(self._ghost_of)
        if self._num_named <= 2 * num_live + self.capacity:
            return
        for place, queue in zip(_List, self._queues, strict=True):
            where = self._batch_of if place <= _List.OFTEN else self._ghost_of
            for batch in queue:
                batch.keys = [key for key in batch.keys if where.get(key) is batch]
            kept = [batch for batch in queue if batch.keys]
            queue.clear()
            queue.extend(kept)
        self._num_named = num_live

    @override
    def choose(self, count: int, evictable: Evictable) -> Sequence[OffloadKey]:
        num_once = self._sizes[_List.ONCE] - int(self._once_target)
        return self._choose(count, num_once, evictable)

    @override
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            batch = self._batch_of.pop(key, None)
            if batch is not None:
                self._sizes[batch.place] -= 1
        self._drop_stale_fronts()

    @override
    def clear(self) -> None:
        self._batch_of.clear()
        self._ghost_of.clear()
        for queue in self._queues:
            queue.clear()
        self._sizes = [0] * len(_List)
        self._num_named = 0
        self._once_target = 0.0

    @override
    def __len__(self) -> int:
        return len(self._batch_of)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._batch_of

    @override
    def check(self) -> None:
        assert self._num_named == sum(len(b.keys) for queue in self._queues for b in queue)
        assert not self._batch_of.keys() & self._ghost_of.keys()
        assert len(self._ghost_of) <= self.capacity
        assert 0 <= self._once_target <= self.capacity
        for place, queue in zip(_List, self._queues, strict=True):
            where = self._batch_of if place <= _List.OFTEN else self._ghost_of
            live = [key for batch in queue for key in batch.keys if where.get(key) is batch]
            assert len(live) == len(set(live)) == self._sizes[place]


def _sparing(evictable: Evictable, own: set[OffloadKey]) -> Evictable:
    """Let none of a request's own chunks leave."""
    return lambda keys: [key for key in evictable(keys) if key not in own]
