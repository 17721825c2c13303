"""Runs the tier suite on the file-system tier: direct, buffered, with names for temporaries."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from kvstrata.core.memory import SlotView
from kvstrata.core.tier import SecondaryTierManager, TierEnv
from kvstrata.testing import SecondaryTierSuite
from kvstrata.tiers.fs import FsTier
from tests.disks import HookedDisk


class TestFsTier(SecondaryTierSuite):
    uses_unnamed = True
    settings: Mapping[str, Any] = MappingProxyType({})

    @override
    def make_tier(self, slots: SlotView, tmp_path: Path) -> FsTier:
        root = tmp_path / "kv"
        self.disk = HookedDisk(root)
        self.disk.uses_unnamed = self.uses_unnamed
        env = TierEnv("fs", "suite", self.clock, "tiers[0]")
        settings = {"root": root, "max_bytes": "10MB", **self.settings}
        return FsTier(slots, env=env, disk=self.disk, **settings)

    @contextmanager
    @override
    def held(self, tier: SecondaryTierManager) -> Iterator[None]:
        with self.disk.held("create", "open", "read", "write", "stat", "remove", "scan"):
            yield


class TestFsTierWithNamedTemporaries(TestFsTier):
    uses_unnamed = False


class TestFsTierThatProbesWithOneThread(TestFsTier):
    settings = MappingProxyType({"shared": "yes", "num_threads": 1})
