"""One connection: messages and payload with deadlines, tamper-evident once its keys are set."""

import hmac
import socket
import ssl
import struct
import time
from collections import deque
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar, cast

from kvstrata.core.errors import ProtocolError
from kvstrata.tiers.p2p.settings import Address
from kvstrata.tiers.p2p.wire import (
    HANDSHAKE_BYTES_MAX,
    LENGTH_BYTES,
    MAC_BYTES,
    MESSAGE_BYTES_MAX,
    Message,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    import xxhash

SOCKET_BUFFER_BYTES: Final = 4 << 20
VIEWS_MAX: Final = 512  # of one system call; the kernel takes 1024
PIECE_BYTES: Final = 2 << 20  # of one call, and what is summed up before it leaves the cache

M = TypeVar("M", bound=Message)


class Channel:
    """A connection that sends and receives messages and payload.

    Every wait ends: with the deadline, or when the other side has been silent for too long. Any
    error leaves it unusable, to be closed.

    Thread: one, except `abort` (any). Raises: OSError, which a timeout is too, when the connection
    fails; ProtocolError when the other side says what it must not.
    """

    def __init__(self, sock: socket.socket, name: str, silence_timeout_s: float) -> None:
        """Take over the socket.

        Args:
            sock: Connected; closed with the channel.
            name: Whom to blame in errors.
            silence_timeout_s: How long a wait for the other side's next byte may take.
        """
        self._sock = sock
        self.name = name
        self.silence_timeout_s = silence_timeout_s
        self.num_received_bytes = 0
        self.nixl_agent: str | None = None  # the other side's, once it is known; "" for none
        self._deadline_s: float | None = None
        self._send_key = self._receive_key = b""
        self._num_sent = self._num_received = 0
        self._armed_s: float | None = None
        self._is_plain = not isinstance(sock, ssl.SSLSocket)
        self._receive_flags = socket.MSG_WAITALL if self._is_plain else 0
        if self._is_plain:
            sock.settimeout(None)  # the kernel watches the time instead, see `_arm`
        if sock.family in {socket.AF_INET, socket.AF_INET6}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def certified_names(self) -> list[str] | None:
        """The names in the other side's verified certificate; None without TLS."""
        if not isinstance(self._sock, ssl.SSLSocket):
            return None
        certificate = self._sock.getpeercert() or {}
        names = cast("Iterable[tuple[str, str]]", certificate.get("subjectAltName", ()))
        return [name for kind, name in names if kind == "DNS"]

    def set_deadline(self, timeout_s: float | None) -> None:
        """Let no later call go on past `timeout_s` from now; None takes the deadline away."""
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

    def authenticate(self, send_key: bytes, receive_key: bytes) -> None:
        """From now on mark every message with a code that needs the key, and accept no other."""
        self._send_key, self._receive_key = send_key, receive_key

    def send(self, message: Message) -> bytes:
        """Send a message; return its bytes."""
        body = encode(message)
        code = self._code(self._send_key, self._num_sent, body)
        self._num_sent += 1
        self._send(memoryview(len(code + body).to_bytes(LENGTH_BYTES, "big") + code + body))
        return body

    def send_payload(self, *payload: memoryview, digest: "xxhash.xxh3_128 | None" = None) -> None:
        """Send raw bytes; feed them to `digest`, while they are in the processor's cache.

        The other side has to take some of them within every silence timeout.
        """
        if digest is None and self._is_plain:
            self._send(*payload)
            return
        for view in payload:
            for start in range(0, view.nbytes, PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                if digest is not None:
                    digest.update(piece)
                self._send(piece)

    def receive(self, kind: type[M], wait_s: float | None = None) -> M:
        """Return the next message, which must be of this kind.

        Args:
            kind: What may come; `Message` for anything.
            wait_s: How long its first byte may take, instead of the silence timeout.
        """
        message, _ = self.receive_signed(kind, wait_s)
        return message

    def receive_signed(self, kind: type[M], wait_s: float | None = None) -> tuple[M, bytes]:
        """Return the next message as `receive` does, and its bytes."""
        header = self._read(LENGTH_BYTES, wait_s)
        length = int.from_bytes(header, "big")
        limit = MESSAGE_BYTES_MAX if self._receive_key else HANDSHAKE_BYTES_MAX
        if not 0 < length <= limit:
            raise ProtocolError(self.name, f"a message of {length} bytes, the limit is {limit}")
        body = self._read(length)
        if self._receive_key:
            code, body = body[:MAC_BYTES], body[MAC_BYTES:]
            if not hmac.compare_digest(
                code, self._code(self._receive_key, self._num_received, body)
            ):
                raise ProtocolError(self.name, "a message is not the peer's")
        self._num_received += 1
        message = decode(body, self.name)
        if not isinstance(message, kind):
            raise ProtocolError(self.name, f"an unexpected {type(message).__name__}")
        return message, body

    def receive_payload(self, *views: memoryview) -> None:
        """Fill the views, one after the other, with raw bytes."""
        waiting = deque(views)
        while waiting:
            self._arm(self.silence_timeout_s)
            try:
                if len(waiting) == 1 or not self._is_plain:
                    num = self._sock.recv_into(waiting[0], 0, self._receive_flags)
                else:
                    few = list(islice(waiting, VIEWS_MAX))
                    num, *_ = self._sock.recvmsg_into(few, 0, self._receive_flags)
            except BlockingIOError as error:
                raise TimeoutError(f"{self.name} is silent") from error
            self._note_received(num)
            _advance(waiting, num)

    def abort(self) -> None:
        """Make the thread that uses the channel fail at once. Thread: any. Blocks: never."""
        with suppress(OSError):
            # Not SSLSocket.shutdown: that one takes the other thread's cipher away.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    @staticmethod
    def _code(key: bytes, number: int, body: bytes) -> bytes:
        if not key:
            return b""
        return blake2b(number.to_bytes(8, "big") + body, digest_size=MAC_BYTES, key=key).digest()

    def _read(self, length: int, wait_s: float | None = None) -> bytes:
        received = bytearray(length)
        view = memoryview(received)
        num = self._read_some(view, self.silence_timeout_s if wait_s is None else wait_s)
        end_s = time.monotonic() + self.silence_timeout_s  # for all the rest: no drip-feeding
        while num < length:
            num += self._read_some(view[num:], max(1e-3, end_s - time.monotonic()))
        return bytes(received)

    def _read_some(self, view: memoryview, wait_s: float) -> int:
        """Fill the view, or as much of it as comes in the time, at least one byte."""
        self._arm(wait_s)
        try:
            num = self._sock.recv_into(view, 0, self._receive_flags)
        except BlockingIOError as error:
            raise TimeoutError(f"{self.name} is silent") from error
        self._note_received(num)
        return num

    def _note_received(self, num: int) -> None:
        if not num:
            raise ConnectionResetError(f"{self.name} closed the connection")
        self.num_received_bytes += num

    def _send(self, *views: memoryview) -> None:
        """Send all of them; the other side takes at least a byte in each silence timeout."""
        waiting = deque(views)
        while waiting:
            self._arm(self.silence_timeout_s)
            try:
                if len(waiting) == 1 or not self._is_plain:  # TLS has no call for several
                    num = self._sock.send(waiting[0])
                else:
                    num = self._sock.sendmsg(list(islice(waiting, VIEWS_MAX)))
            except BlockingIOError as error:
                raise TimeoutError(f"{self.name} takes nothing") from error
            _advance(waiting, num)

    def _arm(self, wait_s: float) -> None:
        """Bound the next wait, and the time of all.

        A plain socket blocks and the kernel ends the wait: a large piece is then one system call,
        where Python's own timeouts would take one for every few packets.
        """
        if self._deadline_s is not None:
            wait_s = min(wait_s, self._deadline_s - time.monotonic())
            if wait_s <= 0:
                raise TimeoutError(f"{self.name} is too slow")
        if wait_s == self._armed_s:
            return
        self._armed_s = wait_s
        if self._is_plain:
            whole_s = int(wait_s)
            timeout = struct.pack("ll", whole_s, max(1, int((wait_s - whole_s) * 1e6)))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        else:
            self._sock.settimeout(wait_s)


def _advance(waiting: deque[memoryview], num: int) -> None:
    """Take so many bytes off the front."""
    while waiting and num >= waiting[0].nbytes:
        num -= waiting.popleft().nbytes
    if num:
        waiting[0] = waiting[0][num:]


def connect(address: Address, timeout_s: float, tls: ssl.SSLContext | None) -> socket.socket:
    """Connect to a listening host; with `tls`, have its certificate verified.

    Raises:
        OSError: Nobody answers, or not in time, or without a good certificate.
    """
    deadline_s = time.monotonic() + timeout_s
    sock = socket.create_connection(address, timeout=timeout_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    if tls is None:
        return sock
    return _encrypt(sock, tls, deadline_s - time.monotonic(), server_side=False)


def accept_tls(sock: socket.socket, tls: ssl.SSLContext, timeout_s: float) -> socket.socket:
    """Answer the TLS handshake of a socket that was accepted. Raises as `connect` does."""
    return _encrypt(sock, tls, timeout_s, server_side=True)


def _encrypt(
    sock: socket.socket, tls: ssl.SSLContext, timeout_s: float, *, server_side: bool
) -> ssl.SSLSocket:
    encrypted = None
    try:
        sock.settimeout(max(timeout_s, 1e-3))
        encrypted = tls.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        encrypted.do_handshake()
    except OSError:
        (encrypted or sock).close()
        raise
    return encrypted


def listen(address: Address) -> socket.socket:
    """Open a listening socket.

    Raises:
        OSError: The address is taken or not this host's.
    """
    is_v6 = ":" in address.host
    return socket.create_server(
        address, family=socket.AF_INET6 if is_v6 else socket.AF_INET, backlog=128
    )
