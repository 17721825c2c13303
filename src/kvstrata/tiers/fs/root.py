"""A root seen from outside of any tier: for the operator, while tiers may be using it."""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstrata.core.errors import ConfigError, CorruptChunkError
from kvstrata.tiers.chunk_format import HEADER_BYTES, decode_header, digest_namespace, verify_chunk
from kvstrata.tiers.fs.chunk_file import new_page
from kvstrata.tiers.fs.disk import FoundFile
from kvstrata.tiers.fs.layout import LEDGER, dir_name
from kvstrata.tiers.fs.ledger import LEDGER_BYTES, Ledger
from kvstrata.tiers.fs.real_disk import RealDisk

_NAME: Final = "fs"


@dataclass(frozen=True, slots=True)
class RootTotals:
    """What is below a root: chunks and bytes by namespace, and the shared account."""

    namespaces: dict[str, tuple[int, int]]
    used_bytes: int  # as the account says, reservations included
    disk_bytes: int
    num_members: int  # processes that use it, this one left out
    num_temporaries: int
    free_bytes: int


class FsRoot:
    """An existing root; a member of its account, like a tier, for as long as it is open. Blocks."""

    def __init__(self, root: Path) -> None:
        """Open the root.

        Raises:
            ConfigError: No tier has ever used this directory.
        """
        if not (root / LEDGER).is_file():
            raise ConfigError(str(root), "is not the root of an fs tier")
        self._disk = RealDisk(root)
        self._ledger = Ledger(root)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the root."""
        self._ledger.close()
        self._disk.close()

    def chunks(self) -> Iterator[FoundFile]:
        """List all chunks."""
        return self._disk.scan()

    def totals(self) -> RootTotals:
        """Add up what is there."""
        with self._ledger.locked():
            namespaces: dict[str, tuple[int, int]] = {}
            for found in self._disk.scan():
                num_chunks, num_bytes = namespaces.get(found.directory, (0, 0))
                total = num_bytes + found.stat.num_bytes
                namespaces[found.directory] = (num_chunks + 1, total)
            return RootTotals(
                namespaces,
                self._ledger.used_bytes(),
                sum(num_bytes for _, num_bytes in namespaces.values()) + LEDGER_BYTES,
                len(self._ledger.others()),
                len(self._disk.list_temporaries()),
                self._disk.free_bytes(),
            )

    def problem_of(self, found: FoundFile) -> str | None:
        """Read one chunk completely; say what is wrong with it, None if nothing is."""
        row_bytes = found.stat.num_bytes - HEADER_BYTES
        if row_bytes <= 0 or row_bytes % HEADER_BYTES:
            return f"has {found.stat.num_bytes} bytes"
        page, row = new_page(), memoryview(mmap.mmap(-1, row_bytes))
        try:
            file = self._disk.open(found.path)
        except FileNotFoundError:
            return None  # evicted meanwhile
        try:
            self._disk.read(file, [page, row])
            header = decode_header(page, _NAME)
            if dir_name(header.namespace_digest, header.payload_bytes) != found.directory:
                return "is of another namespace or size"
            payload = row[: header.payload_bytes]
            verify_chunk(page, payload, found.key, header.namespace_digest, _NAME)
        except CorruptChunkError as error:
            return str(error)
        finally:
            self._disk.discard(file)
        return None

    def collect(self, is_garbage: Callable[[FoundFile], bool]) -> int:
        """Remove chunks, dead processes' temporaries and what is wrong in the account.

        Returns the bytes of the removed chunks.
        """
        removed_bytes = disk_bytes = 0
        with self._ledger.locked():
            alive = self._ledger.others()
            for path, owner in self._disk.list_temporaries().items():
                if owner not in alive:
                    self._disk.remove(path)
            with self._ledger.removing() as removed:
                for found in list(self._disk.scan()):
                    if is_garbage(found) and self._disk.remove(found.path):
                        removed.append(found.stat.num_bytes)
                    else:
                        disk_bytes += found.stat.num_bytes
            removed_bytes = sum(removed)
            self._ledger.recount(disk_bytes + LEDGER_BYTES, alive)
        return removed_bytes

    def trim(self, max_bytes: int) -> int:
        """Remove the longest unused chunks until the root has at most so many bytes."""
        excess = self.totals().disk_bytes - max_bytes
        doomed = set()
        for found in sorted(self._disk.scan(), key=lambda found: found.stat.used_at_s):
            if excess <= 0:
                break
            doomed.add(found.path)
            excess -= found.stat.num_bytes
        return self.collect(lambda found: found.path in doomed)

    def directories_of(self, namespace: str) -> list[str]:
        """Return the directories of a namespace, one for each size of chunks that it has.

        Args:
            namespace: Its name, or one of its directories.
        """
        first = {found.directory: found for found in self._disk.scan()}
        digest = digest_namespace(namespace)
        return [
            name
            for name, found in first.items()
            if name == namespace or self._digest_of(found.path) == digest
        ]

    def _digest_of(self, path: str) -> bytes | None:
        page = new_page()
        try:
            file = self._disk.open(path)
        except FileNotFoundError:
            return None
        try:
            self._disk.read(file, [page])
            return decode_header(page, _NAME).namespace_digest
        except CorruptChunkError:
            return None
        finally:
            self._disk.discard(file)

    def wipe(self, directory: str | None = None, prefix: bytes = b"") -> int:
        """Remove all chunks, or those of one directory, with such keys; return their bytes."""
        directories = {found.directory for found in self._disk.scan()}
        removed_bytes = self.collect(
            lambda found: directory in {None, found.directory} and found.key.startswith(prefix)
        )
        for each in directories:
            self._disk.remove_empty_dirs(each)
        return removed_bytes
