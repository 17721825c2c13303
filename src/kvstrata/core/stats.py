"""Snapshots of use and counters, as `get_stats()` returns them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstrata.core.keys import JobId

NO_JOB: Final = JobId(0)
"""The id of copies between engine and primary, which are named by request and keys instead."""


@dataclass(frozen=True, slots=True)
class JobStats:
    """One job in flight: which copy, for whom, and for how long already."""

    job_id: JobId
    kind: str  # "store" or "load"
    tier: str
    num_chunks: int
    age_s: float
    req_id: str | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """One consistent snapshot; later calls into the manager do not change it.

    Attributes:
        gauges: Current values by metric name; they go up and down.
        counters: Totals since start by metric name; they never decrease.
        tiers: One snapshot per secondary tier, by tier name.
        jobs: Copies in flight, oldest first.
        notes: Facts in words, by name, such as who owns the capacity; never a secret.
            "stores": "none" for a tier that takes none.
        state: "ok", or in one word why not ("open", "full", "read_only", "closed").
    """

    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    tiers: Mapping[str, "Stats"] = field(default_factory=dict)
    jobs: Sequence[JobStats] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    state: str = "ok"

    def __getitem__(self, name: str) -> float:
        """Return the gauge or counter of this name; KeyError if there is none."""
        return self.gauges[name] if name in self.gauges else self.counters[name]
