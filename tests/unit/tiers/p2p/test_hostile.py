"""Strangers and hostile peers: the connection is dropped, nothing is said, others are served."""

import os
import pickle
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from kvstrata.core.errors import ProtocolError
from kvstrata.core.keys import OffloadKey, make_offload_key
from kvstrata.core.results import LookupResult
from kvstrata.testing import FakeClock, numbered_key
from kvstrata.tiers.p2p.handshake import Credentials, call
from kvstrata.tiers.p2p.settings import parse_address
from kvstrata.tiers.p2p.transport import Channel, connect
from kvstrata.tiers.p2p.wire import (
    HANDSHAKE_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    Challenge,
    Fetch,
    Found,
    Hello,
    Lookup,
    Message,
    Proof,
    Refused,
    Seal,
    Seals,
    State,
    Welcome,
    encode,
)
from tests.p2p_hosts import CHUNK_BYTES, NAMESPACE, SECRET, Host, eventually, secret_file

A, B = numbered_key(0), numbered_key(1)
HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Host]:
    """A host that has A and asks for the secret; it still serves afterwards."""
    secret = secret_file(tmp_path)
    with Host("owner", listen="127.0.0.1:0", secret_file=secret, connect_timeout_s=2.0) as owner:
        owner.primary.put(A)
        yield owner
        with Host("friend", peers={"owner": owner.address}, secret_file=secret) as friend:
            assert friend.look_up(A, B) == [HIT, MISS]
            assert friend.fetch(A).failed == frozenset()
        assert owner.stats()["internal_errors"] == 0
        eventually(lambda: owner.stats()["num_connections"] == 0, "all connections closed")
        assert owner.stats()["num_leased"] == 0


def credentials(
    identity: str = "guest",
    secret: str = SECRET,
    namespace: str = NAMESPACE,
    chunk_bytes: int = CHUNK_BYTES,
) -> Credentials:
    return Credentials(identity, namespace, chunk_bytes, secret.encode())


@contextmanager
def connected(owner: Host) -> Iterator[socket.socket]:
    """A connection on which nothing has been said yet."""
    with socket.create_connection(owner.tier.address or ("", 0), timeout=20.0) as sock:
        yield sock


@contextmanager
def admitted(owner: Host, own: Credentials | None = None) -> Iterator[Channel]:
    """A connection on which both sides have proved themselves."""
    sock = connect(parse_address(owner.address, ""), 10.0, None)
    channel = Channel(sock, "owner", 10.0)
    try:
        call(channel, own or credentials(), "owner")
        yield channel
    finally:
        channel.close()


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def is_dropped(sock: socket.socket) -> bytes:
    """Wait until the other side closes; return what it still said."""
    said = b""
    with suppress(ConnectionResetError):
        while part := sock.recv(65536):
            said += part
    return said


class Boom:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    @override
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


HELLO = encode(Hello(1, "guest", bytes(32), NAMESPACE, CHUNK_BYTES, bytes(32)))


@pytest.mark.parametrize(
    "first_bytes",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: owner\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff" + bytes(100),
        (MESSAGE_BYTES_MAX).to_bytes(4, "big") + bytes(100),
        framed(os.urandom(64)),
        framed(msgspec.msgpack.encode([99, 1, 2])),
        framed(msgspec.msgpack.encode(["Hello"])),
        framed(b"\x91" * 2000),
        framed(encode(Lookup([A]))),
        framed(encode(Fetch([A]))),
        framed(encode(Found(b"\x01"))),
        framed(HELLO) + framed(encode(Fetch([A]))),
        framed(HELLO) + framed(HELLO),
        framed(HELLO)[:-1],
    ],
)
def test_a_stranger_is_dropped_and_told_nothing(owner: Host, first_bytes: bytes) -> None:
    with connected(owner) as sock:
        with suppress(OSError):  # dropped already
            sock.sendall(first_bytes)
            sock.shutdown(socket.SHUT_WR)
        said = is_dropped(sock)
    assert NAMESPACE.encode() not in said
    assert SECRET.encode() not in said
    assert len(said) < 200  # a Challenge at most


def test_a_pickled_payload_is_not_executed(owner: Host, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    with connected(owner) as sock:
        sock.sendall(framed(pickle.dumps(Boom(mark))))
        assert is_dropped(sock) == b""
    with admitted(owner) as channel:
        channel.send(PickledMessage(pickle.dumps(Boom(mark))))
        with pytest.raises(ConnectionError):
            channel.receive(Message)
    assert not mark.exists()


class PickledMessage(Message, tag=77):
    """No message that a peer knows."""

    content: bytes


def test_a_stranger_who_says_nothing_is_dropped_in_time(tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    with (
        Host("owner", listen="127.0.0.1:0", secret_file=secret, connect_timeout_s=0.1) as owner,
        connected(owner) as sock,
    ):
        assert is_dropped(sock) == b""


def test_strangers_can_not_use_up_the_connections(tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    with Host("owner", listen="127.0.0.1:0", secret_file=secret, num_strangers_max=3) as owner:
        owner.primary.put(A)
        with admitted(owner, credentials("friend")) as friend:
            strangers = [socket.create_connection(owner.tier.address or ("", 0)) for _ in range(9)]
            eventually(lambda: owner.stats()["refused_connections"] >= 6, "six refused")
            friend.send(Lookup([A]))
            assert friend.receive(Found).states == bytes([State.HIT])
            for sock in strangers:
                sock.close()
        eventually(lambda: owner.stats()["num_connections"] == 0, "all gone")
        with admitted(owner, credentials("friend")):
            pass


def test_a_caller_without_the_secret_is_refused_and_proves_nothing(owner: Host) -> None:
    with (
        pytest.raises(ConnectionError),
        admitted(owner, credentials(secret="a wrong secret of good length")),
    ):
        pass
    eventually(lambda: owner.stats()["protocol_errors"] == 1, "the error counted")
    assert owner.stats()["accepted_connections"] == 0


def test_a_host_without_the_secret_is_not_believed(tmp_path: Path) -> None:
    right, wrong = secret_file(tmp_path), secret_file(tmp_path, "another secret of good length")
    with (
        Host("owner", listen="127.0.0.1:0", secret_file=wrong) as impostor,
        Host("reader", peers={"owner": impostor.address}, secret_file=right) as reader,
    ):
        impostor.primary.put(A)
        assert reader.look_up(A) == [MISS]
        assert reader.fetch(A).failed == {A}


@pytest.mark.parametrize("forge", [lambda proof: bytes(32), lambda proof: proof.mac])
def test_a_host_is_believed_only_with_a_proof_of_its_own(
    tmp_path: Path, forge: Callable[[Proof], bytes]
) -> None:
    """Neither a made-up proof nor the caller's own, sent back, opens the connection."""

    def be_an_impostor() -> None:
        sock, _ = listener.accept()
        with sock:
            channel = Channel(sock, "caller", 10.0)
            channel.receive(Hello)
            channel.send(Challenge("owner", bytes(32), bytes(32)))
            channel.send(Welcome(forge(channel.receive(Proof))))
            said.append(is_dropped(sock))

    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=be_an_impostor)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with Host("reader", peers={"owner": address}, secret_file=secret_file(tmp_path)) as reader:
            assert reader.look_up(A) == [MISS]
        thread.join()
    assert said == [b""]


def test_a_host_of_another_identity_is_not_believed(tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    with (
        Host("somebody", listen="127.0.0.1:0", secret_file=secret) as other,
        Host("reader", peers={"owner": other.address}, secret_file=secret) as reader,
    ):
        other.primary.put(A)
        assert reader.look_up(A) == [MISS]


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (credentials(namespace="another model"), "namespace"),
        (credentials(chunk_bytes=CHUNK_BYTES + 1), "bytes"),
        (credentials(identity="owner"), "identity"),
    ],
)
def test_a_peer_that_does_not_fit_is_told_why_and_dropped(
    owner: Host, own: Credentials, reason: str
) -> None:
    with pytest.raises(ProtocolError, match=reason), admitted(owner, own):
        pass
    assert owner.stats()["accepted_connections"] == 0


def test_another_version_is_told_which_is_spoken(owner: Host) -> None:
    with connected(owner) as sock:
        channel = Channel(sock, "owner", 10.0)
        channel.send(Hello(2, "guest", bytes(32), NAMESPACE, CHUNK_BYTES, bytes(32)))
        assert "version 1" in channel.receive(Refused).reason


class Recorder(socket.socket):
    """A socket that remembers what was sent."""

    sent = b""

    @override
    def send(self, data: memoryview, flags: int = 0) -> int:  # type: ignore[override]
        num_bytes = super().send(data, flags)
        self.sent += bytes(data[:num_bytes])
        return num_bytes


def test_a_recorded_handshake_opens_nothing(owner: Host) -> None:
    with Recorder(socket.AF_INET) as sock:
        sock.connect(owner.tier.address or ("", 0))
        channel = Channel(sock, "owner", 10.0)
        call(channel, credentials(), "owner")
        channel.send(Lookup([A]))
        assert channel.receive(Found).states == bytes([State.HIT])
        recording = sock.sent
    with connected(owner) as replay:
        replay.sendall(recording)
        said = is_dropped(replay)
    assert len(said) < 200  # a fresh Challenge, which the recording does not answer
    assert owner.stats()["accepted_connections"] == 1
    eventually(lambda: owner.stats()["protocol_errors"] == 1, "the error counted")


def test_a_host_can_not_be_made_to_prove_itself_to_itself(owner: Host) -> None:
    """The proof of one role is no proof of the other, whoever made it."""
    with connected(owner) as outer, connected(owner) as inner:
        outer.sendall(framed(HELLO))
        challenge = outer.recv(65536)
        inner.sendall(framed(HELLO))
        assert challenge != inner.recv(65536)
        outer.sendall(challenge)  # reflected
        assert is_dropped(outer) == b""
    assert owner.stats()["accepted_connections"] == 0


def test_messages_put_into_a_connection_from_outside_are_noticed(owner: Host) -> None:
    with Recorder(socket.AF_INET) as sock:
        sock.connect(owner.tier.address or ("", 0))
        channel = Channel(sock, "owner", 10.0)
        call(channel, credentials(), "owner")
        sock.sent = b""
        channel.send(Lookup([A]))
        channel.receive(Found)
        sock.sendall(bytes(sock.sent))  # the same once more: authentic, but out of turn
        assert is_dropped(sock) == b""
    eventually(lambda: owner.stats()["protocol_errors"] == 1, "the error counted")


@pytest.mark.parametrize(
    "message",
    [
        Found(b"\x01"),
        Seals([Seal(bytes(16))]),
        Hello(1, "guest", bytes(32), NAMESPACE, CHUNK_BYTES, bytes(32)),
    ],
)
def test_a_peer_that_speaks_out_of_turn_is_dropped(owner: Host, message: Message) -> None:
    with admitted(owner) as channel:
        channel.send(message)
        with pytest.raises(ConnectionError):
            channel.receive(Message)
    eventually(lambda: owner.stats()["protocol_errors"] == 1, "the error counted")


def test_a_message_longer_than_allowed_is_not_even_waited_for(owner: Host) -> None:
    with admitted(owner) as channel:
        channel._sock.sendall((MESSAGE_BYTES_MAX + 1).to_bytes(4, "big"))
        eventually(lambda: owner.stats()["protocol_errors"] == 1, "a peer's")
        with connected(owner) as stranger:
            stranger.sendall((HANDSHAKE_BYTES_MAX + 1).to_bytes(4, "big"))
            eventually(lambda: owner.stats()["protocol_errors"] == 2, "a stranger's")


def test_keys_of_another_tenant_can_not_be_guessed_from_ones_own(owner: Host) -> None:
    """No message lists keys, and a key holds the tenant: what can't be named can't be had."""
    theirs = make_offload_key(b"\x01" * 32, 0)
    owner.primary.put(theirs)
    near = OffloadKey(theirs[:-5] + b"\x02" + theirs[-4:])
    with admitted(owner) as channel:
        channel.send(Fetch([near, make_offload_key(b"\x01" * 31, 0)]))
        assert channel.receive(Found).states == bytes([State.MISS, State.MISS])


def test_a_peer_has_a_limit_on_requests(tmp_path: Path) -> None:
    clock = FakeClock()
    with Host(
        "owner", listen="127.0.0.1:0", clock=clock, requests_per_s_max=3,
        secret_file=secret_file(tmp_path),
    ) as owner:  # fmt: skip
        owner.primary.put(A)

        def ask(channel: Channel) -> int:
            channel.send(Lookup([A]))
            return channel.receive(Found).states[0]

        with admitted(owner) as channel, admitted(owner, credentials("other")) as other:
            assert [ask(channel) for _ in range(5)] == [State.HIT] * 3 + [State.BUSY] * 2
            channel.send(Fetch([A]))
            assert channel.receive(Found).states == bytes([State.BUSY])
            assert ask(other) == State.HIT  # another peer has its own
        with admitted(owner) as again:
            assert ask(again) == State.BUSY  # a new connection brings no new allowance
            clock.advance(0.5)
            assert ask(again) == State.HIT


def test_a_peer_has_a_limit_on_bytes_and_leases(tmp_path: Path) -> None:
    clock = FakeClock()
    keys = [numbered_key(i) for i in range(6)]
    secret = secret_file(tmp_path)
    with (
        Host("owner", listen="127.0.0.1:0", clock=clock, bytes_per_s_max=2 * CHUNK_BYTES,
             num_leased_max=4, secret_file=secret) as owner,
        admitted(owner) as channel,
    ):  # fmt: skip
        owner.primary.put(*keys)

        def fetch() -> bytes:
            channel.send(Fetch(keys, len(keys)))
            states = channel.receive(Found).states
            for _ in range(states.count(State.HIT)):
                payload = memoryview(bytearray(CHUNK_BYTES))
                channel.receive_payload(payload)
            assert len(channel.receive(Seals).seals) == states.count(State.HIT)
            return states

        assert fetch() == bytes([State.HIT] * 2 + [State.BUSY] * 4)
        assert owner.stats()["chunks_over_limit"] == 4
        clock.advance(60.0)
        assert fetch().count(State.HIT) == 2


def test_a_peer_has_a_limit_on_connections(tmp_path: Path) -> None:
    with Host(
        "owner", listen="127.0.0.1:0", num_peer_connections_max=2,
        secret_file=secret_file(tmp_path),
    ) as owner:  # fmt: skip
        own = credentials()
        with admitted(owner, own), admitted(owner, own):
            with admitted(owner, own) as third, pytest.raises(ConnectionError):
                third.receive(Message)
            with admitted(owner, credentials("other")) as other:
                other.send(Lookup([A]))
                assert other.receive(Found).states == bytes([State.MISS])


def test_a_restarted_peer_ends_the_connections_of_its_former_process(owner: Host) -> None:
    with admitted(owner) as former, admitted(owner) as current:
        current.send(Lookup([A]))
        assert current.receive(Found).states == bytes([State.HIT])
        with pytest.raises(ConnectionError):
            former.receive(Message)


def mutated(rng: random.Random, body: bytes) -> bytes:
    """Change, cut or extend a message, or make one up."""
    kind = rng.randrange(5)
    if kind == 0 or not body:
        return rng.randbytes(rng.randrange(1, 80))
    place = rng.randrange(len(body))
    if kind == 1:
        return body[:place] + bytes([rng.randrange(256)]) + body[place + 1 :]
    if kind == 2:
        return body[: place + 1]
    if kind == 3:
        return body[:place] + rng.randbytes(rng.randrange(1, 9)) + body[place:]
    return body + rng.randbytes(rng.randrange(1, 9))


SEEDS = [
    HELLO,
    encode(Lookup([A, B])),
    encode(Fetch([A, B])),
    encode(Found(b"\x00\x01")),
    encode(Seals([Seal(bytes(16)), Seal(None, 1.5)])),
]


def send_body(channel: Channel, body: bytes) -> None:
    """Send anything as an authentic message."""
    code = channel._code(channel._send_key, channel._num_sent, body)
    channel._num_sent += 1
    channel._sock.sendall(framed(code + body))


def fuzz_as_stranger(owner: Host, rng: random.Random, num_inputs: int) -> None:
    for _ in range(num_inputs):
        with connected(owner) as sock, suppress(OSError):
            body = mutated(rng, rng.choice(SEEDS))
            sock.sendall(framed(body) if rng.random() < 0.7 else body)
            sock.shutdown(socket.SHUT_WR)
            assert len(is_dropped(sock)) < 200


def fuzz_as_peer(owner: Host, rng: random.Random, num_inputs: int) -> None:
    """Send authentic messages of bad content; the worst that a captured peer could do."""
    while num_inputs > 0:
        with suppress(OSError, ProtocolError), admitted(owner, credentials("fuzzer")) as channel:
            while num_inputs > 0:
                num_inputs -= 1
                send_body(channel, mutated(rng, rng.choice(SEEDS)))
                channel.receive(Found)


def test_nothing_that_a_stranger_or_a_peer_sends_harms_others(owner: Host) -> None:
    fuzz_as_stranger(owner, random.Random(1), 200)
    fuzz_as_peer(owner, random.Random(2), 200)


@pytest.mark.slow
def test_a_hundred_thousand_hostile_inputs_harm_nobody(tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    with Host("owner", listen="127.0.0.1:0", secret_file=secret, requests_per_s_max=10**9) as owner:
        owner.primary.put(A)
        fuzz_as_stranger(owner, random.Random(3), 60_000)
        fuzz_as_peer(owner, random.Random(4), 40_000)
        with Host("friend", peers={"owner": owner.address}, secret_file=secret) as friend:
            assert friend.look_up(A, B) == [HIT, MISS]
            assert friend.fetch(A).failed == frozenset()
        assert owner.stats()["internal_errors"] == 0
        eventually(lambda: owner.stats()["num_connections"] == 0, "all connections closed")
