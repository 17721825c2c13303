"""What only the object tier promises, in memory and in a directory."""

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from kvstrata.build import build_manager
from kvstrata.core.errors import ConfigError
from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.core.keys import OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.metrics import OBJECT_METRICS, TIER_METRICS
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.core.tier import SecondaryTierManager, TierEnv
from kvstrata.testing import FakeClock, FakeRegion, numbered_key, pattern
from kvstrata.testing.tier_calls import (
    IDLE_STEP,
    A,
    B,
    C,
    D,
    E,
    load,
    look_up,
    store,
    submit_load,
    wait_for,
)
from kvstrata.tiers.chunk_format import HEADER_BYTES
from kvstrata.tiers.object.tier import ObjectTier

CHUNK_BYTES = 5_000
OBJECT_BYTES = HEADER_BYTES + CHUNK_BYTES
PATIENCE_S = 30.0

Open = Callable[..., ObjectTier]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def slots() -> SlotView:
    slots = FakeRegion(8, CHUNK_BYTES)
    for i, key in enumerate((A, B, C, D)):
        slots[i][:] = pattern(key, CHUNK_BYTES)
    return slots


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def open_tier(slots: SlotView, clock: FakeClock, folder: Path) -> Iterator[Open]:
    """Opens tiers, all on one directory unless they are told otherwise."""
    tiers: list[ObjectTier] = []

    def open_one(namespace: str = "one", **settings: object) -> ObjectTier:
        env = TierEnv("object", namespace, clock, "tiers[0]")
        with_url: dict[str, Any] = {"url": f"file://{folder}", **settings}
        tiers.append(ObjectTier(slots, env=env, **with_url))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.shutdown(PATIENCE_S)
        tier.check()


def objects(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def object_of(folder: Path, key: OffloadKey) -> Path:
    return next(path for path in objects(folder) if path.name == key.hex())


def settled(tier: SecondaryTierManager, is_so: Callable[[], bool]) -> bool:
    """Wait for what the tier does in the background."""
    for _ in range(3000):
        if is_so():
            return True
        tier.on_schedule_end(IDLE_STEP)
        tier.drain_jobs(0.0)
        look_up(tier, E)  # waits for a worker
    return False


def test_one_flipped_byte_fails_that_chunk_alone_and_removes_it(
    open_tier: Open, slots: SlotView, folder: Path
) -> None:
    tier = open_tier()
    store(tier, 1, {A: 0, B: 1})
    path = object_of(folder, A)
    damaged = bytearray(path.read_bytes())
    damaged[HEADER_BYTES + 17] ^= 1
    path.write_bytes(damaged)
    result = load(tier, 2, {A: 5, B: 6})
    assert result.failed == result.corrupt == {A}
    assert slots[6] == pattern(B, CHUNK_BYTES)
    assert look_up(tier, A) is LookupResult.MISS
    assert tier.get_stats()["corrupt_chunks"] == 1
    assert settled(tier, lambda: not path.exists())
    assert store(tier, 3, {A: 0}).failed == frozenset()
    assert load(tier, 4, {A: 5}).failed == frozenset()


@pytest.mark.parametrize("size", [0, 100, OBJECT_BYTES - 1, OBJECT_BYTES + 1])
def test_an_object_of_another_size_is_a_miss_and_is_cleaned_up(
    open_tier: Open, folder: Path, size: int
) -> None:
    store(open_tier(), 1, {A: 0})
    path = object_of(folder, A)
    path.write_bytes(path.read_bytes().ljust(OBJECT_BYTES + 1, b"x")[:size])
    tier = open_tier()
    assert look_up(tier, A) is LookupResult.MISS
    assert settled(tier, lambda: tier.get_stats()["corrupt_objects"] == 1)
    assert not path.exists()


@pytest.mark.parametrize("change_bytes", [-1, 1, 100])
def test_a_load_of_an_object_of_another_size_leaves_the_slot_alone(
    open_tier: Open, slots: SlotView, folder: Path, change_bytes: int
) -> None:
    tier = open_tier()
    store(tier, 1, {A: 0})
    path = object_of(folder, A)
    path.write_bytes((path.read_bytes() + bytes(100))[: OBJECT_BYTES + change_bytes])
    untouched = bytes(slots[5])
    assert load(tier, 2, {A: 5}).corrupt == {A}
    assert slots[5] == untouched


def test_an_object_of_another_chunk_is_never_served(open_tier: Open, folder: Path) -> None:
    store(open_tier(), 1, {A: 0, B: 1, C: 2})
    for key in (A, B):
        object_of(folder, key).write_bytes(object_of(folder, C).read_bytes())
    assert load(open_tier(), 1, {A: 5}).corrupt == {A}
    assert look_up(open_tier(), B) is LookupResult.MISS


def test_what_is_found_there_by_a_store_is_not_trusted_before_it_was_looked_at(
    open_tier: Open, folder: Path
) -> None:
    store(open_tier(), 1, {A: 0})
    object_of(folder, A).write_bytes(b"")
    tier = open_tier()
    store(tier, 1, {A: 0})
    assert look_up(tier, A) is LookupResult.MISS


def test_an_absence_is_forgotten_with_the_step_in_which_it_was_told(open_tier: Open) -> None:
    one, two = open_tier(), open_tier()
    assert look_up(two, A) is LookupResult.MISS
    store(one, 1, {A: 0})
    two.on_schedule_end(IDLE_STEP)
    assert look_up(two, A) is LookupResult.HIT


def test_namespaces_share_a_store_and_no_chunk(open_tier: Open) -> None:
    one, two = open_tier("one"), open_tier("two")
    store(one, 1, {A: 0})
    assert look_up(two, A) is LookupResult.MISS
    two.reset()
    assert look_up(two, A) is LookupResult.MISS
    assert look_up(open_tier("one"), A) is LookupResult.HIT


def test_what_another_tier_stored_is_found_and_not_written_again(
    open_tier: Open, slots: SlotView
) -> None:
    one, two = open_tier(), open_tier()
    store(one, 1, {A: 0})
    assert store(two, 1, {A: 0}).failed == frozenset()
    assert two.get_stats()["present_chunks"] == 1
    assert two.get_stats()["stored_chunks"] == 0
    assert load(two, 2, {A: 5}).failed == frozenset()
    assert slots[5] == pattern(A, CHUNK_BYTES)


def test_what_somebody_else_removed_heals_at_the_first_load(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    store(tier, 1, {A: 0})
    object_of(folder, A).unlink()
    assert look_up(tier, A) is LookupResult.HIT
    assert load(tier, 2, {A: 5}).failed == {A}
    assert look_up(tier, A) is LookupResult.MISS
    removed = [event for event in tier.take_events() if event.kind is EventKind.REMOVED]
    assert [(event.keys, event.reason) for event in removed] == [([A], RemovalReason.EXTERNAL)]
    assert store(tier, 3, {A: 0}).failed == frozenset()
    assert look_up(tier, A) is LookupResult.HIT


def test_an_expiry_survives_a_restart(open_tier: Open, clock: FakeClock, folder: Path) -> None:
    store(open_tier(), 1, {A: 0, B: 1}, expires_at_s=(clock.wall_s() + 60, inf))
    assert look_up(open_tier(), A) is LookupResult.HIT
    clock.advance(61)
    tier = open_tier()
    assert look_up(tier, A) is LookupResult.MISS
    assert look_up(tier, B) is LookupResult.HIT
    assert settled(tier, lambda: tier.get_stats()["expired_chunks"] == 1)
    assert len(objects(folder)) == 1


def test_an_expired_chunk_is_not_loaded_without_a_lookup_either(
    open_tier: Open, clock: FakeClock
) -> None:
    store(open_tier(), 1, {A: 0}, expires_at_s=(clock.wall_s() + 60,))
    clock.advance(61)
    result = load(open_tier(), 1, {A: 5})
    assert result.failed == {A}
    assert result.corrupt == frozenset()


def test_what_has_expired_leaves_without_being_asked_for(
    open_tier: Open, clock: FakeClock, folder: Path
) -> None:
    tier = open_tier()
    store(tier, 1, {A: 0, B: 1}, expires_at_s=(clock.wall_s() + 60, inf))
    clock.advance(61)
    assert settled(tier, lambda: len(objects(folder)) == 1)


def test_what_is_idle_leaves_and_what_is_used_stays(
    open_tier: Open, clock: FakeClock, folder: Path
) -> None:
    tier = open_tier(max_bytes="1MiB", idle_s=60)
    store(tier, 1, {A: 0, B: 1, C: 2})
    clock.advance(40)
    tier.touch([B], ReqContext("one"))
    load(tier, 2, {C: 5})
    assert len(objects(folder)) == 3
    clock.advance(40)
    assert settled(tier, lambda: tier.get_stats()["expired_chunks"] == 1)
    assert {path.name for path in objects(folder)} == {key.hex() for key in (B, C)}
    assert look_up(tier, A) is LookupResult.MISS
    removed = [event for event in tier.take_events() if event.kind is EventKind.REMOVED]
    assert [(event.keys, event.reason) for event in removed] == [([A], RemovalReason.EXPIRED)]


def test_idleness_goes_on_over_a_restart(open_tier: Open, clock: FakeClock, folder: Path) -> None:
    store(open_tier(), 1, {A: 0, B: 1})
    for key, age_s in ((A, 70.0), (B, 10.0)):
        os.utime(object_of(folder, key), (clock.wall_s() - age_s,) * 2)
    tier = open_tier(max_bytes="1MiB", idle_s=60)
    assert settled(tier, lambda: tier.get_stats()["expired_chunks"] == 1)
    assert [path.name for path in objects(folder)] == [B.hex()]


def test_where_the_store_owns_the_capacity_idleness_is_for_its_rules(open_tier: Open) -> None:
    with pytest.raises(ConfigError, match=r"^tiers\[0\]\.idle_s: needs max_bytes.*lifecycle"):
        open_tier(idle_s=60)


def test_the_oldest_objects_leave_so_that_the_cap_holds(open_tier: Open, folder: Path) -> None:
    tier = open_tier(max_bytes=3 * OBJECT_BYTES)
    for job_id, (key, slot) in enumerate({A: 0, B: 1, C: 2}.items()):
        store(tier, job_id, {key: slot})
    load(tier, 3, {A: 5})  # a use
    assert store(tier, 4, {D: 3}).failed == frozenset()
    assert {path.name for path in objects(folder)} == {key.hex() for key in (A, C, D)}
    assert look_up(tier, B) is LookupResult.MISS
    stats = tier.get_stats()
    assert stats["used_bytes"] == sum(path.stat().st_size for path in objects(folder))
    assert stats["used_bytes"] <= stats["max_bytes"]
    assert stats["evicted_chunks"] == 1
    assert stats.notes["capacity"].startswith("owned here")
    evicted = [event for event in tier.take_events() if event.reason is RemovalReason.EVICTED]
    assert [event.keys for event in evicted] == [[B]]


def test_many_stores_at_once_stay_below_the_cap(open_tier: Open, folder: Path) -> None:
    tier = open_tier(max_bytes=5 * OBJECT_BYTES)
    keys = [numbered_key(i) for i in range(40)]
    result = store(tier, 1, {key: i % 4 for i, key in enumerate(keys)})
    assert len(objects(folder)) <= 5
    assert tier.get_stats()["used_bytes"] == len(objects(folder)) * OBJECT_BYTES
    assert len(set(keys) - result.failed) >= 5


def test_the_count_survives_a_restart(open_tier: Open, folder: Path) -> None:
    first = open_tier()
    for job_id, (key, slot) in enumerate({A: 0, B: 1, C: 2}.items()):
        store(first, job_id, {key: slot})
    *newer, oldest = objects(folder)  # in no order that a listing has
    os.utime(oldest, (1.0, 1.0))
    tier = open_tier(max_bytes=3 * OBJECT_BYTES)
    assert store(tier, 1, {D: 3}).failed == frozenset()
    assert set(objects(folder)) == {*newer, object_of(folder, D)}
    assert look_up(tier, D) is LookupResult.HIT
    assert tier.get_stats()["used_bytes"] == 3 * OBJECT_BYTES


def test_a_lower_cap_takes_effect_at_the_start(open_tier: Open, folder: Path) -> None:
    store(open_tier(), 1, {A: 0, B: 1, C: 2})
    tier = open_tier(max_bytes=OBJECT_BYTES)
    assert settled(tier, lambda: tier.get_stats()["evicted_chunks"] == 2)
    assert len(objects(folder)) == 1


def test_objects_of_other_namespaces_count_and_leave(open_tier: Open, folder: Path) -> None:
    store(open_tier("old model"), 1, {A: 0, B: 1})
    tier = open_tier("new model", max_bytes=3 * OBJECT_BYTES)
    store(tier, 1, {A: 0, B: 1})
    assert len(objects(folder)) == 3
    assert all(event.reason is None for event in tier.take_events())  # none of ours left
    assert look_up(tier, A) is LookupResult.HIT


def test_objects_that_are_not_ours_are_neither_counted_nor_removed(
    open_tier: Open, folder: Path
) -> None:
    (folder / "ab").mkdir(parents=True)
    foreign = [folder / "report.txt", folder / "ab" / "cd"]
    for path in foreign:
        path.write_bytes(bytes(10 * OBJECT_BYTES))
    tier = open_tier(max_bytes=2 * OBJECT_BYTES)
    store(tier, 1, {A: 0, B: 1})
    store(tier, 2, {C: 2})
    tier.reset()
    assert look_up(tier, C) is LookupResult.MISS
    assert settled(tier, lambda: len(objects(folder)) == 2)
    assert objects(folder) == sorted(foreign)


def test_what_others_wrote_is_counted_now_and_then(
    open_tier: Open, clock: FakeClock, folder: Path
) -> None:
    tier = open_tier(max_bytes=4 * OBJECT_BYTES, relist_s=60)
    store(tier, 1, {A: 0})
    store(open_tier(), 1, {B: 1, C: 2, D: 3})
    clock.advance(61)
    assert settled(tier, lambda: tier.get_stats()["used_bytes"] == 4 * OBJECT_BYTES)
    object_of(folder, A).unlink()
    clock.advance(61)
    assert settled(tier, lambda: tier.get_stats()["used_bytes"] == 3 * OBJECT_BYTES)
    assert tier.get_stats()["external_chunks"] == 1


def test_without_a_cap_the_store_owns_the_capacity(open_tier: Open) -> None:
    stats = open_tier().get_stats()
    assert stats.notes["capacity"].startswith("owned by the store")
    assert "max_bytes" not in stats.gauges


def test_a_cap_below_one_object_is_refused(open_tier: Open) -> None:
    with pytest.raises(ConfigError, match=r"^tiers\[0\]\.max_bytes: .* hold no object"):
        open_tier(max_bytes=CHUNK_BYTES)


def test_both_directions_are_counted_and_timed(open_tier: Open, clock: FakeClock) -> None:
    tier = open_tier()
    keys = [numbered_key(i) for i in range(5)]
    store(tier, 1, {key: i % 4 for i, key in enumerate(keys)})
    load(tier, 2, {key: 4 + i for i, key in enumerate(keys[:3])})
    load(tier, 3, {numbered_key(99): 4})
    stats = tier.get_stats()
    assert (stats["stored_chunks"], stats["loaded_chunks"]) == (5, 3)
    assert (stats["stored_bytes"], stats["loaded_bytes"]) == (5 * CHUNK_BYTES, 3 * CHUNK_BYTES)
    assert (stats["store_jobs"], stats["load_jobs"]) == (1, 2)
    assert stats["failed_load_chunks"] == 1
    assert {"store_s", "load_s"} <= set(stats.counters)


def test_every_metric_is_in_the_table_and_in_the_snapshot(open_tier: Open) -> None:
    tables = (*TIER_METRICS, *OBJECT_METRICS)
    stats = open_tier().get_stats()
    for kind, found in (("gauge", stats.gauges), ("counter", stats.counters)):
        assert {metric.name for metric in tables if metric.kind == kind} <= set(found)


def test_a_reader_stores_and_removes_nothing(open_tier: Open, folder: Path) -> None:
    store(open_tier(), 1, {A: 0})
    reader = open_tier(read_only=True)
    assert not reader.accepts_stores, "so that nobody tries"
    assert look_up(reader, A) is LookupResult.HIT
    assert load(reader, 1, {A: 5}).failed == frozenset()
    assert store(reader, 2, {B: 1}).failed == {B}
    path = object_of(folder, A)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert load(reader, 3, {A: 5}).corrupt == {A}
    assert look_up(reader, A) is LookupResult.MISS
    assert path.exists()


def test_a_reader_keeps_no_cap(open_tier: Open, folder: Path) -> None:
    store(open_tier(), 1, {A: 0, B: 1, C: 2})
    reader = open_tier(read_only=True, max_bytes=OBJECT_BYTES, idle_s=1, relist_s=1)
    for _ in range(3):
        assert look_up(reader, A) is LookupResult.HIT
    assert len(objects(folder)) == 3
    assert reader.get_stats().notes["capacity"].startswith("owned by those that write")


def test_who_owns_the_capacity_is_seen_through_the_manager() -> None:
    tier = {"type": "object", "name": "bucket", "url": "memory://", "max_bytes": "1MiB"}
    config = {"primary": {"num_chunks": 1}, "tiers": [tier]}
    manager = build_manager(config, chunk_bytes=100, namespace="n")
    assert manager.get_stats().tiers["bucket"].notes["capacity"].startswith("owned here")
    manager.shutdown(1)


def test_events_that_nobody_takes_do_not_pile_up(open_tier: Open) -> None:
    tier = open_tier()
    store(tier, 1, {numbered_key(i): i % 4 for i in range(100)})
    assert [len(event.keys) for event in tier.take_events()] == [100]
    assert tier.get_stats()["dropped_events"] == 0


def test_stores_beyond_the_queue_are_refused_at_once(open_tier: Open) -> None:
    tier = open_tier(num_queued_stores_max=2)
    result = store(tier, 1, {numbered_key(i): i % 4 for i in range(5)})
    assert result.failed == {numbered_key(i) for i in (2, 3, 4)}
    assert tier.get_stats()["dropped_stores"] == 3


@pytest.mark.parametrize("num_bytes", [1, 100, 101, 3000])
def test_keys_of_any_length_are_stored_and_counted(open_tier: Open, num_bytes: int) -> None:
    key = OffloadKey(bytes(range(256))[-1:] * num_bytes)
    store(open_tier(), 1, {key: 0})
    tier = open_tier(max_bytes="1MiB")
    assert look_up(tier, key) is LookupResult.HIT
    assert settled(tier, lambda: tier.get_stats()["is_counted"] == 1)
    assert tier.get_stats()["used_bytes"] == OBJECT_BYTES


def test_a_key_that_no_header_holds_is_a_failed_store(open_tier: Open) -> None:
    key = OffloadKey(b"k" * 5000)
    assert store(open_tier(), 1, {key: 0}).failed == {key}


def test_an_unknown_option_is_named_and_its_value_is_not_shown(open_tier: Open) -> None:
    with pytest.raises(ConfigError, match=r"^tiers\[0\].*'nope' is not valid") as caught:
        open_tier(url="s3://bucket", options={"nope": "hidden-value"})
    assert "hidden-value" not in str(caught.value)


def test_a_directory_that_can_not_be_made_is_an_error_about_the_url(
    open_tier: Open, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^tiers\[0\]"):
        open_tier(url=f"file://{tmp_path}/file/store")


def test_an_abandoned_tier_ends_its_threads(
    slots: SlotView, caplog: pytest.LogCaptureFixture
) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    tier = ObjectTier(slots, env=TierEnv("abandoned", "", FakeClock(), "t"), url="memory://")
    store(tier, 1, {A: 0})
    assert any(name.startswith("abandoned") for name in names())
    del tier
    gc.collect()
    assert not any(name.startswith("abandoned") for name in names())
    assert caplog.record_tuples == [] or all(
        level < logging.ERROR for _, level, _ in caplog.record_tuples
    )


def test_a_deleted_chunk_is_not_brought_back_by_a_load_in_flight(open_tier: Open) -> None:
    tier = open_tier()
    for job_id in range(0, 60, 3):
        store(tier, job_id, {A: 0})
        submit_load(tier, job_id + 1, {A: 5})
        tier.delete([A])
        wait_for(tier, job_id + 1)
        assert look_up(tier, A) is LookupResult.MISS
