"""The primary's bytes as tiers and workers see them: rows of one region, one row a slot."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, overload

from typing_extensions import override

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


class AlignedSlots(SlotView):
    """What rows of every kind share: how many, how long, and how they are indexed."""

    def __init__(self, num_slots: int, chunk_bytes: int) -> None:
        """Describe `num_slots` rows of `chunk_bytes` payload."""
        self._num_slots = num_slots
        self._chunk_bytes = chunk_bytes
        self._row_bytes = row_bytes_for(chunk_bytes)

    @property
    @override
    def num_slots(self) -> int:
        return self._num_slots

    @property
    @override
    def chunk_bytes(self) -> int:
        return self._chunk_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next: `chunk_bytes` rounded up to 4096."""
        return self._row_bytes

    @property
    def reserved_bytes(self) -> int:
        """Address space of all rows together."""
        return self._num_slots * self._row_bytes

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
    @abstractmethod
    def row(self, slot: int, /) -> memoryview: ...

    def row_start(self, slot: int) -> int:
        """Return where a row begins, in bytes from the first one.

        Raises:
            IndexError: There is no such row.
        """
        if not 0 <= slot < self._num_slots:
            raise IndexError(f"slot {slot} is not in 0..{self._num_slots - 1}")
        return slot * self._row_bytes
