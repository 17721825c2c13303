"""The chunks in the primary's slots: who comes in, who leaves, and the events of both."""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from kvstrata.core.clock import Clock
from kvstrata.core.events import PRIMARY_MEDIUM, EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import EvictionPolicy, RequestTrail
from kvstrata.primary.request_state import RequestState
from kvstrata.primary.retention import Expiry, Protection
from kvstrata.primary.slots import Settled, SlotTable

Removed = Callable[[Sequence[OffloadKey], RemovalReason], None]


@dataclass(frozen=True, slots=True)
class PrimaryLimits:
    """Bounds of the primary's side tables.

    Attributes:
        num_protected_max: Chunks protected for preempted requests.
        protect_s: How long, if the request neither resumes nor ends.
        num_events_max: Events kept for `take_events`; older ones are dropped and counted.
        tokens_per_chunk: For hints that count tokens.
    """

    num_protected_max: int
    protect_s: float = 60.0
    num_events_max: int = 65536
    tokens_per_chunk: int = 1


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots that a writer got; `keys[i]` goes to `slots[i]`. `evicted` made room."""

    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    evicted: Sequence[OffloadKey]
    is_refusal: bool = False


class ChunkStore:
    """Slots, policy, protection and expiry, always changed together.

    It serves requests (through `CPUOffloadingManager`) and promotions alike; a writer is any
    hashable owner.
    """

    def __init__(
        self, num_slots: int, policy: EvictionPolicy, limits: PrimaryLimits, clock: Clock
    ) -> None:
        self.table = SlotTable(num_slots)
        self.policy = policy
        self.protection = Protection(limits.num_protected_max, limits.protect_s)
        self.expiry = Expiry()
        self.clock = clock
        self.num_evicted = 0
        self.num_expired = 0
        self.num_refused = 0
        self.num_events_dropped = 0
        self._num_events_max = limits.num_events_max
        self._events: deque[OffloadingEvent] = deque()
        self.on_removed: Removed = self.note_removed
        """Called with chunks that just left, their slots already free; may be replaced."""

    def evictable(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those that may leave now, in order."""
        keys = self.table.evictable(keys)
        return self.protection.filter(keys) if self.protection else keys

    def reserve(
        self,
        keys: Sequence[OffloadKey],
        owner: Hashable,
        trail: RequestTrail,
        expires_at_s: float | None = None,
    ) -> Reservation:
        """Get slots for these absent, distinct keys, from the first on as far as admitted."""
        table = self.table
        num_admitted, victims, is_refusal = self.policy.admit(
            trail, keys, table.num_free, self.evictable, self.clock.now_s()
        )
        if victims:
            table.evict(victims)
            self.num_evicted += len(victims)
            if self.expiry:
                self.expiry.forget(victims)
            self.on_removed(victims, RemovalReason.EVICTED)
        if num_admitted < len(keys):
            self.num_refused += (len(keys) - num_admitted) if is_refusal else 0
            keys = keys[:num_admitted]
        slots = table.reserve(keys, owner)
        if expires_at_s is not None:
            self.expiry.set(keys, expires_at_s)
        return Reservation(keys, slots, victims, is_refusal)

    def settle(
        self, keys: Collection[OffloadKey], owner: Hashable, failed: Collection[OffloadKey]
    ) -> Settled:
        """End what the owner writes; what arrived can be loaded from now on.

        Raises:
            ContractError: The owner does not write one of the keys. Nothing changed.
        """
        settled = self.table.settle(keys, owner, failed)
        if settled.failed:
            self.policy.remove(settled.failed)
            self.expiry.forget(settled.failed)
        if settled.stored:
            self.note(OffloadingEvent(EventKind.STORED, settled.stored, PRIMARY_MEDIUM))
        return settled

    def remove(self, keys: Collection[OffloadKey], reason: RemovalReason) -> list[OffloadKey]:
        """Drop chunks whatever uses them; return those that were resident."""
        gone = self.table.drop(keys)
        self.policy.remove(keys)
        self.expiry.forget(keys)
        if gone:
            self.on_removed(gone, reason)
        return gone

    def expire(self) -> None:
        """Drop what is due, and end protection that has lasted long enough."""
        if self.protection:
            self.protection.expire(self.clock.now_s())
        if self.expiry:
            due = self.expiry.take_due(self.clock.wall_s())
            if due:
                self.num_expired += len(self.remove(due, RemovalReason.EXPIRED))

    def protect(self, state: RequestState) -> None:
        """Keep the resident chunks of a preempted request."""
        keys = dict.fromkeys([*state.touched, *state.offered])
        here = [key for key in keys if key in self.table]
        self.protection.protect(state, here, self.clock.now_s())

    def clear(self) -> None:
        """Drop everything; slots that copies use come back when those are settled."""
        self.protection.clear()
        self.table.drop(self.table.all_keys())
        self.policy.clear()
        self.expiry = Expiry()
        self.note(OffloadingEvent(EventKind.CLEARED, [], PRIMARY_MEDIUM, RemovalReason.CLEARED))

    def note_removed(self, keys: Sequence[OffloadKey], reason: RemovalReason) -> None:
        """Record that chunks left."""
        self.note(OffloadingEvent(EventKind.REMOVED, keys, PRIMARY_MEDIUM, reason))

    def note(self, event: OffloadingEvent) -> None:
        """Record an event; the oldest makes room when nobody takes them."""
        if len(self._events) >= self._num_events_max:
            self._events.popleft()
            self.num_events_dropped += 1
        self._events.append(event)

    @property
    def num_events(self) -> int:
        """Events waiting to be taken."""
        return len(self._events)

    def take_events(self) -> list[OffloadingEvent]:
        """Return and forget the events, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def num_evictable(self) -> int:
        """Count the resident chunks that could leave now. Scans what is protected, not all."""
        num_kept = sum(1 for key in list(self.protection) if self.table.is_unpinned(key))
        num_pinned = self.table.num_pinned - self.table.num_doomed
        return self.table.num_resident - num_pinned - num_kept

    def check(self) -> None:
        """Assert every invariant. For tests."""
        self.table.check()
        self.policy.check()
        assert len(self.policy) == self.table.num_keys
        assert all(key in self.policy for key in self.table.all_keys())
        assert all(key in self.table for key in self.expiry)
