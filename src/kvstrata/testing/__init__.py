"""Conformance suites and doubles, shipped so that others' tiers, policies and managers run them.

A suite is a pytest class: derive from it, override its one factory method, and write nothing else.
Suites need pytest and hypothesis; the doubles do not, so both are imported only when they are used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvstrata.testing.chunks import POISON, FakeRegion, chain, numbered_key, pattern, poison
from kvstrata.testing.clock import FakeClock
from kvstrata.testing.fake_tier import EVERY_KEY, FakeBackend, FakeTier

if TYPE_CHECKING:
    from kvstrata.testing.manager_suite import OffloadingManagerSuite
    from kvstrata.testing.policy_suite import PolicySuite
    from kvstrata.testing.reading_tier_suite import ReadingTierSuite
    from kvstrata.testing.tier_suite import SecondaryTierSuite

_SUITES = {
    "OffloadingManagerSuite": "manager_suite",
    "PolicySuite": "policy_suite",
    "ReadingTierSuite": "reading_tier_suite",
    "SecondaryTierSuite": "tier_suite",
}

_REWRITTEN = (
    *_SUITES.values(),
    "manager_base",
    "manager_calls",
    "manager_copies_suite",
    "manager_machine",
    "manager_preemption_suite",
    "manager_requests_suite",
    "policy_driver",
    "policy_machine",
    "tier_calls",
)

__all__ = [
    "EVERY_KEY",
    "POISON",
    "FakeBackend",
    "FakeClock",
    "FakeRegion",
    "FakeTier",
    "OffloadingManagerSuite",
    "PolicySuite",
    "ReadingTierSuite",
    "SecondaryTierSuite",
    "chain",
    "numbered_key",
    "pattern",
    "poison",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest  # noqa: PLC0415

    # Before they are imported, so that a failing promise shows its values.
    modules = [f"{__name__}.{module}" for module in _REWRITTEN]
    pytest.register_assert_rewrite(*(module for module in modules if module not in sys.modules))
    return getattr(import_module(f"{__name__}.{_SUITES[name]}"), name)
