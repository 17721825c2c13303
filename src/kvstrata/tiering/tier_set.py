"""The tiers of a manager: which there are, which are going, and who may use which."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvstrata.core.config import TierConfig
from kvstrata.core.errors import ConfigError
from kvstrata.core.events import PRIMARY_MEDIUM
from kvstrata.core.keys import JobId
from kvstrata.core.request import ReqContext
from kvstrata.core.tenants import TenantResolver
from kvstrata.tiering.shutdown import Retire, stop
from kvstrata.tiering.tier_handle import TierHandle

MakeHandle = Callable[[TierConfig, str, str], TierHandle]
"""Makes a tier from its settings, their dotted path, and the epoch of the weights."""


class TierSet:
    """Tiers in order of preference; `leaving` are detached and have jobs that may use slots.

    `epoch` names the weights that the chunks of new tiers are of.
    """

    def __init__(self, make_handle: MakeHandle, tenants: TenantResolver) -> None:
        self.handles: list[TierHandle] = []
        self.leaving: list[TierHandle] = []
        self.epoch = ""
        self._make_handle = make_handle
        self._tenants = tenants

    def loads_of(self, ctx: ReqContext) -> Sequence[TierHandle]:
        """Return the tiers that a request may load from; none where it would not wait for any."""
        hints = ctx.hints
        if hints.max_wait_s == 0 or hints.max_load_tokens == 0:
            return ()
        return self._allowed(ctx, hints.load_tiers)

    def stores_of(self, ctx: ReqContext) -> Sequence[TierHandle]:
        """Return the tiers that a request may store to."""
        return [h for h in self._allowed(ctx, ctx.hints.store_tiers) if h.wants_stores]

    def _allowed(self, ctx: ReqContext, wished: Collection[str] | None) -> Sequence[TierHandle]:
        granted = self._tenants.resolve(ctx).config.tiers
        return [
            handle
            for handle in self.handles
            if (granted is None or handle.name in granted)
            and (wished is None or handle.name in wished)
        ]

    def find(self, name: str) -> TierHandle:
        """Return the tier of this name.

        Raises:
            KeyError: There is none.
        """
        for handle in self.handles:
            if handle.name == name:
                return handle
        raise KeyError(name)

    def with_job(self, job_id: JobId) -> TierHandle:
        """Return the tier that has this job in flight.

        Raises:
            KeyError: There is none.
        """
        for handle in self.handles:
            if job_id in handle.jobs:
                return handle
        raise KeyError(job_id)

    def attach(self, config: TierConfig | Mapping[str, Any]) -> TierHandle:
        """Make one more tier, the last in order.

        Raises:
            ConfigError: Its settings are wrong, or its name is taken. There is no new tier.
        """
        path = f"tiers[{len(self.handles)}]"
        parsed = TierConfig.parse(config, path)
        if parsed.name in {PRIMARY_MEDIUM, *(handle.name for handle in self.handles)}:
            raise ConfigError(f"{path}.name", f"{parsed.name!r} is taken; give each its own name")
        handle = self._make_handle(parsed, path, self.epoch)
        self.handles.append(handle)
        return handle

    def detach(self, handle: TierHandle, retire: Retire, timeout_s: float) -> None:
        """Take a tier away and stop it; its stuck jobs stay known. Blocks: about `timeout_s`."""
        self.handles.remove(handle)
        stop([handle], retire, time.monotonic() + timeout_s)
        if handle.jobs:
            self.leaving.append(handle)

    def all(self) -> list[TierHandle]:
        """Return every tier that may still have results, and forget those that can't."""
        self.leaving = [handle for handle in self.leaving if handle.jobs]
        return [*self.handles, *self.leaving]
