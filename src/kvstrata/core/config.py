"""The tree of settings, frozen: primary, filter, tiers and tenants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, Self

from kvstrata.core.errors import ConfigError
from kvstrata.core.events import PRIMARY_MEDIUM
from kvstrata.core.settings import (
    join,
    optional,
    parse_bool,
    parse_bytes,
    parse_count,
    parse_enum,
    parse_seconds,
    parse_settings,
    parse_share,
    parse_text,
    setting,
    table,
)


class WritePolicy(Enum):
    """When a chunk that reached the primary goes on to a tier."""

    THROUGH = "through"  # at once
    ON_EVICT = "on_evict"  # when it leaves the primary
    ON_REUSE = "on_reuse"  # when it is used a second time
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class PrimaryConfig:
    """Host memory. Exactly one of the first three is given; all but `bytes` are for each rank."""

    num_chunks: int | None = setting(optional(parse_count()), None)
    bytes: int | None = setting(optional(parse_bytes), None)  # all ranks of the host together
    bytes_per_rank: int | None = setting(optional(parse_bytes), None)
    policy: str = setting(parse_text, "auto")
    huge_pages: bool = setting(parse_bool, default=True)  # where the kernel's settings allow them
    prefault: bool = setting(parse_bool, default=False)  # take all of it at the start
    protect_share: float = setting(parse_share, 0.5)  # of slots, for chunks of preempted requests
    protect_s: float = setting(parse_seconds, 60.0)
    priority_share: float = setting(parse_share, 0.75)  # of slots, for more than default priority
    num_events_max: int = setting(parse_count(), 65536)
    idle_s: float | None = setting(optional(parse_seconds), None)  # unused for longer: leaves
    zero_freed: bool = setting(parse_bool, default=False)  # overwrite slots that hold nothing

    def __post_init__(self) -> None:
        sizes = (self.num_chunks, self.bytes, self.bytes_per_rank)
        if sum(size is not None for size in sizes) != 1:
            raise ConfigError(
                "primary", "needs exactly one of num_chunks, bytes (of the host) and bytes_per_rank"
            )


@dataclass(frozen=True, slots=True)
class FilterConfig:
    """Store a chunk only once it has been offered by `store_threshold` requests; 1: at once."""

    store_threshold: int = setting(parse_count(), 1)
    num_tracked_max: int = setting(parse_count(), 262_144)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One secondary tier: the orchestrator's fields; `settings` are for the tier's own class."""

    type: str = setting(parse_text)
    name: str = setting(parse_text)
    write: WritePolicy = setting(parse_enum(WritePolicy), WritePolicy.THROUGH)
    num_queued_chunks_max: int = setting(parse_count(), 1024)  # stores in flight; more are dropped
    num_store_tries: int = setting(parse_count(), 2)
    num_failures_max: int = setting(parse_count(), 3)  # jobs in a row before the tier is skipped
    cooldown_s: float = setting(parse_seconds, 10.0)  # until a skipped tier is tried again
    # Not shown when the configuration is printed: it may hold credentials.
    settings: Mapping[str, Any] = field(
        default_factory=dict, repr=False, metadata={"parse": lambda value, _path: value}
    )

    @classmethod
    def parse(cls, raw: object, path: str) -> Self:
        """Split one table into the orchestrator's fields and the tier's own."""
        if isinstance(raw, cls):
            return raw
        if not isinstance(raw, Mapping):
            raise ConfigError(path, f"must be a table of settings, is {raw!r}")
        if "type" not in raw:
            raise ConfigError(join(path, "type"), "is required")
        ours = {item.name for item in fields(cls)} - {"settings"}
        mine = {name: value for name, value in raw.items() if name in ours}
        rest = {name: value for name, value in raw.items() if name not in ours}
        default_name = str(mine["type"]).rpartition(":")[2]
        return parse_settings(cls, {"name": default_name, **mine, "settings": rest}, path)


def _parse_tiers(value: object, path: str) -> tuple[TierConfig, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise ConfigError(path, "must be a list of tables, one a tier")
    tiers = tuple(TierConfig.parse(raw, f"{path}[{i}]") for i, raw in enumerate(value))
    seen: set[str] = {PRIMARY_MEDIUM}
    for i, tier in enumerate(tiers):
        if tier.name in seen:
            raise ConfigError(
                f"{path}[{i}].name", f"{tier.name!r} is taken; give each its own name"
            )
        seen.add(tier.name)
    return tiers


def _parse_tier_names(value: object, path: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(path, "must be a list of tier names")
    return tuple(parse_text(name, f"{path}[{i}]") for i, name in enumerate(value))


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """What one tenant may use; `tenants.default` is for all that are not named."""

    quota: float = setting(parse_share, 1.0)  # of the primary's slots
    tiers: tuple[str, ...] | None = setting(optional(_parse_tier_names), None)  # None: all
    ttl_s: float | None = setting(optional(parse_seconds), None)


def _parse_tenants(value: object, path: str) -> Mapping[str, TenantConfig]:
    if not isinstance(value, Mapping):
        raise ConfigError(path, "must be a table of tenants by name")
    return MappingProxyType(
        {str(name): parse_settings(TenantConfig, raw, join(path, str(name)))
         for name, raw in value.items()}
    )  # fmt: skip


def _parse_tenant_from(value: object, path: str) -> str:
    text = parse_text(value, path)
    kind, _, argument = text.partition(":")
    if kind not in {"hint", "fixed", "param", "signed"} or (kind == "hint") != (not argument):
        raise ConfigError(
            path,
            'must be "hint", "fixed:NAME", "param:PARAMETER" or "signed:ENVIRONMENT_VARIABLE", '
            f"is {value!r}",
        )
    return text


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that `build_manager` needs to know."""

    primary: PrimaryConfig = setting(table(PrimaryConfig))
    filter: FilterConfig = setting(table(FilterConfig), factory=FilterConfig)
    tiers: tuple[TierConfig, ...] = setting(_parse_tiers, ())
    tenants: Mapping[str, TenantConfig] = setting(
        _parse_tenants, factory=lambda: MappingProxyType({})
    )
    tenant_from: str = setting(_parse_tenant_from, "hint")
    chunk_bytes: int | None = setting(optional(parse_bytes), None)  # an engine tells it instead
    namespace: str = setting(parse_text, "default")  # likewise
    weights_epoch: str | None = setting(optional(parse_text), None)  # as `set_epoch` was told last
    num_ranks: int = setting(parse_count(), 1)  # workers on this host, each with its own primary
    tokens_per_chunk: int = setting(parse_count(), 1)  # the connector knows it and sets it
    max_wait_s: float = setting(parse_seconds, 5.0)  # for slower tiers, per request
    hold_s: float = setting(parse_seconds, 10.0)  # fetched chunks wait so long for their request
    num_wait_chunks_min: int = setting(parse_count(0), 0)  # fewer are not worth waiting for
    prefill_tokens_per_s: float | None = setting(optional(parse_seconds), None)

    def __post_init__(self) -> None:
        known = {tier.name for tier in self.tiers}
        for name, tenant in self.tenants.items():
            for tier in tenant.tiers or ():
                if tier not in known:
                    raise ConfigError(f"tenants.{name}.tiers", f"there is no tier {tier!r}")

    @classmethod
    def parse(cls, raw: object) -> Self:
        """Make a Config from a mapping such as a TOML file holds; a Config is returned as it is.

        Raises:
            ConfigError: A field is unknown, missing or out of range, by dotted path.
        """
        return parse_settings(cls, raw, "")
