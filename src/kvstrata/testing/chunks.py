"""Chunks that give themselves away: keys, bytes that follow from a key, poison, rows of memory."""

import hashlib
import mmap
from typing import Final

from typing_extensions import override

from kvstrata.core.keys import OffloadKey, make_offload_key
from kvstrata.core.memory import AlignedSlots

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


class FakeRegion(AlignedSlots):
    """Rows of ordinary memory, each on a 4096-byte boundary, all poison at first."""

    def __init__(self, num_slots: int, chunk_bytes: int) -> None:
        """Take the memory: `num_slots` rows of `chunk_bytes` payload."""
        super().__init__(num_slots, chunk_bytes)
        self._view = memoryview(mmap.mmap(-1, self.reserved_bytes))
        poison(self._view)

    @override
    def row(self, slot: int, /) -> memoryview:
        start = self.row_start(slot)
        return self._view[start : start + self.row_bytes]
