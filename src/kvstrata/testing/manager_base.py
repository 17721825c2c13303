"""What the parts of the manager suite share: the factory, the clock, the manager under test."""

from collections.abc import Iterator

import pytest

from kvstrata.core.events import PRIMARY_MEDIUM, EventKind, OffloadingEvent
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.testing.chunks import chain
from kvstrata.testing.clock import FakeClock
from kvstrata.testing.manager_calls import check, finish, load, look_up, start, store

NUM_CHUNKS = 8
CHUNK_BYTES = 1_000

HOUR_S = 3_600.0


class ManagerSuiteBase:
    """Derive from `OffloadingManagerSuite` and override `make_manager`; use `self.clock` there."""

    clock: FakeClock

    def make_manager(self, num_chunks: int, chunk_bytes: int) -> OffloadingManager:
        """Return the manager, empty, with a primary of `num_chunks` slots, working by `self.clock`.

        It has to store what it is offered for the first time. The rest of its settings are the
        defaults: half of the slots may be protected, for 60 s.
        """
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _clock(self) -> None:
        self.clock = FakeClock()

    @pytest.fixture
    def manager(self) -> Iterator[OffloadingManager]:
        """The manager under test, shut down afterwards."""
        manager = self.make_manager(NUM_CHUNKS, CHUNK_BYTES)
        yield manager
        check(manager)
        manager.shutdown(10.0)

    def flood(self, manager: OffloadingManager, letters: str) -> list[OffloadKey]:
        """Store one chunk per letter, each by a request of its own, hours apart."""
        taken = []
        for letter in letters:
            self.clock.advance(HOUR_S)
            ctx = start(manager, f"flood {letter}")
            taken += store(manager, chain(letter), ctx)
            finish(manager, ctx)
        return taken


def primary_events(manager: OffloadingManager) -> list[OffloadingEvent]:
    """Take the events and return those of the primary."""
    return [event for event in manager.take_events() if event.medium == PRIMARY_MEDIUM]


def keys_of(events: list[OffloadingEvent], kind: EventKind) -> list[OffloadKey]:
    """Return the keys of all events of one kind."""
    return [key for event in events if event.kind is kind for key in event.keys]


def is_hit(manager: OffloadingManager, key: OffloadKey, ctx: ReqContext) -> bool:
    """Say whether one chunk can be loaded now, without asking slower tiers."""
    return list(manager.lookup_states([key], ctx)) == [LookupResult.HIT]


def assert_idle(manager: OffloadingManager) -> None:
    """Assert that nothing is in flight and nothing is remembered of requests."""
    check(manager)
    stats = manager.get_stats()
    assert stats["num_requests"] == 0
    assert stats["num_pinned"] == 0
    assert stats["num_writing"] == 0
    assert stats["num_protected"] == 0
    assert stats["num_free"] + stats["num_evictable"] == stats["num_slots"]
    assert not manager.has_pending_work()


def assert_usable(manager: OffloadingManager) -> None:
    """Assert that a new request can still store and load."""
    ctx, keys = start(manager, "afterwards"), chain("?!")
    assert store(manager, keys, ctx) == keys
    assert look_up(manager, keys, ctx) == 2
    load(manager, keys, ctx)
    finish(manager, ctx)
