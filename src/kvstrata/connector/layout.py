"""Where the blocks are in an engine's tensors: described by the engine, never guessed."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.core.errors import ConfigError

Array = npt.NDArray[Any]


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


def by_block(tensor: Array, layout: TensorLayout, path: str) -> Array:
    """Return a view of the tensor whose first axis counts blocks; no byte is copied.

    Raises:
        ConfigError: As `block_axis_of`.
    """
    axis = block_axis_of(tensor.shape, layout, path)
    view = np.moveaxis(tensor, axis, 0)
    folded = view.reshape(layout.num_blocks, -1, *view.shape[1:])
    assert np.may_share_memory(folded, tensor)  # splitting one axis never copies
    return folded


def as_array(tensor: Any) -> Array:  # noqa: ANN401
    """Return a numpy view of a tensor in host memory: of numpy, or of torch whatever its dtype.

    The elements are unsigned integers as wide as the tensor's. The caller keeps the tensor alive.

    Raises:
        ConfigError: The tensor is on a device or has elements of an odd width.
    """
    if isinstance(tensor, np.ndarray):
        item_bytes = tensor.dtype.itemsize
        shape, strides = tensor.shape, tensor.strides
        address = tensor.ctypes.data
    else:
        if tensor.device.type != "cpu":
            raise ConfigError("", f"a tensor on {tensor.device} is not in host memory")
        item_bytes = tensor.element_size()
        shape = tuple(tensor.shape)
        strides = tuple(stride * item_bytes for stride in tensor.stride())
        address = tensor.data_ptr()
    if item_bytes not in {1, 2, 4, 8}:
        raise ConfigError("", f"elements of {item_bytes} bytes are not supported")
    if any(stride < 0 for stride in strides):
        raise ConfigError("", f"negative strides {strides} are not supported")
    return _view_at(address, shape, strides, np.dtype(f"u{item_bytes}"))


def _view_at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    num_bytes = dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    buffer = (ctypes.c_byte * num_bytes).from_address(address)
    return np.ndarray(shape, dtype, memoryview(buffer), 0, strides)


def stacked(layers: Sequence[Array]) -> list[Array]:
    """Return views that hold one or more layers each: axis 0 counts blocks, axis 1 layers.

    Layers that are equally far apart in memory come together, so that one copy moves a block of
    all of them: engines make such layers when they cut one allocation.

    Args:
        layers: From `by_block`; their order is kept.
    """
    views: list[Array] = []
    first = 0
    while first < len(layers):
        head = layers[first]
        start = head.ctypes.data
        step = layers[first + 1].ctypes.data - start if first + 1 < len(layers) else 0
        num = 1
        while (
            step > 0
            and first + num < len(layers)
            and layers[first + num].ctypes.data == start + num * step
            and layers[first + num].shape == head.shape
            and layers[first + num].strides == head.strides
            and layers[first + num].dtype == head.dtype
        ):
            num += 1
        shape, strides = (num, *head.shape), (step, *head.strides)
        views.append(np.moveaxis(_view_at(start, shape, strides, head.dtype), 0, 1))
        first += num
    return views
