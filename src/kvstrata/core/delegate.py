"""A manager that passes everything on to another: the base of managers that wrap."""

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from typing_extensions import override

from kvstrata.core.events import OffloadingEvent
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import (
    NO_KEYS,
    OffloadingManager,
    RequestOffloadingContext,
    ShutdownReport,
    SuspendMode,
)
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadStoreSpec, LookupResult, PrepareStoreOutput
from kvstrata.core.stats import Stats

M = TypeVar("M", bound=OffloadingManager)


def find_manager(manager: OffloadingManager, kind: type[M]) -> M | None:
    """Return the manager of this kind: the given one, or one that it wraps; None if neither is."""
    while not isinstance(manager, kind):
        if not isinstance(manager, DelegatingManager):
            return None
        manager = manager.inner
    return manager


class DelegatingManager(OffloadingManager):
    """Does what `inner` does, except where a subclass says otherwise."""

    def __init__(self, inner: OffloadingManager) -> None:
        """Wrap a manager; it is owned, and shut down with this one."""
        self.inner = inner

    @property
    @override
    def slots(self) -> SlotView:
        return self.inner.slots

    @override
    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        return self.inner.on_new_request(ctx)

    @override
    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int | None:
        return self.inner.lookup(keys, ctx)

    @override
    def set_prefill_rate(self, tokens_per_s: float) -> None:
        self.inner.set_prefill_rate(tokens_per_s)

    @override
    def lookup_states(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        return self.inner.lookup_states(keys, ctx)

    @override
    def media_of(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[str]:
        return self.inner.media_of(keys, ctx)

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self.inner.touch(keys, ctx)

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        return self.inner.prepare_load(keys, ctx)

    @override
    def complete_load(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        self.inner.complete_load(keys, ctx, failed)

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        return self.inner.prepare_store(keys, ctx)

    @override
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        self.inner.complete_store(keys, ctx, failed)

    @override
    def on_request_finished(self, ctx: ReqContext) -> None:
        self.inner.on_request_finished(ctx)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.inner.on_schedule_end(context)

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.inner.take_events()

    @override
    def has_pending_work(self) -> bool:
        return self.inner.has_pending_work()

    @override
    def reset_cache(self) -> None:
        self.inner.reset_cache()

    @override
    def delete(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        self.inner.delete(keys, ctx)

    @override
    def delete_prefix(self, prefix: bytes) -> None:
        self.inner.delete_prefix(prefix)

    @override
    def delete_tenant(self, tenant: str) -> None:
        self.inner.delete_tenant(tenant)

    @override
    def suspend(self, mode: SuspendMode, timeout_s: float = 10.0) -> None:
        self.inner.suspend(mode, timeout_s)

    @override
    def set_epoch(self, epoch: str, timeout_s: float = 10.0) -> None:
        self.inner.set_epoch(epoch, timeout_s)

    @override
    def get_stats(self) -> Stats:
        return self.inner.get_stats()

    @override
    def shutdown(self, timeout_s: float = 10.0) -> ShutdownReport:
        return self.inner.shutdown(timeout_s)

    def check(self) -> None:
        """Assert every invariant of the managers below. For tests."""
        check = getattr(self.inner, "check", None)
        if check is not None:
            check()
