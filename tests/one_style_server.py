"""A small S3 server on loopback that knows one bucket and one way of naming it."""

import re
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self
from urllib.parse import unquote, urlsplit

from typing_extensions import override

BUCKET = "kvstrata-test"


class OneStyleServer(ThreadingHTTPServer):
    """Keeps objects in memory, and refuses requests of the other style as such stores do.

    With "path" the first part of a path is the bucket. With "virtual" this host is the bucket's
    own, and the whole path the object's.
    """

    daemon_threads = True

    def __init__(self, style: Literal["path", "virtual"]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.style = style
        self.objects: dict[str, bytes] = {}
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def settings(self, addressing: str) -> dict[str, Any]:
        return {
            "url": f"s3://{BUCKET}/prefix",
            "endpoint": f"http://127.0.0.1:{self.server_address[1]}",
            "region": "us-east-1",
            "access_key_id": "key",
            "secret_access_key": "secret",
            "addressing": addressing,
        }

    @override
    def __enter__(self) -> Self:
        self._thread.start()
        return self

    @override
    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OneStyleServer

    def _name(self) -> str | None:
        """The object's name; None if the bucket is not where it should be, and that was said."""
        path = unquote(urlsplit(self.path).path)[1:]
        names_bucket = path.partition("/")[0] == BUCKET
        if self.server.style == "path":
            if names_bucket:
                return path.partition("/")[2]
            self._refuse(HTTPStatus.NOT_FOUND, "NoSuchBucket")
        else:
            if not names_bucket:
                return path
            self._refuse(HTTPStatus.FORBIDDEN, "SecondLevelDomainForbidden")
        return None

    def do_GET(self) -> None:
        name = self._name()
        if name is None:
            return
        if "list-type=2" in self.path:
            self._answer(HTTPStatus.OK, b"<ListBucketResult></ListBucketResult>")
        elif (body := self.server.objects.get(name)) is None:
            self._refuse(HTTPStatus.NOT_FOUND, "NoSuchKey")
        elif part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(part[1]), min(int(part[2]), len(body) - 1)
            total = {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
            self._answer(HTTPStatus.PARTIAL_CONTENT, body[first : last + 1], total)
        else:
            self._answer(HTTPStatus.OK, body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self._name()
        if name is None:
            return
        if self.headers.get("If-None-Match") == "*" and name in self.server.objects:
            self._refuse(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
            return
        self.server.objects[name] = body
        self._answer(HTTPStatus.OK)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self._name() is None:
            return
        for name in re.findall("<Key>([^<]*)</Key>", body):
            self.server.objects.pop(name, None)
        self._answer(HTTPStatus.OK, b"<DeleteResult></DeleteResult>")

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _answer(
        self, status: HTTPStatus, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, *_: object) -> None:
        pass
