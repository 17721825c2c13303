"""Book-keeping of a tier's jobs: what is still to be settled, and results that wait to be taken."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvstrata.core.errors import ContractError
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.results import JobResult, LoadJob, StoreJob
from kvstrata.core.stats import JobStats
from kvstrata.tiers.chunk_format import NEVER_S

Job = StoreJob | LoadJob


class Outcome(Enum):
    """How one chunk of a job ended."""

    ARRIVED = "arrived"
    PRESENT = "present"  # a store found it there already and wrote nothing
    REFUSED = "refused"  # a store found no room for it, and so failed
    FAILED = "failed"
    CORRUPT = "corrupt"  # a load found wrong bytes, and so failed


COUNTERS: Final = (
    *("store_jobs", "load_jobs", "store_s", "load_s"),
    *("stored_chunks", "stored_bytes", "loaded_chunks", "loaded_bytes"),
    *("failed_store_chunks", "failed_load_chunks"),
    *("present_chunks", "refused_chunks", "corrupt_chunks"),
)
"""Both directions alike: every job counts one time and adds its duration, failed or not."""


@dataclass(slots=True)
class _OpenJob:
    job: Job
    started_s: float
    num_left: int
    failed: set[OffloadKey] = field(default_factory=set)
    corrupt: set[OffloadKey] = field(default_factory=set)
    expires_at_s: dict[OffloadKey, float] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "store" if isinstance(self.job, StoreJob) else "load"


class JobBook:
    """Jobs in flight, their results, and counters of both directions. Not thread-safe."""

    def __init__(self, chunk_bytes: int) -> None:
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._chunk_bytes = chunk_bytes
        self._open: dict[JobId, _OpenJob] = {}
        self._results: list[JobResult] = []

    def __len__(self) -> int:
        """Return the number of jobs in flight."""
        return len(self._open)

    def __contains__(self, job_id: object) -> bool:
        """Say whether the job is in flight."""
        return job_id in self._open

    def job_ids(self) -> list[JobId]:
        """Return the jobs in flight, oldest first."""
        return list(self._open)

    def open(self, job: Job, now_s: float) -> None:
        """Take a job on; one without keys ends at once.

        Raises:
            ContractError: A job of this id is in flight, or keys and slots differ in number.
        """
        if job.job_id in self._open:
            raise ContractError(f"job {job.job_id} is in flight already")
        if len(job.keys) != len(job.slots):
            raise ContractError(f"job {job.job_id}: {len(job.keys)} keys, {len(job.slots)} slots")
        self._open[job.job_id] = _OpenJob(job, now_s, len(job.keys))
        self._end_if_settled(job.job_id, now_s)

    def settle(
        self,
        job_id: JobId,
        key: OffloadKey,
        outcome: Outcome,
        now_s: float,
        expires_at_s: float = NEVER_S,
    ) -> None:
        """Note how one chunk of a job in flight ended; the last one ends the job.

        `expires_at_s` is when a chunk that was loaded must be gone, in seconds since 1970.
        """
        open_job = self._open[job_id]
        if expires_at_s < NEVER_S:
            open_job.expires_at_s[key] = expires_at_s
        open_job.num_left -= 1
        self._count(open_job.kind, outcome)
        if outcome not in {Outcome.ARRIVED, Outcome.PRESENT}:
            open_job.failed.add(key)
        if outcome is Outcome.CORRUPT:
            open_job.corrupt.add(key)
        self._end_if_settled(job_id, now_s)

    @property
    def has_results(self) -> bool:
        """Whether `take_results` would return any; may be asked without the lock."""
        return bool(self._results)

    def take_results(self) -> Iterable[JobResult]:
        """Return the results since the last call."""
        results, self._results = self._results, []
        return results

    def snapshot(self, tier: str, now_s: float) -> Sequence[JobStats]:
        """Describe the jobs in flight, oldest first."""
        return tuple(
            JobStats(
                job_id,
                each.kind,
                tier,
                each.num_left,
                now_s - each.started_s,
                each.job.req_context.req_id if each.job.req_context else None,
            )
            for job_id, each in self._open.items()
        )

    def _count(self, kind: str, outcome: Outcome) -> None:
        if outcome is Outcome.ARRIVED:
            done = "stored" if kind == "store" else "loaded"
            self.counters[f"{done}_chunks"] += 1
            self.counters[f"{done}_bytes"] += self._chunk_bytes
            return
        if outcome is not Outcome.FAILED:
            self.counters[f"{outcome.value}_chunks"] += 1
        if outcome is not Outcome.PRESENT:
            self.counters[f"failed_{kind}_chunks"] += 1

    def _end_if_settled(self, job_id: JobId, now_s: float) -> None:
        open_job = self._open[job_id]
        if open_job.num_left > 0:
            return
        del self._open[job_id]
        self.counters[f"{open_job.kind}_jobs"] += 1
        self.counters[f"{open_job.kind}_s"] += now_s - open_job.started_s  # type: ignore[assignment]
        self._results.append(
            JobResult(
                job_id,
                frozenset(open_job.failed),
                frozenset(open_job.corrupt),
                open_job.expires_at_s,
            )
        )
