"""Field reports of C, G and H on real copies: the engine's thread never pays for a slow backend."""

import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from typing_extensions import override

from kvstrata.build import build_manager
from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.memory import SlotView
from kvstrata.core.tier import TierEnv
from kvstrata.testing import FakeClock, FakeRegion, chain, numbered_key
from kvstrata.testing.manager_calls import end_step, finish, load, look_up, start, store
from kvstrata.testing.tier_calls import NUM_POLLS_MAX, PATIENCE_S, pause, returns
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs.settings import DirectMode
from tests.disks import HookedDisk, refuse_direct_opens, refuse_direct_writes
from tests.tiering_world import CHUNK_BYTES, FAKE, World

AB = chain("ab")
HOOKED = "tests.unit.tiering.test_slow_backends:HookedFs"


class HookedFs(FsTier):
    """A file-system tier whose disk a test finds in `disks`, by root."""

    disks: ClassVar[dict[str, HookedDisk]] = {}

    @classmethod
    @override
    def from_config(cls, slots: SlotView, settings: Mapping[str, Any], env: TierEnv) -> Self:
        root = settings["root"]
        cls.disks[root] = HookedDisk(Path(root), DirectMode.OFF)
        rest = {name: value for name, value in settings.items() if name != "backend"}
        return cls(slots, env=env, disk=cls.disks[root], **rest)


class SlowWorld(World):
    """A hooked fs tier "slow" before a fake one, "fast"."""

    def __init__(self, root: Path, num_slots: int = 64, **settings: object) -> None:
        slow = {"type": HOOKED, "root": str(root), "max_bytes": "1GiB", **settings}
        super().__init__(num_slots, ("slow", "fast"), each={"slow": slow, "fast": {"type": FAKE}})
        self.disk = HookedFs.disks[str(root)]

    def wait_until(self, name: str, count: int) -> None:
        for _ in range(NUM_POLLS_MAX):
            if self.disk.calls[name] >= count:
                return
            pause()
        raise AssertionError(f"{name} was called {self.disk.calls[name]} times, not {count}")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SlowWorld]:
    world = SlowWorld(tmp_path / "kv", num_threads=2, shared="yes", io_deadline_s=30.0)
    yield world
    world.disk.release()
    world.manager.shutdown(10.0)


def keys(count: int, first: int = 0) -> list[OffloadKey]:
    return [numbered_key(i) for i in range(first, first + count)]


def test_g01_a_lookup_does_not_wait_for_the_disk_however_busy_the_interpreter_is(
    world: SlowWorld,
) -> None:
    is_over = threading.Event()

    def be_busy() -> None:
        while not is_over.is_set():
            sum(range(100))

    busy = [threading.Thread(target=be_busy) for _ in range(4)]
    for thread in busy:
        thread.start()
    try:
        world.disk.hold("stat")
        ctx = world.request("r")
        assert returns(lambda: world.lookup(keys(500), ctx))
        assert world.lookup(keys(500), ctx) is None, "the disk was asked, and has not answered"
        world.step()
        assert world.lookup(keys(500), ctx) is None
        world.disk.release()
        assert look_up(world.manager, keys(500), ctx) == 0
    finally:
        is_over.set()
        for thread in busy:
            thread.join(PATIENCE_S)


class WatchedRegion(FakeRegion):
    """Rows that tiers can't touch before `may_go` is set; counts who of the caller's did."""

    def __init__(self, num_slots: int, chunk_bytes: int) -> None:
        super().__init__(num_slots, chunk_bytes)
        self.may_go = threading.Event()
        self.caller = threading.current_thread()
        self.num_by_caller = 0

    @override
    def row(self, slot: int, /) -> memoryview:
        if threading.current_thread() is self.caller:
            self.num_by_caller += 1
        else:
            assert self.may_go.wait(PATIENCE_S)
        return super().row(slot)


@pytest.mark.parametrize("kind", ["memory", "fs"])
def test_g06_no_call_copies_or_waits_for_a_copy(kind: str, tmp_path: Path) -> None:
    slots = WatchedRegion(8, CHUNK_BYTES)
    settings: dict[str, dict[str, Any]] = {
        "memory": {"type": "memory"},
        "fs": {"type": "fs", "root": str(tmp_path), "max_bytes": "1GiB", "direct": "off"},
    }
    config = {"primary": {"num_chunks": 8, "policy": "lru"}, "tiers": [settings[kind]]}
    manager = build_manager(config, chunk_bytes=CHUNK_BYTES, namespace="g06", slots=slots)
    writer = start(manager, "w")
    store(manager, AB, writer)
    slots.num_by_caller = 0
    end_step(manager, new=["w"])
    assert manager.lookup(AB, writer) == 2
    manager.touch(AB, writer)
    spec = manager.prepare_load(AB, writer)
    manager.complete_load(AB, writer)
    finish(manager, writer)
    assert manager.has_pending_work(), "not a byte has moved below"
    assert slots.num_by_caller == 0
    assert len(spec.slots) == 2
    slots.may_go.set()
    settle(manager)
    flood = start(manager, "flood", store_tiers=[])
    store(manager, chain("12345678"), flood)
    finish(manager, flood)
    slots.may_go.clear()
    reader = start(manager, "r")
    assert manager.lookup(AB, reader) is None
    slots.num_by_caller = 0
    end_step(manager, new=["r"])
    assert manager.lookup(AB, reader) is None, "the promotion can't have begun"
    assert slots.num_by_caller == 0
    slots.may_go.set()
    assert look_up(manager, AB, reader) == 2
    load(manager, AB, reader)
    manager.shutdown(10.0)


def test_g07_hanging_reads_make_a_tier_skipped_and_others_go_on(world: SlowWorld) -> None:
    hanging, both, only_slow = keys(16), keys(16, 16), keys(4, 32)
    world.run("w", [*hanging, *both, *only_slow])
    world.settle()
    world.flood(64)
    world.settle()
    world.backends["fast"].chunks.clear()
    world.put_below("fast", both)
    world.disk.hold("read")
    ctx = world.request("r")
    assert world.lookup(hanging, ctx) is None
    world.step()
    world.wait_until("read", 3)
    world.clock.advance(30.0)
    world.step()
    assert world.tier("slow").state == "hung"
    assert world.lookup(hanging, ctx) == 0, "its deadline is over too"
    assert world.lookup(only_slow, world.request("other")) == 0, "nobody is asked to wait"
    later = world.request("later")
    assert look_up(world.manager, both, later) == 16
    assert world.tier("fast")["loaded_chunks"] == 16
    assert returns(lambda: world.manager.shutdown(0.5))


def test_g09_a_load_starts_while_hundreds_of_stores_wait(world: SlowWorld) -> None:
    (wanted,) = keys(1)
    world.run("w", [wanted])
    world.settle()
    world.flood(64)
    world.settle()
    world.backends["fast"].chunks.clear()
    num_writes = world.disk.calls["write"]
    world.disk.hold("write")
    for i in range(4):
        world.run(f"s{i}", keys(48, 100 + 48 * i)[:15])
    world.wait_until("write", num_writes + 2)
    ctx = world.request("r")
    assert look_up(world.manager, [wanted], ctx) == 1
    assert world.disk.calls["write"] == num_writes + 2, "no store has gone on or begun"
    world.load([wanted], ctx)


def test_c10_h04_a_copy_that_breaks_is_a_failed_store_and_one_line_in_the_log(
    world: SlowWorld, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down() -> None:
        raise ValueError("no such format")

    world.disk.before["write"] = break_down
    with caplog.at_level(logging.WARNING):
        world.run("w", AB[:1])
        world.settle()
    world.disk.heal()
    tier = world.tier("slow")
    assert tier["stored_chunks"] == tier["stored_bytes"] == 0
    assert tier["failed_store_chunks"] == 2, "it was tried twice"
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(lines) == 2
    assert all(AB[0].hex() in line for line in lines)
    world.run("again", AB[1:])
    world.settle()
    assert world.tier("slow")["stored_chunks"] == 1


def fs_config(root: Path, direct: str) -> dict[str, Any]:
    tier = {"type": "fs", "root": str(root), "max_bytes": "1GiB", "direct": direct}
    return {"primary": {"num_chunks": 4, "policy": "lru"}, "tiers": [tier]}


def test_c10_a_way_to_the_disk_that_is_demanded_and_not_there_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct_opens(monkeypatch)
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.direct: .* can't do direct I/O"):
        build_manager(fs_config(tmp_path, "on"), chunk_bytes=CHUNK_BYTES, namespace="c10")
    assert threading.active_count() == num_threads


def test_c10_otherwise_there_is_one_warning_and_every_job_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_direct_writes(monkeypatch)
    manager = build_manager(fs_config(tmp_path, "auto"), chunk_bytes=CHUNK_BYTES, namespace="c10")
    bring_below(manager, AB)
    reader = start(manager, "r")
    assert look_up(manager, AB, reader) == 2
    load(manager, AB, reader)
    assert manager.get_stats().tiers["fs"]["direct_io"] == 0.0
    assert len([r for r in caplog.records if "direct I/O" in r.getMessage()]) <= 1
    assert not manager.get_stats().jobs
    manager.shutdown(10.0)


def bring_below(manager: OffloadingManager, keys: list[OffloadKey]) -> None:
    """Store chunks, wait until tiers have them, and push them out of the primary."""
    num_slots = manager.slots.num_slots
    for number, some in enumerate((keys, [OffloadKey(b"f%d" % i) for i in range(num_slots)])):
        ctx = start(manager, f"bring {number}")
        store(manager, some, ctx)
        finish(manager, ctx)
        settle(manager)


def settle(manager: OffloadingManager) -> None:
    for _ in range(NUM_POLLS_MAX):
        end_step(manager)
        if not manager.has_pending_work():
            return
        pause()
    raise AssertionError("a copy never ended")


def test_h03_a_slot_smaller_than_a_chunk_is_refused_at_the_start() -> None:
    config = {"primary": {"num_chunks": 4, "policy": "lru"}}
    for slots, said in (
        (FakeRegion(4, CHUNK_BYTES - 1), f"{CHUNK_BYTES - 1} bytes"),
        (FakeRegion(3, CHUNK_BYTES), "3 slots"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_manager(config, chunk_bytes=CHUNK_BYTES, namespace="h03", slots=slots)


def test_h03_a_short_write_is_a_failed_store_and_never_served(world: SlowWorld) -> None:
    world.disk.short = 1
    world.run("w", AB)
    world.settle()
    assert world.tier("slow")["stored_chunks"] == 0
    assert world.tier("slow")["failed_store_chunks"] >= 2
    world.disk.short = 0
    world.backends["fast"].chunks.clear()
    world.flood(64)
    world.settle()
    assert look_up(world.manager, AB, world.request("r")) == 0


@pytest.mark.parametrize("chunk_bytes", [1, 4095, 4097, 12_345])
@pytest.mark.parametrize("kind", ["memory", "fs"])
def test_h05_chunks_of_odd_sizes_come_back_from_below(
    kind: str, chunk_bytes: int, tmp_path: Path
) -> None:
    tier = {"type": kind} | ({"root": str(tmp_path), "max_bytes": "1GiB"} if kind == "fs" else {})
    config = {"primary": {"num_chunks": 2, "policy": "lru"}, "tiers": [tier]}
    manager = build_manager(config, chunk_bytes=chunk_bytes, namespace="h05", clock=FakeClock())
    bring_below(manager, AB)
    ctx = start(manager, "reader")
    assert look_up(manager, AB, ctx) == 2
    load(manager, AB, ctx)
    assert manager.get_stats().tiers[kind]["loaded_bytes"] == 2 * chunk_bytes
    manager.shutdown(10.0)
