"""The reuse filter stores what is offered often enough, and remembers no more than its bound."""

import pytest

from kvstrata.build import build_manager
from kvstrata.core.errors import ConfigError
from kvstrata.core.manager import OffloadingManager
from kvstrata.testing import FakeBackend, FakeClock, chain, numbered_key
from kvstrata.testing.manager_calls import end_step, finish, look_up, start, store


def build(threshold: int = 2, tracked: int = 1_000, num_chunks: int = 64) -> OffloadingManager:
    return build_manager(
        {
            "primary": {"num_chunks": num_chunks, "policy": "lru"},
            "filter": {"store_threshold": threshold, "num_tracked_max": tracked},
        },
        chunk_bytes=100,
        namespace="test",
        clock=FakeClock(),
    )


def offer(manager: OffloadingManager, req_id: str, letters: str) -> int:
    """Offer a prompt's chunks by a request of its own; return how many were stored."""
    ctx = start(manager, req_id)
    taken = store(manager, chain(letters), ctx)
    finish(manager, ctx)
    return len(taken)


def test_a_chunk_is_stored_from_the_threshold_on() -> None:
    manager = build(threshold=3)
    assert [offer(manager, f"r{i}", "abc") for i in range(4)] == [0, 0, 3, 0]
    assert look_up(manager, chain("abc"), start(manager, "reader")) == 3


def test_a_shared_head_is_stored_before_its_tails() -> None:
    manager = build()
    assert offer(manager, "r0", "abc") == 0
    assert offer(manager, "r1", "abd") == 2
    assert look_up(manager, chain("abc"), start(manager, "reader")) == 2


def test_one_request_counts_once_however_often_it_offers() -> None:
    # Field report G14, for the filter.
    manager = build()
    ctx = start(manager, "long decode")
    assert [len(store(manager, chain("ab"), ctx)) for _ in range(500)] == [0] * 500
    assert offer(manager, "another", "ab") == 2


def test_requests_that_offer_by_turns_count_once_each() -> None:
    manager = build(threshold=3)
    first, second = start(manager, "r1"), start(manager, "r2")
    for _ in range(10):
        assert store(manager, chain("ab"), first) == store(manager, chain("ab"), second) == []
    assert offer(manager, "r3", "ab") == 2


def test_lookups_do_not_count() -> None:
    manager = build()
    for i in range(5):
        ctx = start(manager, f"r{i}")
        look_up(manager, chain("ab"), ctx)
        finish(manager, ctx)
    assert offer(manager, "first offer", "ab") == 0


def test_what_is_withheld_is_no_error_and_counted() -> None:
    manager = build()
    ctx = start(manager, "r")
    output = manager.prepare_store(chain("abc"), ctx)
    assert output is not None
    assert (len(output.keys_to_store), len(output.store_spec.slots)) == (0, 0)
    assert manager.get_stats()["withheld_chunks"] == 3
    assert manager.get_stats()["num_resident"] == 0


def test_the_tracker_forgets_the_oldest_offer() -> None:
    # Field report G13: memory bounded.
    manager = build(tracked=3)
    assert offer(manager, "r0", "abc") == 0
    for i in range(50):
        ctx = start(manager, f"one-off {i}")
        store(manager, [numbered_key(i)], ctx)
        finish(manager, ctx)
        assert manager.get_stats()["num_tracked_offers"] <= 3
    assert offer(manager, "r1", "abc") == 0
    assert offer(manager, "r2", "abc") == 3


def test_a_preempted_request_stores_at_its_first_offer() -> None:
    manager = build()
    ctx = start(manager, "victim")
    assert store(manager, chain("ab"), ctx) == []
    end_step(manager, preempted=["victim"])
    assert store(manager, chain("abc"), ctx) == chain("abc")
    assert look_up(manager, chain("abc"), ctx) == 3
    assert store(manager, chain("abcd"), ctx) == []


def test_reset_and_delete_forget_offers_too() -> None:
    manager = build()
    offer(manager, "r0", "ab")
    manager.reset_cache()
    assert offer(manager, "r1", "ab") == 0
    assert offer(manager, "r2", "ab") == 2
    manager.delete(chain("ab"), start(manager, "operator"))
    assert offer(manager, "r3", "ab") == 0
    assert offer(manager, "r4", "ab") == 2


def test_only_what_repeats_reaches_the_tier_below() -> None:
    # Field report G13: 100 one-off prompts, 5 repeated.
    backend = FakeBackend()
    manager = build_manager(
        {
            "primary": {"num_chunks": 32, "policy": "lru"},
            "filter": {"store_threshold": 2},
            "tiers": [{"type": "kvstrata.testing:FakeTier", "backend": backend}],
        },
        chunk_bytes=100,
        namespace="test",
        clock=FakeClock(),
    )
    repeated = [chain(letter) for letter in "abcde"]
    for i in range(100):
        for keys in ([numbered_key(i)], repeated[i % 5]):
            ctx = start(manager, f"r{i} {keys}")
            store(manager, keys, ctx)
            finish(manager, ctx)
    assert sorted(backend.stored) == sorted(key for keys in repeated for key in keys)
    manager.shutdown(1.0)


def test_a_threshold_of_one_passes_everything_on() -> None:
    manager = build(threshold=1)
    assert offer(manager, "r", "abc") == 3


@pytest.mark.parametrize("field", ["store_threshold", "num_tracked_max"])
def test_zero_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^filter.{field}: "):
        build_manager(
            {"primary": {"num_chunks": 1}, "filter": {field: 0}}, chunk_bytes=1, namespace="n"
        )
