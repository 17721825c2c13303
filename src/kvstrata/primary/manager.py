"""`CPUOffloadingManager`: chunks in host memory, complete on its own."""

from collections.abc import Callable, Collection, Iterable, Sequence

from typing_extensions import override

from kvstrata.core.clock import Clock, SystemClock
from kvstrata.core.errors import ContractError
from kvstrata.core.events import OffloadingEvent, RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import (
    NO_KEYS,
    OffloadingManager,
    RequestOffloadingContext,
    ShutdownReport,
)
from kvstrata.core.memory import SlotView
from kvstrata.core.policy import EvictionPolicy
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadStoreSpec, LookupResult, PrepareStoreOutput
from kvstrata.core.stats import Stats
from kvstrata.core.tenants import TenantResolver
from kvstrata.primary.chunk_store import ChunkStore, PrimaryLimits
from kvstrata.primary.counters import Counters, primary_stats
from kvstrata.primary.request_state import RequestState, RequestTable


def _nothing_stored() -> PrepareStoreOutput:
    return PrepareStoreOutput([], LoadStoreSpec([]), [])


class CPUOffloadingManager(OffloadingManager):
    """Keeps chunks in the rows of one host region, in the order its policy says.

    `store` and `requests` are there for an orchestrator above, which also fills slots from slower
    tiers; on its own the manager is all that an engine without such tiers needs.
    """

    def __init__(
        self,
        region: SlotView,
        policy: EvictionPolicy,
        *,
        limits: PrimaryLimits,
        tenants: TenantResolver | None = None,
        clock: Clock | None = None,
        close_region: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a region and a policy of the same capacity.

        Args:
            region: The slots; used, not owned.
            policy: Order and admission; owned.
            limits: Bounds of side tables.
            tenants: Says who a request belongs to.
            clock: Time.
            close_region: Called once, at shutdown.
        """
        clock = clock or SystemClock()
        self._slots = region
        self._limits = limits
        self._close_region = close_region
        self._counters = Counters()
        self._is_closed = False
        self.store = ChunkStore(region.num_slots, policy, limits, clock)
        self.requests = RequestTable(tenants or TenantResolver(), clock)

    @property
    @override
    def slots(self) -> SlotView:
        return self._slots

    @override
    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        self.requests.start(ctx)
        hints = ctx.hints
        self._counters.hint_errors += len(hints.problems)
        return RequestOffloadingContext(store=hints.store, load=hints.max_load_tokens != 0)

    @override
    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int | None:
        store = self.store
        if store.expiry:
            store.expire()
        if store.protection:
            self._resume(ctx.req_id)
        count = store.table.count_prefix(keys)
        limit = ctx.hints.max_load_tokens
        if limit is not None:
            count = min(count, limit // self._limits.tokens_per_chunk)
        counters = self._counters
        counters.lookups += 1
        counters.lookup_chunks += len(keys)
        counters.hit_chunks += count
        return count

    def _resume(self, req_id: str) -> None:
        """End the protection of a request that is back; its chunks are its latest use instead."""
        state = self.requests.find(req_id)
        if state is not None and state.protected:
            self.store.protection.release(state)
            keys = dict.fromkeys([*state.touched, *state.offered])
            self.store.policy.access(state.trail, list(keys), self.store.clock.now_s())

    @override
    def lookup_states(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        table = self.store.table
        now_s = self.store.clock.wall_s()
        expires_at_s = self.store.expiry.get
        return [
            LookupResult.MISS
            if key not in table or ((at_s := expires_at_s(key)) is not None and at_s <= now_s)
            else LookupResult.HIT_PENDING
            if table.is_writing(key)
            else LookupResult.HIT
            for key in keys
        ]

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        state = self.requests.get(ctx)
        keys = list(keys)
        state.touched = keys
        if ctx.hints.retention:
            state.apply_ranges(self._limits.tokens_per_chunk, self.store.clock.wall_s())
        self.store.policy.access(state.trail, keys, self.store.clock.now_s())
        if not state.is_live:
            self.requests.drop_if_done(state)

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        table = self.store.table
        slots = table.slots_of(keys)
        state = self.requests.get(ctx)
        pinned = dict(zip(keys, slots, strict=True))
        if state.loading:
            state.reloads += [item for item in pinned.items() if item[0] in state.loading]
            state.loading = pinned | state.loading
        else:
            state.loading = pinned
        table.pin(pinned.values())
        return LoadStoreSpec(slots)

    @override
    def complete_load(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        state = self.requests.find(ctx.req_id)
        if state is None:
            self._counters.late_completions += 1
            return
        loading = state.loading
        distinct = dict.fromkeys(keys)
        if not distinct.keys() <= loading.keys():
            distinct = self._without_unknown(distinct, loading, state, "loading")
        slots = (
            [self._end_load(state, key) for key in distinct]
            if state.reloads
            else [loading.pop(key) for key in distinct]
        )
        self.store.table.unpin(slots)
        num_failed = len(distinct.keys() & failed) if failed else 0
        self._counters.failed_load_chunks += num_failed
        self._counters.loaded_chunks += len(slots) - num_failed
        if not state.is_live:
            self.requests.drop_if_done(state)

    @staticmethod
    def _end_load(state: RequestState, key: OffloadKey) -> int:
        for i, (other, slot) in enumerate(state.reloads):
            if other == key:
                del state.reloads[i]
                return slot
        return state.loading.pop(key)

    def _without_unknown(
        self,
        keys: dict[OffloadKey, None],
        known: Collection[OffloadKey],
        state: RequestState,
        doing: str,
    ) -> dict[OffloadKey, None]:
        """Refuse what a live request did not prepare; ignore and count it for a finished one."""
        if state.is_live:
            unknown = next(key for key in keys if key not in known)
            raise ContractError(f"{state!r} is not {doing} {unknown.hex()}")
        self._counters.late_completions += 1
        return {key: None for key in keys if key in known}

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        counters, store = self._counters, self.store
        counters.offered_chunks += len(keys)
        if not ctx.hints.store:
            return _nothing_stored()
        state = self.requests.get(ctx)
        state.offered += keys
        if store.protection:
            self._resume(ctx.req_id)
        if store.expiry:
            store.expire()
        new = store.table.absent(keys)
        counters.present_chunks += len(keys) - len(new)
        if not new:
            self.requests.drop_if_done(state)
            return _nothing_stored()
        if ctx.hints.retention:
            state.apply_ranges(self._limits.tokens_per_chunk, store.clock.wall_s())
        reservation = store.reserve(new, state, state.trail, state.expires_at_s)
        num_stored = len(reservation.keys)
        if not num_stored:
            self.requests.drop_if_done(state)
            if not reservation.is_refusal:
                counters.no_room += 1
                return None
        for key in state.key_expires_at_s.keys() & reservation.keys:
            store.expiry.set([key], state.key_expires_at_s[key])
        state.num_storing += num_stored
        return PrepareStoreOutput(
            reservation.keys, LoadStoreSpec(reservation.slots), reservation.evicted
        )

    @override
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        state = self.requests.find(ctx.req_id)
        if state is None:
            self._counters.late_completions += 1
            return
        if not state.is_live:
            known = self.store.table.written_by(state, keys)
            if len(known) < len(keys):
                self._counters.late_completions += 1
                keys = known
        settled = self.store.settle(keys, state, failed)
        num_stored, num_failed = len(settled.stored), len(settled.failed)
        state.num_storing -= num_stored + num_failed + settled.num_dropped
        self._counters.stored_chunks += num_stored
        self._counters.failed_store_chunks += num_failed
        if not state.is_live:
            self.requests.drop_if_done(state)

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        state = self.requests.find(ctx.req_id)
        if state is None:
            return
        self.store.protection.release(state)
        state.is_live = False
        self.requests.drop_if_done(state)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        store = self.store
        if store.protection:
            for req_id in context.new_req_ids:
                self._resume(req_id)
        for req_id in context.preempted_req_ids:
            state = self.requests.find(req_id)
            if state is not None and state.is_live:
                store.protect(state)
        if store.protection or store.expiry:
            store.expire()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.store.take_events()

    @override
    def has_pending_work(self) -> bool:
        return bool(self.store.table.num_writing or self.store.table.num_pinned)

    @override
    def reset_cache(self) -> None:
        self.store.clear()

    @override
    def delete(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        self._counters.deleted_chunks += len(self.store.remove(keys, RemovalReason.DELETED))

    @override
    def get_stats(self) -> Stats:
        return primary_stats(self._slots, self.store, len(self.requests), self._counters)

    @override
    def shutdown(self, timeout_s: float = 10.0) -> ShutdownReport:
        if not self._is_closed:
            self._is_closed = True
            self._close_region()
        return ShutdownReport(num_abandoned=0)

    def check(self) -> None:
        """Assert every invariant. For tests."""
        self.store.check()
