"""The connector beside the tensors of one rank: runs the jobs of each step's message."""

from collections.abc import Collection, Sequence
from functools import partial

from kvstrata.connector.config import SchedulerOffloadConfig
from kvstrata.connector.copier import Copier
from kvstrata.connector.messages import CopyJob, CopyResult, StepMessage, WorkerOutput
from kvstrata.connector.transfers import Task, Transfers, TransferThread, Urgency
from kvstrata.core.errors import OffloadError
from kvstrata.core.keys import JobId


class OffloadingConnectorWorker:
    """Copies between one rank's engine blocks and slots, beside the engine's steps.

    The order of calls is in the package's docstring. Thread: one, the engine's. Blocks: only
    `handle_preemptions`, `wait_for_results` and `shutdown`, when copies run on a thread.
    """

    def __init__(
        self,
        config: SchedulerOffloadConfig,
        rank: int,
        copier: Copier,
        *,
        transfers: Transfers | None = None,
        flush_timeout_s: float = 60.0,
    ) -> None:
        """Take what copies and what runs the copies.

        Args:
            config: As on the scheduler side.
            rank: Of this worker.
            copier: Knows the tensors; owned.
            transfers: Owned; None: as many threads as the copier wants.
            flush_timeout_s: How long `handle_preemptions` waits before it gives up.
        """
        self._config = config
        self._rank = rank
        self._copier = copier
        self._flush_timeout_s = flush_timeout_s
        self._transfers = transfers or TransferThread(
            f"kvstrata-transfer-{rank}", num_threads=copier.num_threads
        )
        self._loads: dict[JobId, CopyJob] = {}

    def handle_preemptions(self, message: StepMessage) -> None:
        """Start early stores, and return when no named job uses a block any more.

        Raises:
            OffloadError: A job does not end; the step must not run.
        """
        self._submit_stores(message.early_stores)
        stuck = self._transfers.wait(message.flush_job_ids, self._flush_timeout_s)
        if stuck:
            raise OffloadError(
                f"jobs {sorted(stuck)} still use engine blocks after {self._flush_timeout_s} s"
            )

    def start_loads(self, message: StepMessage) -> None:
        """Start the step's loads."""
        mark = self._copier.mark() if message.loads else None
        for job in message.loads:
            self._loads[job.job_id] = job
            run = partial(self._copier.load, job.copies, mark)
            self._transfers.submit(Task(job, run), Urgency.LOAD)

    def start_stores(self, message: StepMessage) -> None:
        """Start the step's stores: its forward pass has been run, or given to the device."""
        self._submit_stores(message.stores)

    def _submit_stores(self, jobs: Sequence[CopyJob]) -> None:
        mark = self._copier.mark() if jobs else None
        for job in jobs:
            if self._config.is_replicated and job.job_id % self._config.num_ranks != self._rank:
                run = partial(frozenset[int])  # another rank writes the one copy
            else:
                run = partial(self._copier.store, job.copies, mark)
            self._transfers.submit(Task(job, run), Urgency.STORE)

    def take_output(self) -> WorkerOutput:
        """Return what ended since the last call."""
        results = self._transfers.take_results()
        loaded: list[str] = []
        failed: list[str] = []
        failed_ids: list[list[int]] = [[] for _ in self._config.groups]
        for result in results:
            job = self._loads.pop(result.job_id, None)
            if job is not None:
                loaded.append(job.req_id)
                if result.failed_slots:
                    failed.append(job.req_id)
                    self._add_failed(job, result, failed_ids)
        return WorkerOutput(self._rank, results, loaded, failed, failed_ids if failed else ())

    @staticmethod
    def _add_failed(job: CopyJob, result: CopyResult, failed_ids: Sequence[list[int]]) -> None:
        for copies in job.copies:
            failed_ids[copies.group_idx] += [
                block_id
                for block_id, slot in zip(copies.block_ids, copies.slots, strict=True)
                if slot in result.failed_slots
            ]

    def wait_for_results(self, timeout_s: float) -> None:
        """Return when there is something to take, no job is open, or the time is over."""
        self._transfers.wait_for_results(timeout_s)

    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        """End the queued jobs and the threads; return the jobs that did not end in time.

        Where all did, the copier is closed. What a stuck copy uses stays as it is.
        """
        stuck = self._transfers.close(timeout_s)
        if not stuck:
            self._copier.close()
        return stuck
