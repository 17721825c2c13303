"""Hosts for tests of the p2p tier: a small primary with a tier on it, here or in a process.

Run as a module it is such a host, told by JSON lines what to do.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from kvstrata.core.clock import Clock, SystemClock
from kvstrata.core.keys import OffloadKey
from kvstrata.core.settings import parse_settings
from kvstrata.core.tier import ChunkShelf, TierEnv
from kvstrata.testing import FakeRegion, pattern, poison
from kvstrata.tiers.p2p import P2pTier
from kvstrata.tiers.p2p.settings import P2pSettings

ROOT: Final = Path(__file__).parents[1]
SECRET: Final = "correct horse battery staple"  # noqa: S105
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

    def __init__(self, slots: FakeRegion, shelf: ChunkShelf, first: int = 0) -> None:
        self.slots, self._shelf = slots, shelf
        self._free = list(range(slots.num_slots - 1, first - 1, -1))
        self.slot_of: dict[OffloadKey, int] = {}

    def put(self, *keys: OffloadKey) -> None:
        for key in keys:
            slot = self._free.pop()
            self.slots[slot][:] = pattern(key, self.slots.chunk_bytes)
            self.slot_of[key] = slot
            self._shelf.publish([key], [slot])

    def corrupt(self, key: OffloadKey) -> None:
        """Change a byte behind the shelf's back, as a stray write would."""
        self.slots[self.slot_of[key]][17] ^= 0xFF

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

    @property
    def address(self) -> str:
        return str(self.tier.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        assert list(self.tier.shutdown(PATIENCE_S)) == []
        self.tier.shelf.check()


class HostProcess:
    """A host in a process of its own."""

    def __init__(
        self, identity: str, *, prefix: Sequence[str] = (), **options: object
    ) -> None:
        """Start it; `prefix` is a command to run it under, `options` are those of `Host`."""
        self.identity = identity
        environ = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
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

    def ask(self, verb: str, *arguments: object) -> Any:  # noqa: ANN401
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:  # noqa: ANN401
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 2 * PATIENCE_S)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"host {self.identity} says nothing"
        return json.loads(line)

    def put(self, *keys: OffloadKey) -> None:
        self.ask("put", *(key.hex() for key in keys))

    def evict(self, *keys: OffloadKey) -> None:
        self.ask("evict", *(key.hex() for key in keys))

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
    with Host(identity, **options) as host:
        print(json.dumps(host.address), flush=True)  # noqa: T201
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            answer: object = None
            if verb == "stats":
                stats = host.tier.get_stats()
                answer = {**stats.gauges, **stats.counters}
            else:
                getattr(host.primary, verb)(*(OffloadKey(bytes.fromhex(a)) for a in arguments))
            print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
