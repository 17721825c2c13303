"""The directory in a real Redis server: hosts find chunks of peers that nobody named to them."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.core.clock import SystemClock
from kvstrata.core.errors import ConfigError
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.core.tier import TierEnv
from kvstrata.testing import FakeRegion, numbered_key
from kvstrata.tiers.p2p import P2pTier
from tests.integration.test_p2p_managers import free_port
from tests.p2p_hosts import Host, HostProcess, eventually

redis = pytest.importorskip("redis")

A, B, C = (numbered_key(i) for i in range(3))
HIT, MISS = LookupResult.HIT, LookupResult.MISS
LISTEN = "127.0.0.1:0"


class RedisServer:
    """A Redis server of its own for one test."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            ["redis-server", "--port", str(self._port), "--bind", "127.0.0.1", "--save", "",
             "--dir", str(self._folder)],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.client = redis.Redis.from_url(self.url)
        eventually(self._answers, "Redis")

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def stop(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("needs the redis-server command")
    server = RedisServer(tmp_path)
    yield server
    server.stop()


def finds(host: Host, *expected: LookupResult) -> bool:
    return host.look_up(A, B, C)[: len(expected)] == list(expected)


def test_hosts_find_chunks_of_peers_that_nobody_told_them_of(server: RedisServer) -> None:
    with (
        Host("one", listen=LISTEN, directory=server.url) as one,
        Host("two", listen=LISTEN, directory=server.url) as two,
        Host("reader", directory=server.url) as reader,
    ):
        one.primary.put(A)
        two.primary.put(B)
        eventually(lambda: finds(reader, HIT, HIT, MISS), "both")
        assert reader.fetch(A, B).failed == frozenset()
        assert one.stats()["served_chunks"] == 1
        assert one.stats()["lookup_requests_served"] == 0  # nobody was asked
        eventually(lambda: finds(one, MISS, HIT, MISS), "the other's, never its own")


def test_a_chunk_that_left_leaves_the_directory(server: RedisServer) -> None:
    with (
        Host("owner", listen=LISTEN, directory=server.url) as owner,
        Host("reader", directory=server.url, hit_ttl_s=0.01) as reader,
    ):
        owner.primary.put(A, B)
        eventually(lambda: finds(reader, HIT, HIT), "both")
        owner.primary.evict(A)
        eventually(lambda: finds(reader, MISS, HIT), "only one")
        owner.tier.shelf.clear()
        eventually(lambda: finds(reader, MISS, MISS), "none")


@pytest.mark.slow
def test_entries_of_a_dead_host_count_no_more_once_its_lease_is_over(server: RedisServer) -> None:
    with (
        HostProcess("owner", listen=LISTEN, directory=server.url, directory_lease_s=0.3) as owner,
        Host("reader", directory=server.url, hit_ttl_s=0.01) as reader,
    ):
        owner.put(A)
        eventually(lambda: finds(reader, HIT), "the chunk")
        owner.kill()
        eventually(lambda: finds(reader, MISS), "the lease's end")
        with HostProcess("owner", listen=LISTEN, directory=server.url) as again:
            again.put(B)
            eventually(lambda: finds(reader, MISS, HIT), "what the new process has, elsewhere")
            assert reader.fetch(A, B).failed == {A}


def test_a_host_that_closes_takes_its_entries_back_at_once(server: RedisServer) -> None:
    with Host("reader", directory=server.url, hit_ttl_s=0.01) as reader:
        with Host("owner", listen=LISTEN, directory=server.url, directory_lease_s=600) as owner:
            owner.primary.put(A)
            eventually(lambda: finds(reader, HIT), "the chunk")
        eventually(lambda: finds(reader, MISS), "its end")


def test_without_redis_everything_is_a_miss_and_with_it_again_all_is_published_anew(
    server: RedisServer,
) -> None:
    with (
        Host("owner", listen=LISTEN, directory=server.url, directory_lease_s=0.3) as owner,
        Host("reader", directory=server.url, hit_ttl_s=0.01) as reader,
    ):
        owner.primary.put(A)
        eventually(lambda: finds(reader, HIT), "the chunk")
        server.stop()
        eventually(lambda: finds(reader, MISS), "the outage")
        owner.primary.put(B)
        server.start()
        eventually(lambda: finds(reader, HIT, HIT), "all of it")
        assert reader.fetch(A, B).failed == frozenset()


def test_hosts_of_another_namespace_are_not_found(server: RedisServer) -> None:
    with (
        Host("owner", listen=LISTEN, directory=server.url, namespace="other model") as owner,
        Host("reader", directory=server.url) as reader,
    ):
        owner.primary.put(A)
        eventually(lambda: bool(server.client.keys("*")), "its entries")
        assert finds(reader, MISS)


def test_nonsense_in_the_directory_harms_nobody(server: RedisServer) -> None:
    with (
        Host("owner", listen=LISTEN, directory=server.url) as owner,
        Host("reader", directory=server.url) as reader,
    ):
        owner.primary.put(B)
        eventually(lambda: finds(reader, MISS, HIT), "the chunk")
        (entry,) = server.client.keys("*chunk:*")
        prefix = entry[: entry.index(b"chunk:")]
        server.client.sadd(prefix + b"chunk:" + C, b"\xff\xfe", b"ghost\0edition", b"liar\0edition")
        server.client.set(prefix + b"host:ghost", b"edition nowhere")
        server.client.set(prefix + b"host:liar", b"edition 127.0.0.1:1")  # nobody listens there
        eventually(lambda: reader.fetch(C).failed == {C})
        assert reader.fetch(B).failed == frozenset()
        assert reader.tier.lookup(B, ReqContext("r")) is HIT


def test_peers_met_through_the_directory_are_bounded(server: RedisServer) -> None:
    with (
        Host("one", listen=LISTEN, directory=server.url) as one,
        Host("two", listen=LISTEN, directory=server.url) as two,
        Host("reader", directory=server.url, num_met_max=1, hit_ttl_s=0.01) as reader,
    ):
        one.primary.put(A)
        two.primary.put(B)
        eventually(lambda: finds(reader, HIT, HIT), "both")
        for key in (A, B, A):
            assert reader.fetch(key).failed == frozenset()
            assert reader.stats()["num_peers"] == 1


def test_a_directory_needs_an_address_that_leads_here() -> None:
    raw = {
        "identity": "a", "listen": "0.0.0.0:0", "secret_env": "PATH", "directory": "redis://h",
    }  # fmt: skip
    env = TierEnv("p2p", "namespace", SystemClock(), "tiers[0]")
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.advertise: is required"):
        P2pTier.from_config(FakeRegion(2, 4096), raw, env)
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.directory: "):
        P2pTier.from_config(FakeRegion(2, 4096), {"identity": "a", "directory": "what"}, env)
