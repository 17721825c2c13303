"""Host memory as rows: one anonymous shared-memory region that worker processes can map."""

import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, groupby
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

_private: Final = weakref.WeakValueDictionary[int, mmap.mmap]()  # of this process, by number
_numbers: Final = count()


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
    """What `attach` needs to map a region; it may be pickled.

    Attributes:
        pid: The process that made the region.
        name: Its descriptor of shared memory there, or the number of its private memory.
        num_slots: Rows.
        chunk_bytes: Payload of each row.
        shared: Whether other processes of the same user can map the memory.
    """

    pid: int
    name: int
    num_slots: int
    chunk_bytes: int
    shared: bool


class HostRegion(AlignedSlots):
    """Rows of host memory, `chunk_bytes` payload each, every row on a 4096-byte boundary.

    Shared memory is anonymous (`memfd_create`): it has no name that could leak, and goes when the
    last process that maps it ends. Private memory is this process's alone, and no child gets a copy
    of it: that would make direct I/O unsafe. Pages are taken when they are first written, huge ones
    where the kernel's settings allow: for private memory they mostly do, for shared memory mostly
    not (`why_no_huge_pages`).
    """

    def __init__(
        self, num_slots: int, chunk_bytes: int, memory: mmap.mmap, name: int, *, shared: bool
    ) -> None:
        """Lay rows over mapped memory; `name` is as in `RegionHandle`, a descriptor is owned."""
        super().__init__(num_slots, chunk_bytes)
        self._shared, self._name = shared, name
        self._close_fd = weakref.finalize(self, os.close, name) if shared else None  # in any case
        self._memory = memory
        self._view = memoryview(memory)

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
        if shared:
            name = os.memfd_create("kvstrata", os.MFD_CLOEXEC)
            os.ftruncate(name, needed_bytes)
            memory = mmap.mmap(name, needed_bytes)
        else:
            name = next(_numbers)
            memory = mmap.mmap(-1, needed_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_DONTFORK)
            _private[name] = memory
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        return cls(num_slots, chunk_bytes, memory, name, shared=shared)

    @classmethod
    def attach(cls, handle: RegionHandle) -> Self:
        """Return a second region over one of this process, or a shared one of another process.

        The memory is there until both are closed.

        Raises:
            ContractError: It is private memory of another process, or is gone.
            OSError: That process ended or is another user's.
        """
        name, shape = handle.name, (handle.num_slots, handle.chunk_bytes)
        if handle.shared:
            name = os.open(f"/proc/{handle.pid}/fd/{name}", os.O_RDWR | os.O_CLOEXEC)
            memory = mmap.mmap(name, handle.num_slots * row_bytes_for(handle.chunk_bytes))
            return cls(*shape, memory, name, shared=True)
        private = _private.get(name) if handle.pid == os.getpid() else None
        if private is None:
            raise ContractError(f"private memory of process {handle.pid} can't be mapped here")
        return cls(*shape, private, name, shared=False)

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
        """What `attach` needs; good while this region is open."""
        shape = self._num_slots, self._chunk_bytes
        return RegionHandle(os.getpid(), self._name, *shape, self._shared)

    @override
    def row(self, slot: int, /) -> memoryview:
        start = self.row_start(slot)
        return self._view[start : start + self._row_bytes]

    def release_rows(self, slots: Sequence[int]) -> None:
        """Give the memory of rows back, in every process that maps them.

        They read as zeros until they are written again, which takes new memory.
        """
        advice = mmap.MADV_REMOVE if self._shared else mmap.MADV_DONTNEED
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
