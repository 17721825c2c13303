"""End tiers in good order: flush what only the primary holds, then stop them, in bounded time."""

import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Final

from kvstrata.core.manager import ShutdownReport
from kvstrata.core.policy import Run
from kvstrata.primary.chunk_store import ChunkStore
from kvstrata.tiering.cascade import Cascades
from kvstrata.tiering.tier_handle import TierHandle

ROUND_S: Final = 0.2
GRACE_S: Final = 0.5  # for a tier to come back after its time

Retire = Callable[[Sequence[TierHandle]], None]


def flush_and_stop(
    handles: Sequence[TierHandle],
    cascades: Cascades,
    store: ChunkStore,
    retire: Retire,
    timeout_s: float,
) -> ShutdownReport:
    """Flush into the tiers that outlive the process, stop all tiers, and say what became of it.

    Blocks: at most about `timeout_s`, of the machine's own time.
    """
    deadline_s = time.monotonic() + timeout_s
    lasting = [handle for handle in handles if handle.tier.is_persistent]
    num_before = _num_stored(lasting)
    retire(handles)
    hung = flush(lasting, cascades, retire, deadline_s)
    stop([handle for handle in handles if handle not in hung], retire, deadline_s)
    num_flushed = _num_stored(lasting) - num_before
    num_abandoned, num_restorable = _count(lasting, store)
    stuck = tuple(job_id for handle in handles for job_id in handle.jobs)
    return ShutdownReport(num_flushed, num_abandoned, stuck, num_restorable)


def stop(handles: Sequence[TierHandle], retire: Retire, deadline_s: float) -> None:
    """Stop tiers, all at the same time, and retire their jobs.

    What stays in `handle.jobs` is stuck; a tier that does not come back is left alone.
    """
    hung = _call_each(
        handles,
        lambda handle: handle.shutdown(max(0.0, deadline_s - time.monotonic())),
        deadline_s + GRACE_S,
    )
    retire([handle for handle in handles if handle not in hung])


def drain(handles: Sequence[TierHandle], retire: Retire, deadline_s: float) -> None:
    """Wait for the jobs in flight and retire them; what is left in `handle.jobs` did not end."""
    hung = _call_each(
        handles, lambda handle: handle.drain(max(0.0, deadline_s - time.monotonic())), deadline_s
    )
    retire([handle for handle in handles if handle not in hung])


def flush(
    lasting: Sequence[TierHandle], cascades: Cascades, retire: Retire, deadline_s: float
) -> Sequence[TierHandle]:
    """Copy what only the primary holds, until all is down or a round brings nothing.

    In rounds, since queues are bounded.

    Returns the tiers that did not come back.
    """
    while True:
        num_left = cascades.flush(lasting)
        num_before = _num_stored(lasting)
        while any(handle.jobs for handle in lasting):
            if time.monotonic() >= deadline_s:
                return ()
            hung = _call_each(lasting, lambda handle: handle.drain(ROUND_S), deadline_s)
            if hung:
                return hung
            retire(lasting)
        if not num_left or _num_stored(lasting) == num_before:
            return ()


def _call_each(
    handles: Sequence[TierHandle], call: Callable[[TierHandle], None], deadline_s: float
) -> Sequence[TierHandle]:
    """Call for each tier on a thread of its own; return the tiers that did not come back."""
    threads = [(handle, Thread(target=call, args=(handle,), daemon=True)) for handle in handles]
    for handle, thread in threads:
        handle.caller = thread
        thread.start()
    for _, thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return [handle for handle, thread in threads if thread.is_alive()]


def _num_stored(handles: Sequence[TierHandle]) -> int:
    return sum(handle.counters.stored_chunks for handle in handles)


def _count(lasting: Sequence[TierHandle], store: ChunkStore) -> tuple[int, int]:
    """Return how many resident chunks no lasting tier has though it should, and how many one has.

    The second counts each prefix only as far as nothing is missing in front.
    """
    num_abandoned = num_restorable = 0
    is_whole: dict[int, bool] = {}  # by run: everything up to its end is in a lasting tier
    here, _ = store.table.all_runs()
    for run in here:
        if run.owner is not None:
            continue
        there = [any(key in handle.below for handle in lasting) for key in run.keys]
        num_abandoned += sum(
            not is_there and any(h.wants_stores and key not in h.barred for h in lasting)
            for key, is_there in zip(run.keys, there, strict=True)
        )
        if _is_whole(run.parent, is_whole, lasting):
            num_restorable += there.index(False) if False in there else len(there)
    return num_abandoned, num_restorable


def _is_whole(run: Run | None, known: dict[int, bool], lasting: Sequence[TierHandle]) -> bool:
    """Say whether a run and all in front of it are in lasting tiers; None is the root."""
    path = []
    while run is not None and id(run) not in known:
        path.append(run)
        run = run.parent
    answer = run is None or known[id(run)]
    for each in reversed(path):
        is_here = bool(each.keys) and not each.is_dropped
        answer = (
            answer
            and is_here
            and all(any(key in handle.below for handle in lasting) for key in each.keys)
        )
        known[id(each)] = answer
    return answer
