"""Who a request belongs to: the tenant that the operator's settings make of it."""

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvstrata.core.config import TenantConfig
from kvstrata.core.errors import ConfigError
from kvstrata.core.namespace import tagged_digest
from kvstrata.core.request import NO_HINTS, ReqContext

DEFAULT_TENANT = "default"
TAG_BYTES = 16
NUM_CACHED_TAGS_MAX = 4096
UNTRUSTED = "unverified"
PLAIN_TENANT = TenantConfig()


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's name, what it may use, and the tag that keeps its keys apart.

    `tag` is empty for requests without a tenant. `quota` is below 1 only where the operator limits
    the tenant.
    """

    name: str
    tag: bytes
    config: TenantConfig


class TenantResolver:
    """Finds the tenant of a request; the same answer for the same request, always."""

    def __init__(
        self, source: str = "hint", configs: Mapping[str, TenantConfig] | None = None
    ) -> None:
        """Read where the tenant comes from.

        Args:
            source: "hint" (the `tenant` hint, which a gateway sets), "fixed:NAME",
                "param:NAME" (that field of `kv_transfer_params`), or "signed:VARIABLE" (the hint is
                `name:hex`, an HMAC-SHA256 of the name under the secret in that environment
                variable; a wrong one puts the request into a tenant of its own).
            configs: Settings by tenant; "default" is for all others.

        Raises:
            ConfigError: The environment variable is not set.
        """
        self._kind, _, self._argument = source.partition(":")
        self._configs = dict(configs or {})
        self._default = self._configs.get(DEFAULT_TENANT, PLAIN_TENANT)
        self._nobody = self._make(None)
        self.is_plain_by_default = self._kind == "hint" and self._default is PLAIN_TENANT
        """Whether a request without hints has no tenant, and no settings apply to it."""
        self._cache: dict[str | None, Tenant] = {}
        self._secret = b""
        if self._kind == "signed":
            self._secret = os.environ.get(self._argument, "").encode()
            if not self._secret:
                raise ConfigError("tenant_from", f"${self._argument} is not set or empty")

    @property
    def is_by_hint(self) -> bool:
        """Whether a request without hints has no tenant."""
        return self._kind == "hint"

    def resolve(self, ctx: ReqContext) -> Tenant:
        """Return the request's tenant."""
        if ctx.hints is NO_HINTS and self._kind == "hint":
            return self._nobody
        name = self._name_of(ctx)
        tenant = self._cache.get(name)
        if tenant is None:
            if len(self._cache) >= NUM_CACHED_TAGS_MAX:
                self._cache.clear()
            tenant = self._cache[name] = self._make(name)
        return tenant

    def tag_of(self, name: str) -> bytes:
        """Return what the keys of this tenant's chunks begin with."""
        return self._make(name).tag

    def _make(self, name: str | None) -> Tenant:
        if name is None:
            return Tenant(DEFAULT_TENANT, b"", self._default)
        tag = tagged_digest("kvstrata.tenant.v1", ("name", name))[:TAG_BYTES]
        return Tenant(name, tag, self._configs.get(name, self._default))

    def _name_of(self, ctx: ReqContext) -> str | None:
        match self._kind:
            case "fixed":
                return self._argument
            case "param":
                value = (ctx.kv_transfer_params or {}).get(self._argument)
                return None if value is None else str(value)
            case "signed":
                return self._verified(ctx)
            case _:
                return ctx.hints.tenant

    def _verified(self, ctx: ReqContext) -> str | None:
        claim = ctx.hints.tenant
        if claim is None:
            return None
        name, _, signature = claim.rpartition(":")
        expected = hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()
        if name and hmac.compare_digest(signature.lower().encode(), expected.encode()):
            return name
        return f"{UNTRUSTED}:{claim}"
