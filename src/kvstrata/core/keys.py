"""Offload keys: how the bytes of one chunk are named."""

from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)
JobId = NewType("JobId", int)

GROUP_BYTES = 4
GROUP_IDX_MAX = 2 ** (8 * GROUP_BYTES) - 1


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Name the chunk that ends with the block of this hash, in one KV group.

    Args:
        block_hash: Chained hash, so that it names the whole prefix; at least one byte.
        group_idx: Index of the KV group, 0 to 2**32 - 1.

    Raises:
        ValueError: The hash is empty or the index out of range.
    """
    if not block_hash:
        raise ValueError("block_hash is empty")
    if not 0 <= group_idx <= GROUP_IDX_MAX:
        raise ValueError(f"group_idx {group_idx} is not in 0..{GROUP_IDX_MAX}")
    return OffloadKey(block_hash + group_idx.to_bytes(GROUP_BYTES, "big"))


def get_block_hash(key: OffloadKey) -> bytes:
    """Return the chained block hash that the key was made of."""
    return key[:-GROUP_BYTES]


def get_group_idx(key: OffloadKey) -> int:
    """Return the KV group index that the key was made of."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")
