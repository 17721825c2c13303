"""What is done to a manager with tiers from outside of requests: by an operator, or at its end."""

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from kvstrata.core.clock import Clock
from kvstrata.core.config import TierConfig
from kvstrata.core.delegate import DelegatingManager
from kvstrata.core.errors import ConfigError
from kvstrata.core.events import RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.manager import ShutdownReport, SuspendMode
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult
from kvstrata.core.stats import Stats
from kvstrata.core.tenants import TenantResolver
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.tiering.cascade import Cascade, Cascades
from kvstrata.tiering.promotion import Promotion, Promotions
from kvstrata.tiering.request_view import RequestView
from kvstrata.tiering.sharing import Sharing
from kvstrata.tiering.shutdown import drain, flush, flush_and_stop
from kvstrata.tiering.tier_handle import InFlight, TierHandle
from kvstrata.tiering.tier_set import MakeHandle, TierSet
from kvstrata.tiering.waiting import TieringLimits


class TieredManager(DelegatingManager):
    """A primary with tiers below: the parts, how they hear of each other, and the operator's calls.

    Slots are touched on the caller's thread only.
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
        self._clock = clock
        self._views: dict[str, RequestView] = {}
        self._has_retired = False
        self._report: ShutdownReport | None = None
        next_job_id = map(JobId, itertools.count(1)).__next__
        self._promotions = Promotions(self._store, next_job_id, limits.hold_s)
        self._cascades = Cascades(self._store, self._handles, next_job_id)
        self._store.on_removed = self._on_removed
        self._sharing = Sharing(self._store, self._promotions, clock)

    def _route(self, view: RequestView) -> None:
        """Find out which tiers a request may use."""
        view.loads = self._tiers.loads_of(view.ctx)
        view.stores = self._tiers.stores_of(view.ctx)

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
    def suspend(self, mode: SuspendMode, timeout_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._promotions.clear()
        self._sharing.release()
        lasting = [handle for handle in self._handles if handle.tier.is_persistent]
        hung: Sequence[TierHandle] = ()
        if mode is SuspendMode.RELEASE:
            hung = flush(lasting, self._cascades, self._retire_from, deadline_s)
        drain([h for h in self._handles if h not in hung], self._retire_from, deadline_s)
        for handle in self._handles:
            for job_id in list(handle.jobs):
                handle.cancel(job_id)
                self._abandon(handle, job_id)
        if mode is SuspendMode.FORGET:
            self.reset_cache()
        if mode is not SuspendMode.KEEP:
            self._cascades.clear()
        self.inner.suspend(mode, timeout_s)

    @override
    def set_epoch(self, epoch: str, timeout_s: float = 10.0) -> None:
        if epoch == self._tiers.epoch:
            return
        self._promotions.clear()
        self.inner.set_epoch(epoch)
        self._cascades.clear()
        deadline_s = time.monotonic() + timeout_s
        configs = [handle.config for handle in self._handles]
        for config in configs:
            self.detach_tier(config.name, max(0.0, deadline_s - time.monotonic()))
        self._tiers.epoch = epoch
        problems = []
        for config in configs:
            try:
                self.attach_tier(config)
            except ConfigError as error:
                problems.append(error)
        if problems:
            raise problems[0]

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
