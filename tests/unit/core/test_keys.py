"""Keys name a block hash and a group, and nothing is lost in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.keys import GROUP_IDX_MAX, get_block_hash, get_group_idx, make_offload_key

hashes = st.binary(min_size=1, max_size=40)
groups = st.integers(0, GROUP_IDX_MAX)


@given(hashes, groups)
def test_hash_and_group_come_back(block_hash: bytes, group_idx: int) -> None:
    key = make_offload_key(block_hash, group_idx)
    assert get_block_hash(key) == block_hash
    assert get_group_idx(key) == group_idx
    assert key == block_hash + group_idx.to_bytes(4, "big")


@given(st.tuples(hashes, groups), st.tuples(hashes, groups))
def test_different_chunks_have_different_keys(
    one: tuple[bytes, int], two: tuple[bytes, int]
) -> None:
    assert (make_offload_key(*one) == make_offload_key(*two)) == (one == two)


@pytest.mark.parametrize(
    ("block_hash", "group_idx"), [(b"", 0), (b"h", -1), (b"h", GROUP_IDX_MAX + 1)]
)
def test_what_is_no_chunk_has_no_key(block_hash: bytes, group_idx: int) -> None:
    with pytest.raises(ValueError, match=r"block_hash|group_idx"):
        make_offload_key(block_hash, group_idx)
