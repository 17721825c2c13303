"""NIXL as the plane for payload: a host reads its peers' slots without their processor's help.

Questions, leases and checksums go over the authenticated connection as ever. What NIXL opens for
its own traffic is not authenticated, so it is used only where the settings ask for it.
"""

import ctypes
import importlib
import threading
from collections.abc import Sequence
from typing import Any, Final

from kvstrata.core.errors import ConfigError, TierUnavailableError
from kvstrata.core.memory import SlotView, row_bytes_for

MODULES: Final = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
POLL_S: Final = 50e-6


def _import(path: str) -> Any:  # noqa: ANN401
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError(path, 'needs nixl: install the package nixl, or set "tcp"')


class NixlPlane:
    """One NIXL agent over all slots, and those of the peers that were met.

    Thread: any. Blocks: `read` until the copy has ended.
    """

    def __init__(self, slots: SlotView, name: str, path: str) -> None:
        """Register the slots.

        Args:
            slots: What is read into and served from.
            name: Unique among all agents, in this host's former processes too.
            path: Dotted path of the setting, for errors.

        Raises:
            ConfigError: NIXL is not installed.
        """
        api = _import(path)
        self._errors = tuple(
            kind
            for kind in vars(api.nixlBind).values()
            if isinstance(kind, type) and issubclass(kind, Exception)
        )
        self._lock = threading.Lock()
        self._pause = threading.Event()
        self._slots = slots
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        row_bytes = row_bytes_for(slots.chunk_bytes)
        rows = [(self.address(slot), row_bytes, 0, "") for slot in range(slots.num_slots)]
        self._registered = self._agent.register_memory(_merged(rows), "DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()

    def address(self, slot: int) -> int:
        """Return where the slot's row begins in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._slots.row(slot)))

    def meet(self, metadata: bytes) -> str:
        """Learn how to reach a peer's slots; return its agent's name."""
        with self._lock:
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, peer: str, slots: Sequence[int], addresses: Sequence[int]) -> None:
        """Copy a peer's rows, at `addresses` in its process, into slots.

        `peer` is what `meet` returned. No slot is written any more when this returns or raises.

        Raises:
            TierUnavailableError: The copy failed.
        """
        try:
            state = self._read(peer, slots, addresses)
        except self._errors as error:
            raise TierUnavailableError(peer, f"a NIXL transfer failed: {error}") from error
        if state != "DONE":
            raise TierUnavailableError(peer, f"a NIXL transfer ended as {state}")

    def _read(self, peer: str, slots: Sequence[int], addresses: Sequence[int]) -> str:
        size, agent = self._slots.chunk_bytes, self._agent
        with self._lock:
            local = agent.get_xfer_descs([(self.address(s), size, 0) for s in slots], "DRAM")
            remote = agent.get_xfer_descs([(at, size, 0) for at in addresses], "DRAM")
            handle = agent.initialize_xfer("READ", local, remote, peer)
            state = agent.transfer(handle)
        while state == "PROC":
            self._pause.wait(POLL_S)
            with self._lock:
                state = agent.check_xfer_state(handle)
        # A copy that can't be taken back is waited for: until then the slots are not ours to give.
        with self._lock:
            agent.release_xfer_handle(handle)
        return str(state)

    def close(self) -> None:
        """Let go of the slots."""
        with self._lock:
            self._agent.deregister_memory(self._registered)


def _merged(rows: Sequence[tuple[int, int, int, str]]) -> list[tuple[int, int, int, str]]:
    """Join rows that lie behind one another, so that a region is registered once."""
    merged: list[tuple[int, int, int, str]] = []
    for start, size, device, label in rows:
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size, device, label)
        else:
            merged.append((start, size, device, label))
    return merged
