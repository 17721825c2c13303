"""Runs the manager suite on every manager."""

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from kvstrata.build import build_manager
from kvstrata.core.manager import OffloadingManager
from kvstrata.primary.manager import CPUOffloadingManager
from kvstrata.primary.reuse_filter import FilterReusedOffloadingManager
from kvstrata.primary.tenancy import TenantOffloadingManager
from kvstrata.testing import FakeClock, OffloadingManagerSuite
from kvstrata.tiering.manager import TieringOffloadingManager


def build(
    num_chunks: int, chunk_bytes: int, clock: FakeClock, tiers: Sequence[Mapping[str, Any]] = ()
) -> TenantOffloadingManager:
    manager = build_manager(
        {"primary": {"num_chunks": num_chunks, "policy": "lru"}, "tiers": tiers},
        chunk_bytes=chunk_bytes,
        namespace="suite",
        clock=clock,
    )
    assert isinstance(manager, TenantOffloadingManager)
    return manager


class TestCPUOffloadingManager(OffloadingManagerSuite):
    @override
    def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
        manager = build(num_chunks, chunk_bytes, self.clock).inner
        assert isinstance(manager, CPUOffloadingManager)
        return manager


class TestTenantOffloadingManager(OffloadingManagerSuite):
    @override
    def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
        return build(num_chunks, chunk_bytes, self.clock)


class TestFilterReusedOffloadingManager(OffloadingManagerSuite):
    """The suite needs a manager that stores what it is offered, so the threshold is one offer."""

    @override
    def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
        inner = build(num_chunks, chunk_bytes, self.clock)
        return FilterReusedOffloadingManager(inner, store_threshold=1)


class TestTieringOffloadingManager(OffloadingManagerSuite):
    """With a tier that is asked for everything and given nothing, so that only engines copy."""

    @override
    def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
        manager = build(
            num_chunks,
            chunk_bytes,
            self.clock,
            tiers=[{"type": "kvstrata.testing:FakeTier", "write": "never"}],
        ).inner
        assert isinstance(manager, TieringOffloadingManager)
        return manager
