"""Conformance suites and doubles, shipped so that others' tiers, policies and managers run them.

A suite is a pytest class: derive from it, override its one factory method, and write nothing else.
Suites need pytest and hypothesis; the doubles do not, so both are imported only when they are used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvstrata.testing.chunks import POISON, FakeRegion, numbered_key, pattern, poison
from kvstrata.testing.clock import FakeClock
from kvstrata.testing.fake_tier import EVERY_KEY, FakeBackend, FakeTier

if TYPE_CHECKING:
    from kvstrata.testing.reading_tier_suite import ReadingTierSuite
    from kvstrata.testing.tier_suite import SecondaryTierSuite

_SUITES = {
    "ReadingTierSuite": "reading_tier_suite",
    "SecondaryTierSuite": "tier_suite",
}

__all__ = [
    "EVERY_KEY",
    "POISON",
    "FakeBackend",
    "FakeClock",
    "FakeRegion",
    "FakeTier",
    "ReadingTierSuite",
    "SecondaryTierSuite",
    "numbered_key",
    "pattern",
    "poison",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest  # noqa: PLC0415

    # Before it is imported, so that a failing promise shows its values.
    module = f"{__name__}.{_SUITES[name]}"
    if module not in sys.modules:
        pytest.register_assert_rewrite(module)
    return getattr(import_module(module), name)
