"""Cascades: copies from primary slots into slower tiers, by write policy and within bounds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstrata.core.config import WritePolicy
from kvstrata.core.events import RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.policy import Run
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, StoreJob
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.primary.run_table import Held
from kvstrata.tiering.tier_handle import TierHandle

NEVER_S = float("inf")


@dataclass(slots=True, eq=False)
class Cascade:
    """One store into one tier: the chunks that it reads, held meanwhile."""

    handle: TierHandle
    held: Held
    ctx: ReqContext | None
    num_tries: int
    deleted: set[OffloadKey] = field(default_factory=set)  # while it was running


class Cascades:
    """Knows which tiers have, or are getting, each resident chunk, and copies what they lack.

    `below[key]` is a mask of tiers; a bit is set when the copy starts and cleared when it failed or
    the tier says that the chunk left it. Only resident chunks have an entry.
    """

    def __init__(self, store: ChunkStore, next_job_id: Callable[[], JobId]) -> None:
        """Copy out of a store; `next_job_id` gives each job its id."""
        self._store = store
        self._next_job_id = next_job_id
        self.below: dict[OffloadKey, int] = {}
        self.barred: dict[OffloadKey, int] = {}  # tiers that the storing request ruled out
        self._wanted: dict[OffloadKey, tuple[int, ReqContext | None]] = {}  # still being written

    def note_stored(
        self, keys: Sequence[OffloadKey], handles: Sequence[TierHandle], mask: int, ctx: ReqContext
    ) -> None:
        """Chunks became resident through a request that may store to the tiers in `mask`."""
        barred = 0
        for handle in handles:
            if not mask & handle.bit:
                barred |= handle.bit
            elif handle.config.write is WritePolicy.THROUGH:
                self.store(keys, handle, ctx)
        if barred:
            self.barred.update(dict.fromkeys(keys, barred))
        for key in keys if self._wanted else ():
            more, other = self._wanted.pop(key, (0, None))
            for handle in handles:
                if more & handle.bit:
                    self.store([key], handle, other)

    def note_offered(
        self, keys: Sequence[OffloadKey], handles: Sequence[TierHandle], mask: int, ctx: ReqContext
    ) -> None:
        """A request offers chunks that are here already, or that another request is writing."""
        for handle in handles:
            if not mask & handle.bit:
                continue
            for key in keys:
                if self.barred.get(key, 0) & handle.bit:
                    self.barred[key] &= ~handle.bit
            if handle.config.write is WritePolicy.THROUGH:
                ready = [key for key in keys if self._store.is_resident(key)]
                self.store(ready, handle, ctx)
                for key in keys:
                    if key in self._store.table and not self._store.is_resident(key):
                        bits, _ = self._wanted.get(key, (0, None))
                        self._wanted[key] = (bits | handle.bit, ctx)

    def note_reused(
        self, keys: Sequence[OffloadKey], handles: Sequence[TierHandle], mask: int, ctx: ReqContext
    ) -> None:
        """A request uses chunks that an earlier one stored."""
        for handle in handles:
            if mask & handle.bit and handle.config.write is WritePolicy.ON_REUSE:
                self.store(keys, handle, ctx)

    def store(
        self,
        keys: Iterable[OffloadKey],
        handle: TierHandle,
        ctx: ReqContext | None,
        num_tries: int = 1,
    ) -> int:
        """Start copying the resident chunks that the tier lacks; return how many.

        What the tier's queue has no room for is dropped and counted; the first ones get in.
        """
        bit, below, barred = handle.bit, self.below, self.barred
        missing = [
            key
            for key in dict.fromkeys(keys)
            if not below.get(key, 0) & bit and not barred.get(key, 0) & bit
        ]
        if not missing:
            return 0
        if not handle.is_usable():
            handle.counters.dropped_store_chunks += len(missing)
            return 0
        room = max(0, handle.config.num_queued_chunks_max - handle.num_storing)
        handle.counters.dropped_store_chunks += max(0, len(missing) - room)
        missing = missing[:room]
        if not missing:
            return 0
        held = self._store.hold(missing)
        cascade = Cascade(handle, held, ctx, num_tries)
        slots = [slot for run in held.runs for slot in run.slots]
        job = StoreJob(self._next_job_id(), missing, slots, ctx, self._expiry_times(held))
        if not handle.submit_store(job, cascade):
            self._store.table.unhold(held)
            handle.counters.dropped_store_chunks += len(missing)
            return 0
        for key in missing:
            below[key] = below.get(key, 0) | bit
        return len(missing)

    @staticmethod
    def _expiry_times(held: Held) -> list[float] | None:
        if all(run.expires_at_s is None for run in held.runs):
            return None
        return [
            NEVER_S if run.expires_at_s is None else run.expires_at_s
            for run in held.runs
            for _ in run.keys
        ]

    def settle(self, cascade: Cascade, result: JobResult) -> None:
        """Take a finished store's result; failed chunks are tried again within the budget."""
        handle = cascade.handle
        failed = [key for key in cascade.held.keys if key in result.failed]
        for key in failed:
            if key in self.below:
                self.below[key] &= ~handle.bit
        self._store.table.unhold(cascade.held)
        if cascade.deleted:
            handle.delete(cascade.deleted)
            failed = [key for key in failed if key not in cascade.deleted]
        if failed and cascade.num_tries < handle.config.num_store_tries:
            again = [key for key in failed if self._store.is_resident(key)]
            num = self.store(again, handle, cascade.ctx, cascade.num_tries + 1)
            handle.counters.retried_store_chunks += num

    def note_fetched(self, keys: Iterable[OffloadKey], handle: TierHandle) -> None:
        """Chunks came up from a tier, so it has them."""
        for key in keys:
            self.below[key] = self.below.get(key, 0) | handle.bit

    def note_lost(self, keys: Iterable[OffloadKey], handle: TierHandle) -> None:
        """A tier does not have these chunks any more."""
        for key in keys:
            if key in self.below:
                self.below[key] &= ~handle.bit

    def note_left(self, keys: Iterable[OffloadKey]) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Chunks left the primary: return those that a tier below has, and the others."""
        kept: list[OffloadKey] = []
        lost: list[OffloadKey] = []
        for key in keys:
            (kept if self.below.pop(key, 0) else lost).append(key)
            self.barred.pop(key, None)
            self._wanted.pop(key, None)
        return kept, lost

    def drop_copied(self, runs: Sequence[Run], count: int) -> int:
        """Evict runs that tiers below have, from the first on, until `count` chunks have left."""
        num_dropped = 0
        for run in list(runs):
            if num_dropped >= count:
                break
            is_free = run.owner is None and not run.num_holds and not run.is_dropped
            if is_free and run.keys and all(self.below.get(key) for key in run.keys):
                keys = run.keys[: count - num_dropped]
                num_dropped += len(self._store.remove(keys, RemovalReason.EVICTED))
        return num_dropped

    def sweep(self) -> None:
        """Forget wishes for chunks whose writing came to nothing."""
        if self._wanted:
            table = self._store.table
            self._wanted = {key: wish for key, wish in self._wanted.items() if key in table}

    def clean_ahead(self, handles: Sequence[TierHandle], count: int) -> None:
        """Copy the chunks that would leave next into the tiers that want what is evicted."""
        if not any(handle.config.write is WritePolicy.ON_EVICT for handle in handles):
            return
        for run, num_chunks in self._store.policy.choose(count):
            if run.owner is not None:
                continue
            for handle in handles:
                if handle.config.write is WritePolicy.ON_EVICT:
                    self.store(run.keys[-num_chunks:], handle, None)

    def flush(self, handles: Sequence[TierHandle]) -> int:
        """Start copying whatever only the primary holds; return how many chunks can't be."""
        here, _ = self._store.table.all_runs()
        keys = [key for run in here if run.owner is None for key in run.keys]
        num_left = 0
        for handle in handles:
            if handle.wants_stores and handle.config.write is not WritePolicy.ON_REUSE:
                lacking = [key for key in keys if not self.below.get(key, 0) & handle.bit]
                allowed = [k for k in lacking if not self.barred.get(k, 0) & handle.bit]
                num_left += len(allowed) - self.store(allowed, handle, None)
        return num_left

    def forget_tier(self, handle: TierHandle) -> None:
        """Forget a tier that is gone."""
        self.note_lost(list(self.below), handle)
        for key, (bits, ctx) in list(self._wanted.items()):
            self._wanted[key] = (bits & ~handle.bit, ctx)

    def clear(self) -> None:
        """Forget everything."""
        self.below.clear()
        self.barred.clear()
        self._wanted.clear()

    def check(self) -> None:
        """Assert that only chunks of the table have entries. For tests."""
        for key in [*self.below, *self.barred, *self._wanted]:
            assert key in self._store.table
