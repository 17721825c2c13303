"""Chunks that give themselves away: keys, bytes that follow from a key, poison, rows of memory."""

import hashlib
import mmap
from collections.abc import Sequence
from typing import Final, overload

from typing_extensions import override

from kvstrata.core.keys import OffloadKey, make_offload_key
from kvstrata.core.memory import SlotView, row_bytes_for

POISON: Final = 0xEE


def numbered_key(number: int, group_idx: int = 0) -> OffloadKey:
    """Return a key that is always the same for this number and group, and differs from others."""
    return make_offload_key(hashlib.sha256(b"chunk %d" % number).digest(), group_idx)


def chain(path: str) -> list[OffloadKey]:
    """Return one key per letter, each naming the prefix that ends with it; readable in failures.

    `chain("ab")` and `chain("ac")` share their first key and differ in the second.
    """
    prefixes = (path[: i + 1] for i in range(len(path)))
    return [make_offload_key(prefix.encode(), 0) for prefix in prefixes]


def pattern(key: OffloadKey, num_bytes: int) -> bytes:
    """Return bytes that follow from the key, so that another chunk's bytes are noticed."""
    return hashlib.shake_128(key).digest(num_bytes)


def poison(row: memoryview) -> None:
    """Fill memory with 0xEE, so that bytes which nobody wrote are noticed."""
    row[:] = bytes([POISON]) * len(row)


class FakeRegion(SlotView):
    """Rows of ordinary memory, each on a 4096-byte boundary, all poison at first."""

    def __init__(self, num_slots: int, chunk_bytes: int) -> None:
        """Take the memory: `num_slots` rows of `chunk_bytes` payload."""
        self._num_slots = num_slots
        self._chunk_bytes = chunk_bytes
        self._row_bytes = row_bytes_for(chunk_bytes)
        self._view = memoryview(mmap.mmap(-1, num_slots * self._row_bytes))
        poison(self._view)

    @property
    @override
    def num_slots(self) -> int:
        return self._num_slots

    @property
    @override
    def chunk_bytes(self) -> int:
        return self._chunk_bytes

    @override
    def __len__(self) -> int:
        return self._num_slots

    @overload
    def __getitem__(self, slot: int, /) -> memoryview: ...
    @overload
    def __getitem__(self, slot: slice, /) -> Sequence[memoryview]: ...
    @override
    def __getitem__(self, slot: int | slice, /) -> memoryview | Sequence[memoryview]:
        if isinstance(slot, slice):
            return [self[i] for i in range(*slot.indices(self._num_slots))]
        return self.row(slot)[: self._chunk_bytes]

    @override
    def row(self, slot: int, /) -> memoryview:
        if not 0 <= slot < self._num_slots:
            raise IndexError(f"slot {slot} is not in 0..{self._num_slots - 1}")
        return self._view[slot * self._row_bytes : (slot + 1) * self._row_bytes]
