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
    SuspendMode,
)
from kvstrata.core.memory import SlotView
from kvstrata.core.policy import EvictionPolicy
from kvstrata.core.request import NO_HINTS, ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadStoreSpec, LookupResult, PrepareStoreOutput
from kvstrata.core.stats import Stats
from kvstrata.core.tenants import TenantResolver
from kvstrata.primary.chunk_store import ChunkStore, PrimaryLimits
from kvstrata.primary.counters import Counters, primary_stats
from kvstrata.primary.protection import Protection
from kvstrata.primary.request_state import RequestState, RequestTable

WELCOME = RequestOffloadingContext()


def _nothing_stored() -> PrepareStoreOutput:
    return PrepareStoreOutput([], LoadStoreSpec([]), [])


class CPUOffloadingManager(OffloadingManager):
    """Keeps chunks in the rows of one host region, in the order its policy says.

    `store` and `requests` are there for an orchestrator above, which also fills slots from slower
    tiers, and which may set `make_room`: asked to let go of so many chunks where a store found no
    room, it returns how many may leave now. On its own the manager is all that an engine without
    such tiers needs.
    """

    def __init__(
        self,
        region: SlotView,
        policy: EvictionPolicy,
        *,
        limits: PrimaryLimits,
        with_classes: Callable[[EvictionPolicy], EvictionPolicy] = lambda policy: policy,
        tenants: TenantResolver | None = None,
        clock: Clock | None = None,
        close_region: Callable[[], None] = lambda: None,
        release_rows: Callable[[Sequence[int]], None] = lambda _slots: None,
    ) -> None:
        """Take a region, which is used, and a policy of the same capacity, which is owned.

        `with_classes` puts priority classes and pools around the policy; it is called once, when
        the first request comes that needs them. `close_region` is called once, at shutdown;
        `release_rows` with slots whose memory is not needed for now.
        """
        clock = clock or SystemClock()
        self._slots = region
        self._limits = limits
        self._close_region, self._release_rows = close_region, release_rows
        self._counters = Counters()
        self._is_closed, self._epoch = False, ""
        self.store = ChunkStore(region.num_slots, policy, limits, clock)
        self._protection = Protection(self.store.table, limits.num_protected_max, limits.protect_s)
        self.requests = RequestTable(tenants or TenantResolver(), clock, self._need_classes)
        self.take_events = self.store.take_events  # type: ignore[method-assign]  # a call less
        self.make_room: Callable[[RequestState, int], int] = lambda _state, _count: 0
        self._with_classes: Callable[[EvictionPolicy], EvictionPolicy] | None = with_classes

    def _need_classes(self) -> None:
        if self._with_classes is not None:
            self.store.policy = self._with_classes(self.store.policy)
            self._with_classes = None

    @property
    @override
    def slots(self) -> SlotView:
        return self._slots

    @override
    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        self.requests.start(ctx)
        hints = ctx.hints
        if hints is NO_HINTS:
            return WELCOME
        self._counters.hint_errors += len(hints.problems)
        return RequestOffloadingContext(store=hints.store, load=hints.max_load_tokens != 0)

    @override
    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int | None:
        store = self.store
        if store.expiry.watched:
            store.expire()
        if self._protection.until_s:
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
        """End the protection of a request that is back; that counts as a use of its chunks."""
        state = self.requests.states.get(req_id)
        if state is not None and state.protected is not None:
            self._protection.release(state)
            self.store.access(state, state.used_keys())

    @override
    def lookup_states(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        find, wall_s = self.store.table.find, self.store.clock.wall_s()
        states = []
        for key in keys:
            run = find(key)
            if run is None or (run.expires_at_s is not None and run.expires_at_s <= wall_s):
                states.append(LookupResult.MISS)
            elif run.owner is None:
                states.append(LookupResult.HIT)
            else:
                states.append(LookupResult.HIT_PENDING)
        return states

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        state = self.requests.states.get(ctx.req_id) or self.requests.get(ctx)
        state.touched = keys = list(keys)
        if ctx.hints.retention:
            state.apply_ranges(self._limits.tokens_per_chunk, self.store.clock.wall_s())
        self.store.access(state, keys)
        if not state.is_live:
            self.requests.drop_if_done(state)

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        if not keys:
            return LoadStoreSpec([])
        known = self.requests.states.get(ctx.req_id)
        held = self.store.hold(list(keys), known)
        state = known or self.requests.get(ctx)
        if not (state.loads or state.num_storing):
            state.copying_since_s = self.store.clock.now_s()
        state.loads.append(held)
        slots: list[int] = []
        for run in held.runs:
            slots += run.slots
        if len(slots) < len(keys):  # some are named repeatedly
            slot_of = dict(zip(held.keys, slots, strict=True))
            slots = [slot_of[key] for key in keys]
        return LoadStoreSpec(slots)

    @override
    def complete_load(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        state = self.requests.states.get(ctx.req_id)
        if state is None:
            self._counters.late_completions += 1
            return
        loads, unhold, num_loaded = state.loads, self.store.table.unhold, 0
        if len(loads) == 1 and loads[0].keys == keys:
            found, state.loads = loads, []
        else:
            found, unknown = state.find_loads(keys)
            if unknown:
                self._refuse_unknown(state, unknown, "loading")
            state.close_loads(found)
        for held in found:
            unhold(held)
            num_loaded += len(held.keys)
        if failed:
            num_failed = sum(key in failed for held in found for key in held.keys)
            self._counters.failed_load_chunks += num_failed
            num_loaded -= num_failed
        self._counters.loaded_chunks += num_loaded
        if not state.is_live:
            self.requests.drop_if_done(state)

    def _refuse_unknown(self, state: RequestState, keys: list[OffloadKey], doing: str) -> None:
        """Refuse what a live request did not prepare; count it for a finished one."""
        if state.is_live:
            raise ContractError(f"{state!r} is not {doing} {keys[0].hex()}")
        self._counters.late_completions += 1

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        counters, store = self._counters, self.store
        counters.offered_chunks += len(keys)
        known = self.requests.states.get(ctx.req_id)
        if not ctx.hints.store or (known is not None and known.is_barred):
            return _nothing_stored()
        state = known or self.requests.get(ctx)
        state.offered += keys
        if store.expiry.watched:
            store.expire()
        new = store.table.absent(keys)
        if store.table.dropped.runs:
            written = store.table.dropped.writes_of(state)
            new = [key for key in new if key not in written]
        counters.present_chunks += len(keys) - len(new)
        if not new:
            self.requests.drop_if_done(state)
            return _nothing_stored()
        if ctx.hints.retention:
            state.apply_ranges(self._limits.tokens_per_chunk, store.clock.wall_s())
        stored, slots, evicted, is_refusal = store.reserve(new, state, state)
        num_left = len(new) - len(stored)
        if num_left and not is_refusal and self.make_room(state, num_left):
            more, more_slots, more_evicted, is_refusal = store.reserve(
                new[len(stored) :], state, state
            )
            stored, slots = [*stored, *more], [*slots, *more_slots]
            evicted = [*evicted, *more_evicted]
        if not stored:
            self.requests.drop_if_done(state)
            if not is_refusal:
                counters.no_room += 1
                return None
        if not (state.loads or state.num_storing):
            state.copying_since_s = store.reserved_s
        state.num_storing += len(stored)
        return PrepareStoreOutput(stored, LoadStoreSpec(slots), evicted)

    @override
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        self.settle_store(keys, ctx, failed)

    def settle_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext, failed: Collection[OffloadKey]
    ) -> list[OffloadKey]:
        """Do `complete_store`, and return the chunks that can be loaded from now on."""
        state = self.requests.states.get(ctx.req_id)
        if state is None:
            self._counters.late_completions += 1
            return []
        runs, unknown = self.store.written_by(state, keys)
        if unknown:
            self._refuse_unknown(state, unknown, "storing")
        _, stored, lost, num_settled = self.store.settle(runs, failed, state)
        state.num_storing -= num_settled
        if state.protected is not None:  # preempted meanwhile: what just arrived is kept as well
            self._protection.protect(state, self.store.clock.now_s())
        self._counters.stored_chunks += len(stored)
        if lost:
            self._counters.failed_store_chunks += len(lost)
        if not state.is_live:
            self.requests.drop_if_done(state)
        return stored

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        state = self.requests.states.get(ctx.req_id)
        if state is None:
            return
        if state.protected is not None:
            self._protection.release(state)
        state.is_live = False
        if not (state.loads or state.num_storing):
            del self.requests.states[ctx.req_id]

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._protection.until_s:
            for req_id in context.new_req_ids:
                self._resume(req_id)
        for req_id in context.preempted_req_ids:
            state = self.requests.states.get(req_id)
            if state is not None and state.is_live:
                self._protection.protect(state, self.store.clock.now_s())
        if self._protection.until_s:
            self._protection.expire(self.store.clock.now_s())
        if self.store.expiry.watched:
            self.store.expire()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.store.take_events()

    @override
    def has_pending_work(self) -> bool:
        return self.requests.has_copies()

    @override
    def reset_cache(self) -> None:
        self._protection.clear()
        self.store.clear()

    @override
    def delete(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        self._counters.deleted_chunks += len(self.store.remove(keys, RemovalReason.DELETED))

    @override
    def delete_prefix(self, prefix: bytes) -> None:
        keys = [key for key in self.store.table.all_keys() if key.startswith(prefix)]
        self._counters.deleted_chunks += len(self.store.remove(keys, RemovalReason.DELETED))

    @override
    def suspend(self, mode: SuspendMode, timeout_s: float = 10.0) -> None:
        if mode is not SuspendMode.KEEP:
            self.reset_cache()
            _, in_use = self.store.table.all_runs()
            used = {slot for run in in_use for slot in run.slots}
            self._release_rows([i for i in range(self._slots.num_slots) if i not in used])

    @override
    def set_epoch(self, epoch: str, timeout_s: float = 10.0) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            for state in self.requests.states.values():
                state.is_barred = True
            self.reset_cache()

    @override
    def get_stats(self) -> Stats:
        return primary_stats(
            self._slots, self.store, self._protection.num_chunks, self.requests, self._counters
        )

    @override
    def shutdown(self, timeout_s: float = 10.0) -> ShutdownReport:
        if not self._is_closed:
            self._is_closed = True
            self._close_region()
        return ShutdownReport(num_abandoned=0)

    def check(self) -> None:
        """Assert every invariant. For tests."""
        self.store.check()
