"""An accelerator in host memory that does nothing before it has to, and keeps only due order.

What was enqueued runs when somebody waits for an event behind it, and then just what that event and
the events that it waits for ask for. A copy that lacks a wait so reads what is not there yet, or is
overwritten later. With a source of chance, streams also run ahead at random.
"""

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
from typing_extensions import override

from kvstrata.connector.device import Device, Event, Stream, StreamPriority
from kvstrata.connector.layout import Array, GroupLayout, as_array, merged

Blocks = tuple[int, list[tuple[Array, slice]]]


class FakeEvent(Event):
    """A number of operations of a stream."""

    def __init__(self, stream: "FakeStream", position: int) -> None:
        self.stream = stream
        self.position = position

    @override
    def wait(self) -> None:
        self.stream.run_to(self.position)


class FakeStream(Stream):
    """Operations in order, run late."""

    def __init__(self, device: "FakeDevice", name: str) -> None:
        self.device = device
        self.name = name
        self.queue: list[Callable[[], None]] = []
        self.num_done = 0
        self._lock = threading.RLock()

    def enqueue(self, kind: str, operation: Callable[[], None]) -> None:
        """Take in an operation; the device may refuse it, or fail when it gets there."""
        self.device.refuse(kind)
        fault = self.device.in_flight.pop(kind, None)
        self.queue.append(operation if fault is None else self.device.failing(fault))
        self.device.log.append((self.name, kind))
        self.device.run_ahead()

    def run_to(self, position: int) -> None:
        if self.num_done >= position:
            return
        with self._lock:
            while self.num_done < position:
                operation = self.queue[self.num_done]
                try:
                    operation()
                except RuntimeError:
                    self.num_done = len(self.queue)  # what was enqueued behind it never runs
                    raise
                self.num_done += 1

    @override
    def wait_for(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.enqueue("wait_for", event.wait)

    @override
    def record(self) -> Event:
        self.device.refuse("record")
        return FakeEvent(self, len(self.queue))

    @override
    def gather(self, blocks: Blocks, block_ids: Sequence[int], staging: Array) -> None:
        block_bytes, parts = blocks
        ids = list(block_ids)

        def run() -> None:
            rows = staging[: len(ids) * block_bytes].reshape(len(ids), block_bytes)
            for view, columns in parts:
                rows[:, columns] = view[ids].reshape(len(ids), -1).view(np.uint8)

        self.enqueue("gather", run)

    @override
    def scatter(self, staging: Array, blocks: Blocks, block_ids: Sequence[int]) -> None:
        block_bytes, parts = blocks
        ids = list(block_ids)

        def run() -> None:
            rows = staging[: len(ids) * block_bytes].reshape(len(ids), block_bytes)
            for view, columns in parts:
                wide = np.ascontiguousarray(rows[:, columns]).view(view.dtype)
                view[ids] = wide.reshape(len(ids), *view.shape[1:])

        self.enqueue("scatter", run)

    @override
    def to_host(self, staging: Array, start: int, place: memoryview) -> None:
        target = self.device.pinned(place)

        def run() -> None:
            target[:] = staging[start : start + len(target)]

        self.enqueue("to_host", run)

    @override
    def to_device(self, place: memoryview, staging: Array, start: int) -> None:
        source = self.device.pinned(place)

        def run() -> None:
            staging[start : start + len(source)] = source

        self.enqueue("to_device", run)


class FakeDevice(Device):
    """Streams over numpy arrays; `compute` is the engine's.

    Attributes:
        refused: How many more calls of each kind work before one is refused.
        in_flight: What the next operation of a kind dies of when it runs.
        num_registered_max: Registrations that work.
        registered: Address and size of what is registered.
        log: Stream and kind of everything that was enqueued.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng
        self.compute = FakeStream(self, "compute")
        self.streams = [self.compute]
        self.refused: dict[str, int] = {}
        self.in_flight: dict[str, str] = {}
        self.num_registered_max = 10**9
        self.registered: dict[int, int] = {}
        self.buffers: list[Array] = []
        self.log: list[tuple[str, str]] = []

    def refuse(self, kind: str) -> None:
        """Count a call, and refuse it where that was asked for."""
        if kind in self.refused:
            self.refused[kind] -= 1
            if self.refused[kind] < 0:
                del self.refused[kind]
                raise RuntimeError(f"{kind} refused")

    def failing(self, fault: str) -> Callable[[], None]:
        """Return an operation that fails one time."""
        faults = [fault]

        def run() -> None:
            if faults:
                raise RuntimeError(faults.pop())

        return run

    def run_ahead(self) -> None:
        """Let some streams run on, where chance says so."""
        if self.rng is not None:
            for stream in self.rng.sample(self.streams, self.rng.randint(0, len(self.streams))):
                stream.run_to(self.rng.randint(stream.num_done, len(stream.queue)))

    def run_all(self) -> None:
        """Let every stream finish."""
        for stream in self.streams:
            stream.run_to(len(stream.queue))

    def num_enqueued(self, kind: str) -> int:
        return sum(logged == kind for _, logged in self.log)

    def pinned(self, place: memoryview) -> Array:
        """Return memory as bytes; copies that are asynchronous need it pinned in one piece."""
        bytes_ = np.frombuffer(place, np.uint8)
        start, end = bytes_.ctypes.data, bytes_.ctypes.data + len(bytes_)
        known = [*self.registered.items(), *((b.ctypes.data, len(b)) for b in self.buffers)]
        assert any(first <= start and end <= first + size for first, size in known), "not pinned"
        return bytes_

    @override
    def mark(self) -> Event:
        return self.compute.record()

    @override
    def new_stream(self, priority: StreamPriority) -> FakeStream:
        self.streams.append(FakeStream(self, priority.value))
        return self.streams[-1]

    @override
    def view(self, group: GroupLayout) -> Blocks:
        parts = [
            (as_array(merged(part.elements, (part.columns.start, group.block_bytes))), part.columns)
            for part in group.parts
        ]
        return group.block_bytes, parts

    @override
    def new_staging(self, num_bytes: int) -> Array:
        self.refuse("new_staging")
        return np.full(num_bytes, 0xDD, np.uint8)

    @override
    def new_pinned(self, num_bytes: int) -> memoryview:
        self.refuse("new_pinned")
        self.buffers.append(np.full(num_bytes, 0xEE, np.uint8))
        return memoryview(self.buffers[-1].data)

    @override
    def register(self, address: int, num_bytes: int) -> None:
        if len(self.registered) >= self.num_registered_max:
            raise RuntimeError("out of lockable memory")
        assert address not in self.registered
        self.registered[address] = num_bytes

    @override
    def unregister(self, address: int) -> None:
        del self.registered[address]
        self.refuse("unregister")
