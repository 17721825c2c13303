"""`TieringOffloadingManager`: the order of events in a step, over one primary and its tiers."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.delegate import DelegatingManager
from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.manager import NO_KEYS, RequestOffloadingContext, ShutdownReport
from kvstrata.core.policy import RequestTrail
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadStoreSpec, LookupResult, PrepareStoreOutput
from kvstrata.core.stats import Stats
from kvstrata.core.tenants import TenantResolver
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.tiering.cascade import Cascade, Cascades
from kvstrata.tiering.promotion import Promotion, Promotions
from kvstrata.tiering.request_view import RequestView
from kvstrata.tiering.shutdown import flush_and_stop
from kvstrata.tiering.survey import Survey, ask_tiers, survey
from kvstrata.tiering.tier_handle import TierHandle


@dataclass(frozen=True, slots=True)
class TieringLimits:
    """When a request waits for slower tiers.

    Attributes:
        max_wait_s: Longest wait of one request, unless it asks for less.
        hold_s: How long fetched chunks are kept for a request that does not come for them.
        num_wait_chunks_min: A request does not wait for fewer chunks than this.
        tokens_per_chunk: For hints and rates that count tokens.
        prefill_tokens_per_s: How fast the engine computes; None if not known.
    """

    max_wait_s: float = 5.0
    hold_s: float = 10.0
    num_wait_chunks_min: int = 0
    tokens_per_chunk: int = 1
    prefill_tokens_per_s: float | None = None


class TieringOffloadingManager(DelegatingManager):
    """Keeps chunks in the primary and below: fetches at lookup, copies down after stores.

    Everything that touches slots happens on the caller's thread; tiers work on their own. Results
    of tiers are taken once a step, at the first call that decides on slots.
    """

    inner: CPUOffloadingManager

    def __init__(
        self,
        primary: CPUOffloadingManager,
        handles: Sequence[TierHandle],
        *,
        limits: TieringLimits,
        tenants: TenantResolver,
        clock: Clock,
    ) -> None:
        """Take a primary and its tiers in order of preference; all are owned."""
        super().__init__(primary)
        self._store = primary.store
        self._handles = list(handles)
        self._limits = limits
        self._tenants = tenants
        self._clock = clock
        self._views: dict[str, RequestView] = {}
        self._serial = itertools.count()
        self._job_ids = itertools.count(1)
        self._has_retired = False
        self._report: ShutdownReport | None = None
        self._promotions = Promotions(self._store, self._next_job_id, limits.hold_s)
        self._cascades = Cascades(self._store, self._next_job_id)
        self._store.on_removed = self._on_removed

    def _next_job_id(self) -> JobId:
        return JobId(next(self._job_ids))

    # Requests

    @override
    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        answer = self.inner.on_new_request(ctx)
        self._views[ctx.req_id] = self._make_view(ctx)
        for handle in self._handles:
            handle.on_new_request(ctx)
        return answer

    def _make_view(self, ctx: ReqContext) -> RequestView:
        hints, tenant = ctx.hints, self._tenants.resolve(ctx)
        load_mask = store_mask = 0
        for handle in self._handles:
            if tenant.config.tiers is not None and handle.name not in tenant.config.tiers:
                continue
            if hints.load_tiers is None or handle.name in hints.load_tiers:
                load_mask |= handle.bit
            if hints.store_tiers is None or handle.name in hints.store_tiers:
                store_mask |= handle.bit if handle.wants_stores else 0
        return RequestView(ctx, next(self._serial), load_mask, store_mask)

    def _view(self, ctx: ReqContext) -> RequestView:
        return self._views.get(ctx.req_id) or self._make_view(ctx)

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        view = self._views.pop(ctx.req_id, None)
        if view is not None:
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
        limit = ctx.hints.max_load_tokens
        if limit is not None:
            keys = keys[: limit // self._limits.tokens_per_chunk]
        view = self._view(ctx)
        if count >= len(keys) or not view.load_mask:
            return self._answer(count, view)
        now_s = self._clock.now_s()
        if view.deadline_s is not None and now_s >= view.deadline_s:
            return self._answer(count, view)
        found = survey(keys[count:], self._store, self._promotions, self._handles, view)
        if not self._is_worth_waiting(found):
            return self._answer(count, view)
        num_reserved = 0
        if found.found:
            trail = self.inner.requests.get(ctx).trail
            num_reserved = self._promotions.reserve(found.found, found.handles, trail, view)
        is_coming = num_reserved or found.num_pending or found.num_unknown
        # Nothing more may fit now: others' fetched chunks will leave, what is ready is used.
        is_crowded = self._promotions.num_open or self._promotions.has_holds
        if not is_coming and (count or not is_crowded):
            return self._answer(count, view)
        self._wait(view, now_s)
        return None

    def _wait(self, view: RequestView, now_s: float) -> None:
        if view.deadline_s is None:
            wished_s = view.ctx.hints.max_wait_s
            wait_s = self._limits.max_wait_s if wished_s is None else wished_s
            view.deadline_s = now_s + min(wait_s, self._limits.max_wait_s)
        if view.wait_began_s is None:
            view.wait_began_s = now_s

    def _answer(self, count: int, view: RequestView) -> int:
        if view.wait_began_s is not None:
            view.waited_s += self._clock.now_s() - view.wait_began_s
            view.wait_began_s = None
        return count

    def _is_worth_waiting(self, found: Survey) -> bool:
        """Say whether fetching is expected to be sooner than computing."""
        if found.num_missing == 0 or found.num_missing < self._limits.num_wait_chunks_min:
            return False
        rate = self._limits.prefill_tokens_per_s
        if not rate or not found.found:
            return True
        compute_s = found.num_missing * self._limits.tokens_per_chunk / rate
        num_bytes: dict[TierHandle, int] = {}
        for handle in found.handles:
            num_bytes[handle] = num_bytes.get(handle, 0) + self.slots.chunk_bytes
        times = [handle.expected_load_s(size) for handle, size in num_bytes.items()]
        return all(load_s is None or load_s <= compute_s for load_s in times)

    def set_prefill_rate(self, tokens_per_s: float) -> None:
        """Learn how fast the engine computes prompts; the measure of whether to wait."""
        self._limits = replace(self._limits, prefill_tokens_per_s=tokens_per_s)

    @override
    def lookup_states(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        """Return HIT_PENDING also for what a tier below has: `lookup` would fetch it."""
        states = list(self.inner.lookup_states(keys, ctx))
        view = self._view(ctx)
        is_late = view.deadline_s is not None and self._clock.now_s() >= view.deadline_s
        missing = [
            key
            for key, state in zip(keys, states, strict=True)
            if state is LookupResult.MISS and key not in view.failed
        ]
        if not missing or not view.load_mask or is_late:
            return states
        answers = ask_tiers(missing, self._handles, view)
        for i, key in enumerate(keys):
            if states[i] is LookupResult.MISS and key in answers:
                is_known = answers[key] is not None
                states[i] = LookupResult.HIT_PENDING if is_known else LookupResult.RETRY
        return states

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self.inner.touch(keys, ctx)
        mask = self._view(ctx).load_mask
        for handle in self._handles:
            if mask & handle.bit:
                handle.touch(keys, ctx)

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        self._retire()
        spec = self.inner.prepare_load(keys, ctx)
        view = self._view(ctx)
        for key in keys:
            source = view.fetched.get(key, "cpu")
            view.sources[source] = view.sources.get(source, 0) + 1
        self._promotions.release(view)
        self._cascades.note_reused(keys, self._handles, view.store_mask, ctx)
        return spec

    def request_sources(self, ctx: ReqContext) -> Mapping[str, int]:
        """Return how many chunks the request loaded from each tier, by name; "cpu" is the primary.

        A chunk that was fetched for this request counts for the tier that it came from.
        """
        view = self._views.get(ctx.req_id)
        return dict(view.sources) if view is not None else {}

    def request_wait_s(self, ctx: ReqContext) -> float:
        """Return how long the request has waited for tiers."""
        view = self._views.get(ctx.req_id)
        return view.waited_s if view is not None else 0.0

    def prefetch(self, keys: Sequence[OffloadKey]) -> int:
        """Fetch chunks before anybody asks for them; return how many are on their way.

        They get no hold: they are as evictable as any, and give way to what requests need.
        """
        self._retire()
        view = self._make_view(ReqContext("prefetch"))
        found = survey(keys, self._store, self._promotions, self._handles, view)
        return self._promotions.reserve(found.found, found.handles, RequestTrail(), None)

    # Store

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        self._retire()
        output = self.inner.prepare_store(keys, ctx)
        if not ctx.hints.store:
            return output
        view = self._view(ctx)
        num_missing = self._num_without_room(keys, output)
        if num_missing and self._make_room(view, num_missing):
            output = self._store_rest(keys, ctx, output)
        if output is not None and len(output.keys_to_store) < len(keys):
            self._note_present(keys, output, view)
        return output

    def _num_without_room(
        self, keys: Sequence[OffloadKey], output: PrepareStoreOutput | None
    ) -> int:
        """Count the offered chunks that found no room, rather than being there or refused."""
        if output is not None and (
            not output.keys_to_store or len(output.keys_to_store) == len(keys)
        ):
            return 0
        return len(self._store.table.absent(keys))

    def _make_room(self, view: RequestView, count: int) -> int:
        """Let go of chunks that nothing is lost by: kept for others, or of this request and below.

        A prompt larger than the primary passes through it in this way.
        """
        num_freed = self._promotions.give_way(view, count)
        if num_freed < count:
            trail = self.inner.requests.get(view.ctx).trail
            num_freed += self._cascades.drop_copied(trail.runs, count - num_freed)
        return num_freed

    def _store_rest(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, first: PrepareStoreOutput | None
    ) -> PrepareStoreOutput | None:
        """Offer once more what found no room, and put both answers together."""
        more = self.inner.prepare_store(self._store.table.absent(keys), ctx)
        if first is None or more is None:
            return first or more
        return PrepareStoreOutput(
            [*first.keys_to_store, *more.keys_to_store],
            LoadStoreSpec([*first.store_spec.slots, *more.store_spec.slots]),
            [*first.evicted_keys, *more.evicted_keys],
        )

    def _note_present(
        self, keys: Sequence[OffloadKey], output: PrepareStoreOutput, view: RequestView
    ) -> None:
        """Let offered chunks that are here already go on to the tiers that this request allows."""
        new = set(output.keys_to_store)
        there = [key for key in keys if key not in new and key in self._store.table]
        if there:
            mask, ctx = view.store_mask, view.ctx
            self._cascades.note_offered(there, self._handles, mask, ctx)
            ready = [key for key in there if self._store.is_resident(key)]
            self._cascades.note_reused(ready, self._handles, mask, ctx)

    @override
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        arrived = self.inner.settle_store(keys, ctx, failed)
        if arrived and self._handles:
            mask = self._view(ctx).store_mask
            self._cascades.note_stored(arrived, self._handles, mask, ctx)

    # Steps

    def _retire(self) -> None:
        """Take what tiers have finished, once a step."""
        if self._has_retired:
            return
        self._has_retired = True
        chunk_bytes, now_s = self.slots.chunk_bytes, self._clock.now_s()
        for handle in self._handles:
            for in_flight, result in handle.take_finished(chunk_bytes):
                if isinstance(in_flight.owner, Promotion):
                    arrived = self._promotions.settle(in_flight.owner, result, now_s)
                    self._cascades.note_fetched(arrived, handle)
                elif isinstance(in_flight.owner, Cascade):
                    self._cascades.settle(in_flight.owner, result)
            for event in handle.take_events():
                if event.kind is EventKind.REMOVED:
                    self._cascades.note_lost(event.keys, handle)
                self._store.note(event)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._retire()
        self.inner.on_schedule_end(context)
        self._promotions.withdraw(context.preempted_req_ids)
        for req_id in context.preempted_req_ids:
            view = self._views.get(req_id)
            if view is not None:
                view.deadline_s = None  # it will come back as if new
        self._promotions.submit(context.new_req_ids)
        self._promotions.expire(self._clock.now_s())
        self._cascades.sweep()
        self._cascades.clean_ahead(self._handles, max(1, self.slots.num_slots // 8))
        for handle in self._handles:
            handle.on_schedule_end(context)
        self._has_retired = False

    def _on_removed(self, keys: Sequence[OffloadKey], reason: RemovalReason) -> None:
        """Tell events of what left the primary: demoted if a tier below has it."""
        demoted, gone = self._cascades.note_left(keys)
        if reason is not RemovalReason.EVICTED:
            self._store.note_removed(keys, reason)
            return
        if demoted:
            self._store.note_removed(demoted, RemovalReason.DEMOTED)
        if gone:
            self._store.note_removed(gone, RemovalReason.EVICTED)

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.inner.take_events()

    @override
    def has_pending_work(self) -> bool:
        return (
            self.inner.has_pending_work()
            or self._promotions.num_open > 0
            or any(handle.jobs for handle in self._handles)
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
        for handle in self._handles:
            for in_flight in handle.jobs.values():
                if isinstance(in_flight.owner, Cascade):
                    in_flight.owner.deleted.update(set(keys) & set(in_flight.job.keys))
            handle.delete(keys)

    def attach_tier(self, handle: TierHandle) -> None:
        """Use one more tier, the last in order, from the next step on."""
        self._handles.append(handle)
        for req_id, view in self._views.items():
            fresh = self._make_view(view.ctx)
            view.load_mask, view.store_mask = fresh.load_mask, fresh.store_mask
            assert view.ctx.req_id == req_id

    def detach_tier(self, name: str, timeout_s: float = 5.0) -> Collection[JobId]:
        """Stop using a tier; return the jobs that it could not end.

        Its jobs end as failed, their slots come back. Slots that a stuck job may still write stay
        out of use for good. Blocks: at most about `timeout_s`.

        Raises:
            KeyError: There is no tier of this name.
        """
        handle = next((h for h in self._handles if h.name == name), None)
        if handle is None:
            raise KeyError(name)
        self._promotions.forget_tier(handle)
        stuck = handle.shutdown(timeout_s)
        self._has_retired = False
        self._retire()
        self._handles.remove(handle)
        self._cascades.forget_tier(handle)
        return stuck

    @override
    def get_stats(self) -> Stats:
        stats = self.inner.get_stats()
        tiers = {handle.name: handle.get_stats() for handle in list(self._handles)}
        return replace(
            stats,
            gauges={**stats.gauges, "num_promotions": self._promotions.num_open},
            counters={
                **stats.counters,
                "withdrawn_promotion_chunks": self._promotions.num_withdrawn,
                "given_way_chunks": self._promotions.num_given_way,
            },
            tiers=tiers,
            jobs=[job for tier in tiers.values() for job in tier.jobs],
        )

    @override
    def shutdown(self, timeout_s: float = 10.0) -> ShutdownReport:
        if self._report is None:
            self._promotions.clear()
            self._report = flush_and_stop(
                self._handles, self._cascades, self._store, self._retire_now, timeout_s
            )
            self.inner.shutdown()
        return self._report

    def _retire_now(self) -> None:
        self._has_retired = False
        self._retire()

    @override
    def check(self) -> None:
        super().check()
        self._cascades.check()
