"""Settings of the p2p tier that let strangers in, or that can't work, are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from kvstrata.core.clock import SystemClock
from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import parse_settings
from kvstrata.core.tier import TierEnv
from kvstrata.testing import FakeRegion
from kvstrata.tiers.p2p import P2pTier
from kvstrata.tiers.p2p.settings import Address, P2pSettings
from tests.p2p_hosts import secret_file


def refusal(raw: dict[str, Any]) -> str:
    """The error that a tier of these settings ends with; it neither listens nor leaves threads."""
    env = TierEnv("p2p", "namespace", SystemClock(), "tiers[0]")
    with pytest.raises(ConfigError) as error:
        P2pTier.from_config(FakeRegion(2, 4096), raw, env)
    return str(error.value)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.1.2.3:7070", "host-a:7070"])
def test_listening_beyond_loopback_needs_authentication(listen: str) -> None:
    text = refusal({"identity": "a", "listen": listen})
    assert text.startswith("tiers[0].listen: ")
    assert "secret_file" in text


def test_connecting_beyond_loopback_needs_authentication() -> None:
    assert refusal({"identity": "a", "peers": {"b": "10.0.0.2:7070"}}).startswith(
        "tiers[0].peers.b: "
    )


@pytest.mark.parametrize(
    "advertise", ["0.0.0.0:7070", "[::]:7070", "localhost:7070", "127.0.0.1:7070", "[::1]:7070"]
)
def test_an_address_that_leads_others_nowhere_is_not_advertised(advertise: str) -> None:
    text = refusal({"identity": "a", "advertise": advertise})
    assert text.startswith("tiers[0].advertise: ")
    assert "reach this host" in text


@pytest.mark.parametrize("identity", ["0.0.0.0", "::", "localhost", "127.0.0.1"])
def test_an_address_that_every_host_has_is_no_identity(identity: str) -> None:
    text = refusal({"identity": identity})
    assert text.startswith("tiers[0].identity: ")
    assert "no other host" in text


def test_a_host_is_not_its_own_peer() -> None:
    assert "peers.a" in refusal({"identity": "a", "peers": {"a": "127.0.0.1:7070"}})


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"listn": "127.0.0.1:0"}, "tiers[0].listn"),
        ({"listen": "127.0.0.1"}, "tiers[0].listen"),
        ({"listen": "127.0.0.1:70000"}, "tiers[0].listen"),
        ({"listen": "192.0.2.1:0", "secret_env": "KVSTRATA_TEST_SECRET"}, "tiers[0].listen"),
        ({"peers": ["127.0.0.1:1"]}, "tiers[0].peers"),
        ({"secret_file": "/nowhere/secret"}, "tiers[0].secret_file"),
        ({"secret_env": "KVSTRATA_NOT_SET"}, "tiers[0].secret_env"),
        ({"secret_env": "KVSTRATA_NOT_SET", "secret_file": "/nowhere"}, "tiers[0].secret_env"),
        (
            {"tls": {"certificate": "/nowhere", "key": "/nowhere", "authority": "/nowhere"}},
            "tiers[0].tls.certificate",
        ),
        ({"tls": {"certificate": "/nowhere"}}, "tiers[0].tls.key"),
    ],
)
def test_a_wrong_setting_is_named(
    raw: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTRATA_TEST_SECRET", "a secret of good length")
    assert refusal({"identity": "a", **raw}).startswith(f"{path}: ")


def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    text = refusal({"identity": "a", "secret_file": secret_file(tmp_path, "hunter2")})
    assert text.startswith("tiers[0].secret_file: ")
    assert "hunter2" not in text


def test_the_identity_is_a_name_and_not_the_address() -> None:
    settings = parse_settings(P2pSettings, {"listen": "127.0.0.1:7070"}, "")
    assert settings.identity
    assert "127.0.0.1" not in settings.identity
    assert settings.listen == Address("127.0.0.1", 7070)
    assert str(Address("::1", 7070)) == "[::1]:7070"


@pytest.mark.parametrize(("num_cpus", "expected"), [(1, 1), (2, 2), (4, 4), (64, 4)])
def test_there_is_a_connection_for_each_processor_up_to_four(
    monkeypatch: pytest.MonkeyPatch, num_cpus: int, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_cpus)))
    assert P2pSettings(identity="host").num_connections == expected
