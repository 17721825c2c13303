"""`TieringOffloadingManager`: the order of events in a step, over one primary and its tiers."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.config import TierConfig, WritePolicy
from kvstrata.core.delegate import DelegatingManager
from kvstrata.core.events import PRIMARY_MEDIUM, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.manager import NO_KEYS, RequestOffloadingContext, ShutdownReport
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadStoreSpec, LookupResult, PrepareStoreOutput
from kvstrata.core.stats import Stats
from kvstrata.core.tenants import TenantResolver
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.primary.request_state import RequestState
from kvstrata.tiering.cascade import Cascade, Cascades
from kvstrata.tiering.promotion import Promotion, Promotions
from kvstrata.tiering.request_view import RequestRecord, RequestView
from kvstrata.tiering.sharing import Sharing
from kvstrata.tiering.shutdown import flush_and_stop
from kvstrata.tiering.survey import Survey, ask_tiers, survey
from kvstrata.tiering.tier_handle import InFlight, TierHandle
from kvstrata.tiering.tier_set import MakeHandle, TierSet
from kvstrata.tiering.waiting import Patience, TieringLimits

AHEAD_SHARE: Final = 1 / 8  # of the slots: free or copied already, where tiers want what is evicted


class TieringOffloadingManager(DelegatingManager):
    """Keeps chunks in the primary and below: fetches at lookup, copies down after stores.

    Slots are touched on the caller's thread only. Results of tiers are taken once a step, at the
    first call that decides on slots. A request that is not live is served from the primary only.
    """

    inner: CPUOffloadingManager

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
        super().__init__(primary)
        self._store = primary.store
        self._tiers = TierSet(make_handle, tenants)
        self._handles = self._tiers.handles
        self._patience = Patience(limits)
        self._clock = clock
        self._views: dict[str, RequestView] = {}
        self._serial = itertools.count()
        next_job_id = map(JobId, itertools.count(1)).__next__
        self._has_retired = False
        self._report: ShutdownReport | None = None
        self._promotions = Promotions(self._store, next_job_id, limits.hold_s)
        self._cascades = Cascades(self._store, self._handles, next_job_id)
        self._store.on_removed = self._on_removed
        self._sharing = Sharing(self._store, self._promotions, clock)
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

    def _route(self, view: RequestView) -> None:
        """Find out which tiers a request may use."""
        view.loads = self._tiers.loads_of(view.ctx)
        view.stores = self._tiers.stores_of(view.ctx)

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
            trail = self.inner.requests.get(view.ctx).trail
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
        num_taken = len(output.keys_to_store) if output is not None else 0
        if view is not None and ctx.hints.store and num_taken < len(keys):
            others = set(output.keys_to_store) if output is not None else set()
            others.update(self._store.table.absent(keys))
            there = [key for key in keys if key not in others] if others else keys
            if there:
                self._cascades.note_offered(there, view)
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
            num_freed += self._cascades.drop_copied(state.trail.runs, count - num_freed)
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

    def _retire_from(self, handles: Sequence[TierHandle]) -> None:
        for handle in handles:
            for in_flight, result in handle.take_finished():
                self._settle(handle, in_flight, result)
            for event in handle.take_events():
                self._cascades.note_event(event, handle)
                self._store.note(event)

    def _settle(self, handle: TierHandle, in_flight: InFlight, result: JobResult) -> None:
        owner = in_flight.owner
        if isinstance(owner, Promotion):
            arrived = self._promotions.settle(owner, result, self._clock.now_s())
            self._cascades.note_fetched(arrived, handle)
        elif isinstance(owner, Cascade):
            self._cascades.settle(owner, result)

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

    def _on_removed(self, keys: Sequence[OffloadKey], reason: RemovalReason) -> None:
        """Tell events of what left the primary: demoted if a tier below has it."""
        kept, lost = self._cascades.note_left(keys, reason)
        if reason is not RemovalReason.EVICTED:
            self._store.note_removed(keys, reason)
            return
        for gone, why in ((kept, RemovalReason.DEMOTED), (lost, RemovalReason.EVICTED)):
            if gone:
                self._store.note_removed(gone, why)

    @override
    def has_pending_work(self) -> bool:
        return (
            self.inner.has_pending_work()
            or self._promotions.num_open > 0
            or any(handle.has_open_jobs for handle in self._handles)
        )

    # Operation

    @override
    def reset_cache(self) -> None:
        self._promotions.clear()
        self.inner.reset_cache()
        self._cascades.clear()
        for handle in self._handles:
            handle.reset()

    @override
    def delete(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        self.inner.delete(keys, ctx)
        self._cascades.delete(keys)

    @override
    def delete_prefix(self, prefix: bytes) -> None:
        self.inner.delete_prefix(prefix)
        self._cascades.delete_prefix(prefix)

    def attach_tier(self, config: TierConfig | Mapping[str, Any]) -> None:
        """Use one more tier, the last in order.

        Raises:
            ConfigError: Its settings are wrong, or its name is taken.
        """
        handle = self._tiers.attach(config)
        self._sharing.add(handle)
        for view in self._views.values():
            self._route(view)
            handle.on_new_request(view.ctx)

    def detach_tier(self, name: str, timeout_s: float = 5.0) -> Collection[JobId]:
        """Stop using a tier; return the jobs that it could not end.

        Its other jobs end as failed and their slots come back. Slots of a stuck job stay out of use
        until the tier has ended it after all. Blocks: at most about `timeout_s`.

        Raises:
            KeyError: There is no tier of this name.
        """
        handle = self._tiers.find(name)
        self._promotions.forget_tier(handle)
        self._sharing.remove(handle)
        self._tiers.detach(handle, self._retire_from, timeout_s)
        for view in self._views.values():
            self._route(view)
        for job_id in handle.jobs:
            self._abandon(handle, job_id)
        return list(handle.jobs)

    def fail_job(self, job_id: JobId) -> None:
        """Give up on a copy that does not end: whoever waits for it goes on without it.

        Its slots stay out of use until the tier has ended it after all, or was detached.

        Raises:
            KeyError: There is no such job in flight.
        """
        handle = self._tiers.with_job(job_id)
        handle.cancel(job_id)
        self._abandon(handle, job_id)

    def _abandon(self, handle: TierHandle, job_id: JobId) -> None:
        if job_id not in handle.abandoned:
            handle.abandoned.add(job_id)
            owner = handle.jobs[job_id].owner
            if isinstance(owner, Promotion):
                self._promotions.abandon(owner)
            elif isinstance(owner, Cascade):
                self._cascades.abandon(owner)

    @override
    def get_stats(self) -> Stats:
        stats = self.inner.get_stats()
        tiers = {handle.name: handle.get_stats() for handle in list(self._handles)}
        jobs = (job for tier in tiers.values() for job in tier.jobs)
        return replace(
            stats,
            gauges={**stats.gauges, "num_promotions": self._promotions.num_open},
            counters={**stats.counters, **self._promotions.counters()},
            tiers=tiers,
            jobs=sorted(jobs, key=lambda job: -job.age_s),
        )

    @override
    def shutdown(self, timeout_s: float = 10.0) -> ShutdownReport:
        if self._report is None:
            self._promotions.clear()
            self._sharing.release()
            parts = (self._handles, self._cascades, self._store, self._retire_from)
            self._report = flush_and_stop(*parts, timeout_s)
            self.inner.shutdown()
        return self._report

    @override
    def check(self) -> None:
        super().check()
        self._cascades.check()
        self._promotions.check()
