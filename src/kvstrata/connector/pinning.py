"""Pins the rows of the host region beside the engine, step by step, and unpins them at the end."""

import logging
import threading
from typing import Final

import numpy as np

from kvstrata.connector.device import Device
from kvstrata.core.memory import SlotView

logger = logging.getLogger("kvstrata.connector")

STEP_BYTES: Final = 64 << 20


class PinnedRows:
    """Registers rows from slot 0 up with a device, on a thread of its own.

    Pinning takes time by the GiB, and the driver may hold others up while it pins: small steps keep
    that short. Until a row is pinned, and for ever where the device refuses, it is not held and has
    to be copied through pinned memory of the copier's own.
    """

    def __init__(self, device: Device, slots: SlotView, *, step_bytes: int = STEP_BYTES) -> None:
        """Start pinning.

        Args:
            device: Registers memory.
            slots: Rows; those that do not follow one another in memory are left unpinned.
            step_bytes: How much is registered at a time, at least one row.
        """
        self._device = device
        self._num_slots = len(slots)
        self._row_bytes = len(slots.row(0))
        self._start = _address_of(slots.row(0))
        self._num_per_step = max(1, step_bytes // self._row_bytes)
        self._num_held = 0
        self._registered: list[int] = []
        self._is_closing = threading.Event()
        last = self._start + (self._num_slots - 1) * self._row_bytes
        self._are_adjacent = _address_of(slots.row(self._num_slots - 1)) == last
        self._thread = threading.Thread(target=self._run, name="kvstrata-pinning", daemon=True)
        self._thread.start()

    def holds(self, slot: int) -> bool:
        """Say whether a row is pinned. Thread: any."""
        return slot < self._num_held

    @property
    def num_held(self) -> int:
        """Rows that are pinned so far."""
        return self._num_held

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all that can be pinned is, at the latest in time."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        if not self._are_adjacent:
            logger.warning("rows of host memory are apart and stay unpinned: copies are slower")
            return
        for first in range(0, self._num_slots, self._num_per_step):
            if self._is_closing.is_set():
                return
            num = min(self._num_per_step, self._num_slots - first)
            address = self._start + first * self._row_bytes
            try:
                self._device.register(address, num * self._row_bytes)
            except RuntimeError as error:
                logger.warning(
                    "only %d of %d slots of host memory could be pinned (%s); the others are "
                    "copied through a small pinned buffer, more slowly. Raise the limit on locked "
                    "memory (ulimit -l), or lower primary.bytes",
                    first, self._num_slots, error,
                )  # fmt: skip
                return
            self._registered.append(address)
            self._num_held = first + num  # after it is true: readers take no lock
        logger.info("all %d slots of host memory are pinned", self._num_slots)

    def close(self) -> None:
        """Unpin everything: nothing copies from or to the rows any more. Blocks: for one step."""
        self._is_closing.set()
        self._thread.join()
        self._num_held = 0
        while self._registered:
            try:
                self._device.unregister(self._registered.pop())
            except RuntimeError as error:
                logger.warning("host memory could not be unpinned: %s", error)


def _address_of(row: memoryview) -> int:
    return np.frombuffer(row, np.uint8).ctypes.data
