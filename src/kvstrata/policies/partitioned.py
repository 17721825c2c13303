"""Priority classes and shares of tenants around any policy."""

from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import Admission, EvictionPolicy, RequestTrail, Run, Victim
from kvstrata.core.request import PRIORITY_DEFAULT

Partition = tuple[str | None, int]
"""Pool and priority."""

COMMON: Partition = (None, PRIORITY_DEFAULT)


class PartitionedPolicy(EvictionPolicy):
    """One inner policy per pool and priority class; requests without hints share one.

    Chunks of a lower class leave before those of a higher one, and a new chunk never displaces one
    of a higher class. Two limits keep that from choking the tier: more than `num_priority_max`
    chunks above the default class count as default ones, and a pool never holds more than its
    quota. Within its quota a pool may displace others' chunks, of the fullest pool first.
    """

    def __init__(
        self,
        common: EvictionPolicy,
        make: Callable[[int], EvictionPolicy],
        *,
        num_priority_max: int | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        """Wrap a policy.

        Args:
            common: Has the requests without class and pool; may track runs of such already. Its
                capacity is that of the whole.
            make: Makes an inner policy for so many chunks.
            num_priority_max: Chunks that may be above the default class; None for all.
            quotas: Chunks that each pool may hold.
        """
        super().__init__(common.capacity)
        self._make = make
        self._common = common
        self._parts: dict[Partition, EvictionPolicy] = {COMMON: common}
        self._num_used: dict[str | None, int] = {}
        self._num_high = 0
        self._num_high_max = self.capacity if num_priority_max is None else num_priority_max
        self._quotas = dict(quotas or {})
        self.is_tree = common.is_tree

    def _part(self, pool: str | None, priority: int) -> EvictionPolicy:
        part = self._parts.get((pool, priority))
        if part is None:
            size = self._quotas.get(pool, self.capacity) if pool is not None else self.capacity
            part = self._parts[pool, priority] = self._make(max(1, size))
        return part

    def _count(self, run: Run, change: int) -> None:
        if run.pool is not None:
            self._num_used[run.pool] = self._num_used.get(run.pool, 0) + change
        if run.priority > PRIORITY_DEFAULT:
            self._num_high += change

    @override
    def access(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        runs: Sequence[Run],
        now_s: float,
    ) -> None:
        groups: dict[Partition, list[Run]] = {(trail.pool, trail.priority): []}
        priority = trail.priority
        for run in runs:
            if run.priority <= PRIORITY_DEFAULT < priority and self._is_full(len(run.keys)):
                priority = PRIORITY_DEFAULT  # for those behind it too: of no use without it
            if run.priority < priority:
                self._raise(trail, run, priority, now_s)
            groups.setdefault((run.pool, run.priority), []).append(run)
        for partition, group in groups.items():
            self._part(*partition).access(trail, keys, group, now_s)

    def _is_full(self, num_more: int) -> bool:
        """Say whether so many chunks more can't be above the default class."""
        return self._num_high + num_more > self._num_high_max

    def _raise(self, trail: RequestTrail, run: Run, priority: int, now_s: float) -> None:
        """Move a run to a higher class, because of a request that uses it."""
        self.remove(run)
        run.priority, run.state = priority, None
        self._count(run, len(run.keys))
        self._insert(trail, run, now_s)

    @override
    def admit(
        self, trail: RequestTrail, keys: Sequence[OffloadKey], num_free: int, now_s: float
    ) -> Admission:
        for run in trail.runs:
            run.num_holds += 1
        try:
            return self._admit(trail, keys, num_free, now_s)
        finally:
            for run in trail.runs:
                run.num_holds -= 1

    def _admit(
        self, trail: RequestTrail, keys: Sequence[OffloadKey], num_free: int, now_s: float
    ) -> Admission:
        pool, priority, num_wanted = trail.pool, trail.priority, len(keys)
        taken: list[Victim] = []
        if pool is not None and pool in self._quotas:
            num_over = self._num_used.get(pool, 0) + num_wanted - self._quotas[pool]
            own = [part for part in self._parts if part[0] == pool and part[1] <= priority]
            taken += self._take(own, num_over)
            num_wanted -= max(0, num_over - _num_chunks(taken))
        lower = [part for part in self._parts if part[1] < priority]
        taken += self._take(lower, num_wanted - num_free - _num_chunks(taken))
        num_free += _num_chunks(taken)
        own_part = self._part(pool, priority)
        answer = own_part.admit(trail, keys[: max(0, num_wanted)], num_free, now_s)
        num_admitted, own_victims, is_refusal = answer
        for run, count in own_victims:
            self._count(run, -count)
        victims = [*taken, *own_victims]
        if num_admitted < num_wanted and not is_refusal:
            peers = [part for part in self._parts if part[1] == priority and part[0] != pool]
            more = self._take(peers, num_wanted - num_admitted)
            num_admitted += _num_chunks(more)
            victims += more
            taken += more
        self._forget(taken)
        return num_admitted, victims, is_refusal or num_wanted < len(keys)

    def _take(self, parts: list[Partition], count: int) -> list[Victim]:
        """Choose victims, lowest class first, then the fullest pool; hold them until `_forget`.

        An inner policy that forgets a run at once would look for its parent among those that may
        leave, while the run is still there.
        """
        victims: list[Victim] = []
        for partition in sorted(parts, key=self._rank):
            if count <= 0:
                break
            part = self._parts[partition]
            for run, num_chunks in part.choose(count):
                victims.append((run, num_chunks))
                count -= num_chunks
                self._count(run, -num_chunks)
                run.num_holds += 1
        return victims

    def _forget(self, victims: Sequence[Victim]) -> None:
        for run, num_chunks in victims:
            run.num_holds -= 1
            if num_chunks == len(run.keys):
                self._parts[run.pool, run.priority].remove(run)

    def _rank(self, partition: Partition) -> tuple[int, float]:
        pool, priority = partition
        if pool is None:
            return priority, 0.0
        return priority, -self._num_used.get(pool, 0) / max(1, self._quotas.get(pool, 1))

    @override
    def insert(self, trail: RequestTrail, run: Run, now_s: float) -> None:
        parent = run.parent
        has_lower_parent = parent is not None and parent.priority < run.priority
        if run.priority > PRIORITY_DEFAULT and (
            self._is_full(len(run.keys)) or (has_lower_parent and not trail.key_priority)
        ):
            run.priority = PRIORITY_DEFAULT
        self._count(run, len(run.keys))
        self._insert(trail, run, now_s)

    def _insert(self, trail: RequestTrail, run: Run, now_s: float) -> None:
        """Insert a run where it belongs, beside those of the request that are there too."""
        runs, partition = trail.runs, (run.pool, run.priority)
        trail.runs = [r for r in runs if r is not run and (r.pool, r.priority) == partition]
        self._part(*partition).insert(trail, run, now_s)
        trail.runs = runs

    @override
    def split(self, head: Run, tail: Run) -> None:
        self._part(tail.pool, tail.priority).split(head, tail)

    @override
    def join(self, head: Run, tail: Run) -> bool:
        if (head.pool, head.priority) != (tail.pool, tail.priority):
            return False
        return self._part(tail.pool, tail.priority).join(head, tail)

    @override
    def choose(self, count: int) -> Sequence[Victim]:
        """A run is named once its children of other classes have left, not in the same call."""
        victims: list[Victim] = []
        for partition in sorted(self._parts, key=self._rank):
            victims += self._parts[partition].choose(count - _num_chunks(victims))
        return victims

    @override
    def remove(self, run: Run) -> None:
        self._part(run.pool, run.priority).remove(run)
        self._count(run, -len(run.keys))

    @override
    def clear(self) -> None:
        for part in self._parts.values():
            part.clear()
        self._num_used.clear()
        self._num_high = 0

    @override
    def runs(self) -> list[Run]:
        parts = sorted(self._parts, key=self._rank)
        return [run for partition in parts for run in self._parts[partition].runs()]

    @override
    def check(self) -> None:
        super().check()
        for part in self._parts.values():
            part.check()
        runs = self.runs()
        assert self._num_high == sum(len(r.keys) for r in runs if r.priority > PRIORITY_DEFAULT)
        for pool, num_used in self._num_used.items():
            assert num_used == sum(len(run.keys) for run in runs if run.pool == pool)
            assert num_used <= self._quotas.get(pool or "", self.capacity)


def _num_chunks(victims: Sequence[Victim]) -> int:
    return sum(count for _, count in victims)
