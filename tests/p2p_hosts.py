"""Hosts for tests of the p2p tier: a small primary with a tier on it, here or in a process.

Run as a module it is such a host, told by JSON lines what to do.
"""

import itertools
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from kvstrata.core.clock import Clock, SystemClock
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult
from kvstrata.core.settings import parse_settings
from kvstrata.core.tier import ChunkShelf, TierEnv
from kvstrata.testing import FakeRegion, pattern, poison
from kvstrata.testing.tier_calls import IDLE_STEP, wait_for
from kvstrata.tiers.p2p import P2pTier
from kvstrata.tiers.p2p.settings import P2pSettings

ROOT: Final = Path(__file__).parents[1]
SECRET: Final = "correct horse battery staple"
CHUNK_BYTES: Final = 5_000
NAMESPACE: Final = "model-of-the-tests"
PATIENCE_S: Final = 30.0

# Generous towards a busy machine. Tests of silence shorten them.
BASE: Final[Mapping[str, Any]] = {
    "connect_timeout_s": 10.0,
    "silence_timeout_s": 10.0,
    "num_connections": 2,
    "backoff_min_s": 0.01,
    "backoff_max_s": 0.02,
}


def secret_file(folder: Path, text: str = SECRET) -> str:
    """Write a shared secret and return its path."""
    path = folder / f"secret-{abs(hash(text))}"
    path.write_text(text)
    return str(path)


def eventually(is_true: Callable[[], bool], what: str = "") -> None:
    """Wait, within bounds, for another thread or process to make it true."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.002)):
        if is_true():
            return
        pause.wait(0.002)
    raise AssertionError(f"never came true: {what}")


class SmallPrimary:
    """Slots and which key is in which, told to a shelf as a primary has to."""

    def __init__(self, slots: FakeRegion, shelf: ChunkShelf) -> None:
        self.slots, self._shelf = slots, shelf
        self._free = list(range(slots.num_slots - 1, -1, -1))
        self.slot_of: dict[OffloadKey, int] = {}

    def put(self, *keys: OffloadKey) -> None:
        for key in keys:
            slot = self._free.pop()
            self.slots[slot][:] = pattern(key, self.slots.chunk_bytes)
            self.slot_of[key] = slot
            self._shelf.publish([key], [slot])

    def take(self, num: int) -> list[int]:
        """Take free slots out, for a load."""
        return [self._free.pop() for _ in range(num)]

    def give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            poison(self.slots.row(slot))
        self._free += slots

    def evict(self, *keys: OffloadKey) -> None:
        self._shelf.withdraw(keys)
        for key in keys:
            slot = self.slot_of.pop(key)
            poison(self.slots.row(slot))
            self._free.append(slot)


class Host:
    """A tier and the small primary that it serves, in this process."""

    def __init__(
        self,
        identity: str,
        *,
        peers: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        slots: FakeRegion | None = None,
        num_slots: int = 16,
        chunk_bytes: int = CHUNK_BYTES,
        namespace: str = NAMESPACE,
        **settings: object,
    ) -> None:
        self.slots = slots or FakeRegion(num_slots, chunk_bytes)
        raw = {"identity": identity, "peers": peers or {}, **BASE, **settings}
        env = TierEnv("p2p", namespace, clock or SystemClock(), "tiers[0]")
        self.tier = P2pTier(self.slots, parse_settings(P2pSettings, raw, env.path), env)
        self.primary = SmallPrimary(self.slots, self.tier.shelf)

        self._job_ids = itertools.count(1_000)

    @property
    def address(self) -> str:
        return str(self.tier.address)

    def look_up(self, *keys: OffloadKey, hint: str | None = None) -> list[LookupResult]:
        """Ask step by step until all is known."""
        ctx = ReqContext("look up", None if hint is None else {"kvstrata": {"peer": hint}})
        answers: list[LookupResult] = []

        def is_known() -> bool:
            answers[:] = self.tier.lookup_many(keys, ctx)
            self.tier.on_schedule_end(IDLE_STEP)
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING}.intersection(answers)

        eventually(is_known, "lookup")
        return answers

    def fetch(self, *keys: OffloadKey, hint: str | None = None) -> JobResult:
        """Load into free slots, check every byte, and give the slots back, poisoned."""
        ctx = ReqContext("fetch", None if hint is None else {"kvstrata": {"peer": hint}})
        job_id, slots = next(self._job_ids), self.primary.take(len(keys))
        self.tier.submit_load(LoadJob(JobId(job_id), keys, slots, ctx))
        result = wait_for(self.tier, job_id)[job_id]
        for key, slot in zip(keys, slots, strict=True):
            assert key in result.failed or self.slots[slot] == pattern(key, self.slots.chunk_bytes)
        self.primary.give_back(slots)
        return result

    def stats(self) -> dict[str, float]:
        stats = self.tier.get_stats()
        return {**stats.gauges, **stats.counters}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        assert list(self.tier.shutdown(PATIENCE_S)) == []
        self.tier.shelf.check()


class Link:
    """One proxied connection; when either side ends, so does the other."""

    def __init__(self, caller: socket.socket, called: socket.socket) -> None:
        self.sockets = caller, called
        self.is_over = False
        self.num_pumps = 2
        self.budget_bytes = math.inf


class Proxy:
    """A wire between two hosts that a test can stop, and cut connection by connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._budget_bytes = math.inf
        self.num_passed_bytes = 0
        self.is_damaging = False  # payload that passes
        self.links: list[Link] = []
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            try:
                called = socket.create_connection(self._target)
            except OSError:
                caller.close()
                continue
            link = Link(caller, called)
            with self._changed:
                link.budget_bytes = self._budget_bytes
                self.links.append(link)
            self._spawn(self._pump, link, caller, called)
            self._spawn(self._pump, link, called, caller)

    def _pump(self, link: Link, source: socket.socket, sink: socket.socket) -> None:
        is_answer = source is link.sockets[1]
        with suppress(OSError):
            while (received := source.recv(65536)) and not link.is_over:
                if is_answer:
                    self._wait_for_budget(link, len(received))
                    if self.is_damaging and len(received) > 2_000:
                        place = len(received) // 2
                        flipped = bytes([received[place] ^ 1])
                        received = received[:place] + flipped + received[place + 1 :]
                sink.sendall(received)
        self._end(link)
        with self._changed:
            link.num_pumps -= 1
            if not link.num_pumps:
                for sock in link.sockets:
                    sock.close()

    def _wait_for_budget(self, link: Link, num_bytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: link.budget_bytes > 0 or link.is_over)
            link.budget_bytes -= num_bytes
            self.num_passed_bytes += num_bytes

    def _end(self, link: Link) -> None:
        with self._changed:
            link.is_over = True
            self._changed.notify_all()
            for sock in link.sockets:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def stop_after(self, num_bytes: float) -> None:
        """Let about so many more bytes of answers through on each connection, then none."""
        with self._changed:
            self._budget_bytes = num_bytes
            for link in self.links:
                link.budget_bytes = num_bytes
            self._changed.notify_all()

    def resume(self) -> None:
        self.stop_after(math.inf)

    def cut(self, link: int) -> None:
        """End one connection; the others know nothing of it."""
        self._end(self.links[link])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(PATIENCE_S)
        self._listener.close()
        for link in self.links:
            self._end(link)
        for thread in self._threads:
            thread.join(PATIENCE_S)


class HostProcess:
    """A host in a process of its own."""

    def __init__(self, identity: str, *, prefix: Sequence[str] = (), **options: object) -> None:
        """Start it; `prefix` is a command to run it under, `options` are those of `Host`."""
        self.identity = identity
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.p2p_hosts", identity, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environ,
            text=True,
            bufsize=1,
        )
        self.address = str(self._receive())

    def ask(self, verb: str, *keys: OffloadKey) -> Any:  # noqa: ANN401
        self.send(verb, *keys)
        return self._receive()

    def send(self, verb: str, *keys: OffloadKey) -> None:
        """Tell it what to do without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *(key.hex() for key in keys)]) + "\n")
        self.process.stdin.flush()

    def _receive(self) -> Any:  # noqa: ANN401
        assert self.process.stdout is not None
        poll = select.poll()  # unlike select(), it takes any number of open files
        poll.register(self.process.stdout, select.POLLIN)
        ready = poll.poll(2000 * PATIENCE_S)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"host {self.identity} says nothing"
        return json.loads(line)

    def look_up(self, *keys: OffloadKey) -> list[LookupResult]:
        return [LookupResult(value) for value in self.ask("look_up", *keys)]

    def fetch(self, *keys: OffloadKey) -> set[OffloadKey]:
        """Load and check every byte; return the keys that did not come."""
        self.send("fetch", *keys)
        return self.receive_failed(*keys)

    def receive_failed(self, *keys: OffloadKey) -> set[OffloadKey]:
        """Return the keys that did not come with the fetch that was sent."""
        return {keys[i] for i in self._receive()}

    def put(self, *keys: OffloadKey) -> None:
        self.ask("put", *keys)

    def evict(self, *keys: OffloadKey) -> None:
        self.ask("evict", *keys)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let it say and do nothing for a while."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def main() -> None:
    """Be a host: print the address, then obey one JSON line at a time."""
    identity, options = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not for the test
    with Host(identity, **options) as host:
        print(json.dumps(host.address), file=answers)
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            answer: object = None
            keys = [OffloadKey(bytes.fromhex(text)) for text in arguments]
            match verb:
                case "stats":
                    answer = host.stats()
                case "look_up":
                    answer = [result.value for result in host.look_up(*keys)]
                case "fetch":
                    answer = [keys.index(key) for key in host.fetch(*keys).failed]
                case _:
                    getattr(host.primary, verb)(*keys)
            print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
