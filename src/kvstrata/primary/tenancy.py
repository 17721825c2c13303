"""`TenantOffloadingManager`: tenants never share a chunk, whatever keys they send."""

from collections.abc import Collection, Sequence

from typing_extensions import override

from kvstrata.core.delegate import DelegatingManager
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import NO_KEYS, OffloadingManager
from kvstrata.core.request import NO_HINTS, ReqContext
from kvstrata.core.results import LoadStoreSpec, LookupResult, PrepareStoreOutput
from kvstrata.core.tenants import TAG_BYTES, TenantResolver


class TenantOffloadingManager(DelegatingManager):
    """Puts the tenant's tag in front of each key on the way in, and takes it off on the way out.

    Requests without a tenant keep their keys. Events, `evicted_keys` and everything below speak of
    keys with tags, since they concern all tenants.
    """

    def __init__(self, inner: OffloadingManager, tenants: TenantResolver) -> None:
        """Wrap a manager; it is owned, and shut down with this one."""
        super().__init__(inner)
        self._tenants = tenants
        # The hints of requests that keep their keys, as nearly all do where there are no tenants.
        self._plain = NO_HINTS if tenants.is_by_hint else None
        # What names no keys goes straight on: a call less for each of these, every step.
        self.on_new_request = inner.on_new_request  # type: ignore[method-assign]
        self.on_request_finished = inner.on_request_finished  # type: ignore[method-assign]
        self.on_schedule_end = inner.on_schedule_end  # type: ignore[method-assign]
        self.take_events = inner.take_events  # type: ignore[method-assign]

    def _tagged(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[OffloadKey]:
        tag = self._tenants.resolve(ctx).tag
        return [OffloadKey(tag + key) for key in keys] if tag else keys

    def _tagged_set(self, keys: Collection[OffloadKey], ctx: ReqContext) -> Collection[OffloadKey]:
        tag = self._tenants.resolve(ctx).tag
        return {OffloadKey(tag + key) for key in keys} if tag and keys else keys

    @override
    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int | None:
        if ctx.hints is not self._plain:
            keys = self._tagged(keys, ctx)
        return self.inner.lookup(keys, ctx)

    @override
    def lookup_states(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        if ctx.hints is not self._plain:
            keys = self._tagged(keys, ctx)
        return self.inner.lookup_states(keys, ctx)

    @override
    def media_of(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[str]:
        return self.inner.media_of(self._tagged(keys, ctx), ctx)

    @override
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        if ctx.hints is not self._plain:
            keys = self._tagged(keys, ctx)
        self.inner.touch(keys, ctx)

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        if ctx.hints is not self._plain:
            keys = self._tagged(keys, ctx)
        return self.inner.prepare_load(keys, ctx)

    @override
    def complete_load(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        if ctx.hints is not self._plain:
            keys, failed = self._tagged(list(keys), ctx), self._tagged_set(failed, ctx)
        self.inner.complete_load(keys, ctx, failed)

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        if ctx.hints is self._plain:
            return self.inner.prepare_store(keys, ctx)
        tagged = self._tagged(keys, ctx)
        output = self.inner.prepare_store(tagged, ctx)
        if output is None or tagged is keys:
            return output
        stored = [OffloadKey(key[TAG_BYTES:]) for key in output.keys_to_store]
        return PrepareStoreOutput(stored, output.store_spec, output.evicted_keys)

    @override
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        if ctx.hints is not self._plain:
            keys, failed = self._tagged(list(keys), ctx), self._tagged_set(failed, ctx)
        self.inner.complete_store(keys, ctx, failed)

    @override
    def delete(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        self.inner.delete(self._tagged(list(keys), ctx), ctx)

    @override
    def delete_tenant(self, tenant: str) -> None:
        self.inner.delete_prefix(self._tenants.tag_of(tenant))
