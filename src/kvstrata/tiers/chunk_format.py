"""The header that goes with every stored chunk, and the check of a chunk against it.

A stored chunk is this header of 4096 bytes and, right after it, the payload. The two stay separate
buffers: a tier writes and reads them with one vectored call, so the payload is never copied.

All numbers are little-endian:

    offset  bytes
         0      8   magic "KVSTRATA"
         8      2   version, 1
        10      2   bytes of the key
        12      4   zero
        16      8   bytes of the payload
        24      8   expiry in seconds since 1970, a double; infinity: never
        32     16   XXH3-128 of the payload
        48     32   SHA-256 of the namespace
        80      n   the key, then zeros
      4080     16   XXH3-128 of the 4080 bytes before

XXH3 finds accidents, not forgery: whoever may write into the store is trusted.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from kvstrata.core.errors import CorruptChunkError
from kvstrata.core.keys import OffloadKey

Buffer = bytes | bytearray | memoryview

HEADER_BYTES: Final = 4096
MAGIC: Final = b"KVSTRATA"
VERSION: Final = 1
NEVER_S: Final = math.inf

_FIXED: Final = struct.Struct("<8sHHIQd16s32s")
_CHECKSUM_BYTES: Final = 16
_BODY_BYTES: Final = HEADER_BYTES - _CHECKSUM_BYTES
KEY_BYTES_MAX: Final = _BODY_BYTES - _FIXED.size


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a header says of its chunk."""

    key: OffloadKey
    payload_bytes: int
    expires_at_s: float  # seconds since 1970
    checksum: bytes
    namespace_digest: bytes


def digest_namespace(namespace: str) -> bytes:
    """Return the 32 bytes that stand for a namespace in headers."""
    return hashlib.sha256(namespace.encode("utf-8", "surrogatepass")).digest()


def checksum(payload: Buffer) -> bytes:
    """Return the 16 bytes that change when any byte of the payload does. Releases the GIL."""
    return xxhash.xxh3_128_digest(payload)


def encode_header(
    key: OffloadKey, payload: Buffer, namespace_digest: bytes, expires_at_s: float = NEVER_S
) -> bytes:
    """Return the header for this payload: exactly 4096 bytes.

    Args:
        key: At most `KEY_BYTES_MAX` bytes.
        payload: The chunk's bytes, without padding; read one time, for its checksum.
        namespace_digest: From `digest_namespace`.
        expires_at_s: When the chunk must be gone, in seconds since 1970.

    Raises:
        ValueError: The key is too long.
    """
    if len(key) > KEY_BYTES_MAX:
        raise ValueError(f"a key of {len(key)} bytes does not fit, at most {KEY_BYTES_MAX} do")
    fixed = _FIXED.pack(
        MAGIC, VERSION, len(key), 0, len(payload), expires_at_s, checksum(payload), namespace_digest
    )
    body = (fixed + key).ljust(_BODY_BYTES, b"\0")
    return body + checksum(body)


def decode_header(header: Buffer, tier: str) -> ChunkHeader:
    """Return what a header says, after checking that it is whole.

    Args:
        header: The first bytes of a stored chunk; fewer than 4096 are an error, more are ignored.
        tier: Name of the tier, for the error.

    Raises:
        CorruptChunkError: It is short, is no header, has another version, or was altered.
    """
    view = memoryview(header)[:HEADER_BYTES]
    if len(view) < HEADER_BYTES:
        raise CorruptChunkError(tier, f"header has {len(view)} of {HEADER_BYTES} bytes")
    magic, version, key_bytes, _, payload_bytes, expires_at_s, payload_checksum, digest = (
        _FIXED.unpack_from(view)
    )
    if magic != MAGIC:
        raise CorruptChunkError(tier, f"not a chunk: it starts with {magic.hex()}")
    if version != VERSION:
        raise CorruptChunkError(tier, f"written in version {version}, this reads {VERSION}")
    if checksum(view[:_BODY_BYTES]) != bytes(view[_BODY_BYTES:]):
        raise CorruptChunkError(tier, "header and its checksum differ")
    if key_bytes > KEY_BYTES_MAX:
        raise CorruptChunkError(tier, f"claims a key of {key_bytes} bytes")
    key = OffloadKey(bytes(view[_FIXED.size : _FIXED.size + key_bytes]))
    return ChunkHeader(key, payload_bytes, expires_at_s, payload_checksum, digest)


def verify_chunk(
    header: Buffer, payload: Buffer, key: OffloadKey, namespace_digest: bytes, tier: str
) -> ChunkHeader:
    """Return the header of a stored chunk if it and the payload are exactly what was stored.

    An expired chunk is not an error: the caller compares `expires_at_s` with its clock.

    Args:
        header: The first 4096 bytes.
        payload: The chunk's bytes, without padding.
        key: The key that the caller asked for.
        namespace_digest: The namespace that the caller asked in.
        tier: Name of the tier, for the error.

    Raises:
        CorruptChunkError: Header, key, namespace, length or checksum is wrong; the text says which.
    """
    found = decode_header(header, tier)
    if found.key != key:
        raise CorruptChunkError(tier, f"asked for {key.hex()}, found {found.key.hex()}")
    if found.namespace_digest != namespace_digest:
        raise CorruptChunkError(tier, f"{key.hex()} is of another namespace")
    if found.payload_bytes != len(payload):
        raise CorruptChunkError(
            tier, f"{key.hex()} has {found.payload_bytes} bytes instead of {len(payload)}"
        )
    if found.checksum != checksum(payload):
        raise CorruptChunkError(tier, f"payload of {key.hex()} and its checksum differ")
    return found
