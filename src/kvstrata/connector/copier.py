"""Copy engine blocks into slots and back: the contract, and plain copies in host memory."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from kvstrata.connector.config import SchedulerOffloadConfig
from kvstrata.connector.layout import (
    Array,
    TensorLayout,
    as_array,
    describe_groups,
    device_of,
)
from kvstrata.connector.messages import BlockCopies
from kvstrata.core.errors import ConfigError
from kvstrata.core.memory import SlotView


class Copier(ABC):
    """Moves the bytes of one rank between its tensors and its share of each slot.

    In a slot's share the chunk's blocks follow one another, and in a block the group's layers, in
    the order in which they were registered.
    """

    @property
    def num_threads(self) -> int:
        """Transfer threads worth having: 1; or 2, where a load and a store may run together."""
        return 1

    @abstractmethod
    def mark(self) -> object:
        """Return what stands for all work given to the device so far; for `store` and `load`.

        Thread: the engine's. Blocks: never.
        """

    @abstractmethod
    def store(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        """Copy blocks into slots, after the work before `mark`; return the slots that failed.

        Returns when the bytes are in the slots. Whatever happens, nothing is copied any more once
        the call is over. Thread: a transfer thread, one for all stores.

        Raises:
            Exception: The job has failed as a whole.
        """

    @abstractmethod
    def load(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        """Copy slots into blocks, after the work before `mark`; return the slots that failed.

        Returns when the bytes are in the blocks. Whatever happens, nothing is copied any more once
        the call is over. Thread: a transfer thread, one for all loads.

        Raises:
            Exception: The job has failed as a whole.
        """

    def close(self) -> None:
        """Give back what was taken of the device; no copy runs or is asked for any more."""
        return


class SlotCopier(Copier):
    """What copiers have in common: where blocks are in the tensors, and where in the slots."""

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
        self._groups = describe_groups(config, tensors, layouts)
        largest_bytes = max(group.chunk_bytes for group in self._groups)
        self._share = rank_share(slots, config, rank, largest_bytes)

    def _place(self, slot: int, start: int, num_bytes: int) -> memoryview:
        """Return bytes of this rank's share of a slot."""
        start += self._share.start
        return self._slots[slot][start : start + num_bytes]

    def _clear_unnamed(self, copies: BlockCopies) -> None:
        """Fill what a store leaves of its slots with zeros: equal keys promise equal bytes."""
        group = self._groups[copies.group_idx]
        if len(copies.slots) == len(set(copies.slots)) * group.blocks_per_chunk:
            used, slots = group.chunk_bytes, set(copies.slots)
        else:
            named = Counter(copies.slots)
            used = 0
            slots = {slot for slot, num in named.items() if num < group.blocks_per_chunk}
        if used < len(self._share):
            for slot in slots:
                np.frombuffer(self._place(slot, used, len(self._share) - used), np.uint8)[:] = 0


class HostCopier(SlotCopier):
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
        """Describe the tensors: as for every `SlotCopier`.

        Raises:
            ConfigError: Also if they are not in host memory.
        """
        if (device := common_device(config, tensors)) != "cpu":
            raise ConfigError("tensors", f"are on {device}, not in host memory")
        super().__init__(slots, config, rank, tensors, layouts)
        self._pieces = [
            [(as_array(part.elements), part.columns) for part in group.parts]
            for group in self._groups
        ]

    @override
    def mark(self) -> object:
        return None

    @override
    def store(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        for group_copies in copies:
            self._clear_unnamed(group_copies)
            pieces = self._pieces[group_copies.group_idx]
            for block_id, place in self._places(group_copies):
                for view, columns in pieces:
                    block = view[block_id]
                    place[columns].view(block.dtype).reshape(block.shape)[...] = block
        return frozenset()

    @override
    def load(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        for group_copies in copies:
            pieces = self._pieces[group_copies.group_idx]
            for block_id, place in self._places(group_copies):
                for view, columns in pieces:
                    block = view[block_id]
                    block[...] = place[columns].view(block.dtype).reshape(block.shape)
        return gone_slots(copies)

    def _places(self, copies: BlockCopies) -> Iterator[tuple[int, Array]]:
        """Yield each block's id and its bytes in its slot."""
        size = self._groups[copies.group_idx].block_bytes
        for block_id, slot, part in zip(copies.block_ids, copies.slots, copies.parts, strict=True):
            if slot >= 0:
                yield block_id, np.frombuffer(self._place(slot, part * size, size), np.uint8)


def gone_slots(copies: Sequence[BlockCopies]) -> frozenset[int]:
    """Return the slots that stand for chunks that are gone."""
    return frozenset(slot for group_copies in copies for slot in group_copies.slots if slot < 0)


def block_bytes_of(
    config: SchedulerOffloadConfig,
    tensors: Sequence[Sequence[Any]],
    layouts: Sequence[TensorLayout],
) -> list[int]:
    """Return the bytes of one block of each group; 0 where it is not offloaded.

    For engines that have their tensors before there are slots: what `make_copier` would refuse of
    the tensors is refused here.

    Raises:
        ConfigError: As `make_copier`.
    """
    _supported_device(config, tensors)
    return [group.block_bytes for group in describe_groups(config, tensors, layouts)]


def common_device(config: SchedulerOffloadConfig, tensors: Sequence[Sequence[Any]]) -> str:
    """Return what memory the tensors of all offloaded groups are in.

    Raises:
        ConfigError: They are in more than one.
    """
    groups = zip(config.groups, tensors, strict=True)
    devices = {device_of(t) for group, layers in groups if group.is_offloaded for t in layers}
    if len(devices) > 1:
        raise ConfigError("tensors", f"are on several devices: {', '.join(sorted(devices))}")
    return devices.pop() if devices else "cpu"


def _supported_device(config: SchedulerOffloadConfig, tensors: Sequence[Sequence[Any]]) -> str:
    device = common_device(config, tensors)
    if device != "cpu" and not device.startswith("cuda"):
        raise ConfigError("tensors", f"are on {device}; only cpu and cuda are supported")
    return device


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
    """Return the copier for the memory that the tensors are in; arguments as for `SlotCopier`.

    Raises:
        ConfigError: As `SlotCopier`, or they are on a device that is not supported.
    """
    device = _supported_device(config, tensors)
    if device == "cpu":
        return HostCopier(slots, config, rank, tensors, layouts)
    # Here, since it needs torch.
    from kvstrata.connector.cuda_device import CudaDevice  # noqa: PLC0415
    from kvstrata.connector.device_copier import DeviceCopier  # noqa: PLC0415

    return DeviceCopier(slots, config, rank, tensors, layouts, device=CudaDevice(device))
