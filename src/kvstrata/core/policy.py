"""The contract of eviction policies: a request's accesses in, admission and victims out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstrata.core.keys import OffloadKey
from kvstrata.core.request import PRIORITY_DEFAULT, SessionHint

Evictable = Callable[[Sequence[OffloadKey]], Sequence[OffloadKey]]
"""Says which of these resident chunks may leave now, in the order given.

It leaves out what is not resident, is being copied, or is protected. One call for many keys: ask in
batches, and ask again in the next call, since the answer holds for this one only.
"""


class Admission(NamedTuple):
    """How many of the offered keys, counted from the first, may be stored, and who leaves.

    `victims` are distinct, were passed by `evictable`, and none is an offered key. The policy has
    already forgotten them; the caller must drop them. `is_refusal`: the policy would rather not
    store the rest; otherwise it only found no victim.
    """

    num_admitted: int
    victims: Sequence[OffloadKey]
    is_refusal: bool = False


class RequestTrail:
    """What one request has accessed so far, in prefix order; one object per request.

    The caller makes it when the request starts and passes it with every access of that request.
    `keys` and `state` are the policy's own, the rest is the caller's.

    Attributes:
        priority: Eviction class, 0 to 100: chunks of a lower class leave first.
        key_priority: Priority of single chunks where the request gave ranges; None for most.
            The caller may add to it.
        session: What the client knows of the session: more turns will come, or it is over.
        pool: Share of the tier that the request's chunks count against; None for the common one.
        keys: The request's chunks from the root on, as far as the policy knows them.
        state: Whatever else the policy wants to remember of the request.
    """

    __slots__ = ("key_priority", "keys", "pool", "priority", "session", "state")

    def __init__(
        self,
        priority: int = PRIORITY_DEFAULT,
        session: SessionHint | None = None,
        key_priority: Mapping[OffloadKey, int] | None = None,
        pool: str | None = None,
    ) -> None:
        """Start with no keys."""
        self.priority = priority
        self.session = session
        self.key_priority = key_priority
        self.pool = pool
        self.keys: list[OffloadKey] = []
        self.state: object = None


class EvictionPolicy(ABC):
    """Order and admission of chunks in one tier of fixed capacity.

    A policy works on requests: it sees one request's keys in prefix order and the time. It knows
    nothing of bytes or slots. A chunk is *tracked* from `admit` until it is a victim or removed;
    side tables on other chunks (ghosts) are bounded by a multiple of the capacity.

    Within one request children leave before parents. A tree policy (`is_tree`) goes further: no
    chunk leaves before its tracked children.

    Thread: one at a time, the caller's. Blocks: never. No call scans all tracked chunks, except
    `check` and, amortised over as many accesses, clean-ups.
    """

    is_tree: bool = False

    def __init__(self, capacity: int) -> None:
        """Prepare for at most `capacity` tracked chunks, at least 1."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.capacity = capacity

    @abstractmethod
    def access(self, trail: RequestTrail, keys: Sequence[OffloadKey], now_s: float) -> None:
        """Note that a request uses these chunks now.

        Args:
            trail: The request. However often it calls, it counts as one use of each chunk.
            keys: Its chunks in prefix order, from the root as far as they are known, tracked or
                not. Copied where needed.
            now_s: Monotonic time; never less than in an earlier call.
        """

    @abstractmethod
    def admit(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        num_free: int,
        evictable: Evictable,
        now_s: float,
    ) -> Admission:
        """Decide which of these chunks are stored and which others make room; track them.

        Args:
            trail: The request that offers them.
            keys: Distinct chunks in prefix order, none of them tracked. They may continue the
                request's earlier keys. No chunk of the request itself is a victim.
            num_free: Places that are free already.
            evictable: Which tracked chunks may leave in this call.
            now_s: As for `access`.

        Returns:
            The first `num_admitted` keys are tracked from now on, with the recency of `trail`;
            `len(victims) >= num_admitted - num_free`. Fewer than `len(keys)` where the policy
            refuses the rest or finds no victim for it.
        """

    @abstractmethod
    def choose(self, count: int, evictable: Evictable) -> Sequence[OffloadKey]:
        """Name at most `count` tracked chunks that should leave next, the first to go first.

        Nothing is forgotten and nothing learned: the caller may drop them (and then calls `remove`)
        or only copy them elsewhere. A tree policy names children before their parents. Fewer than
        `count` are named only where `evictable` lets no more leave.
        """

    @abstractmethod
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks that left for other reasons; untracked ones are ignored."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, side tables too; what was learned of the workload may stay."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tracked chunks."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Say whether the chunk is tracked."""

    @abstractmethod
    def check(self) -> None:
        """Assert every invariant. For tests: it may scan everything."""
