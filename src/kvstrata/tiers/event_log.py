"""A tier's residency events until they are taken, few of them and within a bound."""

from collections.abc import Sequence
from typing import Final

from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import OffloadKey

NUM_KEYS_MAX: Final = 262_144


class EventLog:
    """Chunks that come, or leave for one reason, one behind the other are one event.

    Whoever takes thousands of chunks pays for a few events. Not thread-safe.
    """

    def __init__(self, medium: str, num_keys_max: int = NUM_KEYS_MAX) -> None:
        """Hold events of this medium, with at most so many keys; more are dropped and counted."""
        self.num_dropped = 0
        self._medium = medium
        self._num_keys_max = num_keys_max
        self._num_keys = 0
        self._noted: list[tuple[EventKind, RemovalReason | None, list[OffloadKey]]] = []

    def note(
        self, kind: EventKind, keys: Sequence[OffloadKey] = (), reason: RemovalReason | None = None
    ) -> None:
        """Take an event in; one about no chunks, except CLEARED, is none."""
        if not keys and kind is not EventKind.CLEARED:
            return
        if self._num_keys + max(1, len(keys)) > self._num_keys_max:
            self.num_dropped += 1
            return
        self._num_keys += max(1, len(keys))
        if self._noted and self._noted[-1][:2] == (kind, reason):
            self._noted[-1][2].extend(keys)
        else:
            self._noted.append((kind, reason, list(keys)))

    def take(self) -> list[OffloadingEvent]:
        """Return and forget the events, oldest first."""
        noted, self._noted, self._num_keys = self._noted, [], 0
        return [OffloadingEvent(kind, keys, self._medium, reason) for kind, reason, keys in noted]
