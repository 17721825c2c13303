"""Which chunk is in which slot: free list, what is being written, pins."""

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

from kvstrata.core.errors import ContractError
from kvstrata.core.keys import OffloadKey


class Settled(NamedTuple):
    """Keys that are resident now, keys whose copy failed, and how many were dropped meanwhile."""

    stored: list[OffloadKey]
    failed: list[OffloadKey]
    num_dropped: int


class SlotTable:
    """Every slot is free, being written by one owner, resident, or pinned without a key.

    The last kind is a chunk that was dropped while a copy still reads it; its slot is free again
    when the last pin goes. In the same way a slot whose key was dropped while it was being written
    stays its owner's until the owner settles it, so that an old copy never meets new content.

    All methods work on many keys at once. One call on thousands of keys is a few dictionary
    operations each, run by the interpreter's own loops where that is possible.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[OffloadKey, int] = {}  # resident and being written
        self._owner_of: dict[OffloadKey, Hashable] = {}  # being written
        self._orphans: dict[tuple[Hashable, OffloadKey], int] = {}  # written for nobody any more
        self._pins: dict[int, int] = {}  # slot -> copies that read it
        self._doomed: set[int] = set()  # pinned, without a key

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def num_resident(self) -> int:
        """Chunks that can be loaded."""
        return len(self._slot_of) - len(self._owner_of)

    @property
    def num_writing(self) -> int:
        """Slots that a copy writes, for a key or for nobody any more."""
        return len(self._owner_of) + len(self._orphans)

    @property
    def num_pinned(self) -> int:
        """Slots that a copy reads."""
        return len(self._pins)

    @property
    def num_doomed(self) -> int:
        """Pinned slots whose chunk was dropped."""
        return len(self._doomed)

    def __contains__(self, key: object) -> bool:
        """Say whether the key has a slot, resident or being written."""
        return key in self._slot_of

    def is_writing(self, key: OffloadKey) -> bool:
        """Say whether a copy into the key's slot is under way."""
        return key in self._owner_of

    def is_resident(self, key: OffloadKey) -> bool:
        """Say whether the key can be loaded."""
        return key in self._slot_of and key not in self._owner_of

    def count_prefix(self, keys: Iterable[OffloadKey]) -> int:
        """Return how many keys, from the first on, are resident."""
        slot_of, owner_of = self._slot_of, self._owner_of
        count = 0
        if owner_of:
            for key in keys:
                if key not in slot_of or key in owner_of:
                    break
                count += 1
            return count
        for key in keys:
            if key not in slot_of:
                break
            count += 1
        return count

    def absent(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the distinct keys that have no slot, in order."""
        slot_of = self._slot_of
        return [key for key in dict.fromkeys(keys) if key not in slot_of]

    def evictable(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those that are resident and not pinned, in order."""
        slot_of, owner_of, pins = self._slot_of, self._owner_of, self._pins
        if owner_of:
            keys = [key for key in keys if key not in owner_of]
        if pins:
            return [key for key in keys if slot_of.get(key, -1) not in pins and key in slot_of]
        return [key for key in keys if key in slot_of]

    def reserve(self, keys: Sequence[OffloadKey], owner: Hashable) -> list[int]:
        """Give each key a free slot, being written by `owner` from now on.

        The keys are distinct and absent, and there are enough free slots; see `absent`.
        """
        free, count = self._free, len(keys)
        assert count <= len(free)
        if not count:
            return []
        slots = free[-count:]
        del free[-count:]
        self._slot_of.update(zip(keys, slots, strict=True))
        self._owner_of.update(dict.fromkeys(keys, owner))
        return slots

    def settle(
        self, keys: Collection[OffloadKey], owner: Hashable, failed: Collection[OffloadKey]
    ) -> Settled:
        """End what `owner` writes: chunks become resident, failed ones free their slots.

        Raises:
            ContractError: The owner does not write one of the keys. Nothing changed.
        """
        owner_of = self._owner_of
        distinct = list(dict.fromkeys(keys))
        if self._orphans:
            orphaned = [key for key in distinct if (owner, key) in self._orphans]
            distinct = [key for key in distinct if (owner, key) not in self._orphans]
        else:
            orphaned = []
        for key in distinct:
            if owner_of.get(key) is not owner:
                raise ContractError(f"{key.hex()} is not being written by {owner!r}")
        for key in orphaned:
            self._free.append(self._orphans.pop((owner, key)))
        for key in distinct:
            del owner_of[key]
        if not failed:
            return Settled(distinct, [], len(orphaned))
        lost = [key for key in distinct if key in failed]
        self._free.extend(map(self._slot_of.pop, lost))
        stored = [key for key in distinct if key not in failed]
        return Settled(stored, lost, len(orphaned))

    def written_by(self, owner: Hashable, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the distinct keys that the owner writes, dropped ones included, in order."""
        return [
            key
            for key in dict.fromkeys(keys)
            if self._owner_of.get(key) is owner or (owner, key) in self._orphans
        ]

    def drop(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Forget keys; return those that were resident, and so can no longer be loaded.

        Slots that no copy uses are free at once, the others when their copies have been settled.
        """
        gone = []
        for key in keys:
            slot = self._slot_of.pop(key, None)
            if slot is None:
                continue
            owner = self._owner_of.pop(key, None)
            if owner is not None:
                self._orphans[owner, key] = slot
                continue
            gone.append(key)
            if slot in self._pins:
                self._doomed.add(slot)
            else:
                self._free.append(slot)
        return gone

    def evict(self, keys: Iterable[OffloadKey]) -> None:
        """Free the slots of keys that `evictable` let through."""
        self._free.extend(map(self._slot_of.pop, keys))

    def slots_of(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the slot of each resident key.

        Raises:
            ContractError: One of them is not resident.
        """
        try:
            slots = [self._slot_of[key] for key in keys]
        except KeyError as error:
            raise ContractError(f"{error.args[0].hex()} is not in the primary") from None
        if self._owner_of and not self._owner_of.keys().isdisjoint(keys):
            writing = next(key for key in keys if key in self._owner_of)
            raise ContractError(f"{writing.hex()} is still being written")
        return slots

    def pin(self, slots: Iterable[int]) -> None:
        """Forbid eviction of these slots, one time more each."""
        pins = self._pins
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Take back one pin of each."""
        pins = self._pins
        for slot in slots:
            count = pins.pop(slot) - 1
            if count:
                pins[slot] = count
            elif slot in self._doomed:
                self._doomed.remove(slot)
                self._free.append(slot)

    @property
    def num_keys(self) -> int:
        """Keys that have a slot."""
        return len(self._slot_of)

    def all_keys(self) -> list[OffloadKey]:
        """Return the keys that have a slot, in no particular order."""
        return list(self._slot_of)

    def is_unpinned(self, key: OffloadKey) -> bool:
        """Say whether the key is resident and no copy reads it."""
        return self.is_resident(key) and self._slot_of[key] not in self._pins

    def check(self) -> None:
        """Assert that every slot is in exactly one state."""
        held = [*self._slot_of.values(), *self._orphans.values(), *self._doomed]
        assert sorted(held + self._free) == list(range(self.num_slots))
        assert self._owner_of.keys() <= self._slot_of.keys()
        assert all(count > 0 for count in self._pins.values())
        resident = {slot for key, slot in self._slot_of.items() if key not in self._owner_of}
        assert self._pins.keys() <= resident | self._doomed
        assert self._doomed <= self._pins.keys()
