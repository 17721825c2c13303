"""Three hosts, each in a network namespace of its own where the system lets us make them."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvstrata.core.keys import OffloadKey
from kvstrata.core.results import LookupResult
from kvstrata.testing import numbered_key
from tests.p2p_hosts import HostProcess, eventually, secret_file

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")
CHUNK_BYTES = 1 << 20
NUM_EACH = 8
KEYS = {name: [numbered_key(100 * i + j) for j in range(NUM_EACH)] for i, name in enumerate(NAMES)}
HIT, MISS = LookupResult.HIT, LookupResult.MISS


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Processes:
    """Three processes on one network."""

    def __init__(self, stack: ExitStack, secret: str) -> None:
        self._stack, self._secret = stack, secret
        self._addresses: dict[str, str] = {}

    def prefix(self, name: str) -> list[str]:
        return []

    def address(self, name: str) -> str:
        return self._addresses.setdefault(name, f"127.0.0.{10 + NAMES.index(name)}:17071")

    def start(self, name: str) -> HostProcess:
        host = HostProcess(
            name,
            prefix=self.prefix(name),
            listen=self.address(name),
            peers={other: self.address(other) for other in NAMES if other != name},
            secret_file=self._secret,
            chunk_bytes=CHUNK_BYTES,
            num_slots=4 * NUM_EACH,
            connect_timeout_s=0.5,
            silence_timeout_s=0.5,
            backoff_min_s=0.05,
            backoff_max_s=0.1,
        )
        self._stack.enter_context(host)
        host.put(*KEYS[name])
        return host


class Namespaces(Processes):
    """Three network namespaces and a bridge in a fourth; nothing outside is touched."""

    def __init__(self, stack: ExitStack, secret: str) -> None:
        super().__init__(stack, secret)
        self._hub = self._add("hub")
        ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._hub, "link", "set", "bridge", "up")
        for number, name in enumerate(NAMES, 1):
            space = self._add(name)
            ip("link", "add", "name", name, "netns", self._hub, "type", "veth",
               "peer", "name", "eth0", "netns", space)  # fmt: skip
            ip("-n", self._hub, "link", "set", "dev", name, "master", "bridge", "up")
            ip("-n", space, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            self._addresses[name] = f"10.77.0.{number}:7071"

    def _space(self, name: str) -> str:
        return f"kvstrata-{os.getpid()}-{name}"

    def _add(self, name: str) -> str:
        try:
            ip("netns", "add", self._space(name))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces can't be made here: {error}")
        self._stack.callback(ip, "netns", "delete", self._space(name))
        return self._space(name)

    @override
    def prefix(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self._space(name)]

    def cut_off(self, name: str) -> None:
        ip("-n", self._hub, "link", "set", "dev", name, "down")

    def reconnect(self, name: str) -> None:
        ip("-n", self._hub, "link", "set", "dev", name, "up")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(stack, secret_file(tmp_path))


@pytest.fixture
def namespaces(tmp_path: Path) -> Iterator[Namespaces]:
    with ExitStack() as stack:
        yield Namespaces(stack, secret_file(tmp_path))


@pytest.fixture(params=["namespaces", "processes"])
def world(request: pytest.FixtureRequest) -> Any:  # noqa: ANN401
    return request.getfixturevalue(request.param)


def has_all(host: HostProcess, *keys: OffloadKey) -> bool:
    return set(host.look_up(*keys)) == {HIT}


def assert_all_is_given_back(*hosts: HostProcess) -> None:
    eventually(lambda: not any(host.ask("stats")["num_leased"] for host in hosts), "leases")
    for host in hosts:
        assert host.ask("stats")["num_jobs"] == 0
        assert host.ask("stats")["internal_errors"] == 0


def test_each_host_pulls_what_the_others_have(world: Processes) -> None:
    hosts = {name: world.start(name) for name in NAMES}
    for name, host in hosts.items():
        theirs = [key for other in NAMES if other != name for key in KEYS[other]]
        eventually(partial(has_all, host, *theirs), "hits")
        assert host.fetch(*theirs) == set()
        assert host.look_up(numbered_key(9999)) == [MISS]
    assert_all_is_given_back(*hosts.values())


def test_a_killed_host_costs_its_chunks_and_serves_again_after_a_restart(
    world: Processes,
) -> None:
    a, b, c = (world.start(name) for name in NAMES)
    eventually(lambda: has_all(c, *KEYS["a"], *KEYS["b"]), "hits")
    c.send("fetch", *KEYS["a"], *KEYS["b"])
    a.kill()  # before, amid or after its part
    lost = c.receive_failed(*KEYS["a"], *KEYS["b"])
    assert lost <= set(KEYS["a"])
    assert c.fetch(*KEYS["b"]) == set()
    eventually(lambda: c.look_up(*KEYS["a"]) == [MISS] * NUM_EACH, "the loss")
    a = world.start("a")
    eventually(lambda: has_all(c, *KEYS["a"]), "the restarted host")
    assert c.fetch(*KEYS["a"]) == set()
    assert_all_is_given_back(a, b, c)


def test_a_host_killed_while_it_is_stuck_amid_a_transfer_fails_only_what_did_not_come(
    world: Processes,
) -> None:
    a, b, c = (world.start(name) for name in NAMES)
    eventually(lambda: has_all(c, *KEYS["a"], *KEYS["b"]), "hits")
    a.process.send_signal(signal.SIGSTOP)
    c.send("fetch", *KEYS["a"], *KEYS["b"])
    a.kill()
    assert c.receive_failed(*KEYS["a"], *KEYS["b"]) == set(KEYS["a"])
    assert_all_is_given_back(b, c)


def test_a_host_that_says_nothing_is_left_out_until_it_speaks(world: Processes) -> None:
    a, b, c = (world.start(name) for name in NAMES)
    eventually(lambda: has_all(c, *KEYS["a"], *KEYS["b"]), "hits")
    with b.frozen():
        assert c.fetch(*KEYS["a"], *KEYS["b"]) == set(KEYS["b"])
        assert c.look_up(*KEYS["b"]) == [MISS] * NUM_EACH
        assert c.fetch(*KEYS["a"]) == set()
    eventually(lambda: has_all(c, *KEYS["b"]), "the host's return")
    assert c.fetch(*KEYS["b"]) == set()
    assert_all_is_given_back(a, b, c)


def test_a_host_cut_off_from_the_network_is_taken_back_when_it_is_healed(
    namespaces: Namespaces,
) -> None:
    a, b, c = (namespaces.start(name) for name in NAMES)
    eventually(lambda: has_all(c, *KEYS["a"], *KEYS["b"]), "hits")
    namespaces.cut_off("a")
    assert c.fetch(*KEYS["a"], *KEYS["b"]) == set(KEYS["a"])
    assert c.look_up(*KEYS["a"]) == [MISS] * NUM_EACH
    assert c.fetch(*KEYS["b"]) == set()
    eventually(lambda: a.look_up(*KEYS["b"]) == [MISS] * NUM_EACH, "its own view")
    namespaces.reconnect("a")
    eventually(lambda: has_all(c, *KEYS["a"]) and has_all(a, *KEYS["b"]), "healing")
    assert c.fetch(*KEYS["a"]) == set()
    assert a.fetch(*KEYS["c"]) == set()
    assert_all_is_given_back(a, b, c)
