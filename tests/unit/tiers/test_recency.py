"""The order in which a tier's chunks leave, with uses that are taken in late and in parts."""

from kvstrata.core.keys import OffloadKey
from kvstrata.testing import numbered_key
from kvstrata.tiers.recency import NUM_KEYS_AT_A_TIME, RecencyOrder, Trail

NUM_KEYS = 2 * NUM_KEYS_AT_A_TIME + 7
KEYS = [numbered_key(i) for i in range(NUM_KEYS)]


def filled(trail: Trail) -> RecencyOrder:
    order = RecencyOrder()
    for key in KEYS:
        order.add(trail, key)
    return order


def leaving(order: RecencyOrder, count: int = NUM_KEYS) -> list[OffloadKey]:
    return order.choose(count, Trail(100), lambda _key: True)


def test_a_use_of_many_chunks_is_taken_in_by_parts_and_tails_leave_first() -> None:
    order = filled(Trail())
    order.note_use(Trail(), KEYS, at_s=5.0)
    assert order.is_behind
    assert leaving(order) == KEYS, "nothing counts before it was taken in"
    parts = list(order.catch_up())
    assert [len(keys) for keys, _ in parts] == [NUM_KEYS_AT_A_TIME, NUM_KEYS_AT_A_TIME, 7]
    assert {at_s for _, at_s in parts} == {5.0}
    assert leaving(order) == KEYS[::-1]
    assert not order.is_behind
    order.check()


def test_uses_count_in_the_order_in_which_they_were_noted() -> None:
    order = filled(Trail())
    order.note_use(Trail(), KEYS[:2])
    order.note_use(Trail(), KEYS[1:3])
    list(order.catch_up())
    assert leaving(order)[-3:] == [KEYS[0], KEYS[2], KEYS[1]]


def test_what_left_before_a_use_was_taken_in_does_not_come_back() -> None:
    order = filled(Trail())
    order.note_use(Trail(), KEYS[:4])
    order.remove(KEYS[1:3])
    assert [keys for keys, _ in order.catch_up()] == [[KEYS[3], KEYS[0]]]
    order.check()


def test_a_chunk_is_raised_to_the_highest_priority_that_uses_it_and_never_lowered() -> None:
    order = filled(Trail())
    order.note_use(Trail(80), KEYS[:1])
    order.note_use(Trail(10), KEYS[:2])
    list(order.catch_up())
    assert leaving(order)[-2:] == [KEYS[1], KEYS[0]]
    order.check()
