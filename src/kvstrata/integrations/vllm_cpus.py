"""Which CPUs copies may run on beside vLLM's compute threads."""

import os
from collections.abc import Iterator
from pathlib import Path

PROCESSES = Path("/proc")


def spare_cpus(scheduler_pid: int) -> set[int]:
    """Return the CPUs for a thread beside the calling one, which computes.

    vLLM's build for CPUs binds each compute thread to a core of its own. A copy there stalls all of
    them, since they wait for each other in every layer: then the answer is what the scheduler's
    process may use, without the cores of compute threads; where no other is left, with them. A
    caller that is not bound to one core shares what it has.

    Args:
        scheduler_pid: The process of vLLM's scheduler, which is bound to nothing. The workers are
            its children, or the same process.
    """
    mine = os.sched_getaffinity(0)
    if len(mine) > 1:
        return mine
    allowed = os.sched_getaffinity(scheduler_pid)
    bound: set[int] = set()
    for thread_id in _threads(scheduler_pid):
        try:
            cpus = os.sched_getaffinity(thread_id)
        except OSError:
            continue  # it has ended
        if len(cpus) == 1:
            bound |= cpus
    return (allowed - bound) or allowed


def _threads(scheduler_pid: int) -> Iterator[int]:
    """Yield the threads of this process and of the scheduler's children."""
    pids = {os.getpid()}
    for path in (PROCESSES / str(scheduler_pid) / "task").glob("*/children"):
        try:
            pids.update(map(int, path.read_text().split()))
        except OSError:
            continue  # it has ended
    for pid in pids:
        for path in (PROCESSES / str(pid) / "task").glob("[0-9]*"):
            yield int(path.name)
