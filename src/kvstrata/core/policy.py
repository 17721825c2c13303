"""The contract of eviction policies: a request's accesses in, admission and victims out."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import PRIORITY_DEFAULT, SessionHint


class Run:
    """Consecutive chunks of a request that share everything but key and slot.

    The unit of bookkeeping: one object for many chunks. It is split where a request uses only a
    part of it, so that all of its chunks are always equally old, equally pinned, and so on.

    Attributes:
        keys: Its chunks in prefix order, at least one while it is tracked. Read only for policies.
        slots: Where they are; `slots[i]` holds `keys[i]`.
        owner: Who is writing the chunks; None when they can be loaded.
        num_holds: How many copies, in or out, and protections forbid that it leaves; at least 1
            while there is an owner.
        parent: The run that continues into this one, where there was one when it was stored.
        num_children: How many tracked runs have this one as parent.
        priority: Eviction class, 0 to 100.
        pool: Share of the tier that it counts against; None for the common one.
        expires_at_s: Wall time at which it must be gone; None for never.
        is_dropped: It has no keys in the table any more; copies may still use its slots.
        used_s, older, younger, state: The policy's own: time of last use, neighbours in a
            `RunQueue`, and whatever else it wants.
    """

    # Defaults live in the class, so that making a run sets three attributes and not fourteen.
    num_holds: int = 0
    parent: "Run | None" = None
    num_children: int = 0
    priority: int = PRIORITY_DEFAULT
    pool: str | None = None
    expires_at_s: float | None = None
    is_dropped: bool = False
    used_s: float = 0.0
    older: "Run | None" = None
    younger: "Run | None" = None
    state: Any = None

    def __init__(self, keys: list[OffloadKey], slots: list[int], owner: Hashable | None) -> None:
        self.keys = keys
        self.slots = slots
        self.owner = owner


class RunQueue:
    """Runs from the oldest to the youngest, as a linked list through the runs themselves.

    A run is in one queue at most. Every operation but iteration and `check` takes constant time.
    """

    __slots__ = ("oldest", "youngest")

    oldest: Run | None
    youngest: Run | None

    def __init__(self) -> None:
        self.oldest = None
        self.youngest = None

    def add_youngest(self, run: Run) -> None:
        """Put a run that is in no queue at the young end."""
        youngest = self.youngest
        run.older, run.younger = youngest, None
        if youngest is None:
            self.oldest = run
        else:
            youngest.younger = run
        self.youngest = run

    def add_older(self, run: Run, than: Run) -> None:
        """Put a run that is in no queue just before another, which is in this one."""
        older = than.older
        run.older, run.younger, than.older = older, than, run
        if older is None:
            self.oldest = run
        else:
            older.younger = run

    def add_younger(self, run: Run, than: Run) -> None:
        """Put a run that is in no queue just behind another, which is in this one."""
        younger = than.younger
        run.older, run.younger, than.younger = than, younger, run
        if younger is None:
            self.youngest = run
        else:
            younger.older = run

    def make_youngest(self, run: Run) -> None:
        """Move a run of this queue to the young end."""
        younger = run.younger
        if younger is None:
            return  # it is there
        older = run.older
        younger.older = older
        if older is None:
            self.oldest = younger
        else:
            older.younger = younger
        youngest = self.youngest
        assert youngest is not None
        youngest.younger = self.youngest = run
        run.older, run.younger = youngest, None

    def remove(self, run: Run) -> None:
        """Take a run out of this queue."""
        older, younger = run.older, run.younger
        if older is None:
            self.oldest = younger
        else:
            older.younger = younger
        if younger is None:
            self.youngest = older
        else:
            younger.older = older
        run.older = run.younger = None

    def check(self) -> list[Run]:
        """Assert that the links agree; return the runs, oldest first. For tests."""
        runs = []
        run, before = self.oldest, None
        while run is not None:
            assert run.older is before
            runs.append(run)
            run, before = run.younger, run
        assert self.youngest is before
        return runs


Victim = tuple[Run, int]
"""The last so many chunks of a run leave; all of them where that is its length."""


Admission = tuple[int, Sequence[Victim], bool]
"""How many of the offered keys, counted from the first, may be stored; victims; whether it refuses.

The policy has already forgotten victims that leave as a whole; the caller must drop them all.
Refusal: the policy would rather not store the rest; otherwise it only found no victim.
"""


class RequestTrail:
    """One request as policies see it; one object per request, passed with all its accesses.

    Attributes:
        priority: Eviction class, 0 to 100: chunks of a lower class leave first.
        key_priority: Priority of single chunks where the request gave ranges; None for most.
            The caller may add to it.
        expires_at_s: Wall time at which what the request stores must be gone; None for never.
        key_expires_at_s: The same for single chunks, where the request gave ranges.
        session: What the client knows of the session: more turns will come, or it is over.
        pool: Share of the tier that the request's chunks count against; None for the common one.
        runs: The tracked runs that the request used or stored, in prefix order. Kept by the
            caller; up to date in each call.
        prefix: Its chunks as of its last access, in prefix order, tracked or not.
        last_stored: The run that the request stored last. Kept by the caller.
        state: Whatever the policy wants to remember of the request.
    """

    priority: int = PRIORITY_DEFAULT
    key_priority: Mapping[OffloadKey, int] | None = None
    expires_at_s: float | None = None
    key_expires_at_s: Mapping[OffloadKey, float] | None = None
    session: SessionHint | None = None
    pool: str | None = None
    prefix: Sequence[OffloadKey] = ()
    last_stored: Run | None = None
    state: Any = None

    def __init__(self) -> None:
        self.runs: list[Run] = []


class EvictionPolicy(ABC):
    """Order and admission of chunks in one tier of fixed capacity.

    A policy works on requests and runs, not on single chunks: it sees one request's keys in prefix
    order, its tracked runs, and the time. It knows nothing of bytes or slots. A run is *tracked*
    from `insert` until it left as a victim or by `remove`; its chunks may become fewer meanwhile,
    when the last ones leave. Side tables on other chunks (ghosts) are bounded by a multiple of the
    capacity.

    A run with `num_holds > 0` is never a victim. Within one request children leave before parents.
    A tree policy (`is_tree`) goes further: no run with `num_children > 0` is a victim, unless its
    children are victims of the same call, named before it.

    Thread: one at a time, the caller's. Blocks: never. No call scans all tracked runs, except
    `check` and, amortised over as many accesses, clean-ups.
    """

    is_tree: bool = False

    def __init__(self, capacity: int) -> None:
        """Prepare for at most `capacity` tracked chunks, at least 1."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.capacity = capacity

    @abstractmethod
    def access(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        runs: Sequence[Run],
        now_s: float,
    ) -> None:
        """Note that a request uses chunks now.

        Args:
            trail: The request. However often it calls, it counts as one use of each chunk.
            keys: Its chunks in prefix order, from the root as far as they are known, tracked or
                not. Not to be kept without copying.
            runs: The tracked runs among them, in the same order; each lies within `keys`.
            now_s: Monotonic time; never less than in an earlier call.
        """

    @abstractmethod
    def admit(
        self, trail: RequestTrail, keys: Sequence[OffloadKey], num_free: int, now_s: float
    ) -> Admission:
        """Decide which of these chunks are stored and which others make room.

        Args:
            trail: The request that offers them. None of `trail.runs` is a victim.
            keys: Distinct chunks in prefix order, none of them tracked. They may continue the
                request's earlier keys.
            num_free: Places that are free already.
            now_s: As for `access`.

        Returns:
            At most `num_free` plus the victims' chunks are admitted; the caller will `insert` them
            at once. Fewer than `len(keys)` where the policy refuses the rest or
            finds no victim for it.
        """

    @abstractmethod
    def insert(self, trail: RequestTrail, run: Run, now_s: float) -> None:
        """Track a run of admitted chunks, as recent as the request; it leaves before `trail.runs`.

        `trail.runs`, which does not hold it yet, counts as used now.
        """

    @abstractmethod
    def split(self, head: Run, tail: Run) -> None:
        """Note that a tracked run became two.

        `tail` is the object that was tracked so far and holds the last chunks now; `head` is new,
        holds the chunks before them, and gets the same standing, except that the tail leaves first.
        """

    def join(self, head: Run, tail: Run) -> bool:
        """Say whether `tail` may become the end of `head`, its parent; if so, forget `tail`.

        Both were stored by the same request; both are still as they were. The default refuses.
        """
        del head, tail
        return False

    @abstractmethod
    def choose(self, count: int) -> Sequence[Victim]:
        """Name at most `count` tracked chunks that should leave next, the first to go first.

        Nothing is forgotten and nothing learned: the caller may drop them or only copy them
        elsewhere. Fewer than `count` are named only where no more may leave.
        """

    @abstractmethod
    def remove(self, run: Run) -> None:
        """Forget a tracked run that left for another reason, or as a victim of `choose`."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all runs and side tables; what was learned of the workload may stay."""

    @abstractmethod
    def runs(self) -> list[Run]:
        """Return every tracked run, those that would leave first coming first. Scans everything."""

    def check(self) -> None:
        """Assert every invariant. For tests: it may scan everything."""
        runs = self.runs()
        assert len(runs) == len(set(map(id, runs)))
        assert all(run.keys for run in runs)
