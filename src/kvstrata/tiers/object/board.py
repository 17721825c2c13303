"""What the parts of an object tier share, under one lock that is never held across a request."""

import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from itertools import count
from math import inf
from typing import Final

from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.results import StoreJob
from kvstrata.core.tier import TierEnv
from kvstrata.tiers.chunk_format import HEADER_BYTES, NEVER_S, digest_namespace
from kvstrata.tiers.jobs import Job, JobBook, Outcome
from kvstrata.tiers.object.client import ObjectClient, ObjectStoreError
from kvstrata.tiers.object.health import Health
from kvstrata.tiers.object.index import Entry, Index
from kvstrata.tiers.object.settings import ObjectSettings
from kvstrata.tiers.object.workers import Lane, WorkerPool

_STORE_SHARE: Final = 0.75  # of all requests at one time, so that loads find a place beside them
HEX_KEY_BYTES_MAX: Final = 100  # longer keys are named by their hash

COUNTERS: Final = (
    *("retries", "expired_loads", "expired_stores", "hedged_loads", "hedges_won"),
    *("probes", "probe_hits", "probe_misses", "probe_unknown", "lookup_timeouts"),
    *("dropped_lookups", "dropped_stores", "external_chunks", "corrupt_objects"),
    *("evicted_chunks", "expired_chunks", "deleted_chunks", "failed_deletes"),
)
_REMOVED_AS: Final = {
    RemovalReason.EVICTED: "evicted_chunks",
    RemovalReason.EXPIRED: "expired_chunks",
    RemovalReason.DELETED: "deleted_chunks",
    RemovalReason.EXTERNAL: "external_chunks",
    RemovalReason.CORRUPT: "corrupt_objects",
}


class CopyState(Enum):
    """How far one chunk of a job is."""

    WAITING = "waiting"  # queued, between tries, or a load that is being read: may be given up
    LANDING = "landing"  # its slot is being read or written: ends by itself
    OVER = "over"


@dataclass(slots=True, eq=False)
class Copy:
    """One chunk of a job, until it is settled."""

    job: Job
    key: OffloadKey
    path: str
    slot: int
    deadline_s: float
    expires_at_s: float = NEVER_S
    state: CopyState = CopyState.WAITING
    num_tries: int = 0
    num_running: int = 0

    @property
    def is_store(self) -> bool:
        """Whether it goes to the store."""
        return isinstance(self.job, StoreJob)


def _make_pool(name: str, settings: ObjectSettings, object_bytes: int) -> WorkerPool:
    num_payloads_max = settings.inflight_bytes_max // object_bytes
    num_stores_max = int(_STORE_SHARE * min(settings.num_requests_max, num_payloads_max))
    bounds = {Lane.STORE: max(1, num_stores_max)}
    return WorkerPool(name, settings.num_requests_max, num_payloads_max, bounds)


class Board:
    """Jobs, known objects, counters and events. `lock` guards all of it, the index included."""

    def __init__(
        self, slots: SlotView, env: TierEnv, settings: ObjectSettings, client: ObjectClient
    ) -> None:
        self.slots, self.env, self.settings, self.client = slots, env, settings, client
        self.pool = _make_pool(env.name, settings, self.object_bytes)
        self.lock = threading.RLock()
        self.index = Index(settings.num_known_max, settings.max_bytes)
        self.jobs = JobBook(slots.chunk_bytes)
        self.health = Health()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.events: list[OffloadingEvent] = []
        self.digest = digest_namespace(env.namespace)
        self.folder = f"{self.digest.hex()[:32]}/"
        self.storing: Counter[str] = Counter()  # stores that are not settled, by path
        self.loading: Counter[str] = Counter()
        self.writing: set[str] = set()  # a request that writes the object is in flight
        self.leaving: set[str] = set()  # a request that removes it is queued or in flight
        self.num_resets = 0  # that have not ended
        self.is_closed = False
        self.changed = threading.Condition(self.lock)  # a job ended, or room was made
        self.expiries: list[tuple[float, str]] = []  # a heap; may name what has left
        self.recent: set[str] = set()  # objects that came or left since the last listing began
        self._copies: dict[JobId, list[Copy]] = {}
        self._deadlines: list[tuple[float, int, Copy]] = []  # a heap
        self._order = count()
        self._random = random.Random()

    @property
    def object_bytes(self) -> int:
        """Bytes of one object."""
        return HEADER_BYTES + self.slots.chunk_bytes

    def path_of(self, key: OffloadKey) -> str:
        """Return the path of a chunk's object below the URL."""
        name = key.hex() if len(key) <= HEX_KEY_BYTES_MAX else "x" + sha256(key).hexdigest()
        return f"{self.folder}{name[:2]}/{name}"

    def key_of(self, path: str) -> OffloadKey | None:
        """Return the chunk of a path; None if it is of another namespace or was hashed."""
        name = path.rpartition("/")[2]
        is_ours = path.startswith(self.folder) and not name.startswith("x")
        return OffloadKey(bytes.fromhex(name)) if is_ours else None

    def is_leaving(self, path: str) -> bool:
        """Say whether the object is being removed, so that it counts as gone."""
        return self.num_resets > 0 or path in self.leaving

    def open(self, job: Job, copies: list[Copy]) -> None:
        """Take a job on.

        Raises:
            ContractError: It is in flight already, or keys and slots differ in number.
        """
        self.jobs.open(job, self.env.clock.now_s())
        if copies:
            self._copies[job.job_id] = copies
        for copy in copies:
            (self.storing if copy.is_store else self.loading)[copy.path] += 1
            if copy.deadline_s < inf:
                heapq.heappush(self._deadlines, (copy.deadline_s, next(self._order), copy))

    def settle(self, copy: Copy, outcome: Outcome) -> None:
        """Note how a copy ended; one that is over stays as it is."""
        if copy.state is CopyState.OVER:
            return
        copy.state = CopyState.OVER
        counted = self.storing if copy.is_store else self.loading
        counted[copy.path] -= 1
        if not counted[copy.path]:
            del counted[copy.path]
        self.jobs.settle(copy.job.job_id, copy.key, outcome, self.env.clock.now_s())
        if copy.job.job_id not in self.jobs:
            del self._copies[copy.job.job_id]
            self.changed.notify_all()

    def expire_due(self) -> None:
        """Give up copies whose deadline has come, unless their slot is in use."""
        now_s = self.env.clock.now_s()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, copy = heapq.heappop(self._deadlines)
            if copy.state is CopyState.WAITING:
                self.counters["expired_stores" if copy.is_store else "expired_loads"] += 1
                self.settle(copy, Outcome.FAILED)

    def open_copies(self, job_id: JobId | None = None) -> list[Copy]:
        """Return the copies of one job, or of all jobs, that are not over."""
        jobs = self._copies.values() if job_id is None else [self._copies.get(job_id, [])]
        return [copy for copies in jobs for copy in copies if copy.state is not CopyState.OVER]

    def give_up(self, copies: Iterable[Copy]) -> None:
        """Fail those of the copies whose slot is not in use."""
        for copy in copies:
            if copy.state is CopyState.WAITING:
                self.settle(copy, Outcome.FAILED)

    def wait_until_idle(self, timeout_s: float) -> Collection[JobId]:
        """Wait until no job is in flight; return those that still are."""
        until_s = time.monotonic() + timeout_s
        self.expire_due()
        while len(self.jobs) and (left_s := until_s - time.monotonic()) > 0:
            next_s = self._deadlines[0][0] - self.env.clock.now_s() if self._deadlines else inf
            self.changed.wait(min(left_s, max(next_s, 0.0) + 0.001))
            self.expire_due()
        return self.jobs.job_ids()

    def note(self, path: str, expires_at_s: float, *, is_verified: bool = True) -> None:
        """Remember that an object of a chunk exists; one that is leaving stays forgotten."""
        if self.is_leaving(path):
            return
        self.index.note(path, Entry(self.object_bytes, expires_at_s, is_verified))
        self._noted(path)
        if expires_at_s < inf:
            heapq.heappush(self.expiries, (expires_at_s, path))

    def forget(self, path: str) -> bool:
        """Note that an object does not exist, or should not; say whether it was known."""
        self._noted(path)
        return self.index.forget(path) is not None

    def _noted(self, path: str) -> None:
        if self.index.max_bytes is not None:
            self.recent.add(path)

    @contextmanager
    def guarding(self, copy: Copy) -> Iterator[None]:
        """Let no exception take the result of a copy with it."""
        try:
            yield
        except BaseException:
            with self.lock:
                self.settle(copy, Outcome.FAILED)
            raise

    def say(self, kind: EventKind, paths: Iterable[str], reason: RemovalReason | None) -> None:
        """Count objects that came or left, and report those that are this namespace's."""
        paths = list(paths)
        if reason is not None:
            self.counters[_REMOVED_AS[reason]] += len(paths)
        keys = [key for path in paths if (key := self.key_of(path)) is not None]
        if keys:
            self.events.append(OffloadingEvent(kind, keys, self.env.name, reason))

    def failed(self, error: ObjectStoreError, doing: str) -> None:
        """Note that a request failed."""
        with self.lock:
            self.health.failed(error, doing)

    def backoff_s(self, num_tries: int) -> float:
        """Return a random pause before the next try."""
        most_s = self.settings.backoff_s * 2 ** min(num_tries - 1, 32)
        most_s = min(self.settings.backoff_s_max, most_s)
        return self._random.uniform(most_s / 2, most_s)

    def check(self) -> None:
        """Assert every invariant."""
        with self.lock:
            self.index.check()
            copies = self.open_copies()
            assert set(self.jobs.job_ids()) == {copy.job.job_id for copy in copies}
            assert self.storing == Counter(copy.path for copy in copies if copy.is_store)
            assert self.loading == Counter(copy.path for copy in copies if not copy.is_store)
            assert set(self.jobs.job_ids()) == set(self._copies)
