"""Chunks that are held back from eviction or dropped early: protection and expiry."""

import heapq
from collections.abc import Iterable, Iterator, Sequence

from kvstrata.core.keys import OffloadKey
from kvstrata.primary.request_state import RequestState


class Protection:
    """Chunks of preempted requests, kept until the request resumes, finishes, or time is up.

    Bounded: what goes past `num_max` chunks is not protected.
    """

    def __init__(self, num_max: int, duration_s: float) -> None:
        self._num_max = num_max
        self._duration_s = duration_s
        self._holders: dict[OffloadKey, int] = {}  # how many requests protect it
        self._until_s: dict[RequestState, float] = {}  # in order of time

    def __len__(self) -> int:
        return len(self._holders)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._holders)

    def protect(self, state: RequestState, keys: Iterable[OffloadKey], now_s: float) -> None:
        """Protect chunks for a request, from the first on as far as there is room."""
        self.release(state)
        for key in keys:
            if key not in self._holders and len(self._holders) >= self._num_max:
                break
            self._holders[key] = self._holders.get(key, 0) + 1
            state.protected.append(key)
        if state.protected:
            self._until_s[state] = now_s + self._duration_s

    def release(self, state: RequestState) -> None:
        """End the protection that the request asked for."""
        if self._until_s.pop(state, None) is None:
            return
        for key in state.protected:
            count = self._holders.pop(key) - 1
            if count:
                self._holders[key] = count
        state.protected.clear()

    def expire(self, now_s: float) -> None:
        """End what has lasted long enough."""
        while self._until_s:
            state, until_s = next(iter(self._until_s.items()))
            if until_s > now_s:
                return
            self.release(state)

    def filter(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those that are not protected."""
        holders = self._holders
        return [key for key in keys if key not in holders] if holders else keys

    def clear(self) -> None:
        """End all protection."""
        for state in list(self._until_s):
            self.release(state)


class Expiry:
    """When chunks must be gone, in wall time; a chunk stored again gets its new time."""

    def __init__(self) -> None:
        self._at_s: dict[OffloadKey, float] = {}
        self._heap: list[tuple[float, OffloadKey]] = []

    def __len__(self) -> int:
        return len(self._at_s)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._at_s)

    def set(self, keys: Iterable[OffloadKey], at_s: float) -> None:
        """Let chunks expire at a time."""
        for key in keys:
            self._at_s[key] = at_s
            heapq.heappush(self._heap, (at_s, key))

    def get(self, key: OffloadKey) -> float | None:
        """Return when the chunk expires; None for never."""
        return self._at_s.get(key)

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Note that chunks left."""
        for key in keys:
            self._at_s.pop(key, None)
        if len(self._heap) > 2 * len(self._at_s) + 64:
            self._heap = [(at_s, key) for key, at_s in self._at_s.items()]
            heapq.heapify(self._heap)

    def take_due(self, wall_s: float) -> list[OffloadKey]:
        """Return and forget the chunks whose time has come."""
        due = []
        while self._heap and self._heap[0][0] <= wall_s:
            at_s, key = heapq.heappop(self._heap)
            if self._at_s.get(key) == at_s:
                del self._at_s[key]
                due.append(key)
        return due
