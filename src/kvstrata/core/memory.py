"""The primary's bytes as tiers and workers see them: rows of one region, one row a slot."""

from collections.abc import Sequence
from typing import Protocol, overload

ROW_ALIGNMENT = 4096


def row_bytes_for(chunk_bytes: int) -> int:
    """Return the bytes that one row takes: `chunk_bytes` rounded up to 4096."""
    return -(-chunk_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


class SlotView(Protocol):
    """Slots as writable memory.

    The views alias the region and stay valid until the region is closed; whoever holds a slot's
    job owns its bytes. Indexing from several threads is safe.
    """

    @property
    def num_slots(self) -> int:
        """Number of rows."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes of each row."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    @overload
    def __getitem__(self, slot: int, /) -> memoryview: ...
    @overload
    def __getitem__(self, slot: slice, /) -> Sequence[memoryview]: ...

    def row(self, slot: int, /) -> memoryview:
        """Return the whole 4096-aligned row: the payload and the padding behind it."""
        ...
