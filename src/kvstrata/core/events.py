"""Residency events: which chunks came to, or left, which medium, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvstrata.core.keys import OffloadKey

PRIMARY_MEDIUM = "cpu"


class EventKind(Enum):
    """What happened."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # everything in the medium; `keys` is empty


class RemovalReason(Enum):
    """Why a chunk is no longer there."""

    EVICTED = "evicted"
    DEMOTED = "demoted"  # left this medium and is in a lower tier
    CLEARED = "cleared"
    EXPIRED = "expired"
    FAILED = "failed"
    CORRUPT = "corrupt"
    DELETED = "deleted"
    EXTERNAL = "external"  # somebody else removed it


@dataclass(slots=True)
class OffloadingEvent:
    """A change of residency that has already happened; it never announces an attempt.

    `medium` is `"cpu"` for the primary and the tier's name otherwise. `reason` is set exactly on
    REMOVED and CLEARED.
    """

    kind: EventKind
    keys: Sequence[OffloadKey]
    medium: str
    reason: RemovalReason | None = None
