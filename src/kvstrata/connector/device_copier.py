"""Copies between blocks on an accelerator and slots: what is asynchronous, and what waits for what.

All of a job is enqueued on one stream per direction, in this order: wait for the mark, then, piece
by piece, gather blocks into staging memory and copy that to the slots (a load: the other way). The
transfer thread then waits for the job's last event; nobody else waits for the device.

- A store never reads a block before the step that filled it is over: the mark is an event that the
  engine's thread recorded behind that step, and the stream waits for it.
- A load never writes a block that an earlier step still uses: the same.
- A step never reads a block that a load has not filled: the job is reported only once its last
  event is over, and the request is not scheduled before.
- A job that fails in the middle waits for what it has enqueued: nothing is written behind its
  result, when its slots and blocks may be others'.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from typing_extensions import override

from kvstrata.connector.config import SchedulerOffloadConfig
from kvstrata.connector.copier import SlotCopier, gone_slots
from kvstrata.connector.device import Device, Event, Stream, StreamPriority
from kvstrata.connector.layout import GroupLayout, TensorLayout
from kvstrata.connector.messages import BlockCopies
from kvstrata.connector.pinning import PinnedRows
from kvstrata.core.errors import ContractError, OffloadError
from kvstrata.core.memory import SlotView

STAGING_BYTES: Final = 32 << 20


class Run(NamedTuple):
    """Bytes that follow one another, both in the staging memory, from `start`, and in a slot."""

    slot: int
    start: int
    place: memoryview


class Piece(NamedTuple):
    """What goes through the staging memory at a time: blocks of one group, and where they go."""

    group_idx: int
    block_ids: list[int]
    runs: list[Run]

    @property
    def num_bytes(self) -> int:
        """Bytes of the staging memory that are used."""
        return self.runs[-1].start + len(self.runs[-1].place)


class Lane:
    """One direction: its stream, and the memory that its copies pass through.

    Rows that are not pinned pass through two pieces of pinned host memory in turn: the device
    copies one while the host copies the other.
    """

    def __init__(self, device: Device, priority: StreamPriority, staging_bytes: int) -> None:
        """Take a stream and staging memory; host memory only when it is first asked for."""
        self._device = device
        self._staging_bytes = staging_bytes
        self.stream: Stream = device.new_stream(priority)
        self.staging: Any = device.new_staging(staging_bytes)
        self._turn = 0
        self._lent: list[tuple[Event, list[Run]] | None] = [None, None]

    @cached_property
    def _halves(self) -> tuple[memoryview, memoryview]:
        both = self._device.new_pinned(2 * self._staging_bytes)
        return both[: self._staging_bytes], both[self._staging_bytes :]

    def take_half(self) -> memoryview:
        """Return the half that was lent first, once the device is done with it."""
        self._turn ^= 1
        self._settle(self._turn)
        return self._halves[self._turn]

    def lend_half(self, to_copy: list[Run]) -> None:
        """Leave the half that was taken to the device.

        Args:
            to_copy: What goes from the half to slots afterwards.
        """
        self._lent[self._turn] = (self.stream.record(), to_copy)

    def settle_halves(self) -> None:
        """Return when the device is done with both halves, and what they hold is in the slots."""
        for turn in (self._turn ^ 1, self._turn):
            self._settle(turn)

    def _settle(self, turn: int) -> None:
        lent, self._lent[turn] = self._lent[turn], None
        if lent is not None:
            event, runs = lent
            event.wait()
            for run in runs:
                _copy(run.place, self._halves[turn][run.start : run.start + len(run.place)])

    @contextmanager
    def job(self, mark: object) -> Iterator[None]:
        """Enqueue a job behind a mark; leave when the device is done with it, failed or not.

        Raises:
            OffloadError: There is no mark, since the device had failed by then.
        """
        if isinstance(mark, RuntimeError):
            raise OffloadError("the device failed before this job was started") from mark
        self.stream.wait_for(mark)  # type: ignore[arg-type]  # made by `Device.mark`
        try:
            yield
        finally:
            self._lent = [None, None]
            self.stream.record().wait()


class DeviceCopier(SlotCopier):
    """Copies between tensors on an accelerator and slots in host memory.

    Errors of the device fail the job in which they show. Memory of the device is taken when the
    first job of a direction runs; where there is none, that job fails and the next one asks again.
    """

    def __init__(
        self,
        slots: SlotView,
        config: SchedulerOffloadConfig,
        rank: int,
        tensors: Sequence[Sequence[Any]],
        layouts: Sequence[TensorLayout],
        *,
        device: Device,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Describe the tensors and begin to pin the slots; the rest as for every `SlotCopier`.

        Args:
            slots: Rows of one region; unpinned by `close`.
            config: The groups.
            rank: Whose share of the slots this copier uses.
            tensors: Of the device.
            layouts: How they hold blocks.
            device: Where the tensors are.
            staging_bytes: Of the device, taken for each direction; at least one block. Twice as
                much pinned host memory is taken where slots can't be pinned.
        """
        super().__init__(slots, config, rank, tensors, layouts)
        self._device = device
        self._blocks = [device.view(group) for group in self._groups]
        self._staging_bytes = max(staging_bytes, *(group.block_bytes for group in self._groups))
        self.pinned = PinnedRows(device, slots)

    @property
    @override
    def num_threads(self) -> int:
        return 2

    @cached_property
    def _stores(self) -> Lane:
        return Lane(self._device, StreamPriority.LOW, self._staging_bytes)

    @cached_property
    def _loads(self) -> Lane:
        return Lane(self._device, StreamPriority.HIGH, self._staging_bytes)

    @override
    def mark(self) -> object:
        try:
            return self._device.mark()
        except RuntimeError as error:
            return error  # the jobs that were to follow it fail; the engine's step does not

    @override
    def store(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        lane = self._stores
        for group_copies in copies:
            self._clear_unnamed(group_copies)
        with lane.job(mark):
            for piece in self._pieces(copies):
                lane.stream.gather(self._blocks[piece.group_idx], piece.block_ids, lane.staging)
                if self._is_pinned(piece):
                    for run in piece.runs:
                        lane.stream.to_host(lane.staging, run.start, run.place)
                else:
                    half = lane.take_half()
                    lane.stream.to_host(lane.staging, 0, half[: piece.num_bytes])
                    lane.lend_half(piece.runs)
            lane.settle_halves()
        return frozenset()

    @override
    def load(self, copies: Sequence[BlockCopies], mark: object) -> frozenset[int]:
        lane = self._loads
        with lane.job(mark):
            for piece in self._pieces(copies):
                if self._is_pinned(piece):
                    for run in piece.runs:
                        lane.stream.to_device(run.place, lane.staging, run.start)
                else:
                    half = lane.take_half()
                    for run in piece.runs:
                        _copy(half[run.start : run.start + len(run.place)], run.place)
                    lane.stream.to_device(half[: piece.num_bytes], lane.staging, 0)
                    lane.lend_half([])
                lane.stream.scatter(lane.staging, self._blocks[piece.group_idx], piece.block_ids)
        return gone_slots(copies)

    def _is_pinned(self, piece: Piece) -> bool:
        return all(self.pinned.holds(run.slot) for run in piece.runs)

    def _pieces(self, copies: Sequence[BlockCopies]) -> Iterator[Piece]:
        """Cut a job into what the staging memory holds; chunks that are gone are left out."""
        for group_copies in copies:
            group = self._groups[group_copies.group_idx]
            rows = [
                row
                for row in zip(
                    group_copies.block_ids, group_copies.slots, group_copies.parts, strict=True
                )
                if row[1] >= 0
            ]
            _check_block_ids(rows, group)
            num_max = self._staging_bytes // max(1, group.block_bytes)
            for first in range(0, len(rows), num_max):
                cut = rows[first : first + num_max]
                runs = list(self._runs(cut, group.block_bytes))
                yield Piece(group_copies.group_idx, [row[0] for row in cut], runs)

    def _runs(self, rows: Sequence[tuple[int, int, int]], block_bytes: int) -> Iterator[Run]:
        first = 0
        for end, (_, slot, part) in enumerate(rows, 1):
            if end == len(rows) or rows[end][1:] != (slot, part + 1):
                num = end - first
                place = self._place(slot, (part + 1 - num) * block_bytes, num * block_bytes)
                yield Run(slot, first * block_bytes, place)
                first = end

    @override
    def close(self) -> None:
        self.pinned.close()
        for lane in ("_stores", "_loads"):
            self.__dict__.pop(lane, None)


def _check_block_ids(rows: Sequence[tuple[int, int, int]], group: GroupLayout) -> None:
    """Refuse ids beyond the tensors: on a device that would end the whole process's work."""
    for block_id, _, _ in rows:
        if not 0 <= block_id < group.num_blocks:
            raise ContractError(f"block {block_id} is not in 0..{group.num_blocks - 1}")


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy host memory without the interpreter lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
