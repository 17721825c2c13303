"""Adaptive replacement (ARC): balances what was used once against what was used again."""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import groupby
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
    """Chunks that came into a list together, the last to leave first.

    `seq` orders batches; `num_gone` of the keys are no longer in the batch.
    """

    __slots__ = ("keys", "num_gone", "place", "seq")

    def __init__(self, place: _List, keys: list[OffloadKey], seq: int) -> None:
        self.place = place
        self.keys = keys
        self.seq = seq
        self.num_gone = 0


_Picks = list[tuple[_Batch, list[OffloadKey]]]


class ArcPolicy(EvictionPolicy):
    """ARC after Megiddo and Modha, for the chunks of a request at a time.

    A list is a queue of batches. A chunk or ghost is in the batch that `_batch_of` says; an older
    batch that still names it is cleaned when it comes to the front, or swept when there is too much
    to clean.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._batch_of: dict[OffloadKey, _Batch] = {}
        self._queues: tuple[deque[_Batch], ...] = tuple(deque() for _ in _List)
        self._sizes = [0] * len(_List)
        self._num_named = 0  # keys in all batches, those that moved on included
        self._once_target = 0.0  # p
        self._seq = 0

    def _put(self, place: _List, keys: list[OffloadKey]) -> None:
        """Make these the youngest of a list; they are in none, or about to leave it."""
        if not keys:
            return
        self._seq += 1
        batch = _Batch(place, keys, self._seq)
        self._batch_of.update(dict.fromkeys(keys, batch))
        self._queues[place].append(batch)
        self._sizes[place] += len(keys)
        self._num_named += len(keys)

    def _pull(self, keys: Sequence[OffloadKey], first: _List, last: _List) -> list[OffloadKey]:
        """Take those that are in the lists from `first` to `last` out, to be put at once."""
        pulled: list[OffloadKey] = []
        start, sizes = 0, self._sizes
        for batch, run in groupby(map(self._batch_of.get, keys)):
            num_keys = len(list(run))
            if batch is not None and first <= batch.place <= last:
                pulled += keys[start : start + num_keys]
                sizes[batch.place] -= num_keys
                batch.num_gone += num_keys
            start += num_keys
        return pulled

    @override
    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float) -> None:
        if trail.state is None:
            trail.state = self._seq
            trail.keys = list(keys)
        else:
            known = set(trail.keys)
            again = [key for key in keys if key in known]  # one use, however often
            self._put(_List.ONCE, self._pull(again, _List.ONCE, _List.ONCE))
            self._put(_List.OFTEN, self._pull(again, _List.OFTEN, _List.OFTEN))
            keys = [key for key in keys if key not in known]
            trail.keys += keys
        self._put(_List.OFTEN, self._pull(keys, _List.ONCE, _List.OFTEN))
        self._sweep_if_due()

    @override
    def admit(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        num_free: int,
        evictable: Evictable,
        now_s: float,
    ) -> Admission:
        if trail.state is None:
            trail.state = self._seq
        if trail.keys[-len(keys) :] != keys:
            trail.keys = list(dict.fromkeys([*trail.keys, *keys]))
        ghosts = {key: b for key, b in zip(keys, map(self._batch_of.get, keys), strict=True) if b}
        if ghosts:
            self._adapt(ghosts)
        num_once = self._sizes[_List.ONCE] + len(keys) - len(ghosts) - int(self._once_target)
        victims = self._evict(len(keys) - num_free, num_once, evictable, trail)
        admitted = list(keys[: num_free + len(victims)])
        if ghosts:
            often = self._pull(admitted, _List.ONCE_GHOSTS, _List.OFTEN_GHOSTS)
            self._put(_List.OFTEN, often)
            self._put(_List.ONCE, [key for key in admitted if key not in ghosts])
        else:
            self._put(_List.ONCE, admitted)
        self._trim_ghosts()
        self._sweep_if_due()
        return Admission(len(admitted), victims)

    def _adapt(self, ghosts: dict[OffloadKey, _Batch]) -> None:
        """Shift the balance towards the list whose ghosts are asked for."""
        num_once, num_often = (self._sizes[i] for i in (_List.ONCE_GHOSTS, _List.OFTEN_GHOSTS))
        for batch in ghosts.values():
            if batch.place is _List.ONCE_GHOSTS:
                self._once_target += max(1.0, num_often / num_once)
            else:
                self._once_target -= max(1.0, num_once / num_often)
            self._once_target = min(float(self.capacity), max(0.0, self._once_target))

    def _evict(
        self, count: int, num_once: int, evictable: Evictable, trail: RequestTrail
    ) -> list[OffloadKey]:
        """Make ghosts of up to `count` chunks and return them."""
        if count <= 0:
            return []
        victims: list[OffloadKey] = []
        for place, picks in self._choose(count, num_once, evictable, trail):
            if not picks:
                continue
            gone: list[OffloadKey] = []
            for batch, keys in picks:
                self._drop(batch, keys)
                gone += keys
            self._pop_empty(place)
            victims += gone
            gone.reverse()  # the last of a batch leaves first
            self._put(_List(place + 2), gone)
        return victims

    def _drop(self, batch: _Batch, keys: list[OffloadKey]) -> None:
        """Take chunks out of a batch; cheap if they are its last ones, in reverse."""
        self._sizes[batch.place] -= len(keys)
        if batch.keys[: -len(keys) - 1 : -1] == keys:
            del batch.keys[-len(keys) :]
            self._num_named -= len(keys)
        else:
            batch.num_gone += len(keys)

    def _pop_empty(self, place: _List) -> None:
        """Drop batches at the old end of a list that have lost all their chunks."""
        queue = self._queues[place]
        while queue and len(queue[0].keys) == queue[0].num_gone:
            self._num_named -= queue.popleft().num_gone

    def _clean(self, batch: _Batch) -> None:
        """Drop the names of chunks that are no longer in a batch."""
        batch_of = self._batch_of
        batch.keys = [key for key in batch.keys if batch_of.get(key) is batch]
        self._num_named -= batch.num_gone
        batch.num_gone = 0

    def _choose(
        self, count: int, num_once: int, evictable: Evictable, trail: RequestTrail | None = None
    ) -> list[tuple[_List, _Picks]]:
        """Name victims: up to `num_once` of those used once, then others, then any."""
        num_once = min(count, max(0, num_once))
        once, num_found = self._oldest(_List.ONCE, num_once, evictable, trail)
        often, num_more = self._oldest(_List.OFTEN, count - num_found, evictable, trail)
        if num_found == num_once and num_found + num_more < count:
            once, _ = self._oldest(_List.ONCE, count - num_more, evictable, trail)
        return [(_List.ONCE, once), (_List.OFTEN, often)]

    def _oldest(
        self, place: _List, count: int, evictable: Evictable, trail: RequestTrail | None
    ) -> tuple[_Picks, int]:
        """Return up to `count` chunks of a list that may leave, the oldest first, and how many."""
        picks: _Picks = []
        began = trail.state if trail is not None and isinstance(trail.state, int) else self._seq
        for batch in self._queues[place]:
            if count <= 0:
                break
            if batch.num_gone:
                self._clean(batch)
            end = len(batch.keys)
            while end and count > 0:
                start = max(0, end - max(count, _NUM_ASKED_MIN))
                asked = batch.keys[start:end]
                asked.reverse()
                if trail is not None and batch.seq > began:  # some may be the request's own
                    own = set(trail.keys)
                    asked = [key for key in asked if key not in own]
                allowed = evictable(asked)[:count]
                picks.append((batch, list(allowed)))
                count -= len(allowed)
                end = start
        return picks, sum(len(keys) for _, keys in picks)

    def _trim_ghosts(self) -> None:
        """Keep as many ghosts of each kind as the algorithm does."""
        sizes, capacity = self._sizes, self.capacity
        self._forget(_List.ONCE_GHOSTS, capacity - sizes[_List.ONCE])
        self._forget(_List.OFTEN_GHOSTS, 2 * capacity - sum(sizes[: _List.OFTEN_GHOSTS]))

    def _forget(self, place: _List, num_max: int) -> None:
        """Drop the oldest ghosts of a kind beyond a number."""
        while (num_over := self._sizes[place] - max(0, num_max)) > 0:
            batch = self._queues[place][0]
            if batch.num_gone:
                self._clean(batch)
            oldest = batch.keys[: -num_over - 1 : -1]
            for key in oldest:
                del self._batch_of[key]
            self._drop(batch, oldest)
            self._pop_empty(place)

    def _sweep_if_due(self) -> None:
        """Drop the names of chunks that moved on when they are as many as those that did not."""
        if self._num_named <= 2 * len(self._batch_of) + self.capacity:
            return
        for queue in self._queues:
            for batch in queue:
                self._clean(batch)
            kept = [batch for batch in queue if batch.keys]
            queue.clear()
            queue.extend(kept)

    @override
    def choose(self, count: int, evictable: Evictable) -> Sequence[OffloadKey]:
        num_once = self._sizes[_List.ONCE] - int(self._once_target)
        chosen = self._choose(count, num_once, evictable)
        return [key for _, picks in chosen for _, keys in picks for key in keys]

    @override
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if key in self:
                batch = self._batch_of.pop(key)
                self._sizes[batch.place] -= 1
                batch.num_gone += 1
        for place in (_List.ONCE, _List.OFTEN):
            self._pop_empty(place)

    @override
    def clear(self) -> None:
        self._batch_of.clear()
        for queue in self._queues:
            queue.clear()
        self._sizes = [0] * len(_List)
        self._num_named = 0
        self._once_target = 0.0

    @override
    def __len__(self) -> int:
        return self._sizes[_List.ONCE] + self._sizes[_List.OFTEN]

    @override
    def __contains__(self, key: object) -> bool:
        batch = self._batch_of.get(key)  # type: ignore[call-overload]
        return batch is not None and batch.place <= _List.OFTEN

    @override
    def check(self) -> None:
        sizes = self._sizes
        assert self._num_named == sum(len(b.keys) for queue in self._queues for b in queue)
        assert sum(sizes) == len(self._batch_of) <= 2 * self.capacity
        assert sizes[_List.ONCE] + sizes[_List.ONCE_GHOSTS] <= self.capacity
        assert 0 <= self._once_target <= self.capacity
        for place, queue in zip(_List, self._queues, strict=True):
            live = []
            for batch in queue:
                assert batch.place is place
                mine = [key for key in batch.keys if self._batch_of.get(key) is batch]
                assert len(mine) == len(batch.keys) - batch.num_gone
                live += mine
            assert len(live) == len(set(live)) == sizes[place]
