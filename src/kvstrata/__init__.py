"""Keep LLM key/value cache blocks: host memory first, then files, object stores and peers."""

from kvstrata.build import build_manager
from kvstrata.config_sources import load_config
from kvstrata.core.config import Config
from kvstrata.core.errors import (
    ConfigError,
    ContractError,
    CorruptChunkError,
    OffloadError,
    ProtocolError,
    TierClosedError,
    TierError,
    TierUnavailableError,
)
from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import (
    JobId,
    OffloadKey,
    get_block_hash,
    get_group_idx,
    make_offload_key,
)
from kvstrata.core.manager import (
    OffloadingManager,
    RequestOffloadingContext,
    ShutdownReport,
    SuspendMode,
)
from kvstrata.core.memory import SlotView
from kvstrata.core.namespace import HashExtras, MediaSpan, Namespace, hash_blocks
from kvstrata.core.policy import Admission, EvictionPolicy, RequestTrail, Run, RunQueue
from kvstrata.core.request import (
    ReqContext,
    RequestHints,
    RetentionRange,
    ScheduleEndContext,
    SessionHint,
)
from kvstrata.core.results import (
    JobResult,
    LoadJob,
    LoadStoreSpec,
    LookupResult,
    PrepareStoreOutput,
    StoreJob,
)
from kvstrata.core.stats import JobStats, Stats
from kvstrata.core.tier import SecondaryTierManager, TierEnv
from kvstrata.kv_store import KVStore
from kvstrata.kv_store import open_store as open  # noqa: A004
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.primary.reuse_filter import FilterReusedOffloadingManager

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "CPUOffloadingManager",
    "Config",
    "ConfigError",
    "ContractError",
    "CorruptChunkError",
    "EventKind",
    "EvictionPolicy",
    "FilterReusedOffloadingManager",
    "HashExtras",
    "JobId",
    "JobResult",
    "JobStats",
    "KVStore",
    "LoadJob",
    "LoadStoreSpec",
    "LookupResult",
    "MediaSpan",
    "Namespace",
    "OffloadError",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingManager",
    "PrepareStoreOutput",
    "ProtocolError",
    "RemovalReason",
    "ReqContext",
    "RequestHints",
    "RequestOffloadingContext",
    "RequestTrail",
    "RetentionRange",
    "Run",
    "RunQueue",
    "ScheduleEndContext",
    "SecondaryTierManager",
    "SessionHint",
    "ShutdownReport",
    "SlotView",
    "Stats",
    "StoreJob",
    "SuspendMode",
    "TierClosedError",
    "TierEnv",
    "TierError",
    "TierUnavailableError",
    "build_manager",
    "get_block_hash",
    "get_group_idx",
    "hash_blocks",
    "load_config",
    "make_offload_key",
    "open",
]
