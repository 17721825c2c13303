"""Adaptive replacement (ARC): balances what was used once against what was used again."""

from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, EvictionPolicy, RequestTrail, Run, RunQueue, Victim

_ONCE, _OFTEN = 0, 1  # indices of the lists: T1 and T2, and of their ghosts, B1 and B2


class _Turn:
    """What the policy remembers of a request: where its new chunks go, and its last use."""

    __slots__ = ("at_s", "place")

    def __init__(self, at_s: float) -> None:
        self.place = _ONCE
        self.at_s = at_s


class _Standing:
    """Of a run: its list, its number of chunks as counted there, the request that used it last."""

    __slots__ = ("place", "size", "turn")

    def __init__(self, place: int, size: int, turn: object) -> None:
        self.place = place
        self.size = size
        self.turn = turn


class _Batch:
    """Ghosts that left together, in prefix order: their keys begin the text, all equally long."""

    __slots__ = ("first", "num_keys", "place", "text")

    def __init__(self, place: int, first: bytes, num_keys: int, text: bytes) -> None:
        self.place = place
        self.first = first  # the key it is found by
        self.num_keys = num_keys
        self.text = text

    @property
    def width(self) -> int:
        """Length of a key."""
        return len(self.first)

    def num_common(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of its keys, from the first on, are those of a path."""
        text, width = self.text, self.width
        if text.startswith(b"".join(keys[: self.num_keys])):
            return min(len(keys), self.num_keys)
        for i, key in enumerate(keys[: self.num_keys]):
            if text[i * width : (i + 1) * width] != key:
                return i
        return min(len(keys), self.num_keys)


_num_keys_of = attrgetter("num_keys")

_Found = list[tuple[int, int, _Batch]]
"""Where ghosts begin in a path, how many they are, and their batch."""


class _Ghosts:
    """Chunks that were evicted from the two lists, the oldest forgotten first.

    What left together came from one path and comes back along it, so a batch is found by its first
    key; ghosts cost next to nothing for each chunk.
    """

    def __init__(self) -> None:
        self.batch_of: dict[bytes, _Batch] = {}
        self.sizes = [0, 0]
        self._queues: tuple[deque[_Batch], deque[_Batch]] = (deque(), deque())
        self._num_empty = 0  # batches in the queues of which nothing is left

    def add(self, place: int, keys: list[OffloadKey]) -> None:
        """Remember evicted chunks, in prefix order: the last one left first."""
        text, first, num_keys = b"".join(keys), keys[0], len(keys)
        if len(text) != num_keys * len(first):  # not equally long: each on its own
            for key in reversed(keys):
                self.add(place, [key])
            return
        batch = self.batch_of[first] = _Batch(place, first, num_keys, text)
        self._queues[place].append(batch)
        self.sizes[place] += num_keys

    def find(self, keys: Sequence[OffloadKey]) -> _Found:
        """Return the ghosts on a path, of which nothing is stored."""
        found: _Found = []
        batch_of, at = self.batch_of, 0
        while at < len(keys):
            batch = batch_of.get(keys[at])
            if batch is None:
                rest = keys[at:] if at else keys
                if batch_of.keys().isdisjoint(rest):
                    break
                at += next(i for i, key in enumerate(rest) if key in batch_of)
            else:
                count = batch.num_common(keys[at:])
                found.append((at, count, batch))
                at += count
        return found

    def pull(self, found: _Found, num_keys: int) -> int:
        """Forget those of the ghosts that are among the first keys of the path; count them."""
        num_pulled = 0
        for start, count, batch in found:
            count = min(count, num_keys - start)  # noqa: PLW2901
            if count <= 0:
                break
            num_pulled += count
            self.sizes[batch.place] -= count
            if self.batch_of.get(batch.first) is batch:
                del self.batch_of[batch.first]
            batch.num_keys -= count
            batch.text = batch.text[count * batch.width :]
            batch.first = batch.text[: batch.width]
            if batch.num_keys:
                self.batch_of[batch.first] = batch
            else:
                self._num_empty += 1
        if self._num_empty > 64 + sum(map(len, self._queues)) // 2:
            self._sweep()
        return num_pulled

    def _sweep(self) -> None:
        """Drop empty batches; comes after as many pulls as there are others."""
        once, often = (deque(filter(_num_keys_of, queue)) for queue in self._queues)
        self._queues, self._num_empty = (once, often), 0

    def trim(self, place: int, num_max: int) -> None:
        """Forget the oldest ghosts of a list beyond a number."""
        num_over = self.sizes[place] - max(0, num_max)
        if num_over <= 0:
            return
        self.sizes[place] -= num_over
        queue, batch_of = self._queues[place], self.batch_of
        while num_over >= (batch := queue[0]).num_keys:
            num_over -= batch.num_keys
            if not batch.num_keys:
                self._num_empty -= 1
            elif batch_of.get(batch.first) is batch:
                del batch_of[batch.first]
            queue.popleft()
            if not num_over:
                return
        batch.num_keys -= num_over

    def check(self) -> None:
        """Assert every invariant."""
        empty = [batch for queue in self._queues for batch in queue if not batch.num_keys]
        assert len(empty) == self._num_empty
        for place, queue in enumerate(self._queues):
            assert self.sizes[place] == sum(batch.num_keys for batch in queue)
            assert all(len(batch.text) >= batch.num_keys * batch.width for batch in queue)
        for first, batch in self.batch_of.items():
            assert batch.first == first
            assert batch in self._queues[batch.place]


class ArcPolicy(EvictionPolicy):
    """ARC after Megiddo and Modha, for the runs of a request instead of single pages."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._lists = (RunQueue(), RunQueue())
        self._sizes = [0, 0]
        self._ghosts = _Ghosts()
        self._once_target = 0.0  # p

    def _turn_of(self, trail: RequestTrail, now_s: float) -> _Turn:
        turn: _Turn | None = trail.state
        if turn is None:
            turn = trail.state = _Turn(now_s)
        return turn

    @override
    def access(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        runs: Sequence[Run],
        now_s: float,
    ) -> None:
        turn: _Turn | None = trail.state
        if turn is not None:
            turn.at_s, turn.place = now_s, _ONCE
        else:
            turn = trail.state = _Turn(now_s)
        self._use(turn, runs)

    def _use(self, turn: _Turn, runs: Sequence[Run]) -> None:
        """Make runs the youngest; those that another request used before were used often."""
        lists, sizes = self._lists, self._sizes
        for run in reversed(runs):
            standing: _Standing = run.state
            place, size = standing.place, len(run.keys)
            sizes[place] -= standing.size
            if place == _OFTEN or standing.turn is turn:
                lists[place].make_youngest(run)
            else:
                lists[place].remove(run)
                place = standing.place = _OFTEN
                lists[place].add_youngest(run)
            standing.turn, standing.size = turn, size
            sizes[place] += size

    @override
    def admit(
        self, trail: RequestTrail, keys: Sequence[OffloadKey], num_free: int, now_s: float
    ) -> Admission:
        turn: _Turn = trail.state or self._turn_of(trail, now_s)
        ghosts, num_keys = self._ghosts, len(keys)
        found = ghosts.find(keys)
        num_ghosts = 0
        if found:
            num_ghosts = sum([count for _, count, _ in found])
            self._adapt(found)
        victims: list[Victim] = []
        num_admitted, num_missing = num_keys, num_keys - num_free
        if num_missing > 0:
            num_once = self._sizes[_ONCE] + num_keys - num_ghosts - int(self._once_target)
            victims, num_found = self._choose(num_missing, num_once, trail.runs)
            self._bury(victims)
            num_admitted = num_free + num_found
        if found:
            num_ghosts = ghosts.pull(found, num_admitted)
        turn.place = _OFTEN if 2 * num_ghosts > num_admitted else _ONCE
        self._trim(num_admitted - num_ghosts)
        return num_admitted, victims, False

    def _trim(self, num_new: int) -> None:
        """Keep tracked chunks, so many new ones, and ghosts within twice the capacity."""
        ghosts, capacity, (num_once, num_often) = self._ghosts, self.capacity, self._sizes
        num_once += num_new
        sizes = ghosts.sizes
        if sizes[_ONCE] > capacity - num_once:
            ghosts.trim(_ONCE, capacity - num_once)
        num_often_max = 2 * capacity - num_once - num_often - sizes[_ONCE]
        if sizes[_OFTEN] > num_often_max:
            ghosts.trim(_OFTEN, num_often_max)

    def _adapt(self, found: _Found) -> None:
        """Shift the balance towards the list whose ghosts are asked for."""
        num_once, num_often = self._ghosts.sizes
        for _, num, batch in found:
            if batch.place == _ONCE:
                self._once_target += num * max(1.0, num_often / num_once)
            else:
                self._once_target -= num * max(1.0, num_once / num_often)
            self._once_target = min(float(self.capacity), max(0.0, self._once_target))

    def _bury(self, victims: list[Victim]) -> None:
        """Turn victims into ghosts."""
        sizes, ghosts = self._sizes, self._ghosts
        for run, count in victims:
            standing: _Standing = run.state
            keys, place = run.keys, standing.place
            sizes[place] -= standing.size
            num_left = len(keys) - count
            if num_left:
                sizes[place] += num_left
                standing.size = num_left
                keys = keys[-count:]
            else:
                self._lists[place].remove(run)
                run.state = None
            ghosts.add(place, keys)

    def _choose(self, count: int, num_once: int, kept: Sequence[Run]) -> tuple[list[Victim], int]:
        """Name victims, and count them: up to `num_once` used once, then others, then any."""
        num_once = min(count, max(0, num_once))
        victims, num_found = self._oldest(_ONCE, num_once, kept)
        if num_found < count:
            often, num_more = self._oldest(_OFTEN, count - num_found, kept)
            if num_found == num_once and num_found + num_more < count:
                victims, num_found = self._oldest(_ONCE, count - num_more, kept)
            victims += often
            num_found += num_more
        return victims, num_found

    def _oldest(self, place: int, count: int, kept: Sequence[Run]) -> tuple[list[Victim], int]:
        """Name up to `count` chunks of a list that may leave, the oldest first, and how many."""
        victims: list[Victim] = []
        run, num_left = self._lists[place].oldest, count
        while num_left and run is not None:
            if not run.num_holds and run not in kept:
                num_taken = min(num_left, len(run.keys))
                victims.append((run, num_taken))
                num_left -= num_taken
            run = run.younger
        return victims, count - num_left

    @override
    def insert(self, trail: RequestTrail, run: Run, now_s: float) -> None:
        turn: _Turn = trail.state or self._turn_of(trail, now_s)
        place, size, sizes = turn.place, len(run.keys), self._sizes
        run.state = _Standing(place, size, turn)
        self._lists[place].add_youngest(run)
        sizes[place] += size
        if sizes[0] + sizes[1] + sum(self._ghosts.sizes) > 2 * self.capacity:
            self._trim(0)  # a run that was moved here was not admitted
        is_later, turn.at_s = turn.at_s < now_s, now_s
        for used in trail.runs:
            if is_later or (used.state is not None and used.state.place == place):
                self._use(turn, [r for r in trail.runs if r.state is not None])
                break

    @override
    def split(self, head: Run, tail: Run) -> None:
        standing: _Standing = tail.state
        head.state = _Standing(standing.place, len(head.keys), standing.turn)
        standing.size -= len(head.keys)
        self._lists[standing.place].add_younger(head, than=tail)

    @override
    def join(self, head: Run, tail: Run) -> bool:
        first: _Standing = head.state
        second: _Standing = tail.state
        if first.place != second.place:
            return False
        self._lists[first.place].remove(tail)
        first.size += second.size
        return True

    @override
    def choose(self, count: int) -> Sequence[Victim]:
        victims, _ = self._choose(count, self._sizes[_ONCE] - int(self._once_target), ())
        return victims

    @override
    def remove(self, run: Run) -> None:
        standing: _Standing = run.state
        self._lists[standing.place].remove(run)
        self._sizes[standing.place] -= standing.size
        run.state = None

    @override
    def clear(self) -> None:
        self._lists = (RunQueue(), RunQueue())
        self._sizes = [0, 0]
        self._ghosts = _Ghosts()
        self._once_target = 0.0

    @override
    def runs(self) -> list[Run]:
        return [run for queue in self._lists for run in queue.check()]

    @override
    def check(self) -> None:
        super().check()
        self._ghosts.check()
        assert 0 <= self._once_target <= self.capacity
        assert sum(self._sizes) + sum(self._ghosts.sizes) <= 2 * self.capacity
        for place, queue in enumerate(self._lists):
            size = 0
            for run in queue.check():
                standing: _Standing = run.state
                assert standing.place == place
                assert standing.size >= len(run.keys)  # more where the caller dropped a part
                size += standing.size
            assert size == self._sizes[place]
