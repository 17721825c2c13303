"""Host memory as rows: one anonymous shared-memory region that worker processes can map."""

import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, Self

from typing_extensions import override

from kvstrata.core.errors import ConfigError
from kvstrata.core.memory import ROW_ALIGNMENT, AlignedSlots, row_bytes_for

MEMORY_TABLE = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USE = Path("/sys/fs/cgroup/memory.current")
POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python does not name yet
PREFAULT_BYTES: Final = 64 << 20  # at a time, so that signals are seen in between
HUGE_PAGES: Final = (mmap.MADV_HUGEPAGE,) if hasattr(mmap, "MADV_HUGEPAGE") else ()


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that may still be taken, and what says so."""

    num_bytes: int
    where: str


def free_host_memory() -> FreeMemory | None:
    """Return the tighter of the machine's and the control group's free memory; None if unknown."""
    found: list[FreeMemory] = []
    try:
        found += [
            FreeMemory(int(line.split()[1]) * 1024, f"MemAvailable in {MEMORY_TABLE}")
            for line in MEMORY_TABLE.read_text().splitlines()
            if line.startswith("MemAvailable:")
        ]
        limit = CGROUP_LIMIT.read_text().strip()
        if limit != "max":
            used = int(CGROUP_USE.read_text())
            found.append(FreeMemory(max(0, int(limit) - used), str(CGROUP_LIMIT)))
    except (OSError, ValueError):
        pass  # not Linux, or no control group: what was found so far counts
    return min(found, key=lambda free: free.num_bytes, default=None)


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """What another process of the same user needs to map the region; it may be pickled."""

    pid: int
    fd: int
    num_slots: int
    chunk_bytes: int


class HostRegion(AlignedSlots):
    """Rows of host memory, `chunk_bytes` payload each, every row on a 4096-byte boundary.

    The memory is anonymous (`memfd_create`): it has no name that could leak, and goes when the last
    process that maps it ends. Pages are taken when they are first written.
    """

    def __init__(self, fd: int, num_slots: int, chunk_bytes: int) -> None:
        """Map an open memory file of the right size; the region owns the descriptor from now on."""
        super().__init__(num_slots, chunk_bytes)
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)  # also when nobody closes the region
        self._memory = mmap.mmap(fd, self.reserved_bytes)
        self._view = memoryview(self._memory)

    @classmethod
    def create(
        cls,
        num_slots: int,
        chunk_bytes: int,
        *,
        advice: Sequence[int] = (),
        free_memory: Callable[[], FreeMemory | None] = free_host_memory,
    ) -> Self:
        """Reserve a region.

        Args:
            num_slots: Rows, at least 1.
            chunk_bytes: Payload of a row, at least 1.
            advice: Advice for the kernel (`madvise`), such as `HUGE_PAGES`.
            free_memory: Says how much may be taken; None where that is unknown.

        Raises:
            ConfigError: More than the host has free, or nothing at all. Nothing was allocated.
        """
        if num_slots < 1 or chunk_bytes < 1:
            raise ConfigError(
                "primary", f"{num_slots} chunks of {chunk_bytes} bytes hold nothing at all"
            )
        needed_bytes = num_slots * row_bytes_for(chunk_bytes)
        free = free_memory()
        if free is not None and needed_bytes > free.num_bytes:
            raise ConfigError(
                "primary",
                f"requested {needed_bytes} bytes of host memory ({num_slots} chunks of "
                f"{chunk_bytes} bytes), only {free.num_bytes} are free ({free.where}); "
                "lower primary.num_chunks or primary.bytes",
            )
        fd = os.memfd_create("kvstrata", os.MFD_CLOEXEC)
        os.ftruncate(fd, needed_bytes)
        region = cls(fd, num_slots, chunk_bytes)
        for option in advice:
            region.memory_map.madvise(option)
        return region

    @classmethod
    def attach(cls, handle: RegionHandle) -> Self:
        """Map the region of another process of the same user.

        Raises:
            OSError: That process ended or is another user's.
        """
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        return cls(fd, handle.num_slots, handle.chunk_bytes)

    def prefault(self) -> None:
        """Take all pages now: later writes find them, and what is not there shows at once.

        Takes about a second a GiB. Only for a region that holds nothing yet.

        Raises:
            ConfigError: The host has not enough memory. Some pages may be taken; close the region.
        """
        for start in range(0, self.reserved_bytes, PREFAULT_BYTES):
            length = min(PREFAULT_BYTES, self.reserved_bytes - start)
            try:
                self._memory.madvise(POPULATE_WRITE, start, length)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise ConfigError(
                        "primary.prefault",
                        f"{start} of {self.reserved_bytes} bytes could be taken: {error}",
                    ) from error
                for page in range(start, start + length, mmap.PAGESIZE):  # an older kernel
                    self._view[page] = 0

    @property
    def memory(self) -> memoryview:
        """The whole region, `num_slots * row_bytes` bytes: what a copier pins or registers."""
        return self._view

    @property
    def memory_map(self) -> mmap.mmap:
        """The mapping itself, for advice to the kernel."""
        return self._memory

    @property
    def handle(self) -> RegionHandle:
        """What `attach` needs in another process; good while this region is open."""
        return RegionHandle(os.getpid(), self._fd, self._num_slots, self._chunk_bytes)

    @override
    def row(self, slot: int, /) -> memoryview:
        start = self.row_start(slot)
        return self._view[start : start + self._row_bytes]

    def release_rows(self, slots: Sequence[int]) -> None:
        """Give the memory of rows back, in every process that maps them.

        They read as zeros until they are written again, which takes new memory.
        """
        for _, stretch in groupby(enumerate(sorted(slots)), key=lambda item: item[1] - item[0]):
            rows = [slot for _, slot in stretch]
            start, num_bytes = self.row_start(rows[0]), len(rows) * self._row_bytes
            self._memory.madvise(mmap.MADV_REMOVE, start, num_bytes)

    def close(self) -> None:
        """Give the memory back; a second call does nothing.

        Views that others still hold keep their pages until they are dropped.
        """
        if not self._close_fd.alive:
            return
        self._close_fd()
        self._view.release()
        with suppress(BufferError):  # held views keep the pages until the last of them goes
            self._memory.close()


assert mmap.PAGESIZE % ROW_ALIGNMENT == 0
