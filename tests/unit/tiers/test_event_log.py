"""A tier's events: few, in order, and bounded."""

from kvstrata.core.events import EventKind, OffloadingEvent, RemovalReason
from kvstrata.testing import numbered_key
from kvstrata.tiers.event_log import EventLog

A, B, C = (numbered_key(i) for i in range(3))
STORED, REMOVED, CLEARED = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED


def test_chunks_that_come_one_behind_the_other_are_one_event() -> None:
    log = EventLog("m")
    log.note(STORED, [A])
    log.note(STORED, [B])
    log.note(REMOVED, [A], RemovalReason.EVICTED)
    log.note(REMOVED, [B], RemovalReason.EXPIRED)
    log.note(STORED, [A])
    log.note(STORED, [])
    assert log.take() == [
        OffloadingEvent(STORED, [A, B], "m"),
        OffloadingEvent(REMOVED, [A], "m", RemovalReason.EVICTED),
        OffloadingEvent(REMOVED, [B], "m", RemovalReason.EXPIRED),
        OffloadingEvent(STORED, [A], "m"),
    ]
    assert log.take() == []


def test_a_reset_is_an_event_without_chunks() -> None:
    log = EventLog("m")
    log.note(CLEARED, reason=RemovalReason.CLEARED)
    assert log.take() == [OffloadingEvent(CLEARED, [], "m", RemovalReason.CLEARED)]


def test_what_nobody_takes_is_bounded_and_counted() -> None:
    log = EventLog("m", num_keys_max=2)
    for key in (A, B, C):
        log.note(STORED, [key])
    assert log.take() == [OffloadingEvent(STORED, [A, B], "m")]
    assert log.num_dropped == 1
    log.note(STORED, [C])
    assert log.take() == [OffloadingEvent(STORED, [C], "m")]
