"""Capacity: who may write how much, who leaves for it, and what is on disk at all."""

import logging
from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from kvstrata.core.clock import Clock
from kvstrata.core.events import RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.tiers.fs import chunk_file
from kvstrata.tiers.fs.disk import Disk, FoundFile
from kvstrata.tiers.fs.index import Index, Write
from kvstrata.tiers.fs.journal import Journal
from kvstrata.tiers.fs.layout import ChunkDir
from kvstrata.tiers.fs.ledger import LEDGER_BYTES, Ledger
from kvstrata.tiers.fs.removal import Removal
from kvstrata.tiers.fs.settings import FsSettings
from kvstrata.tiers.jobs import Outcome
from kvstrata.tiers.recency import Trail

if TYPE_CHECKING:
    from kvstrata.tiers.fs.workers import Workers

logger = logging.getLogger("kvstrata.fs")

_USED: Final = attrgetter("stat.used_at_s")
_NUM_AT_A_TIME: Final = 256  # so that others get at the account in between
_AMPLE_BYTES: Final = 2**62


class Sweep:
    """Keeps the root below its limits, whoever fills it. Blocks; thread: any.

    Files of other namespaces below the same root count too, and leave when they have been unused
    for longer than what would leave of this one.
    """

    def __init__(
        self,
        disk: Disk,
        ledger: Ledger,
        index: Index,
        journal: Journal,
        *,
        chunks: ChunkDir,
        settings: FsSettings,
        clock: Clock,
    ) -> None:
        self.has_drifted = False  # somebody else removed files, so the account is too high
        self.helpers: Workers | None = None  # to remove files
        self._disk = disk
        self._ledger = ledger
        self._index = index
        self._journal = journal
        self._chunks = chunks
        self._file_bytes = chunks.file_bytes
        self._settings = settings
        self._clock = clock
        self._strangers: list[FoundFile] = []  # of other namespaces, longest unused first

    def grant(self, writes: Sequence[Write]) -> int:
        """Make room for the first of these chunks, as many as possible, and reserve it.

        Returns how many; they are marked as reserved.

        Raises:
            OSError: The disk failed; nothing is reserved.
        """
        if not writes:
            return 0
        with self._ledger.locked():
            needed = len(writes) * self._file_bytes
            room = self._room()
            if room < 0:
                room += self._shed(-room)
            if room < needed:
                room += self._evict_strangers(needed - room)
            room += self._evict(needed - room, writes[0].trail)
            if room < needed and self._ledger.has_company():
                self._rescan()  # what takes the room may be files of others, not known here yet
                room = self._room()
                room += self._evict(needed - room, writes[0].trail)
            num_granted = min(len(writes), max(0, room) // self._file_bytes)
            if num_granted:
                self._ledger.reserve(num_granted * self._file_bytes)
            for write in writes[:num_granted]:
                write.is_reserved = True
            return num_granted

    def release(self, write: Write) -> None:
        """Give back what is still reserved for a chunk that was not written."""
        if write.is_reserved:
            write.is_reserved = False
            with self._ledger.locked():
                self._ledger.release(self._file_bytes)

    def publish(self, writes: Sequence[Write]) -> list[Outcome | OSError]:
        """Let written files appear, settle their reservations and make the chunks resident.

        Returns for each whether it has appeared, was there already, or why it could not. A chunk
        that became void meanwhile is removed at once.
        """
        results: list[Outcome | OSError] = []
        with self._ledger.locked():
            for write in writes:
                try:
                    results.append(self._appear(write))
                except OSError as error:
                    results.append(error)
            num_arrived = results.count(Outcome.ARRIVED)
            if num_arrived:
                self._ledger.settle(num_arrived * self._file_bytes)
            if num_arrived < len(writes):
                self._ledger.release((len(writes) - num_arrived) * self._file_bytes)
            outcomes: dict[Write, Outcome] = {}
            for write, result in zip(writes, results, strict=True):
                write.is_reserved = False
                if not isinstance(result, OSError):
                    outcomes[write] = result
            new, void = self._index.add(outcomes, self._clock.wall_s())
            self._journal.note_stored(new)
            if void:
                self._unpublish([write for write in void if outcomes[write] is Outcome.ARRIVED])
        return results

    def _appear(self, write: Write) -> Outcome:
        assert write.file is not None
        has_appeared = chunk_file.publish(
            self._disk,
            write.file,
            self._chunks.path_of(write.key),
            write.used_at_s,
            write.expires_at_s,
        )
        return Outcome.ARRIVED if has_appeared else Outcome.PRESENT

    def _unpublish(self, writes: Sequence[Write]) -> None:
        with self._ledger.removing() as removed:
            for write in writes:
                if self._disk.remove(self._chunks.path_of(write.key)):
                    removed.append(self._file_bytes)

    def remove(
        self, keys: Sequence[OffloadKey], reason: RemovalReason, leaving: Iterable[OffloadKey] = ()
    ) -> None:
        """Remove the files of chunks, if there are any.

        Those that are resident are announced, and those of `leaving`, which were until just now.
        """
        with self._ledger.locked():
            announced = {*leaving, *self._index.drop(keys)}
            self._unlink(keys, reason, announced)

    def remove_prefix(self, prefix: bytes) -> None:
        """Remove all chunks of this namespace whose key begins so, some at a time."""
        known = [key for key in self._index.residents() if key.startswith(prefix)]
        mine = (each for each in self._disk.scan() if each.directory == self._chunks.name)
        keys = list(dict.fromkeys([*known, *(f.key for f in mine if f.key.startswith(prefix))]))
        for start in range(0, len(keys), _NUM_AT_A_TIME):
            self.remove(keys[start : start + _NUM_AT_A_TIME], RemovalReason.DELETED)

    def keep_free(self) -> None:
        """Remove what has to go for the limits, without anything to be written."""
        with self._ledger.locked():
            if (room := self._room()) < 0:
                self._shed(-room)

    def rescan(self) -> None:
        """Compare what is known with what is on disk, and set both index and account right.

        Removes what dead members left behind, and files of the wrong size.
        """
        with self._ledger.locked():
            self._rescan()

    def wipe(self) -> None:
        """Remove all files of this namespace."""
        with self._ledger.locked(), self._ledger.removing() as removed:
            for found in list(self._disk.scan()):
                if found.directory == self._chunks.name and self._disk.remove(found.path):
                    removed.append(found.stat.num_bytes)
            self._disk.remove_empty_dirs(self._chunks.name)

    def used_bytes(self) -> int:
        """Return what lies below the root or is reserved, as of this member's last look."""
        return self._ledger.last_used_bytes

    def _rescan(self) -> None:
        self.has_drifted = False
        alive = self._ledger.others()
        self._remove_temporaries(alive)
        found = sorted(self._disk.scan(), key=_USED)
        mine = [each for each in found if each.directory == self._chunks.name]
        self._strangers = [each for each in found if each.directory != self._chunks.name]
        whole = {each.key: each for each in mine if each.stat.num_bytes == self._file_bytes}
        disk_bytes = sum(each.stat.num_bytes for each in (*self._strangers, *whole.values()))
        self._remove_broken([each for each in mine if each.key not in whole])
        missing = self._index.drop(key for key in self._index.residents() if key not in whole)
        self._index.gone(missing)
        self._journal.note_removed(missing, RemovalReason.EXTERNAL)
        self._journal.note_stored(
            self._index.adopt((key, each.stat) for key, each in whole.items())
        )
        self._ledger.recount(disk_bytes + LEDGER_BYTES, alive)
        if (room := self._room()) < 0:
            self._shed(-room)

    def _room(self) -> int:
        """Return the bytes that may be written; negative where too much is there already."""
        room = _AMPLE_BYTES
        if self._settings.max_bytes is not None:
            room = self._settings.max_bytes - self._ledger.used_bytes()
        if self._settings.min_free_bytes:
            free_bytes = self._disk.free_bytes() - self._ledger.reserved_bytes
            room = min(room, free_bytes - self._settings.min_free_bytes)
        return room

    def _evict(self, num_bytes: int, trail: Trail) -> int:
        """Remove chunks of this namespace for others of a request; return the bytes freed."""
        num_chunks = -(-max(0, num_bytes) // self._file_bytes)
        return self._unlink(self._index.evict(num_chunks, trail), RemovalReason.EVICTED)

    def _shed(self, num_bytes: int) -> int:
        """Remove the longest unused files, whosesoever they are; return the bytes freed."""
        freed = 0
        while freed < num_bytes:
            freed_now = self._evict_strangers(num_bytes - freed)
            victim = self._index.next_victim()
            if victim is not None and not freed_now:
                freed_now = self._unlink(self._index.drop([victim[0]]), RemovalReason.EVICTED)
            elif not freed_now:
                break
            freed += freed_now
        return freed

    def _evict_strangers(self, num_bytes: int) -> int:
        """Remove files of other namespaces that were used before all of ours."""
        freed = 0
        victim = self._index.next_victim()
        with self._ledger.removing() as removed:
            while self._strangers and freed < num_bytes:
                oldest = self._strangers[0]
                if victim is not None and victim[1] < oldest.stat.used_at_s:
                    break
                self._strangers.pop(0)
                stat = self._disk.stat(oldest.path)
                if stat is not None and stat.used_at_s > oldest.stat.used_at_s:
                    insort(self._strangers, oldest._replace(stat=stat), key=_USED)
                elif self._disk.remove(oldest.path):
                    removed.append(oldest.stat.num_bytes)
                    freed += oldest.stat.num_bytes
        return freed

    def _unlink(
        self,
        keys: Sequence[OffloadKey],
        reason: RemovalReason,
        announced: Collection[OffloadKey] | None = None,
    ) -> int:
        """Remove files of leaving chunks; return the bytes freed."""
        announced = keys if announced is None else announced
        removal = Removal(self._disk, [self._chunks.path_of(key) for key in keys])
        with self._ledger.removing() as removed:
            removal.finish(self.helpers)
            removed.extend([self._file_bytes] * removal.were_there.count(True))
        done = list(zip(keys, removal.were_there, strict=True))
        gone = [key for key, was_there in done if was_there]
        missing = [key for key, was_there in done if was_there is False]
        self._index.gone(keys)  # after an error the next scan finds the rest again
        self._journal.note_removed([key for key in gone if key in announced], reason)
        external = [key for key in missing if key in announced]
        self._journal.note_removed(external, RemovalReason.EXTERNAL)
        self.has_drifted |= bool(external)
        if removal.error is not None:
            raise removal.error
        return self._file_bytes * len(gone)

    def _remove_temporaries(self, alive: Collection[int]) -> None:
        """Remove what dead members left, and an earlier holder of this one's row."""
        for path, owner in self._disk.list_temporaries().items():
            is_ours = owner == self._ledger.row
            if owner not in alive and not (is_ours and self._ledger.reserved_bytes):
                self._disk.remove(path)

    def _remove_broken(self, files: Sequence[FoundFile]) -> None:
        for each in files:
            logger.warning("%s has %d bytes and is removed", each.path, each.stat.num_bytes)
            self._disk.remove(each.path)
            dropped = self._index.drop([each.key])
            self._index.gone(dropped)
            self._journal.note_removed(dropped, RemovalReason.CORRUPT)
            self._journal.note_broken()
