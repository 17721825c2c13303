"""What the tier knows of its namespace's files without asking the disk."""

import heapq
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import PRIORITY_MAX
from kvstrata.tiers.chunk_format import NEVER_S
from kvstrata.tiers.fs.disk import FileStat, OpenFile
from kvstrata.tiers.recency import TIME_STEP_S, RecencyOrder, Trail

_ANYBODY = Trail(PRIORITY_MAX)


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk on disk; times are seconds since 1970."""

    used_at_s: float
    expires_at_s: float = NEVER_S


@dataclass(slots=True, eq=False)
class Write:
    """A chunk on its way to the disk. Void: it must not appear any more.

    `file` is what it was written into, once that is complete; `used_at_s` the use that it tells of.
    """

    key: OffloadKey
    trail: Trail
    expires_at_s: float = NEVER_S
    used_at_s: float = 0.0
    is_reserved: bool = False  # its bytes are granted and not on disk yet
    is_void: bool = False
    file: OpenFile | None = None


class Index:
    """Resident chunks and their order of use.

    A chunk is resident from `add` or `adopt` until `drop`, and *leaving* from then until `gone`.
    Thread: any; what the contract of tiers asks for each lookup takes no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._catching_up = threading.Lock()  # taken before the other one
        self._entries: dict[OffloadKey, Entry] = {}
        self._order = RecencyOrder()
        self._leaving: set[OffloadKey] = set()
        self._pins: Counter[OffloadKey] = Counter()
        self._expiries: list[tuple[float, OffloadKey]] = []  # a heap; may name what has left
        self._unmarked: dict[OffloadKey, None] = {}  # used since their file was marked

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: OffloadKey) -> Entry | None:
        """Return a resident chunk's entry; None for others."""
        return self._entries.get(key)

    def find(self, keys: Sequence[OffloadKey]) -> list[Entry | None]:
        """Return `get` of each key, at the cost of one call."""
        return list(map(self._entries.get, keys))

    def has_due(self, wall_s: float) -> bool:
        """Say whether the time of some chunk may be over."""
        expiries = self._expiries
        return bool(expiries) and expiries[0][0] <= wall_s

    def is_leaving(self, key: OffloadKey) -> bool:
        """Say whether the chunk's file is about to be removed."""
        return key in self._leaving

    def residents(self) -> list[OffloadKey]:
        """Return the resident chunks."""
        with self._lock:
            return list(self._entries)

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Keep chunks that are to be loaded; once for each time a key is named."""
        with self._lock:
            self._pins.update(keys)

    def unpin(self, key: OffloadKey) -> None:
        """Undo one pin."""
        with self._lock:
            self._pins[key] -= 1
            if self._pins[key] <= 0:
                del self._pins[key]

    def touch(self, trail: Trail, keys: Sequence[OffloadKey], wall_s: float | None = None) -> None:
        """Note one use of chunks by a request, in prefix order; without a time, of its trail only.

        Takes no lock; it counts from `catch_up` on.
        """
        self._order.note_use(trail, keys, wall_s)

    def is_behind(self) -> bool:
        """Say whether a use was noted that does not count yet. Takes no lock."""
        return self._order.is_behind

    def catch_up(self) -> None:
        """Let uses count that were noted, a part of each at a time."""
        with self._catching_up:
            parts = self._order.catch_up()
            time_s = 0.0
            while True:
                with self._lock:
                    part = next(parts, None)
                    if part is None:
                        return
                    keys, wall_s = part
                    if wall_s is not None:
                        time_s = max(time_s, wall_s)
                        for key in keys:  # from the tail to the head
                            self._entries[key].used_at_s = time_s
                            time_s += TIME_STEP_S
                        self._unmarked.update(dict.fromkeys(keys))

    def next_victim(self) -> tuple[OffloadKey, float] | None:
        """Return the chunk that would leave first, and its last use; None if none may leave."""
        self.catch_up()
        with self._lock:
            found = self._order.choose(1, _ANYBODY, self._may_leave)
            return (found[0], self._entries[found[0]].used_at_s) if found else None

    def evict(self, count: int, trail: Trail) -> list[OffloadKey]:
        """Make up to `count` chunks leave for others of this request; return them."""
        if count <= 0:
            return []
        self._order.note_use(trail)
        self.catch_up()
        with self._lock:
            return self._drop(self._order.choose(count, trail, self._may_leave))

    def add(self, writes: Iterable[Write], wall_s: float) -> tuple[list[OffloadKey], list[Write]]:
        """Make chunks resident whose files have appeared.

        Returns those that were not resident before, and the writes that have become void meanwhile.
        """
        new, void = [], []
        with self._lock:
            for write in writes:
                if write.is_void or write.key in self._leaving:
                    void.append(write)
                elif write.key not in self._entries:
                    self._insert(write.key, write.trail, Entry(wall_s, write.expires_at_s))
                    new.append(write.key)
        return new, void

    def adopt(self, found: Iterable[tuple[OffloadKey, FileStat]]) -> list[OffloadKey]:
        """Make chunks resident that were found on disk, longest unused first; return the new ones.

        Known ones only get the use that their file tells of.
        """
        new: list[OffloadKey] = []
        with self._lock:
            for key, stat in found:
                entry = self._entries.get(key)
                if entry is None and key not in self._leaving:
                    self._insert(key, Trail(), Entry(stat.used_at_s, stat.expires_at_s))
                    new.append(key)
                elif entry is not None and stat.used_at_s > entry.used_at_s:
                    entry.used_at_s = stat.used_at_s
                    self._order.note_use(Trail(0), [key])
        return new

    def drop(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Make resident chunks leave; return those that were resident."""
        with self._lock:
            return self._drop([key for key in keys if key in self._entries])

    def expel(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Make chunks leave, resident or not; return those that were resident."""
        with self._lock:
            resident = self._drop([key for key in keys if key in self._entries])
            self._leaving.update(keys)
            return resident

    def void(self, writes: Iterable[Write]) -> None:
        """Keep chunks that are being written from becoming resident."""
        with self._lock:
            for write in writes:
                write.is_void = True

    def gone(self, keys: Iterable[OffloadKey]) -> None:
        """Note that the files of leaving chunks are gone."""
        with self._lock:
            self._leaving.difference_update(keys)

    def clear(self) -> int:
        """Forget all chunks, whose files are about to be removed; return how many there were."""
        with self._lock:
            num_chunks = len(self._entries)
            self._entries.clear()
            self._order.clear()
            self._expiries.clear()
            self._unmarked.clear()
            return num_chunks

    def take_expired(self, wall_s: float) -> list[OffloadKey]:
        """Make chunks leave whose time is over; return them."""
        with self._lock:
            expired: dict[OffloadKey, None] = {}
            while self._expiries and self._expiries[0][0] <= wall_s:
                _, key = heapq.heappop(self._expiries)
                entry = self._entries.get(key)
                if entry is not None and entry.expires_at_s <= wall_s:
                    expired[key] = None
            return self._drop(list(expired))

    def take_idle(self, before_s: float) -> list[OffloadKey]:
        """Make chunks leave that were used last before that time; return them."""
        self.catch_up()
        with self._lock:
            idle = self._order.unused(lambda key: self._entries[key].used_at_s < before_s)
            return self._drop([key for key in idle if self._may_leave(key)])

    def take_unmarked(self, num_max: int) -> list[tuple[OffloadKey, Entry]]:
        """Return chunks whose file is to be told of their last use, and count it as told."""
        self.catch_up()
        with self._lock:
            taken = []
            for key in list(islice(self._unmarked, num_max)):
                del self._unmarked[key]
                taken.append((key, self._entries[key]))
            return taken

    def check(self) -> None:
        """Assert every invariant."""
        with self._lock:
            assert not self._leaving & self._entries.keys()
            assert len(self._order) == len(self._entries)
            assert all(key in self._order for key in self._entries)
            assert all(key in self._entries for key in self._unmarked)
            assert all(count > 0 for count in self._pins.values())
            timed = {key for key, entry in self._entries.items() if entry.expires_at_s < NEVER_S}
            assert timed <= {key for _, key in self._expiries}
            self._order.check()

    def _may_leave(self, key: OffloadKey) -> bool:
        return key not in self._pins

    def _insert(self, key: OffloadKey, trail: Trail, entry: Entry) -> None:
        self._entries[key] = entry
        self._order.add(trail, key)
        if entry.expires_at_s < NEVER_S:
            heapq.heappush(self._expiries, (entry.expires_at_s, key))

    def _drop(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        for key in keys:
            del self._entries[key]
            self._unmarked.pop(key, None)
        self._order.remove(keys)
        self._leaving.update(keys)
        return keys
