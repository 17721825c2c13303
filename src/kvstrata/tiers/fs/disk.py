"""The file operations that the tier needs, below one root directory, and what files' times say."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from kvstrata.core.keys import OffloadKey
from kvstrata.tiers.chunk_format import NEVER_S

FILE_MODE: Final = 0o600
DIR_MODE: Final = 0o700
_EXPIRY_MARK: Final = 271_828
_EXPIRY_MAX_S: Final = 2**33


class OpenFile(NamedTuple):
    """An open file; `name` is its temporary name, None for one that has none or needs none."""

    fd: int
    name: str | None = None


class FileStat(NamedTuple):
    """What a directory says of a chunk's file without opening it."""

    num_bytes: int
    used_at_s: float  # both in seconds since 1970
    expires_at_s: float


class FoundFile(NamedTuple):
    """A chunk's file that a scan came by; `directory` is that of its namespace."""

    directory: str
    path: str
    key: OffloadKey
    stat: FileStat


class Disk(Protocol):
    """File operations below a root; paths are relative to it. They block, and raise OSError."""

    owner: int
    """Number that temporary names carry, so that a dead owner's can be told from a live one's."""

    uses_direct: bool
    """Whether files bypass the page cache."""

    def make_fan(self, directory: str, first: str) -> None:
        """Make a part of a namespace's directories, one for each of `FAN_DIRS`.

        A store makes what it needs by itself, but that takes long.
        """

    def create(self, near: str) -> OpenFile:
        """Open an empty file for writing that becomes visible by `publish` only.

        Makes the directory `near`, where the file will go, if it is not there.
        """

    def write(self, file: OpenFile, buffers: Sequence[memoryview]) -> int:
        """Write at the start of the file and return how many bytes were."""

    def set_times(self, file: OpenFile | str, used_at_s: float, expires_at_s: float) -> None:
        """Note last use and expiry, of an open file or of one by path."""

    def publish(self, file: OpenFile, path: str) -> bool:
        """Give the file its name at once; False, and nothing changed, if there is one of it."""

    def discard(self, file: OpenFile) -> None:
        """Close the file; what was not published is gone."""

    def open(self, path: str) -> OpenFile:
        """Open a file for reading; FileNotFoundError if there is none."""

    def read(self, file: OpenFile, buffers: Sequence[memoryview]) -> int:
        """Read from the start of the file and return how many bytes were."""

    def stat(self, path: str) -> FileStat | None:
        """Return what is known of a file; None if there is none."""

    def remove(self, path: str) -> bool:
        """Remove a file; False if there was none."""

    def scan(self) -> Iterator[FoundFile]:
        """List all chunks of all namespaces. Whatever is not ours is left out."""

    def list_temporaries(self) -> Mapping[str, int]:
        """Return the paths of named temporaries, each with its owner."""

    def remove_empty_dirs(self, directory: str) -> None:
        """Remove a namespace's directories as far as nothing is in them."""

    def free_bytes(self) -> int:
        """Return the bytes that the file system still has for us."""

    def close(self) -> None:
        """Release the root; no other call may follow."""


def encode_times(used_at_s: float, expires_at_s: float) -> tuple[int, int]:
    """Return access and modification time, in nanoseconds, of a file with this last use and expiry.

    The access time holds the expiry to the millisecond below, marked in its last digits, since the
    system may set an access time by itself and never sets one like this.
    """
    used_ns = int(used_at_s * 1e9)
    if expires_at_s >= _EXPIRY_MAX_S:
        return used_ns, used_ns
    seconds, milliseconds = divmod(math.floor(expires_at_s * 1000), 1000)
    return seconds * 10**9 + _EXPIRY_MARK * 1000 + milliseconds, used_ns


def decode_times(found: os.stat_result) -> FileStat:
    """Return what a file's size and times say."""
    seconds, nanoseconds = divmod(found.st_atime_ns, 10**9)
    mark, milliseconds = divmod(nanoseconds, 1000)
    expires_at_s = seconds + milliseconds / 1000 if mark == _EXPIRY_MARK else NEVER_S
    return FileStat(found.st_size, found.st_mtime_ns / 1e9, expires_at_s)
