"""What can be served: published chunks by key, leased while they are read."""

import math
import threading
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.keys import OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.tier import ChunkShelf

WANTED_MAX: Final = 65_536
STEPPING_S: Final = 1.0  # a manager that asked for wanted chunks this recently is at work
DENIED_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Copy:
    """One published chunk: its slot, the generation that the slot had, and when it expires."""

    slot: int
    generation: int
    expires_at_s: float | None = None


@dataclass(eq=False, slots=True)
class Lease:
    """Chunks that one reader reads until `expires_s`; after that they may leave under it."""

    holder: str
    expires_s: float
    copies: dict[OffloadKey, Copy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShelfLimits:
    """Chunks that one holder may lease at a time; chunks parked for all, and how long."""

    num_leased_max: int
    num_parked_max: int
    park_s: float


class ShelfListener(Protocol):
    """Is told of every change, in the order of changes, under the shelf's lock: it never blocks."""

    def came(self, keys: Sequence[OffloadKey]) -> None:
        """Note that these chunks can be served."""
        ...

    def left(self, keys: Sequence[OffloadKey]) -> None:
        """Note that they can't any more."""
        ...


class Shelf(ChunkShelf):
    """An index of published chunks, with leases.

    Whoever reads a leased chunk asks `holds` after the copy: a slot's generation changes when its
    chunk is withdrawn, so a copy that outlived its chunk is found out whatever became of the lease.

    Thread: any. Blocks: for a short lock that is never held across I/O or a copy.
    """

    def __init__(self, slots: SlotView, clock: Clock, limits: ShelfLimits) -> None:
        """Start empty."""
        self.slots = slots
        self._clock = clock
        self._limits = limits
        self.listener: ShelfListener | None = None
        self._lock = threading.Lock()
        self._index: dict[OffloadKey, int] = {}
        self._keys: list[OffloadKey | None] = [None] * slots.num_slots
        self._generations = array("Q", bytes(8 * slots.num_slots))
        self._expiry: dict[OffloadKey, float] = {}  # of those that expire
        self._checksums: dict[int, tuple[int, bytes]] = {}
        self._leases: set[Lease] = set()
        self._num_leases: Counter[OffloadKey] = Counter()
        self._parked: dict[tuple[str, OffloadKey], float] = {}  # until when; oldest first
        self._wanted: dict[OffloadKey, None] = {}
        self._denied: dict[OffloadKey, float] = {}
        self._taken_s = -STEPPING_S

    @override
    def publish(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        expires_at_s: float | None = None,
    ) -> None:
        index, key_of, generations = self._index, self._keys, self._generations
        with self._lock:
            for key, slot in zip(keys, slots, strict=True):
                if key in index:
                    self._drop(key)
                former = key_of[slot]
                if former is not None:
                    self._drop_all([former])
                generations[slot] += 1
                index[key] = slot
                key_of[slot] = key
            if expires_at_s is not None:
                self._expiry.update(dict.fromkeys(keys, expires_at_s))
            if self.listener is not None:
                self.listener.came(keys)
            for key in keys if self._wanted or self._denied else ():
                self._wanted.pop(key, None)
                self._denied.pop(key, None)

    @override
    def withdraw(self, keys: Iterable[OffloadKey]) -> None:
        with self._lock:
            self._drop_all(keys)

    @override
    def clear(self) -> None:
        with self._lock:
            self._drop_all(list(self._index))
            self._wanted.clear()
            self._parked.clear()

    def _drop(self, key: OffloadKey) -> bool:
        slot = self._index.pop(key, None)
        if slot is None:
            return False
        self._keys[slot] = None
        self._generations[slot] += 1
        self._expiry.pop(key, None)
        return True

    def _is_readable(self, key: OffloadKey) -> bool:
        if key not in self._index:
            return False
        return not self._expiry or self._clock.wall_s() < self._expiry.get(key, math.inf)

    def _drop_all(self, keys: Iterable[OffloadKey]) -> None:
        gone = [key for key in keys if self._drop(key)]
        if gone and self.listener is not None:
            self.listener.left(gone)

    @override
    def leased(self) -> Collection[OffloadKey]:
        with self._lock:
            self._expire()
            keys = dict.fromkeys(self._num_leases) | dict.fromkeys(key for _, key in self._parked)
            return [key for key in keys if key in self._index]

    @override
    def park(self, keys: Sequence[OffloadKey], reader: str) -> int:
        with self._lock:
            self._expire()
            until_s, num_parked = self._clock.now_s() + self._limits.park_s, 0
            for key in keys:
                has_room = len(self._parked) < self._limits.num_parked_max
                if key in self._index and (has_room or (reader, key) in self._parked):
                    self._parked.pop((reader, key), None)
                    self._parked[reader, key] = until_s
                    num_parked += 1
            return num_parked

    def unpark(self, key: OffloadKey, reader: str) -> None:
        """Note that the reader has fetched the chunk."""
        with self._lock:
            self._parked.pop((reader, key), None)

    @override
    def take_wanted(self) -> Sequence[OffloadKey]:
        with self._lock:
            self._taken_s = self._clock.now_s()
            wanted = list(self._wanted)
            self._wanted.clear()
            return wanted

    @override
    def deny(self, keys: Iterable[OffloadKey]) -> None:
        with self._lock:
            now_s = self._clock.now_s()
            for key in keys:
                self._denied[key] = now_s + DENIED_S
            while len(self._denied) > WANTED_MAX:
                del self._denied[next(iter(self._denied))]

    def present(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Say which of the keys are published."""
        with self._lock:
            return [self._is_readable(key) for key in keys]

    def want(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Ask the manager to bring chunks up; say for which it is worth waiting.

        False where it has just said that it has none, where it does not ask for wanted chunks, and
        where too many are wanted already.
        """
        with self._lock:
            now_s = self._clock.now_s()
            if now_s - self._taken_s > STEPPING_S:
                return [False] * len(keys)
            return [self._want(key, now_s) for key in keys]

    def _want(self, key: OffloadKey, now_s: float) -> bool:
        denied_s = self._denied.get(key)
        if denied_s is not None:
            if now_s < denied_s:
                return False
            del self._denied[key]
        if len(self._wanted) >= WANTED_MAX:
            return False
        self._wanted[key] = None
        return True

    def lease(self, keys: Iterable[OffloadKey], holder: str, lease_s: float) -> Lease:
        """Lease the published ones of the keys, in their order, as far as the holder's limit goes.

        The lease is to be released, and ends by itself after `lease_s`.
        """
        with self._lock:
            self._expire()
            lease = Lease(holder, self._clock.now_s() + lease_s)
            room = self._limits.num_leased_max - sum(
                len(other.copies) for other in self._leases if other.holder == holder
            )
            for key in keys:
                if key in lease.copies or not self._is_readable(key):
                    continue
                if len(lease.copies) >= room:
                    break
                slot = self._index[key]
                lease.copies[key] = Copy(slot, self._generations[slot], self._expiry.get(key))
            if lease.copies:
                self._leases.add(lease)
                self._num_leases.update(lease.copies.keys())
            return lease

    def holds(self, copy: Copy) -> bool:
        """Say whether the slot still holds what it held when it was leased."""
        return self.hold([copy])[0]

    def hold(self, copies: Iterable[Copy]) -> list[bool]:
        """Say of each of many what `holds` says of one."""
        with self._lock:
            return [self._generations[copy.slot] == copy.generation for copy in copies]

    def checksum(self, copy: Copy) -> bytes | None:
        """Return the checksum that was kept of this chunk, if any."""
        generation, checksum = self._checksums.get(copy.slot, (-1, b""))
        return checksum if generation == copy.generation else None

    def keep_checksum(self, copy: Copy, checksum: bytes) -> bool:
        """Keep a checksum for the next reader if, as in `holds`, the slot still holds its chunk."""
        with self._lock:
            is_good = self._generations[copy.slot] == copy.generation
            if is_good:
                self._checksums[copy.slot] = copy.generation, checksum
            return is_good

    def release(self, lease: Lease) -> None:
        """End a lease; one that ended already is ignored."""
        with self._lock:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        if lease in self._leases:
            self._leases.remove(lease)
            self._num_leases -= Counter(lease.copies.keys())

    def _expire(self) -> None:
        if self._leases:
            now_s = self._clock.now_s()
            for lease in [lease for lease in self._leases if lease.expires_s <= now_s]:
                self._end(lease)
        if self._parked:
            now_s = self._clock.now_s()
            while self._parked and next(iter(self._parked.values())) <= now_s:
                del self._parked[next(iter(self._parked))]

    def published(self) -> list[OffloadKey]:
        """Return all that can be served."""
        with self._lock:
            return list(self._index)

    @property
    def num_published(self) -> int:
        """Chunks that can be served."""
        return len(self._index)

    @property
    def num_leased(self) -> int:
        """Chunks that somebody reads."""
        with self._lock:
            self._expire()
            return len(self._num_leases)

    @property
    def num_parked(self) -> int:
        """Chunks that wait for the host they are for."""
        with self._lock:
            self._expire()
            return len(self._parked)

    def check(self) -> None:
        """Assert every invariant."""
        with self._lock:
            assert self._expiry.keys() <= self._index.keys()
            assert self._index == {key: i for i, key in enumerate(self._keys) if key is not None}
            assert self._num_leases == Counter(
                key for lease in self._leases for key in lease.copies
            )
            assert all(lease.copies for lease in self._leases)
            assert len(self._wanted) <= WANTED_MAX
            assert len(self._parked) <= self._limits.num_parked_max
