"""The offline bound: what a cache that knows the future could hit."""

import heapq
from typing import NamedTuple

from kvstrata.core.keys import OffloadKey  # noqa: TC001
from kvstrata.replay.trace import Trace


class Bound(NamedTuple):
    """Hits and writes of the best possible policy, in chunks."""

    num_hits: int
    num_writes: int


_NEVER = 1 << 60


def offline_bound(trace: Trace, num_chunks: int) -> Bound:
    """Replay MIN with bypass: keep the chunks whose next use is nearest.

    A chunk that is not used again is not stored; of those with the same next use the deeper one
    goes first. A parent's next use is never later than its child's, so what is kept is closed under
    prefixes, hits of chunks are hits of prefixes, and no policy can have more. Reads all of the
    trace and keeps it in memory.
    """
    next_uses = _next_uses(trace)
    kept: dict[OffloadKey, int] = {}  # chunk -> its next use
    heap: list[tuple[int, int, OffloadKey]] = []  # the chunk to give up first; stale ones as well
    num_hits = num_writes = 0
    for request, uses in zip(trace.requests(), next_uses, strict=True):
        num_hits += next((i for i, key in enumerate(request.keys) if key not in kept), len(uses))
        for depth, (key, use) in enumerate(zip(request.keys, uses, strict=True)):
            if use == _NEVER:
                kept.pop(key, None)
                continue
            if key not in kept:
                if len(kept) >= num_chunks:
                    while kept.get(heap[0][2]) != -heap[0][0]:
                        heapq.heappop(heap)
                    if heap[0][:2] >= (-use, -depth):  # nothing kept is worth less than this one
                        continue
                    del kept[heapq.heappop(heap)[2]]
                num_writes += 1
            kept[key] = use
            heapq.heappush(heap, (-use, -depth, key))
    return Bound(num_hits, num_writes)


def _next_uses(trace: Trace) -> list[list[int]]:
    """Return for every chunk of every request which request uses it next."""
    paths = [request.keys for request in trace.requests()]
    upcoming: dict[OffloadKey, int] = {}
    next_uses: list[list[int]] = []
    for number in range(len(paths) - 1, -1, -1):
        keys = paths[number]
        next_uses.append([upcoming.get(key, _NEVER) for key in keys])
        upcoming.update(dict.fromkeys(keys, number))
        paths[number] = []
    next_uses.reverse()
    return next_uses
