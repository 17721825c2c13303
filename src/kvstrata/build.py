"""Turn a Config into objects: the only module that knows all of them."""

from collections.abc import Mapping
from typing import Any

from kvstrata.core.clock import Clock, SystemClock
from kvstrata.core.config import Config, PrimaryConfig
from kvstrata.core.errors import ConfigError
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.memory import row_bytes_for
from kvstrata.core.namespace import Namespace
from kvstrata.core.policy import EvictionPolicy
from kvstrata.core.registry import Registry
from kvstrata.core.tenants import TenantResolver
from kvstrata.primary.chunk_store import PrimaryLimits
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.primary.region import HUGE_PAGES, HostRegion

AUTO_POLICY = "lru"

POLICIES: Registry[EvictionPolicy] = Registry(
    EvictionPolicy,  # type: ignore[type-abstract]
    {"lru": "kvstrata.policies.lru:LruPolicy"},
    "kvstrata.policies",
)


def make_policy(name: str, capacity: int, path: str = "primary.policy") -> EvictionPolicy:
    """Make a policy by name, entry point or `module:Class`.

    Raises:
        ConfigError: There is none of this name; the text starts with `path`.
    """
    kind = POLICIES.get(AUTO_POLICY if name == "auto" else name, path)
    return kind(capacity)


def num_primary_chunks(config: PrimaryConfig, chunk_bytes: int) -> int:
    """Return how many chunks the primary's settings make room for.

    Raises:
        ConfigError: Not even one; the text names both sizes.
    """
    if config.num_chunks is not None:
        return config.num_chunks
    assert config.bytes is not None
    row_bytes = row_bytes_for(chunk_bytes)
    if config.bytes < row_bytes:
        raise ConfigError(
            "primary.bytes",
            f"{config.bytes} bytes hold no chunk: one of {chunk_bytes} bytes takes {row_bytes}",
        )
    return config.bytes // row_bytes


def build_manager(
    config: Mapping[str, Any] | Config,
    *,
    chunk_bytes: int,
    namespace: str | Namespace,
    clock: Clock | None = None,
) -> OffloadingManager:
    """Build primary, policy, filter and tiers.

    Args:
        config: A mapping such as a TOML file holds, or a Config.
        chunk_bytes: Payload of one chunk.
        namespace: Names everything that changes the bytes of equal keys.
        clock: Time; the machine's if None.

    Raises:
        ConfigError: A setting is wrong, or the host has not enough memory. Nothing is left behind.
    """
    del namespace  # of the tiers, which come next
    config = Config.parse(config)
    clock = clock or SystemClock()
    num_chunks = num_primary_chunks(config.primary, chunk_bytes)
    policy = make_policy(config.primary.policy, num_chunks)
    tenants = TenantResolver(config.tenant_from, config.tenants)
    advice = HUGE_PAGES if config.primary.huge_pages else ()
    region = HostRegion.create(num_chunks, chunk_bytes, advice=advice)
    limits = PrimaryLimits(
        num_protected_max=int(num_chunks * config.primary.protect_share),
        protect_s=config.primary.protect_s,
        num_events_max=config.primary.num_events_max,
        tokens_per_chunk=config.tokens_per_chunk,
    )
    return CPUOffloadingManager(
        region, policy, limits=limits, tenants=tenants, clock=clock, close_region=region.close
    )
