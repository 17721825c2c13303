"""What the parts of an object tier share, under one lock that is never held across a request."""

import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from itertools import count
from math import inf
from typing import Final

from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.results import StoreJob
from kvstrata.core.tier import TierEnv
from kvstrata.tiers.chunk_format import HEADER_BYTES, NEVER_S, digest_namespace
from kvstrata.tiers.event_log import EventLog
from kvstrata.tiers.jobs import Job, JobBook, Outcome
from kvstrata.tiers.object.client import ObjectClient, ObjectStoreError
from kvstrata.tiers.object.health import Health
from kvstrata.tiers.object.index import UNVERIFIED_S, Entry, Index, ObjectName
from kvstrata.tiers.object.settings import ObjectSettings
from kvstrata.tiers.object.workers import Lane, WorkerPool

_NUM_STALE_MAX: Final = 1024
_STORE_SHARE: Final = 15 / 16  # of all requests at one time, so that loads find a place too
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
    name: ObjectName
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
    num_stores_max = int(_STORE_SHARE * min(settings.num_threads_max, num_payloads_max))
    bounds = {Lane.STORE: max(1, num_stores_max)}
    return WorkerPool(name, settings.num_threads_max, num_payloads_max, bounds)


class Board:
    """Jobs, known objects, counters and events. `lock` guards all of it, the index included."""

    def __init__(
        self, slots: SlotView, env: TierEnv, settings: ObjectSettings, client: ObjectClient
    ) -> None:
        self.slots, self.env, self.settings, self.client = slots, env, settings, client
        self.pool = _make_pool(env.name, settings, self.object_bytes)
        self.lock = threading.RLock()
        self.index = Index(settings.num_known_max, settings.cap_bytes)
        self.jobs = JobBook(slots.chunk_bytes)
        self.health = Health()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.events = EventLog(env.name)
        self.digest = digest_namespace(env.namespace)
        self.folder = f"{self.digest.hex()[:32]}/"
        self.storing: Counter[ObjectName] = Counter()  # stores that are not settled
        self.loading: Counter[ObjectName] = Counter()
        self.writing: set[ObjectName] = set()  # a request that writes it is in flight
        self.leaving: set[ObjectName] = set()  # a request that removes it is queued or in flight
        self.leaving_prefixes: list[bytes] = []  # of keys whose objects are being removed
        self.num_resets = 0  # that have not ended
        self.num_deletions = 0  # calls of delete and reset: what was read before one may be gone
        self.is_closed = False
        self.job_ended = threading.Condition(self.lock)
        self.room_made = threading.Condition(self.lock)  # or a write or removal ended
        self.expiries: list[tuple[float, int, ObjectName]] = []  # a heap; may name what has left
        self.recent: set[ObjectName] = set()  # came or left since the last listing began
        self._copies: dict[JobId, list[Copy]] = {}
        self._deadlines: list[tuple[float, JobId]] = []  # a heap; may name jobs that have ended
        self._order = count()
        self._random = random.Random()

    @property
    def object_bytes(self) -> int:
        """Bytes of one object."""
        return HEADER_BYTES + self.slots.chunk_bytes

    def names_of(self, keys: Collection[OffloadKey]) -> Sequence[ObjectName]:
        """Return the names of chunks' objects: the keys, unless one is too long for a path."""
        if max(map(len, keys), default=0) <= HEX_KEY_BYTES_MAX:
            return tuple(keys)
        return [key if len(key) <= HEX_KEY_BYTES_MAX else self._long_path(key) for key in keys]

    def _long_path(self, key: OffloadKey) -> str:
        name = f"x{sha256(key).hexdigest()}"
        return f"{self.folder}{name[:2]}/{name}"

    def path_of(self, name: ObjectName) -> str:
        """Return the path of an object below the URL."""
        return name if isinstance(name, str) else f"{self.folder}{name.hex()[:2]}/{name.hex()}"

    def name_of(self, path: str) -> ObjectName:
        """Return the name of the object at a path that this tier has made."""
        last = path.rpartition("/")[2]
        is_key = path.startswith(self.folder) and not last.startswith("x")
        return OffloadKey(bytes.fromhex(last)) if is_key else path

    def is_ours(self, name: ObjectName) -> bool:
        """Say whether an object is of this namespace."""
        return not isinstance(name, str) or name.startswith(self.folder)

    def may_leave(self, name: ObjectName) -> bool:
        """Say whether no copy is using the object."""
        return name not in self.loading and name not in self.writing

    def is_leaving(self, name: ObjectName) -> bool:
        """Say whether the object is being removed, so that it counts as gone."""
        if self.num_resets > 0 or name in self.leaving:
            return True
        prefixes = self.leaving_prefixes
        return bool(prefixes) and isinstance(name, bytes) and name.startswith(tuple(prefixes))

    def open(self, job: Job, copies: list[Copy]) -> None:
        """Take a job on, with one copy for each of its keys, all of one deadline.

        Raises:
            ContractError: It is in flight already, or keys and slots differ in number.
        """
        self.jobs.open(job, self.env.clock.now_s())
        if copies:
            self._copies[job.job_id] = copies
            heapq.heappush(self._deadlines, (copies[0].deadline_s, job.job_id))
            counted = self.storing if copies[0].is_store else self.loading
            counted.update(copy.name for copy in copies)

    def settle(self, copy: Copy, outcome: Outcome) -> None:
        """Note how a copy ended; one that is over stays as it is."""
        if copy.state is CopyState.OVER:
            return
        copy.state = CopyState.OVER
        counted = self.storing if copy.is_store else self.loading
        counted[copy.name] -= 1
        if not counted[copy.name]:
            del counted[copy.name]
        self.jobs.settle(copy.job.job_id, copy.key, outcome, self.env.clock.now_s())
        if copy.job.job_id not in self.jobs:
            del self._copies[copy.job.job_id]
            self.job_ended.notify_all()

    def expire_due(self) -> None:
        """Give up copies whose deadline has come, unless their slot is in use."""
        now_s = self.env.clock.now_s()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, job_id = heapq.heappop(self._deadlines)
            for copy in self.open_copies(job_id):
                if copy.state is CopyState.WAITING and copy.deadline_s <= now_s:
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
            self.job_ended.wait(min(left_s, max(next_s, 0.0) + 0.001))
            self.expire_due()
        return self.jobs.job_ids()

    def wait_until_removed(self, until_s: float) -> None:
        """Wait, until that monotonic time at most, for objects that are on their way out."""
        while not self.settings.read_only and (
            self.leaving or self.leaving_prefixes or self.num_resets
        ):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self.room_made.wait(left_s)

    def say(
        self, kind: EventKind, names: Iterable[ObjectName], reason: RemovalReason | None
    ) -> None:
        """Count objects that came or left, and report those whose key is known."""
        names = list(names)
        if reason is not None:
            self.counters[_REMOVED_AS[reason]] += len(names)
        self.events.note(kind, [name for name in names if not isinstance(name, str)], reason)

    def note_read(self, name: ObjectName, expires_at_s: float, num_deletions: int) -> None:
        """Remember an object that was read, unless something was deleted since it was asked for.

        Args:
            name: The object.
            expires_at_s: From its header.
            num_deletions: Of this board, before the request.
        """
        if num_deletions == self.num_deletions:
            self.note(name, expires_at_s)

    def note(self, name: ObjectName, expires_at_s: float) -> None:
        """Remember that an object of a chunk exists; one that is leaving stays forgotten."""
        if self.is_leaving(name):
            return
        self.index.note(name, Entry(self.object_bytes, expires_at_s), self.env.clock.wall_s())
        self._noted(name)
        if UNVERIFIED_S < expires_at_s < NEVER_S:
            heapq.heappush(self.expiries, (expires_at_s, next(self._order), name))
            if len(self.expiries) > 2 * len(self.index) + _NUM_STALE_MAX:
                self.expiries = [each for each in self.expiries if each[2] in self.index]
                heapq.heapify(self.expiries)

    def forget(self, name: ObjectName) -> bool:
        """Note that an object does not exist, or should not; say whether it was known."""
        self._noted(name)
        return self.index.forget(name) is not None

    def _noted(self, name: ObjectName) -> None:
        if self.index.max_bytes is not None:
            self.recent.add(name)

    @contextmanager
    def guarding(self, copy: Copy) -> Iterator[None]:
        """Let no exception take the result of a copy with it."""
        try:
            yield
        except BaseException:
            with self.lock:
                self.settle(copy, Outcome.FAILED)
            raise

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
            assert self.storing == Counter(copy.name for copy in copies if copy.is_store)
            assert self.loading == Counter(copy.name for copy in copies if not copy.is_store)
            assert set(self.jobs.job_ids()) == set(self._copies)
