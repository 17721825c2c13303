"""What managers and tiers answer, and the jobs that move chunks between tiers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.request import ReqContext


class LookupResult(Enum):
    """Where a chunk stands."""

    HIT = "hit"  # loadable now
    HIT_PENDING = "hit_pending"  # still being written or promoted; loadable soon
    RETRY = "retry"  # not known yet, ask again on a later step
    MISS = "miss"


@dataclass(slots=True)
class LoadStoreSpec:
    """Slots of one prepared copy: `slots[i]` holds, or will hold, the i-th key."""

    slots: Sequence[int]


@dataclass(slots=True)
class PrepareStoreOutput:
    """What a store may copy.

    `keys_to_store` is a subset of the offered keys, in their order: those that are not there yet
    and were admitted. `store_spec.slots[i]` is for `keys_to_store[i]`. `evicted_keys` had to leave
    to make room.
    """

    keys_to_store: Sequence[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: Sequence[OffloadKey]


@dataclass(frozen=True, slots=True)
class _Job:
    """One asynchronous copy: chunk `keys[i]` is in, or goes to, slot `slots[i]`.

    The slots are the job's until its result has been taken. `req_context` is the request on whose
    behalf it runs; None where there is none (a flush, a prefetch).
    """

    job_id: JobId
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    req_context: ReqContext | None = None


@dataclass(frozen=True, slots=True)
class StoreJob(_Job):
    """Copy chunks from primary slots into a tier (a cascade).

    `expires_at_s[i]`, seconds since 1970, says when chunk i must be gone; None means never for all,
    infinity never for one.
    """

    expires_at_s: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class LoadJob(_Job):
    """Copy chunks of a tier into primary slots (a promotion)."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: `failed` holds the keys that did not arrive; empty means that all did.

    Chunks of a load that are not in `failed` were verified by the tier. `corrupt` are those of
    `failed` whose stored bytes were wrong. `expires_at_s` says of loaded chunks that
    must be gone some day when that is, in seconds since 1970.
    """

    job_id: JobId
    failed: frozenset[OffloadKey] = field(default_factory=frozenset)
    corrupt: frozenset[OffloadKey] = field(default_factory=frozenset)
    expires_at_s: Mapping[OffloadKey, float] = field(default_factory=dict)
