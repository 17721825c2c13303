"""The object tier keeps what all tiers promise: in memory, in a directory, on a real S3 server."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from typing_extensions import override

from kvstrata.core.memory import SlotView
from kvstrata.core.tier import SecondaryTierManager, TierEnv
from kvstrata.testing import SecondaryTierSuite
from tests.fault_proxy import FaultProxy
from tests.s3_server import SeaweedFs

pytest.importorskip("obstore")

from kvstrata.tiers.object.tier import ObjectTier


class ObjectTierSuite(SecondaryTierSuite):
    def open(self, slots: SlotView, **settings: object) -> ObjectTier:
        env = TierEnv(name="object", namespace="suite", clock=self.clock, path="tiers[0]")
        return ObjectTier(slots, env=env, **settings)


class TestInMemory(ObjectTierSuite):
    @override
    def make_tier(self, slots: SlotView, tmp_path: Path) -> SecondaryTierManager:
        return self.open(slots, url="memory://")


class TestInMemoryWithACap(ObjectTierSuite):
    @override
    def make_tier(self, slots: SlotView, tmp_path: Path) -> SecondaryTierManager:
        return self.open(slots, url="memory://", max_bytes="1MiB", hedge_after_s=0.001)


class TestInADirectory(ObjectTierSuite):
    @override
    def make_tier(self, slots: SlotView, tmp_path: Path) -> SecondaryTierManager:
        return self.open(slots, url=f"file://{tmp_path}/store")


@pytest.mark.slow
class TestOnS3(ObjectTierSuite):
    proxy: FaultProxy

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with SeaweedFs(tmp_path_factory.mktemp("weed")) as server, FaultProxy(server) as cls.proxy:
            yield

    @override
    def make_tier(self, slots: SlotView, tmp_path: Path) -> SecondaryTierManager:
        return self.open(slots, **self.proxy.settings(tmp_path.name))

    @override
    def held(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        return self.proxy.held()
