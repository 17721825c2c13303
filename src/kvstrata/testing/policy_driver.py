"""A caller of policies that speaks of single keys: it keeps the runs as the contract asks."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import EvictionPolicy, RequestTrail, Run, Victim


class PolicyDriver:
    """A tier without bytes: who is there and in which run, nothing else.

    It splits runs wherever a request uses a part, links parents, and drops what the policy names.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        """Start with an empty policy."""
        self.policy = policy
        self._run_of: dict[OffloadKey, Run] = {}

    @property
    def keys(self) -> set[OffloadKey]:
        """The tracked chunks."""
        return set(self._run_of)

    @property
    def num_free(self) -> int:
        """Places that are free."""
        return self.policy.capacity - len(self._run_of)

    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float) -> None:
        """Let a request use chunks, tracked or not."""
        trail.runs, trail.prefix = self.runs_of(keys), list(keys)
        self.policy.access(trail, list(keys), trail.runs, now_s)

    def offer(
        self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float
    ) -> tuple[int, list[OffloadKey], bool]:
        """Offer untracked chunks; return how many came in, who left, and if more were refused."""
        own: dict[Run, None] = {}
        for last in reversed(trail.runs):
            run: Run | None = last
            while run is not None and run.keys and run not in own:  # heads were split off since
                own[run] = None
                run = run.parent
        trail.runs = list(reversed(own))
        answer = self.policy.admit(trail, list(keys), self.num_free, now_s)
        num_admitted, victims, is_refusal = answer
        left = self.drop(victims)
        admitted = list(keys[:num_admitted])
        priorities = trail.key_priority or {}
        for priority, stretch in groupby(admitted, lambda key: priorities.get(key, trail.priority)):
            self._insert(trail, list(stretch), priority, now_s)
        return num_admitted, left, is_refusal

    def _insert(
        self, trail: RequestTrail, keys: list[OffloadKey], priority: int, now_s: float
    ) -> None:
        run = Run(keys, [0] * len(keys), None)
        run.priority, run.pool = priority, trail.pool
        num_here = sum(len(run.keys) for run in trail.runs)
        rest = list(trail.prefix[num_here : num_here + len(keys)])
        if trail.runs and keys[: len(rest)] == rest:  # otherwise there is a gap among them
            run.parent = trail.runs[-1]
            run.parent.num_children += 1
        self._run_of.update(dict.fromkeys(keys, run))
        self.policy.insert(trail, run, now_s)
        trail.runs.append(run)

    def choose(self, count: int) -> list[OffloadKey]:
        """Return the chunks that should leave next, the first to go first."""
        return self.keys_of(self.policy.choose(count))

    @staticmethod
    def keys_of(victims: Iterable[Victim]) -> list[OffloadKey]:
        """Return the chunks of victims in the order in which they leave."""
        return [key for run, count in victims for key in run.keys[-1 : -count - 1 : -1]]

    def drop(self, victims: Iterable[Victim]) -> list[OffloadKey]:
        """Let victims leave, as the policy named them; return their chunks in that order."""
        left = []
        for run, count in victims:
            assert 0 < count <= len(run.keys)
            for _ in range(count):
                left.append(run.keys.pop())
                run.slots.pop()
                assert self._run_of.pop(left[-1]) is run
            if not run.keys:
                self._leave_parent(run)
        return left

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Let chunks leave for another reason; what is not tracked is ignored."""
        for run in self.runs_of(list(keys)):
            self.policy.remove(run)
            for key in run.keys:
                del self._run_of[key]
            run.keys, run.slots = [], []
            self._leave_parent(run)

    def clear(self) -> None:
        """Let everything leave."""
        self.policy.clear()
        for run in set(self._run_of.values()):
            run.keys, run.slots, run.is_dropped = [], [], True
        self._run_of.clear()

    def hold(self, keys: Iterable[OffloadKey]) -> list[Run]:
        """Forbid that these chunks leave; return what `unhold` needs."""
        runs = self.runs_of(list(keys))
        for run in runs:
            run.num_holds += 1
        return runs

    def unhold(self, runs: Iterable[Run]) -> None:
        """Take back a hold, before anything else has changed."""
        for run in runs:
            run.num_holds -= 1

    def runs_of(self, keys: Sequence[OffloadKey]) -> list[Run]:
        """Return the runs that hold exactly the tracked ones of `keys`, split at the edges."""
        runs: list[Run] = []
        at = 0
        while at < len(keys):
            run = self._run_of.get(keys[at])
            if run is None:
                at += 1
                continue
            if start := run.keys.index(keys[at]):
                self._split(run, start)
            num_equal = 0
            for mine, asked in zip(run.keys, keys[at:], strict=False):
                if mine != asked:
                    break
                num_equal += 1
            runs.append(run if num_equal == len(run.keys) else self._split(run, num_equal))
            at += num_equal
        return runs

    def _split(self, run: Run, count: int) -> Run:
        head = Run(run.keys[:count], run.slots[:count], None)
        del run.keys[:count], run.slots[:count]
        head.num_holds, head.priority, head.pool = run.num_holds, run.priority, run.pool
        head.parent, run.parent, head.num_children = run.parent, head, 1
        self._run_of.update(dict.fromkeys(head.keys, head))
        self.policy.split(head, run)
        return head

    @staticmethod
    def _leave_parent(run: Run) -> None:
        if run.parent is not None:
            run.parent.num_children -= 1
            run.parent = None

    def check(self) -> None:
        """Assert that the policy tracks exactly the runs that are there, and is sound."""
        self.policy.check()
        runs = self.policy.runs()
        assert len(runs) == len(set(runs))
        assert set(runs) == set(self._run_of.values())
