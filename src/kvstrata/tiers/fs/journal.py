"""What happened to chunks: events for whoever takes them, and counters of removals by reason."""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.tiers.event_log import EventLog

_COUNTED: Final = {
    RemovalReason.EVICTED: "evicted_chunks",
    RemovalReason.EXPIRED: "expired_chunks",
    RemovalReason.DELETED: "deleted_chunks",
    RemovalReason.EXTERNAL: "external_chunks",
    RemovalReason.CORRUPT: "removed_corrupt_chunks",
}


class Journal:
    """Events not taken yet, bounded, and totals since start. Thread: any."""

    def __init__(self, medium: str) -> None:
        self._lock = threading.Lock()
        self._events = EventLog(medium)
        self._counters: Counter[str] = Counter(dict.fromkeys(_COUNTED.values(), 0))
        self._counters["broken_files"] = 0

    def note_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Chunks are here now."""
        with self._lock:
            self._events.note(EventKind.STORED, keys)

    def note_removed(self, keys: Sequence[OffloadKey], reason: RemovalReason) -> None:
        """Chunks are not here any more."""
        with self._lock:
            self._counters[_COUNTED[reason]] += len(keys)
            self._events.note(EventKind.REMOVED, keys, reason)

    def note_broken(self) -> None:
        """A file of the wrong size was removed, known or not."""
        with self._lock:
            self._counters["broken_files"] += 1

    def note_cleared(self) -> None:
        """All chunks of the namespace are gone."""
        with self._lock:
            self._events.note(EventKind.CLEARED, reason=RemovalReason.CLEARED)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, oldest first."""
        with self._lock:
            return self._events.take()

    def counters(self) -> dict[str, int]:
        """Return totals since start."""
        with self._lock:
            return {**self._counters, "dropped_events": self._events.num_dropped}
