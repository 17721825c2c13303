"""Classes are found by name or path, and what can't be found is said clearly."""

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.core.registry import Registry
from kvstrata.core.tier import SecondaryTierManager
from kvstrata.testing import FakeTier

TIERS: Registry[SecondaryTierManager] = Registry(
    SecondaryTierManager,  # type: ignore[type-abstract]
    {"fake": "kvstrata.testing:FakeTier"},
    "kvstrata.tiers",
)


def test_a_class_is_found_by_name_and_by_path() -> None:
    assert TIERS.get("fake", "tiers[0].type") is FakeTier
    assert TIERS.get("kvstrata.testing:FakeTier", "tiers[0].type") is FakeTier
    assert "fake" in TIERS.names()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fakr", "did you mean fake?"),
        ("zzz", "known: "),
        ("kvstrata.nothing:X", "can't be imported"),
        ("kvstrata.testing:Nothing", "has no class"),
        ("kvstrata.testing:FakeClock", "is not a SecondaryTierManager"),
        ("kvstrata.testing:pattern", "is not a SecondaryTierManager"),
    ],
)
def test_what_is_not_found_is_an_error_with_its_path(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^tiers\[3\]\.type: ") as caught:
        TIERS.get(name, "tiers[3].type")
    assert said in str(caught.value)
