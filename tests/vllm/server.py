"""vLLM's OpenAI server in a process group of its own, and a client."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

from tests.vllm.engine import transfer_config

START_S = 420


class Server:
    """A running server."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            **env,
        }
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=file, stderr=file, env=environment, start_new_session=True,
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        pause = Event()
        for _ in range(START_S):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.get("/health")
            except OSError:
                pause.wait(1)
            else:
                return
        raise TimeoutError(self.log.read_text()[-4000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def complete(self, tokens: list[int], num_new: int = 8, **hints: Any) -> list[int]:
        """Generate greedily for a prompt of token ids; keyword arguments are hints."""
        body: dict[str, Any] = {
            "model": "tiny", "prompt": tokens, "max_tokens": num_new, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        if hints:
            body["kv_transfer_params"] = {"kvstrata": hints}
        return list(self.post("/v1/completions", body)["choices"][0]["token_ids"])

    def forget_device_blocks(self) -> None:
        """Empty the engine's own prefix cache."""
        self.post("/reset_prefix_cache", {})

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [
            line
            for line in self.get("/metrics").splitlines()
            if line.startswith(f"{name}{{") and all(label in line for label in wanted)
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def wait_for_metric(self, name: str, value: float, **labels: str) -> None:
        """Return once a metric is at least this high."""
        pause = Event()
        for _ in range(240):
            if self.metric(name, **labels) >= value:
                return
            pause.wait(0.25)
        raise TimeoutError(f"{name} {labels} is {self.metric(name, **labels)}, not {value}")

    def terminate(self) -> None:
        """Ask the server to stop as a service manager does, and return once it has."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(90)

    def stop(self) -> None:
        """Stop gracefully, and hard if need be."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.kill()

    def kill(self) -> None:
        """Kill every process of the server at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@contextmanager
def serving(command: Sequence[str], log: Path, **env: str) -> Iterator[Server]:
    """A server that is ready, started by a command, and gone at the end."""
    running = Server(command, log, env)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


@contextmanager
def server(
    model: Path, extra: Mapping[str, Any], log: Path, *options: str, **env: str
) -> Iterator[Server]:
    """A server of a tiny model, that is ready, and gone at the end."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "2048",
        "--kv-transfer-config", json.dumps(transfer_config(dict(extra))), *options,
    ]  # fmt: skip
    with serving(command, log, **env) as running:
        yield running
