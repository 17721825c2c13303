"""The contract between an engine's scheduler and whatever keeps its chunks."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstrata.core.events import PRIMARY_MEDIUM, OffloadingEvent
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadStoreSpec, LookupResult, PrepareStoreOutput
from kvstrata.core.stats import Stats

NO_KEYS: frozenset[OffloadKey] = frozenset()


class SuspendMode(Enum):
    """What a manager keeps while its engine sleeps."""

    KEEP = "keep"  # everything
    RELEASE = "release"  # what is below: host memory is given back
    FORGET = "forget"  # nothing


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """What a manager says to a new request.

    Attributes:
        store: Whether it is worth offering chunks of this request at all.
        load: Whether it is worth looking up.
    """

    store: bool = True
    load: bool = True


@dataclass(frozen=True, slots=True)
class ShutdownReport:
    """What became of chunks that only the primary held, and of the work in flight.

    Attributes:
        num_flushed: Chunks that reached a tier that outlives the process.
        num_abandoned: Chunks that did not, though their write policy wanted it.
        stuck_jobs: Jobs that did not end in time.
        num_restorable: Of the primary's chunks, those that the next start can find, each with all
            that is in front of it; None where that is not known. Tiers may hold others.
    """

    num_flushed: int = 0
    num_abandoned: int = 0
    stuck_jobs: Sequence[JobId] = field(default_factory=tuple)
    num_restorable: int | None = None


class OffloadingManager(ABC):
    """Decides where chunks are: keys in, slots out. It moves no bytes itself.

    A request may call from `on_new_request` to `on_request_finished`; a store or load that
    completes later is settled all the same. Calls for a request that is not known are served
    without state of their own, and their completions ignored with a counter.

    Thread: one, the scheduler's, unless a method says otherwise. Blocks: never, except `shutdown`.
    """

    @property
    @abstractmethod
    def slots(self) -> SlotView:
        """The primary's bytes; `slots[i]` is slot i as a writable memoryview."""

    @abstractmethod
    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        """Start a request.

        Raises:
            ContractError: A request of this id is live already.
        """

    @abstractmethod
    def lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int | None:
        """Return the length of the longest prefix of `keys` that can be loaded now.

        None: part of it is being fetched or not known yet and worth waiting for; ask again on a
        later step. May promote from slower tiers, pins nothing, and may be called any number of
        times.
        """

    def set_prefill_rate(self, tokens_per_s: float) -> None:
        """Learn how fast the engine computes prompts, to weigh loading against it.

        May be called at any time; the default ignores it.
        """
        del tokens_per_s

    @abstractmethod
    def lookup_states(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[LookupResult]:
        """Return the state of each key, as far as it is known without asking. Changes nothing."""

    def media_of(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> Sequence[str]:
        """Return for each key where this request's lookups found it: "cpu", or a tier's name.

        A tier's name means that the chunk was promoted from there because this request, or another
        one at the same time, asked for it. Changes nothing. The default knows of no tiers.
        """
        del ctx
        return [PRIMARY_MEDIUM] * len(keys)

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Note one use of these chunks by the request, in prefix order, resident or not.

        Repeated touches by the same request refresh recency and count as one use.
        """

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        """Pin chunks and say where they are: `spec.slots[i]` holds `keys[i]` until completed.

        Keys may repeat; a key that this request already loads is pinned once more.

        Raises:
            ContractError: A key is not loadable (look it up first in this step). Nothing is pinned.
        """

    @abstractmethod
    def complete_load(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        """Settle a prepared load, or part of it.

        Args:
            keys: All keys that are settled now, failed ones included; each one time for every time
                it was prepared. Where the request has several loads open, the one of exactly these
                keys ends, otherwise of each key the oldest one.
            ctx: The request that prepared them.
            failed: Those whose copy failed. The chunk itself stays.

        Raises:
            ContractError: A live request settles what it did not prepare. Nothing is unpinned.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        """Offer chunks in prefix order; get slots for those that are new and admitted.

        Keys may repeat. Chunks that are present or being written are left out of the answer. None:
        no room now, though there would be if copies in flight ended; offer again later.
        """

    @abstractmethod
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext,
        failed: Collection[OffloadKey] = NO_KEYS,
    ) -> None:
        """Settle a prepared store, or part of it; what arrived can be looked up at once.

        Args:
            keys: All keys that are settled now, failed ones included.
            ctx: The request that prepared them.
            failed: Those whose bytes did not arrive; their slots are free again.

        Raises:
            ContractError: A live request settles what it did not prepare. Nothing is settled.
        """

    @abstractmethod
    def on_request_finished(self, ctx: ReqContext) -> None:
        """End a request. Its copies in flight go on and may be completed later."""

    @abstractmethod
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Close the step: act on the context, submit what was deferred, expire what is due."""

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, oldest first. Changes nothing else."""

    @abstractmethod
    def has_pending_work(self) -> bool:
        """Say whether steps are still needed for copies in flight to be noticed."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget every chunk. Copies in flight end without effect; their slots come back then."""

    @abstractmethod
    def delete(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """Forget these chunks of the request's tenant, in every tier.

        A lookup after this call is a MISS; what a copy still uses is freed when the copy ends.
        """

    def delete_prefix(self, prefix: bytes) -> None:
        """Forget every chunk whose key begins with these bytes, in every tier.

        As `delete`, for chunks that nobody can name one by one, such as all of a tenant; also those
        that earlier processes stored.
        """
        raise NotImplementedError(f"{type(self).__name__} can't delete by prefix")

    def delete_tenant(self, tenant: str) -> None:
        """Forget every chunk of a tenant, in every tier, also what earlier processes stored.

        Requests without a tenant are none: nothing marks their keys.
        """
        raise NotImplementedError(f"{type(self).__name__} knows no tenants")

    def suspend(self, mode: SuspendMode, timeout_s: float = 10.0) -> None:
        """Come to rest: end all copies between tiers, and give up what the mode says.

        Copies between engine and primary that are open may be completed later, without effect
        where their chunk was given up. There is no call to wake up: the next one finds all at work,
        and memory is taken again as it is written. With RELEASE, what only the primary holds is
        copied first to tiers that outlive the process. Workers that registered the rows with a
        device have to do so again after RELEASE and FORGET: the pages are new ones.

        Blocks: at most about `timeout_s`; copies that have not ended then are given up.
        """
        raise NotImplementedError(f"{type(self).__name__} can't be suspended")

    def set_epoch(self, epoch: str, timeout_s: float = 10.0) -> None:
        """Note that the engine has other weights: nothing stored before is served again.

        Requests that are live now store nothing any more, since their KV is of the old weights; one
        that has finished must not offer any either.
        What tiers hold of the old epoch stays until its place is needed, and is found again if that
        epoch comes back; the primary's chunks are gone. Does nothing in the same epoch.

        Args:
            epoch: Names the weights, such as a version; the same in every process that shares a
                tier, and after a restart. Empty: those that the namespace was made for.
            timeout_s: For tiers to end their copies; what they have not ended is given up.

        Raises:
            ConfigError: A tier could not be opened anew; it is left out.

        Blocks: at most about `timeout_s`, and for tiers to start.
        """
        raise NotImplementedError(f"{type(self).__name__} knows no epochs")

    @abstractmethod
    def get_stats(self) -> Stats:
        """Return a snapshot of use and counters. Thread: any."""

    @abstractmethod
    def shutdown(self, timeout_s: float = 10.0) -> ShutdownReport:
        """Flush what should outlive the process, end all copies, release memory and threads.

        Blocks: at most about `timeout_s`. Later calls return the same report.
        """
