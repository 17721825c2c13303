"""Promotions: copies from slower tiers into primary slots, held there until they are read."""

from collections.abc import Callable, Collection, Iterable

from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.policy import RequestTrail, Run
from kvstrata.core.results import JobResult, LoadJob
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.tiering.request_view import RequestView
from kvstrata.tiering.tier_handle import TierHandle


class Promotion:
    """Chunks of one tier that one request waits for, in reserved slots; owner of these slots."""

    __slots__ = ("handle", "keys", "slots", "view")

    def __init__(
        self, handle: TierHandle, view: RequestView, keys: list[OffloadKey], slots: list[int]
    ) -> None:
        self.handle = handle
        self.view = view
        self.keys = keys
        self.slots = slots


class Promotions:
    """Reserves at lookup, submits at the end of the step, settles when the tier has answered.

    `num_spared` slots are left to stores: set when one found no room because of promotions.
    """

    def __init__(self, store: ChunkStore, next_job_id: Callable[[], JobId], hold_s: float) -> None:
        """Promote into a store.

        Args:
            store: The primary's chunks.
            next_job_id: Gives each job its id.
            hold_s: How long fetched chunks are kept for a request that does not come for them.
        """
        self._store = store
        self._next_job_id = next_job_id
        self._hold_s = hold_s
        self._waiting: dict[Promotion, None] = {}  # reserved, not yet submitted
        self._flying: dict[Promotion, None] = {}  # submitted, and waited for
        self._holders: dict[RequestView, None] = {}
        self.num_spared = 0
        self.num_withdrawn = 0
        self.num_given_way = 0

    @property
    def num_open(self) -> int:
        """Promotions that are reserved or running."""
        return len(self._waiting) + len(self._flying)

    def counters(self) -> dict[str, int]:
        """Return the totals by metric name."""
        return {
            "withdrawn_promotion_chunks": self.num_withdrawn,
            "given_way_chunks": self.num_given_way,
        }

    @property
    def has_holds(self) -> bool:
        """Whether chunks are kept for requests that have not loaded them yet."""
        return bool(self._holders)

    @staticmethod
    def source_of(run: Run) -> TierHandle | None:
        """Return the tier that a run is being promoted from; None if it is not."""
        return run.owner.handle if isinstance(run.owner, Promotion) else None

    def reserve(
        self,
        found: Iterable[tuple[TierHandle, list[OffloadKey]]],
        trail: RequestTrail,
        view: RequestView,
    ) -> int:
        """Reserve slots for chunks, in order, from these tiers; return how many got one.

        The first ones get theirs; nothing is copied before `submit`.
        """
        num_reserved = 0
        for handle, wanted in found:
            keys = wanted[: self._num_allowed()]
            if not keys:
                break
            promotion = Promotion(handle, view, [], [])
            stored, slots, _, _ = self._store.reserve_needed(keys, promotion, trail)
            promotion.keys, promotion.slots = list(stored), list(slots)
            if stored:
                self._waiting[promotion] = None
                num_reserved += len(stored)
            if len(stored) < len(wanted):
                break
        return num_reserved

    def _num_allowed(self) -> int:
        table = self._store.table
        if not self.num_spared:
            return table.num_slots
        num_open = sum(len(promotion.keys) for promotion in (*self._waiting, *self._flying))
        return max(0, table.num_slots - self.num_spared - num_open)

    def withdraw(self, req_ids: Collection[str]) -> None:
        """Give up what these requests wait for, as far as it was not submitted yet."""
        for promotion in list(self._waiting):
            if promotion.view.ctx.req_id in req_ids:
                self.num_withdrawn += len(promotion.keys)
                self._give_up(promotion)

    def _give_up(self, promotion: Promotion) -> None:
        self._waiting.pop(promotion, None)
        runs, _ = self._store.written_by(promotion, promotion.keys)
        self._store.settle(runs, frozenset(promotion.keys))

    def submit(self, new_req_ids: Collection[str]) -> None:
        """Start the copies, one job a tier and request: new requests first, then by priority."""

        def rank(promotion: Promotion) -> tuple[bool, int, int]:
            view = promotion.view
            is_old = view.ctx.req_id not in new_req_ids
            return is_old, -view.ctx.hints.priority, view.serial

        merged: dict[tuple[TierHandle, RequestView], Promotion] = {}
        for promotion in sorted(self._waiting, key=rank):
            if not self._prune(promotion):
                continue
            first = merged.setdefault((promotion.handle, promotion.view), promotion)
            if first is not promotion:
                self._merge(first, promotion)
        for promotion in merged.values():
            self._start(promotion)
        self._waiting.clear()

    def _prune(self, promotion: Promotion) -> bool:
        """Let go of chunks that were dropped since; say whether any are left.

        Another promotion of the same request may have them by now.
        """
        runs, _ = self._store.written_by(promotion, promotion.keys)
        dropped = [run for run in runs if run.is_dropped]
        if dropped:
            here = [run for run in runs if not run.is_dropped]
            self._store.settle(dropped, frozenset(promotion.keys))
            promotion.keys = [key for run in here for key in run.keys]
            promotion.slots = [slot for run in here for slot in run.slots]
        return bool(promotion.keys)

    def _merge(self, first: Promotion, more: Promotion) -> None:
        runs, _ = self._store.written_by(more, more.keys)
        for run in runs:
            run.owner = first
        first.keys += more.keys
        first.slots += more.slots

    def _start(self, promotion: Promotion) -> None:
        job = LoadJob(self._next_job_id(), promotion.keys, promotion.slots, promotion.view.ctx)
        if promotion.handle.submit_load(job, promotion):
            self._flying[promotion] = None
        else:
            promotion.view.failed.update(promotion.keys)
            self._give_up(promotion)

    def settle(self, promotion: Promotion, result: JobResult, now_s: float) -> list[OffloadKey]:
        """Take a finished promotion's result; return the chunks that can be loaded now."""
        self._flying.pop(promotion, None)
        view = promotion.view
        view.failed.update(result.failed)
        runs, _ = self._store.written_by(promotion, promotion.keys)
        _, arrived, _, _ = self._store.settle(runs, result.failed)
        if result.expires_at_s:
            self._store.limit_lifetimes(arrived, result.expires_at_s)
        if arrived and view.is_live:
            view.fetched.update(dict.fromkeys(arrived, promotion.handle.name))
            if not view.is_late(now_s):
                self._hold(view, arrived, now_s + self._hold_s)
        return arrived

    def abandon(self, promotion: Promotion) -> None:
        """Stop waiting for a copy; its slots stay taken until the tier has answered."""
        self._flying.pop(promotion, None)
        promotion.view.failed.update(promotion.keys)
        self._store.drop_written(promotion, promotion.keys)

    def _hold(self, view: RequestView, keys: list[OffloadKey], until_s: float) -> None:
        """Keep resident chunks until the request loads them, ends, or time is up."""
        view.held.append(self._store.hold(keys))
        view.held_until_s = until_s
        self._holders[view] = None

    def release(self, view: RequestView) -> None:
        """End all that is kept for a request."""
        if view in self._holders:
            del self._holders[view]
            for held in view.held:
                self._store.table.unhold(held)
            view.held.clear()

    def end_step(self, now_s: float) -> None:
        """End what is kept for requests that have begun to load, or did not come in time."""
        for view in list(self._holders):
            if view.is_loading or view.held_until_s <= now_s:
                self.release(view)
            view.is_loading = False

    def give_way(self, asking: RequestView | None, count: int) -> int:
        """Let go of `count` kept chunks where possible; return how many.

        The request that came last gives first, the last of its chunks first, and never the one that
        asks.
        """
        num_given = 0
        for view in sorted(self._holders, key=lambda view: -view.serial):
            if num_given >= count:
                break
            if view is asking:
                continue
            keys = [key for held in view.held for key in held.keys if self._store.is_resident(key)]
            num_kept = max(0, len(keys) - (count - num_given))
            until_s = view.held_until_s
            self.release(view)
            if num_kept:
                self._hold(view, keys[:num_kept], until_s)
            num_given += len(keys) - num_kept
        self.num_given_way += num_given
        return num_given

    def forget_tier(self, handle: TierHandle) -> None:
        """Give up what waits for a tier that is going."""
        for promotion in [p for p in self._waiting if p.handle is handle]:
            promotion.view.failed.update(promotion.keys)
            self._give_up(promotion)

    def clear(self) -> None:
        """End all holds and what is not submitted; the store was or will be cleared too."""
        for view in list(self._holders):
            self.release(view)
        for promotion in list(self._waiting):
            self._give_up(promotion)

    def check(self) -> None:
        """Assert that nothing is kept for requests that are gone. For tests."""
        for view in self._holders:
            assert view.is_live
            assert view.held
        for promotion in self._waiting:
            assert promotion.view.is_live
