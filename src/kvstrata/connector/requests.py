"""What the scheduler side remembers of one request while it is live."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstrata.connector.config import KVGroup, SchedulerOffloadConfig
from kvstrata.connector.matching import first_needed_token
from kvstrata.connector.protocols import EngineRequest
from kvstrata.connector.records import RequestRecord
from kvstrata.core.keys import JobId, OffloadKey, make_offload_key
from kvstrata.core.manager import RequestOffloadingContext
from kvstrata.core.request import ReqContext


class FoundPrefix(NamedTuple):
    """An answer given to the engine: tokens `num_local` to `end` can be loaded.

    `tail` is the end, in tokens, of a kept tail that is part of it; 0 without one.
    """

    num_local: int
    end: int
    tail: int = 0


class Chunk(NamedTuple):
    """A chunk to be copied: engine block `block_ids[i]` is its part `first_part + i`."""

    end: int  # in tokens
    group_idx: int
    key: OffloadKey
    first_part: int
    block_ids: Sequence[int]


class RequestGroupState:
    """One request in one KV group: the keys of its full chunks, its blocks, and what is stored.

    Attributes:
        keys: Of the full chunks, from the start.
        block_ids: The block table as last seen.
        num_announced: Blocks of the table that the fence was told of.
        num_offered: Chunks, from the start, that need not be offered any more.
        num_due: The same once what is being offered now has been taken.
        held_from: The first chunk that somebody else was still filling when last looked at.
    """

    __slots__ = (
        "block_ids",
        "group",
        "group_idx",
        "held_from",
        "keys",
        "num_announced",
        "num_due",
        "num_offered",
    )

    def __init__(self, group_idx: int, group: KVGroup) -> None:
        self.group_idx = group_idx
        self.group = group
        self.keys: list[OffloadKey] = []
        self.block_ids: Sequence[int] = ()
        self.num_announced = 0
        self.num_offered = 0
        self.num_due = 0
        self.held_from: int | None = None

    def extend_keys(self, hashes: Sequence[bytes], tokens_per_hash: int) -> None:
        """Make the keys of chunks that became full."""
        per_chunk = self.group.tokens_per_chunk // tokens_per_hash
        for last in range((len(self.keys) + 1) * per_chunk - 1, len(hashes), per_chunk):
            self.keys.append(make_offload_key(hashes[last], self.group_idx))

    def chunk_to_store(self, key: OffloadKey, end: int, null_block_id: int | None) -> Chunk | None:
        """Return the chunk that ends after `end` tokens; None if a block it needs is gone.

        In a window group only the blocks are named that a hit which ends here reads, or one that
        ends a token earlier (after a full hit the last token is computed again).
        """
        group = self.group
        start = (end - 1) // group.tokens_per_chunk * group.tokens_per_chunk
        first = max(start, first_needed_token(group, end - 1)) // group.tokens_per_block
        last = -(-end // group.tokens_per_block)
        block_ids = self.block_ids[first:last]
        if len(block_ids) < last - first or null_block_id in block_ids:
            return None
        return Chunk(end, self.group_idx, key, first % group.blocks_per_chunk, block_ids)


class RequestOffloadState:
    """One request on the scheduler side, from `on_new_request` to `request_finished`.

    Attributes:
        groups: One state per offloaded group.
        num_final: Tokens, from the start, whose blocks hold final content once the steps that were
            scheduled so far have run.
        num_open_stores: Store jobs that are not over, nor overdue.
        found: The last answer given to the engine, if it was a positive one.
        load_job_id: The load in flight.
        promised_tokens: What the last load was to bring, by medium.
        load_failed: A load failed: nothing is loaded any more.
    """

    __slots__ = (
        "config",
        "ctx",
        "found",
        "groups",
        "has_blocks",
        "is_finished",
        "load_failed",
        "load_job_id",
        "num_final",
        "num_open_stores",
        "num_settled_at_refusal",
        "offloading",
        "promised_tokens",
        "record",
        "request",
        "tail_offered",
        "waits_since_s",
    )

    def __init__(
        self,
        config: SchedulerOffloadConfig,
        request: EngineRequest,
        ctx: ReqContext,
        offloading: RequestOffloadingContext,
    ) -> None:
        self.config = config
        self.request = request
        self.ctx = ctx
        self.offloading = offloading
        self.groups = tuple(
            RequestGroupState(i, group)
            for i, group in enumerate(config.groups)
            if group.is_offloaded
        )
        self.record = RequestRecord(request.req_id)
        self.num_final = 0
        self.num_open_stores = 0
        self.found: FoundPrefix | None = None
        self.load_job_id: JobId | None = None
        self.promised_tokens: Mapping[str, int] = {}
        self.load_failed = False
        self.has_blocks = False
        self.is_finished = False
        self.tail_offered = 0  # end of the longest tail offered, in tokens
        self.waits_since_s: float | None = None
        self.num_settled_at_refusal: int | None = None

    def extend_keys(self) -> None:
        """Take in hashes that the engine has made since."""
        hashes = self.request.block_hashes
        for state in self.groups:
            state.extend_keys(hashes, self.config.tokens_per_hash)

    @property
    def num_hashed(self) -> int:
        """Tokens that have a hash."""
        return len(self.request.block_hashes) * self.config.tokens_per_hash

    def keys_in_order(self) -> list[OffloadKey]:
        """Return the keys of all groups in prefix order."""
        if len(self.groups) == 1:
            return list(self.groups[0].keys)
        ends = (
            ((idx + 1) * group_state.group.tokens_per_chunk, group_state.group_idx, key)
            for group_state in self.groups
            for idx, key in enumerate(group_state.keys)
        )
        return [key for _, _, key in sorted(ends)]

    def key_at(self, end: int, group_idx: int) -> OffloadKey:
        """Return the key of what ends after `end` tokens, a multiple of `tokens_per_hash`."""
        last = end // self.config.tokens_per_hash - 1
        return make_offload_key(self.request.block_hashes[last], group_idx)

    def lose_blocks(self) -> None:
        """Forget what belongs to blocks that were taken away."""
        self.has_blocks = False
        self.num_final = 0
        self.found = None
        self.tail_offered = 0
        self.num_settled_at_refusal = None
        for state in self.groups:
            state.block_ids = ()
            state.num_announced = 0
            state.num_offered = 0
            state.held_from = None
