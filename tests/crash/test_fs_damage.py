"""Files that were altered: whatever byte it is, the chunk is a miss, counted and removed."""

import errno
import os
from collections.abc import Iterator

import pytest

from kvstrata.tiers.fs import chunk_file
from kvstrata.tiers.fs.chunk_file import ChunkName, new_page
from kvstrata.tiers.fs.disk import Disk
from tests.disks import HookedDisk, chunk_files
from tests.fs_world import CHUNK_BYTES, FILE_BYTES, World, quick_dir

# Offset of each field of the header, and of its last byte; then the payload's.
FIELDS = [
    0,
    7,
    8,
    9,
    10,
    11,
    12,
    15,
    16,
    23,
    24,
    31,
    32,
    47,
    48,
    79,
    80,
    115,
    116,
    4079,
    4080,
    4095,
]
PAYLOAD = [4096, 4096 + CHUNK_BYTES // 2, 4096 + CHUNK_BYTES - 1]


def put(disk: Disk, name: ChunkName, row: memoryview, page: memoryview) -> bool:
    file = chunk_file.write(disk, name, row, page)
    try:
        return chunk_file.publish(disk, file, name.path)
    finally:
        disk.discard(file)


@pytest.fixture
def world() -> Iterator[World]:
    with quick_dir() as root:
        world = World(root / "kv")
        world.open()
        yield world
        world.close()


@pytest.mark.parametrize("at", FIELDS + PAYLOAD)
def test_a_flipped_bit_is_a_miss_counted_and_removed(world: World, at: int) -> None:
    world.store(0, 1)
    path = world.path_of(0)
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << (at % 8)
    path.write_bytes(content)
    result = world.load_job(0, 1)
    assert result.failed == result.corrupt == {world.keys[0]}
    assert world.hits(0, 1) == {1}
    assert chunk_files(world.root) == [world.path_of(1)]
    assert world.tier.get_stats()["corrupt_chunks"] == 1
    assert world.store(0) == set()
    assert world.load(0) == set()
    world.tier.check()


@pytest.mark.parametrize("length", [0, 1, 79, 80, 4095, 4096, 4097, FILE_BYTES - 4096])
def test_a_cut_file_is_a_miss_counted_and_removed(world: World, length: int) -> None:
    world.store(0)
    os.truncate(world.path_of(0), length)
    assert world.load_job(0).corrupt == {world.keys[0]}
    assert world.hits(0) == set()
    assert chunk_files(world.root) == []
    assert world.tier.get_stats()["corrupt_chunks"] == 1


def test_damage_to_the_padding_harms_nothing(world: World) -> None:
    world.store(0)
    content = bytearray(world.path_of(0).read_bytes())
    content[4096 + CHUNK_BYTES] ^= 1
    world.path_of(0).write_bytes(content)
    assert world.load(0) == set()


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize("operation", ["create", "write", "set_times", "publish"])
def test_a_put_that_stops_at_any_step_leaves_nothing(operation: str, unnamed: bool) -> None:
    with quick_dir() as root:
        world = World(root / "kv")
        disk = HookedDisk(world.root)
        disk.uses_unnamed = unnamed
        name = ChunkName("v1-x/a/b/ab.chunk", world.keys[0], bytes(32), CHUNK_BYTES, "fs")
        row, page = world.slots.row(0), new_page()
        disk.fail_with(errno.EIO, operation)
        with pytest.raises(OSError, match="injected"):
            put(disk, name, row, page)
        assert [path for path in world.root.rglob("*") if path.is_file()] == []
        disk.heal()
        assert put(disk, name, row, page)
        assert not put(disk, name, row, page)
        assert chunk_file.get(disk, name, world.slots.row(40), page).key == world.keys[0]
        assert world.slots[40] == world.slots[0]
        disk.close()
