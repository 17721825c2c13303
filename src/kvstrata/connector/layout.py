"""Where the blocks are in an engine's tensors: described by the engine, never guessed."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata.connector.config import KVGroup, SchedulerOffloadConfig
from kvstrata.core.errors import ConfigError

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Elements:
    """Where the elements of a tensor are, in no library's words.

    Attributes:
        address: Of the first element.
        shape: Elements along each axis.
        strides: Bytes from one element to the next along each axis.
        item_bytes: Bytes of one element; what they mean does not matter here.
        allocation: Start of the memory that a tensor of torch was cut from, beyond which no view
            may reach; 0 for numpy, whose views may.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    allocation: int = 0


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one layer's tensor holds the blocks of its group.

    Attributes:
        num_blocks: Blocks in the tensor, as the block tables count them.
        block_axis: The axis that counts blocks. Its length is `num_blocks`, or a multiple of it
            where the kernel's blocks are smaller: then each block is that many neighbours. None:
            the one axis of length `num_blocks`; refused where there are several.
    """

    num_blocks: int
    block_axis: int | None = None


def block_axis_of(shape: tuple[int, ...], layout: TensorLayout, path: str) -> int:
    """Return the axis that counts blocks.

    Raises:
        ConfigError: The shape does not fit the layout, or fits it in more than one way.
    """
    axis = layout.block_axis
    if axis is None:
        fitting = [i for i, length in enumerate(shape) if length == layout.num_blocks]
        if len(fitting) != 1:
            found = f"axes {fitting} have" if fitting else "no axis has"
            raise ConfigError(
                path,
                f"shape {shape} is ambiguous: {found} the length of {layout.num_blocks} blocks; "
                "give TensorLayout.block_axis",
            )
        return fitting[0]
    if not 0 <= axis < len(shape):
        raise ConfigError(path, f"block_axis {axis} is not an axis of shape {shape}")
    if layout.num_blocks < 1 or shape[axis] < 1 or shape[axis] % layout.num_blocks:
        raise ConfigError(
            path,
            f"axis {axis} of shape {shape} is not a multiple of {layout.num_blocks} blocks",
        )
    return axis


def device_of(tensor: Any) -> str:  # noqa: ANN401
    """Return what memory a tensor of numpy or torch is in: `cpu`, `cuda:0` and so on."""
    return "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device)


def described(tensor: Any, path: str) -> Elements:  # noqa: ANN401
    """Return where the elements of a tensor of numpy or torch are.

    Raises:
        ConfigError: The elements are of an odd width, or run backwards.
    """
    if isinstance(tensor, np.ndarray):
        item_bytes = tensor.dtype.itemsize
        shape, strides = tensor.shape, tensor.strides
        address, allocation = tensor.ctypes.data, 0
    else:
        item_bytes = tensor.element_size()
        shape = tuple(tensor.shape)
        strides = tuple(stride * item_bytes for stride in tensor.stride())
        address = tensor.data_ptr()
        allocation = tensor.untyped_storage().data_ptr()
    if item_bytes not in {1, 2, 4, 8}:
        raise ConfigError(path, f"elements of {item_bytes} bytes are not supported")
    if any(stride < 0 for stride in strides):
        raise ConfigError(path, f"negative strides {strides} are not supported")
    return Elements(address, shape, strides, item_bytes, allocation)


def by_block(elements: Elements, layout: TensorLayout, path: str) -> Elements:
    """Return the same elements with an axis before all others that counts blocks.

    Raises:
        ConfigError: As `block_axis_of`.
    """
    axis = block_axis_of(elements.shape, layout, path)
    ratio = elements.shape[axis] // layout.num_blocks
    stride = elements.strides[axis]
    return replace(
        elements,
        shape=(layout.num_blocks, ratio, *elements.shape[:axis], *elements.shape[axis + 1 :]),
        strides=(
            stride * ratio, stride, *elements.strides[:axis], *elements.strides[axis + 1 :]
        ),
    )  # fmt: skip


def stacked(layers: Sequence[Elements]) -> list[tuple[int, Elements]]:
    """Return views that hold one or more layers each: axis 0 counts blocks, axis 1 layers.

    Layers that are equally far apart in memory come together, so that one copy moves a block of
    all of them: engines make such layers when they cut one allocation.

    Args:
        layers: From `by_block`; their order is kept.

    Returns:
        For each view, the index of its first layer, and the view.
    """
    views: list[tuple[int, Elements]] = []
    first = 0
    while first < len(layers):
        head = layers[first]
        step = layers[first + 1].address - head.address if first + 1 < len(layers) else 0
        num = 1
        while (
            step > 0
            and first + num < len(layers)
            and layers[first + num] == replace(head, address=head.address + num * step)
        ):
            num += 1
        shape = (head.shape[0], num, *head.shape[1:])
        strides = (head.strides[0], step, *head.strides[1:])
        views.append((first, replace(head, shape=shape, strides=strides)))
        first += num
    return views


def merged(elements: Elements, aligned_to: Sequence[int]) -> Elements:
    """Return the same bytes with as few axes behind the first, and as wide elements, as can be.

    Args:
        elements: Axis 0 stays as it is.
        aligned_to: The wider element divides each of these.
    """
    shape, strides = [elements.shape[0]], [elements.strides[0]]
    for length, stride in zip(elements.shape[1:], elements.strides[1:], strict=True):
        if length == 1:
            continue
        if len(shape) > 1 and strides[-1] == length * stride:
            shape[-1] *= length
            strides[-1] = stride
        else:
            shape.append(length)
            strides.append(stride)
    item_bytes = elements.item_bytes
    if len(shape) == 1:
        shape.append(1)
        strides.append(item_bytes)
    if strides[-1] == item_bytes:
        row_bytes = shape[-1] * item_bytes
        wide = math.gcd(8, elements.address, row_bytes, *strides[:-1], *aligned_to)
        if wide > item_bytes:
            shape[-1], strides[-1], item_bytes = row_bytes // wide, wide, wide
    return replace(elements, shape=tuple(shape), strides=tuple(strides), item_bytes=item_bytes)


class Part(NamedTuple):
    """Some layers of a group.

    Attributes:
        elements: Axis 0 counts blocks.
        columns: The bytes of a block that they make.
        owner: A tensor that was cut from the same memory.
    """

    elements: Elements
    columns: slice
    owner: Any


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The tensors of one KV group as blocks of bytes; no parts if the group is not offloaded.

    Attributes:
        num_blocks: Blocks in the tensors.
        blocks_per_chunk: As the group says.
        block_bytes: Bytes of one block, all layers together.
        parts: What a block is made of, in the order of its bytes.
    """

    num_blocks: int
    blocks_per_chunk: int
    block_bytes: int
    parts: Sequence[Part]

    @classmethod
    def describe(
        cls, group: KVGroup, tensors: Sequence[Any], layout: TensorLayout, path: str
    ) -> "GroupLayout":
        """Find the blocks in the tensors of a group, each memory one time.

        Raises:
            ConfigError: A tensor does not fit its layout.
        """
        owners = unique_tensors(tensors if group.is_offloaded else ())
        layers = [
            by_block(described(owner, f"{path}[{i}]"), layout, f"{path}[{i}]")
            for i, owner in enumerate(owners)
        ]
        parts: list[Part] = []
        end = 0
        for first, view in stacked(layers):
            start, end = end, end + math.prod(view.shape[1:]) * view.item_bytes
            parts.append(Part(view, slice(start, end), owners[first]))
        return cls(layout.num_blocks, group.blocks_per_chunk, end, parts)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk on this rank."""
        return self.block_bytes * self.blocks_per_chunk


def describe_groups(
    config: SchedulerOffloadConfig,
    tensors: Sequence[Sequence[Any]],
    layouts: Sequence[TensorLayout],
) -> list[GroupLayout]:
    """Find the blocks of every group; arguments as for `make_copier`.

    Raises:
        ConfigError: A tensor does not fit its layout; the text names it.
    """
    return [
        GroupLayout.describe(*group, f"tensors[{i}]")
        for i, group in enumerate(zip(config.groups, tensors, layouts, strict=True))
    ]


def unique_tensors(layers: Sequence[Any]) -> list[Any]:
    """Return the tensors, each memory one time: layers may share their keys and values."""
    seen: dict[object, Any] = {}
    for tensor in layers:
        if isinstance(tensor, np.ndarray):
            seen.setdefault((tensor.ctypes.data, tensor.shape, tensor.strides), tensor)
        else:
            seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), tensor)
    return list(seen.values())


def as_array(elements: Elements) -> Array:
    """Return unsigned integers over elements in host memory; the caller keeps their owner alive."""
    num_bytes = elements.item_bytes + sum(
        (n - 1) * s for n, s in zip(elements.shape, elements.strides, strict=True)
    )
    buffer = (ctypes.c_byte * num_bytes).from_address(elements.address)
    dtype = np.dtype(f"u{elements.item_bytes}")
    return np.ndarray(elements.shape, dtype, memoryview(buffer), 0, elements.strides)
