"""Connectors that vLLM loads in place of ours to make rare things happen, each time alike."""

import random
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from kvstrata.connector import BlockCopies, Copier, OffloadingConnectorWorker
from kvstrata.connector.messages import CopyResult
from kvstrata.connector.transfers import Task, Transfers, Urgency, run_task
from kvstrata.core.keys import JobId
from kvstrata.core.memory import SlotView
from kvstrata.integrations.vllm import KVStrataConnector, VllmStepMessage


class LateTransfers(Transfers):
    """Runs each task some steps after it was started, or when a step waits for it."""

    def __init__(self, num_store_steps: int, num_load_steps: int) -> None:
        self._delay = {Urgency.STORE: num_store_steps, Urgency.LOAD: num_load_steps}
        self._queued: deque[tuple[int, Task]] = deque()
        self._results: list[CopyResult] = []
        self._step = 0
        self.num_awaited = 0

    @override
    def submit(self, task: Task, urgency: Urgency) -> None:
        self._queued.append((self._step + self._delay[urgency], task))

    @override
    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> Collection[JobId]:
        awaited = [task for _, task in self._queued if task.job.job_id in job_ids]
        self.num_awaited += len(awaited)
        self._run(awaited)
        return ()

    def _run(self, tasks: Iterable[Task]) -> None:
        ids = set()
        for task in tasks:
            self._results.append(run_task(task))
            ids.add(task.job.job_id)
        self._queued = deque(item for item in self._queued if item[1].job.job_id not in ids)

    @override
    def take_results(self) -> list[CopyResult]:
        self._step += 1
        self._run([task for due, task in self._queued if due <= self._step])
        results, self._results = self._results, []
        return results

    @override
    def wait_for_results(self, timeout_s: float) -> None:
        return

    @override
    def close(self, timeout_s: float) -> Collection[JobId]:
        self._run([task for _, task in self._queued])
        return ()


class FailingCopier(Copier):
    """Loads like the one it wraps, but lets chunks fail, and fills their blocks with nonsense."""

    def __init__(self, inner: Copier, kind: str) -> None:
        self._inner = inner
        self._kind = kind
        self._rng = random.Random(5)
        self.num_failed = 0

    @override
    def mark(self) -> object:
        return self._inner.mark()

    @override
    def close(self) -> None:
        self._inner.close()

    @override
    def store(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        return self._inner.store(copies, mark)

    @override
    def load(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        failed = self._inner.load(copies, mark) | self._pick(copies)
        for group in copies:
            wrong = [slot if slot not in failed else group.slots[0] for slot in group.slots]
            parts = [
                0 if slot in failed else part
                for slot, part in zip(group.slots, group.parts, strict=True)
            ]
            if wrong != list(group.slots):
                self._inner.load([replace(group, slots=wrong, parts=parts)], mark)
        self.num_failed += len(failed)
        return failed

    def _pick(self, copies: Sequence[BlockCopies]) -> frozenset[int]:
        slots = list(dict.fromkeys(slot for group in copies for slot in group.slots))
        if self._rng.random() < 0.5:
            return frozenset()
        match self._kind:
            case "first":
                return frozenset(slots[:1])
            case "whole":
                return frozenset(slots)
            case _:
                return frozenset(self._rng.sample(slots, 1))


WORKERS: list[OffloadingConnectorWorker] = []


class LateConnector(KVStrataConnector):
    """Copies late: stores are still open when their blocks are given to others."""

    num_store_steps = 6
    num_load_steps = 2

    @override
    def make_worker(self, slots: SlotView) -> OffloadingConnectorWorker:
        self.transfers = LateTransfers(self.num_store_steps, self.num_load_steps)
        return OffloadingConnectorWorker(
            self._plan.offload,
            self.worker_side.rank,
            self.make_copier(slots),
            transfers=self.transfers,
        )


class UnfencedConnector(LateConnector):
    """The same, and steps do not wait for stores that read what they overwrite."""

    @override
    def handle_preemptions(self, kv_connector_metadata: VllmStepMessage) -> None:
        message = replace(kv_connector_metadata.message, flush_job_ids=())
        super().handle_preemptions(replace(kv_connector_metadata, message=message))


class FailSomeConnector(LateConnector):
    """Half of all loads lack one chunk."""

    kind = "some"
    num_store_steps = 0

    @override
    def make_copier(self, slots: SlotView) -> Copier:
        return FailingCopier(super().make_copier(slots), self.kind)


class FailFirstConnector(FailSomeConnector):
    """Half of all loads lack their first chunk."""

    kind = "first"


class FailWholeConnector(FailSomeConnector):
    """Half of all loads bring nothing."""

    kind = "whole"


def named(kind: type[Any]) -> str:
    """How vLLM is told to load a connector of this module."""
    return f"{kind.__module__}:{kind.__qualname__}"
