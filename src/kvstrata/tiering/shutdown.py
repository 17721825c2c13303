"""End tiers in good order: flush what only the primary holds, then stop them, in bounded time."""

import time
from collections.abc import Callable, Sequence

from kvstrata.core.manager import ShutdownReport
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.tiering.cascade import Cascades
from kvstrata.tiering.tier_handle import TierHandle

ROUND_S = 0.2


def flush_and_stop(
    handles: Sequence[TierHandle],
    cascades: Cascades,
    store: ChunkStore,
    retire: Callable[[], None],
    timeout_s: float,
) -> ShutdownReport:
    """Flush into the tiers that outlive the process, stop all tiers, and say what became of it.

    Blocks: at most about `timeout_s`, of the machine's own time.
    """
    deadline_s = time.monotonic() + timeout_s
    lasting = [handle for handle in handles if handle.tier.is_persistent]
    num_before = sum(handle.counters.stored_chunks for handle in lasting)
    _flush(lasting, cascades, retire, deadline_s)
    for handle in handles:
        handle.shutdown(max(0.0, deadline_s - time.monotonic()))
    retire()
    stuck = tuple(job_id for handle in handles for job_id in handle.jobs)
    num_flushed = sum(handle.counters.stored_chunks for handle in lasting) - num_before
    num_abandoned, num_restorable = _count(lasting, cascades, store)
    return ShutdownReport(num_flushed, num_abandoned, stuck, num_restorable)


def _flush(
    lasting: Sequence[TierHandle],
    cascades: Cascades,
    retire: Callable[[], None],
    deadline_s: float,
) -> None:
    """Copy in rounds, since queues are bounded, until all is down or a round brings nothing."""
    retire()
    while True:
        num_left = cascades.flush(lasting)
        before = sum(handle.counters.stored_chunks for handle in lasting)
        while any(handle.jobs for handle in lasting):
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return
            for handle in lasting:
                handle.drain(min(ROUND_S, remaining_s))
            retire()
        if not num_left or sum(h.counters.stored_chunks for h in lasting) == before:
            return


def _count(lasting: Sequence[TierHandle], cascades: Cascades, store: ChunkStore) -> tuple[int, int]:
    """Return how many resident chunks no lasting tier has though it should, and how many one has.

    The second counts for each prefix only as far as nothing is missing in front.
    """
    num_abandoned = num_restorable = 0
    mask = sum(handle.bit for handle in lasting)
    wanted = sum(handle.bit for handle in lasting if handle.wants_stores)
    here, _ = store.table.all_runs()
    for run in here:
        if run.owner is not None:
            continue
        for key in run.keys:
            if cascades.below.get(key, 0) & mask:
                num_restorable += 1
            elif wanted & ~cascades.barred.get(key, 0):
                num_abandoned += 1
    return num_abandoned, num_restorable
