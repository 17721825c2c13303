"""Cascades: copies from primary slots into slower tiers, by write policy and within bounds."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse, groupby, islice

from kvstrata.core.config import WritePolicy
from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.policy import Run
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, StoreJob
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.primary.run_table import Held
from kvstrata.tiering.request_view import RequestView
from kvstrata.tiering.stretches import resident_among, there_among
from kvstrata.tiering.tier_handle import NEVER_S, TierHandle


@dataclass(slots=True, eq=False)
class Cascade:
    """One store into one tier: the chunks that it reads, held meanwhile."""

    handle: TierHandle
    held: Held
    ctx: ReqContext | None
    num_tries: int
    deleted: set[OffloadKey] = field(default_factory=set)  # while it was running


class Cascades:
    """Knows which tiers have, or are getting, each chunk of the primary, and copies what they lack.

    What a tier has no room for stays `behind`: it waits in the primary, unprotected, and is copied
    in order as soon as there is room. If it leaves before, it counts as dropped.
    """

    def __init__(
        self, store: ChunkStore, handles: Sequence[TierHandle], next_job_id: Callable[[], JobId]
    ) -> None:
        """Copy out of a store.

        Args:
            store: The primary's chunks.
            handles: The tiers; the caller may add and take away.
            next_job_id: Gives each job its id.
        """
        self._store = store
        self._handles = handles
        self._next_job_id = next_job_id

    def note_stored(
        self,
        keys: Sequence[OffloadKey],
        stores: Collection[TierHandle],
        ctx: ReqContext,
    ) -> None:
        """Chunks became resident through a request that may store to these tiers."""
        for handle in self._handles:
            if not handle.wants_stores:
                continue
            if handle not in stores:
                self._bar(keys, handle)
            elif handle.config.write is WritePolicy.THROUGH:
                self.store(keys, handle, ctx)

    @staticmethod
    def _bar(keys: Sequence[OffloadKey], handle: TierHandle) -> None:
        """Keep chunks out of a tier, unless another request has asked for it meanwhile."""
        behind = handle.behind
        handle.barred.update(key for key in keys if key not in behind)

    def note_offered(
        self, keys: Sequence[OffloadKey], new: Collection[OffloadKey], view: RequestView
    ) -> None:
        """A request offers chunks; all but the new ones may be in the primary already.

        Those are resident or still being written by others.
        """
        there: list[OffloadKey] | None = None
        for handle in view.stores:
            write = handle.config.write
            is_ahead = write is WritePolicy.ON_EVICT or handle.below.issuperset(keys)
            if is_ahead and not handle.barred:
                continue
            if there is None:
                there = there_among(keys, self._store.table, new)
            handle.barred.difference_update(there)
            if is_ahead or handle.below.issuperset(there):
                continue
            lacking = list(filterfalse(handle.below.__contains__, there))
            if write is WritePolicy.ON_REUSE:
                lacking = list(filterfalse(view.stored.__contains__, lacking))
            ready = resident_among(lacking, self._store.table)
            num_started = self.store(ready, handle, view.ctx)
            if len(ready) < len(lacking):
                started = set(ready[:num_started])
                late = [k for k in lacking if k not in started and k not in handle.behind]
                handle.behind.update(dict.fromkeys(late, view.ctx))

    def note_reused(self, keys: Sequence[OffloadKey], view: RequestView) -> None:
        """A request loads resident chunks."""
        for handle in view.stores:
            if handle.config.write is WritePolicy.ON_REUSE:
                self.store(list(dict.fromkeys(keys)), handle, view.ctx)

    def store(
        self,
        keys: Sequence[OffloadKey],
        handle: TierHandle,
        ctx: ReqContext | None,
        num_tries: int = 1,
    ) -> int:
        """Start copying what the tier lacks of these distinct resident chunks; return how many.

        The first ones get in; what there is no room for stays behind.
        """
        keys = self._lacking(keys, handle)
        room = handle.room_for_stores() if keys else 0
        num_started = self._start(keys[:room], handle, ctx, num_tries) if room else 0
        if num_started < len(keys):
            if num_tries == 1:
                handle.behind.update(dict.fromkeys(keys[num_started:], ctx))
            else:
                handle.counters.dropped_store_chunks += len(keys) - num_started
        return num_started

    @staticmethod
    def _lacking(keys: Sequence[OffloadKey], handle: TierHandle) -> Sequence[OffloadKey]:
        for there in (handle.below, handle.barred):
            if there:
                keys = list(filterfalse(there.__contains__, keys))
        return keys

    def _start(
        self, keys: Sequence[OffloadKey], handle: TierHandle, ctx: ReqContext | None, num_tries: int
    ) -> int:
        held = self._store.hold(list(keys))
        slots = [slot for run in held.runs for slot in run.slots]
        job = StoreJob(self._next_job_id(), held.keys, slots, ctx, _expiry_times(held))
        if not handle.submit_store(job, Cascade(handle, held, ctx, num_tries)):
            self._store.table.unhold(held)
            return 0
        handle.below.update(keys)
        for key in keys if handle.behind else ():
            handle.behind.pop(key, None)
        return len(keys)

    def settle(self, cascade: Cascade, result: JobResult) -> None:
        """Take a finished store's result; failed chunks are tried again within the budget."""
        handle, table = cascade.handle, self._store.table
        failed = [key for key in cascade.held.keys if key in result.failed]
        handle.below.difference_update(failed)
        table.unhold(cascade.held)
        if cascade.deleted:
            gone = [key for key in cascade.deleted if key not in table]
            if gone:
                handle.delete(gone)
        if failed and cascade.num_tries < handle.config.num_store_tries:
            again = [key for key in failed if self._store.is_resident(key)]
            num_retried = self.store(again, handle, cascade.ctx, cascade.num_tries + 1)
            handle.counters.retried_store_chunks += num_retried

    @staticmethod
    def abandon(cascade: Cascade) -> None:
        """Stop counting on a copy; its chunks stay held until the tier has answered."""
        cascade.handle.below.difference_update(cascade.held.keys)
        cascade.num_tries = cascade.handle.config.num_store_tries

    def note_fetched(self, keys: Iterable[OffloadKey], handle: TierHandle) -> None:
        """Chunks came up from a tier, so it has them."""
        handle.below.update(keys)

    def note_event(self, event: OffloadingEvent, handle: TierHandle) -> None:
        """A tier tells what came and left."""
        if event.kind is EventKind.STORED:
            handle.below.update(key for key in event.keys if self._store.is_resident(key))
        elif event.kind is EventKind.REMOVED:
            handle.below.difference_update(event.keys)
        else:
            handle.below.clear()

    def note_left(
        self, keys: Collection[OffloadKey], reason: RemovalReason
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Chunks left the primary: return those that a tier below has, and the others."""
        kept: set[OffloadKey] = set()
        is_whole = False
        for handle in self._handles:
            if reason is RemovalReason.EVICTED:
                self._count_dropped(keys, handle)
            if handle.below.issuperset(keys):
                is_whole = True
            else:
                kept |= handle.below.intersection(keys)
            handle.below.difference_update(keys)
            if handle.barred:
                handle.barred.difference_update(keys)
            for key in keys if handle.behind else ():
                handle.behind.pop(key, None)
        if is_whole:
            return list(keys), []
        if not kept:
            return [], list(keys)
        is_kept = kept.__contains__
        return list(filter(is_kept, keys)), list(filterfalse(is_kept, keys))

    @staticmethod
    def _count_dropped(keys: Collection[OffloadKey], handle: TierHandle) -> None:
        """Count what the tier was to get and now never will."""
        if handle.config.write is WritePolicy.ON_EVICT:
            below, barred = handle.below, handle.barred
            num_wanted = sum(key not in below and key not in barred for key in keys)
        else:
            num_wanted = sum(key in handle.behind for key in keys) if handle.behind else 0
        handle.counters.dropped_store_chunks += num_wanted

    def delete(self, keys: Collection[OffloadKey]) -> None:
        """Remove chunks from every tier, also those that are on their way there."""
        for handle in self._handles:
            for in_flight in handle.jobs.values():
                if isinstance(in_flight.owner, Cascade):
                    in_flight.owner.deleted |= set(in_flight.job.keys).intersection(keys)
            handle.delete(keys)
            for key in keys if handle.behind else ():
                handle.behind.pop(key, None)

    def delete_prefix(self, prefix: bytes) -> None:
        """Do `delete` for all keys that begin with these bytes."""
        for handle in self._handles:
            for in_flight in handle.jobs.values():
                if isinstance(in_flight.owner, Cascade):
                    found = {key for key in in_flight.job.keys if key.startswith(prefix)}
                    in_flight.owner.deleted |= found
            handle.delete_prefix(prefix)
            for key in [key for key in handle.behind if key.startswith(prefix)]:
                del handle.behind[key]

    def drop_copied(self, runs: Sequence[Run], count: int) -> int:
        """Evict runs that a tier below has, from the first on, until `count` chunks have left."""
        num_dropped = 0
        for run in list(runs):
            if num_dropped >= count:
                break
            is_free = run.owner is None and not run.num_holds and not run.is_dropped
            if is_free and run.keys and any(h.below.issuperset(run.keys) for h in self._handles):
                keys = run.keys[: count - num_dropped]
                num_dropped += len(self._store.remove(keys, RemovalReason.EVICTED))
        return num_dropped

    def end_step(self, num_ahead: int) -> None:
        """Copy what stayed behind, and what would leave next to the tiers that want just that.

        Args:
            num_ahead: So many slots should be free or hold chunks that are copied already.
        """
        for handle in self._handles:
            if handle.behind:
                self._catch_up(handle)
            if handle.config.write is WritePolicy.ON_EVICT:
                self._copy_ahead(handle, num_ahead - len(self._store.table.free))

    def _copy_ahead(self, handle: TierHandle, count: int) -> None:
        """Copy what of the next `count` chunks to leave is neither in a tier nor on its way there.

        Those on their way can't leave, so that the policy does not name them.
        """
        for in_flight in handle.jobs.values():
            if isinstance(in_flight.owner, Cascade) and in_flight.owner.ctx is None:
                count -= len(in_flight.owner.held.keys)
        for run, num_chunks in self._store.policy.choose(count) if count > 0 else ():
            keys = self._lacking(run.keys[-num_chunks:], handle)[: handle.room_for_stores()]
            if keys and run.owner is None:
                self._start(keys, handle, None, 1)

    def _catch_up(self, handle: TierHandle) -> None:
        if not handle.room_for_stores():
            return
        table = self._store.table
        for key in [
            key for key in handle.behind if key not in table
        ]:  # its writing came to nothing
            del handle.behind[key]
        ready = ((k, ctx) for k, ctx in handle.behind.items() if self._store.is_resident(k))
        first = list(islice(ready, handle.room_for_stores()))
        for ctx, group in groupby(first, key=lambda item: item[1]):
            keys = [key for key, _ in group]
            lacking = self._lacking(keys, handle)
            if lacking and not self._start(lacking, handle, ctx, 1):
                return
            for key in keys:
                handle.behind.pop(key, None)

    def flush(self, handles: Sequence[TierHandle]) -> int:
        """Start copying whatever only the primary holds; return how many chunks can't be now."""
        here, _ = self._store.table.all_runs()
        keys = [key for run in here if run.owner is None for key in run.keys]
        num_left = 0
        for handle in handles:
            if handle.wants_stores and handle.config.write is not WritePolicy.ON_REUSE:
                lacking = self._lacking(keys, handle)
                room = handle.room_for_stores()
                num_started = self._start(lacking[:room], handle, None, 1) if lacking[:room] else 0
                num_left += len(lacking) - num_started
        return num_left

    def clear(self) -> None:
        """Forget everything."""
        for handle in self._handles:
            handle.below.clear()
            handle.barred.clear()
            handle.behind.clear()

    def check(self) -> None:
        """Assert that only chunks of the table have entries. For tests."""
        for handle in self._handles:
            assert all(self._store.is_resident(key) for key in (*handle.below, *handle.barred))


def _expiry_times(held: Held) -> list[float] | None:
    if all(run.expires_at_s is None for run in held.runs):
        return None
    return [
        NEVER_S if run.expires_at_s is None else run.expires_at_s
        for run in held.runs
        for _ in run.keys
    ]
