"""One namespace's chunks on a disk: write, read, find and mark them, one call at a time."""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from kvstrata.core.errors import CorruptChunkError
from kvstrata.core.events import RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.core.tier import TierEnv
from kvstrata.tiers.fs import chunk_file
from kvstrata.tiers.fs.chunk_file import ChunkName
from kvstrata.tiers.fs.disk import Disk
from kvstrata.tiers.fs.index import Index, Write
from kvstrata.tiers.fs.journal import Journal
from kvstrata.tiers.fs.layout import KEY_BYTES_MAX, ChunkDir
from kvstrata.tiers.fs.ledger import LEDGER_BYTES, Ledger
from kvstrata.tiers.fs.settings import FsSettings, Sharing
from kvstrata.tiers.fs.sweep import Sweep
from kvstrata.tiers.jobs import Outcome

logger = logging.getLogger("kvstrata.fs")


class _Forgotten(NamedTuple):
    keys: Sequence[OffloadKey]
    reason: RemovalReason
    resident: Sequence[OffloadKey]


class ChunkStore:
    """Chunks of one size and namespace below a root. Blocks; thread: any.

    Starting adopts what is there and brings the root below its limits.
    """

    def __init__(self, disk: Disk, settings: FsSettings, env: TierEnv, chunk_bytes: int) -> None:
        self.chunks = ChunkDir.of(env.namespace, chunk_bytes)
        settings.check(self.chunks.file_bytes, LEDGER_BYTES, env.path)
        self.index = Index()
        self.journal = Journal(env.name)
        self.ledger = Ledger(settings.root)
        self._sharing = settings.shared
        self._disk = disk
        self._disk.owner = self.ledger.row
        self._num_wipes = 0
        self._num_wiped = 0
        self._forgotten: deque[_Forgotten] = deque()
        self._prefixes: deque[bytes] = deque()
        self._forgetting = threading.Lock()
        self._env = env
        self.sweep = Sweep(
            disk,
            self.ledger,
            self.index,
            self.journal,
            chunks=self.chunks,
            settings=settings,
            clock=env.clock,
        )
        self.sweep.rescan()

    def close(self) -> None:
        """Leave the root to others."""
        self.ledger.close()

    def write(self, write: Write, row: memoryview, page: memoryview) -> None:
        """Write one chunk for which `sweep.grant` has reserved room; `publish` comes next.

        Raises:
            OSError: It could not be written; nothing of it is left, nor reserved.
        """
        try:
            name = self._name_of(write.key)
            write.file = chunk_file.write(self._disk, name, row, page, write.expires_at_s)
        finally:
            if write.file is None:
                self.sweep.release(write)

    def publish(self, writes: Sequence[Write]) -> list[Outcome | OSError]:
        """Let written chunks appear, unless they are void; return how each ended."""
        results: Sequence[Outcome | OSError]
        try:
            results = self.sweep.publish(writes)
        except OSError as error:  # the account can't be had
            results = [error] * len(writes)
            for write in writes:
                with suppress(OSError):
                    self.sweep.release(write)
        for write in writes:
            if write.file is not None:
                self._disk.discard(write.file)
        return [
            Outcome.FAILED if write.is_void and not isinstance(result, OSError) else result
            for write, result in zip(writes, results, strict=True)
        ]

    def read(self, key: OffloadKey, row: memoryview, page: memoryview) -> Outcome:
        """Read one chunk into a row and verify it; what can't be used is removed.

        Raises:
            OSError: It could not be read.
        """
        is_gone = self.index.is_leaving(key) or key.startswith(self.leaving_prefixes())
        if is_gone or self.is_wiping():
            return Outcome.FAILED
        try:
            header = chunk_file.get(self._disk, self._name_of(key), row, page)
        except FileNotFoundError:
            self._note_missing(key)
            return Outcome.FAILED
        except CorruptChunkError as error:
            logger.warning("%s; the file is removed", error)
            self.sweep.remove([key], RemovalReason.CORRUPT)
            return Outcome.CORRUPT
        if header.expires_at_s <= self._env.clock.wall_s():
            self.sweep.remove([key], RemovalReason.EXPIRED)
            return Outcome.FAILED
        return Outcome.ARRIVED

    def may_have_more(self) -> bool:
        """Say whether chunks may be on disk that the index does not know. Does not block."""
        if self._sharing is Sharing.AUTO:
            return self.ledger.has_company()
        return self._sharing is Sharing.YES

    def probe(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Look for files that others may have written, and make them resident; return the rest."""
        found, absent = [], []
        for key in keys:
            stat = self._disk.stat(self._path_of(key)) if self.can_hold(key) else None
            if stat is None or stat.num_bytes != self.chunks.file_bytes:
                absent.append(key)
            else:
                found.append((key, stat))
        self.journal.note_stored(self.index.adopt(found))
        return absent

    def mark(self, num_max: int) -> int:
        """Tell files of the last use of their chunks, so that others and later starts know.

        Returns for how many it did.
        """
        unmarked = self.index.take_unmarked(num_max)
        for key, entry in unmarked:
            try:
                self._disk.set_times(self._path_of(key), entry.used_at_s, entry.expires_at_s)
            except FileNotFoundError:
                self._note_missing(key)
        return len(unmarked)

    def make_fan(self, first: str) -> None:
        """Make a part of the directories ahead of the stores that need them."""
        self._disk.make_fan(self.chunks.name, first)

    def forget(self, keys: Sequence[OffloadKey], reason: RemovalReason) -> None:
        """Make chunks leave now; their files are gone after `finish_forgetting`. Does not block.

        Resident ones are announced as removed then.
        """
        self._forgotten.append(_Forgotten(keys, reason, self.index.expel(keys)))

    def forget_expired(self) -> bool:
        """Make chunks leave whose time is over; say whether there are any. Does not block."""
        wall_s = self._env.clock.wall_s()
        if not self.index.has_due(wall_s):
            return False
        expired = self.index.take_expired(wall_s)
        if expired:
            self._forgotten.append(_Forgotten(expired, RemovalReason.EXPIRED, expired))
        return bool(expired)

    def forget_idle(self, idle_s: float) -> None:
        """Remove chunks that nobody used for so long."""
        idle = self.index.take_idle(self._env.clock.wall_s() - idle_s)
        if idle:
            self._forgotten.append(_Forgotten(idle, RemovalReason.EXPIRED, idle))
            self.finish_forgetting()

    def forget_all(self) -> None:
        """Make all chunks leave now; their files are gone after `finish_forgetting`."""
        if self.index.clear():
            self.journal.note_cleared()
        self._num_wipes += 1

    def forget_prefix(self, prefix: bytes) -> None:
        """Make all chunks leave whose key begins so, known or not. Does not block."""
        self._prefixes.append(prefix)

    def leaving_prefixes(self) -> tuple[bytes, ...]:
        """Return what `forget_prefix` was told and `finish_forgetting` has not done."""
        return tuple(self._prefixes)

    def is_wiping(self) -> bool:
        """Say whether files are still there after `forget_all`."""
        return self._num_wiped != self._num_wipes

    def finish_forgetting(self) -> None:
        """Remove the files that were forgotten; afterwards those keys may be stored again."""
        with self._forgetting:
            if self.is_wiping():
                num_wipes = self._num_wipes
                self.sweep.wipe()
                self._num_wiped = num_wipes
            while self._forgotten:
                self.sweep.remove(*self._forgotten.popleft())
            while self._prefixes:
                self.sweep.remove_prefix(self._prefixes[0])
                self._prefixes.popleft()

    def check(self) -> None:
        """Assert that the account equals what is on disk, given that nobody writes."""
        with self.ledger.locked():
            disk_bytes = sum(found.stat.num_bytes for found in self._disk.scan())
            assert self.ledger.reserved_bytes == 0
            assert self.ledger.used_bytes() == disk_bytes + LEDGER_BYTES
            assert not self._disk.list_temporaries()

    def can_hold(self, key: OffloadKey) -> bool:
        """Say whether the key fits into a file name."""
        return 0 < len(key) <= KEY_BYTES_MAX

    def _note_missing(self, key: OffloadKey) -> None:
        dropped = self.index.drop([key])
        self.index.gone(dropped)
        if dropped:
            self.sweep.has_drifted = True
            self.journal.note_removed(dropped, RemovalReason.EXTERNAL)

    def _name_of(self, key: OffloadKey) -> ChunkName:
        chunks = self.chunks
        return ChunkName(
            self._path_of(key), key, chunks.namespace_digest, chunks.chunk_bytes, self._env.name
        )

    def _path_of(self, key: OffloadKey) -> str:
        return self.chunks.path_of(key)
