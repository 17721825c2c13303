"""One chunk as one file: the header, the payload, and padding to a whole number of 4096 bytes.

The padding is there because direct I/O moves whole 4096-byte units; the header has the true length.
A row of the primary has the same padding, so header and row go to disk, and come from it, in one
vectored call.
"""

import errno
import mmap
from typing import NamedTuple

from kvstrata.core.keys import OffloadKey
from kvstrata.tiers.chunk_format import (
    HEADER_BYTES,
    NEVER_S,
    ChunkHeader,
    encode_header,
    verify_chunk,
)
from kvstrata.tiers.fs.disk import Disk, OpenFile


class ChunkName(NamedTuple):
    """What a file must be: whose chunk, how long its payload is, and which tier asks."""

    path: str
    key: OffloadKey
    namespace_digest: bytes
    chunk_bytes: int
    tier: str


def new_page() -> memoryview:
    """Return memory for one header, aligned for direct I/O; each thread has its own."""
    return memoryview(mmap.mmap(-1, HEADER_BYTES))


def write(
    disk: Disk,
    name: ChunkName,
    row: memoryview,
    page: memoryview,
    expires_at_s: float = NEVER_S,
) -> OpenFile:
    """Write a chunk into a file that has not appeared: whole, or not at all.

    Args:
        disk: Where to.
        name: Which chunk.
        row: The payload and its padding: a whole number of 4096 bytes.
        page: For the header, overwritten.
        expires_at_s: When it must be gone, seconds since 1970.

    Returns:
        The open file, for `publish` under `name.path`; in any case for `disk.discard`.

    Raises:
        OSError: It could not be written; nothing of it is left.
    """
    file = disk.create(name.path.rpartition("/")[0])
    is_written = False
    try:
        payload = row[: name.chunk_bytes]
        page[:] = encode_header(name.key, payload, name.namespace_digest, expires_at_s)
        num_bytes = disk.write(file, [page, row])
        if num_bytes != HEADER_BYTES + len(row):
            is_full = disk.free_bytes() < len(row)
            raise OSError(
                errno.ENOSPC if is_full else errno.EIO,
                f"{num_bytes} of {HEADER_BYTES + len(row)} bytes written",
            )
        is_written = True
    finally:
        if not is_written:
            disk.discard(file)
    return file


def publish(
    disk: Disk, file: OpenFile, path: str, used_at_s: float = 0.0, expires_at_s: float = NEVER_S
) -> bool:
    """Let a written chunk appear at once, with its times; False if there is a file of that name.

    Raises:
        OSError: It has not appeared.
    """
    disk.set_times(file, used_at_s, expires_at_s)
    return disk.publish(file, path)


def get(disk: Disk, name: ChunkName, row: memoryview, page: memoryview) -> ChunkHeader:
    """Read a chunk's file into a row and verify it.

    Args:
        disk: Where from.
        name: Which chunk.
        row: For the payload and its padding: a whole number of 4096 bytes.
        page: For the header, overwritten.

    Returns:
        The header. The row holds exactly what was stored; after an error it holds anything.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptChunkError: The file is short, or is not what was stored under this key.
        OSError: It could not be read.
    """
    file = disk.open(name.path)
    try:
        num_bytes = disk.read(file, [page, row])
    finally:
        disk.discard(file)
    header = page[: min(num_bytes, HEADER_BYTES)]
    payload = row[: max(0, min(num_bytes - HEADER_BYTES, name.chunk_bytes))]
    return verify_chunk(header, payload, name.key, name.namespace_digest, name.tier)
