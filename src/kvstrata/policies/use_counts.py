"""How many requests held a chunk, also after it left: a fixed table of small counters."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Final
from zlib import crc32

import numpy as np

from kvstrata.core.keys import OffloadKey

_CELLS_PER_CHUNK: Final = 4
_COUNT_MAX: Final = 15
_NUM_AT_ONCE_MIN: Final = 64  # keys for which arrays are faster than a loop


class UseCounts:
    """Counts up to 15 by a checksum of the key; a chunk whose cell is taken over counts anew.

    One cell of four bytes holds one chunk, the newer of those that fall into it: its checksum, the
    count mixed into the lowest four bits. So memory is fixed at 16 to 32 bytes a chunk of capacity,
    keys are not kept alive, and old chunks are forgotten by themselves.
    """

    def __init__(self, capacity: int, uses_max: int) -> None:
        """Start without chunks."""
        num_cells = 1 << max(10, (capacity * _CELLS_PER_CHUNK - 1).bit_length())
        self._mask = num_cells - 1
        self._uses_max = uses_max
        self._cells = array("I", bytes(4 * num_cells))

    def set(self, keys: Sequence[OffloadKey], uses: int) -> None:
        """Remember how many requests held these chunks, which are not tracked any more."""
        if len(keys) >= _NUM_AT_ONCE_MIN:
            sums = np.fromiter(map(crc32, keys), np.uint32, len(keys))
            np.frombuffer(self._cells, np.uint32)[sums & self._mask] = sums ^ np.uint32(uses)
            return
        cells, mask = self._cells, self._mask
        for crc in map(crc32, keys):
            cells[crc & mask] = crc ^ uses

    def _uses(self, key: OffloadKey) -> int:
        """Return the number of uses when one is added."""
        crc = crc32(key)
        uses = self._cells[crc & self._mask] ^ crc
        return min(self._uses_max, uses + 1) if uses <= _COUNT_MAX else 1

    def runs(self, keys: Sequence[OffloadKey]) -> Iterator[tuple[int, int, int]]:
        """Cut a path that is used now into runs of equal uses: (start, end, uses).

        A chunk is used whenever one below it is, so uses never grow along a path, and the ends of
        the runs can be found without asking for every chunk.
        """
        start, num_keys = 0, len(keys)
        while start < num_keys:
            uses = self._uses(keys[start])
            low, high = start + 1, num_keys  # the run ends between these
            if uses == 1 or self._uses(keys[-1]) >= uses:
                low = num_keys
            while low < high:
                middle = (low + high) // 2
                if self._uses(keys[middle]) < uses:
                    high = middle
                else:
                    low = middle + 1
            yield start, low, uses
            start = low

    def clear(self) -> None:
        """Forget everything."""
        self._cells = array("I", bytes(4 * len(self._cells)))
