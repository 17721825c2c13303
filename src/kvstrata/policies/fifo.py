"""First in, first out: uses change nothing. To compare with, not to use."""

from collections.abc import Sequence

from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.policy import RequestTrail, Run
from kvstrata.policies.lru import LruPolicy


class FifoPolicy(LruPolicy):
    """One queue of runs in the order in which they were stored."""

    @override
    def access(
        self,
        trail: RequestTrail,
        keys: Sequence[OffloadKey],
        runs: Sequence[Run],
        now_s: float,
    ) -> None:
        pass

    @override
    def insert(self, trail: RequestTrail, run: Run, now_s: float) -> None:
        self._queue.add_youngest(run)
