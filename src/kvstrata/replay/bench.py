"""Measure what a manager's bookkeeping costs: time per chunk and request, and memory."""

import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import Any

from kvstrata.build import build_manager
from kvstrata.core.clock import VirtualClock
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.request import ReqContext
from kvstrata.replay.drive import serve
from kvstrata.replay.trace import Trace

CHUNK_BYTES = 64  # the region's rows are never touched


@dataclass(frozen=True, slots=True)
class ManagerCost:
    """What `kvstrata bench manager` prints, `us` per request and per block of the trace.

    Times are those of each request's fastest pass: what else the machine does only ever adds.
    """

    policy: str
    slots: int
    requests: int
    blocks: int
    passes: int
    hit_ratio: float
    blocks_per_s: float
    us_per_block: float
    p50_us: float
    p99_us: float
    bytes_per_chunk: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def _build(num_slots: int, policy: str) -> tuple[OffloadingManager, VirtualClock]:
    clock = VirtualClock()
    config = {"primary": {"num_chunks": num_slots, "policy": policy}}
    return build_manager(config, chunk_bytes=CHUNK_BYTES, namespace="bench", clock=clock), clock


def _pass(trace: Trace, manager: OffloadingManager, clock: VirtualClock) -> Iterator[list[int]]:
    """Replay a trace; yield (blocks, hits, ns) per request. Keys are made outside of the time."""
    for number, request in enumerate(trace.requests()):
        clock.at_s = request.at_s
        ctx, keys = ReqContext(f"request-{number}"), request.keys
        begin_ns = perf_counter_ns()
        num_hits, _ = serve(manager, ctx, keys, keys)
        yield [len(keys), num_hits, perf_counter_ns() - begin_ns]


def measure_time(trace: Trace, num_slots: int, policy: str) -> list[list[int]]:
    """Replay a trace with a new manager; return (blocks, hits, ns) of each request.

    What was there before is kept out of the garbage collector's sight, as in a process that does
    nothing else.
    """
    manager, clock = _build(num_slots, policy)
    gc.collect()
    gc.freeze()
    try:
        return list(_pass(trace, manager, clock))
    finally:
        gc.unfreeze()
        manager.shutdown()


def measure_bytes(trace: Trace, num_slots: int, policy: str) -> float:
    """Return the bytes that a manager holds after the trace, per resident chunk.

    Everything it allocated counts, and the keys that only it keeps alive; not the region.
    """
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        manager, clock = _build(num_slots, policy)
        for _ in _pass(trace, manager, clock):
            pass
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_resident = manager.get_stats()["num_resident"]
    manager.shutdown()
    return (after - before) / max(1.0, num_resident)


def bench_manager(trace: Trace, num_slots: int, policy: str, num_passes: int) -> ManagerCost:
    """Measure a manager in so many passes, all of which do the same; the fastest of each counts."""
    rows = measure_time(trace, num_slots, policy)
    for _ in range(num_passes - 1):
        again = measure_time(trace, num_slots, policy)
        for row, (_, _, ns) in zip(rows, again, strict=True):
            row[2] = min(row[2], ns)
    num_blocks = max(1, sum(blocks for blocks, _, _ in rows))
    total_ns = max(1, sum(ns for _, _, ns in rows))
    by_time = sorted(ns for _, _, ns in rows) or [0]
    return ManagerCost(
        policy=policy,
        slots=num_slots,
        requests=len(rows),
        blocks=num_blocks,
        passes=num_passes,
        hit_ratio=sum(hits for _, hits, _ in rows) / num_blocks,
        blocks_per_s=num_blocks / total_ns * 1e9,
        us_per_block=total_ns / num_blocks / 1e3,
        p50_us=by_time[len(by_time) // 2] / 1e3,
        p99_us=by_time[len(by_time) * 99 // 100] / 1e3,
        bytes_per_chunk=measure_bytes(trace, num_slots, policy),
    )
