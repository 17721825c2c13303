"""What happened to chunks: events for whoever takes them, and counters of removals by reason."""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import OffloadKey

NUM_EVENTS_MAX: Final = 65536

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
        self._medium = medium
        self._lock = threading.Lock()
        self._events: list[OffloadingEvent] = []
        self._counters: Counter[str] = Counter(dict.fromkeys(_COUNTED.values(), 0))
        self._counters["dropped_events"] = 0
        self._counters["broken_files"] = 0

    def note_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Chunks are here now."""
        if keys:
            self._append(OffloadingEvent(EventKind.STORED, keys, self._medium))

    def note_removed(self, keys: Sequence[OffloadKey], reason: RemovalReason) -> None:
        """Chunks are not here any more."""
        if not keys:
            return
        with self._lock:
            self._counters[_COUNTED[reason]] += len(keys)
        self._append(OffloadingEvent(EventKind.REMOVED, keys, self._medium, reason))

    def note_broken(self) -> None:
        """A file of the wrong size was removed, known or not."""
        with self._lock:
            self._counters["broken_files"] += 1

    def note_cleared(self) -> None:
        """All chunks of the namespace are gone."""
        self._append(OffloadingEvent(EventKind.CLEARED, (), self._medium, RemovalReason.CLEARED))

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, oldest first."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def counters(self) -> dict[str, int]:
        """Return totals since start."""
        with self._lock:
            return dict(self._counters)

    def _append(self, event: OffloadingEvent) -> None:
        with self._lock:
            if len(self._events) < NUM_EVENTS_MAX:
                self._events.append(event)
            else:
                self._counters["dropped_events"] += 1
