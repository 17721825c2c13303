"""Copies between an accelerator and slots: bytes, order against other work, and failures.

The device is one that does nothing before it has to (`tests/fake_device.py`): each wait that the
copier leaves out gives wrong bytes in a test here.
"""

import random
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from typing_extensions import override

from kvstrata.connector import (
    BlockCopies,
    CopyJob,
    HostCopier,
    KVGroup,
    OffloadingConnectorWorker,
    SchedulerOffloadConfig,
    StepMessage,
    TensorLayout,
)
from kvstrata.connector.device_copier import DeviceCopier
from kvstrata.connector.pinning import PinnedRows
from kvstrata.connector.transfers import Task, run_task
from kvstrata.core.errors import ContractError, OffloadError
from kvstrata.core.keys import JobId
from kvstrata.primary.region import HostRegion
from tests.fake_device import FakeDevice, FakeStream
from tests.unit.connector.test_copier import LAYOUTS, NUM_BLOCKS, filled

BLOCK_BYTES = 16


class World:
    """A group of two layers on a device, four slots of two blocks, and a copier between them."""

    def __init__(
        self,
        device: FakeDevice | None = None,
        *,
        num_pinned: int | None = None,
        staging_bytes: int = 1 << 20,
        span: int = 2,
    ) -> None:
        self.device = device or FakeDevice()
        self.tensors = [filled((NUM_BLOCKS, 4)) + 1, filled((NUM_BLOCKS, 4)) + 1000]
        self.config = SchedulerOffloadConfig((KVGroup(4, span),), 4)
        self.region = HostRegion.create(4, self.config.chunk_bytes([BLOCK_BYTES]))
        if num_pinned is not None:
            self.device.num_registered_max = num_pinned
        self.copier = DeviceCopier(
            self.region,
            self.config,
            0,
            [self.tensors],
            [TensorLayout(NUM_BLOCKS, 0)],
            device=self.device,
            staging_bytes=staging_bytes,
        )
        self.copier.pinned.wait()
        if num_pinned is not None:  # row by row, so that some are pinned and others are not
            self.copier.pinned.close()
            self.copier.pinned = PinnedRows(self.device, self.region, step_bytes=1)
            self.copier.pinned.wait()

    def block(self, block_id: int) -> bytes:
        return b"".join(tensor[block_id].tobytes() for tensor in self.tensors)

    def compute(self, block_id: int, value: int) -> None:
        """Enqueue a step that fills a block."""

        def run() -> None:
            for tensor in self.tensors:
                tensor[block_id] = value

        self.device.compute.enqueue("compute", run)

    def store(self, *copies: BlockCopies) -> frozenset[int]:
        return self.copier.store(copies, self.copier.mark())

    def load(self, *copies: BlockCopies) -> frozenset[int]:
        return self.copier.load(copies, self.copier.mark())


def whole(block_ids: Sequence[int], *slots: int) -> BlockCopies:
    """Chunks of two blocks."""
    twice = [slot for slot in slots for _ in range(2)]
    return BlockCopies(0, block_ids, twice, [0, 1] * len(slots))


NUM_PINNED = [4, 0, 2]
STAGING = [1 << 20, 2 * BLOCK_BYTES, 1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_slots_hold_what_a_host_copier_puts_there_and_blocks_come_back(name: str) -> None:
    # A16: with a descriptor, tensors that are not contiguous make the round trip.
    shape, axis, view = LAYOUTS[name]
    tensors = [view(filled(shape)), view(filled(shape) + 7)]
    layout = TensorLayout(NUM_BLOCKS, axis)
    config = SchedulerOffloadConfig((KVGroup(4, 2),), 4)
    chunk_bytes = 2 * sum(tensor.nbytes for tensor in tensors) // NUM_BLOCKS
    regions = [HostRegion.create(4, chunk_bytes) for _ in range(2)]
    host = HostCopier(regions[0], config, 0, [tensors], [layout])
    copier = DeviceCopier(regions[1], config, 0, [tensors], [layout], device=FakeDevice())
    copier.pinned.wait()
    there = [whole([4, 1, 3, 0], 2, 0)]
    host.store(there, host.mark())
    assert copier.store(there, copier.mark()) == frozenset()
    assert bytes(regions[0].memory) == bytes(regions[1].memory)
    expected = [tensor.copy() for tensor in tensors]
    for tensor in tensors:
        tensor[...] = 0
    assert copier.load(there, copier.mark()) == frozenset()
    for tensor, old in zip(tensors, expected, strict=True):
        ratio = tensor.shape[axis] // NUM_BLOCKS
        now, then = np.moveaxis(tensor, axis, 0), np.moveaxis(old, axis, 0)
        for block in range(NUM_BLOCKS):
            rows = slice(block * ratio, (block + 1) * ratio)
            assert (now[rows] == (then[rows] if block in {4, 1, 3, 0} else 0)).all()


@pytest.mark.parametrize("seed", [None, *range(20)])
@pytest.mark.parametrize("num_pinned", NUM_PINNED)
@pytest.mark.parametrize("staging_bytes", STAGING)
def test_blocks_come_back_wherever_they_go(
    seed: int | None, num_pinned: int, staging_bytes: int
) -> None:
    rng = random.Random(seed)
    device = FakeDevice(rng if seed is not None else None)
    world = World(device, num_pinned=num_pinned, staging_bytes=staging_bytes)
    for _ in range(6):
        order = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        slots = rng.sample(range(4), 3)
        for block_id in order:
            world.compute(block_id, rng.randrange(1, 60000))
        assert world.store(whole(order, *slots)) == frozenset()
        device.compute.run_to(len(device.compute.queue))
        expected = [world.block(block_id) for block_id in order]
        for slot, first in zip(slots, (0, 2, 4), strict=True):
            assert bytes(world.region[slot]) == expected[first] + expected[first + 1]
        for block_id in order:
            world.compute(block_id, 0)  # a step before the load must not show behind it
        assert world.load(whole(order, *slots)) == frozenset()
        assert [world.block(block_id) for block_id in order] == expected
        device.run_all()
        assert [world.block(block_id) for block_id in order] == expected


def test_a_store_reads_its_blocks_after_the_step_that_fills_them() -> None:
    world = World()
    world.compute(3, 77)
    world.store(whole([3, 5], 1))
    assert (world.tensors[0][3] == 77).all()
    assert bytes(world.region[1]) == world.block(3) + world.block(5)


def test_a_store_does_not_wait_for_steps_behind_its_mark() -> None:
    world = World()
    mark = world.copier.mark()
    before = world.block(3) + world.block(5)
    world.compute(3, 77)
    world.copier.store([whole([3, 5], 1)], mark)
    assert bytes(world.region[1]) == before


def test_a_load_writes_its_blocks_after_the_steps_that_still_use_them() -> None:
    world = World()
    world.store(whole([3, 5], 1))
    stored = bytes(world.region[1])
    world.compute(0, 0)
    world.load(whole([0, 2], 1))
    world.device.run_all()
    assert world.block(0) + world.block(2) == stored


@pytest.mark.parametrize("num_pinned", [4, 0])
def test_bytes_are_there_when_the_call_returns(num_pinned: int) -> None:
    world = World(num_pinned=num_pinned, staging_bytes=1)
    world.store(whole([3, 5, 0, 2], 1, 2))
    assert bytes(world.region[1]) == world.block(3) + world.block(5)
    assert bytes(world.region[2]) == world.block(0) + world.block(2)
    world.load(whole([1, 4], 2))
    assert world.block(1) + world.block(4) == bytes(world.region[2])


def test_neighbours_in_a_slot_are_one_copy() -> None:
    world = World(span=2)
    world.store(whole([0, 1, 2, 3, 4, 5], 3, 0, 1))
    assert world.device.num_enqueued("gather") == 1
    assert world.device.num_enqueued("to_host") == 3
    world.load(whole([0, 1, 2, 3, 4, 5], 3, 0, 1))
    assert world.device.num_enqueued("scatter") == 1
    assert world.device.num_enqueued("to_device") == 3


def test_unpinned_slots_are_copied_in_large_pieces() -> None:
    world = World(num_pinned=0)
    world.store(whole([0, 1, 2, 3, 4, 5], 3, 0, 1))
    assert world.device.num_enqueued("to_host") == 1
    assert world.device.buffers[0].nbytes == 2 << 20


def test_loads_are_served_before_stores() -> None:
    world = World()
    world.store(whole([0, 1], 0))
    world.load(whole([0, 1], 0))
    names = dict.fromkeys((kind, name) for name, kind in world.device.log)
    assert {("gather", "low"), ("scatter", "high")} <= set(names)


def test_parts_that_are_not_stored_are_cleared_and_gone_chunks_fail() -> None:
    world = World()
    world.region[1][:] = b"\xee" * len(world.region[1])
    world.store(BlockCopies(0, [4], [1], [1]))
    assert bytes(world.region[1]) == bytes(BLOCK_BYTES) + world.block(4)
    before = world.block(2)
    assert world.load(BlockCopies(0, [0, 2], [1, -7], [1, 0])) == {-7}
    assert world.block(0) == world.block(4)
    assert world.block(2) == before


@pytest.mark.parametrize("parts", [[0, 2], [2, 0], [1, 0], [1, 2]])
def test_each_block_is_at_the_part_that_is_named(parts: list[int]) -> None:
    world = World(span=3)
    world.store(BlockCopies(0, [4, 2], [1, 1], parts))
    expected = [bytes(BLOCK_BYTES)] * 3
    expected[parts[0]], expected[parts[1]] = world.block(4), world.block(2)
    assert bytes(world.region[1]) == b"".join(expected)
    world.load(BlockCopies(0, [0, 5], [1, 1], parts))
    assert [world.block(0), world.block(5)] == [world.block(4), world.block(2)]


def test_a_job_of_nothing_but_gone_chunks_ends() -> None:
    assert World().load(BlockCopies(0, [2], [-7], [0])) == {-7}


# Failures.


def job(job_id: int, copies: BlockCopies) -> CopyJob:
    return CopyJob(JobId(job_id), "r", [copies])


@pytest.mark.parametrize("kind", ["gather", "to_host"])
@pytest.mark.parametrize("num_pinned", [4, 0])
def test_nothing_is_written_behind_the_result_of_a_failed_store(kind: str, num_pinned: int) -> None:
    world = World(num_pinned=num_pinned, staging_bytes=BLOCK_BYTES)
    world.device.refused[kind] = 1  # the first block has been enqueued by then
    with pytest.raises(RuntimeError, match=f"{kind} refused"):
        world.store(whole([3, 5], 1))
    world.region[1][:] = b"\xaa" * len(world.region[1])  # the slot is another chunk's now
    world.device.run_all()
    world.store(whole([0, 2, 4, 1], 0, 2))
    assert bytes(world.region[1]) == b"\xaa" * len(world.region[1])
    assert bytes(world.region[0]) == world.block(0) + world.block(2)
    assert bytes(world.region[2]) == world.block(4) + world.block(1)


@pytest.mark.parametrize("kind", ["to_device", "scatter"])
@pytest.mark.parametrize("num_pinned", [4, 0])
def test_nothing_is_written_behind_the_result_of_a_failed_load(kind: str, num_pinned: int) -> None:
    world = World(num_pinned=num_pinned, staging_bytes=BLOCK_BYTES)
    world.store(whole([3, 5], 1))
    world.device.refused[kind] = 1
    with pytest.raises(RuntimeError, match=f"{kind} refused"):
        world.load(whole([0, 2], 1))
    for tensor in world.tensors:
        tensor[0] = 55  # the engine computes it anew
    world.device.run_all()
    assert (world.tensors[0][0] == 55).all()
    world.load(whole([0, 2], 1))
    assert world.block(0) + world.block(2) == bytes(world.region[1])


@pytest.mark.parametrize("kind", ["gather", "to_host"])
@pytest.mark.parametrize("num_pinned", [4, 0])
def test_a_copy_that_dies_on_the_device_fails_its_job_and_no_other(
    kind: str, num_pinned: int
) -> None:
    world = World(num_pinned=num_pinned)
    world.device.in_flight[kind] = "illegal address"
    results = []
    for job_id, copies in enumerate([whole([3, 5], 1), whole([0, 2], 2)]):
        mark = world.copier.mark()
        task = Task(job(job_id, copies), partial(world.copier.store, [copies], mark))
        results.append(run_task(task))
    assert [result.failed_slots for result in results] == [{1}, frozenset()]
    assert bytes(world.region[2]) == world.block(0) + world.block(2)


@pytest.mark.parametrize("kind", ["new_staging", "new_pinned"])
def test_a_job_that_finds_no_memory_fails_and_the_next_one_asks_again(kind: str) -> None:
    world = World(num_pinned=0)
    world.device.refused[kind] = 0
    with pytest.raises(RuntimeError, match=f"{kind} refused"):
        world.store(whole([3, 5], 1))
    world.store(whole([3, 5], 1))
    assert bytes(world.region[1]) == world.block(3) + world.block(5)


def test_a_device_that_fails_at_the_mark_fails_the_jobs_and_not_the_step() -> None:
    world = World()
    world.device.refused["record"] = 0
    mark = world.copier.mark()
    for copy in (world.copier.store, world.copier.load):
        with pytest.raises(OffloadError, match="before this job") as raised:
            copy([whole([3, 5], 1)], mark)
        assert "record refused" in str(raised.value.__cause__)


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS])
def test_a_block_that_does_not_exist_never_reaches_the_device(block_id: int) -> None:
    world = World()
    for copy in (world.store, world.load):
        with pytest.raises(ContractError, match="block"):
            copy(whole([block_id, 0], 1))
    assert not {"gather", "scatter"} & {kind for _, kind in world.device.log}


# Pinning.


def test_rows_are_pinned_in_steps_and_given_back() -> None:
    region = HostRegion.create(10, 5000)
    device = FakeDevice()
    rows = PinnedRows(device, region, step_bytes=4 * 8192 + 1)
    rows.wait()
    assert sorted(device.registered.values()) == [2 * 8192, 4 * 8192, 4 * 8192]
    assert [rows.holds(slot) for slot in (0, 9)] == [True, True]
    for slot in range(10):
        device.pinned(region[slot])
    rows.close()
    assert device.registered == {}
    assert not rows.holds(0)


def test_what_can_not_be_pinned_is_said_once_and_copied_another_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(num_pinned=2)
    assert [world.copier.pinned.holds(slot) for slot in range(4)] == [True, True, False, False]
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "only 2 of 4 slots" in warnings[0]
    assert "out of lockable memory" in warnings[0]


def test_closing_gives_everything_back_even_when_the_device_complains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(num_pinned=4)
    world.device.refused["unregister"] = 1
    world.copier.close()
    assert world.device.registered == {}
    assert "could not be unpinned" in caplog.text


def test_closing_ends_the_pinning() -> None:
    region = HostRegion.create(64, 4096)
    let_go = threading.Event()

    calls = []

    class SlowDevice(FakeDevice):
        @override
        def register(self, address: int, num_bytes: int) -> None:
            calls.append(address)
            assert let_go.wait(30)
            super().register(address, num_bytes)

    device = SlowDevice()
    rows = PinnedRows(device, region, step_bytes=1)
    threading.Timer(0.2, let_go.set).start()
    rows.close()
    assert len(calls) <= 1
    assert device.registered == {}
    assert rows.num_held == 0


# Behind the worker, on threads.


def worker_of(world: World) -> OffloadingConnectorWorker:
    return OffloadingConnectorWorker(world.config, 0, world.copier)


def test_a_flushed_store_has_read_its_blocks_before_the_step_overwrites_them() -> None:
    # B01.
    world = World()
    worker = worker_of(world)
    world.compute(3, 77)
    worker.start_stores(StepMessage(1, stores=[job(1, whole([3, 5], 1))]))
    worker.handle_preemptions(StepMessage(2, flush_job_ids=[JobId(1)]))
    expected = world.block(3) + world.block(5)
    for tensor in world.tensors:
        tensor[3] = 9
    assert [result.failed_slots for result in worker.take_output().results] == [frozenset()]
    assert bytes(world.region[1]) == expected
    assert worker.shutdown() == set()


def test_an_early_store_reads_what_the_steps_before_left_in_its_blocks() -> None:
    world = World()
    worker = worker_of(world)
    world.compute(3, 77)
    early = [job(1, whole([3, 5], 1))]
    worker.handle_preemptions(StepMessage(2, early_stores=early, flush_job_ids=[JobId(1)]))
    assert (world.tensors[1][3] == 77).all()
    assert bytes(world.region[1]) == world.block(3) + world.block(5)
    worker.shutdown()


def test_a_load_is_reported_once_its_blocks_are_filled() -> None:
    world = World()
    world.store(whole([3, 5], 1))
    worker = worker_of(world)
    worker.start_loads(StepMessage(1, loads=[job(1, whole([0, 2], 1))]))
    worker.wait_for_results(30)
    output = worker.take_output()
    assert output.loaded_req_ids == ["r"]
    assert output.failed_req_ids == []
    assert world.block(0) + world.block(2) == bytes(world.region[1])
    worker.shutdown()


def test_a_store_that_waits_for_its_step_holds_up_no_load() -> None:
    world = World()
    world.store(whole([3, 5], 1))
    worker = worker_of(world)
    other = FakeStream(world.device, "step")  # the engine's second stream, so loads need not wait
    started, let_go = threading.Event(), threading.Event()

    def step() -> None:
        started.set()
        assert let_go.wait(30)

    other.enqueue("compute", step)
    compute, world.device.compute = world.device.compute, other
    worker.start_stores(StepMessage(1, stores=[job(1, whole([4, 5], 0))]))
    assert started.wait(30)
    world.device.compute = compute
    worker.start_loads(StepMessage(2, loads=[job(2, whole([0, 2], 1))]))
    worker.wait_for_results(30)
    assert [result.job_id for result in worker.take_output().results] == [2]
    let_go.set()
    worker.wait_for_results(30)
    assert [result.job_id for result in worker.take_output().results] == [1]
    worker.shutdown()


def test_shutting_down_the_worker_unpins_the_slots() -> None:
    world = World()
    assert world.device.registered
    assert worker_of(world).shutdown() == set()
    assert not world.device.registered


def test_slots_stay_pinned_under_a_copy_that_does_not_end() -> None:
    world = World()
    worker = worker_of(world)
    let_go = threading.Event()

    def step() -> None:
        assert let_go.wait(30)

    world.device.compute.enqueue("compute", step)
    worker.start_stores(StepMessage(1, stores=[job(1, whole([3, 5], 1))]))
    assert worker.shutdown(0.01) == {1}
    assert world.device.registered
    let_go.set()
    assert worker.shutdown(30) == set()
    assert not world.device.registered


@pytest.mark.parametrize("seed", range(10))
def test_random_steps_keep_every_chunk(seed: int) -> None:
    """Blocks are filled, stored, flushed, overwritten and loaded for many steps, on threads."""
    rng = random.Random(seed)
    world = World(num_pinned=rng.choice(NUM_PINNED), staging_bytes=rng.choice(STAGING))
    worker = worker_of(world)
    expected: dict[int, bytes] = {}
    next_id = 1
    for step in range(1, 30):
        blocks = rng.sample(range(NUM_BLOCKS), 4)
        slot = rng.randrange(4)
        values = [rng.randrange(1, 60000) for _ in blocks[:2]]
        for block_id, value in zip(blocks, values, strict=False):
            world.compute(block_id, value)
        store = job(next_id, whole(blocks[:2], slot))
        worker.start_stores(StepMessage(step, stores=[store]))
        expected[slot] = b"".join(filled_block(value) for value in values)
        worker.handle_preemptions(StepMessage(step + 1, flush_job_ids=[store.job_id]))
        for block_id in blocks:
            world.compute(block_id, 0)
        source = rng.choice(list(expected))
        load = job(next_id + 1, whole(blocks[2:], source))
        worker.start_loads(StepMessage(step + 1, loads=[load]))
        while load.job_id not in {r.job_id for r in worker.take_output().results}:
            worker.wait_for_results(1)
        assert b"".join(world.block(block_id) for block_id in blocks[2:]) == expected[source]
        next_id += 2
    for slot, content in expected.items():
        assert bytes(world.region[slot]) == content
    worker.shutdown()


def filled_block(value: int) -> bytes:
    return np.full(BLOCK_BYTES // 2, value, np.uint16).tobytes()
