"""Which chunks of a request are to be stored or loaded, and the copies that do it."""

import math
from collections.abc import Collection, Sequence

from kvstrata.connector.config import GroupKind, SchedulerOffloadConfig
from kvstrata.connector.matching import first_needed_token, needed_range
from kvstrata.connector.messages import BlockCopies
from kvstrata.connector.requests import Chunk, FoundPrefix, RequestGroupState, RequestOffloadState
from kvstrata.core.keys import OffloadKey

Unfilled = Sequence[Collection[int]]


def chunks_due(
    state: RequestOffloadState, num_final: int, unfilled: Unfilled | None = None
) -> list[Chunk]:
    """Return the chunks that can be stored now and were not offered yet, in prefix order.

    Args:
        state: The request; its tables are as of this step.
        num_final: Tokens whose blocks hold final content once this step has run.
        unfilled: Blocks that somebody else still fills, per group; None: as when last told. Their
            chunks, and those behind, wait.

    A chunk that lost a block it needs will never be complete and is passed over.
    """
    chunks: list[Chunk] = []
    for group_state in state.groups:
        per_chunk = group_state.group.tokens_per_chunk
        if unfilled is not None:
            group_state.held_from = _first_held(group_state, unfilled[group_state.group_idx])
        last = num_final // per_chunk
        if group_state.held_from is not None:
            last = min(last, group_state.held_from)
        group_state.num_due = max(group_state.num_offered, last)
        for idx in range(group_state.num_offered, last):
            end = (idx + 1) * per_chunk
            chunk = group_state.chunk_to_store(
                group_state.keys[idx], end, state.config.null_block_id
            )
            if chunk is not None:
                chunks.append(chunk)
    if len(state.groups) > 1:
        chunks.sort()
    return chunks


def _first_held(group_state: RequestGroupState, unfilled: Collection[int]) -> int | None:
    if not unfilled:
        return None
    held = frozenset(unfilled)
    blocks = (i for i, block_id in enumerate(group_state.block_ids) if block_id in held)
    first = next(blocks, None)
    return None if first is None else first // group_state.group.blocks_per_chunk


def chunks_of_preempted(state: RequestOffloadState) -> list[Chunk]:
    """Return all final chunks of a request whose blocks were just taken, in prefix order.

    Its tables are as last seen. What a window left behind since may belong to others by now.
    """
    for group_state in state.groups:
        group_state.num_offered = 0
        group = group_state.group
        if group.kind is GroupKind.WINDOW:
            first_alive = first_needed_token(group, state.num_final)
            group_state.num_offered = -(-first_alive // group.tokens_per_chunk)
    return chunks_due(state, state.num_final)


def tail_chunks(state: RequestOffloadState, num_final: int) -> list[Chunk]:
    """Return what lies behind the last full chunk, in whole `match_tokens`, if not offered yet."""
    match_tokens = state.config.match_tokens
    if match_tokens is None:
        return []
    end = num_final // match_tokens * match_tokens
    if end <= state.tail_offered or end % state.config.tokens_per_match == 0:
        return []
    chunks = [
        group_state.chunk_to_store(
            state.key_at(end, group_state.group_idx), end, state.config.null_block_id
        )
        for group_state in state.groups
    ]
    return [chunk for chunk in chunks if chunk is not None]


def chunks_to_load(state: RequestOffloadState, found: FoundPrefix) -> list[Chunk]:
    """Return the chunks that bring tokens `found.num_local` to `found.end`, in prefix order.

    Only blocks behind the local tokens are named, and none that the table holds as null.
    """
    chunks: list[Chunk] = []
    for group_state in state.groups:
        group, table = group_state.group, group_state.block_ids
        per_chunk, per_block = group.tokens_per_chunk, group.tokens_per_block
        first_token = max(found.num_local, first_needed_token(group, found.end))
        last_block = -(-found.end // per_block)
        for idx in needed_range(group, found.num_local, found.end, per_chunk):
            start = idx * per_chunk
            first = max(start, first_token) // per_block
            ids = table[first : min(last_block, (idx + 1) * group.blocks_per_chunk)]
            while ids and ids[0] == state.config.null_block_id:
                first, ids = first + 1, ids[1:]
            if found.tail > start and found.tail < start + per_chunk:
                key = state.key_at(found.tail, group_state.group_idx)
            else:
                key = group_state.keys[idx]
            chunks.append(
                Chunk(
                    start + per_chunk,
                    group_state.group_idx,
                    key,
                    first % group.blocks_per_chunk,
                    ids,
                )
            )
    if len(state.groups) > 1:
        chunks.sort()
    return chunks


def copies_of(chunks: Sequence[Chunk], slots: Sequence[int]) -> list[BlockCopies]:
    """Return the copies between the chunks' blocks and `slots[i]` for chunk i, group by group."""
    by_group: dict[int, tuple[list[int], list[int], list[int]]] = {}
    for chunk, slot in zip(chunks, slots, strict=True):
        ids, places, parts = by_group.setdefault(chunk.group_idx, ([], [], []))
        num_blocks = len(chunk.block_ids)
        ids += chunk.block_ids
        places += [slot] * num_blocks
        parts += range(chunk.first_part, chunk.first_part + num_blocks)
    return [BlockCopies(group_idx, *lists) for group_idx, lists in by_group.items()]


def valid_tokens(
    config: SchedulerOffloadConfig,
    found: FoundPrefix,
    chunks: Sequence[Chunk],
    failed: Collection[OffloadKey],
) -> int:
    """Return how many tokens hold valid content in every group after a load.

    With a window group nothing short of the whole load is: another end needs other chunks.
    """
    if not failed:
        return found.end
    if any(group.kind is GroupKind.WINDOW for group in config.groups):
        return found.num_local
    first = min(
        chunk.end - config.groups[chunk.group_idx].tokens_per_chunk
        for chunk in chunks
        if chunk.key in failed
    )
    per_block = math.lcm(*(g.tokens_per_block for g in config.groups if g.is_offloaded))
    return max(found.num_local, first // per_block * per_block)


def mark_offered(states: Sequence[RequestGroupState], first_kept: Chunk | None = None) -> None:
    """Move the cursors past what was due, or up to the first chunk that is to be offered again."""
    for state in states:
        state.num_offered = state.num_due
        if first_kept is not None:
            before = (first_kept.end - 1) // state.group.tokens_per_chunk
            state.num_offered = min(state.num_offered, before)
