"""The account of bytes below a root, shared by all processes that use it.

One file of 4096 bytes, little-endian: magic, bytes used, number of joins, and a row for each of up
to 252 members. `used_bytes` is what lies on disk plus what members have reserved; a member's row
says how much of that it has reserved. A member reserves before it writes, so what is on disk never
exceeds what was granted.

Locks are on bytes of the file (open file description locks, which the system drops when a process
ends): one byte is the mutex, one a member says that the member lives. Files appear and vanish under
the mutex only. The total is raised before a file appears and lowered after one is gone; so whatever
instant a member dies at, it is too high, never too low, until somebody recounts.
"""

import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstrata.core.errors import ConfigError
from kvstrata.tiers.fs.disk import FILE_MODE
from kvstrata.tiers.fs.layout import LEDGER

LEDGER_BYTES: Final = 4096
NUM_MEMBERS_MAX: Final = 252

_MAGIC: Final = b"KVLEDGR1"
_TOTALS: Final = struct.Struct("<qq")  # used_bytes, num_joins
_TOTALS_AT: Final = 8
_ROW: Final = struct.Struct("<q")
_ROWS_AT: Final = 64
_ROW_BYTES: Final = 16
_MUTEX_AT: Final = LEDGER_BYTES
_ALIVE_AT: Final = LEDGER_BYTES + 1
_FLOCK: Final = "hhqqi4x"  # struct flock of 64-bit Linux


class Ledger:
    """One member's hold on the account. Its calls do I/O and wait for other members.

    Methods other than `__init__`, `locked` and `close` may be called under `locked` only.
    """

    def __init__(self, root: Path) -> None:
        """Open or make the account and become a member.

        Raises:
            ConfigError: It has as many members as it can have.
        """
        self._mutex = threading.Lock()
        self._fd = os.open(root / LEDGER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(self._fd, FILE_MODE)  # whatever the umask
        self.last_used_bytes = 0
        self._has_others = False
        self._joins_seen = 0
        self.reserved_bytes = 0
        with self.locked():
            if os.pread(self._fd, len(_MAGIC), 0) != _MAGIC:
                os.pwrite(self._fd, _MAGIC.ljust(LEDGER_BYTES, b"\0"), 0)
            for row in range(NUM_MEMBERS_MAX):
                if self._lock(_ALIVE_AT + row, fcntl.F_OFD_SETLK):
                    self.row = row
                    break
            else:
                os.close(self._fd)
                raise ConfigError(str(root), f"is in use by {NUM_MEMBERS_MAX} tiers already")
            used_bytes, num_joins = self._totals()
            self._write_totals(used_bytes, num_joins + 1)
        self._page = mmap.mmap(self._fd, LEDGER_BYTES, prot=mmap.PROT_READ)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other members, and other threads of this one, from changing anything."""
        with self._mutex:
            self._lock(_MUTEX_AT, fcntl.F_OFD_SETLKW)
            try:
                yield
            finally:
                self._unlock(_MUTEX_AT)

    def close(self) -> None:
        """Leave."""
        with self._mutex:
            self._page.close()
            os.close(self._fd)

    def used_bytes(self) -> int:
        """Return the bytes on disk and reserved, of all members."""
        return self._totals()[0]

    def has_company(self) -> bool:
        """Say whether other members may be writing; it reads memory only and takes no lock.

        It notices at once who joins on this host, and by `recount` who joins elsewhere or leaves.
        """
        _, num_joins = _TOTALS.unpack_from(self._page, _TOTALS_AT)
        return self._has_others or num_joins != self._joins_seen

    def reserve(self, num_bytes: int) -> None:
        """Count bytes as used that this member is about to write."""
        self._write_row(self.row, self.reserved_bytes + num_bytes)
        self.reserved_bytes += num_bytes
        self._add_used(num_bytes)

    def settle(self, num_bytes: int) -> None:
        """Turn reserved bytes into bytes on disk: call it with the file just published."""
        self._write_row(self.row, self.reserved_bytes - num_bytes)
        self.reserved_bytes -= num_bytes

    def release(self, num_bytes: int) -> None:
        """Give reserved bytes back that will not be written."""
        self._add_used(-num_bytes)
        self.settle(num_bytes)

    @contextmanager
    def removing(self) -> Iterator[list[int]]:
        """Take off what is removed inside: sizes go into the list as files go."""
        removed: list[int] = []
        try:
            yield removed
        finally:
            if removed:
                self._add_used(-sum(removed))

    def others(self) -> set[int]:
        """Return the rows of other members that are alive."""
        alive = set()
        for row in range(NUM_MEMBERS_MAX):
            if row == self.row:
                continue
            if self._lock(_ALIVE_AT + row, fcntl.F_OFD_SETLK):
                self._unlock(_ALIVE_AT + row)
            else:
                alive.add(row)
        return alive

    def recount(self, disk_bytes: int, alive: Collection[int]) -> None:
        """Set the account right, given what lies on disk and which others are alive."""
        reserved_bytes = self.reserved_bytes + sum(map(self._read_row, alive))
        _, num_joins = self._totals()
        self._write_totals(disk_bytes + reserved_bytes, num_joins)
        for row in range(NUM_MEMBERS_MAX):
            if row not in alive:
                self._write_row(row, self.reserved_bytes if row == self.row else 0)
        self._joins_seen = num_joins
        self._has_others = bool(alive)

    def _totals(self) -> tuple[int, int]:
        used_bytes, num_joins = _TOTALS.unpack(os.pread(self._fd, _TOTALS.size, _TOTALS_AT))
        self.last_used_bytes = used_bytes
        return used_bytes, num_joins

    def _write_totals(self, used_bytes: int, num_joins: int) -> None:
        os.pwrite(self._fd, _TOTALS.pack(used_bytes, num_joins), _TOTALS_AT)
        self.last_used_bytes = used_bytes

    def _add_used(self, num_bytes: int) -> None:
        used_bytes, num_joins = self._totals()
        self._write_totals(max(0, used_bytes + num_bytes), num_joins)

    def _read_row(self, row: int) -> int:
        found = os.pread(self._fd, _ROW.size, _ROWS_AT + row * _ROW_BYTES)
        return int(_ROW.unpack(found)[0])

    def _write_row(self, row: int, reserved_bytes: int) -> None:
        os.pwrite(self._fd, _ROW.pack(reserved_bytes), _ROWS_AT + row * _ROW_BYTES)

    def _lock(self, at: int, command: int) -> bool:
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        try:
            fcntl.fcntl(self._fd, command, request)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EACCES}:
                raise
            return False
        return True

    def _unlock(self, at: int) -> None:
        request = struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, at, 1, 0)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
