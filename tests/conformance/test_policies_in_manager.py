"""Runs the manager suite with every policy in the primary."""

from typing_extensions import override

from kvstrata.build import build_manager
from kvstrata.core.manager import OffloadingManager
from kvstrata.testing import OffloadingManagerSuite


class _PolicyInManager(OffloadingManagerSuite):
    policy: str

    @override
    def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
        return build_manager(
            {"primary": {"num_chunks": num_chunks, "policy": self.policy}},
            chunk_bytes=chunk_bytes,
            namespace="suite",
            clock=self.clock,
        )


class TestArcInManager(_PolicyInManager):
    policy = "arc"


class TestGuardInManager(_PolicyInManager):
    policy = "guard"
