"""`FilterReusedOffloadingManager`: store a chunk only once it has been offered often enough."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from typing_extensions import override

from kvstrata.core.delegate import DelegatingManager
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadStoreSpec, PrepareStoreOutput
from kvstrata.core.stats import Stats


class FilterReusedOffloadingManager(DelegatingManager):
    """Passes a chunk on from the `store_threshold`-th request that offers it.

    Offers of stores are counted, not lookups, which stop at the first miss. A request that was
    preempted gets everything stored that it offers until it resumes or ends, so that resuming is a
    load. The tracker forgets the chunk whose last offer is longest ago.
    """

    def __init__(
        self, inner: OffloadingManager, *, store_threshold: int = 2, num_tracked_max: int = 262_144
    ) -> None:
        """Wrap any manager, one with tiers as well.

        Args:
            inner: Owned, and shut down with this one.
            store_threshold: Offers by different requests, at least 1; 1 passes everything on.
            num_tracked_max: Chunks whose offers are remembered, at least 1.
        """
        super().__init__(inner)
        if store_threshold < 1 or num_tracked_max < 1:
            raise ValueError("store_threshold and num_tracked_max must be at least 1")
        self._threshold = store_threshold
        self._num_tracked_max = num_tracked_max
        # The requests that offered it, as far as they count; offered longest ago first.
        self._offers: dict[OffloadKey, tuple[str, ...]] = {}
        self._preempted: set[str] = set()
        self._num_withheld = 0

    @override
    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int | None:
        self._preempted.discard(ctx.req_id)
        return self.inner.lookup(keys, ctx)

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        distinct = list(dict.fromkeys(keys))
        counts = [self._count(key, ctx.req_id) for key in distinct]
        while len(self._offers) > self._num_tracked_max:
            del self._offers[next(iter(self._offers))]
        if ctx.req_id not in self._preempted:
            passed = [
                key for key, count in zip(distinct, counts, strict=True) if count >= self._threshold
            ]
            self._num_withheld += len(distinct) - len(passed)
            distinct = passed
        if not distinct:
            return PrepareStoreOutput([], LoadStoreSpec([]), [])
        return self.inner.prepare_store(distinct, ctx)

    def _count(self, key: OffloadKey, req_id: str) -> int:
        """Note an offer; return how many requests have made one, up to the threshold."""
        offered_by = self._offers.pop(key, ())
        if len(offered_by) < self._threshold and req_id not in offered_by:
            offered_by = (*offered_by, req_id)
        self._offers[key] = offered_by
        return len(offered_by)

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        self._preempted.discard(ctx.req_id)
        self.inner.on_request_finished(ctx)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._preempted.difference_update(context.new_req_ids)
        self._preempted.update(context.preempted_req_ids)
        self.inner.on_schedule_end(context)

    @override
    def reset_cache(self) -> None:
        self._offers.clear()
        self.inner.reset_cache()

    @override
    def delete(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        for key in keys:
            self._offers.pop(key, None)
        self.inner.delete(keys, ctx)

    @override
    def delete_prefix(self, prefix: bytes) -> None:
        for key in [key for key in self._offers if key.startswith(prefix)]:
            del self._offers[key]
        self.inner.delete_prefix(prefix)

    @override
    def set_epoch(self, epoch: str, timeout_s: float = 10.0) -> None:
        self._offers.clear()
        self.inner.set_epoch(epoch, timeout_s)

    @override
    def get_stats(self) -> Stats:
        stats = self.inner.get_stats()
        return replace(
            stats,
            gauges={**stats.gauges, "num_tracked_offers": len(self._offers)},
            counters={**stats.counters, "withheld_chunks": self._num_withheld},
        )
