"""What an authenticated peer may ask of this host, and how it is answered."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final, cast

from kvstrata.core.clock import Clock
from kvstrata.core.errors import ProtocolError
from kvstrata.core.keys import OffloadKey
from kvstrata.tiers.p2p.limits import Allowance
from kvstrata.tiers.p2p.nixl_plane import NixlPlane
from kvstrata.tiers.p2p.settings import P2pSettings
from kvstrata.tiers.p2p.shelf import Copy, Lease, Shelf
from kvstrata.tiers.p2p.transport import Channel
from kvstrata.tiers.p2p.wire import (
    Attach,
    Attached,
    Fetch,
    Found,
    Locate,
    Located,
    Lookup,
    Message,
    Release,
    Seal,
    Seals,
    State,
    chunk_digest,
)

NUM_ALLOWANCES_MAX: Final = 1024


class Serving:
    """Answers one message at a time, on the connection's own thread. Thread: any."""

    def __init__(
        self, settings: P2pSettings, shelf: Shelf, clock: Clock, plane: NixlPlane | None = None
    ) -> None:
        """Serve the shelf; nothing else of this host can be asked for."""
        self._plane = plane
        self._settings = settings
        self._shelf = shelf
        self._clock = clock
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._allowances: dict[str, Allowance] = {}

    def answer(self, channel: Channel, peer: str, message: Message) -> None:
        """Do what the message asks.

        Raises:
            ProtocolError: It is not one that a peer may send here.
            OSError: The connection failed.
        """
        if isinstance(message, Attach):
            channel.send(Attached(b"" if self._plane is None else self._plane.metadata))
            return
        if not isinstance(message, Lookup | Fetch | Locate) or (
            isinstance(message, Locate) and self._plane is None
        ):
            raise ProtocolError(channel.name, f"an unexpected {type(message).__name__}")
        keys = cast("Sequence[OffloadKey]", message.keys)
        allowance = self._allowance(peer)
        if not allowance.take_request():
            self.count("requests_over_limit")
            channel.send(Found(bytes([State.BUSY] * len(keys))))
            if isinstance(message, Locate):
                channel.send(Located([]))
                channel.receive(Release)
                channel.send(Seals([]))
        elif isinstance(message, Lookup):
            channel.send(Found(bytes(self._look_up(keys))))
        elif isinstance(message, Locate):
            self._locate_all(channel, peer, keys, allowance)
        else:
            self._send_all(channel, peer, message, allowance)

    def count(self, name: str, num: int = 1) -> int:
        """Add to a counter and return it. Thread: any."""
        with self._lock:
            self._counters[name] += num
            return self._counters[name]

    def counters(self) -> dict[str, int]:
        """Return a copy of the counters. Thread: any."""
        with self._lock:
            return dict(self._counters)

    def _allowance(self, peer: str) -> Allowance:
        """Return the peer's budgets: the same ones for all its connections, old and new."""
        with self._lock:
            allowance = self._allowances.pop(peer, None) or Allowance(
                self._clock, self._settings.requests_per_s_max, self._settings.bytes_per_s_max
            )
            self._allowances[peer] = allowance
            while len(self._allowances) > NUM_ALLOWANCES_MAX:
                del self._allowances[next(iter(self._allowances))]
            return allowance

    def _look_up(self, keys: Sequence[OffloadKey]) -> list[State]:
        self.count("lookup_requests_served")
        here = self._shelf.present(keys)
        missing = [key for key, is_here in zip(keys, here, strict=True) if not is_here]
        coming = iter(self._shelf.want(missing))
        return [
            State.HIT if is_here else State.WAIT if next(coming) else State.MISS for is_here in here
        ]

    def _send_all(self, channel: Channel, peer: str, fetch: Fetch, allowance: Allowance) -> None:
        keys = cast("Sequence[OffloadKey]", fetch.keys)
        lease = self._shelf.lease(keys, peer, self._settings.lease_s)
        try:
            states = self._offer(keys, lease.copies, allowance)
            channel.send(Found(bytes(states)))
            here = [key for key, state in zip(keys, states, strict=True) if state is State.HIT]
            for start in range(0, len(here), fetch.num_per_seals):
                group = here[start : start + fetch.num_per_seals]
                channel.send(Seals(self._send(channel, group, lease)))
        finally:
            self._shelf.release(lease)

    def _locate_all(
        self, channel: Channel, peer: str, keys: Sequence[OffloadKey], allowance: Allowance
    ) -> None:
        """Say where chunks are, and once they were read, which of them were still there."""
        plane = cast("NixlPlane", self._plane)
        lease = self._shelf.lease(keys, peer, self._settings.lease_s)
        try:
            states = self._offer(keys, lease.copies, allowance)
            channel.send(Found(bytes(states)))
            here = [key for key, state in zip(keys, states, strict=True) if state is State.HIT]
            channel.send(Located([plane.address(lease.copies[key].slot) for key in here]))
            channel.receive(Release, self._settings.transfer_timeout_s)
            channel.send(Seals([self._seal(key, lease) for key in here]))
        finally:
            self._shelf.release(lease)

    def _seal(self, key: OffloadKey, lease: Lease) -> Seal:
        copy, shelf = lease.copies[key], self._shelf
        checksum = shelf.checksum(copy)
        if checksum is None:
            digest = chunk_digest(key, shelf.slots.chunk_bytes)
            digest.update(shelf.slots[copy.slot])
            checksum = digest.digest()
            is_good = shelf.keep_checksum(copy, checksum)
        else:
            is_good = shelf.holds(copy)
        self._note_served(key, lease, is_good=is_good)
        return Seal(checksum if is_good else None, copy.expires_at_s)

    def _note_served(self, key: OffloadKey, lease: Lease, *, is_good: bool) -> None:
        if is_good:
            self._shelf.unpark(key, lease.holder)
            self.count("served_chunks")
            self.count("served_bytes", self._shelf.slots.chunk_bytes)
        else:
            self.count("reused_chunks")

    def _offer(
        self, keys: Sequence[OffloadKey], copies: dict[OffloadKey, Copy], allowance: Allowance
    ) -> list[State]:
        states = []
        for key, is_here in zip(keys, self._shelf.present(keys), strict=True):
            if key in copies and allowance.take_bytes(self._shelf.slots.chunk_bytes):
                states.append(State.HIT)
            elif is_here:
                self.count("chunks_over_limit")
                states.append(State.BUSY)
            else:
                states.append(State.MISS)
        return states

    def _send(self, channel: Channel, keys: Sequence[OffloadKey], lease: Lease) -> list[Seal]:
        """Send chunks; say of each whether it left before the end.

        The generation vouches for the checksum, and the checksum for what the peer receives.
        """
        copies, shelf = [lease.copies[key] for key in keys], self._shelf
        checksums: list[bytes | None] = []
        ready: list[memoryview] = []  # rows with nothing to be done but to send them
        for key, copy, is_held in zip(keys, copies, shelf.hold(copies), strict=True):
            if not is_held:  # what is in the slot now was not asked for
                checksums.append(None)
                ready.append(memoryview(bytes(shelf.slots.chunk_bytes)))
            elif (checksum := shelf.checksum(copy)) is not None:
                checksums.append(checksum)
                ready.append(shelf.slots[copy.slot])
            else:
                channel.send_payload(*ready)
                ready.clear()
                digest = chunk_digest(key, shelf.slots.chunk_bytes)
                channel.send_payload(shelf.slots[copy.slot], digest=digest)
                checksums.append(digest.digest())
        channel.send_payload(*ready)
        seals = []
        for key, copy, checksum in zip(keys, copies, checksums, strict=True):
            is_good = checksum is not None and shelf.keep_checksum(copy, checksum)
            self._note_served(key, lease, is_good=is_good)
            seals.append(Seal(checksum if is_good else None, copy.expires_at_s))
        return seals
