"""Replay a trace through the production manager, under the trace's own clock."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from time import process_time
from typing import Any, Final

from typing_extensions import override

from kvstrata.build import build_manager
from kvstrata.core.clock import VirtualClock
from kvstrata.core.events import PRIMARY_MEDIUM
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.memory import AlignedSlots
from kvstrata.core.request import ReqContext
from kvstrata.replay.bounds import offline_bound
from kvstrata.replay.drive import serve
from kvstrata.replay.trace import Trace, TraceRequest

MODELLED_CHUNK_BYTES: Final = 1 << 20
BOUND: Final = "min"


class Order(Enum):
    """In which order the chunks of a request are used and stored."""

    TAIL_FIRST = "tail-first"  # a request at a time: its last chunk is its oldest
    ROOT_FIRST = "root-first"  # a chunk at a time, as caches do that know no prefixes
    STORED_FIRST = "stored-first"  # the same, and uses change nothing: with lru, that is FIFO


class Partial(Enum):
    """What happens with the last chunk of a request where it is not full."""

    STORE = "store"
    SKIP = "skip"  # as engines do


@dataclass(frozen=True, slots=True)
class Rule:
    """A named way to replay: which policy, in which order, and with which chunks."""

    policy: str
    order: Order = Order.TAIL_FIRST
    partial: Partial = Partial.STORE


RULES: Final[Mapping[str, Rule]] = {
    "auto": Rule("auto", partial=Partial.SKIP),
    "guard": Rule("guard", partial=Partial.SKIP),
    "hazard": Rule("hazard", partial=Partial.SKIP),
    "hazard-p20": Rule("hazard-p20", partial=Partial.SKIP),
    "lru-tail": Rule("lru"),
    "lru-root": Rule("lru", Order.ROOT_FIRST),
    "tree-lru-full": Rule("lru", partial=Partial.SKIP),
    "arc-tail": Rule("arc"),
    "fifo": Rule("lru", Order.STORED_FIRST),
}
"""Names that mean more than a policy; any other name is a policy, all chunks, tail first."""


class UnbackedSlots(AlignedSlots):
    """Slots without memory, for replays in which no byte moves."""

    def __init__(self, num_slots: int, chunk_bytes: int = MODELLED_CHUNK_BYTES) -> None:
        """Stand for so many rows."""
        super().__init__(num_slots, chunk_bytes)

    @override
    def row(self, slot: int, /) -> memoryview:
        raise TypeError("a modelled replay has no bytes")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay counted; chunks are called blocks here, as in traces.

    Attributes:
        policy: Name as given.
        num_chunks: Places in the primary.
        requests: Requests replayed.
        blocks: Blocks of all requests together.
        hits: Blocks in the leading run of each request that could be loaded.
        token_hit_ratio: The same by tokens.
        writes: Blocks stored in the primary.
        refused: Blocks that the policy refused.
        seconds: Trace time from the first to the last request.
        accesses_per_s: Blocks replayed per second of processor time.
        tiers: Hits and writes by tier.
    """

    policy: str
    num_chunks: int
    requests: int
    blocks: int
    hits: int
    token_hit_ratio: float
    writes: int
    refused: int
    seconds: float
    accesses_per_s: float
    tiers: Mapping[str, Mapping[str, float]]

    @property
    def hit_ratio(self) -> float:
        """Hits per block."""
        return self.hits / max(1, self.blocks)

    @property
    def writes_per_100(self) -> float:
        """Blocks stored in the primary per 100 blocks of the trace."""
        return 100 * self.writes / max(1, self.blocks)

    def as_json(self) -> dict[str, Any]:
        """Return all numbers by name."""
        ratios = {"hit_ratio": self.hit_ratio, "writes_per_100": self.writes_per_100}
        return {**asdict(self), **ratios}


Progress = Callable[[int], None]
"""Called with the number of requests done, now and then."""

_REQUESTS_PER_REPORT: Final = 256


def replay_primary(
    trace: Trace,
    policy: str,
    num_chunks: int,
    *,
    order: Order | None = None,
    partial: Partial | None = None,
    on_progress: Progress = lambda _: None,
) -> ReplayResult:
    """Replay a trace through a primary of so many chunks, without bytes.

    Args:
        trace: The requests.
        policy: A policy's name, a name of `RULES`, or "min" for the offline bound.
        num_chunks: Places in the primary.
        order: Overrides the rule's.
        partial: Overrides the rule's.
        on_progress: Told how far the replay is.

    Raises:
        ConfigError: There is no such policy.
    """
    if policy == BOUND:
        return _replay_bound(trace, num_chunks, on_progress)
    rule = RULES.get(policy, Rule(policy))
    order, partial = order or rule.order, partial or rule.partial
    clock = VirtualClock()
    manager = build_manager(
        {"primary": {"num_chunks": num_chunks, "policy": rule.policy}},
        chunk_bytes=MODELLED_CHUNK_BYTES,
        namespace="replay",
        clock=clock,
        slots=UnbackedSlots(num_chunks),
    )
    tally = _Tally(trace.tokens_per_chunk)
    begin_s = process_time()
    serve_one = _SERVE[order]
    for number, request in enumerate(_reporting(trace, on_progress)):
        clock.at_s = request.at_s
        keys = request.keys
        skips = request.is_partial and partial is Partial.SKIP
        ctx = ReqContext(str(number))
        hits, stored = serve_one(manager, ctx, keys, keys[:-1] if skips else keys)
        tally.add(request, hits, stored)
    run_s = process_time() - begin_s
    stats = manager.get_stats()
    manager.shutdown()
    return tally.result(policy, num_chunks, int(stats["refused_chunks"]), run_s)


def _reporting(trace: Trace, on_progress: Progress) -> Iterator[TraceRequest]:
    for number, request in enumerate(trace.requests()):
        if number % _REQUESTS_PER_REPORT == 0:
            on_progress(number)
        yield request


def _serve_singly(
    manager: OffloadingManager, ctx: ReqContext, keys: list[OffloadKey], storable: list[OffloadKey]
) -> tuple[int, int]:
    """Serve a request chunk by chunk, each for itself."""
    num_stored = 0
    manager.on_new_request(ctx)
    num_hits = manager.lookup(keys, ctx) or 0
    for place, key in enumerate(storable):
        manager.touch([key], ctx)
        if place >= num_hits:
            num_stored += _store_one(manager, ctx, key)
    manager.on_request_finished(ctx)
    for _ in manager.take_events():
        pass
    return num_hits, num_stored


def _serve_untouched(
    manager: OffloadingManager, ctx: ReqContext, keys: list[OffloadKey], storable: list[OffloadKey]
) -> tuple[int, int]:
    """Serve a request chunk by chunk, each as a request of its own that only stores."""
    num_hits = manager.lookup(keys, ctx) or 0
    num_stored = sum(_store_one(manager, ctx, key) for key in storable[num_hits:])
    for _ in manager.take_events():
        pass
    return num_hits, num_stored


def _store_one(manager: OffloadingManager, ctx: ReqContext, key: OffloadKey) -> int:
    output = manager.prepare_store([key], ctx)
    if output is None or not output.keys_to_store:
        return 0
    manager.complete_store([key], ctx)
    return 1


_SERVE: Final = {
    Order.TAIL_FIRST: serve,
    Order.ROOT_FIRST: _serve_singly,
    Order.STORED_FIRST: _serve_untouched,
}


class _Tally:
    """Adds up what requests hit and stored."""

    def __init__(self, tokens_per_chunk: int) -> None:
        self._tokens_per_chunk = tokens_per_chunk
        self._num_requests = self._num_blocks = self._num_hits = self._num_writes = 0
        self._num_tokens = self._num_hit_tokens = 0
        self._first_s: float | None = None
        self._last_s = 0.0

    def add(self, request: TraceRequest, hits: int, stored: int) -> None:
        """Count one request."""
        if self._first_s is None:
            self._first_s = request.at_s
        self._last_s = request.at_s
        self._num_requests += 1
        self._num_blocks += len(request.keys)
        self._num_hits += hits
        self._num_writes += stored
        self._num_tokens += request.num_tokens
        self._num_hit_tokens += min(hits * self._tokens_per_chunk, request.num_tokens)

    def add_all(self, hits: int, stored: int) -> None:
        """Count what is known of all requests together; tokens as if all blocks were full."""
        self._num_hits += hits
        self._num_writes += stored
        self._num_hit_tokens += hits * self._tokens_per_chunk

    def result(self, policy: str, num_chunks: int, num_refused: int, run_s: float) -> ReplayResult:
        """Return the sums."""
        return ReplayResult(
            policy=policy,
            num_chunks=num_chunks,
            requests=self._num_requests,
            blocks=self._num_blocks,
            hits=self._num_hits,
            token_hit_ratio=self._num_hit_tokens / max(1, self._num_tokens),
            writes=self._num_writes,
            refused=num_refused,
            seconds=self._last_s - (self._first_s or 0.0),
            accesses_per_s=self._num_blocks / max(run_s, 1e-9),
            tiers={PRIMARY_MEDIUM: {"hits": self._num_hits, "writes": self._num_writes}},
        )


def _replay_bound(trace: Trace, num_chunks: int, on_progress: Progress) -> ReplayResult:
    tally = _Tally(trace.tokens_per_chunk)
    begin_s = process_time()
    bound = offline_bound(trace, num_chunks)
    for request in _reporting(trace, on_progress):
        tally.add(request, 0, 0)
    tally.add_all(bound.num_hits, bound.num_writes)
    return tally.result(BOUND, num_chunks, 0, process_time() - begin_s)
