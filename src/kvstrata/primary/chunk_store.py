"""The chunks in the primary's slots: who comes in, who leaves, and the events of both."""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from kvstrata.core.clock import Clock
from kvstrata.core.errors import ContractError
from kvstrata.core.events import PRIMARY_MEDIUM, EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import EvictionPolicy, RequestTrail, Run, Victim
from kvstrata.primary.retention import Expiry
from kvstrata.primary.run_table import Held, RunTable, Settled

if TYPE_CHECKING:
    from kvstrata.core.tier import ChunkShelf

# Looking up a member of an enum takes as long as a call, and these are needed for each request.
_STORED, _REMOVED, _EVICTED = EventKind.STORED, EventKind.REMOVED, RemovalReason.EVICTED

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


Reservation = tuple[Sequence[OffloadKey], Sequence[int], Sequence[OffloadKey], bool]
"""What a writer got: keys, the slot of each, who was evicted, whether the rest was refused."""


class ChunkStore:
    """Slots, policy and expiry, always changed together.

    It serves requests (through `CPUOffloadingManager`) and promotions alike; a writer is any
    hashable owner.
    """

    def __init__(
        self, num_slots: int, policy: EvictionPolicy, limits: PrimaryLimits, clock: Clock
    ) -> None:
        self.table = RunTable(num_slots, self._on_split)
        self.policy = policy
        self.expiry = Expiry()
        self.clock = clock
        self.reserved_s = 0.0  # when somebody last asked for slots
        self.num_evicted = 0
        self.num_expired = 0
        self.num_refused = 0
        self._num_noted = 0
        self._num_taken = 0
        self._events: deque[OffloadingEvent] = deque(maxlen=limits.num_events_max)
        self.on_removed: Removed = self.note_removed
        """Called with chunks that just left, their slots already free; may be replaced."""
        self.shelves: list[ChunkShelf] = []
        """Told of every chunk that can be loaded or no longer can, before its slot is reused."""

    def _on_split(self, head: Run, tail: Run) -> None:
        self.policy.split(head, tail)
        self.expiry.add(head)

    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey]) -> None:
        """Note that a request uses these chunks, in prefix order, resident or not."""
        runs = self.table.resident_runs(keys)
        trail.runs, trail.prefix = runs, keys
        self.policy.access(trail, keys, runs, self.clock.now_s())

    def reserve(self, keys: list[OffloadKey], owner: Hashable, trail: RequestTrail) -> Reservation:
        """Get slots for these absent, distinct keys, from the first on as far as admitted."""
        table = self.table
        now_s = self.reserved_s = self.clock.now_s()
        runs, num_here = trail.runs, 0
        if runs:
            runs, num_here = _brought_up_to_date(runs)
            trail.runs = runs
        admission = self.policy.admit(trail, keys, len(table.free), now_s)
        num_admitted, victims, is_refusal = admission
        evicted = self._evict(victims) if victims else []
        if num_admitted < len(keys):
            self.num_refused += (len(keys) - num_admitted) if is_refusal else 0
            keys = keys[:num_admitted]
        if not keys:
            return keys, [], evicted, is_refusal
        stretches = [(keys, trail.priority, trail.expires_at_s)]
        if trail.key_priority or trail.key_expires_at_s:
            stretches = _equal_stretches(keys, trail)
        parent = runs[-1] if runs and _continues(trail.prefix, num_here, keys) else None
        slots: list[int] = []
        for stretch, priority, expires_at_s in stretches:
            run = table.reserve(stretch, owner, parent)
            run.priority, run.pool, run.expires_at_s = priority, trail.pool, expires_at_s
            if expires_at_s is not None:
                self.expiry.sweep(2 * len(table) + 64)
                self.expiry.add(run)
            self.policy.insert(trail, run, now_s)
            runs.append(run)
            slots += run.slots
            parent = run
        return keys, slots, evicted, is_refusal

    def reserve_needed(
        self, keys: list[OffloadKey], owner: Hashable, trail: RequestTrail
    ) -> Reservation:
        """Do `reserve` for chunks that a request is about to read.

        A policy may think that they are not worth a place for long; they get one all the same, from
        the chunks that would leave next.
        """
        stored, slots, evicted, is_refusal = self.reserve(keys, owner, trail)
        num_missing = len(keys) - len(stored)
        if not (is_refusal and num_missing):
            return stored, slots, evicted, is_refusal
        for run in trail.runs:
            run.num_holds += 1
        victims = self.policy.choose(num_missing)
        for run in trail.runs:
            run.num_holds -= 1
        gone: list[OffloadKey] = []
        for run, count in victims:
            gone += self.remove(run.keys[-count:], RemovalReason.EVICTED)
        self.num_evicted += len(gone)
        more, more_slots, more_gone, is_refusal = self.reserve(keys[len(stored) :], owner, trail)
        evicted = [*evicted, *gone, *more_gone]
        return [*stored, *more], [*slots, *more_slots], evicted, is_refusal

    def _evict(self, victims: Sequence[Victim]) -> list[OffloadKey]:
        evicted = self.table.cut_tails(victims)
        if evicted:
            self.num_evicted += len(evicted)
            for shelf in self.shelves:
                shelf.withdraw(evicted)
            self.on_removed(evicted, _EVICTED)
        return evicted

    def written_by(
        self, owner: Hashable, keys: Collection[OffloadKey]
    ) -> tuple[list[Run], list[OffloadKey]]:
        """Return the owner's runs that hold exactly what it writes of `keys`, and the rest."""
        for key in keys:
            run = self.table.find(key)
            if run is not None and run.owner is owner and run.keys == keys:
                return [run], []
            break
        return self.table.written_by(owner, keys)

    def settle(
        self, runs: list[Run], failed: Collection[OffloadKey], trail: RequestTrail | None = None
    ) -> Settled:
        """End the writing of runs that `written_by` returned; what arrived can be loaded now."""
        if failed:
            runs = self.table.split_by(runs, failed)
            for run in runs:
                if run.keys[0] in failed and not run.is_dropped:
                    self.policy.remove(run)
        settled = self.table.settle(runs, failed)
        resident, stored, _, _ = settled
        if stored:
            self.note(OffloadingEvent(_STORED, stored, PRIMARY_MEDIUM))
            for shelf in self.shelves:
                for run in resident:
                    shelf.publish(run.keys, run.slots, run.expires_at_s)
            if trail is not None:
                for run in resident:
                    head, trail.last_stored = trail.last_stored, run
                    if head is not None and run.parent is head and self._join(head, run):
                        trail.last_stored = head
        return settled

    def drop_written(self, owner: Hashable, keys: Collection[OffloadKey]) -> None:
        """Forget what the owner writes; its slots stay taken until that has been settled."""
        runs, _ = self.written_by(owner, keys)
        self._drop([run for run in runs if not run.is_dropped], RemovalReason.FAILED)

    def limit_lifetimes(
        self, keys: Collection[OffloadKey], expires_at_s: Mapping[OffloadKey, float]
    ) -> None:
        """Let chunks leave at these times at the latest."""
        for at_s, stretch in groupby(keys, key=expires_at_s.get):
            if at_s is None:
                continue
            for run in self.table.runs_with(stretch):
                if run.expires_at_s is None or at_s < run.expires_at_s:
                    run.expires_at_s = at_s
                    self.expiry.add(run)
                    for shelf in self.shelves if run.owner is None else ():
                        shelf.publish(run.keys, run.slots, at_s)

    def _join(self, head: Run, run: Run) -> bool:
        """Join a request's new run with the one that it stored before, if nothing is in the way."""
        if (
            head.keys
            and not head.is_dropped
            and head.num_children == 1
            and not (run.num_children or run.num_holds or head.num_holds)
            and head.owner is None
            and (head.priority, head.expires_at_s) == (run.priority, run.expires_at_s)
            and self.policy.join(head, run)
        ):
            self.table.join(run)
            return True
        return False

    def hold(self, keys: list[OffloadKey], trail: RequestTrail | None = None) -> Held:
        """Forbid that these resident chunks leave, once for each chunk however often it is named.

        What the request of the trail has just accessed need not be looked for again.

        Raises:
            ContractError: One of them can't be loaded. Nothing is held.
        """
        if trail is not None:
            used, at, num_keys = [], 0, len(keys)
            for run in trail.runs:
                run_keys = run.keys
                end = at + len(run_keys)
                if keys[at:end] != run_keys or run.owner is not None or run.is_dropped:
                    break
                used.append(run)
                at = end
                if at == num_keys:
                    break
            if at == num_keys:
                return self.table.hold(used, keys)
        runs = self.table.resident_runs(keys)
        if len(runs) == 1 and len(runs[0].keys) == len(keys):
            return self.table.hold(runs, keys)
        if sum([len(run.keys) for run in runs]) != len(keys):
            missing = [key for key in keys if not self.is_resident(key)]
            if missing:
                raise ContractError(f"{missing[0].hex()} can't be loaded from the primary")
            keys = list(dict.fromkeys(keys))
            runs = self.table.resident_runs(keys)
        return self.table.hold(runs, keys)

    def is_resident(self, key: OffloadKey) -> bool:
        """Say whether the key can be loaded."""
        run = self.table.find(key)
        return run is not None and run.owner is None

    def remove(self, keys: Collection[OffloadKey], reason: RemovalReason) -> list[OffloadKey]:
        """Drop chunks whatever uses them; return those that were resident."""
        return self._drop(self.table.runs_with(keys), reason)

    def _drop(self, runs: Sequence[Run], reason: RemovalReason) -> list[OffloadKey]:
        for run in runs:
            self.policy.remove(run)
        gone = self.table.drop(runs)
        if gone:
            for shelf in self.shelves:
                shelf.withdraw(gone)
            self.on_removed(gone, reason)
        return gone

    def expire(self) -> None:
        """Drop what is due."""
        due = self.expiry.take_due(self.clock.wall_s())
        if due:
            self.num_expired += len(self._drop(due, RemovalReason.EXPIRED))

    def clear(self) -> None:
        """Drop everything; slots that copies use come back when those are settled."""
        self.policy.clear()
        self.table.drop(self.table.all_runs()[0])
        for shelf in self.shelves:
            shelf.clear()
        self.expiry = Expiry()
        self.note(OffloadingEvent(EventKind.CLEARED, [], PRIMARY_MEDIUM, RemovalReason.CLEARED))

    def note_removed(self, keys: Sequence[OffloadKey], reason: RemovalReason) -> None:
        """Record that chunks left."""
        self._num_noted += 1
        self._events.append(OffloadingEvent(_REMOVED, keys, PRIMARY_MEDIUM, reason))

    def note(self, event: OffloadingEvent) -> None:
        """Record an event; the oldest makes room when nobody takes them."""
        self._num_noted += 1
        self._events.append(event)

    @property
    def num_events(self) -> int:
        """Events waiting to be taken."""
        return len(self._events)

    @property
    def num_events_dropped(self) -> int:
        """Events that made room for others."""
        return self._num_noted - self._num_taken - len(self._events)

    def take_events(self) -> list[OffloadingEvent]:
        """Return and forget the events, oldest first."""
        events = list(self._events)
        self._events.clear()
        self._num_taken += len(events)
        return events

    def check(self) -> None:
        """Assert every invariant. For tests."""
        self.table.check()
        self.policy.check()
        here, _ = self.table.all_runs()
        assert set(self.policy.runs()) == set(here)


def _brought_up_to_date(runs: list[Run]) -> tuple[list[Run], int]:
    """Return a request's runs without those that left, and with the heads split off them since.

    Also returns their number of chunks.
    """
    parent: Run | None = None
    num_chunks = 0
    for run in runs:
        if run.parent is not parent or not run.keys or run.is_dropped:
            break
        num_chunks += len(run.keys)
        parent = run
    else:
        return runs, num_chunks  # one chain from the root, as nearly always
    found: dict[Run, None] = {}
    for last in reversed(runs):
        parent = last
        while parent is not None and parent.keys and not parent.is_dropped and parent not in found:
            found[parent] = None
            parent = parent.parent
    return list(reversed(found)), sum([len(run.keys) for run in found])


def _continues(prefix: Sequence[OffloadKey], num_here: int, keys: list[OffloadKey]) -> bool:
    """Say whether new chunks come right behind all those of the request that are here.

    Otherwise there is a gap among these, and nobody is known to be the parent of the new ones.
    """
    rest = prefix[num_here : num_here + len(keys)]
    return rest == keys or not rest or list(rest) == keys[: len(rest)]


def _equal_stretches(
    keys: list[OffloadKey], trail: RequestTrail
) -> list[tuple[list[OffloadKey], int, float | None]]:
    """Cut keys where priority or lifetime changes; return each stretch with both."""
    priorities, lifetimes = trail.key_priority or {}, trail.key_expires_at_s or {}

    def standing(key: OffloadKey) -> tuple[int, float | None]:
        return (
            priorities.get(key, trail.priority),
            lifetimes.get(key, trail.expires_at_s),
        )

    return [(list(stretch), *shared) for shared, stretch in groupby(keys, key=standing)]
