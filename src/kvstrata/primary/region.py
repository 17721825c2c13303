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

from kvstrata.core.errors import ConfigError, ContractError
from kvstrata.core.memory import ROW_ALIGNMENT, AlignedSlots, row_bytes_for

MEMORY_TABLE = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USE = Path("/sys/fs/cgroup/memory.current")
POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python does not name yet
PREFAULT_BYTES: Final = 64 << 20  # at a time, so that signals are seen in between
HUGE_PAGE_SETTINGS: Final = Path("/sys/kernel/mm/transparent_hugepage")


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


def why_no_huge_pages(*, shared: bool) -> str | None:
    """Return what keeps this host's kernel from giving huge pages where asked; None if nothing."""
    name, wanted = ("shmem_enabled", "advise") if shared else ("enabled", "madvise")
    try:
        text = (HUGE_PAGE_SETTINGS / name).read_text()
    except OSError:
        return "this kernel has none"
    if "[never]" in text or "[deny]" in text:
        return f"{HUGE_PAGE_SETTINGS / name} forbids them; write {wanted} to it"
    return None


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """What another process of the same user needs to map the region; it may be pickled."""

    pid: int
    fd: int
    num_slots: int
    chunk_bytes: int


class HostRegion(AlignedSlots):
    """Rows of host memory, `chunk_bytes` payload each, every row on a 4096-byte boundary.

    Shared memory is anonymous (`memfd_create`): it has no name that could leak, and goes when the
    last process that maps it ends. Private memory is this process's alone, and no child gets a copy
    of it: that would make direct I/O unsafe. Pages are taken when they are first written, huge ones
    where the kernel's settings allow: for private memory they mostly do, for shared memory mostly
    not (`why_no_huge_pages`).
    """

    def __init__(self, num_slots: int, chunk_bytes: int, fd: int | None = None) -> None:
        """Map an open memory file of the right size, or private memory without one.

        The region owns the descriptor from now on.
        """
        super().__init__(num_slots, chunk_bytes)
        self._fd = fd
        self._close_fd = None if fd is None else weakref.finalize(self, os.close, fd)  # in any case
        if fd is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, self.reserved_bytes, flags=flags)
            self._memory.madvise(mmap.MADV_DONTFORK)
        else:
            self._memory = mmap.mmap(fd, self.reserved_bytes)
        self._view = memoryview(self._memory)

    @classmethod
    def create(
        cls,
        num_slots: int,
        chunk_bytes: int,
        *,
        shared: bool = True,
        huge_pages: bool = True,
        free_memory: Callable[[], FreeMemory | None] = free_host_memory,
    ) -> Self:
        """Reserve a region.

        Args:
            num_slots: Rows, at least 1.
            chunk_bytes: Payload of a row, at least 1.
            shared: Whether other processes may map it.
            huge_pages: Whether to ask the kernel for them.
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
        fd = None
        if shared:
            fd = os.memfd_create("kvstrata", os.MFD_CLOEXEC)
            os.ftruncate(fd, needed_bytes)
        region = cls(num_slots, chunk_bytes, fd)
        with suppress(OSError):  # a kernel without them
            region._memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        return region

    @classmethod
    def attach(cls, handle: RegionHandle) -> Self:
        """Map the region of another process of the same user.

        Raises:
            OSError: That process ended or is another user's.
        """
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        return cls(handle.num_slots, handle.chunk_bytes, fd)

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
    def handle(self) -> RegionHandle:
        """What `attach` needs in another process; good while this region is open.

        Raises:
            ContractError: The memory is private.
        """
        if self._fd is None:
            raise ContractError("private memory can't be mapped by others: create it as shared")
        return RegionHandle(os.getpid(), self._fd, self._num_slots, self._chunk_bytes)

    @override
    def row(self, slot: int, /) -> memoryview:
        start = self.row_start(slot)
        return self._view[start : start + self._row_bytes]

    def release_rows(self, slots: Sequence[int]) -> None:
        """Give the memory of rows back, in every process that maps them.

        They read as zeros until they are written again, which takes new memory.
        """
        advice = mmap.MADV_DONTNEED if self._fd is None else mmap.MADV_REMOVE
        for _, stretch in groupby(enumerate(sorted(slots)), key=lambda item: item[1] - item[0]):
            rows = [slot for _, slot in stretch]
            start, num_bytes = self.row_start(rows[0]), len(rows) * self._row_bytes
            self._memory.madvise(advice, start, num_bytes)

    def close(self) -> None:
        """Give the memory back; a second call does nothing.

        Views that others still hold keep their pages until they are dropped.
        """
        if self._close_fd is not None:
            self._close_fd()
        self._view.release()
        with suppress(BufferError):  # held views keep the pages until the last of them goes
            self._memory.close()


assert mmap.PAGESIZE % ROW_ALIGNMENT == 0
