"""Copy engine blocks into slots and back: the contract, and plain copies in host memory."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from kvstrata.connector.config import KVGroup, SchedulerOffloadConfig
from kvstrata.connector.layout import Array, TensorLayout, as_array, by_block, stacked
from kvstrata.connector.messages import BlockCopies
from kvstrata.core.errors import ConfigError
from kvstrata.core.memory import SlotView


class Copier(ABC):
    """Moves the bytes of one rank between its tensors and its share of each slot.

    In a slot's share the chunk's blocks follow one another, and in a block the group's layers, in
    the order in which they were registered.
    """

    @abstractmethod
    def mark(self) -> object:
        """Return what stands for all work given to the device so far; for `store` and `load`.

        Thread: the engine's. Blocks: never.
        """

    @abstractmethod
    def store(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        """Copy blocks into slots, after the work before `mark`; return the slots that failed.

        Returns when the bytes are in the slots. Thread: a transfer thread.
        """

    @abstractmethod
    def load(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        """Copy slots into blocks, after the work before `mark`; return the slots that failed.

        Returns when the bytes are in the blocks. Thread: a transfer thread.
        """


class _GroupBlocks:
    """The tensors of one KV group in host memory: pieces of each block, and their place in it."""

    def __init__(self, views: Sequence[Array], blocks_per_chunk: int) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.block_bytes = 0
        self._pieces: list[tuple[Array, slice]] = []
        for view in views:
            end = self.block_bytes + view[0].nbytes
            self._pieces.append((view, slice(self.block_bytes, end)))
            self.block_bytes = end

    @classmethod
    def describe(
        cls, group: KVGroup, tensors: Sequence[Any], layout: TensorLayout, path: str
    ) -> "_GroupBlocks":
        """Make views of the tensors; none of a group that is not offloaded."""
        layers = [
            by_block(as_array(tensor), layout, f"{path}[{i}]")
            for i, tensor in enumerate(unique_tensors(tensors if group.is_offloaded else ()))
        ]
        return cls(stacked(layers), group.blocks_per_chunk)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk on this rank."""
        return self.block_bytes * self.blocks_per_chunk

    def read(self, block_id: int, place: Array) -> None:
        """Copy a block into its bytes in a slot."""
        for view, piece in self._pieces:
            block = view[block_id]
            place[piece].view(block.dtype).reshape(block.shape)[...] = block

    def write(self, block_id: int, place: Array) -> None:
        """Copy a block out of its bytes in a slot."""
        for view, piece in self._pieces:
            block = view[block_id]
            block[...] = place[piece].view(block.dtype).reshape(block.shape)


class HostCopier(Copier):
    """Plain copies between tensors and slots that are both in host memory.

    The work before a mark is over when the mark is taken: on a CPU the forward pass has run.
    """

    def __init__(
        self,
        slots: SlotView,
        config: SchedulerOffloadConfig,
        rank: int,
        tensors: Sequence[Sequence[Any]],
        layouts: Sequence[TensorLayout],
    ) -> None:
        """Describe the tensors.

        Args:
            slots: The primary's memory.
            config: The groups.
            rank: Whose share of the slots this copier uses.
            tensors: For each group, its layers' tensors, numpy or torch. Kept, not copied. Those
                of groups that are not offloaded are ignored.
            layouts: For each group, how its tensors hold blocks.

        Raises:
            ConfigError: A tensor does not fit its layout, or a chunk not its share of a slot.
        """
        self._slots = slots
        self._tensors = tensors
        self._groups = [
            _GroupBlocks.describe(*described, f"tensors[{i}]")
            for i, described in enumerate(zip(config.groups, tensors, layouts, strict=True))
        ]
        largest_bytes = max(group.chunk_bytes for group in self._groups)
        self._share = rank_share(slots, config, rank, largest_bytes)

    @override
    def mark(self) -> object:
        return None

    @override
    def store(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        for group_copies in copies:
            group = self._groups[group_copies.group_idx]
            self._clear_unnamed(group, group_copies)
            for block_id, place in self._places(group, group_copies):
                group.read(block_id, place)
        return frozenset()

    @override
    def load(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        failed: set[int] = set()
        for group_copies in copies:
            group = self._groups[group_copies.group_idx]
            failed.update(slot for slot in group_copies.slots if slot < 0)
            for block_id, place in self._places(group, group_copies):
                group.write(block_id, place)
        return frozenset(failed)

    def _places(self, group: _GroupBlocks, copies: BlockCopies) -> Iterator[tuple[int, Array]]:
        """Yield each block's id and its bytes in its slot."""
        size, rank_start = group.block_bytes, self._share.start
        for block_id, slot, part in zip(copies.block_ids, copies.slots, copies.parts, strict=True):
            if slot >= 0:
                start = rank_start + part * size
                yield block_id, np.frombuffer(self._slots[slot], np.uint8, size, start)

    def _clear_unnamed(self, group: _GroupBlocks, copies: BlockCopies) -> None:
        """Fill what a store leaves of its slots with zeros: equal keys promise equal bytes."""
        if len(copies.slots) == len(set(copies.slots)) * group.blocks_per_chunk:
            used, slots = group.chunk_bytes, set(copies.slots)
        else:
            named = Counter(copies.slots)
            used = 0
            slots = {slot for slot, num in named.items() if num < group.blocks_per_chunk}
        if used < len(self._share):
            for slot in slots:
                share = self._slots[slot][self._share.start + used : self._share.stop]
                np.frombuffer(share, np.uint8)[:] = 0


def unique_tensors(layers: Sequence[Any]) -> list[Any]:
    """Return the tensors, each memory one time: layers may share their keys and values."""
    seen: dict[object, Any] = {}
    for tensor in layers:
        if isinstance(tensor, np.ndarray):
            seen.setdefault((tensor.ctypes.data, tensor.shape, tensor.strides), tensor)
        else:
            seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), tensor)
    return list(seen.values())


def rank_share(
    slots: SlotView, config: SchedulerOffloadConfig, rank: int, needed_bytes: int
) -> range:
    """Return the bytes of each slot that belong to a rank.

    Raises:
        ConfigError: They do not hold the largest chunk.
    """
    num_shares = 1 if config.is_replicated else config.num_ranks
    if not 0 <= rank < config.num_ranks:
        raise ConfigError("rank", f"{rank} is not in 0..{config.num_ranks - 1}")
    share_bytes = slots.chunk_bytes // num_shares
    if slots.chunk_bytes % num_shares or share_bytes < needed_bytes:
        raise ConfigError(
            "chunk_bytes",
            f"a slot of {slots.chunk_bytes} bytes does not hold {num_shares} shares of "
            f"{needed_bytes} bytes; use SchedulerOffloadConfig.chunk_bytes",
        )
    first = 0 if config.is_replicated else rank * share_bytes
    return range(first, first + share_bytes)


def make_copier(
    slots: SlotView,
    config: SchedulerOffloadConfig,
    rank: int,
    tensors: Sequence[Sequence[Any]],
    layouts: Sequence[TensorLayout],
) -> Copier:
    """Return the copier for the memory that the tensors are in; arguments as for `HostCopier`."""
    return HostCopier(slots, config, rank, tensors, layouts)
