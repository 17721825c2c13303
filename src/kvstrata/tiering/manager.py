"""`TieringOffloadingManager`: the order of events in a step, over one primary and its tiers."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.config import WritePolicy
from kvstrata.core.events import PRIMARY_MEDIUM
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import NO_KEYS, RequestOffloadingContext
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadStoreSpec, LookupResult, PrepareStoreOutput
from kvstrata.core.tenants import TenantResolver
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.primary.request_state import RequestState
from kvstrata.tiering.operation import TieredManager
from kvstrata.tiering.request_view import RequestRecord, RequestView
from kvstrata.tiering.survey import Survey, ask_tiers, survey
from kvstrata.tiering.tier_set import MakeHandle
from kvstrata.tiering.waiting import Patience, TieringLimits

AHEAD_SHARE: Final = 1 / 8  # of the slots: free or copied already, where tiers want what is evicted


class TieringOffloadingManager(TieredManager):
    """Keeps chunks in the primary and below: fetches at lookup, copies down after stores.

    Results of tiers are taken once a step, at the first call that decides on slots. A request that
    is not live is served from the primary only.
    """

    def __init__(
        self,
        primary: CPUOffloadingManager,
        make_handle: MakeHandle,
        *,
        limits: TieringLimits,
        tenants: TenantResolver,
        clock: Clock,
    ) -> None:
        """Take a primary, which is owned; tiers come by `attach_tier`."""
        super().__init__(primary, make_handle, limits=limits, tenants=tenants, clock=clock)
        self._patience = Patience(limits)
        self._serial = itertools.count()
        primary.make_room = self._make_room

    @override
    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        answer = self.inner.on_new_request(ctx)
        view = RequestView(ctx, next(self._serial), self._clock.now_s(), (), ())
        self._views[ctx.req_id] = view
        self._route(view)
        for handle in self._handles:
            handle.on_new_request(ctx)
        return answer

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        view = self._views.pop(ctx.req_id, None)
        if view is not None:
            view.is_live = False
            self._promotions.withdraw([ctx.req_id])
            self._promotions.release(view)
        self.inner.on_request_finished(ctx)
        for handle in self._handles:
            handle.on_request_finished(ctx)

    # Lookup and load

    @override
    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int | None:
        self._retire()
        count = self.inner.lookup(keys, ctx) or 0
        view = self._views.get(ctx.req_id)
        if view is None:
            return count
        view.num_missed = len(keys) - count
        limit = ctx.hints.max_load_tokens
        if limit is not None:
            keys = keys[: limit // self._patience.limits.tokens_per_chunk]
        now_s = self._clock.now_s()
        if count < len(keys) and view.loads and not view.is_late(now_s):
            found = survey(keys[count:], self._store, self._promotions, view)
            if self._patience.is_worth_waiting(found) and self._is_coming(
                found, view, keys[:count]
            ):
                self._patience.wait(view, now_s)
                return None
        view.note_answer(now_s)
        return count

    def _is_coming(self, found: Survey, view: RequestView, ready: Sequence[OffloadKey]) -> bool:
        """Reserve what can be fetched, not at the cost of what is ready; say whether to wait."""
        num_reserved = 0
        if found.found:
            trail = self.inner.requests.get(view.ctx)
            held = self._store.hold(list(dict.fromkeys(ready)))
            num_reserved = self._promotions.reserve(found.found, trail, view)
            self._store.table.unhold(held)
        if num_reserved or found.num_pending or found.num_unknown:
            return True
        # Nothing more may fit now: others' fetched chunks will leave, what is ready is used.
        return not ready and bool(self._promotions.num_open or self._promotions.has_holds)

    @override
    def set_prefill_rate(self, tokens_per_s: float) -> None:
        self._patience.set_prefill_rate(tokens_per_s)

    @override
    def lookup_states(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        """Return HIT_PENDING also for what a tier below has: `lookup` would fetch it."""
        states = list(self.inner.lookup_states(keys, ctx))
        view = self._views.get(ctx.req_id)
        if view is None or not view.loads or view.is_late(self._clock.now_s()):
            return states
        missing = [i for i, state in enumerate(states) if state is LookupResult.MISS]
        asked = [key for key in {keys[i]: None for i in missing} if key not in view.failed]
        answers = ask_tiers(asked, view) if asked else {}
        for i in missing:
            if keys[i] in answers:
                is_known = answers[keys[i]] is not None
                states[i] = LookupResult.HIT_PENDING if is_known else LookupResult.RETRY
        return states

    @override
    def media_of(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[str]:
        view = self._views.get(ctx.req_id)
        fetched = view.fetched if view is not None else {}
        return [fetched.get(key, PRIMARY_MEDIUM) for key in keys]

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self.inner.touch(keys, ctx)
        view = self._views.get(ctx.req_id)
        for handle in view.loads if view is not None else ():
            handle.touch(keys, ctx)

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        self._retire()
        spec = self.inner.prepare_load(keys, ctx)
        view = self._views.get(ctx.req_id)
        if view is not None:
            view.is_loading = True
            view.end_waiting()
            for name, count in Counter(self.media_of(keys, ctx)).items():
                view.num_chunks_from[name] = view.num_chunks_from.get(name, 0) + count
            self._cascades.note_reused(keys, view)
        return spec

    def request_record(self, ctx: ReqContext) -> RequestRecord | None:
        """Return what a request got from where, and how long it waited; None if it is not live."""
        view = self._views.get(ctx.req_id)
        return view.record() if view is not None else None

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        self._retire()
        self._sharing.park(keys, ctx)
        output = self.inner.prepare_store(keys, ctx)
        if output is not None and output.keys_to_store:
            self._promotions.num_spared = 0
        view = self._views.get(ctx.req_id)
        taken = output.keys_to_store if output is not None else ()
        if view is not None and ctx.hints.store and len(taken) < len(keys):
            self._cascades.note_offered(keys, taken, view)
        return output

    def _make_room(self, state: RequestState, count: int) -> int:
        """Let go of chunks that nothing is lost by: kept for others, or of this request and below.

        A prompt larger than the primary passes through it in this way.
        """
        view = self._views.get(state.ctx.req_id)
        if view is not None and view.is_loading:
            self._promotions.release(view)
        num_freed = self._promotions.give_way(view, count)
        if num_freed < count:
            num_freed += self._cascades.drop_copied(state.runs, count - num_freed)
        if not num_freed:
            self._promotions.num_spared = min(count, self.slots.num_slots // 2)
        return num_freed

    @override
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        arrived = self.inner.settle_store(keys, ctx, failed)
        if not arrived:
            return
        view = self._views.get(ctx.req_id)
        if view is not None and any(h.config.write is WritePolicy.ON_REUSE for h in view.stores):
            view.stored.update(arrived)
        stores = view.stores if view is not None else self._tiers.stores_of(ctx)
        self._cascades.note_stored(arrived, stores, ctx)
        self._sharing.park(arrived, ctx)

    def _retire(self) -> None:
        """Take what tiers have finished, once a step."""
        if not self._has_retired:
            self._has_retired = True
            self._retire_from(self._tiers.all())

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._retire()
        self.inner.on_schedule_end(context)
        now_s = self._clock.now_s()
        for view in self._named(context.new_req_ids):
            if view.queued_s is None:
                view.queued_s = now_s - view.began_s
        self._promotions.withdraw(context.preempted_req_ids)
        for view in self._named(context.preempted_req_ids):
            view.deadline_s = None  # it will come back as if new
            view.end_waiting()
        self._sharing.end_step(self._handles)
        self._promotions.submit(context.new_req_ids)
        self._promotions.end_step(now_s)
        self._cascades.end_step(max(1, int(self.slots.num_slots * AHEAD_SHARE)))
        for handle in self._handles:
            handle.on_schedule_end(context)
        self._has_retired = False

    def _named(self, req_ids: Iterable[str]) -> list[RequestView]:
        return [self._views[req_id] for req_id in req_ids if req_id in self._views]

    @override
    def has_pending_work(self) -> bool:
        return (
            self.inner.has_pending_work()
            or self._promotions.num_open > 0
            or any(handle.has_open_jobs for handle in self._handles)
        )
