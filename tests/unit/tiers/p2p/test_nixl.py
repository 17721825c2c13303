"""NIXL as the plane for payload, where it is installed: what differs from sockets."""

import os
import signal
from importlib.util import find_spec

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import JobId
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LoadJob, LookupResult
from kvstrata.testing import numbered_key, pattern
from kvstrata.testing.tier_calls import wait_for
from kvstrata.tiers.p2p.nixl_plane import MODULES
from tests.p2p_hosts import Host, HostProcess, eventually

HAS_NIXL = any(find_spec(name.partition(".")[0]) for name in MODULES)
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="needs nixl")

HIT, MISS = LookupResult.HIT, LookupResult.MISS
KEYS = [numbered_key(i) for i in range(8)]


@pytest.mark.skipif(HAS_NIXL, reason="nixl is installed")
def test_a_host_without_nixl_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.payload: needs nixl"):
        Host("reader", payload="nixl")


@needs_nixl
@pytest.mark.parametrize(("ours", "theirs"), [("nixl", "tcp"), ("tcp", "nixl")])
def test_a_host_with_nixl_and_one_without_meet_over_sockets(ours: str, theirs: str) -> None:
    with (
        HostProcess("owner", listen="127.0.0.1:0", payload=theirs) as owner,
        Host("reader", peers={"owner": owner.address}, payload=ours) as reader,
    ):
        owner.put(*KEYS)
        assert reader.fetch(*KEYS).failed == frozenset()


@needs_nixl
def test_a_chunk_that_left_amid_a_read_is_void() -> None:
    with (
        HostProcess("owner", listen="127.0.0.1:0", payload="nixl") as owner,
        Host("reader", peers={"owner": owner.address}, payload="nixl") as reader,
    ):
        owner.put(*KEYS)
        assert reader.look_up(*KEYS) == [HIT] * 8
        owner.evict(KEYS[2])
        assert reader.fetch(*KEYS).failed == {KEYS[2]}


@needs_nixl
@pytest.mark.slow
def test_a_peer_killed_amid_a_read_gives_the_slots_back() -> None:
    chunk_bytes = 4 << 20
    with (
        HostProcess("owner", listen="127.0.0.1:0", payload="nixl", chunk_bytes=chunk_bytes)
        as owner,
        Host("reader", peers={"owner": owner.address}, payload="nixl", chunk_bytes=chunk_bytes,
             silence_timeout_s=1.0) as reader,
    ):  # fmt: skip
        owner.put(*KEYS)
        assert reader.fetch(KEYS[0]).failed == frozenset()
        assert reader.look_up(*KEYS) == [HIT] * 8
        reader.tier.submit_load(LoadJob(JobId(1), KEYS, range(8), ReqContext("r")))
        eventually(lambda: bytes(reader.slots[0][:1]) != b"\xee", "the first bytes")
        os.kill(owner.process.pid, signal.SIGKILL)
        result = wait_for(reader.tier, 1)[1]
        for slot, key in enumerate(KEYS):
            assert key in result.failed or reader.slots[slot] == pattern(key, chunk_bytes)
        before = [bytes(reader.slots[slot]) for slot in range(8)]
        eventually(lambda: reader.look_up(*KEYS) == [MISS] * 8, "the loss")
        assert before == [bytes(reader.slots[slot]) for slot in range(8)]


@needs_nixl
@pytest.mark.slow
def test_a_peer_killed_while_it_is_frozen_gives_the_slots_back() -> None:
    with (
        HostProcess("owner", listen="127.0.0.1:0", payload="nixl") as owner,
        Host("reader", peers={"owner": owner.address}, payload="nixl", silence_timeout_s=1.0)
        as reader,
    ):  # fmt: skip
        owner.put(*KEYS)
        assert reader.fetch(KEYS[0]).failed == frozenset()
        os.kill(owner.process.pid, signal.SIGSTOP)
        reader.tier.submit_load(LoadJob(JobId(1), KEYS, range(8), ReqContext("r")))
        os.kill(owner.process.pid, signal.SIGKILL)
        assert wait_for(reader.tier, 1)[1].failed == set(KEYS)
