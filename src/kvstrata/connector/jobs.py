"""The jobs that are open: what the ranks together say of them, and which blocks they use."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile

from kvstrata.connector.chunks import copies_of
from kvstrata.connector.config import SchedulerOffloadConfig
from kvstrata.connector.fence import BlockFence
from kvstrata.connector.messages import CopyJob, WorkerOutput
from kvstrata.connector.requests import Chunk, FoundPrefix, RequestOffloadState
from kvstrata.core.clock import Clock
from kvstrata.core.keys import JobId, OffloadKey


class JobKind(Enum):
    """Which way a job copies."""

    STORE = "store"
    LOAD = "load"


@dataclass(slots=True)
class OpenJob:
    """A job that not every rank has reported.

    Attributes:
        job: What the workers were told.
        kind: Which way it copies.
        state: The request; it may be finished by now.
        chunks: What it copies; chunk i is in, or goes to, slot `slots[i]`.
        slots: Distinct; negative for a chunk that was gone and fails.
        found: For a load, what it was promised to bring.
        media: For a load, where each chunk was found.
        started_s: Monotonic time.
        reported: Ranks that are done with it.
        failed_slots: Chunks that failed on any of them.
        is_overdue: Its deadline passed; what waited for it was told that it failed.
    """

    job: CopyJob
    kind: JobKind
    state: RequestOffloadState
    chunks: Sequence[Chunk]
    slots: Sequence[int]
    found: FoundPrefix | None
    media: Sequence[str]
    started_s: float
    reported: set[int] = field(default_factory=set)
    failed_slots: set[int] = field(default_factory=set)
    is_overdue: bool = False

    @property
    def keys(self) -> list[OffloadKey]:
        """Keys of the chunks that have a slot."""
        return [c.key for c, slot in zip(self.chunks, self.slots, strict=True) if slot >= 0]

    @property
    def failed_keys(self) -> frozenset[OffloadKey]:
        """Chunks that failed on any rank so far."""
        if not self.failed_slots:
            return frozenset()
        pairs = zip(self.chunks, self.slots, strict=True)
        return frozenset(chunk.key for chunk, slot in pairs if slot in self.failed_slots)


class JobTable:
    """Open jobs by id. A job is over when every rank has reported it; a failure on one counts.

    A block of one pool that is handed out while an open job uses it is what the workers have to
    wait for before they write it: `conflicts` names those jobs.
    """

    def __init__(self, config: SchedulerOffloadConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._fence = BlockFence()
        self._open: dict[JobId, OpenJob] = {}
        self._next_id = 1
        self._num_pools = max(group.pool_idx for group in config.groups) + 1
        self._handed_out: set[int] = set()
        self.num_settled = 0
        self.num_stray_results = 0
        self.num_overdue = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(self._open.values())

    def open(
        self,
        kind: JobKind,
        state: RequestOffloadState,
        chunks: Sequence[Chunk],
        slots: Sequence[int],
        *,
        found: FoundPrefix | None = None,
        media: Sequence[str] = (),
    ) -> CopyJob:
        """Make a job that goes to the workers, and note the blocks it uses."""
        job = CopyJob(JobId(self._next_id), state.request.req_id, copies_of(chunks, slots))
        self._next_id += 1
        now_s = self._clock.now_s()
        self._open[job.job_id] = OpenJob(job, kind, state, chunks, slots, found, media, now_s)
        for copies in job.copies:
            self._fence.add(job.job_id, self._folded(copies.group_idx, copies.block_ids))
        return job

    def hand_out(self, group_idx: int, block_ids: Collection[int]) -> None:
        """Note that the engine gave these blocks to somebody in this step."""
        self._handed_out.update(self._folded(group_idx, block_ids))

    def _folded(self, group_idx: int, block_ids: Iterable[int]) -> Iterable[int]:
        if self._num_pools == 1:
            return block_ids
        pool_idx = self._config.groups[group_idx].pool_idx
        return [block_id * self._num_pools + pool_idx for block_id in block_ids]

    def conflicts(self, started_now: Iterable[CopyJob]) -> list[JobId]:
        """End the step: return the jobs that must be over before it writes.

        Args:
            started_now: Jobs of this step that copy after that on behalf of the blocks' new owners.
        """
        jobs = self._fence.jobs_on(self._handed_out)
        jobs.difference_update(job.job_id for job in started_now)
        jobs.update(self._overdue_ids())
        self._handed_out = set()
        return sorted(jobs)

    def take_reports(self, outputs: Iterable[WorkerOutput]) -> list[OpenJob]:
        """Note what ranks reported; return the jobs that are over now, oldest first, once each.

        Results of unknown jobs, and second reports of a rank, change nothing and are counted.
        """
        over: list[OpenJob] = []
        for output in outputs:
            for result in output.results:
                job = self._open.get(result.job_id)
                if job is None or output.rank in job.reported:
                    self.num_stray_results += 1
                    continue
                job.reported.add(output.rank)
                job.failed_slots |= result.failed_slots
                if len(job.reported) == self._config.num_ranks:
                    over.append(job)
                    del self._open[result.job_id]
                    self._fence.remove(result.job_id)
        self.num_settled += len(over)
        return sorted(over, key=lambda job: job.job.job_id)

    def take_overdue(self) -> list[OpenJob]:
        """Mark and return the jobs whose deadline has passed since the last call.

        They stay open, with their slots and blocks: a rank may still be copying.
        """
        limit_s = self._clock.now_s() - self._config.job_deadline_s
        # Jobs start in the order of the dictionary, so the late ones come first.
        late = takewhile(lambda job: job.started_s < limit_s, self._open.values())
        overdue = [job for job in late if not job.is_overdue]
        for job in overdue:
            job.is_overdue = True
        self.num_overdue += len(overdue)
        return overdue

    def _overdue_ids(self) -> list[JobId]:
        overdue = takewhile(lambda job: job.is_overdue, self._open.values())
        return [job.job.job_id for job in overdue]

    def stats(self) -> Mapping[str, float]:
        """Return the gauges: open jobs of each kind, and the blocks they use."""
        num_loads = sum(job.kind is JobKind.LOAD for job in self._open.values())
        return {
            "open_loads": num_loads,
            "open_stores": len(self._open) - num_loads,
            "open_blocks": self._fence.num_blocks,
        }

    def check(self) -> None:
        """Assert every invariant. For tests."""
        self._fence.check()
        for job in self._open.values():
            assert len(job.reported) < self._config.num_ranks
            assert len(set(job.slots)) == len(job.slots) == len(job.chunks)
