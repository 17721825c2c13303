"""Peers that die, stall, restart, reuse slots or say nothing: no wrong byte, no stall, no leak."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kvstrata.core.keys import JobId
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, LoadJob, LookupResult
from kvstrata.testing import FakeClock, numbered_key, pattern, poison
from kvstrata.testing.tier_calls import IDLE_STEP, wait_for
from tests.p2p_hosts import PATIENCE_S, Host, HostProcess, Proxy, eventually

A, B, C, D = (numbered_key(i) for i in range(4))
LARGE_BYTES = 8 << 20  # more than the buffers between two sockets hold
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def submit(host: Host, job_id: int, keys: list, slots: list[int]) -> None:  # type: ignore[type-arg]
    host.tier.submit_load(LoadJob(JobId(job_id), keys, slots, ReqContext(f"job {job_id}")))


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """A socket that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_copy_that_outlives_its_lease_and_its_slot_is_thrown_away() -> None:
    clock = FakeClock()
    with (
        Host("owner", listen="127.0.0.1:0", clock=clock, chunk_bytes=LARGE_BYTES, num_slots=2,
             lease_s=0.1) as owner,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address}, clock=clock, chunk_bytes=LARGE_BYTES,
             num_slots=2) as reader,
    ):  # fmt: skip
        owner.primary.put(A)
        assert reader.look_up(A) == [HIT]
        wire.stop_after(100_000)
        submit(reader, 1, [A], [0])
        eventually(lambda: owner.stats()["num_leased"] == 1, "the lease")
        eventually(lambda: wire.num_passed_bytes > 100_000, "the transfer's start")
        assert list(owner.tier.shelf.leased()) == [A]
        clock.advance(0.15)
        assert not owner.tier.shelf.leased()
        owner.primary.evict(A)  # poisons the slot
        owner.primary.put(B)
        wire.resume()
        assert wait_for(reader.tier, 1)[1] == JobResult(JobId(1), frozenset({A}))
        assert owner.stats()["reused_chunks"] == 1
        assert reader.look_up(A) == [MISS]
        assert reader.stats()["num_peers_up"] == 1


def test_a_mute_peer_is_a_miss_and_the_next_lookups_fail_fast(mute: socket.socket) -> None:
    address = f"127.0.0.1:{mute.getsockname()[1]}"
    with Host(
        "reader", peers={"mute": address}, clock=FakeClock(), connect_timeout_s=0.05
    ) as reader:
        assert reader.tier.lookup(A, ReqContext("first")) is RETRY
        assert reader.look_up(A) == [MISS]
        num_asked = reader.stats()["lookup_requests"]
        assert reader.tier.lookup(B, ReqContext("second")) is MISS
        reader.tier.on_schedule_end(IDLE_STEP)
        assert reader.stats()["lookup_requests"] == num_asked
        assert reader.fetch(A, B).failed == {A, B}


def test_a_peer_that_falls_silent_costs_one_timeout_and_no_more(mute: socket.socket) -> None:
    with (
        Host("owner", listen="127.0.0.1:0") as owner,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address}, clock=FakeClock(),
             silence_timeout_s=0.1) as reader,
    ):  # fmt: skip
        owner.primary.put(A)
        assert reader.look_up(A) == [HIT]
        wire.stop_after(0)
        assert reader.fetch(A).failed == {A}
        assert reader.tier.lookup(A, ReqContext("next")) is MISS
        assert reader.stats()["lost_peers"] == 1


def test_what_only_a_lost_peer_had_is_a_hit_no_more_though_others_live() -> None:
    with (
        Host("owner", listen="127.0.0.1:0") as owner,
        Host("other", listen="127.0.0.1:0") as other,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address, "other": other.address}, clock=FakeClock(),
             silence_timeout_s=0.2) as reader,
    ):  # fmt: skip
        owner.primary.put(A, B)
        other.primary.put(B)
        assert reader.look_up(A, C) == [HIT, MISS]
        wire.stop_after(0)
        assert reader.fetch(A).failed == {A}
        assert reader.look_up(A, B) == [MISS, HIT]
        assert reader.fetch(B).failed == frozenset()


def test_a_peer_that_is_back_is_found_again() -> None:
    clock = FakeClock()
    with (
        Host("owner", listen="127.0.0.1:0") as owner,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address}, clock=clock,
             silence_timeout_s=0.2, connect_timeout_s=0.2) as reader,
    ):  # fmt: skip
        owner.primary.put(A)
        assert reader.look_up(A) == [HIT]
        wire.stop_after(0)
        assert reader.fetch(A).failed == {A}
        for _ in range(3):  # still away: probed, not believed
            clock.advance(1.0)
            assert reader.look_up(A) == [MISS]
        wire.resume()

        def is_back() -> bool:
            clock.advance(1.0)
            reader.tier.on_schedule_end(IDLE_STEP)
            return reader.stats()["num_peers_up"] == 1

        eventually(is_back, "the peer")
        assert reader.look_up(A) == [HIT]
        assert reader.fetch(A).failed == frozenset()


def test_one_lost_connection_fails_the_others_to_that_host_at_once() -> None:
    keys = [numbered_key(i) for i in range(3)]
    with (
        Host("owner", listen="127.0.0.1:0", chunk_bytes=LARGE_BYTES, num_slots=3,
             silence_timeout_s=600.0) as owner,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address}, chunk_bytes=LARGE_BYTES, num_slots=3,
             num_connections=3, silence_timeout_s=600.0, transfer_timeout_s=600.0,
             backoff_min_s=600.0, backoff_max_s=600.0) as reader,
    ):  # fmt: skip
        owner.primary.put(*keys)
        assert reader.look_up(*keys) == [HIT] * 3
        wire.stop_after(300_000)
        for i, key in enumerate(keys):
            submit(reader, i, [key], [i])
        eventually(lambda: owner.stats()["num_leased"] == 3, "three transfers")
        wire.cut(-1)
        results = wait_for(reader.tier, 0, 1, 2)  # would take 600 s otherwise
        assert [results[i].failed for i in range(3)] == [{key} for key in keys]
        assert reader.tier.lookup(A, ReqContext("later")) is MISS
        assert reader.fetch(A).failed == {A}
        eventually(lambda: owner.stats()["num_leased"] == 0, "leases released")


def test_overlapping_rounds_of_one_request_each_end_with_their_own_chunks() -> None:
    ctx = ReqContext("both rounds")
    large, small = numbered_key(100), [numbered_key(i) for i in range(4)]
    with (
        Host("owner", listen="127.0.0.1:0") as owner,
        Proxy(owner.address) as wire,
        Host("slow", listen="127.0.0.1:0") as slow,
        Proxy(slow.address) as slow_wire,
        Host("reader", peers={"owner": wire.address, "slow": slow_wire.address}) as reader,
    ):
        slow.primary.put(large)
        owner.primary.put(*small)
        assert reader.look_up(large, *small) == [HIT] * 5
        slow_wire.stop_after(0)
        reader.tier.submit_load(LoadJob(JobId(1), [large], [0], ctx))
        reader.tier.submit_load(LoadJob(JobId(2), small, [1, 2, 3, 4], ctx))
        assert wait_for(reader.tier, 2)[2].failed == frozenset()
        slow_wire.resume()
        assert wait_for(reader.tier, 1)[1].failed == frozenset()
        for slot, key in enumerate([large, *small]):
            assert reader.slots[slot] == pattern(key, reader.slots.chunk_bytes)


def test_eight_asked_for_and_six_there_brings_six_and_names_the_two_at_once() -> None:
    keys = [numbered_key(i) for i in range(8)]
    with (
        Host("owner", listen="127.0.0.1:0", silence_timeout_s=600.0) as owner,
        Host("reader", peers={"owner": owner.address}, silence_timeout_s=600.0) as reader,
    ):
        owner.primary.put(*keys)
        assert reader.look_up(*keys) == [HIT] * 8
        owner.primary.evict(keys[2], keys[5])
        assert reader.fetch(*keys).failed == {keys[2], keys[5]}
        assert reader.stats()["num_peers_up"] == 1
        assert reader.look_up(keys[2], keys[3]) == [MISS, HIT]


def test_a_cancelled_transfer_ends_and_writes_nothing_afterwards() -> None:
    with (
        Host("owner", listen="127.0.0.1:0", chunk_bytes=LARGE_BYTES, num_slots=2) as owner,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address}, chunk_bytes=LARGE_BYTES, num_slots=2,
             silence_timeout_s=600.0) as reader,
    ):  # fmt: skip
        owner.primary.put(A)
        assert reader.look_up(A) == [HIT]
        wire.stop_after(300_000)
        submit(reader, 1, [A], [0])
        eventually(lambda: wire.num_passed_bytes > 300_000, "the transfer's start")
        reader.tier.cancel(JobId(1))
        assert wait_for(reader.tier, 1)[1].failed == {A}
        poison(reader.slots.row(0))  # it is somebody else's now
        poisoned = bytes(reader.slots[0])
        wire.resume()
        assert reader.stats()["num_peers_up"] == 1  # a cancelled job is not a dead peer
        submit(reader, 2, [A], [1])
        assert wait_for(reader.tier, 2)[2].failed == frozenset()
        assert reader.slots[0] == poisoned


def test_a_job_ends_by_its_deadline_though_the_peer_keeps_dripping() -> None:
    with (
        Host("owner", listen="127.0.0.1:0", chunk_bytes=LARGE_BYTES, num_slots=2) as owner,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address}, chunk_bytes=LARGE_BYTES, num_slots=2,
             silence_timeout_s=600.0, transfer_timeout_s=0.2) as reader,
    ):  # fmt: skip
        owner.primary.put(A)
        assert reader.look_up(A) == [HIT]
        wire.stop_after(300_000)
        submit(reader, 1, [A], [0])
        assert wait_for(reader.tier, 1)[1].failed == {A}


def test_a_peer_restarted_on_its_address_is_a_new_one_that_serves_again() -> None:
    with HostProcess("owner", listen="127.0.0.1:0") as first:
        first.put(A, B)
        with Host("reader", peers={"owner": first.address}) as reader:
            assert reader.look_up(A, B) == [HIT, HIT]
            assert reader.fetch(A).failed == frozenset()
            reader.tier.lookup(C, ReqContext("under way"))
            first.kill()
            reader.tier.on_schedule_end(IDLE_STEP)
            eventually(lambda: reader.look_up(A) == [MISS], "the loss")
            with HostProcess("owner", listen=first.address) as second:
                second.put(A)
                eventually(lambda: reader.look_up(A) == [HIT], "the restarted peer")
                assert reader.look_up(B) == [MISS]  # what the former process had is void
                assert reader.fetch(A, B).failed == {B}
                assert reader.stats()["lost_peers"] == 1


def test_a_peer_restarted_unnoticed_is_not_believed_what_it_said_before() -> None:
    clock = FakeClock()
    with HostProcess("owner", listen="127.0.0.1:0") as first:
        first.put(A, B)
        with Host(
            "reader", peers={"owner": first.address}, clock=clock, num_connections=1
        ) as reader:
            assert reader.look_up(A, B) == [HIT, HIT]
            assert reader.fetch(A).failed == frozenset()
            first.kill()
            with HostProcess("owner", listen=first.address) as second:
                second.put(A)
                assert reader.fetch(A).failed == frozenset()  # reconnects by itself
                assert reader.stats()["lost_peers"] == 0
                assert reader.look_up(A, B) == [HIT, MISS]


@pytest.mark.slow
def test_a_peer_killed_amid_a_transfer_leaves_only_whole_chunks_and_all_slots() -> None:
    keys = [numbered_key(i) for i in range(24)]
    chunk_bytes = 2 << 20
    with (
        HostProcess("owner", listen="127.0.0.1:0", chunk_bytes=chunk_bytes, num_slots=24) as owner,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address}, chunk_bytes=chunk_bytes, num_slots=24)
        as reader,
    ):  # fmt: skip
        owner.put(*keys)
        assert reader.look_up(*keys) == [HIT] * 24
        wire.stop_after(6 * chunk_bytes)
        submit(reader, 1, keys, list(range(24)))
        eventually(lambda: wire.num_passed_bytes > 12 * chunk_bytes, "half of it")
        owner.kill()
        wire.resume()
        result = wait_for(reader.tier, 1)[1]
        assert 0 < len(result.failed) < 24
        assert result.corrupt == frozenset()
        for slot, key in enumerate(keys):
            assert key in result.failed or reader.slots[slot] == pattern(key, chunk_bytes)
        before = [bytes(reader.slots[slot]) for slot in range(24)]
        assert reader.look_up(*keys) == [MISS] * 24
        assert before == [bytes(reader.slots[slot]) for slot in range(24)]


def test_leases_of_a_peer_that_vanished_end_with_its_connection() -> None:
    with (
        Host("owner", listen="127.0.0.1:0", chunk_bytes=LARGE_BYTES, num_slots=4) as owner,
        Proxy(owner.address) as wire,
    ):
        owner.primary.put(A, B, C, D)
        reader = Host(
            "reader", peers={"owner": wire.address}, chunk_bytes=LARGE_BYTES, num_slots=4,
            num_connections=1,
        )  # fmt: skip
        with reader:
            assert reader.look_up(A, B, C, D) == [HIT] * 4
            wire.stop_after(100_000)
            submit(reader, 1, [A, B, C, D], [0, 1, 2, 3])
            eventually(lambda: owner.stats()["num_leased"] == 4, "four leases")
        eventually(lambda: owner.stats()["num_leased"] == 0, "the leases' end")
        assert [result.failed for result in reader.tier.get_finished_jobs()] == [{A, B, C, D}]


def test_leases_of_a_peer_that_stalls_end_with_their_time() -> None:
    clock = FakeClock()
    with (
        Host("owner", listen="127.0.0.1:0", clock=clock, chunk_bytes=LARGE_BYTES, num_slots=4)
        as owner,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address}, chunk_bytes=LARGE_BYTES, num_slots=4,
             num_connections=1) as reader,
    ):  # fmt: skip
        owner.primary.put(A, B, C, D)
        assert reader.look_up(A, B, C, D) == [HIT] * 4
        wire.stop_after(100_000)
        submit(reader, 1, [A, B, C, D], [0, 1, 2, 3])
        eventually(lambda: owner.stats()["num_leased"] == 4, "four leases")
        clock.advance(10.1)
        assert owner.stats()["num_leased"] == 0
        assert not owner.tier.shelf.leased()


def test_no_call_waits_for_a_peer_that_is_stuck(mute: socket.socket) -> None:
    address = f"127.0.0.1:{mute.getsockname()[1]}"
    with Host("reader", peers={"mute": address}, connect_timeout_s=600.0) as reader:

        def step() -> None:
            reader.tier.lookup_many([A, B], ReqContext("r"))
            reader.tier.on_schedule_end(IDLE_STEP)
            submit(reader, 1, [A], [0])
            reader.tier.cancel(JobId(1))
            list(reader.tier.get_finished_jobs())
            reader.tier.get_stats()
            done.append(True)

        done: list[bool] = []
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(PATIENCE_S)
        assert done
        assert reader.stats()["num_peers_up"] == 1  # it has not even been given up yet
