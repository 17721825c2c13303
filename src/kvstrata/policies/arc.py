"""Adaptive replacement (ARC): balances what was used once against what was used again."""

from collections import deque
from collections.abc import Collection, Sequence
from itertools import groupby

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, EvictionPolicy, RequestTrail, Run, RunQueue, Victim

_ONCE, _OFTEN = 0, 1  # indices of the lists: T1 and T2, and of their ghosts, B1 and B2


class _Turn:
    """What the policy remembers of a request: ghosts that it brings back, and its last use."""

    __slots__ = ("at_s", "ghosts")

    def __init__(self, at_s: float) -> None:
        self.ghosts: Collection[OffloadKey] = ()
        self.at_s = at_s


class _Standing:
    """Of a run: its list, its number of chunks as counted there, the request that used it last."""

    __slots__ = ("place", "size", "turn")

    def __init__(self, place: int, size: int, turn: object) -> None:
        self.place = place
        self.size = size
        self.turn = turn


class _Batch:
    """Ghosts that came together, the last to be forgotten first; `num_gone` came back."""

    __slots__ = ("keys", "num_gone", "place")

    def __init__(self, place: int, keys: list[OffloadKey]) -> None:
        self.place = place
        self.keys = keys
        self.num_gone = 0


class _Ghosts:
    """Keys of chunks that were evicted from the two lists, the oldest forgotten first."""

    def __init__(self) -> None:
        self.batch_of: dict[OffloadKey, _Batch] = {}
        self.sizes = [0, 0]
        self._queues: tuple[deque[_Batch], deque[_Batch]] = (deque(), deque())

    def add(self, place: int, keys: list[OffloadKey]) -> None:
        """Remember evicted chunks, in prefix order: the last one left first."""
        if not self.batch_of.keys().isdisjoint(keys):  # came back without being admitted here
            self.pull([key for key in keys if key in self.batch_of])
        batch = _Batch(place, keys)
        self.batch_of.update(dict.fromkeys(keys, batch))
        self._queues[place].append(batch)
        self.sizes[place] += len(keys)

    def pull(self, keys: Collection[OffloadKey]) -> None:
        """Forget ghosts that come back."""
        for key in keys:
            batch = self.batch_of.pop(key)
            batch.num_gone += 1
            self.sizes[batch.place] -= 1

    def trim(self, place: int, num_max: int) -> None:
        """Forget the oldest ghosts of a list beyond a number."""
        queue, batch_of = self._queues[place], self.batch_of
        while (num_over := self.sizes[place] - max(0, num_max)) > 0:
            batch = queue[0]
            if batch.num_gone:
                batch.keys = [key for key in batch.keys if batch_of.get(key) is batch]
                batch.num_gone = 0
            oldest = batch.keys[-num_over:]
            for key in oldest:
                del batch_of[key]
            del batch.keys[-num_over:]
            self.sizes[place] -= len(oldest)
            if not batch.keys:
                queue.popleft()

    def check(self) -> None:
        """Assert every invariant."""
        assert sum(self.sizes) == len(self.batch_of)
        for place, queue in enumerate(self._queues):
            live = [k for b in queue for k in b.keys if self.batch_of.get(k) is b]
            assert len(live) == self.sizes[place]


class ArcPolicy(EvictionPolicy):
    """ARC after Megiddo and Modha, for the runs of a request instead of single pages."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._lists = (RunQueue(), RunQueue())
        self._sizes = [0, 0]
        self._ghosts = _Ghosts()
        self._once_target = 0.0  # p

    def _turn_of(self, trail: RequestTrail, now_s: float) -> _Turn:
        turn = trail.state
        if not isinstance(turn, _Turn):
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
        turn = self._turn_of(trail, now_s)
        turn.at_s = now_s
        self._use(turn, runs)

    def _use(self, turn: _Turn, runs: Sequence[Run]) -> None:
        """Make runs the youngest; those that another request used before were used often."""
        lists, sizes = self._lists, self._sizes
        for run in reversed(runs):
            standing = run.state
            assert isinstance(standing, _Standing)
            lists[standing.place].remove(run)
            sizes[standing.place] -= standing.size
            standing.size = len(run.keys)
            if standing.turn is not turn:
                standing.turn, standing.place = turn, _OFTEN
            lists[standing.place].add_youngest(run)
            sizes[standing.place] += standing.size

    @override
    def admit(
        self, trail: RequestTrail, keys: Sequence[OffloadKey], num_free: int, now_s: float
    ) -> Admission:
        turn, ghosts = self._turn_of(trail, now_s), self._ghosts
        turn.ghosts = ()
        if not ghosts.batch_of.keys().isdisjoint(keys):
            turn.ghosts = dict.fromkeys(filter(ghosts.batch_of.__contains__, keys))
            self._adapt(turn.ghosts)
        victims: list[Victim] = []
        num_found, num_missing = 0, len(keys) - num_free
        if num_missing > 0:
            num_once = self._sizes[_ONCE] + len(keys) - len(turn.ghosts) - int(self._once_target)
            victims = self._choose(num_missing, num_once, trail.runs)
            num_found = sum([count for _, count in victims])
            self._bury(victims)
        num_admitted = min(len(keys), num_free + num_found)
        if turn.ghosts:
            admitted = set(keys[:num_admitted])
            turn.ghosts = [key for key in turn.ghosts if key in admitted]
            ghosts.pull(turn.ghosts)
        self._trim(num_admitted - len(turn.ghosts))
        return Admission(num_admitted, victims)

    def _trim(self, num_new: int) -> None:
        """Keep tracked chunks, so many new ones, and ghosts within twice the capacity."""
        num_once, num_often = self._sizes
        num_once += num_new
        self._ghosts.trim(_ONCE, self.capacity - num_once)
        num_left = 2 * self.capacity - num_once - num_often - self._ghosts.sizes[_ONCE]
        self._ghosts.trim(_OFTEN, num_left)

    def _adapt(self, keys: Collection[OffloadKey]) -> None:
        """Shift the balance towards the list whose ghosts are asked for."""
        num_once, num_often = self._ghosts.sizes
        for place, group in groupby(self._ghosts.batch_of[key].place for key in keys):
            num = len(list(group))
            if place == _ONCE:
                self._once_target += num * max(1.0, num_often / num_once)
            else:
                self._once_target -= num * max(1.0, num_once / num_often)
            self._once_target = min(float(self.capacity), max(0.0, self._once_target))

    def _bury(self, victims: list[Victim]) -> None:
        """Turn victims into ghosts."""
        for run, count in victims:
            standing = run.state
            assert isinstance(standing, _Standing)
            place = standing.place
            left = len(run.keys) - count
            self._sizes[place] -= standing.size - left
            standing.size = left
            self._ghosts.add(place, run.keys[-count:])
            if not left:
                self._lists[place].remove(run)
                run.state = None

    def _choose(self, count: int, num_once: int, kept: Sequence[Run]) -> list[Victim]:
        """Name victims: up to `num_once` of those used once, then others, then any."""
        num_once = min(count, max(0, num_once))
        once, num_found = self._oldest(_ONCE, num_once, kept)
        often, num_more = self._oldest(_OFTEN, count - num_found, kept)
        if num_found == num_once and num_found + num_more < count:
            once, _ = self._oldest(_ONCE, count - num_more, kept)
        return once + often

    def _oldest(self, place: int, count: int, kept: Sequence[Run]) -> tuple[list[Victim], int]:
        """Name up to `count` chunks of a list that may leave, the oldest first, and how many."""
        victims: list[Victim] = []
        run, num_left = self._lists[place].oldest, count
        while run is not None and num_left:
            if not run.num_holds and run.owner is None and run not in kept:
                num_taken = min(num_left, len(run.keys))
                victims.append((run, num_taken))
                num_left -= num_taken
            run = run.younger
        return victims, count - num_left

    @override
    def insert(self, trail: RequestTrail, run: Run, now_s: float) -> None:
        turn = self._turn_of(trail, now_s)
        num_ghosts = sum([key in turn.ghosts for key in run.keys]) if turn.ghosts else 0
        place = _OFTEN if 2 * num_ghosts > len(run.keys) else _ONCE
        run.state = _Standing(place, len(run.keys), turn)
        self._lists[place].add_youngest(run)
        self._sizes[place] += len(run.keys)
        self._trim(0)  # a run that was moved here was not admitted
        together = [r for r in trail.runs if isinstance(r.state, _Standing)]
        if turn.at_s < now_s or any(r.state.place == place for r in together):  # type: ignore[attr-defined]
            turn.at_s = now_s
            self._use(turn, together)

    @override
    def split(self, head: Run, tail: Run) -> None:
        standing = tail.state
        assert isinstance(standing, _Standing)
        head.state = _Standing(standing.place, len(head.keys), standing.turn)
        standing.size -= len(head.keys)
        self._lists[standing.place].add_younger(head, than=tail)

    @override
    def join(self, head: Run, tail: Run) -> bool:
        first, second = head.state, tail.state
        assert isinstance(first, _Standing)
        assert isinstance(second, _Standing)
        if first.place != second.place:
            return False
        self._lists[first.place].remove(tail)
        first.size += second.size
        return True

    @override
    def choose(self, count: int) -> Sequence[Victim]:
        return self._choose(count, self._sizes[_ONCE] - int(self._once_target), ())

    @override
    def remove(self, run: Run) -> None:
        standing = run.state
        assert isinstance(standing, _Standing)
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
        assert sum(self._sizes) + len(self._ghosts.batch_of) <= 2 * self.capacity
        for place, queue in enumerate(self._lists):
            size = 0
            for run in queue.check():
                standing = run.state
                assert isinstance(standing, _Standing)
                assert standing.place == place
                assert standing.size >= len(run.keys)  # more where the caller dropped a part
                size += standing.size
            assert size == self._sizes[place]
