"""The file-system tier: what it does with chunks, failures, time and other people's files."""

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LoadJob, LookupResult, StoreJob
from kvstrata.core.tier import TierEnv
from kvstrata.testing import FakeRegion, poison
from kvstrata.testing.tier_calls import IDLE_STEP, PATIENCE_S, pause, wait_for
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs.sweep import Sweep
from tests.disks import bytes_below, chunk_files, refuse_direct_opens, refuse_direct_writes
from tests.fs_world import CHUNK_BYTES, CTX, FILE_BYTES, World, cap, quick_dir


@pytest.fixture
def world() -> Iterator[World]:
    with quick_dir() as root:
        world = World(root / "kv")
        yield world
        if world.tiers:
            world.disk.release()
        world.close()


def events(world: World) -> list[tuple[EventKind, RemovalReason | None, set[int]]]:
    return [
        (event.kind, event.reason, {world.number_of(key) for key in event.keys})
        for event in world.tier.take_events()
    ]


def test_a_store_that_fails_midway_leaves_nothing_and_can_be_repeated(world: World) -> None:
    world.open()
    world.disk.fail_with(errno.EIO, "write")
    assert world.store(0) == {0}
    assert world.hits(0) == set()
    assert chunk_files(world.root) == []
    assert world.tier.get_stats()["failed_store_chunks"] == 1
    world.disk.heal()
    assert world.store(0) == set()
    assert world.load(0) == set()
    world.tier.check()


def test_a_short_write_is_a_failed_store(world: World) -> None:
    world.open()
    world.disk.short = 4096
    assert world.store(0) == {0}
    assert chunk_files(world.root) == []
    world.tier.check()


def test_a_chunk_being_written_is_invisible_to_others_until_it_is_whole(world: World) -> None:
    first = world.open()
    second_world = World(world.root)
    second_world.open()
    with world.disk.held("publish"):
        first.submit_store(StoreJob(JobId(1), [world.keys[0]], [0]))
        assert second_world.hits(0) == set()
        assert first.lookup(world.keys[0], CTX) is LookupResult.HIT_PENDING
    assert not wait_for(first, 1)[1].failed
    assert second_world.hits(0) == {0}
    assert second_world.load(0) == set()
    second_world.close()


def test_a_flipped_byte_fails_that_chunk_only_and_removes_its_file(world: World) -> None:
    world.open()
    world.store(0, 1)
    path = world.path_of(0)
    changed = bytearray(path.read_bytes())
    changed[5000] ^= 1
    path.write_bytes(changed)
    result = world.load_job(0, 1)
    assert result.failed == result.corrupt == {world.keys[0]}
    assert world.hits(0, 1) == {1}
    assert not path.exists()
    assert world.tier.get_stats()["corrupt_chunks"] == 1
    world.tier.check()


def test_bytes_of_another_key_are_never_served(world: World) -> None:
    world.open()
    world.store(0, 1)
    world.path_of(0).write_bytes(world.path_of(1).read_bytes())
    assert world.load(0, 1) == {0}


@pytest.mark.parametrize("length", [0, 100, 4096, FILE_BYTES - 4096])
def test_a_file_that_was_cut_is_a_miss_now_and_after_a_restart(world: World, length: int) -> None:
    world.open()
    world.store(0, 1)
    os.truncate(world.path_of(1), length)
    assert world.load(1) == {1}
    assert world.hits(1) == set()
    os.truncate(world.path_of(0), length)
    world.reopen()
    assert world.hits(0) == set()
    assert chunk_files(world.root) == []
    world.tier.check()


def test_the_cap_holds_at_every_moment_while_four_threads_store(world: World) -> None:
    tier = world.open(max_bytes=cap(10))
    above = []

    def sample() -> None:
        used_bytes = bytes_below(world.root)
        if used_bytes > cap(10):
            above.append(used_bytes)

    world.disk.before = dict.fromkeys(("create", "write", "publish", "remove"), sample)
    for i in range(32):
        tier.submit_store(StoreJob(JobId(100 + i), [world.keys[i]], [i]))
    wait_for(tier, *range(100, 132))
    assert above == []
    assert len(world.hits(*range(32))) == 10
    assert world.hits(*range(22, 32))
    world.tier.check()


def test_a_chunk_that_is_being_loaded_is_not_evicted(world: World) -> None:
    tier = world.open(max_bytes=cap(2))
    world.store(0)
    world.store(1)
    with world.disk.held("read"):
        tier.submit_load(LoadJob(JobId(900), [world.keys[0]], [40]))
        world.store(2)
    assert not wait_for(tier, 900)[900].failed
    assert world.hits(0, 1, 2) == {0, 2}


def test_a_request_longer_than_the_cap_keeps_its_head(world: World) -> None:
    world.open(max_bytes=cap(4))
    assert world.store(*range(8)) == {4, 5, 6, 7}
    assert world.hits(*range(8)) == {0, 1, 2, 3}
    assert world.tier.get_stats()["refused_chunks"] == 4


def test_usage_after_a_restart_is_what_is_on_disk_and_the_longest_unused_leave(
    world: World,
) -> None:
    world.open()
    for i in range(15):
        world.store(i)
        world.clock.advance(1.0)
    world.tier.touch([world.keys[0]], CTX)
    world.reopen(max_bytes=cap(10))
    assert world.tier.get_stats()["used_bytes"] == bytes_below(world.root) == cap(10)
    assert world.hits(*range(15)) == {0, *range(6, 15)}


@pytest.mark.parametrize("remove", ["delete", "delete_prefix", "reset"])
def test_a_chunk_deleted_while_room_is_made_for_it_does_not_appear(
    world: World, remove: str
) -> None:
    tier = world.open(max_bytes=cap(2))
    world.store(0, 1)
    removals = {
        "delete": lambda: tier.delete([world.keys[2]]),
        "delete_prefix": lambda: tier.delete_prefix(world.keys[2][:8]),
        "reset": tier.reset,
    }

    def interfere() -> None:
        world.disk.heal()
        removals[remove]()

    world.disk.before["remove"] = interfere  # an old chunk is about to make room
    assert world.store(2) == {2}
    world.settle()
    assert world.hits(2) == set()
    assert not list(world.root.rglob(f"{world.keys[2].hex()}*"))


@pytest.mark.parametrize("num_used", [0, 8])
def test_tails_leave_before_heads_after_a_restart_too(world: World, num_used: int) -> None:
    # Field report D13.
    tier, ctx = world.open(), ReqContext("r")
    tier.on_new_request(ctx)
    for part in (range(4), range(4, 8)):
        job_id = world.job_id()
        tier.submit_store(StoreJob(JobId(job_id), world.keys[part.start : part.stop], part, ctx))
        assert not wait_for(tier, job_id)[job_id].failed
        world.clock.advance(1.0)
    tier.on_request_finished(ctx)
    tier.touch(world.keys[:num_used], CTX)
    world.reopen(max_bytes=cap(4))
    assert world.hits(*range(8)) == {0, 1, 2, 3}


def test_what_an_earlier_process_wrote_is_found_and_not_written_again(world: World) -> None:
    world.open()
    world.store(*range(8))
    world.reopen()
    assert world.hits(*range(9)) == set(range(8))
    assert world.load(*range(8)) == set()
    assert world.store(*range(8)) == set()
    stats = world.tier.get_stats()
    assert stats["stored_bytes"] == 0
    assert stats["present_chunks"] == 8
    assert events(world)[0] == (EventKind.STORED, None, set(range(8)))


def test_a_size_has_to_be_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    env = TierEnv("fs", "x", world.clock, "tiers[1]")
    with pytest.raises(ConfigError, match=r"^tiers\[1\]\.max_bytes: is required"):
        FsTier.from_config(world.slots, {"root": world.root}, env)
    with caplog.at_level(logging.WARNING):
        FsTier(world.slots, root=world.root).shutdown()
    assert "max_bytes" in caplog.text
    FsTier.from_config(
        world.slots, {"root": str(world.root), "max_bytes": "unlimited"}, env
    ).shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"root": "x", "max_bytes": "20KB"}, r"tiers\[0\]\.max_bytes: 20000 bytes hold no chunk"),
        ({"root": "x", "max_bytes": "1MB", "rot": 1}, r"tiers\[0\]\.rot: unknown field, did you"),
        ({"root": "x", "max_bytes": "1MB", "direct": "no"}, r"tiers\[0\]\.direct: must be one of"),
        ({"max_bytes": "1MB"}, r"tiers\[0\]\.root: is required"),
        ({"root": "/proc/no", "max_bytes": "1MB"}, r"tiers\[0\]\.root: can't use /proc/no"),
    ],
)
def test_wrong_settings_are_refused_by_path(
    world: World, settings: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.root.mkdir()
    monkeypatch.chdir(world.root)
    with pytest.raises(ConfigError, match=message):
        FsTier.from_config(world.slots, settings, TierEnv("fs", "", world.clock, "tiers[0]"))


def test_the_floor_of_free_space_is_kept_whoever_fills_the_disk(world: World) -> None:
    world.open(min_free_bytes=10 * FILE_BYTES)
    world.disk.free = 14 * FILE_BYTES
    for i in range(4):
        assert world.store(i) == set()
        world.disk.free -= FILE_BYTES
    world.disk.free -= 2 * FILE_BYTES  # somebody else's
    world.disk.before["remove"] = lambda: setattr(
        world.disk, "free", (world.disk.free or 0) + FILE_BYTES
    )
    world.clock.advance(2.0)
    world.settle()
    assert world.hits(*range(4)) == {2, 3}
    assert world.disk.free == 10 * FILE_BYTES


def test_no_room_and_nothing_to_remove_is_the_state_full(world: World) -> None:
    world.open(min_free_bytes=10 * FILE_BYTES)
    world.disk.free = 10 * FILE_BYTES
    assert world.store(0) == {0}
    assert world.tier.get_stats().state == "full"
    world.disk.free = 20 * FILE_BYTES
    world.clock.advance(2.0)
    assert world.store(0) == set()
    assert world.tier.get_stats().state == "ok"


def test_many_chunks_are_spread_over_directories_and_lookups_list_none(world: World) -> None:
    world.slots = FakeRegion(64, 100)
    tier = world.open(max_bytes="1GB")
    keys = [OffloadKey(b"%d" % i) for i in range(3_000)]
    tier.submit_store(StoreJob(JobId(1), keys, [0] * len(keys)))
    assert not wait_for(tier, 1)[1].failed
    sizes = [len(names) + len(dirs) for _, dirs, names in os.walk(world.root)]
    assert max(sizes) <= 1_000
    num_scans = world.disk.calls["scan"]
    assert set(tier.lookup_many(keys, CTX)) == {LookupResult.HIT}
    assert tier.lookup(OffloadKey(b"x"), CTX) is LookupResult.MISS
    assert world.disk.calls["scan"] == num_scans


@pytest.mark.parametrize(
    ("number", "state"),
    [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EROFS, "read_only")],
)
def test_a_full_disk_is_a_state_that_ends_by_itself(
    world: World, number: int, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.open()
    world.store(0)
    world.disk.fail_with(number, "write")
    used_bytes = world.tier.get_stats()["used_bytes"]
    caplog.clear()
    for i in range(1, 6):
        assert world.store(i) == {i}
    assert world.tier.get_stats().state == state
    assert world.disk.calls["write"] == 2  # the first, and one that found out
    assert world.tier.get_stats()["used_bytes"] == used_bytes
    assert len(caplog.records) == 1
    assert world.load(0) == set()
    world.disk.heal()
    world.clock.advance(2.0)
    assert world.store(1, 2) == set()
    assert world.tier.get_stats().state == "ok"
    world.tier.check()


def test_closing_keeps_or_deletes_as_told_and_never_what_is_not_ours(world: World) -> None:
    other = World(world.root)
    other.open("other")
    other.store(5)
    other.close()
    foreign = world.root / "v1-readme.txt"
    foreign.write_text("mine")
    world.open()
    world.store(0)
    world.tier.shutdown()
    assert len(chunk_files(world.root)) == 2
    world.open(on_close="delete")
    assert world.hits(0) == {0}
    inside = world.path_of(0).with_name("note.txt")
    inside.write_text("mine")
    world.tier.shutdown()
    assert chunk_files(world.root) == [other.path_of(5)]
    assert foreign.read_text() == inside.read_text() == "mine"


def test_foreign_files_are_not_counted(world: World) -> None:
    world.root.mkdir()
    (world.root / "big").write_bytes(bytes(100_000))
    (world.root / "v1-xyz").mkdir()
    (world.root / "v1-xyz" / "ab.chunk").write_bytes(bytes(100_000))
    world.open(max_bytes=cap(2))
    assert world.store(0, 1) == set()
    assert world.tier.get_stats()["used_bytes"] == cap(2)
    assert (world.root / "big").exists()


def test_chunks_of_other_namespaces_count_and_leave_when_unused_for_longer(world: World) -> None:
    other = World(world.root)
    other.open("other")
    other.store(0)
    world.clock.advance(10.0)
    world.open(max_bytes=cap(2))
    world.store(1)
    world.clock.advance(10.0)
    world.store(2)
    assert world.hits(1, 2) == {1, 2}
    assert other.load(0) == {0}
    other.close()


def test_a_chunk_of_another_namespace_that_was_used_meanwhile_stays(world: World) -> None:
    other = World(world.root)
    other.open("other")
    other.store(0)
    world.clock.advance(10.0)
    world.open(max_bytes=cap(2))
    world.store(1)
    os.utime(other.path_of(0), (world.clock.wall_s() + 5.0, world.clock.wall_s() + 5.0))
    world.clock.advance(10.0)
    world.store(2)
    assert world.hits(1, 2) == {2}
    assert other.load(0) == set()
    other.close()


def test_refused_direct_io_falls_back_with_one_warning(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.open()
    refuse_direct_writes(monkeypatch)
    assert world.store(0, 1, 2) == set()
    assert world.load(0, 1, 2) == set()
    assert [r.message for r in caplog.records if "direct I/O" in r.message] != []
    assert len([r for r in caplog.records if "direct I/O" in r.message]) == 1
    assert world.tier.get_stats()["direct_io"] == 0.0


def test_direct_io_that_is_demanded_and_impossible_stops_the_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct_opens(monkeypatch)
    with pytest.raises(ConfigError, match=r"tier\.direct: .* can't do direct I/O"):
        FsTier(world.slots, root=world.root, max_bytes="1MB", direct="on")


def test_a_file_that_somebody_removed_is_a_soft_failure_told_once(world: World) -> None:
    world.open()
    world.store(0, 1)
    world.tier.take_events()
    world.path_of(0).unlink()
    assert world.hits(0) == {0}  # nobody could know
    assert world.load(0, 1) == {0}
    assert world.hits(0) == set()
    assert world.load(0) == {0}
    world.settle()
    assert events(world) == [(EventKind.REMOVED, RemovalReason.EXTERNAL, {0})]
    world.tier.check()


def test_a_scan_notices_what_somebody_removed(world: World) -> None:
    world.open()
    world.store(0, 1)
    world.tier.take_events()
    world.path_of(0).unlink()
    world.clock.advance(61.0)
    world.settle()
    assert world.hits(0, 1) == {1}
    assert events(world) == [(EventKind.REMOVED, RemovalReason.EXTERNAL, {0})]
    world.tier.check()


def test_shutdown_writes_what_is_queued_and_leaves_no_thread_or_descriptor(world: World) -> None:
    num_fds, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    tier = world.open()
    for i in range(5):
        tier.submit_store(StoreJob(JobId(i), [world.keys[i]], [i]))
    assert list(tier.shutdown(PATIENCE_S)) == []
    assert sorted(result.job_id for result in tier.get_finished_jobs()) == [0, 1, 2, 3, 4]
    assert len(os.listdir("/proc/self/fd")) <= num_fds
    assert threading.active_count() == num_threads
    world.open()
    assert world.hits(*range(5)) == set(range(5))


def test_shutdown_with_a_disk_that_does_not_answer_names_the_jobs(world: World) -> None:
    tier = world.open(num_threads=2)
    with world.disk.held("write"):
        for i in range(5):
            tier.submit_store(StoreJob(JobId(i), [world.keys[i]], [i]))
        stuck = tier.shutdown(0.1)
        assert sorted(stuck) == [0, 1, 2, 3, 4]
        results = {r.job_id: r for r in tier.get_finished_jobs()}
        assert sorted(results) == [0, 1, 2, 3, 4]
        assert all(result.failed for result in results.values())
    world.open()
    assert world.hits(*range(5)) == set()


HOSTILE = ["../../x", "a@b", "x" * 400, "new\nline", "nul\0", "\u0430", "a", "", "\ud800"]


def test_hostile_names_stay_below_the_root_and_apart(world: World) -> None:
    for i, name in enumerate(HOSTILE):
        world.open(name)
        assert world.hits(*range(len(HOSTILE))) == set()
        world.store(i)
        world.tier.shutdown()
    for i, name in enumerate(HOSTILE):
        world.open(name)
        assert world.hits(*range(len(HOSTILE))) == {i}
        world.tier.shutdown()
    outside = [path for path in world.root.parent.iterdir() if path != world.root]
    assert outside == []


def test_a_key_too_long_for_a_file_name_is_refused(world: World) -> None:
    tier = world.open()
    long_key = OffloadKey(bytes(125))
    tier.submit_store(StoreJob(JobId(1), [OffloadKey(bytes(124)), long_key], [0, 1]))
    assert wait_for(tier, 1)[1].failed == {long_key}


def test_many_unknown_keys_are_one_probe_and_unknown_is_not_absent(world: World) -> None:
    tier = world.open(shared="yes")
    with world.disk.held("stat"):
        for _ in range(3):
            answers = tier.lookup_many(world.keys, CTX)
            assert set(answers) == {LookupResult.RETRY}
            tier.on_schedule_end(IDLE_STEP)
    assert world.hits(*range(3)) == set()
    assert world.disk.calls["stat"] == len(world.keys)
    other = World(world.root)
    other.open()
    other.store(0)
    other.close()
    world.settle()
    assert world.hits(0) == {0}


def test_a_request_that_was_told_absent_does_not_wait_again(world: World) -> None:
    tier = world.open(shared="yes")
    ctx = ReqContext("live")
    tier.on_new_request(ctx)
    assert tier.lookup(world.keys[0], ctx) is LookupResult.RETRY
    world.settle()
    for _ in range(5):
        assert tier.lookup(world.keys[0], ctx) is LookupResult.MISS
        world.settle()
    other = World(world.root)
    other.open()
    other.store(0)
    other.close()
    world.clock.advance(2.0)
    assert tier.lookup(world.keys[0], ctx) is LookupResult.MISS
    world.settle()
    assert tier.lookup(world.keys[0], ctx) is LookupResult.HIT


def test_hung_reads_make_the_tier_fail_fast_and_it_comes_back(world: World) -> None:
    tier = world.open(num_threads=2, io_deadline_s=5.0)
    world.store(*range(16))
    world.disk.hold("read")
    for i in range(16):
        tier.submit_load(LoadJob(JobId(100 + i), [world.keys[i]], [32 + i]))
    while world.disk.calls["read"] < 3:
        pause()
    world.clock.advance(6.0)
    failed = {result.job_id for result in tier.get_finished_jobs()}
    assert len(failed) == 13  # three are being read
    assert tier.get_stats().state == "hung"
    assert set(tier.lookup_many(world.keys, CTX)) == {LookupResult.MISS}
    tier.submit_load(LoadJob(JobId(200), [world.keys[0]], [60]))
    tier.submit_store(StoreJob(JobId(201), [world.keys[20]], [20]))
    assert {r.job_id for r in tier.get_finished_jobs()} == {200, 201}
    world.disk.release()
    late = set(range(100, 116)) - failed
    assert set(wait_for(tier, *late)) == late
    world.settle()
    assert tier.get_stats().state == "ok"
    assert world.load(*range(16)) == set()


def test_a_slot_stays_its_jobs_until_the_late_read_is_over(world: World) -> None:
    tier = world.open(io_deadline_s=5.0)
    world.store(0)
    with world.disk.held("read"):
        tier.submit_load(LoadJob(JobId(100), [world.keys[0]], [40]))
        while not world.disk.calls["read"]:
            pause()
        world.clock.advance(6.0)
        assert list(tier.get_finished_jobs()) == []
        assert [job.job_id for job in tier.get_stats().jobs] == [100]
    wait_for(tier, 100)
    poison(world.slots.row(40))
    poisoned = bytes(world.slots.row(40))
    world.settle()
    assert world.slots.row(40) == poisoned


@pytest.mark.parametrize(("operation", "number"), [("write", 3), ("publish", 1)])
def test_stores_that_wait_behind_a_hung_one_to_appear_end_with_it(
    world: World, operation: str, number: int
) -> None:
    tier = world.open(max_bytes=cap(256), num_threads=1, io_deadline_s=5.0)
    gate = threading.Event()

    def hold() -> None:
        assert world.disk.calls[operation] < number or gate.wait(60.0)

    world.disk.before[operation] = hold
    tier.submit_store(StoreJob(JobId(100), world.keys[:3], [0, 1, 2]))
    while world.disk.calls[operation] < number:
        pause()
    assert len(chunk_files(world.root)) == 0  # whatever is written waits for the third
    world.clock.advance(6.0)
    assert wait_for(tier, 100)[100].failed == set(world.keys[:3])
    gate.set()
    world.settle()
    assert world.hits(0, 1, 2) == set()
    assert chunk_files(world.root) == []
    world.tier.check()


def test_a_small_tier_lets_no_written_file_wait(world: World) -> None:
    tier = world.open(max_bytes=cap(31), num_threads=1)
    gate = threading.Event()

    def hold() -> None:
        assert world.disk.calls["write"] < 3 or gate.wait(60.0)

    world.disk.before["write"] = hold
    tier.submit_store(StoreJob(JobId(100), world.keys[:3], [0, 1, 2]))
    while world.disk.calls["write"] < 3:
        pause()
    assert len(chunk_files(world.root)) == 2
    gate.set()
    assert not wait_for(tier, 100)[100].failed


def test_a_hung_store_ends_at_its_deadline_and_never_appears(world: World) -> None:
    tier = world.open(io_deadline_s=5.0)
    with world.disk.held("write"):
        tier.submit_store(StoreJob(JobId(100), [world.keys[0]], [0]))
        while not world.disk.calls["write"]:
            pause()
        world.clock.advance(6.0)
        assert wait_for(tier, 100)[100].failed == {world.keys[0]}
        poison(world.slots.row(0))  # its slot is somebody else's now
    world.settle()
    assert world.hits(0) == set()
    assert chunk_files(world.root) == []
    world.tier.check()


def test_a_load_does_not_wait_for_queued_stores(world: World) -> None:
    tier = world.open(num_threads=2)
    world.store(31)
    with world.disk.held("write"):
        for i in range(30):
            tier.submit_store(StoreJob(JobId(100 + i), [world.keys[i]], [i]))
        while world.disk.calls["write"] < 3:  # that of chunk 31, and two held ones
            pause()
        for _ in range(10):
            pause()  # time for a third one, if there could be one
        assert world.load(31) == set()
    wait_for(tier, *range(100, 130))


def test_counters_agree_in_both_directions_and_every_job_is_timed(world: World) -> None:
    world.open()
    for i in range(5):
        world.store(i)
    world.load(0)
    world.load(1)
    world.load(9)
    stats = world.tier.get_stats()
    assert stats["stored_chunks"] == stats["store_jobs"] == 5
    assert stats["loaded_chunks"] == 2
    assert stats["load_jobs"] == 3
    assert stats["stored_bytes"] == 5 * CHUNK_BYTES
    assert stats["loaded_bytes"] == 2 * CHUNK_BYTES
    assert stats["failed_load_chunks"] == 1


def test_a_chunk_that_is_there_is_not_written_again(world: World) -> None:
    world.open()
    world.store(0)
    num_writes = world.disk.calls["write"]
    world.store(0)
    assert world.disk.calls["write"] == num_writes
    stats = world.tier.get_stats()
    assert (stats["stored_bytes"], stats["present_chunks"]) == (CHUNK_BYTES, 1)


def test_deleted_chunks_are_gone_in_the_next_process_too(world: World) -> None:
    world.open()
    world.store(0, 1, 2)
    world.tier.take_events()
    world.tier.delete([world.keys[0], world.keys[1]])
    assert world.hits(0, 1, 2) == {2}
    world.settle()
    assert events(world) == [(EventKind.REMOVED, RemovalReason.DELETED, {0, 1})]
    world.reopen()
    assert world.hits(0, 1, 2) == {2}


def test_a_chunk_deleted_while_it_is_written_never_appears(world: World) -> None:
    tier = world.open()
    with world.disk.held("write"):
        tier.submit_store(StoreJob(JobId(100), world.keys[:2], [0, 1]))
        while not world.disk.calls["write"]:
            pause()
        tier.delete([world.keys[0]])
    assert wait_for(tier, 100)[100].failed == {world.keys[0]}
    assert world.hits(0, 1) == {1}
    world.tier.check()


def test_a_lifetime_ends_on_disk_also_after_a_restart(world: World) -> None:
    world.open()
    at_s = world.clock.wall_s() + 60.0
    world.store(0, 1, expires_at_s=[at_s, float("inf")])
    world.clock.advance(59.0)
    world.reopen()
    assert world.hits(0, 1) == {0, 1}
    world.tier.touch([world.keys[0]], CTX)
    world.clock.advance(1.0)
    assert world.hits(0, 1) == {1}
    world.settle()
    assert chunk_files(world.root) == [world.path_of(1)]
    assert (EventKind.REMOVED, RemovalReason.EXPIRED, {0}) in events(world)


def test_an_expired_chunk_whose_file_does_not_say_so_is_not_served(world: World) -> None:
    world.open()
    world.store(0, expires_at_s=[world.clock.wall_s() + 60.0])
    path = world.path_of(0)
    world.tier.shutdown()
    os.utime(path)  # a backup or a person touched it
    world.clock.advance(100.0)
    world.open()
    assert world.load(0) == {0}
    assert not path.exists()


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_only_the_owner_can_read_whatever_the_umask(world: World, umask: int) -> None:
    before = os.umask(umask)
    try:
        world.open()
        assert world.store(0) == set()
    finally:
        os.umask(before)
    for path in [world.root, *world.root.rglob("*")]:
        assert path.stat().st_mode & 0o7777 == (0o700 if path.is_dir() else 0o600), path


def test_reset_removes_the_namespace_only_and_says_so_once(world: World) -> None:
    other = World(world.root)
    other.open("other")
    other.store(3)
    world.open()
    world.store(0, 1)
    world.tier.take_events()
    world.tier.reset()
    assert world.hits(0, 1) == set()
    world.settle()
    assert events(world) == [(EventKind.CLEARED, RemovalReason.CLEARED, set())]
    assert chunk_files(world.root) == [other.path_of(3)]
    assert world.store(0) == set()
    assert world.load(0) == set()
    other.close()


def test_tails_leave_before_heads_whatever_order_jobs_end_in(world: World) -> None:
    tier = world.open(max_bytes=cap(8))
    ctx = ReqContext("long")
    tier.on_new_request(ctx)
    tier.touch(world.keys[:8], ctx)
    for number in (3, 0, 7, 5, 1, 6, 2, 4):
        job = StoreJob(JobId(number), [world.keys[number]], [number], ctx)
        tier.submit_store(job)
        wait_for(tier, number)
    tier.on_request_finished(ctx)
    world.store(10, 11)
    assert world.hits(*range(8)) == set(range(6))


def test_a_low_priority_makes_no_room_among_higher_ones(world: World) -> None:
    tier = world.open(max_bytes=cap(2))
    high = ReqContext("high", {"kvstrata": {"priority": 90}})
    tier.on_new_request(high)
    tier.submit_store(StoreJob(JobId(100), world.keys[:2], [0, 1], high))
    wait_for(tier, 100)
    assert world.store(5) == {5}
    assert world.hits(0, 1, 5) == {0, 1}


def test_what_another_process_wrote_meanwhile_is_not_written_again(world: World) -> None:
    world.open()
    other = World(world.root)
    other.open()
    other.store(0, 1)
    assert world.store(0, 1, 2) == set()
    assert world.disk.calls["write"] == 1
    assert world.tier.get_stats()["present_chunks"] == 2
    assert world.load(0, 1, 2) == set()
    other.close()


def test_a_newcomer_to_a_full_root_makes_room_among_the_chunks_of_others(world: World) -> None:
    world.open(max_bytes=cap(4))
    other = World(world.root)
    other.open(max_bytes=cap(4))
    other.store(0, 1, 2, 3)
    assert world.store(10, 11) == set()
    assert world.hits(10, 11) == {10, 11}
    assert len(chunk_files(world.root)) == 4
    assert world.tier.get_stats().state == "ok"
    other.close()


def test_the_root_may_be_used_twice_in_one_process(world: World, tmp_path: Path) -> None:
    other = World(world.root)
    other.open(max_bytes=cap(4))
    world.open(max_bytes=cap(4))
    other.store(0, 1)
    world.store(2, 3)
    world.store(4)
    assert bytes_below(world.root) == cap(4)
    other.close()
    world.settle()
    world.tier.check()


def test_an_unexpected_error_is_logged_with_a_count_and_the_first_key_only(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(self: Sweep, writes: object) -> int:
        raise ZeroDivisionError

    tier = world.open()
    monkeypatch.setattr(Sweep, "grant", break_down)
    assert world.store(*range(16)) == set(range(16))
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    line = record.getMessage()
    assert f"16 chunks from {world.keys[0].hex()} on" in line
    assert world.keys[1].hex() not in line
    monkeypatch.undo()
    assert world.store(*range(16)) == set()
    tier.check()


def test_l07_chunks_of_others_that_are_not_known_here_are_deleted_by_prefix_too(
    world: World,
) -> None:
    mine = world.open(shared="no")
    other = world.open(shared="no")
    world.store(0, 1)
    prefix = world.keys[0][:8]
    assert not world.keys[1].startswith(prefix)
    assert mine.lookup(world.keys[0], CTX) is LookupResult.MISS, "it does not know of it"
    mine.delete_prefix(prefix)
    while not mine.is_idle():
        pause()
    assert chunk_files(world.root) == [world.path_of(1)]
    assert world.load(0, 1) == {0}
    other.on_schedule_end(IDLE_STEP)
    mine.check()
