"""On a real CUDA device: bytes, order against a busy stream of computation, failures, release.

Run with `make test-gpu`. The order of waits is also tested without a GPU, in
`tests/unit/connector/test_device_copier.py`; here it is shown that CUDA's events keep it.
"""

import logging
import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
    make_copier,
)
from kvstrata.connector.device_copier import DeviceCopier
from kvstrata.core.keys import JobId
from kvstrata.primary.region import HostRegion, RegionHandle

torch = pytest.importorskip("torch")

from kvstrata.connector.cuda_device import CudaDevice  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

NUM_BLOCKS = 64
SLEEP_CYCLES = 200_000_000  # about a tenth of a second: long enough that a missing wait shows
DEVICE = "cuda:0"


def random_bytes(*shape: int) -> Any:  # noqa: ANN401
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def one_allocation() -> list[Any]:
    return list(random_bytes(4, NUM_BLOCKS, 8, 16, 128).view(torch.bfloat16))


def inside_of_blocks() -> list[Any]:
    raw = random_bytes(NUM_BLOCKS, 4, 8, 16, 128)
    return [raw[:, i].view(torch.bfloat16) for i in range(4)]


def one_per_layer() -> list[Any]:
    return [random_bytes(NUM_BLOCKS, 8, 16, 128).view(torch.float16) for _ in range(4)]


def heads_outside_of_blocks() -> list[Any]:
    raw = random_bytes(4, 8, NUM_BLOCKS, 16, 128).view(torch.bfloat16)
    return [layer.transpose(0, 1) for layer in raw]


def tokens_before_heads() -> list[Any]:
    raw = random_bytes(4, NUM_BLOCKS, 16, 8, 128).view(torch.bfloat16)
    return [layer.transpose(1, 2) for layer in raw]


def small_kernel_blocks() -> list[Any]:
    return list(random_bytes(4, 2 * NUM_BLOCKS, 8, 8, 128).view(torch.float8_e4m3fn))


def transposed_content() -> list[Any]:
    return [random_bytes(NUM_BLOCKS, 16, 24).view(torch.int32).transpose(1, 2)]


LAYOUTS: list[Callable[[], list[Any]]] = [
    one_allocation,
    inside_of_blocks,
    one_per_layer,
    heads_outside_of_blocks,
    tokens_before_heads,
    small_kernel_blocks,
    transposed_content,
]


class World:
    """Tensors on the GPU, slots, and the copier that an engine would get."""

    def __init__(self, tensors: Sequence[Any], *, span: int = 2, num_slots: int = 16) -> None:
        self.tensors = tensors
        self.config = SchedulerOffloadConfig((KVGroup(16, span),), 16)
        size = sum(t.numel() * t.element_size() for t in tensors) // NUM_BLOCKS
        self.region = HostRegion.create(num_slots, self.config.chunk_bytes([size]))
        self.layouts = [TensorLayout(NUM_BLOCKS, 0)]
        self.copier = make_copier(self.region, self.config, 0, [tensors], self.layouts)

    def stored_by_the_host(self, copies: BlockCopies) -> bytes:
        """What the slots have to hold, by way of plain copies."""
        region = HostRegion.create(self.region.num_slots, self.region.chunk_bytes)
        tensors = [tensor.cpu() for tensor in self.tensors]
        host = HostCopier(region, self.config, 0, [tensors], self.layouts)
        host.store([copies], host.mark())
        return bytes(region.memory)

    def blocks(self, block_ids: Sequence[int]) -> list[Any]:
        index = torch.tensor(block_ids, device=DEVICE)
        return [by_block(tensor)[index].clone() for tensor in self.tensors]

    def fill(self, value: int) -> None:
        """Enqueue a step that writes every block."""
        for tensor in self.tensors:
            tensor.fill_(value)

    def close(self) -> None:
        self.copier.close()
        self.region.close()


def by_block(tensor: Any) -> Any:  # noqa: ANN401
    """Axis 0 counts blocks, the bits as integers, so that they compare equal whatever they mean."""
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(ints).unflatten(0, (NUM_BLOCKS, -1))


@pytest.fixture
def world() -> Iterator[World]:
    made = World(one_allocation())
    yield made
    made.close()


def chunks(block_ids: Sequence[int], slots: Sequence[int]) -> BlockCopies:
    twice = [slot for slot in slots for _ in range(2)]
    return BlockCopies(0, block_ids, twice, [0, 1] * len(slots))


def wait_until_pinned(copier: object) -> int:
    assert isinstance(copier, DeviceCopier)
    copier.pinned.wait(60)
    return copier.pinned.num_held


def same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "unpinned"])
@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
def test_bytes_are_exact_in_every_layout(make: Callable[[], list[Any]], is_pinned: bool) -> None:
    world = World(make())
    held = wait_until_pinned(world.copier)
    if is_pinned:
        assert held == world.region.num_slots
    else:
        world.copier.pinned.close()  # type: ignore[attr-defined]
    order = random.Random(1).sample(range(NUM_BLOCKS), 12)
    copies = chunks(order, [3, 0, 7, 8, 15, 1])
    expected = world.stored_by_the_host(copies)
    assert world.copier.store([copies], world.copier.mark()) == frozenset()
    assert bytes(world.region.memory) == expected
    before = world.blocks(range(NUM_BLOCKS))
    elsewhere = [block for block in range(NUM_BLOCKS) if block not in order][:12]
    back = chunks(elsewhere, [3, 0, 7, 8, 15, 1])
    assert world.copier.load([back], world.copier.mark()) == frozenset()
    assert same(world.blocks(elsewhere), world.blocks(order))
    untouched = [block for block in range(NUM_BLOCKS) if block not in elsewhere]
    assert same(world.blocks(untouched), [part[untouched] for part in before])
    world.close()


@pytest.mark.parametrize("staging_bytes", [1, 300_000])
def test_jobs_larger_than_the_staging_memory_come_back(staging_bytes: int) -> None:
    first = World(one_allocation())
    copier = DeviceCopier(
        first.region,
        first.config,
        0,
        [first.tensors],
        first.layouts,
        device=CudaDevice(DEVICE),
        staging_bytes=staging_bytes,
    )
    order = random.Random(2).sample(range(NUM_BLOCKS), 32)
    copies = chunks(order, range(16))
    expected = first.blocks(order)
    copier.store([copies], copier.mark())
    first.fill(0)
    copier.load([copies], copier.mark())
    assert same(first.blocks(order), expected)
    copier.close()
    first.close()


def test_a_store_reads_its_blocks_after_the_step_that_fills_them(world: World) -> None:
    torch.cuda._sleep(SLEEP_CYCLES)
    world.fill(3)
    mark = world.copier.mark()
    copies = chunks([4, 9], [2])
    world.copier.store([copies], mark)
    assert bytes(world.region.memory) == world.stored_by_the_host(copies)


def test_a_load_writes_its_blocks_after_the_steps_that_still_use_them(world: World) -> None:
    copies = chunks([4, 9], [2])
    world.copier.store([copies], world.copier.mark())
    expected = world.blocks([4, 9])
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    world.fill(0)
    world.copier.load([copies], world.copier.mark())
    torch.cuda.synchronize()
    assert same(world.blocks([4, 9]), expected)


def test_the_engine_is_not_held_up_by_a_busy_device(world: World) -> None:
    worker = OffloadingConnectorWorker(world.config, 0, world.copier)
    torch.cuda._sleep(SLEEP_CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    job = CopyJob(JobId(1), "r", [chunks([4, 9], [2])])
    worker.start_stores(StepMessage(1, stores=[job]))
    assert worker.take_output().results == []
    assert not busy.query()  # all of the above returned while the step was running
    worker.wait_for_results(30)
    assert busy.query()
    assert [result.failed_slots for result in worker.take_output().results] == [frozenset()]
    assert worker.shutdown() == set()


def test_a_flushed_store_has_read_its_blocks_before_the_step_overwrites_them(
    world: World,
) -> None:
    # B01.
    worker = OffloadingConnectorWorker(world.config, 0, world.copier)
    copies = chunks([4, 9], [2])
    torch.cuda._sleep(SLEEP_CYCLES)
    world.fill(5)
    worker.start_stores(StepMessage(1, stores=[CopyJob(JobId(1), "r", [copies])]))
    worker.handle_preemptions(StepMessage(2, flush_job_ids=[JobId(1)]))
    expected = world.stored_by_the_host(copies)
    world.fill(9)
    torch.cuda.synchronize()
    assert bytes(world.region.memory) == expected
    worker.shutdown()


def test_a_step_that_follows_a_reported_load_reads_its_bytes(world: World) -> None:
    worker = OffloadingConnectorWorker(world.config, 0, world.copier)
    copies = chunks([4, 9], [2])
    expected = world.blocks([4, 9])
    world.copier.store([copies], world.copier.mark())
    for step in range(20):
        world.fill(step)
        load = CopyJob(JobId(step + 1), "r", [copies])
        worker.start_loads(StepMessage(step + 1, loads=[load]))
        while not worker.take_output().results:
            worker.wait_for_results(30)
        assert same(world.blocks([4, 9]), expected)
    worker.shutdown()


class RefusingDevice(CudaDevice):
    """A CUDA device that refuses some calls."""

    refuse_staging = False

    @override
    def new_staging(self, num_bytes: int) -> Any:
        if self.refuse_staging:
            return torch.empty(1 << 60, dtype=torch.uint8, device=DEVICE)
        return super().new_staging(num_bytes)

    @override
    def register(self, address: int, num_bytes: int) -> None:
        super().register(address, 1 << 60)  # more than there can be


def test_a_job_without_device_memory_fails_alone_and_the_engine_goes_on(world: World) -> None:
    device = RefusingDevice(DEVICE)
    copier = DeviceCopier(
        world.region, world.config, 0, [world.tensors], world.layouts, device=device
    )
    worker = OffloadingConnectorWorker(world.config, 0, copier)
    device.refuse_staging = True
    failing = CopyJob(JobId(1), "r", [chunks([4, 9], [2])])
    worker.start_stores(StepMessage(1, stores=[failing]))
    worker.wait_for_results(30)
    assert [result.failed_slots for result in worker.take_output().results] == [{2}]
    device.refuse_staging = False
    world.fill(7)  # the engine's own work is as good as before
    copies = chunks([4, 9], [3])
    worker.start_stores(StepMessage(2, stores=[CopyJob(JobId(2), "r", [copies])]))
    worker.wait_for_results(30)
    assert [result.failed_slots for result in worker.take_output().results] == [frozenset()]
    assert bytes(world.region.memory) == world.stored_by_the_host(copies)
    worker.shutdown()


def test_memory_that_can_not_be_registered_is_said_and_copied_another_way(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    copier = DeviceCopier(
        world.region,
        world.config,
        0,
        [world.tensors],
        world.layouts,
        device=RefusingDevice(DEVICE),
    )
    with caplog.at_level(logging.WARNING):
        assert wait_until_pinned(copier) == 0
    assert "could be pinned" in caplog.text
    copies = chunks([4, 9], [2])
    expected = world.stored_by_the_host(copies)
    copier.store([copies], copier.mark())
    assert bytes(world.region.memory) == expected
    world.fill(0)  # the failed call left nothing behind that the engine would run into
    torch.cuda.synchronize()
    copier.close()


def test_a_closed_region_can_be_registered_again(world: World) -> None:
    assert wait_until_pinned(world.copier) == world.region.num_slots
    world.copier.close()
    again = make_copier(world.region, world.config, 0, [world.tensors], world.layouts)
    assert wait_until_pinned(again) == world.region.num_slots
    again.close()


def store_in_a_process_of_its_own(handle: RegionHandle) -> None:
    """What a worker of an engine does: map the scheduler's region, store, shut down."""
    region = HostRegion.attach(handle)
    tensor = torch.arange(NUM_BLOCKS, dtype=torch.int32, device=DEVICE).repeat(256, 1).t()
    config = SchedulerOffloadConfig((KVGroup(16, 2),), 16)
    copier = make_copier(region, config, 0, [[tensor]], [TensorLayout(NUM_BLOCKS, 0)])
    assert wait_until_pinned(copier) == region.num_slots
    copier.store([chunks([4, 9], [2])], copier.mark())
    copier.close()
    region.close()


def test_a_worker_process_maps_and_pins_the_region_of_the_scheduler() -> None:
    region = HostRegion.create(4, 2048)
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=store_in_a_process_of_its_own, args=(region.handle,))
    worker.start()
    worker.join(120)
    assert worker.exitcode == 0
    assert bytes(region[2]) == b"\4\0\0\0" * 256 + b"\11\0\0\0" * 256
    region.close()
