"""Stores on this machine, which obstore reaches by more copies and threads than they need."""

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np
from obstore import get_range
from typing_extensions import override

from kvstrata.tiers.object.client import (
    FailureKind,
    ObjectClient,
    ObjectStoreError,
    sort_failure,
)
from kvstrata.tiers.object.settings import ObjectSettings

_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_NO_UNNAMED: Final = _NO_LINKS | {errno.EISDIR}
_UNNAMED: Final = getattr(os, "O_TMPFILE", 0)  # Linux only


class DirectoryClient(ObjectClient):
    """A directory, in obstore's layout: objects by the system's own calls, the rest by obstore.

    An object is written into a file without a name and linked when it is whole: a process that is
    killed leaves nothing behind. Where the file system has no such files, obstore writes.
    """

    def __init__(self, settings: ObjectSettings, tier: str, path: str) -> None:
        super().__init__(settings, tier, path)
        self._root = str(self._store.prefix).rstrip("/")
        self._has_unnamed = bool(_UNNAMED) and os.path.isdir("/proc/self/fd")

    @override
    def create(self, path: str, parts: Sequence[bytes | memoryview]) -> bool:
        if self._has_unnamed:
            try:
                return self._create(f"{self._root}/{path}", parts)
            except OSError as error:
                if error.errno not in _NO_UNNAMED:
                    raise sort_failure(self._tier, error) from None
                self._has_unnamed = False
        return super().create(path, parts)

    def _create(self, place: str, parts: Sequence[bytes | memoryview]) -> bool:
        fd = _open_unnamed(place.rpartition("/")[0])
        try:
            _write(fd, parts)
            # `dst_dir_fd` makes it linkat(2), which follows this link; `place` is absolute.
            os.link(f"/proc/self/fd/{fd}", place, dst_dir_fd=fd)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                self.ask_before_writing()
            raise
        finally:
            os.close(fd)
        return True

    @override
    def read(self, path: str, num_bytes: int) -> memoryview:
        body = np.empty(num_bytes, np.uint8).data
        beyond = bytearray(1)  # filled if the object is longer
        try:
            fd = os.open(f"{self._root}/{path}", os.O_RDONLY)
            try:
                num_read = more = os.preadv(fd, [body, beyond], 0)
                while more and num_read < num_bytes:
                    more = os.preadv(fd, [body[num_read:], beyond], num_read)
                    num_read += more
            finally:
                os.close(fd)
        except OSError as error:
            raise sort_failure(self._tier, error) from None
        if num_read != num_bytes:
            raise ObjectStoreError(self._tier, FailureKind.WRONG_SIZE)
        return body

    @override
    def read_start(self, path: str, num_bytes: int, total_bytes: int) -> memoryview:
        try:
            fd = os.open(f"{self._root}/{path}", os.O_RDONLY)
            try:
                found_bytes = os.fstat(fd).st_size
                start = os.pread(fd, num_bytes, 0)
            finally:
                os.close(fd)
        except OSError as error:
            raise sort_failure(self._tier, error) from None
        if found_bytes != total_bytes:
            raise ObjectStoreError(self._tier, FailureKind.WRONG_SIZE)
        return memoryview(start)


class MemoryClient(ObjectClient):
    """Memory of this process. It keeps the very buffer that it is given, so that gets a copy."""

    def __init__(self, settings: ObjectSettings, tier: str, path: str) -> None:
        super().__init__(settings, tier, path)
        self._copying = threading.Lock()

    @override
    def create(self, path: str, parts: Sequence[bytes | memoryview]) -> bool:
        # obstore would join the parts as well, but under the lock of the whole store. New memory
        # comes from the system, which takes longer for two threads than for one after the other.
        with self._copying:
            body = b"".join(parts)
        return super().create(path, (body,))

    @override
    def read(self, path: str, num_bytes: int) -> memoryview:
        with self._sorted():  # one call instead of two; one byte more shows a longer object
            body = memoryview(get_range(self._store, path, start=0, end=num_bytes + 1))
        if len(body) != num_bytes:
            raise ObjectStoreError(self._tier, FailureKind.WRONG_SIZE)
        return body


def _open_unnamed(folder: str) -> int:
    flags = os.O_WRONLY | _UNNAMED
    with suppress(FileNotFoundError):
        return os.open(folder, flags, 0o666)
    os.makedirs(folder, exist_ok=True)
    return os.open(folder, flags, 0o666)


def _write(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    left = [memoryview(part) for part in parts]
    while left:
        num_written = os.writev(fd, left)
        while left and num_written >= len(left[0]):
            num_written -= len(left.pop(0))
        if left:
            left[0] = left[0][num_written:]
