"""Promotions: copies from slower tiers into primary slots, held there until they are read."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.policy import RequestTrail
from kvstrata.core.results import JobResult, LoadJob
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.tiering.request_view import RequestView
from kvstrata.tiering.tier_handle import TierHandle


class Promotion:
    """Chunks of one tier that one request waits for, in reserved slots; owner of these slots."""

    __slots__ = ("handle", "is_submitted", "keys", "slots", "view")

    def __init__(
        self,
        handle: TierHandle,
        view: RequestView | None,
        keys: list[OffloadKey],
        slots: list[int],
    ) -> None:
        self.handle = handle
        self.view = view
        self.keys = keys
        self.slots = slots
        self.is_submitted = False


class Promotions:
    """Reserves at lookup, submits at the end of the step, settles when the tier has answered."""

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
        self._num_flying = 0
        self._holders: dict[RequestView, None] = {}
        self.num_withdrawn = 0
        self.num_given_way = 0

    @property
    def num_open(self) -> int:
        """Promotions that are reserved or running."""
        return len(self._waiting) + self._num_flying

    @property
    def has_holds(self) -> bool:
        """Whether chunks are kept for requests that have not loaded them yet."""
        return bool(self._holders)

    def is_promoting(self, key: OffloadKey) -> bool:
        """Say whether a promotion of the chunk is reserved or running."""
        run = self._store.table.find(key)
        return run is not None and isinstance(run.owner, Promotion)

    def reserve(
        self,
        keys: Sequence[OffloadKey],
        handles: Sequence[TierHandle],
        trail: RequestTrail,
        view: RequestView | None,
    ) -> int:
        """Reserve slots for chunks, `keys[i]` from `handles[i]`; return how many got one.

        The first ones get theirs; nothing is copied before `submit`.
        """
        num_reserved = 0
        for handle, stretch in groupby(zip(keys, handles, strict=True), key=lambda item: item[1]):
            wanted = [key for key, _ in stretch]
            promotion = Promotion(handle, view, [], [])
            stored, slots, _, _ = self._store.reserve(wanted, promotion, trail)
            promotion.keys, promotion.slots = list(stored), list(slots)
            if stored:
                self._waiting[promotion] = None
                num_reserved += len(stored)
            if len(stored) < len(wanted):
                break
        return num_reserved

    def withdraw(self, req_ids: Collection[str]) -> None:
        """Give up what these requests wait for, as far as it was not submitted yet."""
        for promotion in list(self._waiting):
            if promotion.view is not None and promotion.view.ctx.req_id in req_ids:
                del self._waiting[promotion]
                self.num_withdrawn += len(promotion.keys)
                self._give_up(promotion, promotion.keys)

    def _give_up(self, promotion: Promotion, keys: Sequence[OffloadKey]) -> None:
        runs, _ = self._store.written_by(promotion, keys)
        self._store.settle(runs, frozenset(keys))

    def submit(self, new_req_ids: Collection[str]) -> None:
        """Start the copies, one job a tier and request: new requests first, then by priority."""

        def rank(promotion: Promotion) -> tuple[bool, int, int]:
            view = promotion.view
            if view is None:
                return True, 0, 0
            is_old = view.ctx.req_id not in new_req_ids
            return is_old, -view.ctx.hints.priority, view.serial

        waiting = sorted(self._waiting, key=rank)
        self._waiting.clear()
        merged: dict[tuple[TierHandle, RequestView | None], Promotion] = {}
        for promotion in waiting:
            first = merged.setdefault((promotion.handle, promotion.view), promotion)
            if first is not promotion:
                self._merge(first, promotion)
        for promotion in merged.values():
            self._start(promotion)

    def _merge(self, first: Promotion, more: Promotion) -> None:
        runs, _ = self._store.written_by(more, more.keys)
        for run in runs:
            run.owner = first
        first.keys += more.keys
        first.slots += more.slots

    def _start(self, promotion: Promotion) -> None:
        ctx = promotion.view.ctx if promotion.view is not None else None
        job = LoadJob(self._next_job_id(), promotion.keys, promotion.slots, ctx)
        promotion.is_submitted = True
        if promotion.handle.submit_load(job, promotion):
            self._num_flying += 1
        else:
            self._note_failed(promotion, promotion.keys)
            self._give_up(promotion, promotion.keys)

    @staticmethod
    def _note_failed(promotion: Promotion, keys: Iterable[OffloadKey]) -> None:
        if promotion.view is not None:
            promotion.view.failed.update(keys)

    def settle(self, promotion: Promotion, result: JobResult, now_s: float) -> list[OffloadKey]:
        """Take a finished promotion's result; return the chunks that can be loaded now."""
        self._num_flying -= 1
        self._note_failed(promotion, result.failed)
        runs, _ = self._store.written_by(promotion, promotion.keys)
        arrived = self._store.settle(runs, result.failed).stored
        view = promotion.view
        if view is not None and arrived:
            view.fetched.update(dict.fromkeys(arrived, promotion.handle.name))
            self.hold(view, arrived, now_s)
        return arrived

    def hold(self, view: RequestView, keys: list[OffloadKey], now_s: float) -> None:
        """Keep resident chunks until the request loads them, ends, or time is up."""
        view.held.append(self._store.hold(keys))
        view.held_until_s = now_s + self._hold_s
        self._holders[view] = None

    def release(self, view: RequestView) -> None:
        """End all that is kept for a request."""
        if self._holders.pop(view, ...) is None:
            for held in view.held:
                self._store.table.unhold(held)
            view.held.clear()

    def expire(self, now_s: float) -> None:
        """End what is kept for requests that did not come in time."""
        for view in [view for view in self._holders if view.held_until_s <= now_s]:
            self.release(view)

    def give_way(self, asking: RequestView | None, count: int) -> int:
        """Let go of at least `count` kept chunks where possible; return how many.

        The request that came last gives first, the last of its chunks first, and never the one that
        asks.
        """
        num_given = 0
        for view in sorted(self._holders, key=lambda view: -view.serial):
            if num_given >= count:
                break
            if view is asking:
                continue
            keys = [key for held in view.held for key in held.keys]
            num_kept = max(0, len(keys) - (count - num_given))
            self.release(view)
            if num_kept:
                kept = [key for key in keys[:num_kept] if self._store.is_resident(key)]
                until_s = view.held_until_s
                self.hold(view, kept, 0.0)
                view.held_until_s = until_s
            num_given += len(keys) - num_kept
        self.num_given_way += num_given
        return num_given

    def forget_tier(self, handle: TierHandle) -> None:
        """Give up what waits for a tier that is going."""
        for promotion in [p for p in self._waiting if p.handle is handle]:
            del self._waiting[promotion]
            self._note_failed(promotion, promotion.keys)
            self._give_up(promotion, promotion.keys)

    def clear(self) -> None:
        """Forget holds and what is not submitted; the store was or will be cleared too."""
        for view in list(self._holders):
            self.release(view)
        for promotion in list(self._waiting):
            self._give_up(promotion, promotion.keys)
        self._waiting.clear()
