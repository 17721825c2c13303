"""Names of files below a root: which chunk is where, and which files are ours at all.

    ROOT/.kvstrata/ledger                     who uses how much (ledger.py)
    ROOT/.kvstrata/tmp/N-M                    files in the making, if they need names
    ROOT/v1-NAMESPACE/a/b/KEY.chunk           one chunk

NAMESPACE is 32 hexadecimal digits of a digest of the namespace's name and the size of its chunks,
KEY is the key in hexadecimal digits, `a/b` are two more of its hash: nothing that anybody
chooses becomes part of a name. Whatever is named differently is not ours.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Self

import xxhash

from kvstrata.core.keys import OffloadKey
from kvstrata.core.memory import row_bytes_for
from kvstrata.tiers.chunk_format import HEADER_BYTES, digest_namespace

PRIVATE_DIR: Final = ".kvstrata"
LEDGER: Final = f"{PRIVATE_DIR}/ledger"
TEMPORARY_DIR: Final = f"{PRIVATE_DIR}/tmp"
SUFFIX: Final = ".chunk"
KEY_BYTES_MAX: Final = (255 - len(SUFFIX)) // 2  # file names have at most 255 bytes

NAMESPACE_DIR: Final = re.compile(r"v1-[0-9a-f]{32}")
FAN_DIRS: Final = tuple("0123456789abcdef")  # on two levels: 256 directories with files
CHUNK_FILE: Final = re.compile(r"((?:[0-9a-f]{2}){1,124})\.chunk")
TEMPORARY: Final = re.compile(r"([0-9]+)-[0-9]+")


@dataclass(frozen=True, slots=True)
class ChunkDir:
    """The directory of one namespace's chunks of one size."""

    name: str
    namespace_digest: bytes
    chunk_bytes: int

    @classmethod
    def of(cls, namespace: str, chunk_bytes: int) -> Self:
        """Name the directory after what has to be equal for its chunks to be of use."""
        namespace_digest = digest_namespace(namespace)
        return cls(dir_name(namespace_digest, chunk_bytes), namespace_digest, chunk_bytes)

    @property
    def file_bytes(self) -> int:
        """Size of each file: header and payload, each a whole number of 4096 bytes."""
        return HEADER_BYTES + row_bytes_for(self.chunk_bytes)

    def path_of(self, key: OffloadKey) -> str:
        """Return a path relative to the root; the key has at most `KEY_BYTES_MAX` bytes."""
        fan = xxhash.xxh3_64_intdigest(key) & 0xFF
        return f"{self.name}/{fan >> 4:x}/{fan & 15:x}/{key.hex()}{SUFFIX}"


def dir_name(namespace_digest: bytes, chunk_bytes: int) -> str:
    """Return the name of the directory for a namespace and a size of chunks."""
    digest = hashlib.sha256(namespace_digest + chunk_bytes.to_bytes(8, "little"))
    return f"v1-{digest.hexdigest()[:32]}"


def key_of(file_name: str) -> OffloadKey | None:
    """Return the key that a file's name spells; None if it is not a chunk's name."""
    match = CHUNK_FILE.fullmatch(file_name)
    return OffloadKey(bytes.fromhex(match[1])) if match else None
