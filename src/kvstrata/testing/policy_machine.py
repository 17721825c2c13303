"""Any order of calls into an eviction policy, compared with what its contract says of them."""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import EvictionPolicy, RequestTrail, Run
from kvstrata.testing.chunks import chain
from kvstrata.testing.policy_driver import PolicyDriver

PROMPTS = tuple(tuple(chain(path)) for path in ("abc", "abd", "aef", "ghi", "g"))
KEYS = sorted({key for prompt in PROMPTS for key in prompt})
NUM_REQUESTS_MAX = 4

busy_keys = st.sets(st.sampled_from(KEYS), max_size=4)
indexes = st.integers(0, NUM_REQUESTS_MAX - 1)
lengths = st.integers(1, 3)


class _Request:
    """A trail, the prompt behind it, and how much of it the policy has been told."""

    def __init__(self, prompt: Sequence[OffloadKey], priority: int) -> None:
        self.prompt = prompt
        self.trail = RequestTrail()
        self.trail.priority = priority
        self.known: Sequence[OffloadKey] = ()  # accessed so far
        self.kept: set[OffloadKey] = set()  # accessed last, and stored since then
        self.has_lost = False  # one of its chunks left since then, or is missing among them


class PolicyMachine(RuleBasedStateMachine):
    """Nine chunks of five prompts, four requests at a time, a policy with room for a few chunks."""

    make: Callable[[int], EvictionPolicy]

    @initialize(capacity=st.integers(1, 5))
    def start(self, capacity: int) -> None:
        """Make the policy."""
        self.driver = PolicyDriver(self.make(capacity))
        self.now_s = 0.0
        self.users: dict[OffloadKey, set[_Request]] = {key: set() for key in KEYS}
        self.requests: list[_Request] = []

    @rule(prompt=st.sampled_from(PROMPTS), priority=st.sampled_from((10, 50, 90)))
    def new_request(self, prompt: Sequence[OffloadKey], priority: int) -> None:
        """Start a request; the oldest one makes room."""
        self.requests = [*self.requests[1 - NUM_REQUESTS_MAX :], _Request(prompt, priority)]

    @rule(by_s=st.sampled_from((0.0, 0.5, 10.0, 1_000.0)))
    def advance(self, by_s: float) -> None:
        """Let time pass."""
        self.now_s += by_s

    @precondition(lambda self: self.requests)
    @rule(index=indexes, num_keys=lengths)
    def access(self, index: int, num_keys: int) -> None:
        """Let a request use its first chunks."""
        request = self.requests[index % len(self.requests)]
        keys = request.prompt[:num_keys]
        self.driver.access(request.trail, keys, self.now_s)
        request.known = max(request.known, keys, key=len)
        request.kept = set(keys)
        are_here = [key in self.driver.keys for key in keys]
        has_gap = are_here != sorted(are_here, reverse=True)
        request.has_lost = has_gap or (request.has_lost and len(keys) < len(request.known))
        for key in keys:
            self.users[key].add(request)

    @precondition(lambda self: self.requests)
    @rule(index=indexes, num_keys=lengths, busy=busy_keys)
    def offer(self, index: int, num_keys: int, busy: set[OffloadKey]) -> None:
        """Offer what is not stored yet of a request."""
        request, tracked = self.requests[index % len(self.requests)], self.driver.keys
        keys = [key for key in request.prompt[:num_keys] if key not in tracked]
        if not keys:
            return
        held = self.driver.hold(busy)
        used = {key for key in request.kept if request in self.users[key]}
        own = used if not request.has_lost else set()
        num_free, edges = self.driver.num_free, self._edges()
        num_admitted, left, is_refusal = self.driver.offer(request.trail, keys, self.now_s)
        self.driver.unhold(held)
        assert 0 <= num_admitted <= len(keys)
        assert num_admitted <= num_free + len(left)
        assert num_admitted >= min(len(keys), num_free) or is_refusal
        assert not set(left) & busy, "a victim that is held"
        assert not set(left) & own, "a victim of the request itself"
        self._check_order(left, tracked - busy, edges)
        self._note_loss(left)
        for key in keys[:num_admitted]:
            self.users[key] = {request}
            request.kept.add(key)

    @rule(count=st.integers(0, 6), busy=busy_keys)
    def choose(self, count: int, busy: set[OffloadKey]) -> None:
        """Ask who should leave next; nobody does."""
        held = self.driver.hold(busy)
        chosen = self.driver.choose(count)
        assert chosen == self.driver.choose(count), "asking changed the answer"
        free_to_leave, edges = self.driver.keys - busy, self._edges()
        surely_free = free_to_leave
        if self.driver.policy.is_tree:
            surely_free = self._leavable(free_to_leave - self._between_classes(), edges)
            free_to_leave = self._leavable(free_to_leave, edges)
        assert set(chosen) <= free_to_leave
        assert min(count, len(surely_free)) <= len(chosen) <= count
        self._check_order(chosen, self.driver.keys - busy, edges)
        self.driver.unhold(held)

    @rule(count=st.integers(1, 6))
    def demote(self, count: int) -> None:
        """Let the chosen leave as a caller of `choose` does it: by `remove`, whole or in part."""
        chosen = self.driver.choose(count)
        self.driver.remove(chosen)
        self._note_loss(chosen)

    @rule(keys=st.sets(st.sampled_from(KEYS), max_size=3))
    def remove(self, keys: set[OffloadKey]) -> None:
        """Let chunks leave for other reasons, tracked or not."""
        self.driver.remove(sorted(keys))
        self._note_loss(sorted(keys))

    @rule()
    def clear(self) -> None:
        """Let everything leave."""
        self._note_loss(sorted(self.driver.keys))
        self.driver.clear()

    @invariant()
    def tracks_what_it_was_told(self) -> None:
        """The policy agrees on who is there, and finds itself sound."""
        if hasattr(self, "driver"):
            self.driver.check()

    def _edges(self) -> dict[OffloadKey, list[OffloadKey]]:
        """Return the first chunks of the children of each chunk, by what runs say of themselves."""
        children: dict[OffloadKey, list[OffloadKey]] = {}
        for run in self.driver.policy.runs():
            parent: Run | None = run.parent
            if parent is not None and parent.keys:
                children.setdefault(parent.keys[-1], []).append(run.keys[0])
            for head, tail in zip(run.keys, run.keys[1:], strict=False):
                children.setdefault(head, []).append(tail)
        return children

    def _between_classes(self) -> set[OffloadKey]:
        """Return the last chunks of runs with a child of another class, which may have to wait."""
        return {
            run.parent.keys[-1]
            for run in self.driver.policy.runs()
            if run.parent is not None
            and run.parent.keys
            and (run.pool, run.priority) != (run.parent.pool, run.parent.priority)
        }

    def _leavable(
        self, free_to_leave: set[OffloadKey], edges: dict[OffloadKey, list[OffloadKey]]
    ) -> set[OffloadKey]:
        """Return those of a tree that could all leave, children first."""
        kept = self.driver.keys - free_to_leave
        while more := {key for key in edges if kept.intersection(edges[key])} - kept:
            kept |= more
        return free_to_leave - kept

    def _note_loss(self, keys: Sequence[OffloadKey]) -> None:
        for request in self.requests:
            own = request.kept.union(request.known)
            request.has_lost = request.has_lost or not own.isdisjoint(keys)

    def _check_order(
        self,
        leaving: Sequence[OffloadKey],
        free_to_leave: set[OffloadKey],
        edges: dict[OffloadKey, list[OffloadKey]],
    ) -> None:
        """Children leave before parents: all in a tree, else those that one request alone used."""
        assert len(set(leaving)) == len(leaving)
        place = {key: i for i, key in enumerate(leaving)}
        never = len(leaving)
        if self.driver.policy.is_tree:
            for parent in leaving:
                for child in edges.get(parent, []):
                    assert place.get(child, never) < place[parent], "a parent left before its child"
            return
        for request in self.requests:
            if request.has_lost:
                continue  # a chunk that came back was told without its place
            alone = [key for key in request.known if self.users[key] == {request}]
            places = [place.get(key, never) for key in alone if key in free_to_leave]
            assert places == sorted(places, reverse=True), "a head left before its tail"
