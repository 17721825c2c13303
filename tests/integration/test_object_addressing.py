"""Stores that take only one way of naming the bucket: in the path, or in the host's name."""

from typing import Literal, get_args

import pytest

pytest.importorskip("obstore")

from kvstrata.core.errors import ConfigError
from kvstrata.core.results import LookupResult
from kvstrata.core.tier import TierEnv
from kvstrata.testing import FakeClock, FakeRegion, pattern
from kvstrata.testing.tier_calls import A, load, look_up, store
from kvstrata.tiers.object.tier import ObjectTier
from tests.one_style_server import BUCKET, OneStyleServer

CHUNK_BYTES = 5_000

Style = Literal["path", "virtual"]
STYLES: tuple[Style, ...] = get_args(Style)


def open_tier(server: OneStyleServer, addressing: str) -> ObjectTier:
    env = TierEnv("bucket", "one", FakeClock(), "tiers[1]")
    slots = FakeRegion(4, CHUNK_BYTES)
    slots[0][:] = pattern(A, CHUNK_BYTES)
    return ObjectTier(slots, env=env, **server.settings(addressing))


@pytest.mark.parametrize("style", STYLES)
def test_a_store_of_one_style_works_when_that_is_configured(style: Style) -> None:
    with OneStyleServer(style) as server:
        tier = open_tier(server, style)
        assert store(tier, 1, {A: 0}).failed == frozenset()
        assert [name.endswith(A.hex()) for name in server.objects] == [True]
        assert all(name.startswith("prefix/") for name in server.objects)
        tier.shutdown()
        other = open_tier(server, style)
        assert look_up(other, A) is LookupResult.HIT
        assert load(other, 1, {A: 1}).failed == frozenset()
        other.shutdown()


def test_path_style_is_what_is_used_when_nothing_is_said() -> None:
    with OneStyleServer("path") as server:
        settings = server.settings("path")
        del settings["addressing"]
        ObjectTier(FakeRegion(4, CHUNK_BYTES), **settings).shutdown()


@pytest.mark.parametrize(("style", "other"), [("path", "virtual"), ("virtual", "path")])
def test_the_other_style_is_an_error_that_names_the_setting(style: Style, other: Style) -> None:
    with OneStyleServer(style) as server, pytest.raises(ConfigError) as caught:
        open_tier(server, other)
    assert caught.value.path == "tiers[1].addressing"
    assert f'try "{style}"' in str(caught.value)
    assert BUCKET not in server.objects
