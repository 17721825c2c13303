"""`TidyOffloadingManager`: lets unused chunks go after a while, and overwrites freed slots."""

from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Final

import numpy as np
from typing_extensions import override

from kvstrata.core.delegate import DelegatingManager
from kvstrata.core.events import RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import NO_KEYS, OffloadingManager
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadStoreSpec
from kvstrata.primary.chunk_store import ChunkStore

NUM_PERIODS: Final = 8
"""Uses are remembered by eighths of the lifetime, so a chunk may stay for that much longer."""

USED_SHARE_MAX: Final = 4
"""Keys remembered for each slot at most; those without a slot are forgotten first."""

ZEROED_BYTES_MAX: Final = 8 * 2**20
"""What one step overwrites at most, one slot apart: the scheduler waits for it."""


class TidyOffloadingManager(DelegatingManager):
    """Looks after the primary's chunks at the end of each step; below, each tier does it itself."""

    def __init__(
        self,
        inner: OffloadingManager,
        store: ChunkStore,
        *,
        idle_s: float | None = None,
        zero_freed: bool = False,
    ) -> None:
        """Wrap a manager; it is owned, and shut down with this one.

        Args:
            inner: With or without tiers.
            store: Its primary's chunks.
            idle_s: Chunks that nobody used for so long leave; None: never.
            zero_freed: Overwrite slots that hold nothing, within a few steps.
        """
        super().__init__(inner)
        self._store = store
        self._idle_s = idle_s
        self._used: set[OffloadKey] = set()  # in this period
        self._used_before: deque[tuple[float, set[OffloadKey]]] = deque()  # with each period's end
        self._period_ends_s = store.clock.now_s()
        self._zeroed: set[int] | None = set(range(store.table.num_slots)) if zero_freed else None

    @property
    def num_remembered(self) -> int:
        """Keys whose use is remembered, each one time for each period."""
        return len(self._used) + sum(len(keys) for _, keys in self._used_before)

    def _note_use(self, keys: Collection[OffloadKey]) -> None:
        if self._idle_s is not None:
            self._used.update(keys)
            if len(self._used) > USED_SHARE_MAX * self._store.table.num_slots + len(keys):
                self._used.intersection_update(self._store.table.all_keys())

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self._note_use(keys)
        self.inner.touch(keys, ctx)

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        self._note_use(keys)
        return self.inner.prepare_load(keys, ctx)

    @override
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        self._note_use(keys)
        self.inner.complete_store(keys, ctx, failed)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.inner.on_schedule_end(context)
        now_s = self._store.clock.now_s()
        if self._idle_s is not None and now_s >= self._period_ends_s:
            self._period_ends_s = now_s + self._idle_s / NUM_PERIODS
            self._drop_idle(now_s, self._idle_s)
        if self._zeroed is not None:
            self._zero_freed(self._zeroed)

    def _drop_idle(self, now_s: float, idle_s: float) -> None:
        here = set(self._store.table.all_keys())
        known = self._used.union(*(keys for _, keys in self._used_before))
        # What nobody used yet, such as a prefetch, counts from now on.
        self._used_before.append((now_s, (self._used & here) | (here - known)))
        self._used = set()
        while self._used_before[0][0] <= now_s - idle_s:
            _, keys = self._used_before.popleft()
            idle = keys.difference(*(later for _, later in self._used_before)) & here
            gone = self._store.remove(idle, RemovalReason.EXPIRED)
            self._store.num_expired += len(gone)

    def _zero_freed(self, zeroed: set[int]) -> None:
        free = set(self._store.table.free)
        zeroed &= free
        num_max = max(1, ZEROED_BYTES_MAX // self.slots.chunk_bytes)
        for slot in list(islice(free - zeroed, num_max)):
            np.frombuffer(self.slots.row(slot), np.uint8).fill(0)
            zeroed.add(slot)
