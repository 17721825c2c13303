"""Settings are read by one path, and whatever is wrong is named by its dotted path."""

import pytest

from kvstrata.core.config import Config, WritePolicy
from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import parse_bytes, parse_seconds, parse_share

PRIMARY = {"primary": {"num_chunks": 8}}


def error_of(raw: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.parse(raw)
    return str(caught.value)


@pytest.mark.parametrize(
    ("raw", "path", "nearest"),
    [
        ({"primry": {}}, "primry", "primary"),
        ({"primary": {"num_chunk": 8}}, "primary.num_chunk", "num_chunks"),
        ({**PRIMARY, "filter": {"treshold": 2}}, "filter.treshold", "store_threshold"),
        ({**PRIMARY, "tenants": {"a": {"qota": 1}}}, "tenants.a.qota", "quota"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(
    raw: object, path: str, nearest: str
) -> None:
    # Field report P02.
    assert error_of(raw) == f"{path}: unknown field, did you mean {nearest}?"


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({}, "primary"),
        ("primary", ""),
        ({"primary": 8}, "primary"),
        ({"primary": {}}, "primary"),
        ({"primary": {"num_chunks": 8, "bytes": "1GiB"}}, "primary"),
        ({"primary": {"num_chunks": 0}}, "primary.num_chunks"),
        ({"primary": {"num_chunks": True}}, "primary.num_chunks"),
        ({"primary": {"num_chunks": 8, "policy": ""}}, "primary.policy"),
        ({"primary": {"num_chunks": 8, "huge_pages": "maybe"}}, "primary.huge_pages"),
        ({"primary": {"num_chunks": 8, "protect_share": "150%"}}, "primary.protect_share"),
        ({**PRIMARY, "filter": {"store_threshold": 0}}, "filter.store_threshold"),
        ({**PRIMARY, "tiers": {"type": "fs"}}, "tiers"),
        ({**PRIMARY, "tiers": [{"root": "x"}]}, "tiers[0].type"),
        ({**PRIMARY, "tiers": [{"type": "fs"}, 7]}, "tiers[1]"),
        ({**PRIMARY, "tiers": [{"type": "fs"}, {"type": "fs"}]}, "tiers[1].name"),
        ({**PRIMARY, "tiers": [{"type": "x", "name": "cpu"}]}, "tiers[0].name"),
        ({**PRIMARY, "tiers": [{"type": "fs", "write": "often"}]}, "tiers[0].write"),
        ({**PRIMARY, "tenants": {"a": {"quota": -1}}}, "tenants.a.quota"),
        ({**PRIMARY, "tenants": {"a": {"tiers": ["nvme"]}}}, "tenants.a.tiers"),
        ({**PRIMARY, "tenant_from": "header"}, "tenant_from"),
        ({**PRIMARY, "tenant_from": "signed:"}, "tenant_from"),
        ({**PRIMARY, "max_wait_s": "soon"}, "max_wait_s"),
        ({**PRIMARY, "tokens_per_chunk": -1}, "tokens_per_chunk"),
    ],
)
def test_a_bad_value_is_refused_by_its_dotted_path(raw: object, path: str) -> None:
    text = error_of(raw)
    assert text.startswith(f"{path}: " if path else "must be"), text


def test_what_was_read_is_what_was_meant() -> None:
    config = Config.parse(
        {
            "primary": {"bytes": "1.5GiB", "policy": "arc", "protect_share": "25%"},
            "tiers": [{"type": "fs", "root": "/x", "write": "on_reuse"}, {"type": "a.b:C"}],
            "tenants": {"default": {"quota": "50%", "ttl_s": "1h"}, "a": {"tiers": ["fs"]}},
            "max_wait_s": "500ms",
        }
    )
    assert config.primary.bytes == 3 * 2**29
    assert config.primary.protect_share == 0.25
    fs, other = config.tiers
    assert (fs.name, fs.write, dict(fs.settings)) == ("fs", WritePolicy.ON_REUSE, {"root": "/x"})
    assert (other.name, other.write) == ("C", WritePolicy.THROUGH)
    assert config.tenants["default"].quota == 0.5
    assert config.tenants["default"].ttl_s == 3600.0
    assert config.max_wait_s == 0.5
    assert Config.parse(config) is config


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("10GiB", 10 * 2**30),
        ("1.5GB", 1_500_000_000),
        (" 4 KiB ", 4096),
        ("1", 1),
        (4096, 4096),
        ("2tib", 2**41),
    ],
)
def test_sizes_are_read_with_their_units(raw: object, expected: int) -> None:
    # Field report P05.
    assert parse_bytes(raw, "size") == expected


@pytest.mark.parametrize(
    "raw", ["-1", -1, "10 apples", "", "GiB", 0, "0.1B", True, None, "1e3", []]
)
def test_what_is_no_size_is_refused_with_an_example(raw: object) -> None:
    # Field report P05.
    with pytest.raises(ConfigError, match="size: ") as caught:
        parse_bytes(raw, "size")
    assert (
        "at least one byte" in str(caught.value)
        or "20GiB" in str(caught.value)
        or "-1" in str(caught.value)
    )


@pytest.mark.parametrize(
    ("raw", "expected"), [("500ms", 0.5), ("2h", 7200.0), ("1min", 60.0), (1.5, 1.5), ("3", 3.0)]
)
def test_times_are_read_with_their_units(raw: object, expected: float) -> None:
    assert parse_seconds(raw, "time") == expected


@pytest.mark.parametrize("raw", ["5 parsecs", -1, float("nan"), float("inf"), None, False])
def test_what_is_no_time_is_refused(raw: object) -> None:
    with pytest.raises(ConfigError, match="time: "):
        parse_seconds(raw, "time")


@pytest.mark.parametrize(("raw", "expected"), [("50%", 0.5), (0.25, 0.25), ("1", 1.0), ("0%", 0.0)])
def test_shares_are_read(raw: object, expected: float) -> None:
    assert parse_share(raw, "share") == expected


@pytest.mark.parametrize("text", ["true", "True", "yes", "1"])
def test_truth_reads_the_same_as_text_and_as_value(text: str) -> None:
    # Field report P01: environment variables give text, files give values.
    def huge_pages(value: object) -> bool:
        return Config.parse(
            {"primary": {"num_chunks": "8", "huge_pages": value}}
        ).primary.huge_pages

    assert huge_pages(text) is huge_pages(value=True) is True


def test_numbers_read_the_same_as_text_and_as_value() -> None:
    # Field report P01.
    assert Config.parse({"primary": {"num_chunks": "8"}}) == Config.parse(PRIMARY)
    assert error_of({"primary": {"num_chunks": "0"}}).startswith("primary.num_chunks: ")
