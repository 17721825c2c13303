"""Runs the tier suite on the double that other tests stand on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from kvstrata.core.memory import SlotView
from kvstrata.core.tier import SecondaryTierManager
from kvstrata.testing import FakeBackend, FakeTier, SecondaryTierSuite


class TestFakeTier(SecondaryTierSuite):
    @override
    def make_tier(self, slots: SlotView, tmp_path: Path) -> FakeTier:
        return FakeTier(slots, clock=self.clock)

    @contextmanager
    @override
    def held(self, tier: SecondaryTierManager) -> Iterator[None]:
        assert isinstance(tier, FakeTier)
        tier.backend.hold = tier.backend.hold_lookups = True
        yield
        tier.backend.hold = tier.backend.hold_lookups = False


class TestFakeTierThatProbes(TestFakeTier):
    @override
    def make_tier(self, slots: SlotView, tmp_path: Path) -> FakeTier:
        return FakeTier(slots, backend=FakeBackend(lookup_delay_s=0.0), clock=self.clock)
