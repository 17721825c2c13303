"""What the tier does besides copies: expiry, removals, limits, and looks at what is on disk."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.events import RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.tiers.fs.layout import FAN_DIRS
from kvstrata.tiers.fs.settings import FsSettings
from kvstrata.tiers.fs.store import ChunkStore
from kvstrata.tiers.fs.workers import Lane, Workers

logger = logging.getLogger("kvstrata.fs")

CHECK_FREE_S: Final = 1.0
MARK_S: Final = 600.0
NUM_MARKED_MAX: Final = 256
NUM_CHUNKS_FOR_FAN: Final = 4096
NUM_IDLE_LOOKS: Final = 8  # for unused chunks, within the time after which they leave
SCAN_SHARE: Final = 0.01
"""A look at the whole root takes no more than this share of the time."""


@dataclass(slots=True, eq=False)
class _Chore:
    do: Callable[[], None]

    @override
    def __str__(self) -> str:
        return f"upkeep {getattr(self.do, '__name__', 'of directories')}"

    def run(self, page: memoryview) -> None:
        del page
        try:
            self.do()
        except OSError as error:
            logger.warning("upkeep failed: %s", error)

    def fail(self) -> None:
        pass  # whatever it left undone, the next scan finds


class Upkeep:
    """Starts what is due at the end of a step. Thread: the manager's, except where it says so."""

    def __init__(
        self, store: ChunkStore, workers: Workers, settings: FsSettings, clock: Clock
    ) -> None:
        now_s = clock.now_s()
        self._store = store
        self._workers = workers
        self._settings = settings
        self._clock = clock
        self._is_scanning = False
        self._may_scan_at_s = now_s
        self._scan_at_s = now_s + settings.refresh_s
        self._check_free_at_s = now_s
        self._mark_at_s = now_s + MARK_S
        self._idle_at_s = now_s

    def start_what_is_due(self) -> None:
        """Queue all upkeep whose time has come."""
        if self._store.forget_expired():
            self._submit(Lane.CHORE, self._store.finish_forgetting)
        if self._store.index.is_behind():
            self._submit(Lane.CHORE, self._store.index.catch_up)
        now_s = self._clock.now_s()
        wants_scan = self._store.sweep.has_drifted or now_s >= self._scan_at_s
        if wants_scan and not self._is_scanning and now_s >= self._may_scan_at_s:
            self._is_scanning = True
            self._submit(Lane.IDLE, self._scan)
        if self._settings.min_free_bytes and now_s >= self._check_free_at_s:
            self._check_free_at_s = now_s + CHECK_FREE_S
            self._submit(Lane.CHORE, self._store.sweep.keep_free)
        idle_s = self._settings.idle_s
        if idle_s is not None and now_s >= self._idle_at_s:
            self._idle_at_s = now_s + idle_s / NUM_IDLE_LOOKS
            self._submit(Lane.CHORE, partial(self._store.forget_idle, idle_s))
        if now_s >= self._mark_at_s:
            self._mark_at_s = now_s + MARK_S
            self.mark()

    def make_fan(self) -> None:
        """Make directories in the background, so that no store has to; not for a few chunks."""
        max_bytes = self._settings.max_bytes
        if max_bytes is not None and max_bytes < NUM_CHUNKS_FOR_FAN * self._store.chunks.file_bytes:
            return
        makers = (_Chore(partial(self._store.make_fan, first)) for first in FAN_DIRS)
        self._workers.submit(Lane.IDLE, makers)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Forget chunks now, and remove their files in the background."""
        self._store.forget(keys, RemovalReason.DELETED)
        self._submit(Lane.CHORE, self._store.finish_forgetting)

    def delete_prefix(self, prefix: bytes) -> None:
        """Forget chunks by the start of their keys now, and remove files in the background."""
        self._store.forget_prefix(prefix)
        self._submit(Lane.CHORE, self._store.finish_forgetting)

    def wipe(self) -> None:
        """Forget all chunks of the namespace now, and remove their files in the background."""
        self._store.forget_all()
        self._submit(Lane.CHORE, self._store.finish_forgetting)

    def mark(self) -> None:
        """Tell files of the last use of their chunks, in the background, some at a time."""
        self._submit(Lane.IDLE, self._mark_some)

    def _mark_some(self) -> None:
        if self._store.mark(NUM_MARKED_MAX):
            self.mark()

    def _scan(self) -> None:
        started_s = self._clock.now_s()
        try:
            self._store.sweep.rescan()
        finally:
            ended_s = self._clock.now_s()
            self._may_scan_at_s = ended_s + (ended_s - started_s) / SCAN_SHARE
            self._scan_at_s = ended_s + self._settings.refresh_s
            self._is_scanning = False

    def _submit(self, lane: Lane, do: Callable[[], None]) -> None:
        self._workers.submit(lane, iter([_Chore(do)]))
