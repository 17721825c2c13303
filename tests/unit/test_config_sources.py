"""The same settings by mapping, file and environment are read, and refused, in the same way."""

import json
from pathlib import Path

import pytest

from kvstrata import Config, ConfigError, load_config
from kvstrata.config_sources import over, read_environment

TOML = """
[primary]
bytes = "8GiB"
[[tiers]]
type = "fs"
root = "/nvme/kv"
max_bytes = "500GiB"
"""
TABLE = {
    "primary": {"bytes": "8GiB"},
    "tiers": [{"type": "fs", "root": "/nvme/kv", "max_bytes": "500GiB"}],
}


def test_toml_and_json_files_and_a_mapping_give_the_same_config(tmp_path: Path) -> None:
    toml, as_json = tmp_path / "c.toml", tmp_path / "c.json"
    toml.write_text(TOML)
    as_json.write_text(json.dumps(TABLE))
    assert load_config(toml) == load_config(as_json) == load_config(TABLE)


def test_the_environment_goes_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(TOML)
    monkeypatch.setenv("KVSTRATA__PRIMARY__BYTES", "1GiB")
    monkeypatch.setenv("KVSTRATA__TIERS__0__ROOT", "/other")
    config = load_config(path)
    assert config.primary.bytes == 2**30
    assert config.tiers[0].settings == {"root": "/other", "max_bytes": "500GiB"}


def test_a_bad_value_is_the_same_error_by_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_of(source: object) -> str:
        with pytest.raises(ConfigError) as raised:
            load_config(source)  # type: ignore[arg-type]
        return str(raised.value)

    bad = tmp_path / "bad.toml"
    bad.write_text('[primary]\nbytes = "10 apples"\n')
    good = tmp_path / "good.toml"
    good.write_text('[primary]\nbytes = "1GiB"\n')
    by_mapping, by_file = error_of({"primary": {"bytes": "10 apples"}}), error_of(bad)
    monkeypatch.setenv("KVSTRATA__PRIMARY__BYTES", "10 apples")
    assert by_mapping == by_file == error_of(good)
    assert by_mapping.startswith("primary.bytes: ")


def test_environment_numbers_make_lists() -> None:
    table = read_environment({"KVSTRATA__TIERS__1__TYPE": "b", "KVSTRATA__TIERS__0__TYPE": "a"})
    assert table == {"tiers": [{"type": "a"}, {"type": "b"}]}


def test_a_list_entry_is_laid_over_its_place_only() -> None:
    below = {"tiers": [{"type": "a", "x": 1}, {"type": "b"}]}
    assert over(below, {"tiers": [{"x": 2}]}) == {"tiers": [{"type": "a", "x": 2}, {"type": "b"}]}


@pytest.mark.parametrize("name", ["c.ini", "missing.toml"])
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "c.ini").write_text("")
    with pytest.raises(ConfigError, match=name):
        load_config(tmp_path / name)


def test_sizes_per_host_and_per_rank_are_told_apart() -> None:
    with pytest.raises(ConfigError, match=r"^primary: needs exactly one"):
        Config.parse({"primary": {"bytes": "1GiB", "bytes_per_rank": "1GiB"}})
