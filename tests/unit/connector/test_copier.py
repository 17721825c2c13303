"""Copies between tensors of many layouts and slots, byte for byte."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.connector import (
    BlockCopies,
    GroupKind,
    HostCopier,
    KVGroup,
    SchedulerOffloadConfig,
    TensorLayout,
    block_bytes_of,
    make_copier,
)
from kvstrata.core.errors import ConfigError
from kvstrata.primary.region import HostRegion

NUM_BLOCKS = 6
Array = npt.NDArray[Any]


def filled(shape: Sequence[int], dtype: type = np.uint16) -> Array:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def copier_for(
    tensors: Sequence[Any],
    layout: TensorLayout,
    *,
    span: int = 1,
    num_ranks: int = 1,
    rank: int = 0,
) -> tuple[HostCopier, HostRegion]:
    config = SchedulerOffloadConfig((KVGroup(4, span),), 4, num_ranks=num_ranks)
    block_bytes = sum(t.nbytes for t in tensors) // NUM_BLOCKS
    region = HostRegion.create(4, config.chunk_bytes([block_bytes]))
    copier = make_copier(region, config, rank, [tensors], [layout])
    assert isinstance(copier, HostCopier)
    return copier, region


LAYOUTS: dict[str, tuple[tuple[int, ...], int, Callable[[Array], Array]]] = {
    "block first": ((NUM_BLOCKS, 3, 4, 5), 0, lambda t: t),
    "keys and values first": ((2, NUM_BLOCKS, 4, 5), 1, lambda t: t),
    "block last": ((4, 5, NUM_BLOCKS), 2, lambda t: t),
    "small kernel blocks": ((3 * NUM_BLOCKS, 4, 5), 0, lambda t: t),
    "transposed": ((5, 4, NUM_BLOCKS), 0, lambda t: t.transpose(2, 1, 0)),
    "every other": ((2 * NUM_BLOCKS, 4, 5), 0, lambda t: t[::2]),
    "cut out": ((NUM_BLOCKS, 8, 5), 0, lambda t: t[:, 2:5]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_described_layouts_come_back_exactly(name: str) -> None:
    # A16: with a descriptor, tensors that are not contiguous make the round trip.
    shape, axis, view = LAYOUTS[name]
    tensors = [view(filled(shape)), view(filled(shape) + 7)]
    copier, _region = copier_for(tensors, TensorLayout(NUM_BLOCKS, axis))
    expected = [tensor.copy() for tensor in tensors]
    there = [BlockCopies(0, [4, 1, 3], [2, 0, 3], [0, 0, 0])]
    assert copier.store(there, copier.mark()) == frozenset()
    for tensor in tensors:
        tensor[...] = 0
    assert copier.load(there, copier.mark()) == frozenset()
    for tensor, old in zip(tensors, expected, strict=True):
        ratio = tensor.shape[axis] // NUM_BLOCKS
        now, then = np.moveaxis(tensor, axis, 0), np.moveaxis(old, axis, 0)
        for block in range(NUM_BLOCKS):
            rows = slice(block * ratio, (block + 1) * ratio)
            assert (now[rows] == (then[rows] if block in {4, 1, 3} else 0)).all()


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        ((NUM_BLOCKS, NUM_BLOCKS, 4), TensorLayout(NUM_BLOCKS), "ambiguous"),
        ((5, 4, 3), TensorLayout(NUM_BLOCKS), "no axis"),
        ((NUM_BLOCKS, 4), TensorLayout(NUM_BLOCKS, 2), "not an axis"),
        ((NUM_BLOCKS + 1, 4), TensorLayout(NUM_BLOCKS, 0), "not a multiple"),
    ],
)
def test_a_layout_is_never_guessed(
    shape: tuple[int, ...], layout: TensorLayout, message: str
) -> None:
    # A16.
    config = SchedulerOffloadConfig((KVGroup(4),), 4)
    region = HostRegion.create(1, 4096)
    with pytest.raises(ConfigError, match=rf"tensors\[0\]\[0\].*{message}"):
        HostCopier(region, config, 0, [[filled(shape)]], [layout])


def test_a_layout_that_fits_in_one_way_needs_no_axis() -> None:
    tensor = filled((2, NUM_BLOCKS, 4))
    copier, region = copier_for([tensor], TensorLayout(NUM_BLOCKS))
    copier.store([BlockCopies(0, [5], [1], [0])], copier.mark())
    assert bytes(region[1]) == tensor[:, 5].tobytes()


def test_bytes_of_a_block_are_known_before_there_are_slots() -> None:
    groups = (KVGroup(4), KVGroup(4, 1, GroupKind.IGNORED), KVGroup(4, 2))
    tensor = filled((2, NUM_BLOCKS, 5))
    layouts = [TensorLayout(NUM_BLOCKS, 1)] * 3
    config = SchedulerOffloadConfig(groups, 4)
    assert block_bytes_of(config, [[tensor], [], [tensor, tensor + 1]], layouts) == [20, 0, 40]
    with pytest.raises(ConfigError, match=r"tensors\[2\]\[0\].*not a multiple"):
        block_bytes_of(config, [[tensor], [], [tensor[:, 1:]]], layouts)


def test_a_slot_that_is_too_small_is_refused() -> None:
    config = SchedulerOffloadConfig((KVGroup(4, 2),), 4)
    region = HostRegion.create(1, 15)
    with pytest.raises(ConfigError, match="does not hold"):
        HostCopier(region, config, 0, [[filled((NUM_BLOCKS, 4))]], [TensorLayout(NUM_BLOCKS, 0)])


def test_parts_that_are_not_stored_are_cleared() -> None:
    # Equal keys promise equal bytes: nothing of the slot's last chunk stays in it.
    tensor = filled((NUM_BLOCKS, 4)) + 1
    copier, region = copier_for([tensor], TensorLayout(NUM_BLOCKS, 0), span=3)
    region[1][:] = b"\xee" * len(region[1])
    copier.store([BlockCopies(0, [4, 2], [1, 1], [1, 2])], copier.mark())
    assert bytes(region[1]) == bytes(8) + tensor[4].tobytes() + tensor[2].tobytes()


def test_what_a_smaller_group_leaves_of_a_slot_is_cleared() -> None:
    config = SchedulerOffloadConfig((KVGroup(4), KVGroup(4)), 4)
    small, large = filled((NUM_BLOCKS, 4)), filled((NUM_BLOCKS, 9))
    region = HostRegion.create(2, config.chunk_bytes([8, 18]))
    layouts = [TensorLayout(NUM_BLOCKS, 0)] * 2
    copier = HostCopier(region, config, 0, [[small], [large]], layouts)
    region[0][:] = b"\xee" * 18
    copier.store([BlockCopies(0, [3], [0], [0])], copier.mark())
    assert bytes(region[0]) == small[3].tobytes() + bytes(10)


def test_parts_that_are_not_named_stay_as_they_are_in_the_engine() -> None:
    tensor = filled((NUM_BLOCKS, 4))
    copier, _region = copier_for([tensor], TensorLayout(NUM_BLOCKS, 0), span=2)
    copier.store([BlockCopies(0, [0, 1], [3, 3], [0, 1])], copier.mark())
    tensor[...] = 99
    copier.load([BlockCopies(0, [5], [3], [1])], copier.mark())
    assert (tensor[5] == filled((NUM_BLOCKS, 4))[1]).all()
    assert (tensor[:5] == 99).all()


def test_a_chunk_that_is_gone_fails_and_the_others_are_loaded() -> None:
    tensor = filled((NUM_BLOCKS, 4))
    copier, _region = copier_for([tensor], TensorLayout(NUM_BLOCKS, 0))
    copier.store([BlockCopies(0, [0], [2], [0])], copier.mark())
    failed = copier.load([BlockCopies(0, [4, 5], [2, -7], [0, 0])], copier.mark())
    assert failed == {-7}
    assert (tensor[4] == tensor[0]).all()
    assert (tensor[5] == filled((NUM_BLOCKS, 4))[5]).all()


def test_ranks_keep_to_their_shares() -> None:
    tensors = [filled((NUM_BLOCKS, 4)), filled((NUM_BLOCKS, 4)) + 100]
    layout = TensorLayout(NUM_BLOCKS, 0)
    first, region = copier_for(tensors[:1], layout, num_ranks=2)
    config = SchedulerOffloadConfig((KVGroup(4),), 4, num_ranks=2)
    second = HostCopier(region, config, 1, [tensors[1:]], [layout])
    for copier in (first, second):
        copier.store([BlockCopies(0, [3], [0], [0])], copier.mark())
    assert bytes(region[0]) == tensors[0][3].tobytes() + tensors[1][3].tobytes()
    with pytest.raises(ConfigError, match="rank"):
        HostCopier(region, config, 2, [tensors[1:]], [layout])


def test_layers_that_share_their_memory_are_copied_once() -> None:
    tensor = filled((NUM_BLOCKS, 4))
    config = SchedulerOffloadConfig((KVGroup(4),), 4)
    region = HostRegion.create(1, 8)
    layout = TensorLayout(NUM_BLOCKS, 0)
    copier = HostCopier(region, config, 0, [[tensor, tensor]], [layout])
    copier.store([BlockCopies(0, [3], [0], [0])], copier.mark())
    assert bytes(region[0]) == tensor[3].tobytes()


@given(
    st.lists(st.permutations(range(NUM_BLOCKS)), min_size=1, max_size=3),
    st.sampled_from([np.uint8, np.float16, np.float32, np.float64]),
)
def test_blocks_come_back_wherever_they_go(
    orders: list[list[int]], dtype: type[np.generic]
) -> None:
    rng = np.random.default_rng(7)
    tensors = [
        rng.integers(0, 256, (NUM_BLOCKS, 3 * np.dtype(dtype).itemsize), np.uint8).view(dtype)
        for _ in orders
    ]
    copier, _region = copier_for(tensors, TensorLayout(NUM_BLOCKS, 0), span=3)
    before = [tensor.tobytes() for tensor in tensors]
    slots, parts = [1, 1, 1, 3, 3, 3], [0, 1, 2, 0, 1, 2]
    for order in orders:
        copier.store([BlockCopies(0, order, slots, parts)], copier.mark())
        for tensor in tensors:
            tensor[...] = 0
        copier.load([BlockCopies(0, order, slots, parts)], copier.mark())
        assert [tensor.tobytes() for tensor in tensors] == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_torch_tensors_in_host_memory_come_back_exactly(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    raw = torch.randint(0, 255, (2, NUM_BLOCKS, 64), dtype=torch.uint8)
    tensor = raw.view(getattr(torch, dtype))
    copier, region = copier_for([tensor], TensorLayout(NUM_BLOCKS, 1))
    copier.store([BlockCopies(0, [4], [2], [0])], copier.mark())
    assert bytes(region[2]) == raw[:, 4].numpy().tobytes()
    copier.load([BlockCopies(0, [1], [2], [0])], copier.mark())
    assert (raw[:, 1] == raw[:, 4]).all()
