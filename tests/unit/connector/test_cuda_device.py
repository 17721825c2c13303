"""What torch copies for a `CudaDevice`: the same calls as on a GPU, on tensors in host memory."""

from typing import Any

import numpy as np
import pytest

from kvstrata.connector import (
    BlockCopies,
    HostCopier,
    KVGroup,
    SchedulerOffloadConfig,
    TensorLayout,
    block_bytes_of,
    make_copier,
)
from kvstrata.connector.layout import describe_groups
from kvstrata.core.errors import ConfigError
from kvstrata.primary.region import HostRegion
from tests.unit.connector.test_copier import LAYOUTS, NUM_BLOCKS, filled

torch = pytest.importorskip("torch")
cuda_device = pytest.importorskip("kvstrata.connector.cuda_device")

CONFIG = SchedulerOffloadConfig((KVGroup(4, 3),), 4)
BLOCKS = [4, 1, 5]


def layers_of_one_allocation(num: int, dtype: str) -> list[Any]:
    raw = torch.randint(0, 255, (num, NUM_BLOCKS, 48), dtype=torch.uint8)
    return list(raw.view(getattr(torch, dtype)))


def cut_by_block(num: int) -> list[Any]:
    """Layers inside of blocks, as engines lay them out that copy whole blocks."""
    raw = torch.randint(0, 255, (NUM_BLOCKS, num, 48), dtype=torch.uint8)
    return [raw[:, i].view(torch.bfloat16) for i in range(num)]


def stored_by_the_host(tensors: list[Any], layout: TensorLayout) -> bytes:
    block_bytes = sum(t.numel() * t.element_size() for t in tensors) // NUM_BLOCKS
    region = HostRegion.create(1, 3 * block_bytes)
    copier = HostCopier(region, CONFIG, 0, [tensors], [layout])
    copier.store([BlockCopies(0, BLOCKS, [0, 0, 0], [0, 1, 2])], copier.mark())
    return bytes(region[0])


def round_trip(tensors: list[Any], layout: TensorLayout) -> list[str]:
    """Gather blocks, compare with the host's copier, scatter them elsewhere; return the dtypes."""
    [group] = describe_groups(CONFIG, [tensors], [layout])
    blocks = cuda_device.view_of(group)
    staging = torch.zeros(5 * group.block_bytes, dtype=torch.uint8)
    with torch.inference_mode():
        cuda_device.gather(blocks, torch.tensor(BLOCKS), staging)
        assert staging[: 3 * group.block_bytes].numpy().tobytes() == stored_by_the_host(
            tensors, layout
        )
        assert not staging[3 * group.block_bytes :].any()
        cuda_device.scatter(staging, blocks, torch.tensor([0, 2, 3]))
        again = torch.zeros_like(staging)
        cuda_device.gather(blocks, torch.tensor([0, 2, 3]), again)
    assert (again == staging).all()
    return [str(view.dtype) for view, _ in blocks.parts]


@pytest.mark.parametrize("name", LAYOUTS)
def test_staging_memory_holds_what_a_slot_holds(name: str) -> None:
    shape, axis, view = LAYOUTS[name]
    arrays = [view(filled(shape, np.int16)), view(filled(shape, np.int16) + 7)]
    tensors = [torch.from_numpy(array) for array in arrays]
    round_trip(tensors, TensorLayout(NUM_BLOCKS, axis))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32", "bool"])
def test_every_kind_of_element_comes_through(dtype: str) -> None:
    raw = torch.randint(0, 2, (2, NUM_BLOCKS, 64), dtype=torch.uint8)
    round_trip([raw.view(getattr(torch, dtype))], TensorLayout(NUM_BLOCKS, 1))


@pytest.mark.parametrize(
    "tensors", [layers_of_one_allocation(4, "bfloat16"), cut_by_block(4)], ids=["L B", "B L"]
)
def test_layers_of_one_allocation_are_one_copy(tensors: list[Any]) -> None:
    assert round_trip(tensors, TensorLayout(NUM_BLOCKS, 0)) == ["torch.int64"]


def test_layers_of_several_allocations_are_not_mixed_up() -> None:
    tensors = [torch.randint(0, 255, (NUM_BLOCKS, 24), dtype=torch.uint8) for _ in range(3)]
    round_trip(tensors, TensorLayout(NUM_BLOCKS, 0))


def test_blocks_made_in_inference_mode_can_be_written() -> None:
    with torch.inference_mode():
        tensors = layers_of_one_allocation(2, "float16")
    round_trip(tensors, TensorLayout(NUM_BLOCKS, 0))


def test_elements_that_are_not_aligned_in_a_block_are_refused() -> None:
    odd = torch.zeros((NUM_BLOCKS, 3), dtype=torch.uint8)
    wide = torch.zeros((NUM_BLOCKS, 4), dtype=torch.int32)
    [group] = describe_groups(CONFIG, [[odd, wide]], [TensorLayout(NUM_BLOCKS, 0)])
    with pytest.raises(ConfigError, match="not aligned"):
        cuda_device.view_of(group)


LAYOUT = [TensorLayout(NUM_BLOCKS, 0)]


def test_tensors_on_other_devices_are_refused_by_name() -> None:
    region = HostRegion.create(1, 4096)
    nowhere = torch.empty((NUM_BLOCKS, 4), device="meta")
    with pytest.raises(ConfigError, match="are on meta; only cpu and cuda"):
        make_copier(region, CONFIG, 0, [[nowhere]], LAYOUT)
    with pytest.raises(ConfigError, match="are on meta; only cpu and cuda"):
        block_bytes_of(CONFIG, [[nowhere]], LAYOUT)
    with pytest.raises(ConfigError, match="are on meta, not in host memory"):
        HostCopier(region, CONFIG, 0, [[nowhere]], LAYOUT)


def test_tensors_on_several_devices_are_refused() -> None:
    tensors = [torch.empty((NUM_BLOCKS, 4), device=device) for device in ("meta", "cpu")]
    with pytest.raises(ConfigError, match="several devices: cpu, meta"):
        make_copier(HostRegion.create(1, 4096), CONFIG, 0, [tensors], LAYOUT)
