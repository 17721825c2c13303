"""What a copier asks of an accelerator: streams, events, staging memory, registered host memory."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from kvstrata.connector.layout import GroupLayout


class StreamPriority(Enum):
    """Which of two streams the device serves first."""

    HIGH = "high"
    LOW = "low"


class Event(Protocol):
    """A point in a stream: over when all work that was enqueued before it is."""

    def wait(self) -> None:
        """Return when the event is over. Blocks: the calling thread, without the interpreter lock.

        Raises:
            RuntimeError: Work on the device failed.
        """
        ...


class Stream(Protocol):
    """Work that the device does in the order in which it was enqueued, and beside other streams.

    No call waits for the device. Memory that is named stays as it is, and is not touched by anyone
    else, until an event recorded behind the call is over. Staging memory and `blocks` are the
    device's own words. Thread: one, any.

    Raises:
        RuntimeError: By every call: the device refused it, or reports that earlier work failed.
    """

    def wait_for(self, event: Event) -> None:
        """Let what is enqueued from now on run after an event of any stream."""
        ...

    def record(self) -> Event:
        """Return the event that stands for all that is enqueued so far."""
        ...

    def gather(self, blocks: Any, block_ids: Sequence[int], staging: Any) -> None:  # noqa: ANN401
        """Copy block `block_ids[i]` to bytes `i * block_bytes` and on of the staging memory."""
        ...

    def scatter(self, staging: Any, blocks: Any, block_ids: Sequence[int]) -> None:  # noqa: ANN401
        """Copy the other way; no id occurs twice."""
        ...

    def to_host(self, staging: Any, start: int, place: memoryview) -> None:  # noqa: ANN401
        """Copy from the staging memory, `start` and on, to pinned host memory."""
        ...

    def to_device(self, place: memoryview, staging: Any, start: int) -> None:  # noqa: ANN401
        """Copy the other way."""
        ...


class Device(Protocol):
    """One accelerator.

    Raises:
        RuntimeError: By every call but `view`: the device refused it.
    """

    def mark(self) -> Event:
        """Return an event behind all that the calling thread gave to its stream of computation."""
        ...

    def new_stream(self, priority: StreamPriority) -> Stream:
        """Make a stream."""
        ...

    def view(self, group: GroupLayout) -> Any:  # noqa: ANN401
        """Make what `gather` and `scatter` take for the blocks of a group. Enqueues nothing.

        Raises:
            ConfigError: The device can't copy blocks of this kind.
        """
        ...

    def new_staging(self, num_bytes: int) -> Any:  # noqa: ANN401
        """Take memory of the device; given back when it is dropped."""
        ...

    def new_pinned(self, num_bytes: int) -> memoryview:
        """Take pinned host memory; given back when all views of it are dropped."""
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory that exists. All of it is resident from then on. Thread: any."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...
