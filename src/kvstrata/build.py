"""Turn a Config into objects: the only module that knows all of them."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from kvstrata.core.clock import Clock, SystemClock
from kvstrata.core.config import Config, TierConfig
from kvstrata.core.errors import ConfigError
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.memory import SlotView, row_bytes_for
from kvstrata.core.namespace import Namespace, in_epoch
from kvstrata.core.policy import EvictionPolicy
from kvstrata.core.registry import Registry
from kvstrata.core.settings import check_known
from kvstrata.core.tenants import TenantResolver
from kvstrata.core.tier import SecondaryTierManager, TierEnv
from kvstrata.policies.partitioned import PartitionedPolicy
from kvstrata.primary.chunk_store import PrimaryLimits
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.primary.region import HostRegion
from kvstrata.primary.reuse_filter import FilterReusedOffloadingManager
from kvstrata.primary.tenancy import TenantOffloadingManager
from kvstrata.primary.tidying import TidyOffloadingManager
from kvstrata.tiering.manager import TieringOffloadingManager
from kvstrata.tiering.tier_handle import TierHandle
from kvstrata.tiering.waiting import TieringLimits

AUTO_POLICY = "hazard"

POLICIES: Registry[EvictionPolicy] = Registry(
    EvictionPolicy,  # type: ignore[type-abstract]
    {
        "lru": "kvstrata.policies.lru:LruPolicy",
        "arc": "kvstrata.policies.arc:ArcPolicy",
        "guard": "kvstrata.policies.guard:GuardPolicy",
        "hazard": "kvstrata.policies.hazard:HazardPolicy",
        "hazard-p20": "kvstrata.policies.hazard:LeanHazardPolicy",
    },
    "kvstrata.policies",
)

TIERS: Registry[SecondaryTierManager] = Registry(
    SecondaryTierManager,  # type: ignore[type-abstract]
    {
        "memory": "kvstrata.tiers.memory:MemoryTier",
        "fs": "kvstrata.tiers.fs.tier:FsTier",
        "object": "kvstrata.tiers.object.tier:ObjectTier",
        "p2p": "kvstrata.tiers.p2p.tier:P2pTier",
    },
    "kvstrata.tiers",
)


def make_policy(name: str, capacity: int, path: str = "primary.policy") -> EvictionPolicy:
    """Make a policy by name, entry point or `module:Class`.

    Raises:
        ConfigError: There is none of this name; the text starts with `path`.
    """
    kind = POLICIES.get(AUTO_POLICY if name == "auto" else name, path)
    return kind(capacity)


def _with_classes(config: Config, num_chunks: int) -> Callable[[EvictionPolicy], EvictionPolicy]:
    """Return what puts priority classes and the tenants' quotas around the primary's policy."""
    quotas = {
        tenant: max(1, int(num_chunks * settings.quota))
        for tenant, settings in config.tenants.items()
        if settings.quota < 1
    }
    return lambda policy: PartitionedPolicy(
        policy,
        lambda capacity: make_policy(config.primary.policy, capacity),
        num_priority_max=int(num_chunks * config.primary.priority_share),
        quotas=quotas,
    )


def num_primary_chunks(config: Config, chunk_bytes: int) -> int:
    """Return how many chunks one rank's primary has room for.

    Raises:
        ConfigError: Not even one; the text names both sizes.
    """
    primary = config.primary
    if primary.num_chunks is not None:
        return primary.num_chunks
    name, num_bytes = "primary.bytes_per_rank", primary.bytes_per_rank
    if primary.bytes is not None:
        name, num_bytes = "primary.bytes", primary.bytes // config.num_ranks
    assert num_bytes is not None
    row_bytes = row_bytes_for(chunk_bytes)
    if num_bytes < row_bytes:
        raise ConfigError(
            name,
            f"{num_bytes} bytes for each of {config.num_ranks} ranks hold no chunk: "
            f"one of {chunk_bytes} bytes takes {row_bytes}",
        )
    return num_bytes // row_bytes


def tier_num_chunks(config: TierConfig, index: int, chunk_bytes: int) -> int | None:
    """Return how many chunks a tier holds when it is full; None if it has no limit of its own.

    Raises:
        ConfigError: A setting of the tier is wrong.
    """
    path = f"tiers[{index}]"
    kind = TIERS.get(config.type, f"{path}.type")
    return kind.num_chunks_max(config.settings, chunk_bytes, path)


def _build_tier(
    config: TierConfig, path: str, slots: SlotView, namespace: str, clock: Clock
) -> TierHandle:
    """Make one tier and what the orchestrator keeps of it.

    Raises:
        ConfigError: A setting of the tier is wrong.
    """
    kind = TIERS.get(config.type, f"{path}.type")
    env = TierEnv(name=config.name, namespace=namespace, clock=clock, path=path)
    try:
        tier = kind.from_config(slots, config.settings, env)
    except TypeError as error:  # a tier without settings of its own kind: its constructor says it
        known = [name for name in signature(kind).parameters if name != "slots"]
        check_known(config.settings, known, path)
        raise ConfigError(path, str(error)) from error
    return TierHandle(tier, config, slots.chunk_bytes, clock)


def build_manager(
    config: Mapping[str, Any] | Config,
    *,
    chunk_bytes: int,
    namespace: str | Namespace,
    clock: Clock | None = None,
    slots: SlotView | None = None,
    shared: bool = True,
) -> OffloadingManager:
    """Build primary, policy, filter and tiers.

    Args:
        config: A mapping such as a TOML file holds, or a Config.
        chunk_bytes: Payload of one chunk.
        namespace: Names everything that changes the bytes of equal keys.
        clock: Time; the machine's if None.
        slots: The primary's rows, as many as the settings ask for; host memory if None.
        shared: Whether that host memory is for other processes to map, as an engine's workers do.
            If not, the kernel is readier to give huge pages, and children of this process must not
            use it.

    Raises:
        ConfigError: A setting is wrong, or the host has not enough memory. Nothing is left behind.
    """
    config = Config.parse(config)
    clock = clock or SystemClock()
    num_chunks = num_primary_chunks(config, chunk_bytes)
    policy = make_policy(config.primary.policy, num_chunks)
    tenants = TenantResolver(config.tenant_from, config.tenants)
    close: Callable[[], None] = _nothing
    if slots is None:
        region = _make_region(config, num_chunks, chunk_bytes, shared=shared)
        slots, close = region, region.close
    elif slots.num_slots < num_chunks or slots.chunk_bytes < chunk_bytes:
        raise ConfigError(
            "primary",
            f"{slots.num_slots} slots of {slots.chunk_bytes} bytes were given, "
            f"{num_chunks} of {chunk_bytes} are needed",
        )
    release_rows = slots.release_rows if isinstance(slots, HostRegion) else _no_rows
    primary = CPUOffloadingManager(
        slots,
        policy,
        limits=_primary_limits(config, num_chunks),
        with_classes=_with_classes(config, num_chunks),
        tenants=tenants,
        clock=clock,
        close_region=close,
        release_rows=release_rows,
    )
    manager: OffloadingManager = primary
    if config.tiers:
        name = namespace if isinstance(namespace, str) else namespace.fingerprint()
        manager = _with_tiers(primary, config, tenants, name, clock)
    return TenantOffloadingManager(_wrapped(manager, primary, config), tenants)


def _wrapped(
    manager: OffloadingManager, primary: CPUOffloadingManager, config: Config
) -> OffloadingManager:
    """Put around a manager what the settings ask for."""
    idle_s, zero_freed = config.primary.idle_s, config.primary.zero_freed
    if idle_s is not None or zero_freed:
        manager = TidyOffloadingManager(
            manager, primary.store, idle_s=idle_s, zero_freed=zero_freed
        )
    if config.filter.store_threshold > 1:
        manager = FilterReusedOffloadingManager(
            manager,
            store_threshold=config.filter.store_threshold,
            num_tracked_max=config.filter.num_tracked_max,
        )
    return manager


def _make_region(config: Config, num_chunks: int, chunk_bytes: int, *, shared: bool) -> HostRegion:
    region = HostRegion.create(
        num_chunks, chunk_bytes, shared=shared, huge_pages=config.primary.huge_pages
    )
    if config.primary.prefault:
        try:
            region.prefault()
        except ConfigError:
            region.close()
            raise
    return region


def check_memory(config: Config, chunk_bytes: int) -> None:
    """Reserve the primary's memory, of all ranks of the host, take none of it, and give it back.

    Raises:
        ConfigError: The host has not so much; the text says how much is free.
    """
    num_chunks = config.num_ranks * num_primary_chunks(config, chunk_bytes)
    HostRegion.create(num_chunks, chunk_bytes).close()


def _nothing() -> None:
    """Close rows that are not ours."""


def _no_rows(slots: Sequence[int]) -> None:
    """Release no memory: the rows are of some other kind."""


def _primary_limits(config: Config, num_chunks: int) -> PrimaryLimits:
    return PrimaryLimits(
        num_protected_max=int(num_chunks * config.primary.protect_share),
        protect_s=config.primary.protect_s,
        num_events_max=config.primary.num_events_max,
        tokens_per_chunk=config.tokens_per_chunk,
    )


def _with_tiers(
    primary: CPUOffloadingManager,
    config: Config,
    tenants: TenantResolver,
    namespace: str,
    clock: Clock,
) -> TieringOffloadingManager:
    """Put the orchestrator and its tiers over a primary; if that fails, nothing is left of either.

    Raises:
        ConfigError: A setting of a tier is wrong.
    """
    limits = TieringLimits(
        max_wait_s=config.max_wait_s,
        hold_s=config.hold_s,
        num_wait_chunks_min=config.num_wait_chunks_min,
        tokens_per_chunk=config.tokens_per_chunk,
        prefill_tokens_per_s=config.prefill_tokens_per_s,
    )

    def make_handle(tier: TierConfig, path: str, epoch: str) -> TierHandle:
        name = in_epoch(namespace, epoch)
        return _build_tier(tier, path, primary.slots, name, clock)

    manager = TieringOffloadingManager(
        primary, make_handle, limits=limits, tenants=tenants, clock=clock
    )
    manager.set_epoch(config.weights_epoch or "")
    try:
        for tier in config.tiers:
            manager.attach_tier(tier)
    except BaseException:
        manager.shutdown(1.0)
        raise
    return manager
