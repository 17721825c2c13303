"""How an engine's KV groups are cut into chunks: settings of the connector, made once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvstrata.core.errors import ConfigError


class GroupKind(Enum):
    """What the engine needs of a KV group to continue behind a prefix."""

    FULL = "full"  # the whole prefix
    WINDOW = "window"  # the last `window_tokens` - 1 tokens of it
    REQUIRED = "required"  # state that can't be offloaded: nothing can be loaded at all
    IGNORED = "ignored"  # nothing; the group is not cacheable and not needed


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table.

    Attributes:
        tokens_per_block: Tokens in one engine block of this group.
        blocks_per_chunk: Blocks that are offloaded together.
        kind: What is needed of the group.
        window_tokens: For `WINDOW`: a token attends to itself and `window_tokens - 1` before it.
        pool_idx: Groups of one pool take their block ids from the same numbers.
    """

    tokens_per_block: int
    blocks_per_chunk: int = 1
    kind: GroupKind = GroupKind.FULL
    window_tokens: int | None = None
    pool_idx: int = 0

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens in one chunk of this group."""
        return self.tokens_per_block * self.blocks_per_chunk

    @property
    def is_offloaded(self) -> bool:
        """Whether chunks of this group exist."""
        return self.kind in {GroupKind.FULL, GroupKind.WINDOW}


@dataclass(frozen=True, slots=True)
class SchedulerOffloadConfig:
    """What the scheduler side knows of the engine.

    Attributes:
        groups: The engine's KV groups, in its order.
        tokens_per_hash: Tokens that one of `EngineRequest.block_hashes` covers; every offloaded
            chunk is a multiple of it.
        num_ranks: Workers that each job runs on.
        is_replicated: All ranks hold the same bytes: one copy is kept, and every rank loads it.
        null_block_id: The id that stands for "no block" in tables; None: there is none.
        match_tokens: Where set, the tail of a prompt behind its last full chunk is kept too, and
            found again in units of this many tokens (a multiple of `tokens_per_hash` that divides
            the chunk). Only with `FULL` groups of equal chunks.
        job_deadline_s: A job that some rank has not reported after this time counts as failed.
        num_engine_tokens: What the engine's blocks hold. With it, loads are admitted only while all
            requests that are loading, or loaded and not through their prompt, fit in whole.

    Raises:
        ConfigError: The groups can't be offloaded as described; the text names the group.
    """

    groups: tuple[KVGroup, ...]
    tokens_per_hash: int
    num_ranks: int = 1
    is_replicated: bool = False
    null_block_id: int | None = None
    match_tokens: int | None = None
    job_deadline_s: float = 60.0
    num_engine_tokens: int | None = None

    def __post_init__(self) -> None:
        if not any(group.is_offloaded for group in self.groups):
            raise ConfigError("groups", "none of them is offloaded")
        for name in ("tokens_per_hash", "num_ranks"):
            if getattr(self, name) < 1:
                raise ConfigError(name, "must be at least 1")
        for i, group in enumerate(self.groups):
            self._check_group(group, f"groups[{i}]")
        if self.match_tokens is not None:
            self._check_match_tokens(self.match_tokens)

    def chunk_bytes(self, block_bytes: Sequence[int]) -> int:
        """Return the bytes of a slot: every rank's share of the largest chunk.

        Args:
            block_bytes: Bytes of one block on one rank, all layers together, for each group.
        """
        return self.rank_bytes(block_bytes) * (1 if self.is_replicated else self.num_ranks)

    def rank_bytes(self, block_bytes: Sequence[int]) -> int:
        """Return the bytes of one rank's share of a slot."""
        return max(
            group.blocks_per_chunk * size
            for group, size in zip(self.groups, block_bytes, strict=True)
            if group.is_offloaded
        )

    @property
    def tokens_per_match(self) -> int:
        """Hits end at a multiple of this, in every group (before one token is left to compute)."""
        return math.lcm(*(g.tokens_per_chunk for g in self.groups if g.is_offloaded))

    def _check_group(self, group: KVGroup, path: str) -> None:
        if group.tokens_per_block < 1 or group.blocks_per_chunk < 1:
            raise ConfigError(path, "tokens_per_block and blocks_per_chunk must be at least 1")
        if not group.is_offloaded:
            return
        if group.tokens_per_chunk % self.tokens_per_hash:
            raise ConfigError(
                path,
                f"a chunk of {group.tokens_per_chunk} tokens is not a multiple of the "
                f"{self.tokens_per_hash} tokens of a block hash; choose blocks_per_chunk so",
            )
        if (group.kind is GroupKind.WINDOW) != (group.window_tokens is not None):
            raise ConfigError(path, "window_tokens belongs to, and only to, kind WINDOW")
        if group.window_tokens is not None and group.window_tokens < 1:
            raise ConfigError(path, "window_tokens must be at least 1")

    def _check_match_tokens(self, match_tokens: int) -> None:
        chunks = {group.tokens_per_chunk for group in self.groups}
        if len(chunks) > 1 or any(group.kind is not GroupKind.FULL for group in self.groups):
            raise ConfigError("match_tokens", "needs groups of kind FULL with equal chunks")
        if match_tokens < 1 or match_tokens % self.tokens_per_hash or chunks.pop() % match_tokens:
            raise ConfigError(
                "match_tokens", "must divide the chunk and be a multiple of tokens_per_hash"
            )
