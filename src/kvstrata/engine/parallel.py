"""Compute the parts of a step on several threads, with a BLAS that starts none of its own.

A BLAS waits for its threads in a busy loop, which on a machine with other work costs many times
what it gains. Rows do not depend on each other here, so a step is cut into parts instead, and
these meet once a layer.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from threadpoolctl import threadpool_limits

from kvstrata.engine.rows import is_usable_tile

Part = TypeVar("Part")


class Meeting(Protocol):
    """Where parts wait for each other."""

    def wait(self) -> Any:  # noqa: ANN401
        """Return when every part is here."""
        ...


class StepThreads:
    """Threads for the parts of a step. The limit on the BLAS holds for the whole process."""

    def __init__(self, num_threads: int) -> None:
        """Start threads when they are first needed."""
        self.num_threads = num_threads
        threadpool_limits(limits=1, user_api="blas")
        is_usable_tile.cache_clear()  # tried with other threads
        self._pool = ThreadPoolExecutor(num_threads, "kvstrata-step")

    def run(self, parts: Sequence[Part], compute: Callable[[Part, Meeting], Any]) -> list[Any]:
        """Compute all parts at the same time, at most `num_threads`; return their results.

        Raises:
            Exception: What the first part raised; the others end, too.
        """
        barrier = threading.Barrier(len(parts))
        if len(parts) == 1:
            return [compute(parts[0], barrier)]

        def run_part(part: Part) -> Any:  # noqa: ANN401
            try:
                return compute(part, barrier)
            except BaseException:
                barrier.abort()
                raise

        futures = [self._pool.submit(run_part, part) for part in parts]
        return [future.result() for future in futures]
