"""The object tier at its start: distinct errors that name the setting, and no secret anywhere."""

import logging
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from kvstrata.core.errors import ConfigError
from kvstrata.core.tier import TierEnv
from kvstrata.testing import FakeClock, FakeRegion
from kvstrata.testing.tier_calls import A, load, store
from kvstrata.tiers.object.tier import ObjectTier
from tests.fault_proxy import FaultProxy, Faults
from tests.s3_server import (
    BUCKET,
    READER_KEY,
    READER_SECRET,
    SECRET_KEY,
    STRANGER_KEY,
    STRANGER_SECRET,
    S3Server,
    SeaweedFs,
    free_ports,
)

pytestmark = pytest.mark.slow

SECRETS = (SECRET_KEY, READER_SECRET, STRANGER_SECRET, "not-the-right-secret")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with SeaweedFs(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "REGION", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)


def open_tier(**settings: Any) -> ObjectTier:  # noqa: ANN401
    env = TierEnv("bucket", "one", FakeClock(), "tiers[1]")
    return ObjectTier(FakeRegion(4, 5000), env=env, **settings)


def refusal(**settings: object) -> ConfigError:
    """Open a tier that can't be; return the error after looking for secrets in its traceback."""
    with pytest.raises(ConfigError) as caught:
        open_tier(**settings)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert not any(secret in shown for secret in SECRETS)
    return caught.value


def test_a_right_start_leaves_nothing_behind(server: S3Server) -> None:
    tier = open_tier(**server.settings("clean", max_bytes="1MiB"))
    assert tier.drain_jobs(30.0) == []
    assert tier.get_stats()["num_resident"] == 0
    tier.shutdown()


@pytest.mark.parametrize(
    ("change", "setting", "text"),
    [
        ({"url": "s3://no-such-bucket/x"}, "url", "there is no bucket 'no-such-bucket'"),
        ({"access_key_id": "nobody"}, "access_key_id", "does not know this key"),
        (
            {"secret_access_key": "not-the-right-secret"},
            "secret_access_key",
            "does not belong to the access key",
        ),
        (
            {"access_key_id": READER_KEY, "secret_access_key": READER_SECRET},
            "access_key_id",
            "no permission to write",
        ),
        (
            {"access_key_id": STRANGER_KEY, "secret_access_key": STRANGER_SECRET},
            "access_key_id",
            "no permission to list",
        ),
        ({"addressing": "virtual"}, "addressing", "endpoint must be the bucket's own host"),
    ],
)
def test_what_the_server_refuses_names_the_setting(
    server: S3Server, change: dict[str, object], setting: str, text: str
) -> None:
    error = refusal(**{**server.settings("x"), **change})
    assert error.path == f"tiers[1].{setting}"
    assert text in str(error)


def test_an_endpoint_that_nobody_listens_at_is_named(server: S3Server) -> None:
    (port,) = free_ports(1)
    error = refusal(**server.settings("x", endpoint=f"http://127.0.0.1:{port}"))
    assert error.path == "tiers[1].endpoint"
    assert "can't be reached" in str(error)


def test_an_endpoint_that_does_not_answer_is_named(server: S3Server) -> None:
    with FaultProxy(server) as proxy, proxy.held():
        error = refusal(**proxy.settings("x", request_timeout_s=0.1))
    assert error.path == "tiers[1].endpoint"
    assert "did not answer within request_timeout_s (0.1 s)" in str(error)


@pytest.mark.parametrize(
    "faults",
    [Faults(status=503, num_left=2), Faults(slow_bytes=10, num_left=2)],
    ids=["busy", "slow"],
)
@pytest.mark.parametrize("method", ["LIST", "CREATE", "GET"])
def test_a_store_that_is_slow_at_first_is_asked_again(
    server: S3Server, method: str, faults: Faults
) -> None:
    with FaultProxy(server) as proxy:
        proxy.faults = replace(faults, methods=frozenset({method}))
        open_tier(**proxy.settings("slow", request_timeout_s=0.5)).shutdown()


def test_tls_to_a_server_without_it_names_the_endpoint(server: S3Server) -> None:
    error = refusal(**server.settings("x", endpoint=f"https://127.0.0.1:{server.port}"))
    assert error.path == "tiers[1].endpoint"


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (400, "AuthorizationHeaderMalformed", "is not the bucket's; the store says 'eu-central-1'"),
        (301, "PermanentRedirect", "is not the bucket's"),
    ],
)
def test_a_bucket_of_another_region_names_the_region(
    server: S3Server, status: int, code: str, text: str
) -> None:
    with FaultProxy(server) as proxy:
        proxy.faults = Faults(status=status, code=code, region="eu-central-1")
        error = refusal(**proxy.settings("x"))
    assert error.path == "tiers[1].region"
    assert f"'us-east-1' {text}" in str(error)


def test_no_credentials_at_all_says_where_they_may_come_from(server: S3Server) -> None:
    (port,) = free_ports(1)
    settings = server.settings("x", options={"metadata_endpoint": f"http://127.0.0.1:{port}"})
    del settings["access_key_id"], settings["secret_access_key"]
    error = refusal(**settings)
    assert error.path == "tiers[1].access_key_id"
    assert "environment variables" in str(error)


def test_credentials_come_from_the_environment(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server.settings("environment")
    for name in ("access_key_id", "secret_access_key", "region"):
        monkeypatch.setenv(f"AWS_{name.upper()}", settings.pop(name))
    monkeypatch.setenv("AWS_ENDPOINT_URL", settings.pop("endpoint"))
    open_tier(**settings).shutdown()


def test_a_reader_needs_no_permission_to_write(server: S3Server) -> None:
    pair = {"access_key_id": READER_KEY, "secret_access_key": READER_SECRET}
    open_tier(**{**server.settings("x", read_only=True), **pair}).shutdown()


def test_a_store_that_is_down_may_be_let_pass(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultProxy(server) as proxy:
        proxy.faults = Faults(status=503)
        tier = open_tier(**proxy.settings("later", probe="warn", num_tries=1))
        assert "starting all the same" in caplog.text
        assert store(tier, 1, {A: 0}).failed == {A}
        proxy.heal()
        assert store(tier, 2, {A: 0}).failed == frozenset()
        assert load(tier, 3, {A: 1}).failed == frozenset()
        tier.shutdown()


def test_no_secret_is_logged_or_shown(
    server: S3Server, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    with FaultProxy(server) as proxy:
        tier = open_tier(**proxy.settings("quiet", num_tries=1, options={"disable_tagging": True}))
        for status, code in ((403, "SignatureDoesNotMatch"), (500, "InternalError")):
            proxy.faults = Faults(status=status, code=code)
            store(tier, status, {A: 0})
        shown = f"{caplog.text} {tier.get_stats()} {tier!r} {vars(tier)}"
        tier.shutdown()
    assert "while storing" in caplog.text
    assert not any(secret in shown for secret in SECRETS)
    assert BUCKET in tier.get_stats().notes["url"]
