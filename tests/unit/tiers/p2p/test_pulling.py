"""Who is asked, in which order, how often, and who is believed."""

from contextlib import ExitStack

import pytest

from kvstrata.core.keys import JobId
from kvstrata.core.request import ReqContext
from kvstrata.core.results import JobResult, LookupResult, StoreJob
from kvstrata.testing import FakeClock, numbered_key
from kvstrata.testing.tier_calls import IDLE_STEP
from tests.p2p_hosts import Host, Proxy, eventually

A, B, C, ONLY_ONE, ONLY_TWO = (numbered_key(i) for i in range(5))
HIT, MISS, PENDING, RETRY = (
    LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.RETRY,
)  # fmt: skip
LISTEN = "127.0.0.1:0"


def test_a_thousand_keys_cost_each_of_four_peers_at_most_two_round_trips() -> None:
    keys = [numbered_key(i) for i in range(1000)]
    with ExitStack() as stack:
        peers = [
            stack.enter_context(Host(f"peer-{i}", listen=LISTEN, num_slots=250, chunk_bytes=64))
            for i in range(4)
        ]
        for i, peer in enumerate(peers):
            peer.primary.put(*keys[i::4])
        reader = stack.enter_context(
            Host("reader", peers={f"peer-{i}": peer.address for i, peer in enumerate(peers)},
                 chunk_bytes=64, clock=FakeClock())
        )  # fmt: skip
        assert reader.look_up(*keys) == [HIT] * 1000
        for peer in peers:
            assert 1 <= peer.stats()["lookup_requests_served"] <= 2
        assert reader.look_up(*keys) == [HIT] * 1000  # from memory
        assert sum(peer.stats()["lookup_requests_served"] for peer in peers) <= 8


def test_the_hinted_peer_is_asked_first_and_the_others_only_for_the_rest() -> None:
    with (
        Host("near", listen=LISTEN) as near,
        Host("far", listen=LISTEN) as far,
        Host("reader", peers={"near": near.address, "far": far.address}) as reader,
    ):
        near.primary.put(A)
        far.primary.put(A, B)
        assert reader.look_up(A, hint="near") == [HIT]
        assert far.stats()["lookup_requests_served"] == 0
        assert reader.fetch(A, hint="near").failed == frozenset()
        assert near.stats()["served_chunks"] == 1
        assert reader.look_up(B, C, hint="near") == [HIT, MISS]
        assert far.stats()["lookup_requests_served"] == 1


def test_a_hint_that_names_nobody_is_no_address_to_connect_to() -> None:
    with (
        Host("owner", listen=LISTEN) as owner,
        Host("other", listen=LISTEN) as other,
        Host("reader", peers={"owner": owner.address}) as reader,
    ):
        owner.primary.put(A)
        assert reader.look_up(A, hint=other.address) == [HIT]
        assert other.stats()["accepted_connections"] == 0


def test_a_chunk_that_one_peer_no_longer_has_comes_from_another() -> None:
    with (
        Host("one", listen=LISTEN) as one,
        Host("two", listen=LISTEN) as two,
        Host("reader", peers={"one": one.address, "two": two.address}) as reader,
    ):
        one.primary.put(A, B, ONLY_ONE)
        two.primary.put(A, B, ONLY_TWO)
        # The last two show that both have answered, and not only the faster one.
        eventually(lambda: reader.look_up(A, B, ONLY_ONE, ONLY_TWO) == [HIT] * 4)
        one.primary.evict(A)
        two.primary.evict(B)
        assert reader.fetch(A, B).failed == frozenset()


def test_a_chunk_damaged_on_its_way_counts_as_corrupt_and_comes_from_another() -> None:
    with (
        Host("owner", listen=LISTEN, chunk_bytes=1 << 20) as owner,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address}, chunk_bytes=1 << 20) as reader,
        Host("other", listen=LISTEN, chunk_bytes=1 << 20) as other,
        Host("richer", peers={"owner": wire.address, "other": other.address},
             chunk_bytes=1 << 20) as richer,
    ):  # fmt: skip
        owner.primary.put(A)
        other.primary.put(A)
        wire.is_damaging = True
        assert reader.fetch(A) == JobResult(JobId(1000), frozenset({A}), frozenset({A}))
        assert reader.stats()["corrupt_chunks"] == 1
        assert reader.stats()["num_peers_up"] == 1
        assert richer.fetch(A, hint="owner") == JobResult(JobId(1000))
        assert richer.stats()["corrupt_chunks"] == 1


def test_answers_are_believed_for_a_while_misses_for_a_shorter_one() -> None:
    clock = FakeClock()
    with (
        Host("owner", listen=LISTEN) as owner,
        Host("reader", peers={"owner": owner.address}, clock=clock) as reader,
    ):
        owner.primary.put(A)
        assert reader.look_up(A, B) == [HIT, MISS]
        owner.primary.put(B)
        assert reader.tier.lookup(B, ReqContext("soon")) is MISS
        clock.advance(0.3)
        assert list(reader.tier.lookup_many([A, B], ReqContext("later"))) == [HIT, RETRY]
        clock.advance(2.0)
        assert reader.tier.lookup(A, ReqContext("much later")) is RETRY
        assert reader.look_up(A, B) == [HIT, HIT]


def test_the_answers_kept_are_bounded() -> None:
    keys = [numbered_key(i) for i in range(50)]
    with (
        Host("owner", listen=LISTEN) as owner,
        Host("reader", peers={"owner": owner.address}, num_answers_max=10) as reader,
    ):
        for key in keys:
            reader.look_up(key)
        assert reader.stats()["num_answers"] <= 10


def test_a_store_fails_at_once_since_hosts_pull() -> None:
    with Host("reader", peers={}) as reader:
        assert not reader.tier.accepts_stores
        reader.tier.submit_store(StoreJob(JobId(1), [A, B], [0, 1]))
        assert list(reader.tier.get_finished_jobs()) == [JobResult(JobId(1), frozenset({A, B}))]


def test_a_chunk_that_the_peer_is_bringing_up_is_pending_until_it_can_be_pulled() -> None:
    clock = FakeClock()
    with (
        Host("owner", listen=LISTEN) as owner,
        Host("reader", peers={"owner": owner.address}, clock=clock) as reader,
    ):
        owner.tier.shelf.take_wanted()  # its manager steps
        ctx = ReqContext("patient")

        def is_pending() -> bool:
            reader.tier.on_schedule_end(IDLE_STEP)
            return list(reader.tier.lookup_many([A, B], ctx)) == [PENDING, PENDING]

        eventually(is_pending)
        assert set(owner.tier.shelf.take_wanted()) == {A, B}
        owner.tier.shelf.deny([B])
        owner.primary.put(A)
        clock.advance(0.3)
        assert reader.look_up(A, B) == [HIT, MISS]
        assert reader.fetch(A).failed == frozenset()


def test_without_peers_everything_is_a_miss_at_once() -> None:
    with Host("alone") as alone:
        assert list(alone.tier.lookup_many([A, B], ReqContext("r"))) == [MISS, MISS]
        assert alone.fetch(A).failed == {A}


def test_a_reset_forgets_what_peers_said_and_ends_jobs() -> None:
    clock = FakeClock()
    with (
        Host("owner", listen=LISTEN) as owner,
        Host("reader", peers={"owner": owner.address}, clock=clock) as reader,
    ):
        owner.primary.put(A)
        assert reader.look_up(A) == [HIT]
        owner.primary.evict(A)
        reader.tier.reset()
        assert reader.look_up(A) == [MISS]


@pytest.mark.parametrize("num_connections", [1, 4])
def test_many_chunks_come_whole_over_several_connections(num_connections: int) -> None:
    keys = [numbered_key(i) for i in range(100)]
    with (
        Host("owner", listen=LISTEN, num_slots=100) as owner,
        Host("reader", peers={"owner": owner.address}, num_slots=100,
             num_connections=num_connections) as reader,
    ):  # fmt: skip
        owner.primary.put(*keys)
        assert reader.fetch(*keys).failed == frozenset()
        assert 1 <= owner.stats()["accepted_connections"] <= num_connections
