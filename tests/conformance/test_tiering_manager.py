"""Runs the manager suite on the orchestrator, over tiers whose chunks the suite never sees."""

from typing import Any

from typing_extensions import override

from kvstrata.build import build_manager
from kvstrata.core.manager import OffloadingManager
from kvstrata.primary.reuse_filter import FilterReusedOffloadingManager
from kvstrata.testing import OffloadingManagerSuite


class TestTieringOffloadingManager(OffloadingManagerSuite):
    """Over tiers that are asked at every lookup and only ever read."""

    tiers: tuple[dict[str, Any], ...] = (
        {"type": "kvstrata.testing:FakeTier", "name": "fast", "write": "never"},
        {"type": "memory", "write": "never"},
    )

    @override
    def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
        return build_manager(
            {"primary": {"num_chunks": num_chunks, "policy": "lru"}, "tiers": self.tiers},
            chunk_bytes=chunk_bytes,
            namespace="suite",
            clock=self.clock,
        )


class TestTieringBelowTheReuseFilter(TestTieringOffloadingManager):
    @override
    def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
        inner = super().make_manager(num_chunks, chunk_bytes)
        return FilterReusedOffloadingManager(inner, store_threshold=1)


class TestTieringOverATierThatAlwaysFails(TestTieringOffloadingManager):
    """A tier that answers every call with an error changes nothing that the engine sees."""

    tiers = (
        {"type": "kvstrata.testing:FakeTier", "write": "through", "error": RuntimeError("broken")},
    )
