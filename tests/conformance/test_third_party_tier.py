"""A tier of somebody else's: only what the contract makes abstract, and the whole suite on it."""

from collections.abc import Collection, Iterable
from pathlib import Path

from typing_extensions import override

from kvstrata.core.errors import TierClosedError
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.tier import SecondaryTierManager
from kvstrata.testing import FakeClock, SecondaryTierSuite


class DictTier(SecondaryTierManager):
    """Written to the first version of the contract; field report P04: it has to go on loading."""

    def __init__(self, slots: SlotView, clock: FakeClock) -> None:
        self.slots, self.clock = slots, clock
        self.chunks: dict[OffloadKey, tuple[bytes, float]] = {}
        self.jobs: list[StoreJob | LoadJob] = []
        self.failed: list[JobResult] = []
        self.is_closed = False

    def has(self, key: OffloadKey) -> bool:
        return key in self.chunks and self.chunks[key][1] > self.clock.wall_s()

    @override
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        return LookupResult.HIT if self.has(key) else LookupResult.MISS

    @override
    def submit_store(self, job: StoreJob) -> None:
        if self.is_closed:
            raise TierClosedError("dict", "is shut down")
        self.jobs.append(job)

    @override
    def submit_load(self, job: LoadJob) -> None:
        if self.is_closed:
            raise TierClosedError("dict", "is shut down")
        self.jobs.append(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = self.failed + [self.run(job) for job in self.jobs]
        self.failed, self.jobs = [], []
        return results

    def run(self, job: StoreJob | LoadJob) -> JobResult:
        failed = set()
        for i, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            if isinstance(job, StoreJob):
                at_s = float("inf") if job.expires_at_s is None else job.expires_at_s[i]
                if not self.has(key):
                    self.chunks[key] = bytes(self.slots[slot]), at_s
            elif self.has(key):
                self.slots[slot][:] = self.chunks[key][0]
            else:
                failed.add(key)
        return JobResult(job.job_id, frozenset(failed))

    @override
    def drain_jobs(self, timeout_s: float) -> Collection[JobId]:
        return ()

    @override
    def reset(self) -> None:
        self.chunks.clear()
        self.failed += [JobResult(job.job_id, frozenset(job.keys)) for job in self.jobs]
        self.jobs = []

    @override
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        self.is_closed = True
        return ()


class TestDictTier(SecondaryTierSuite):
    @override
    def make_tier(self, slots: SlotView, tmp_path: Path) -> DictTier:
        return DictTier(slots, self.clock)
