"""Which open jobs use which engine blocks, so that none is overwritten under a copy."""

from collections.abc import Iterable, Set

from kvstrata.core.keys import JobId


class BlockFence:
    """Remembers the blocks of open jobs. A block is a pair of pool and id, folded into one int."""

    def __init__(self) -> None:
        self._jobs_by_block: dict[int, list[JobId]] = {}
        self._blocks_by_job: dict[JobId, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that some open job uses."""
        return len(self._jobs_by_block)

    def add(self, job_id: JobId, blocks: Iterable[int]) -> None:
        """Note that an open job reads or writes these blocks."""
        mine = self._blocks_by_job.setdefault(job_id, [])
        for block in blocks:
            self._jobs_by_block.setdefault(block, []).append(job_id)
            mine.append(block)

    def remove(self, job_id: JobId) -> None:
        """Forget a job that is over on every rank."""
        for block in self._blocks_by_job.pop(job_id, ()):
            jobs = self._jobs_by_block[block]
            jobs.remove(job_id)
            if not jobs:
                del self._jobs_by_block[block]

    def jobs_on(self, blocks: Set[int]) -> set[JobId]:
        """Return the open jobs that use any of these blocks."""
        shared = self._jobs_by_block.keys() & blocks
        return {job_id for block in shared for job_id in self._jobs_by_block[block]}

    def check(self) -> None:
        """Assert that both directions agree."""
        pairs = {(b, j) for b, jobs in self._jobs_by_block.items() for j in jobs}
        assert pairs == {(b, j) for j, blocks in self._blocks_by_job.items() for b in blocks}
        assert all(self._jobs_by_block.values())
