"""The device of a `DeviceCopier` as torch's CUDA: the only module that calls it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from kvstrata.connector.device import Event, StreamPriority
from kvstrata.connector.layout import Elements, GroupLayout, merged
from kvstrata.core.errors import ConfigError

# Signed, since torch's copies know few unsigned types; the bits are the same.
DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable


class TorchBlocks(NamedTuple):
    """Blocks of a group.

    Attributes:
        block_bytes: Of one block.
        parts: Views whose axis 0 counts blocks, and the bytes of a block that each makes.
    """

    block_bytes: int
    parts: Sequence[tuple[Any, slice]]


def view_of(group: GroupLayout) -> TorchBlocks:
    """Make tensors of integers over the memory of a group's tensors; no byte is copied.

    Raises:
        ConfigError: Layers of different elements leave some of them unaligned in a block.
    """
    parts = []
    for elements, columns, owner in group.parts:
        wide = merged(elements, (columns.start, group.block_bytes))
        if columns.start % wide.item_bytes or group.block_bytes % wide.item_bytes:
            raise ConfigError(
                "tensors",
                f"elements of {wide.item_bytes} bytes begin at byte {columns.start} of a block of "
                f"{group.block_bytes} bytes: not aligned",
            )
        parts.append((_tensor_at(wide, owner), columns))
    return TorchBlocks(group.block_bytes, parts)


def _tensor_at(elements: Elements, owner: Any) -> Any:  # noqa: ANN401
    storage = owner.untyped_storage()
    offset, rest = divmod(elements.address - storage.data_ptr(), elements.item_bytes)
    if rest:
        raise ConfigError("tensors", "a tensor begins unaligned in its memory")
    assert elements.allocation == storage.data_ptr()  # beyond its end, torch would make it larger
    strides = [stride // elements.item_bytes for stride in elements.strides]
    empty = torch.empty(0, dtype=DTYPES[elements.item_bytes], device=owner.device)
    return empty.set_(storage, offset, elements.shape, strides)


def staged(blocks: TorchBlocks, staging: Any, num: int) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    """Yield each view of the blocks with the first `num` blocks' bytes of the staging memory."""
    rows = staging[: num * blocks.block_bytes].view(num, blocks.block_bytes)
    for view, columns in blocks.parts:
        yield view, rows[:, columns].view(view.dtype).view(num, *view.shape[1:])


def gather(blocks: TorchBlocks, index: Any, staging: Any) -> None:  # noqa: ANN401
    """Copy blocks into staging memory on the current stream."""
    for view, part in staged(blocks, staging, len(index)):
        torch.index_select(view, 0, index, out=part)


def scatter(staging: Any, blocks: TorchBlocks, index: Any) -> None:  # noqa: ANN401
    """Copy staging memory into blocks on the current stream."""
    for view, part in staged(blocks, staging, len(index)):
        view.index_copy_(0, index, part)


class CudaEvent:
    """An event of CUDA."""

    def __init__(self, event: Any) -> None:  # noqa: ANN401
        self.event = event

    def wait(self) -> None:
        """Sleep until the event is over; torch gives the interpreter lock back meanwhile."""
        self.event.synchronize()


class CudaStream:
    """A stream of CUDA."""

    def __init__(self, device: Any, priority: StreamPriority) -> None:  # noqa: ANN401
        self._device = device
        with torch.cuda.device(device):  # a new thread would set up the first device, too
            least, greatest = torch.cuda.Stream.priority_range()
            number = greatest if priority is StreamPriority.HIGH else least
            self._stream = torch.cuda.Stream(device, priority=number)

    @contextmanager
    def _current(self) -> Iterator[None]:
        # A thread of ours starts out on the first device and in no mode; an engine's tensors may be
        # made in inference mode, and can then be written only in it.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield

    def wait_for(self, event: Event) -> None:
        """See `Stream`."""
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def record(self) -> Event:
        """See `Stream`."""
        return new_event(self._stream)

    def _index(self, block_ids: Sequence[int]) -> Any:  # noqa: ANN401
        # From pinned memory, which torch keeps until the copy is over; a pageable one would wait.
        ids = torch.tensor(block_ids, dtype=torch.int64).pin_memory()
        return ids.to(self._device, non_blocking=True)

    def gather(self, blocks: TorchBlocks, block_ids: Sequence[int], staging: Any) -> None:  # noqa: ANN401
        """See `Stream`."""
        with self._current():
            gather(blocks, self._index(block_ids), staging)

    def scatter(self, staging: Any, blocks: TorchBlocks, block_ids: Sequence[int]) -> None:  # noqa: ANN401
        """See `Stream`."""
        with self._current():
            scatter(staging, blocks, self._index(block_ids))

    def to_host(self, staging: Any, start: int, place: memoryview) -> None:  # noqa: ANN401
        """See `Stream`."""
        with self._current():
            source = staging[start : start + len(place)]
            torch.frombuffer(place, dtype=torch.uint8).copy_(source, non_blocking=True)

    def to_device(self, place: memoryview, staging: Any, start: int) -> None:  # noqa: ANN401
        """See `Stream`."""
        with self._current():
            source = torch.frombuffer(place, dtype=torch.uint8)
            staging[start : start + len(place)].copy_(source, non_blocking=True)


class CudaDevice:
    """One CUDA device."""

    def __init__(self, name: str) -> None:
        """Name it, such as `cuda:0`; nothing is taken of it yet."""
        self._device = torch.device(name)

    def mark(self) -> Event:
        """See `Device`: the stream of computation is the calling thread's current one."""
        return new_event(torch.cuda.current_stream(self._device))

    def new_stream(self, priority: StreamPriority) -> CudaStream:
        """See `Device`."""
        return CudaStream(self._device, priority)

    def view(self, group: GroupLayout) -> TorchBlocks:
        """See `Device`."""
        return view_of(group)

    def new_staging(self, num_bytes: int) -> Any:  # noqa: ANN401
        """See `Device`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def new_pinned(self, num_bytes: int) -> memoryview:
        """See `Device`."""
        return memoryview(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy())

    def register(self, address: int, num_bytes: int) -> None:
        """See `Device`."""
        with torch.cuda.device(self._device):
            cudart = torch.cuda.cudart()
            _check(cudart.cudaHostRegister(address, num_bytes, REGISTER_PORTABLE), "register")

    def unregister(self, address: int) -> None:
        """See `Device`."""
        with torch.cuda.device(self._device):
            _check(torch.cuda.cudart().cudaHostUnregister(address), "unregister")


def new_event(stream: Any) -> CudaEvent:  # noqa: ANN401
    """Record an event whose `wait` lets the thread sleep: without `blocking` it would spin."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return CudaEvent(event)


def _check(code: Any, what: str) -> None:  # noqa: ANN401
    if int(code):
        raise RuntimeError(f"could not {what} host memory: CUDA error {int(code)}")
