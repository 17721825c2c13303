"""The shelf: what can be served, what is leased, and when a copy is void."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.keys import OffloadKey
from kvstrata.testing import FakeClock, FakeRegion, numbered_key
from kvstrata.tiers.p2p.shelf import DENIED_S, STEPPING_S, Shelf, ShelfLimits

LIMITS = ShelfLimits(num_leased_max=3, num_parked_max=2, park_s=60.0)
A, B, C = (numbered_key(i) for i in range(3))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def shelf(clock: FakeClock) -> Shelf:
    return Shelf(FakeRegion(4, 100), clock, LIMITS)


def test_only_published_chunks_are_leased(shelf: Shelf) -> None:
    shelf.publish([A, B], [0, 1])
    shelf.withdraw([B, C])
    assert shelf.present([A, B, C]) == [True, False, False]
    assert list(shelf.lease([A, B, C], "reader", 1.0).copies) == [A]


def test_a_leased_chunk_is_named_until_it_is_released(shelf: Shelf) -> None:
    shelf.publish([A, B], [0, 1])
    first, second = shelf.lease([A], "one", 1.0), shelf.lease([A], "two", 1.0)
    assert list(shelf.leased()) == [A]
    shelf.release(first)
    shelf.release(first)
    assert list(shelf.leased()) == [A]
    shelf.release(second)
    assert not shelf.leased()
    shelf.check()


def test_a_lease_ends_by_itself(shelf: Shelf, clock: FakeClock) -> None:
    shelf.publish([A], [0])
    lease = shelf.lease([A], "reader", 1.0)
    clock.advance(0.9)
    assert list(shelf.leased()) == [A]
    clock.advance(0.2)
    assert not shelf.leased()
    shelf.release(lease)
    shelf.check()


def test_a_copy_is_void_once_its_chunk_was_withdrawn_even_if_it_came_back(shelf: Shelf) -> None:
    shelf.publish([A], [0])
    copy = shelf.lease([A], "reader", 1.0).copies[A]
    assert shelf.holds(copy)
    shelf.withdraw([A])
    assert not shelf.holds(copy)
    shelf.publish([A], [0])
    assert not shelf.holds(copy)


def test_a_slot_published_for_another_chunk_no_longer_serves_the_former(shelf: Shelf) -> None:
    shelf.publish([A], [0])
    copy = shelf.lease([A], "reader", 1.0).copies[A]
    shelf.publish([B], [0])
    assert shelf.present([A, B]) == [False, True]
    assert not shelf.holds(copy)


def test_one_holder_leases_no_more_than_its_share(shelf: Shelf) -> None:
    keys = [numbered_key(i) for i in range(4)]
    shelf.publish(keys, range(4))
    assert len(shelf.lease(keys[:2], "greedy", 1.0).copies) == 2
    assert len(shelf.lease(keys, "greedy", 1.0).copies) == 1
    assert len(shelf.lease(keys, "greedy", 1.0).copies) == 0
    assert len(shelf.lease(keys, "other", 1.0).copies) == 3


def test_an_expired_chunk_is_not_served_though_nobody_withdrew_it(
    shelf: Shelf, clock: FakeClock
) -> None:
    shelf.publish([A], [0], clock.wall_s() + 60.0)
    shelf.publish([B], [1])
    assert shelf.present([A, B]) == [True, True]
    assert shelf.lease([A], "reader", 1.0).copies[A].expires_at_s == clock.wall_s() + 60.0
    clock.advance(61.0)
    assert shelf.present([A, B]) == [False, True]
    assert list(shelf.lease([A, B], "reader", 1.0).copies) == [B]
    shelf.publish([A], [0])
    assert shelf.present([A]) == [True]
    shelf.check()


def test_clearing_voids_every_copy(shelf: Shelf) -> None:
    shelf.publish([A, B], [0, 1])
    copy = shelf.lease([A], "reader", 1.0).copies[A]
    shelf.clear()
    assert shelf.present([A, B]) == [False, False]
    assert not shelf.holds(copy)
    shelf.check()


def test_nothing_is_wanted_of_a_manager_that_does_not_ask(shelf: Shelf, clock: FakeClock) -> None:
    assert shelf.want([A]) == [False]
    assert list(shelf.take_wanted()) == []
    assert shelf.want([A, B]) == [True, True]
    clock.advance(STEPPING_S + 0.1)
    assert shelf.want([C]) == [False]  # it has stopped stepping
    assert list(shelf.take_wanted()) == [A, B]
    assert list(shelf.take_wanted()) == []


def test_a_denied_chunk_is_not_wanted_for_a_while(shelf: Shelf, clock: FakeClock) -> None:
    shelf.take_wanted()
    assert shelf.want([A, B]) == [True, True]
    shelf.take_wanted()
    shelf.deny([A])
    assert shelf.want([A, B]) == [False, True]
    clock.advance(DENIED_S)
    assert shelf.want([A]) == [True]


def test_a_chunk_that_came_up_is_not_wanted_any_more(shelf: Shelf) -> None:
    shelf.take_wanted()
    shelf.want([A, B])
    shelf.publish([A], [0])
    assert list(shelf.take_wanted()) == [B]


def test_a_parked_chunk_is_leased_until_its_reader_fetched_it(shelf: Shelf) -> None:
    shelf.publish([A, B], [0, 1])
    assert shelf.park([A, C], "consumer") == 1
    assert list(shelf.leased()) == [A]
    shelf.unpark(A, "somebody else")
    assert list(shelf.leased()) == [A]
    shelf.unpark(A, "consumer")
    assert not shelf.leased()


def test_a_parked_chunk_is_given_up_in_time(shelf: Shelf, clock: FakeClock) -> None:
    shelf.publish([A, B], [0, 1])
    shelf.park([A], "consumer")
    clock.advance(40.0)
    shelf.park([A], "consumer")  # once more, from now on
    shelf.park([B], "consumer")
    clock.advance(40.0)
    assert set(shelf.leased()) == {A, B}
    clock.advance(21.0)
    assert not shelf.leased()
    assert shelf.num_parked == 0


def test_parked_chunks_are_bounded(shelf: Shelf) -> None:
    keys = [numbered_key(i) for i in range(4)]
    shelf.publish(keys, range(4))
    assert shelf.park(keys, "consumer") == 2
    assert shelf.park(keys[:1], "consumer") == 1  # parked already
    assert shelf.park(keys[:1], "another") == 0
    shelf.check()


keys = st.sampled_from([A, B, C])
actions = st.lists(
    st.tuples(st.sampled_from(["publish", "withdraw", "lease", "release", "wait"]), keys,
              st.integers(0, 2)),
    max_size=30,
)  # fmt: skip


@given(actions)
def test_no_order_of_calls_lets_a_copy_pass_whose_slot_was_reused(
    sequence: list[tuple[str, OffloadKey, int]],
) -> None:
    clock = FakeClock()
    shelf = Shelf(FakeRegion(3, 100), clock, LIMITS)
    contents: dict[int, OffloadKey | None] = {}
    leases = []
    for action, key, slot in sequence:
        match action:
            case "publish":
                contents = {s: k for s, k in contents.items() if k != key} | {slot: key}
                shelf.publish([key], [slot])
            case "withdraw":
                contents = {s: k for s, k in contents.items() if k != key}
                shelf.withdraw([key])
            case "lease":
                leases.append(shelf.lease([key], "reader", 5.0))
            case "release" if leases:
                shelf.release(leases.pop())
            case _:
                clock.advance(1.0)
        shelf.check()
        for lease in leases:
            for leased, copy in lease.copies.items():
                assert not shelf.holds(copy) or contents.get(copy.slot) == leased
    assert shelf.num_published == len(contents)
