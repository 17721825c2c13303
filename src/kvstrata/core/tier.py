"""The contract of secondary tiers, and what a tier is given to work with."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from kvstrata.core.clock import Clock, SystemClock
from kvstrata.core.events import OffloadingEvent
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult, StoreJob
from kvstrata.core.stats import Stats


@dataclass(frozen=True, slots=True)
class TierEnv:
    """What the library tells a tier besides its own settings.

    Attributes:
        name: The tier's name, unique in its manager: the medium of its events, the label of its
            metrics.
        namespace: Names everything that changes the bytes of equal keys; part of every stored
            chunk's identity.
        clock: Time.
        path: Dotted path of the tier's settings, for ConfigError.
    """

    name: str
    namespace: str
    clock: Clock
    path: str


DEFAULT_ENV = TierEnv(name="tier", namespace="", clock=SystemClock(), path="tier")


class ChunkShelf(Protocol):
    """What a tier that serves this host's chunks to others is told of the primary.

    The primary tells it of every chunk that can be read or no longer can, and the manager, once a
    step, keeps leased chunks from leaving. That is a courtesy: a chunk may be withdrawn while it is
    leased; its reader finds out and throws the copy away.

    Thread: the scheduler's. Blocks: never, no lock in here is held across I/O or a copy.
    """

    def publish(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        expires_at_s: float | None = None,
    ) -> None:
        """Say that slot `slots[i]` holds chunk `keys[i]`, whole and readable, from now on.

        Until `expires_at_s`, seconds since 1970, if that is given; readers are told of it.
        """
        ...

    def withdraw(self, keys: Iterable[OffloadKey]) -> None:
        """Say that these chunks leave; called before any of their slots may be written again.

        Keys that are not published are ignored.
        """
        ...

    def clear(self) -> None:
        """Withdraw everything."""
        ...

    def leased(self) -> Collection[OffloadKey]:
        """Return the chunks that somebody reads now, each one time; bounded in number and time."""
        ...

    def park(self, keys: Sequence[OffloadKey], reader: str) -> int:
        """Lease published chunks to a named host until it has fetched them, for a bounded time.

        Returns how many are parked; 0 where there is no room or nothing of it is published.
        """
        ...

    def take_wanted(self) -> Sequence[OffloadKey]:
        """Return chunks that others asked for and that are not published, each one time.

        A manager that asks once a step promotes those that its other tiers hold, and calls `deny`
        with the rest. One that never asks serves its primary only.
        """
        ...

    def deny(self, keys: Iterable[OffloadKey]) -> None:
        """Say that wanted chunks are nowhere on this host."""
        ...


class SecondaryTierManager(ABC):
    """A store of chunks below the primary. It reads and writes primary slots, never engine memory.

    Every call returns without doing I/O, without waiting for a lock that is held across I/O, and
    without copying payload; copies run on the tier's own threads. A backend's failure never leaves
    as an exception: it is a failed key, a MISS or RETRY, a counter.

    Thread: one at a time, the manager's, except `get_stats` (any).
    """

    is_persistent: bool = False
    """Whether what is stored outlives the process."""

    accepts_stores: bool = True
    """Whether there is any point in `submit_store`; where not, every store fails at once."""

    shelf: ChunkShelf | None = None
    """Where a tier that serves this host's chunks to others is told of them; None for most."""

    @classmethod
    def from_config(cls, slots: SlotView, settings: Mapping[str, Any], env: TierEnv) -> Self:
        """Make a tier from its settings; the default passes them as keyword arguments.

        A tier that wants its name, namespace or clock overrides this.

        Raises:
            ConfigError: A setting is unknown or wrong; the text starts with its dotted path.
        """
        del env
        return cls(slots, **settings)  # type: ignore[call-arg]

    @classmethod
    def num_chunks_max(cls, settings: Mapping[str, Any], chunk_bytes: int, path: str) -> int | None:
        """Return how many chunks a tier with these settings holds when full; None for no limit.

        Raises:
            ConfigError: A setting is wrong; the text starts with `path`.
        """
        del settings, chunk_bytes, path
        return None

    @abstractmethod
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Say from memory whether the chunk is here; RETRY while that is being found out.

        A key answered with RETRY is probed in the background, all keys of a step in one batch that
        starts at `on_schedule_end` at the latest.
        """

    def lookup_many(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        """Answer `lookup` for each key; the default asks one by one."""
        return [self.lookup(key, ctx) for key in keys]

    @abstractmethod
    def submit_store(self, job: StoreJob) -> None:
        """Start copying primary slots into this tier.

        Returns before any byte moves. Exactly one `JobResult` with this job's id follows from
        `get_finished_jobs()`, also when the copy fails. A chunk that is here already is not written
        again and counts as stored. A tier under pressure may fail keys at once.

        Raises:
            TierClosedError: After `shutdown()`. No job was started.
        """

    @abstractmethod
    def submit_load(self, job: LoadJob) -> None:
        """Start copying chunks of this tier into primary slots.

        Returns before any byte moves. Exactly one `JobResult` with this job's id follows from
        `get_finished_jobs()`, also when the copy fails. Each chunk is verified (key, length,
        checksum) before it counts as loaded; slots of failed keys hold anything.

        Raises:
            TierClosedError: After `shutdown()`. No job was started.
        """

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results that came in since the last call, each one time."""

    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Note one use of these chunks, in prefix order. The default ignores it."""
        del keys, ctx

    def on_new_request(self, ctx: ReqContext) -> None:
        """Note that a request started. The default ignores it."""
        del ctx

    def on_request_finished(self, ctx: ReqContext) -> None:
        """Note that a request ended; its jobs go on. The default ignores it."""
        del ctx

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Close the step: start what was deferred, such as the batch of probes."""
        del context

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return residency events since the last call, for chunks that came or left here."""
        return ()

    def cancel(self, job_id: JobId) -> None:
        """Give up on a job where that is cheap; its result still follows. Unknown ids: ignored."""
        del job_id

    def delete(self, keys: Collection[OffloadKey]) -> None:
        """Remove chunks, at the latest in the background; a lookup after this call is a MISS."""
        raise NotImplementedError(f"{type(self).__name__} can't delete single chunks")

    def delete_prefix(self, prefix: bytes) -> None:
        """Remove every chunk whose key begins with these bytes, also those not known of.

        At the latest in the background; a lookup after this call is a MISS.
        """
        raise NotImplementedError(f"{type(self).__name__} can't delete by prefix")

    @abstractmethod
    def drain_jobs(self, timeout_s: float) -> Collection[JobId]:
        """Wait until no job is in flight; return those that still are after `timeout_s`.

        Results of the others come from `get_finished_jobs()` as ever. Blocks: at most `timeout_s`.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget and remove every chunk of this namespace. Jobs in flight end as failed or void."""

    def get_stats(self) -> Stats:
        """Return a snapshot of use and counters. Thread: any."""
        return Stats()

    @abstractmethod
    def shutdown(self, timeout_s: float = 10.0) -> Collection[JobId]:
        """Stop threads and release files and sockets; what is stored stays.

        Queued stores are written first as far as time allows. Every job has its result afterwards.
        Returns the jobs that could not be ended in time. Blocks: at most about `timeout_s`. A
        second call does nothing.
        """
