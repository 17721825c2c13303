"""Objects that are known to exist: a bounded memory of what is present, and the bytes they take."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

_SPARE_SHARE = 0.02  # of the cap, freed on top of what is needed


class Entry(NamedTuple):
    """One object. `is_verified`: its header was read or written here, so that it can be a HIT."""

    num_bytes: int
    expires_at_s: float
    is_verified: bool


class Index:
    """Objects by path, least recently used first. Not thread-safe.

    With `max_bytes` it holds every object that counts against the cap, and what has to go is for
    the caller to remove. Without, it holds the last `num_max` and forgets the others.
    """

    def __init__(self, num_max: int, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0  # of objects that are being written
        self.leaving_bytes = 0  # of objects that are being removed to make room
        self._num_max = num_max
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self._entries)

    def __contains__(self, path: object) -> bool:
        """Say whether the object is known to exist."""
        return path in self._entries

    def get(self, path: str) -> Entry | None:
        """Return what is known of an object."""
        return self._entries.get(path)

    def note(self, path: str, entry: Entry) -> None:
        """Remember that an object exists and was used now."""
        self.forget(path)
        self._entries[path] = entry
        self.used_bytes += entry.num_bytes
        if self.max_bytes is None and len(self._entries) > self._num_max:
            self.forget(next(iter(self._entries)))

    def touch(self, paths: Iterable[str]) -> None:
        """Note one use of objects, in prefix order: the head will be the last of them to leave."""
        for path in reversed(list(paths)):
            if path in self._entries:
                self._entries.move_to_end(path)

    def forget(self, path: str) -> Entry | None:
        """Drop an object and return what was known of it."""
        entry = self._entries.pop(path, None)
        if entry is not None:
            self.used_bytes -= entry.num_bytes
        return entry

    def forget_all(self, prefix: str) -> int:
        """Drop the objects whose path begins so; return how many."""
        gone = [path for path in self._entries if path.startswith(prefix)]
        for path in gone:
            self.forget(path)
        return len(gone)

    def adopt(self, listed: dict[str, int], is_recent: Callable[[str], bool]) -> list[str]:
        """Make the index equal to a listing, oldest object first; return what is gone.

        Args:
            listed: Sizes by path.
            is_recent: Says which paths came or left since the listing began: they stay as they are.
        """
        gone = [path for path in self._entries if path not in listed and not is_recent(path)]
        for path in gone:
            self.forget(path)
        for path, num_bytes in listed.items():
            if path not in self._entries and not is_recent(path):
                self.note(path, Entry(num_bytes, 0.0, is_verified=False))
        return gone

    def fits(self, num_bytes: int) -> bool:
        """Say whether one more object of this size stays within the cap."""
        if self.max_bytes is None:
            return True
        taken_bytes = self.used_bytes + self.reserved_bytes + self.leaving_bytes
        return taken_bytes + num_bytes <= self.max_bytes

    def make_room(self, num_bytes: int, may_leave: Callable[[str], bool]) -> dict[str, Entry]:
        """Drop the least recently used objects so that `num_bytes` more would fit the cap.

        Their bytes count as leaving until the caller has removed the objects, and said so by
        `left`. Somewhat more than needed goes at once, since removing many costs one request.
        """
        assert self.max_bytes is not None
        victims: dict[str, Entry] = {}
        over_bytes = self.used_bytes + self.reserved_bytes + num_bytes - self.max_bytes
        if over_bytes <= 0:
            return victims
        most_bytes = over_bytes + int(self.max_bytes * _SPARE_SHARE)
        freed_bytes = 0
        for path, entry in self._entries.items():
            if freed_bytes >= over_bytes and freed_bytes + entry.num_bytes > most_bytes:
                break
            if may_leave(path):
                victims[path] = entry
                freed_bytes += entry.num_bytes
        for path in victims:
            self.forget(path)
        self.leaving_bytes += sum(entry.num_bytes for entry in victims.values())
        return victims

    def left(self, victims: dict[str, Entry]) -> None:
        """Note that victims were removed."""
        self.leaving_bytes -= sum(entry.num_bytes for entry in victims.values())

    def stayed(self, victims: dict[str, Entry]) -> None:
        """Note that victims could not be removed: they are the first to leave next time."""
        self.left(victims)
        for path, entry in reversed(victims.items()):
            self.note(path, entry)
            self._entries.move_to_end(path, last=False)

    def check(self) -> None:
        """Assert every invariant."""
        assert self.used_bytes == sum(entry.num_bytes for entry in self._entries.values())
        assert self.reserved_bytes >= 0
        assert self.leaving_bytes >= 0
        assert self.max_bytes is not None or len(self._entries) <= self._num_max
