"""What is put on the wire for a fetch."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvstrata.core.clock import SystemClock
from kvstrata.primary.region import HostRegion
from kvstrata.testing import numbered_key, pattern
from kvstrata.tiers.p2p.serving import Serving
from kvstrata.tiers.p2p.settings import P2pSettings
from kvstrata.tiers.p2p.shelf import Shelf
from kvstrata.tiers.p2p.transport import Channel
from kvstrata.tiers.p2p.wire import Fetch, Found, Seals, State, chunk_digest

A, B, C, D = map(numbered_key, range(4))
CHUNK_BYTES = 4 << 20  # more than the buffers of a socket pair hold


class Owner:
    """A shelf that serves one connection, on a thread."""

    def __init__(self) -> None:
        self.slots = HostRegion.create(4, CHUNK_BYTES)
        settings = P2pSettings(identity="owner")
        self.shelf = Shelf(self.slots, SystemClock(), settings.shelf_limits)
        self.serving = Serving(settings, self.shelf, SystemClock())
        ours, theirs = socket.socketpair()
        self.channel, self._served = Channel(ours, "owner", 30.0), Channel(theirs, "reader", 30.0)
        for slot, key in enumerate((A, B, C)):
            self.slots[slot][:] = pattern(key, CHUNK_BYTES)
            self.shelf.publish([key], [slot])
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            self.serving.answer(self._served, "reader", self._served.receive(Fetch))

    def receive(self) -> bytes:
        payload = memoryview(bytearray(CHUNK_BYTES))
        self.channel.receive_payload(payload)
        return bytes(payload)

    def close(self) -> None:
        self.channel.abort()
        self.thread.join(30.0)
        self.channel.close()
        self._served.close()
        self.slots.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


def test_what_took_the_slot_of_a_chunk_that_left_is_not_sent_in_its_place(owner: Owner) -> None:
    owner.channel.send(Fetch([A, B], 1))
    assert owner.channel.receive(Found).states == bytes([State.HIT, State.HIT])
    owner.shelf.withdraw([B])  # while A, which nobody has taken yet, is being sent
    owner.slots[1][:] = pattern(D, CHUNK_BYTES)
    owner.shelf.publish([D], [1])
    assert owner.receive() == pattern(A, CHUNK_BYTES)
    assert owner.channel.receive(Seals).seals[0].checksum is not None
    assert owner.receive() == bytes(CHUNK_BYTES)
    assert owner.channel.receive(Seals).seals[0].checksum is None
    owner.thread.join(30.0)
    assert owner.serving.counters()["reused_chunks"] == 1


def test_seals_come_after_as_many_chunks_as_the_reader_says(owner: Owner) -> None:
    for key in (A, B):  # the next reader's checksums are kept, the third one's is made anew
        lease = owner.shelf.lease([key], "other", 10.0)
        digest = chunk_digest(key, CHUNK_BYTES)
        digest.update(pattern(key, CHUNK_BYTES))
        owner.shelf.keep_checksum(lease.copies[key], digest.digest())
        owner.shelf.release(lease)
    owner.channel.send(Fetch([A, D, B, C], 2))
    assert owner.channel.receive(Found).states == bytes(
        [State.HIT, State.MISS, State.HIT, State.HIT]
    )
    assert [owner.receive() for _ in (A, B)] == [pattern(key, CHUNK_BYTES) for key in (A, B)]
    assert len(owner.channel.receive(Seals).seals) == 2
    assert owner.receive() == pattern(C, CHUNK_BYTES)
    expected = chunk_digest(C, CHUNK_BYTES)
    expected.update(pattern(C, CHUNK_BYTES))
    (seal,) = owner.channel.receive(Seals).seals
    assert seal.checksum == expected.digest()
    owner.thread.join(30.0)
    assert owner.serving.counters()["served_chunks"] == 3
