"""The self-check tries real tiers, finds what does not work, and leaves nothing behind."""

from pathlib import Path

import pytest

from kvstrata import Config, ConfigError
from kvstrata.self_check import check_tiers, resolve_plan
from kvstrata.tiers.fs.layout import SUFFIX


def test_the_plan_tells_rank_from_host() -> None:
    table = {"primary": {"bytes": "64MiB"}, "num_ranks": 4, "tokens_per_chunk": 16}
    primary = resolve_plan(Config.parse(table), 5000)[0]
    assert primary.chunks == 2**24 // 8192
    assert primary.rank_bytes == 2**24
    assert primary.host_bytes == 2**26
    assert primary.tokens == 16 * 2048


def test_a_size_that_holds_no_chunk_names_both_sizes() -> None:
    table = {"primary": {"bytes": "1MiB"}, "num_ranks": 4}
    with pytest.raises(ConfigError, match=r"^primary.bytes: 262144 bytes .* 1000000 bytes"):
        resolve_plan(Config.parse(table), 1_000_000)


def test_a_working_tier_passes_and_is_left_empty(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    tier = {"type": "fs", "root": str(root), "max_bytes": "8MiB"}
    config = Config.parse({"primary": {"num_chunks": 4}, "tiers": [tier]})
    (result,) = check_tiers(config, 4096)
    assert result.problem is None
    assert root.is_dir()
    assert not list(root.rglob(f"*{SUFFIX}"))


def test_a_tier_that_loses_chunks_is_reported() -> None:
    tier = {"type": "kvstrata.testing:FakeTier"}
    config = Config.parse({"primary": {"num_chunks": 4}, "tiers": [{**tier, "fail": True}]})
    with pytest.raises(ConfigError):
        list(check_tiers(config, 4096))  # a switch is no setting


def test_a_primary_that_this_host_can_not_hold_is_refused() -> None:
    config = Config.parse({"primary": {"bytes": "900TiB"}})
    with pytest.raises(ConfigError, match=r"^primary.*: .* bytes .*free"):
        list(check_tiers(config, 4096))
