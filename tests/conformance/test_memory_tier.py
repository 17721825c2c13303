"""Runs the tier suite on the reference tier."""

from pathlib import Path

from typing_extensions import override

from kvstrata.core.memory import SlotView
from kvstrata.core.tier import TierEnv
from kvstrata.testing import SecondaryTierSuite
from kvstrata.tiers.memory import MemoryTier


class TestMemoryTier(SecondaryTierSuite):
    @override
    def make_tier(self, slots: SlotView, tmp_path: Path) -> MemoryTier:
        return MemoryTier(slots, env=TierEnv("memory", "suite", self.clock, "tiers[0]"))
