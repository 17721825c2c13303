"""Which KV groups can be offloaded, and what chunks they make."""

import pytest

from kvstrata.connector import GroupKind, KVGroup, SchedulerOffloadConfig
from kvstrata.core.errors import ConfigError


def test_groups_of_very_unequal_blocks_are_accepted_with_their_own_chunks() -> None:
    # I01: blocks of 4, 64 and 3,584 tokens on a grid of 64 tokens a hash, one not cacheable.
    groups = (
        KVGroup(4, 16),
        KVGroup(64, 1, GroupKind.WINDOW, 128),
        KVGroup(3584, 1, GroupKind.IGNORED),
    )
    config = SchedulerOffloadConfig(groups, 64)
    assert [group.tokens_per_chunk for group in config.groups] == [64, 64, 3584]
    assert config.tokens_per_match == 64
    assert config.chunk_bytes([100, 2000, 7]) == 2000
    assert config.chunk_bytes([1000, 2000, 7]) == 16000


def test_a_chunk_that_no_hash_ends_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"groups\[1\].*blocks_per_chunk"):
        SchedulerOffloadConfig((KVGroup(64), KVGroup(4)), 64)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (KVGroup(0), "at least 1"),
        (KVGroup(4, 0), "at least 1"),
        (KVGroup(4, 1, GroupKind.WINDOW), "window_tokens"),
        (KVGroup(4, 1, GroupKind.FULL, 8), "window_tokens"),
        (KVGroup(4, 1, GroupKind.WINDOW, 0), "window_tokens"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(group: KVGroup, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"groups\[0\].*{message}"):
        SchedulerOffloadConfig((group,), 4)


def test_nothing_to_offload_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of them"):
        SchedulerOffloadConfig((KVGroup(4, 1, GroupKind.REQUIRED),), 4)
    with pytest.raises(ConfigError, match="num_ranks"):
        SchedulerOffloadConfig((KVGroup(4),), 4, num_ranks=0)


@pytest.mark.parametrize(
    ("groups", "match_tokens"),
    [
        ((KVGroup(16), KVGroup(32)), 8),
        ((KVGroup(16, 1, GroupKind.WINDOW, 8),), 8),
        ((KVGroup(16),), 6),
        ((KVGroup(12),), 8),
    ],
)
def test_tails_that_cannot_be_matched_are_refused(
    groups: tuple[KVGroup, ...], match_tokens: int
) -> None:
    with pytest.raises(ConfigError, match="match_tokens"):
        SchedulerOffloadConfig(groups, 4, match_tokens=match_tokens)


def test_every_rank_has_its_share_unless_all_hold_the_same() -> None:
    groups = (KVGroup(4, 2),)
    assert SchedulerOffloadConfig(groups, 4, num_ranks=4).chunk_bytes([100]) == 800
    alike = SchedulerOffloadConfig(groups, 4, num_ranks=4, is_replicated=True)
    assert alike.chunk_bytes([100]) == 200
