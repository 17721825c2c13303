"""Chunks held as bytes: a bounded number of them, in order of use, each with its end of life."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.tiers.chunk_format import NEVER_S
from kvstrata.tiers.event_log import EventLog
from kvstrata.tiers.recency import RecencyOrder, Trail

_COUNTED: Final = (RemovalReason.EVICTED, RemovalReason.EXPIRED, RemovalReason.DELETED)


class HeldChunk(NamedTuple):
    """A chunk's header and payload as they were stored, and when it must be gone."""

    header: bytes
    payload: memoryview
    expires_at_s: float


class HeldChunks:
    """Who is here, who leaves for whom, and the events of both. Not thread-safe."""

    def __init__(self, capacity: int, medium: str, idle_s: float | None) -> None:
        """Start empty; chunks that nobody used for `idle_s` leave, unless that is None."""
        self._idle_s = idle_s
        self._used_at_s: dict[OffloadKey, float] = {}
        self.order = RecencyOrder()
        self.events = EventLog(medium)
        self._capacity = capacity
        self._chunks: dict[OffloadKey, HeldChunk] = {}
        self._expiries: list[tuple[float, OffloadKey]] = []  # a heap; may name what has left
        self._removed: Counter[RemovalReason] = Counter()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: object) -> bool:
        return key in self._chunks

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._chunks)

    def get(self, key: OffloadKey) -> HeldChunk | None:
        """Return a chunk; None if it is not here."""
        return self._chunks.get(key)

    def expires_at_s(self, key: OffloadKey) -> float:
        """Return when a chunk must be gone, in seconds since 1970; of one not here, infinity."""
        chunk = self._chunks.get(key)
        return NEVER_S if chunk is None else chunk.expires_at_s

    def make_room(self, trail: Trail) -> bool:
        """Let a chunk leave for one of this request if need be; False if none may."""
        if len(self._chunks) < self._capacity:
            return True
        victims = self.order.choose(1, trail, lambda _key: True)
        self.remove(victims, RemovalReason.EVICTED)
        return bool(victims)

    def catch_up(self) -> Iterator[None]:
        """Let uses count that were noted, some at each step of the iterator."""
        for keys, at_s in self.order.catch_up():
            if at_s is not None:
                self._used_at_s.update(dict.fromkeys(keys, at_s))
            yield

    def add(self, key: OffloadKey, chunk: HeldChunk, trail: Trail, wall_s: float) -> None:
        """Take in a chunk that is not here, of a request; there must be room."""
        self._used_at_s[key] = wall_s
        self._chunks[key] = chunk
        self.order.add(trail, key)
        heapq.heappush(self._expiries, (chunk.expires_at_s, key))
        self.events.note(EventKind.STORED, [key])

    def remove(self, keys: Iterable[OffloadKey], reason: RemovalReason) -> None:
        """Let chunks leave, as far as they are here."""
        gone = [key for key in keys if self._chunks.pop(key, None)]
        self.order.remove(gone)
        for key in gone:
            del self._used_at_s[key]
        self._removed[reason] += len(gone)
        self.events.note(EventKind.REMOVED, gone, reason)

    def expire(self, wall_s: float) -> None:
        """Let chunks leave whose time is over."""
        while self._expiries and self._expiries[0][0] <= wall_s:
            _, key = heapq.heappop(self._expiries)
            chunk = self._chunks.get(key)
            if chunk and chunk.expires_at_s <= wall_s:
                self.remove([key], RemovalReason.EXPIRED)
        if self._idle_s is not None and not self.order.is_behind:
            before_s, used_at_s = wall_s - self._idle_s, self._used_at_s
            idle = self.order.unused(lambda key: used_at_s[key] <= before_s)
            self.remove(idle, RemovalReason.EXPIRED)

    def clear(self) -> None:
        """Forget everything."""
        if self._chunks:
            self.events.note(EventKind.CLEARED, reason=RemovalReason.CLEARED)
        self._chunks.clear()
        self._expiries.clear()
        self._used_at_s.clear()
        self.order.clear()

    def counters(self) -> Mapping[str, int]:
        """Return totals of removals by reason."""
        return {f"{why.value}_chunks": self._removed[why] for why in _COUNTED}

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self._chunks) <= self._capacity
        assert all(key in self.order for key in self._chunks)
        assert len(self.order) == len(self._chunks) == len(self._used_at_s)
        self.order.check()
