"""The object tier on a real S3 server behind a proxy that breaks what passes."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

pytest.importorskip("obstore")

from kvstrata.core.keys import JobId
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LookupResult
from kvstrata.core.tier import TierEnv
from kvstrata.testing import FakeClock, FakeRegion, numbered_key, pattern
from kvstrata.testing.tier_calls import (
    IDLE_STEP,
    A,
    B,
    C,
    D,
    load,
    look_up,
    store,
    submit_load,
    submit_store,
    wait_for,
)
from kvstrata.tiers.chunk_format import HEADER_BYTES
from kvstrata.tiers.object.tier import ObjectTier
from tests.fault_proxy import FaultProxy, Faults
from tests.s3_server import S3Server, SeaweedFs

pytestmark = pytest.mark.slow

CHUNK_BYTES = 100_000
OBJECT_BYTES = HEADER_BYTES + CHUNK_BYTES
READS = frozenset({"GET", "PROBE"})
PATIENT = {"backoff_s": 0.01, "backoff_s_max": 0.05}

Open = Callable[..., ObjectTier]
_prefixes = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with SeaweedFs(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server) as proxy:
        yield proxy


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
def open_tier(slots: SlotView, clock: FakeClock, proxy: FaultProxy) -> Iterator[Open]:
    """Opens tiers on one fresh prefix."""
    prefix = f"faults/{next(_prefixes)}"
    tiers: list[ObjectTier] = []

    def open_one(**settings: object) -> ObjectTier:
        env = TierEnv("object", "one", clock, "tiers[0]")
        given: dict[str, Any] = {**PATIENT, **proxy.settings(prefix), **settings}
        tiers.append(ObjectTier(slots, env=env, **given))
        return tiers[-1]

    yield open_one
    proxy.heal()
    for tier in tiers:
        tier.shutdown(30.0)
        tier.check()


@pytest.fixture
def tier(open_tier: Open) -> ObjectTier:
    return open_tier()


def restart(tier: ObjectTier, open_tier: Open, **settings: object) -> ObjectTier:
    tier.shutdown()
    return open_tier(**settings)


def test_a_burst_of_503_is_ridden_out(tier: ObjectTier, proxy: FaultProxy, slots: SlotView) -> None:
    proxy.faults = Faults(status=503, num_left=3)
    assert store(tier, 1, {A: 0, B: 1, C: 2}).failed == frozenset()
    proxy.faults = Faults(status=503, num_left=3)
    assert load(tier, 2, {A: 5, B: 6}).failed == frozenset()
    assert slots[5] == pattern(A, CHUNK_BYTES)
    stats = tier.get_stats()
    assert stats["throttled"] == stats["retries"] == 6
    assert stats["stored_chunks"] == 3
    assert stats.state == "ok"


def test_a_store_that_refuses_for_long_costs_copies_and_nothing_else(
    open_tier: Open, proxy: FaultProxy
) -> None:
    tier = open_tier(num_tries=2)
    store(tier, 1, {A: 0})
    proxy.faults = Faults(status=503)
    assert store(tier, 2, {B: 1, C: 2}).failed == {B, C}
    assert load(tier, 3, {A: 5}).failed == {A}
    assert tier.get_stats().state == "throttled"
    assert tier.get_stats()["num_queued_stores"] == 0
    assert proxy.seen.requests["CREATE"] == 2 + 1 + 4  # the start, A, two tries each
    proxy.heal()
    assert store(tier, 4, {B: 1, C: 2}).failed == frozenset()
    assert load(tier, 5, {A: 5}).failed == frozenset()
    assert tier.get_stats().state == "ok"


@pytest.mark.parametrize("status", [500, 502, 504, 429])
def test_other_answers_of_a_busy_store_are_retried(
    tier: ObjectTier, proxy: FaultProxy, status: int
) -> None:
    proxy.faults = Faults(status=status, code="Busy", num_left=1)
    assert store(tier, 1, {A: 0}).failed == frozenset()
    assert tier.get_stats()["retries"] == 1


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (400, "InvalidRequest")])
def test_a_refusal_that_will_not_pass_is_not_retried(
    tier: ObjectTier, proxy: FaultProxy, status: int, code: str
) -> None:
    proxy.faults = Faults(status=status, code=code)
    assert store(tier, 1, {A: 0}).failed == {A}
    assert load(tier, 2, {B: 5}).failed == {B}
    assert tier.get_stats()["retries"] == 0


def test_a_bucket_that_went_away_does_not_look_like_missing_chunks(
    tier: ObjectTier, proxy: FaultProxy
) -> None:
    store(tier, 1, {A: 0})
    proxy.faults = Faults(status=404, code="NoSuchBucket")
    assert load(tier, 2, {A: 5}).failed == {A}
    assert tier.get_stats()["external_chunks"] == 0
    proxy.heal()
    assert load(tier, 3, {A: 5}).failed == frozenset()


@pytest.mark.parametrize("after_bytes", [0, 1, HEADER_BYTES, CHUNK_BYTES])
def test_a_reset_in_the_middle_of_a_load_is_retried(
    tier: ObjectTier, proxy: FaultProxy, slots: SlotView, after_bytes: int
) -> None:
    store(tier, 1, {A: 0})
    proxy.faults = Faults(methods=READS, reset_after=after_bytes, num_left=2)
    assert load(tier, 2, {A: 5}).failed == frozenset()
    assert slots[5] == pattern(A, CHUNK_BYTES)
    assert tier.get_stats()["unavailable"] == 2


def test_a_store_whose_answer_was_lost_is_found_there(
    tier: ObjectTier, proxy: FaultProxy, slots: SlotView
) -> None:
    proxy.faults = Faults(methods=frozenset({"CREATE"}), reset_after=0, num_left=1)
    assert store(tier, 1, {A: 0}).failed == frozenset()
    assert tier.get_stats()["present_chunks"] == 1
    assert load(tier, 2, {A: 5}).failed == frozenset()
    assert slots[5] == pattern(A, CHUNK_BYTES)


def test_a_body_that_trickles_ends_at_the_request_timeout(
    tier: ObjectTier, open_tier: Open, proxy: FaultProxy, slots: SlotView
) -> None:
    store(tier, 1, {A: 0, B: 1})
    tier = restart(tier, open_tier, request_timeout_s=0.2, num_tries=1)
    untouched = bytes(slots[5])
    proxy.faults = Faults(methods=READS, slow_bytes=HEADER_BYTES + 1000)
    started_s = time.monotonic()
    assert load(tier, 2, {A: 5}).failed == {A}
    assert time.monotonic() - started_s < 15.0  # obstore's own timeout is twice that
    assert slots[5] == untouched
    assert tier.get_stats()["timeouts"] == 1
    proxy.heal()
    assert load(tier, 3, {A: 5, B: 6}).failed == frozenset()


def test_a_load_ends_at_its_deadline_and_what_comes_later_touches_no_slot(
    tier: ObjectTier, proxy: FaultProxy, slots: SlotView, clock: FakeClock
) -> None:
    store(tier, 1, {A: 0, B: 1})
    untouched = bytes(slots[5])
    ctx = ReqContext("hasty", {"kvstrata": {"max_wait_s": 1.0}})
    with proxy.held():
        submit_load(tier, 2, {A: 5}, ctx)
        submit_load(tier, 3, {B: 6})
        proxy.wait_until_open(2, "GET")
        clock.advance(0.9)
        assert list(tier.get_finished_jobs()) == []
        clock.advance(0.2)
        (result,) = tier.get_finished_jobs()
        assert (result.job_id, list(result.failed)) == (2, [A])
    assert wait_for(tier, 3)[3].failed == frozenset()
    assert slots[5] == untouched
    assert tier.get_stats()["expired_loads"] == 1


def test_a_queued_store_ends_at_its_deadline(
    open_tier: Open, proxy: FaultProxy, clock: FakeClock
) -> None:
    tier = open_tier(num_requests_max=1, store_timeout_s=10)
    with proxy.held():
        submit_store(tier, 1, {A: 0})
        proxy.wait_until_open(1, "CREATE")
        submit_store(tier, 2, {B: 1})
        clock.advance(11)
        (result,) = tier.get_finished_jobs()
        assert result.failed == {B}  # A is being read by its request, which ends by itself
    assert wait_for(tier, 1)[1].failed == frozenset()
    assert tier.get_stats()["expired_stores"] == 1


def test_a_body_cut_short_is_retried_and_never_served(
    open_tier: Open, proxy: FaultProxy, slots: SlotView
) -> None:
    tier = open_tier(num_tries=2)
    store(tier, 1, {A: 0})
    untouched = bytes(slots[5])
    proxy.faults = Faults(methods=READS, truncate=1)
    result = load(tier, 2, {A: 5})
    assert result.failed == {A}
    assert result.corrupt == frozenset()
    assert slots[5] == untouched
    proxy.heal()
    assert load(tier, 3, {A: 5}).failed == frozenset()


def test_a_shorter_object_is_corrupt_and_removed(tier: ObjectTier, proxy: FaultProxy) -> None:
    store(tier, 1, {A: 0})
    proxy.faults = Faults(methods=READS, truncate=1, shorten=True)
    assert load(tier, 2, {A: 5}).corrupt == {A}
    proxy.heal()
    assert look_up(tier, A) is LookupResult.MISS
    assert store(tier, 3, {A: 0}).failed == frozenset()
    assert tier.get_stats()["stored_chunks"] == 2


def test_wrong_bytes_are_never_served_and_cost_that_chunk_alone(
    tier: ObjectTier, proxy: FaultProxy, slots: SlotView
) -> None:
    store(tier, 1, {A: 0, B: 1})
    proxy.faults = Faults(methods=frozenset({"GET"}), flip=True, num_left=1)
    result = load(tier, 2, {A: 5, B: 6})
    assert len(result.corrupt) == 1
    assert result.failed == result.corrupt
    (intact,) = {A, B} - result.corrupt
    assert slots[{A: 5, B: 6}[intact]] == pattern(intact, CHUNK_BYTES)
    (damaged,) = result.corrupt
    assert look_up(tier, damaged) is LookupResult.MISS
    assert tier.get_stats()["corrupt_chunks"] == 1


def test_a_damaged_start_is_a_miss(tier: ObjectTier, open_tier: Open, proxy: FaultProxy) -> None:
    store(tier, 1, {A: 0})
    tier = restart(tier, open_tier)
    proxy.faults = Faults(methods=frozenset({"PROBE"}), flip=True)
    assert look_up(tier, A) is LookupResult.MISS


def test_a_chunk_that_vanished_after_its_lookup_heals(tier: ObjectTier, proxy: FaultProxy) -> None:
    store(tier, 1, {A: 0})
    assert look_up(tier, A) is LookupResult.HIT
    proxy.faults = Faults(methods=frozenset({"GET"}), status=404, code="NoSuchKey")
    assert load(tier, 2, {A: 5}).failed == {A}
    assert tier.get_stats()["retries"] == 0
    assert tier.lookup(A, ReqContext("next")) is LookupResult.RETRY  # no longer taken for granted
    proxy.heal()
    assert look_up(tier, A) is LookupResult.HIT


def test_a_lookup_that_timed_out_is_not_remembered_as_a_miss(
    tier: ObjectTier, open_tier: Open, proxy: FaultProxy, clock: FakeClock
) -> None:
    store(tier, 1, {A: 0})
    tier = restart(tier, open_tier)
    ctx = ReqContext("first")
    with proxy.held():
        assert tier.lookup(A, ctx) is LookupResult.RETRY
        tier.on_schedule_end(IDLE_STEP)
        proxy.wait_until_open(1, "PROBE")
        assert tier.lookup(A, ctx) is LookupResult.RETRY
        clock.advance(2.1)
        assert tier.lookup(A, ctx) is LookupResult.MISS
    assert look_up(tier, A) is LookupResult.HIT
    assert tier.get_stats()["lookup_timeouts"] == 1


def test_a_lookup_that_failed_is_not_remembered_as_a_miss(
    tier: ObjectTier, open_tier: Open, proxy: FaultProxy
) -> None:
    store(tier, 1, {A: 0})
    tier = restart(tier, open_tier, num_tries=1)
    proxy.faults = Faults(status=503)
    assert look_up(tier, A) is LookupResult.MISS
    assert tier.get_stats()["probe_unknown"] == 1
    proxy.heal()
    tier.on_schedule_end(IDLE_STEP)
    assert look_up(tier, A) is LookupResult.HIT


@pytest.mark.parametrize("num_requests_max", [8, 64])
def test_a_lookup_of_64_keys_uses_all_of_its_requests_and_no_more(
    open_tier: Open, proxy: FaultProxy, num_requests_max: int
) -> None:
    tier = open_tier(num_requests_max=num_requests_max)
    keys = [numbered_key(100 + i) for i in range(64)]
    with proxy.held():
        assert set(tier.lookup_many(keys, ReqContext("long"))) == {LookupResult.RETRY}
        tier.on_schedule_end(IDLE_STEP)
        proxy.wait_until_open(num_requests_max, "PROBE")
    assert {look_up(tier, key) for key in keys} == {LookupResult.MISS}
    assert proxy.seen.num_open_max == num_requests_max
    assert proxy.seen.requests["PROBE"] == 64


def test_a_load_goes_before_stores_that_were_queued_earlier(
    open_tier: Open, proxy: FaultProxy
) -> None:
    tier = open_tier(num_requests_max=1)
    store(tier, 1, {A: 0})
    proxy.seen.order.clear()
    with proxy.held():
        submit_store(tier, 2, {B: 1, C: 2, D: 3})
        proxy.wait_until_open(1, "CREATE")
        submit_load(tier, 3, {A: 5})
    wait_for(tier, 2, 3)
    assert proxy.seen.order == ["CREATE", "GET", "CREATE", "CREATE"]


def test_a_load_finds_a_place_beside_stores_that_hang(open_tier: Open, proxy: FaultProxy) -> None:
    tier = open_tier(num_requests_max=4, request_timeout_s=1.0, num_tries=1)
    store(tier, 1, {A: 0})
    proxy.faults = Faults(methods=frozenset({"CREATE"}), slow_bytes=10)
    stores = {numbered_key(200 + i): i % 4 for i in range(4)}
    submit_store(tier, 2, stores)
    proxy.wait_until_open(3, "CREATE")
    submit_load(tier, 3, {A: 5})
    assert wait_for(tier, 3)[3].failed == frozenset()
    assert wait_for(tier, 2)[2].failed == set(stores)


def test_a_slow_read_is_asked_for_a_second_time(
    tier: ObjectTier, open_tier: Open, proxy: FaultProxy, slots: SlotView
) -> None:
    store(tier, 1, {A: 0})
    tier = restart(tier, open_tier, hedge_after_s=0.01)
    proxy.faults = Faults(methods=frozenset({"GET"}), slow_bytes=500, num_left=1)
    assert load(tier, 2, {A: 5}).failed == frozenset()
    assert slots[5] == pattern(A, CHUNK_BYTES)
    stats = tier.get_stats()
    assert stats["hedged_loads"] == stats["hedges_won"] == 1
    assert stats["loaded_chunks"] == 1


def test_a_cancelled_load_ends_at_once_and_touches_no_slot(
    tier: ObjectTier, proxy: FaultProxy, slots: SlotView
) -> None:
    store(tier, 1, {A: 0})
    untouched = bytes(slots[5])
    with proxy.held():
        submit_load(tier, 2, {A: 5})
        proxy.wait_until_open(1, "GET")
        tier.cancel(JobId(2))
        (result,) = tier.get_finished_jobs()
        assert result.failed == {A}
    assert load(tier, 3, {A: 6}).failed == frozenset()
    assert slots[5] == untouched


def test_shutdown_names_what_hangs_and_every_job_has_its_result(
    open_tier: Open, proxy: FaultProxy
) -> None:
    tier = open_tier(request_timeout_s=1.0)
    with proxy.held():
        submit_store(tier, 1, {A: 0})
        submit_load(tier, 2, {B: 5})
        proxy.wait_until_open(2, "CREATE", "GET")
        assert set(tier.shutdown(0.05)) == {1, 2}
        assert {result.job_id for result in tier.get_finished_jobs()} == {1, 2}


def test_a_present_object_is_not_written_again(open_tier: Open, proxy: FaultProxy) -> None:
    one, two = open_tier(), open_tier()
    store(one, 1, {A: 0})
    num_created = proxy.seen.requests["CREATE"]
    assert store(one, 2, {A: 0}).failed == frozenset()
    assert proxy.seen.requests["CREATE"] == num_created  # known: not even asked
    assert store(two, 1, {A: 0}).failed == frozenset()
    assert proxy.seen.requests["CREATE"] == num_created + 1
    assert two.get_stats()["present_chunks"] == 1
    assert two.get_stats()["stored_bytes"] == 0


def test_a_store_without_conditional_writes_is_asked_first(
    open_tier: Open, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.faults = Faults(methods=frozenset({"CREATE"}), status=501, code="NotImplemented")
    tier = open_tier()
    assert caplog.text.count("asking before each write") == 1
    assert store(tier, 1, {A: 0}).failed == frozenset()
    other = open_tier()
    num_written = proxy.seen.requests["PUT"]
    assert store(other, 2, {A: 0}).failed == frozenset()
    assert other.get_stats()["present_chunks"] == 1
    assert proxy.seen.requests["PUT"] == num_written


def test_a_store_that_overwrites_all_the_same_is_found_out_at_the_start(
    open_tier: Open, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.faults = Faults(methods=frozenset({"CREATE"}), blind=True)
    tier = open_tier()
    assert caplog.text.count("asking before each write") == 1
    store(tier, 1, {A: 0})
    other = open_tier()
    store(other, 1, {A: 0})
    assert other.get_stats()["present_chunks"] == 1


def test_a_chunk_deleted_while_it_is_loaded_is_not_taken_for_present(
    tier: ObjectTier, proxy: FaultProxy
) -> None:
    store(tier, 1, {A: 0})
    late = threading.Event()
    proxy.faults = Faults(methods=frozenset({"GET"}), late=late)
    submit_load(tier, 2, {A: 5})
    proxy.wait_until_open(1, "GET")
    tier.delete([A])
    wait_until(lambda: tier.get_stats()["deleted_chunks"] == 1)
    late.set()
    assert wait_for(tier, 2)[2].failed == frozenset()
    assert look_up(tier, A) is LookupResult.MISS


def test_a_chunk_deleted_while_it_is_stored_is_gone_afterwards(
    tier: ObjectTier, open_tier: Open, proxy: FaultProxy
) -> None:
    early = threading.Event()
    num_deletes = proxy.seen.requests["POST"]
    proxy.faults = Faults(methods=frozenset({"CREATE"}), early=early)
    submit_store(tier, 1, {A: 0})
    proxy.wait_until_open(1, "CREATE")
    tier.delete([A])
    assert look_up(tier, B) is LookupResult.MISS  # time for a deletion that does not wait
    assert proxy.seen.requests["POST"] == num_deletes
    early.set()
    wait_for(tier, 1)
    assert look_up(tier, A) is LookupResult.MISS
    wait_until(lambda: proxy.seen.requests["POST"] > num_deletes and not proxy.seen.num_open)
    proxy.heal()
    assert look_up(open_tier(), A) is LookupResult.MISS


REMOVALS: dict[str, Callable[[ObjectTier], None]] = {
    "delete": lambda tier: tier.delete([A]),
    "delete_prefix": lambda tier: tier.delete_prefix(A[:4]),
    "reset": lambda tier: tier.reset(),
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
def test_what_was_deleted_before_a_shutdown_does_not_come_back(
    tier: ObjectTier, open_tier: Open, proxy: FaultProxy, remove: Callable[[ObjectTier], None]
) -> None:
    store(tier, 1, {A: 0})
    num_deletes = proxy.seen.requests["POST"]
    proxy.faults = Faults(methods=frozenset({"POST"}), status=503, num_left=1)
    remove(tier)
    wait_until(lambda: proxy.seen.requests["POST"] > num_deletes)
    tier.shutdown(30.0)
    assert look_up(open_tier(), A) is LookupResult.MISS


def wait_until(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(10_000):
        if is_so():
            return
        pause.wait(0.002)
    raise AssertionError("it never came to be so")


def test_a_cap_holds_on_a_bucket_too(tier: ObjectTier, open_tier: Open) -> None:
    for job_id, (key, slot) in enumerate({A: 0, B: 1, C: 2}.items()):
        store(tier, job_id, {key: slot})
    tier = restart(tier, open_tier, max_bytes=3 * OBJECT_BYTES)
    assert store(tier, 1, {D: 3}).failed == frozenset()
    assert tier.get_stats()["used_bytes"] == 3 * OBJECT_BYTES
    tier = restart(tier, open_tier)
    assert [look_up(tier, key) for key in (A, B, C, D)].count(LookupResult.HIT) == 3
    assert look_up(tier, D) is LookupResult.HIT


def test_a_listing_that_fails_is_repeated_and_stores_wait_for_it(
    open_tier: Open, proxy: FaultProxy
) -> None:
    proxy.faults = Faults(methods=frozenset({"LIST"}), status=503, num_left=2)
    tier = open_tier(max_bytes="100MiB", probe="skip")
    assert store(tier, 1, {A: 0}).failed == frozenset()
    assert proxy.seen.order == ["LIST", "LIST", "LIST", "CREATE"]
    assert tier.get_stats()["throttled"] == 2
    assert tier.get_stats()["is_counted"] == 1


def test_an_eviction_that_fails_keeps_the_count_true(open_tier: Open, proxy: FaultProxy) -> None:
    tier = open_tier(max_bytes=OBJECT_BYTES, num_tries=1)
    store(tier, 1, {A: 0})
    proxy.faults = Faults(methods=frozenset({"POST", "DELETE"}), status=503)
    assert store(tier, 2, {B: 1}).failed == {B}
    assert tier.get_stats()["used_bytes"] == OBJECT_BYTES
    proxy.heal()
    assert store(tier, 3, {B: 1}).failed == frozenset()
    assert tier.get_stats()["used_bytes"] == OBJECT_BYTES


def test_no_fault_brings_wrong_bytes_or_a_job_without_a_result(
    open_tier: Open, proxy: FaultProxy, slots: SlotView
) -> None:
    tier = open_tier(num_tries=2, request_timeout_s=0.3, hedge_after_s=0.05)
    faults = [
        Faults(status=503, num_left=3),
        Faults(methods=READS, reset_after=50, num_left=2),
        Faults(methods=READS, truncate=7, num_left=2),
        Faults(methods=READS, truncate=7, shorten=True, num_left=1),
        Faults(methods=READS, flip=True, num_left=2),
        Faults(methods=READS, slow_bytes=900, num_left=1),
        Faults(methods=READS, status=404, code="NoSuchKey", num_left=2),
        Faults(),
    ]
    for round_number, fault in enumerate(faults * 2):
        proxy.faults = fault
        submit_store(tier, 3 * round_number, {A: 0, B: 1, C: 2, D: 3})
        submit_load(tier, 3 * round_number + 1, {A: 4, B: 5})
        submit_load(tier, 3 * round_number + 2, {C: 6, D: 7})
        results = wait_for(tier, *range(3 * round_number, 3 * round_number + 3))
        for job_id, chunks in enumerate(({A: 4, B: 5}, {C: 6, D: 7}), 3 * round_number + 1):
            for key in set(chunks) - results[job_id].failed:
                assert slots[chunks[key]] == pattern(key, CHUNK_BYTES)
    proxy.heal()
    tier.on_schedule_end(IDLE_STEP)
    [look_up(tier, key) for key in (A, B, C, D)]
    assert store(tier, 1000, {A: 0, B: 1, C: 2, D: 3}).failed == frozenset()
    assert load(tier, 1001, {A: 4, B: 5, C: 6, D: 7}).failed == frozenset()
