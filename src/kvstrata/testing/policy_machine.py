"""Any order of calls into an eviction policy, compared with what its contract says of them."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import EvictionPolicy, RequestTrail
from kvstrata.testing.chunks import chain

PROMPTS = tuple(tuple(chain(path)) for path in ("abc", "abd", "aef", "ghi", "g"))
KEYS = sorted({key for prompt in PROMPTS for key in prompt})
NUM_TRAILS_MAX = 4

busy_keys = st.sets(st.sampled_from(KEYS), max_size=4)
indexes = st.integers(0, NUM_TRAILS_MAX - 1)
lengths = st.integers(1, 3)


class _Request:
    """A trail, the prompt behind it, and how much of it the policy has been told."""

    def __init__(self, prompt: Sequence[OffloadKey], priority: int) -> None:
        self.prompt = prompt
        self.trail = RequestTrail(priority)
        self.known: Sequence[OffloadKey] = ()  # accessed so far
        self.has_lost = False  # one of its chunks left since then


class PolicyMachine(RuleBasedStateMachine):
    """Nine chunks of five prompts, four requests at a time, a policy with room for a few chunks."""

    make: Callable[[int], EvictionPolicy]

    @initialize(capacity=st.integers(1, 5))
    def start(self, capacity: int) -> None:
        """Make the policy."""
        self.policy = self.make(capacity)
        self.capacity = capacity
        self.now_s = 0.0
        self.tracked: set[OffloadKey] = set()
        self.users: dict[OffloadKey, set[_Request]] = {key: set() for key in KEYS}
        self.last_user: dict[OffloadKey, _Request] = {}
        self.edges: set[tuple[OffloadKey, OffloadKey]] = set()  # parent, child: both tracked
        self.requests: list[_Request] = []

    @rule(prompt=st.sampled_from(PROMPTS), priority=st.sampled_from((10, 50, 90)))
    def new_request(self, prompt: Sequence[OffloadKey], priority: int) -> None:
        """Start a request; the oldest one makes room."""
        self.requests = [*self.requests[1 - NUM_TRAILS_MAX :], _Request(prompt, priority)]

    @rule(by_s=st.sampled_from((0.0, 0.5, 10.0, 1_000.0)))
    def advance(self, by_s: float) -> None:
        """Let time pass."""
        self.now_s += by_s

    @precondition(lambda self: self.requests)
    @rule(index=indexes, num_keys=lengths)
    def access(self, index: int, num_keys: int) -> None:
        """Tell of a use of a request's first chunks."""
        request = self.requests[index % len(self.requests)]
        keys = request.prompt[:num_keys]
        self.policy.access(request.trail, list(keys), self.now_s)
        request.known = max(request.known, keys, key=len)
        request.has_lost = request.has_lost and len(keys) < len(request.known)
        for key in keys:
            self.users[key].add(request)
            self.last_user[key] = request
        self._link(keys)

    @precondition(lambda self: self.requests)
    @rule(index=indexes, num_keys=lengths, busy=busy_keys)
    def admit(self, index: int, num_keys: int, busy: set[OffloadKey]) -> None:
        """Offer what a request has not stored yet."""
        request = self.requests[index % len(self.requests)]
        keys = [key for key in request.prompt[:num_keys] if key not in self.tracked]
        if not keys:
            return
        num_free = self.capacity - len(self.tracked)
        allowed: set[OffloadKey] = set()

        def evictable(asked: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
            answer = [key for key in asked if key in self.tracked and key not in busy]
            allowed.update(answer)
            return answer

        admission = self.policy.admit(request.trail, list(keys), num_free, evictable, self.now_s)
        num_admitted, victims = admission.num_admitted, list(admission.victims)
        assert 0 <= num_admitted <= len(keys)
        assert len(victims) >= num_admitted - num_free
        assert set(victims) <= allowed, "a victim that was not asked for, or may not leave"
        own = {key for key in victims if self.last_user.get(key) is request}
        assert not own, "a victim that the request itself used last"
        self._check_order(victims, busy)
        self._forget(victims)
        self.tracked.update(keys[:num_admitted])
        for key in keys[:num_admitted]:
            self.users[key] = {request}
            self.last_user[key] = request
        self._link(request.known)

    @rule(count=st.integers(0, 6), busy=busy_keys)
    def choose(self, count: int, busy: set[OffloadKey]) -> None:
        """Ask who should leave next; nobody does."""

        def evictable(asked: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
            return [key for key in asked if key in self.tracked and key not in busy]

        chosen = list(self.policy.choose(count, evictable))
        assert chosen == list(self.policy.choose(count, evictable))
        free_to_leave = self.tracked - busy
        assert set(chosen) <= free_to_leave
        if self.policy.is_tree:
            free_to_leave = self._leavable(free_to_leave)
        assert len(chosen) == min(count, len(free_to_leave))
        self._check_order(chosen, busy)

    @rule(keys=st.sets(st.sampled_from(KEYS), max_size=3))
    def remove(self, keys: set[OffloadKey]) -> None:
        """Chunks leave for other reasons, tracked or not."""
        self.policy.remove(sorted(keys))
        self._forget(keys)

    @rule()
    def clear(self) -> None:
        """Everything leaves."""
        self.policy.clear()
        self._forget(set(self.tracked))

    @invariant()
    def tracks_what_it_was_told(self) -> None:
        """The policy agrees on who is there, and finds itself sound."""
        if not hasattr(self, "policy"):
            return
        self.policy.check()
        assert len(self.policy) == len(self.tracked)
        assert {key for key in KEYS if key in self.policy} == self.tracked

    def _link(self, keys: Sequence[OffloadKey]) -> None:
        pairs = pairwise(keys)
        self.edges |= {pair for pair in pairs if self.tracked.issuperset(pair)}

    def _forget(self, keys: Sequence[OffloadKey] | set[OffloadKey]) -> None:
        self.tracked.difference_update(keys)
        self.edges = {edge for edge in self.edges if self.tracked.issuperset(edge)}
        for request in self.requests:
            request.has_lost = request.has_lost or not set(keys).isdisjoint(request.known)

    def _leavable(self, free_to_leave: set[OffloadKey]) -> set[OffloadKey]:
        """Return those of a tree that could all leave, children first."""
        kept = self.tracked - free_to_leave
        while more := {p for p, child in self.edges if child in kept} - kept:
            kept |= more
        return self.tracked - kept

    def _check_order(self, leaving: Sequence[OffloadKey], busy: set[OffloadKey]) -> None:
        """Children leave before parents: all in a tree, else those that one request alone used."""
        assert len(set(leaving)) == len(leaving)
        place = {key: i for i, key in enumerate(leaving)}
        never = len(leaving)
        if self.policy.is_tree:
            for parent, child in self.edges:
                assert parent not in place or place.get(child, never) < place[parent]
            return
        for request in self.requests:
            if request.has_lost:
                continue  # a chunk that came back was told without its place
            alone = [key for key in request.known if self.users[key] == {request}]
            alone = [key for key in alone if key in self.tracked and key not in busy]
            places = [place.get(key, never) for key in alone]
            assert places == sorted(places, reverse=True), "a head left before its tail"
