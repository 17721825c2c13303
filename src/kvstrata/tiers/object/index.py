"""Objects that are known to exist: a bounded memory of what is present, and the bytes they take."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from math import inf
from typing import Final, NamedTuple

from kvstrata.core.keys import OffloadKey
from kvstrata.tiers.recency import consume

_SPARE_SHARE = 0.02  # of the cap, freed on top of what is needed


ObjectName = OffloadKey | str
"""An object: by its chunk's key, or by its path where it is of another namespace."""

UNVERIFIED_S: Final = -inf


class Entry(NamedTuple):
    """One object. Until its header was read or written here it is `UNVERIFIED_S`, and no HIT."""

    num_bytes: int
    expires_at_s: float  # in seconds since 1970


class Index:
    """Objects by name, least recently used first. Not thread-safe.

    With `max_bytes` it holds every object that counts against the cap, and what has to go is for
    the caller to remove. Without, it holds the last `num_max` and forgets the others.
    """

    def __init__(self, num_max: int, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0  # of objects that are being written
        self.leaving_bytes = 0  # of objects that are being removed to make room
        self._num_max = num_max
        self._used_at_s: dict[ObjectName, float] = {}  # with a cap; in seconds since 1970
        self._entries: OrderedDict[ObjectName, Entry] = OrderedDict()
        # What is known of an object. Not a method, since lookups call it for each of their keys.
        self.get: Callable[[ObjectName], Entry | None] = self._entries.get

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """Say whether the object is known to exist."""
        return name in self._entries

    def names(self) -> Iterable[ObjectName]:
        """Return the objects that are known to exist."""
        return self._entries

    def holds(self, name: ObjectName, wall_s: float) -> bool:
        """Say whether the object is verified and has not expired."""
        entry = self._entries.get(name)
        return entry is not None and entry.expires_at_s > wall_s

    def note(self, name: ObjectName, entry: Entry, used_at_s: float = -inf) -> None:
        """Remember that an object exists, as the one that was used last."""
        self.forget(name)
        self._entries[name] = entry
        if self.max_bytes is not None:
            self._used_at_s[name] = used_at_s
        self.used_bytes += entry.num_bytes
        if self.max_bytes is None and len(self._entries) > self._num_max:
            self.forget(next(iter(self._entries)))

    def touch(self, names: Sequence[ObjectName], wall_s: float) -> None:
        """Note one use of objects, in prefix order: the head will be the last of them to leave."""
        here = [name for name in reversed(names) if name in self._entries]
        consume(map(self._entries.move_to_end, here))
        if self.max_bytes is not None:
            self._used_at_s.update(dict.fromkeys(here, wall_s))

    def forget(self, name: ObjectName) -> Entry | None:
        """Drop an object and return what was known of it."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.used_bytes -= entry.num_bytes
            self._used_at_s.pop(name, None)
        return entry

    def forget_all(self, is_meant: Callable[[ObjectName], bool]) -> None:
        """Drop the objects that are meant."""
        for name in [name for name in self._entries if is_meant(name)]:
            self.forget(name)

    def adopt(
        self, listed: dict[ObjectName, tuple[int, float]], is_recent: Callable[[ObjectName], bool]
    ) -> list[ObjectName]:
        """Make the index equal to a listing, oldest object first; return what is gone.

        Args:
            listed: Sizes and times of the last change, in seconds since 1970, by name.
            is_recent: Says which came or left since the listing began: they stay as they are.
        """
        gone = [name for name in self._entries if name not in listed and not is_recent(name)]
        for name in gone:
            self.forget(name)
        for name, (num_bytes, changed_at_s) in listed.items():
            if name not in self._entries and not is_recent(name):
                self.note(name, Entry(num_bytes, UNVERIFIED_S), changed_at_s)
        return gone

    def idle(
        self, before_s: float, may_leave: Callable[[ObjectName], bool]
    ) -> Sequence[ObjectName]:
        """Return objects whose last use is older, up to the first in order that is not."""
        used_at_s = self._used_at_s
        old = takewhile(lambda name: used_at_s[name] < before_s, self._entries)
        return list(filter(may_leave, old)) if self.max_bytes is not None else ()

    def fits(self, num_bytes: int) -> bool:
        """Say whether one more object of this size stays within the cap."""
        if self.max_bytes is None:
            return True
        taken_bytes = self.used_bytes + self.reserved_bytes + self.leaving_bytes
        return taken_bytes + num_bytes <= self.max_bytes

    def make_room(
        self, num_bytes: int, may_leave: Callable[[ObjectName], bool]
    ) -> dict[ObjectName, Entry]:
        """Drop the least recently used objects so that `num_bytes` more would fit the cap.

        Their bytes count as leaving until the caller has removed the objects, and said so by
        `left`. Somewhat more than needed goes at once, since removing many costs one request.
        """
        victims: dict[ObjectName, Entry] = {}
        if self.max_bytes is None:
            return victims
        over_bytes = self.used_bytes + self.reserved_bytes + num_bytes - self.max_bytes
        if over_bytes <= 0:
            return victims
        most_bytes = over_bytes + int(self.max_bytes * _SPARE_SHARE)
        freed_bytes = 0
        for name, entry in self._entries.items():
            if freed_bytes >= over_bytes and freed_bytes + entry.num_bytes > most_bytes:
                break
            if may_leave(name):
                victims[name] = entry
                freed_bytes += entry.num_bytes
        for name in victims:
            self.forget(name)
        self.leaving_bytes += sum(entry.num_bytes for entry in victims.values())
        return victims

    def left(self, victims: dict[ObjectName, Entry]) -> None:
        """Note that victims were removed."""
        self.leaving_bytes -= sum(entry.num_bytes for entry in victims.values())

    def stayed(self, victims: dict[ObjectName, Entry]) -> None:
        """Note that victims could not be removed: they are the first to leave next time."""
        self.left(victims)
        for name, entry in reversed(victims.items()):
            self.note(name, entry)  # unused since for ever
            self._entries.move_to_end(name, last=False)

    def check(self) -> None:
        """Assert every invariant."""
        assert self.used_bytes == sum(entry.num_bytes for entry in self._entries.values())
        assert self.max_bytes is None or self._used_at_s.keys() == self._entries.keys()
        assert self.reserved_bytes >= 0
        assert self.leaving_bytes >= 0
        assert self.max_bytes is not None or len(self._entries) <= self._num_max
