"""A proxy between an object tier and a real S3 server that breaks what passes, on demand."""

import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Self

from tests.s3_server import S3Server

EVERY_METHOD = frozenset({"GET", "PUT", "CREATE", "PROBE", "POST", "DELETE", "LIST", "HEAD"})

_POLL_S = 0.002
_NUM_POLLS_MAX = 10_000
_NO_BODY = frozenset({204, 304})


@dataclass(slots=True)
class Faults:
    """What is broken, until it is set back; `methods` says for which requests.

    Attributes:
        methods: HTTP methods that are broken. A GET of a part counts as "PROBE", of a listing as
            "LIST", a PUT of what must be absent as "CREATE".
        status: Answered instead of asking the server.
        code: The S3 error code that goes with it, and `region` where the bucket is said to be.
        num_left: How many more requests are broken; None: all.
        reset_after: Reset the connection after so many bytes of the answer.
        slow_bytes: Send that many bytes of the answer and then nothing more.
        truncate: Cut so many bytes off the body, and off its announced length with `shorten`.
        shorten: The announced length is that of the cut body.
        flip: Flip one bit in the middle of the body.
        early: Keep the request back until this is set.
        late: Keep the answer back until this is set.
        blind: Say yes where the server said that the object exists: as if it had been overwritten.
    """

    methods: frozenset[str] = EVERY_METHOD
    status: int | None = None
    code: str = "SlowDown"
    region: str = ""
    num_left: int | None = None
    reset_after: int | None = None
    slow_bytes: int | None = None
    truncate: int = 0
    shorten: bool = False
    flip: bool = False
    early: threading.Event | None = None
    late: threading.Event | None = None
    blind: bool = False


@dataclass(slots=True)
class Seen:
    """What passed: requests by method and in order, and the most that were open at one time."""

    requests: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)
    num_open: int = 0
    num_open_max: int = 0
    open_kinds: Counter[str] = field(default_factory=Counter)


class FaultProxy:
    """Forwards each request on its own connection, one after the other, and counts.

    While `held()` it takes requests and answers none.
    """

    def __init__(self, server: S3Server) -> None:
        self.faults = Faults()
        self.seen = Seen()
        self._server = server
        self._lock = threading.Lock()
        self._pass = threading.Event()
        self._pass.set()
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._connections: set[socket.socket] = set()
        self.address = S3Server("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._pass.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._pass.clear()
        try:
            yield
        finally:
            self._pass.set()

    def heal(self) -> None:
        self.faults = Faults()

    def settings(self, prefix: str, **more: object) -> dict[str, Any]:
        return self.address.settings(prefix, **more)

    def wait_until_open(self, count: int, *kinds: str) -> None:
        """Wait until so many requests are open at one time; fail if that does not come.

        Only those of the given methods count; the client may be listing ahead meanwhile.
        """
        pause = threading.Event()
        for _ in range(_NUM_POLLS_MAX):
            with self._lock:
                if sum(self.seen.open_kinds[kind] for kind in kinds) >= count:
                    return
            pause.wait(_POLL_S)
        raise AssertionError(f"{self.seen.open_kinds} are open instead of {count} of {kinds}")

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, ValueError):
            reader = client.makefile("rb")
            while head := _read_head(reader):
                body = reader.read(_length(head))
                if not self._answer(client, head, body):
                    break
        with self._lock:
            self._connections.discard(client)
        with suppress(OSError):
            client.close()

    def _answer(self, client: socket.socket, head: bytes, body: bytes) -> bool:
        """Answer one request; say whether the connection can be used again."""
        kind = _kind(head)
        with self._lock:
            self.seen.requests[kind] += 1
            self.seen.order.append(kind)
            self.seen.num_open += 1
            self.seen.open_kinds[kind] += 1
            self.seen.num_open_max = max(self.seen.num_open_max, self.seen.num_open)
        with ExitStack() as request:
            request.callback(self._end_one, kind)
            self._pass.wait()
            faults = self._faults_for(kind)
            if faults is not None and faults.status is not None:
                request.close()  # before the answer is out: who has it finds the request ended
                client.sendall(_refusal(faults.status, faults.code, faults.region))
                return True
            if faults is not None and faults.early is not None:
                faults.early.wait()
            answer_head, answer = self._ask(head, body)
            if faults is not None:
                return self._spoil(client, answer_head, answer, faults)
            request.close()
            client.sendall(answer_head + answer)
            return True

    def _end_one(self, kind: str) -> None:
        with self._lock:
            self.seen.num_open -= 1
            self.seen.open_kinds[kind] -= 1

    def _faults_for(self, kind: str) -> Faults | None:
        with self._lock:
            faults = self.faults
            if kind not in faults.methods or faults.num_left == 0:
                return None
            if faults.num_left is not None:
                faults.num_left -= 1
            return faults

    def _ask(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        with socket.create_connection((self._server.host, self._server.port)) as upstream:
            # The signature covers the Host header, which is left as it is.
            upstream.sendall(_one_shot(head) + body)
            reader = upstream.makefile("rb")
            answer_head = _read_head(reader)
            if not answer_head:
                raise ConnectionResetError("the server has closed the connection")
            status = int(answer_head.split(b" ", 2)[1])
            if head.startswith(b"HEAD ") or status in _NO_BODY:
                return _kept_alive(answer_head), b""
            if b"transfer-encoding: chunked" in answer_head.lower():
                return _unchunked(answer_head, reader)
            return _kept_alive(answer_head), reader.read(_length(answer_head))

    def _spoil(self, client: socket.socket, head: bytes, body: bytes, faults: Faults) -> bool:
        if faults.late is not None:
            faults.late.wait()
        if faults.blind and head.split(b" ", 2)[1] == b"412":
            head, body = b'HTTP/1.1 200 OK\r\nETag: "blind"\r\nContent-Length: 0\r\n\r\n', b""
        if faults.flip and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        if faults.truncate:
            body = body[: -faults.truncate]
            if faults.shorten:
                head = re.sub(rb"(?i)content-length: *\d+", b"Content-Length: %d" % len(body), head)
        if faults.reset_after is not None:
            client.sendall((head + body)[: faults.reset_after])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if faults.slow_bytes is not None:
            client.sendall((head + body)[: faults.slow_bytes])
            client.recv(1)  # until the other side gives up
            return False
        client.sendall(head + body)
        return not faults.truncate or faults.shorten


def _read_head(reader: BinaryIO) -> bytes:
    lines = []
    while (line := reader.readline()) not in {b"\r\n", b""}:
        lines.append(line)
    return b"".join(lines) + b"\r\n" if lines else b""


def _length(head: bytes) -> int:
    found = re.search(rb"(?i)content-length: *(\d+)", head)
    return int(found[1]) if found else 0


def _kind(head: bytes) -> str:
    method, target, _ = head.split(b" ", 2)
    if method == b"GET" and b"list-type=2" in target:
        return "LIST"
    if method == b"GET" and re.search(rb"(?im)^range:", head):
        return "PROBE"
    if method == b"PUT" and re.search(rb"(?im)^if-none-match:", head):
        return "CREATE"
    return method.decode()


def _one_shot(head: bytes) -> bytes:
    return head[:-2] + b"Connection: close\r\n\r\n"


def _kept_alive(head: bytes) -> bytes:
    return re.sub(rb"(?im)^connection: close\r\n", b"", head)


def _unchunked(head: bytes, reader: BinaryIO) -> tuple[bytes, bytes]:
    body = b""
    while size := int(reader.readline().split(b";")[0], 16):
        body += reader.read(size)
        reader.readline()
    head = re.sub(rb"(?im)^transfer-encoding:.*\r\n", b"", head)
    return _kept_alive(head[:-2] + b"Content-Length: %d\r\n\r\n" % len(body)), body


def _refusal(status: int, code: str, region: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Region>{region}</Region></Error>".encode()
    return b"HTTP/1.1 %d Fault\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )
