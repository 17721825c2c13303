"""Jobs as operations on threads: each chunk is settled one time, whatever its operation does."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from typing_extensions import override

from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.results import JobResult, LoadJob, StoreJob
from kvstrata.core.stats import JobStats
from kvstrata.core.tier import TierEnv
from kvstrata.tiers.chunk_format import NEVER_S
from kvstrata.tiers.fs.blockage import Blockage
from kvstrata.tiers.fs.index import Write
from kvstrata.tiers.fs.publisher import Publisher, num_published
from kvstrata.tiers.fs.settings import FsSettings
from kvstrata.tiers.fs.store import ChunkStore
from kvstrata.tiers.fs.workers import Lane, Workers
from kvstrata.tiers.jobs import Job, JobBook, Outcome
from kvstrata.tiers.recency import Trail

logger = logging.getLogger("kvstrata.fs")

NUM_GRANTED_MAX: Final = 32
"""Room is made for so many chunks at a time: few calls, and no long wait for the account."""


@dataclass(slots=True, eq=False)
class _Load:
    copies: "Copies"
    job: LoadJob
    seq: int
    key: OffloadKey
    slot: int
    is_settled: bool = False

    def run(self, page: memoryview) -> None:
        self.copies.run_load(self, page)

    @override
    def __str__(self) -> str:
        return f"loading {self.key.hex()}"

    def fail(self) -> None:
        self.copies.settle(self, Outcome.FAILED)


@dataclass(slots=True, eq=False)
class _Store(Write):
    copies: "Copies" = field(kw_only=True)
    job: StoreJob = field(kw_only=True)
    slot: int = field(kw_only=True)
    is_settled: bool = False

    def run(self, page: memoryview) -> None:
        self.copies.run_store(self, page)

    @override
    def __str__(self) -> str:
        return f"storing {self.key.hex()}"

    def fail(self) -> None:
        self.copies.settle(self, Outcome.FAILED)


@dataclass(slots=True, eq=False)
class _Admit:
    """Some chunks of a store job that still need room."""

    copies: "Copies"
    seq: int
    stores: list[_Store]

    def run(self, page: memoryview) -> None:
        del page
        self.copies.run_admit(self)

    @override
    def __str__(self) -> str:
        return f"making room for {len(self.stores)} chunks from {self.stores[0].key.hex()} on"

    def fail(self) -> None:
        for store in self.stores:
            store.fail()


class Copies:
    """Loads and stores in flight. Thread: any; calls of the tier's contract take one short lock."""

    def __init__(
        self,
        store: ChunkStore,
        workers: Workers,
        slots: SlotView,
        settings: FsSettings,
        env: TierEnv,
    ) -> None:
        self.is_hung = False
        self._store = store
        self._workers = workers
        self._slots = slots
        self._settings = settings
        self._name = env.name
        self._clock = env.clock
        self._book = JobBook(slots.chunk_bytes)
        self._changed = threading.Condition()  # guards everything below, and the book
        self._seq = 0  # of jobs, so that a void reaches those before it only
        self._void_seq = 0
        self._void_keys: dict[OffloadKey, int] = {}
        self._cancelled: set[JobId] = set()
        self._num_storing = 0
        self._storing: Counter[OffloadKey] = Counter()
        self._writes: set[_Store] = set()  # granted and not settled
        num_at_a_time = num_published(settings, store.chunks.file_bytes)
        self._publisher = Publisher(self._publish, num_at_a_time, workers)
        self._blockage = Blockage(env.name, env.clock, settings.retry_s)

    # What the tier calls: none of it waits for the disk.

    def submit_load(self, job: LoadJob) -> None:
        """Take on a job; its chunks are settled one by one."""
        seq = self._open(job)
        if self.is_hung:
            self._fail_job(job)
            return
        self._store.index.pin(job.keys)
        places = zip(job.keys, job.slots, strict=True)
        loads = (_Load(self, job, seq, key, slot) for key, slot in places)
        self._workers.submit(Lane.LOAD, loads, len(job.keys))

    def submit_store(self, job: StoreJob, trail: Trail) -> None:
        """Take on a job, or refuse it where stores can't succeed or too many wait."""
        seq = self._open(job)
        with self._changed:
            num_storing = self._num_storing + len(job.keys)
            is_refused = (
                self.is_hung
                or bool(self._blockage)
                or num_storing > self._settings.num_queued_chunks_max
            )
            if not is_refused:
                self._num_storing = num_storing
                self._storing.update(job.keys)
        if is_refused:
            self._fail_job(job, Outcome.REFUSED)
            return
        self._workers.submit(Lane.STORE, self._admissions(job, seq, trail))

    def is_storing(self, key: OffloadKey) -> bool:
        """Say whether the chunk is queued or being written."""
        return key in self._storing

    def is_storing_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Say whether any of these chunks is queued or being written."""
        return bool(self._storing) and not self._storing.keys().isdisjoint(keys)

    def take_results(self) -> Iterable[JobResult]:
        """Return the results since the last call."""
        if not self._book.has_results:
            return ()
        with self._changed:
            return self._book.take_results()

    def void_keys(self, keys: Collection[OffloadKey]) -> None:
        """Keep stores in flight from making these chunks appear."""
        with self._changed:
            writes = [each for each in self._writes if each.key in keys]
            self._void_keys |= {key: self._seq for key in keys if key in self._storing}
        self._store.index.void(writes)

    def void_prefix(self, prefix: bytes) -> None:
        """Do `void_keys` for all keys that begin so."""
        with self._changed:
            keys = {key for key in self._storing if key.startswith(prefix)}
        self.void_keys(keys)

    def void_all(self) -> None:
        """Let all jobs in flight fail."""
        with self._changed:
            writes, self._void_seq = list(self._writes), self._seq
        self._store.index.void(writes)

    def cancel(self, job_id: JobId) -> None:
        """Give up on those chunks of a job that have not started."""
        with self._changed:
            if job_id in self._book:
                self._cancelled.add(job_id)

    def check_deadlines(self) -> None:
        """Give up on operations that take too long, and on all that wait behind them.

        A store is failed at once: its file will not appear. A load still has its slot until it
        returns, since until then its bytes may arrive there; so its job stays open as well.
        """
        overdue = self._workers.overdue(self._settings.io_deadline_s)
        if overdue and not self.is_hung:
            self.is_hung = True
            logger.warning("%s: no answer from %s, not used", self._name, self._settings.root)
        for operation in overdue:
            stores = operation.stores if isinstance(operation, _Admit) else [operation]
            stores = [each for each in stores if isinstance(each, _Store)]
            self._store.index.void(stores)
            for store in stores:
                store.fail()
        if self.is_hung:
            self._fail_written()
            self._fail_queued()
            if not overdue:
                self.is_hung = False
                logger.warning("%s: %s answers again", self._name, self._settings.root)

    def wait_until_idle(self, timeout_s: float) -> Collection[JobId]:
        """Wait for all jobs to end; return those that have not."""
        ends_s = time.monotonic() + timeout_s  # threads take real time, whatever the clock says
        while True:
            self.check_deadlines()
            with self._changed:
                left_s = ends_s - time.monotonic()
                if not self._book or left_s <= 0:
                    return self._book.job_ids()
                self._changed.wait(min(left_s, 0.05))

    def fail_all(self) -> None:
        """End every job now, failed as far as it is not done. For the end of the tier only.

        Slots of loads that still run may be written to later: their jobs are those that
        `wait_until_idle` returned.
        """
        self._fail_queued()
        self.void_all()
        self._fail_written()
        for operation in self._workers.overdue(0.0):
            if isinstance(operation, _Load | _Store | _Admit):
                operation.fail()

    def stats(self) -> tuple[dict[str, float], Sequence[JobStats], str]:
        """Return counters, jobs in flight, and the state in a word."""
        with self._changed:
            jobs = self._book.snapshot(self._name, self._clock.now_s())
            state = "hung" if self.is_hung else self._blockage.state or "ok"
            return dict(self._book.counters), jobs, state

    # What operations call, on the tier's threads.

    def run_load(self, load: _Load, page: memoryview) -> None:
        """Read one chunk into its slot."""
        outcome = Outcome.FAILED
        try:
            if not self._is_dead(load.job.job_id, load.seq):
                outcome = self._store.read(load.key, self._slots.row(load.slot), page)
        except OSError as error:
            logger.warning("%s: can't read %s: %s", self._name, load.key.hex(), error)
        if outcome is Outcome.ARRIVED and load.seq <= self._void_seq:
            outcome = Outcome.FAILED
        self.settle(load, outcome)

    def run_admit(self, admit: _Admit) -> None:
        """Make room for some chunks and queue their stores."""
        wanted: list[_Store] = []
        try:
            self._store.finish_forgetting()
            if self._store.may_have_more():
                index = self._store.index
                self._store.probe([s.key for s in admit.stores if index.get(s.key) is None])
            wanted += [each for each in admit.stores if self._is_wanted(each, admit.seq)]
            num_granted = 0 if self._blockage else self._store.sweep.grant(wanted)
        except OSError as error:
            self._blockage.note_error(error)
            admit.fail()
            return
        may_be_taken = self._store.may_have_more()  # by what others are writing just now
        if wanted and not num_granted and not len(self._store.index) and not may_be_taken:
            self._blockage.begin("full", "no room and nothing to remove")
        for each in wanted[num_granted:]:
            self.settle(each, Outcome.REFUSED)
        granted = wanted[:num_granted]
        with self._changed:
            self._writes.update(granted)
            late = [each for each in granted if self._is_void(each, admit.seq)]
        self._store.index.void(late)
        self._workers.submit_next(Lane.STORE, iter(granted), num_granted)

    def run_store(self, store: _Store, page: memoryview) -> None:
        """Write one chunk from its slot."""
        try:
            if store.is_void or self._blockage:
                self._store.sweep.release(store)
            else:
                self._store.write(store, self._slots.row(store.slot), page)
        except OSError as error:
            self._blockage.note_error(error)
        if store.file is None:
            self.settle(store, Outcome.FAILED)
        else:
            self._publisher.publish(store)

    def _publish(self, stores: list[_Store]) -> None:
        """Let written chunks appear."""
        results = self._store.publish(stores)
        for result in results:
            if isinstance(result, OSError):
                self._blockage.note_error(result)
            else:
                self._blockage.end()
        with self._changed:
            for store, result in zip(stores, results, strict=True):
                self._settle(store, Outcome.FAILED if isinstance(result, OSError) else result)

    def settle(self, copy: _Load | _Store, outcome: Outcome) -> None:
        """Note how a chunk ended; only the first time counts."""
        with self._changed:
            is_first = self._settle(copy, outcome)
        if is_first and isinstance(copy, _Load):
            self._store.index.unpin(copy.key)

    def _settle(self, copy: _Load | _Store, outcome: Outcome) -> bool:
        if isinstance(copy, _Store):
            self._writes.discard(copy)
        if copy.is_settled:
            return False
        copy.is_settled = True
        if isinstance(copy, _Store):
            self._forget_storing(copy.key)
        entry, job_id = self._store.index.get(copy.key), copy.job.job_id
        expires_at_s = NEVER_S if entry is None else entry.expires_at_s
        self._book.settle(job_id, copy.key, outcome, self._clock.now_s(), expires_at_s)
        if job_id not in self._book:
            self._cancelled.discard(job_id)
            self._changed.notify_all()
        return True

    def _open(self, job: Job) -> int:
        with self._changed:
            self._book.open(job, self._clock.now_s())
            self._seq += 1
            return self._seq

    def _fail_job(self, job: Job, outcome: Outcome = Outcome.FAILED) -> None:
        with self._changed:
            for key in job.keys:
                self._book.settle(job.job_id, key, outcome, self._clock.now_s())

    def _admissions(self, job: StoreJob, seq: int, trail: Trail) -> Iterator[_Admit]:
        ends_s, wall_s = job.expires_at_s or [NEVER_S] * len(job.keys), self._clock.wall_s()
        rest = (
            _Store(key, trail, end_s, trail.take_time_s(wall_s), copies=self, job=job, slot=slot)
            for key, slot, end_s in zip(job.keys, job.slots, ends_s, strict=True)
        )
        while part := list(islice(rest, NUM_GRANTED_MAX)):
            yield _Admit(self, seq, part)

    def _is_wanted(self, store: _Store, seq: int) -> bool:
        """Say whether a store needs to be written; settle it if not."""
        if self._is_void(store, seq):
            self.settle(store, Outcome.FAILED)
        elif not self._store.can_hold(store.key):
            self.settle(store, Outcome.REFUSED)
        elif self._store.index.get(store.key) is not None:
            self.settle(store, Outcome.PRESENT)
        else:
            return True
        return False

    def _is_void(self, store: _Store, seq: int) -> bool:
        return self._is_dead(store.job.job_id, seq) or self._void_keys.get(store.key, 0) >= seq

    def _is_dead(self, job_id: JobId, seq: int) -> bool:
        return self.is_hung or seq <= self._void_seq or job_id in self._cancelled

    def _forget_storing(self, key: OffloadKey) -> None:
        self._num_storing -= 1
        self._storing[key] -= 1
        if self._storing[key] <= 0:
            del self._storing[key]
            self._void_keys.pop(key, None)

    def _fail_written(self) -> None:
        """Fail what is written and waits to be published, maybe behind a call that hangs."""
        with self._changed:
            stores = [store for store in self._writes if store.file is not None]
        self._store.index.void(stores)
        for store in stores:
            store.fail()

    def _fail_queued(self) -> None:
        """Fail what has not started; reservations are given back when a thread has time."""
        for operation in self._workers.take_queued(Lane.LOAD):
            operation.fail()
        for operation in self._workers.take_queued(Lane.STORE):
            if isinstance(operation, _Store):
                self._store.index.void([operation])
                self._workers.submit(Lane.CHORE, iter([operation]))
            operation.fail()
