from pathlib import Path

import pytest

pytest.importorskip("obstore")

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import parse_settings
from kvstrata.tiers.object.client import open_store
from kvstrata.tiers.object.settings import Addressing, ObjectSettings

SECRET = "abc-very-secret-xyz"
PAIR = {"access_key_id": "AKIDEXAMPLE", "secret_access_key": SECRET}


def parse(**raw: object) -> ObjectSettings:
    return parse_settings(ObjectSettings, {"url": "s3://bucket/prefix", **raw}, "tiers[1]")


def test_a_secret_is_not_shown() -> None:
    settings = parse(**PAIR, session_token=SECRET, options={"sse_customer_key_base64": SECRET})
    assert SECRET not in repr(settings)
    assert SECRET not in str(settings.secret_access_key)
    assert SECRET not in f"{settings.options}"
    assert settings.secret_access_key is not None
    assert settings.secret_access_key.reveal() == SECRET


def test_a_configuration_shows_no_settings_of_a_tier() -> None:
    tier = {"type": "object", "url": "s3://bucket", **PAIR}
    config = Config.parse({"primary": {"num_chunks": 1}, "tiers": [tier]})
    assert SECRET not in repr(config)


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"secret_access_key": [SECRET]}, "tiers[1].secret_access_key"),
        ({"options": {"account_key": [SECRET]}}, "tiers[1].options.account_key"),
        ({"options": SECRET}, "tiers[1].options"),
        ({"url": f"s3://key:{SECRET}@bucket/prefix"}, "tiers[1].url"),
        ({"url": f"az://container?sig={SECRET}"}, "tiers[1].url"),
        ({"endpoint": f"https://key:{SECRET}@host"}, "tiers[1].endpoint"),
    ],
)
def test_an_error_about_a_secret_does_not_show_it(raw: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**raw)
    assert caught.value.path == path
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("bucket/prefix", "must begin with one of s3://"),
        ("ftp://bucket", "must begin with one of s3://"),
        ("s3://", "must name a bucket"),
        ("file://relative", "must hold an absolute path"),
        (3, "must begin with"),
    ],
)
def test_a_bad_url_is_refused_with_what_it_should_be(url: object, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        parse(url=url)


def test_a_missing_url_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.url: is required"):
        parse_settings(ObjectSettings, {}, "tiers[1]")


def test_a_misspelt_setting_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="endpoint_url: unknown field, did you mean endpoint"):
        parse(endpoint_url="http://host")


@pytest.mark.parametrize("given", sorted(PAIR))
def test_half_a_pair_of_credentials_names_the_other_half(given: str) -> None:
    (missing,) = set(PAIR) - {given}
    with pytest.raises(ConfigError, match=rf"^tiers\[1\]\.{missing}: is required beside {given}"):
        parse(**{given: PAIR[given]}).check(10, "tiers[1]")


@pytest.mark.parametrize("name", ["max_bytes", "inflight_bytes_max"])
def test_a_bound_that_holds_no_object_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tiers\[1\]\.{name}: 9999 bytes hold no object"):
        parse(**{name: 9999}).check(10_000, "tiers[1]")
    parse(**{name: 10_000}).check(10_000, "tiers[1]")


@pytest.mark.parametrize("name", ["request_timeout_s", "connect_timeout_s"])
def test_no_timeout_at_all_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse(**{name: 0}).check(10, "tiers[1]")


def test_a_missing_certificate_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"ca_bundle: there is no file /no/such\.pem"):
        parse(ca_bundle="/no/such.pem")


def test_paths_name_the_bucket_unless_told_otherwise() -> None:
    assert parse().addressing is Addressing.PATH
    assert parse(addressing="virtual").addressing is Addressing.VIRTUAL
    assert parse().bucket == "bucket"


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"url": "gs://bucket", **PAIR}, "access_key_id: means nothing for gs://; see options"),
        ({"url": "az://box", "region": "x"}, "region: means nothing for az://; see options"),
        ({"url": "file:///x", "endpoint": "http://x"}, "endpoint: means nothing for file://"),
        ({"url": "memory://", "options": {"a": "b"}}, "options: means nothing for memory://"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(raw: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=f"tiers.1..{text}") as caught:
        parse(**raw).check(10, "tiers[1]")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", None],
)
def test_a_ca_bundle_that_is_none_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(content or b"")
    settings = parse(ca_bundle=str(file))
    if content is None:
        file.unlink()
    with pytest.raises(ConfigError) as caught:
        open_store(settings, "tiers[1]")
    assert caught.value.path == "tiers[1].ca_bundle"


@pytest.mark.parametrize(("num_processors", "num_max"), [(1, 2), (2, 3), (64, 8)])
def test_a_store_without_a_network_has_few_requests_at_one_time(
    num_processors: int, num_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_processors)))
    urls = ("s3://bucket", "file:///x", "memory://")
    assert [parse(url=url).num_threads_max for url in urls] == [64, num_max, 2]
    assert parse(url="file:///x", num_requests_max=1).num_threads_max == 1
