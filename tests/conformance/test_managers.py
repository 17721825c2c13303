"""Runs the manager suite on every manager."""

from typing_extensions import override

from kvstrata.build import build_manager
from kvstrata.core.manager import OffloadingManager
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.testing import OffloadingManagerSuite


class TestCPUOffloadingManager(OffloadingManagerSuite):
    @override
    def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
        manager = build_manager(
            {"primary": {"num_chunks": num_chunks, "policy": "lru"}},
            chunk_bytes=chunk_bytes,
            namespace="suite",
            clock=self.clock,
        )
        assert isinstance(manager, CPUOffloadingManager)
        return manager
