from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine.block_table import BlockTables
from kvstrata.engine.model import NULL_BLOCK, KVGroup
from kvstrata.engine.request import Request, Sampling

ONE_GROUP = (KVGroup(layers=(0,), tokens_per_block=4),)
TWO_GROUPS = (
    KVGroup(layers=(0,), tokens_per_block=4),
    KVGroup(layers=(1,), tokens_per_block=2, window=5),
)


def make_request(tokens: Iterable[int], *, tokens_per_hash: int = 2, req_id: str = "r") -> Request:
    return Request(req_id, list(tokens), Sampling(), tokens_per_hash=tokens_per_hash)


def computed(tables: BlockTables, tokens: Iterable[int], *, tokens_per_hash: int = 2) -> Request:
    """A request whose tokens are all computed and published; it holds its blocks."""
    request = make_request(tokens, tokens_per_hash=tokens_per_hash)
    num_local = tables.match(request)
    assert tables.allocate(request, num_local, num_local, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    tables.publish(request)
    return request


def make_tables(groups: tuple[KVGroup, ...], *num_blocks: int) -> BlockTables:
    return BlockTables(groups, num_blocks)


def check(tables: BlockTables) -> None:
    for pool in tables.pools:
        pool.check()


def test_a_shared_prefix_shares_blocks() -> None:
    tables = make_tables(ONE_GROUP, 10)
    first = computed(tables, range(10), tokens_per_hash=4)
    second = make_request([*range(8), 99, 98], tokens_per_hash=4)
    assert tables.match(second) == 8
    assert tables.allocate(second, 8, 8, 10)
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[0][2] != first.tables[0][2]
    check(tables)


def test_a_prompt_cached_in_whole_leaves_a_token_to_compute() -> None:
    tables = make_tables(ONE_GROUP, 10)
    computed(tables, range(8), tokens_per_hash=4)
    assert tables.match(make_request(range(8), tokens_per_hash=4)) == 4


def test_released_blocks_are_found_until_others_need_them() -> None:
    tables = make_tables(ONE_GROUP, 5)
    tables.release(computed(tables, range(8), tokens_per_hash=4))
    assert tables.match(make_request(range(9), tokens_per_hash=4)) == 8
    computed(tables, range(100, 112), tokens_per_hash=4)  # takes 3 of 4: the tail's block leaves
    assert tables.match(make_request(range(9), tokens_per_hash=4)) == 4
    check(tables)


def test_a_block_in_use_is_not_handed_out() -> None:
    tables = make_tables(ONE_GROUP, 4)
    held = computed(tables, range(8), tokens_per_hash=4)
    assert tables.take_new() == [held.tables[0]]
    other = make_request(range(50, 56), tokens_per_hash=4)
    assert not tables.allocate(other, 0, 0, 6)
    assert other.tables == []
    assert tables.take_new() == [[]]
    assert tables.pools[0].num_free == 1
    check(tables)


def test_growing_without_room_in_one_group_takes_nothing_in_any() -> None:
    tables = make_tables(TWO_GROUPS, 10, 4)
    request = make_request(range(4))
    assert tables.allocate(request, 0, 0, 4)
    before = [list(table) for table in request.tables]
    assert not tables.grow(request, 12)
    assert request.tables == before
    assert tables.pools[0].num_free == 8


def test_a_window_gives_back_what_no_token_will_read() -> None:
    tables = make_tables(TWO_GROUPS, 10, 10)
    request = computed(tables, range(12))
    # Token 12 reads 8 to 12: blocks of 2 tokens before 8 are gone, in the other group none.
    assert [block == NULL_BLOCK for block in request.tables[1]] == [True] * 4 + [False] * 2
    assert NULL_BLOCK not in request.tables[0]
    check(tables)


def test_a_window_group_needs_only_its_last_blocks_for_a_hit() -> None:
    tables = make_tables(TWO_GROUPS, 10, 10)
    request = computed(tables, range(12))
    tables.release(request)
    pool = tables.pools[1]
    pool.take(5)  # of the 9 free: the never used, then the ones that the window left behind
    again = make_request(range(13))
    assert tables.match(again) == 12
    assert tables.allocate(again, 12, 12, 13)
    assert again.tables[1][:4] == [NULL_BLOCK] * 4
    assert again.tables[1][4:6] != [NULL_BLOCK] * 2
    check(tables)


def test_a_hit_ends_where_every_group_has_what_it_needs() -> None:
    tables = make_tables(TWO_GROUPS, 10, 10)
    tables.release(computed(tables, range(12)))
    # Without the blocks of tokens 8 to 11 in the window group, its windows at 12 and 8 are broken
    # (8 needs 4 to 7, which are still there).
    for block_hash in make_request(range(12)).block_hashes[4:]:
        found = tables.pools[1].find(block_hash)
        assert found is not None
        tables.pools[1].publish(found, b"something else")
    assert tables.match(make_request(range(13))) == 8


def test_truncating_says_whether_the_window_is_still_whole() -> None:
    tables = make_tables(TWO_GROUPS, 10, 10)
    request = computed(tables, range(12))
    assert tables.truncate(request, 12)
    assert not tables.truncate(request, 8)  # 4 to 7 were given back
    tables.release(request)
    check(tables)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_blocks_are_never_lost_nor_used_twice_and_hits_hold_the_right_tokens(
    data: st.DataObject,
) -> None:
    tables = make_tables(TWO_GROUPS, 14, 12)
    content: list[dict[int, tuple[int, ...]]] = [{}, {}]  # what was written into each block
    live: list[Request] = []
    for _ in range(data.draw(st.integers(5, 25))):
        releases = data.draw(st.booleans())
        if live and releases:
            tables.release(live.pop(data.draw(st.integers(0, len(live) - 1))))
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=18))
            request = make_request(tokens)
            num_local = tables.match(request)
            assert num_local < len(tokens)
            if not tables.allocate(request, num_local, num_local, len(tokens)):
                continue
            for group, kv_group in enumerate(TWO_GROUPS):
                width = kv_group.tokens_per_block
                for index, block in enumerate(request.tables[group]):
                    prefix = tuple(tokens[: (index + 1) * width])
                    if index < num_local // width:
                        assert block == NULL_BLOCK or content[group][block] == prefix
                    else:
                        content[group][block] = prefix
            request.num_computed_tokens = len(tokens)
            tables.publish(request)
            live.append(request)
        check(tables)
        for group, pool in enumerate(tables.pools):
            used = {b for r in live for b in r.tables[group]} - {NULL_BLOCK}
            assert pool.num_free == (13, 11)[group] - len(used)


def test_fits_counts_the_null_block() -> None:
    tables = make_tables(ONE_GROUP, 4)
    assert tables.fits(12)
    assert not tables.fits(13)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_hashes_grow_with_the_tokens(count: int) -> None:
    request = make_request(range(6))
    assert len(request.block_hashes) == 3
    request.tokens += np.arange(count).tolist()
    whole = make_request(request.tokens)
    assert request.block_hashes == whole.block_hashes
