"""Host memory is taken lazily, mapped by others, never more than asked for, and never leaked."""

import gc
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.primary.region import FreeMemory, HostRegion, free_host_memory
from kvstrata.testing import numbered_key, pattern

MIB = 2**20

HOLD_A_REGION = """
import sys, time
from kvstrata.primary.region import HostRegion
region = HostRegion.create(64, 65536)
for i in range(64):
    region[i][:] = bytes([i]) * 65536
print("ready", flush=True)
sys.stdin.read()
"""

ATTACH = """
import sys
from kvstrata.primary.region import HostRegion, RegionHandle
region = HostRegion.attach(RegionHandle(*map(int, sys.argv[1:])))
assert bytes(region[1]) == b"a" * 5000
region[2][:] = b"b" * 5000
"""


def open_files() -> set[str]:
    folder = Path("/proc/self/fd")
    found = set()
    for number in os.listdir(folder):
        with suppress(FileNotFoundError):  # the listing's own
            found.add(f"{number} {os.readlink(folder / number)}")
    return found


def shared_bytes() -> int:
    """Shared memory that this process has really taken."""
    gc.collect()  # regions that nobody holds any more
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    pytest.skip("the kernel does not say")


def test_prefaulting_takes_all_pages_and_writes_find_them() -> None:
    region = HostRegion.create(40, 2 * MIB)
    before = shared_bytes()
    region.prefault()
    taken = shared_bytes()
    assert taken - before >= 80 * MIB
    for i in range(40):
        region[i][:] = b"x" * len(region[i])
    assert shared_bytes() - taken < MIB
    region.close()
    assert shared_bytes() - before < MIB


def test_prefaulting_works_on_a_kernel_that_can_not_do_it_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstrata.primary.region.POPULATE_WRITE", 9999)
    test_prefaulting_takes_all_pages_and_writes_find_them()


def test_memory_that_can_not_be_taken_is_an_error_and_no_crash() -> None:
    region = HostRegion.create(40, 2 * MIB)
    os.ftruncate(region.handle.fd, 70 * MIB)  # the rest is not there for anybody
    with pytest.raises(ConfigError, match=rf"^primary.prefault: {64 * MIB} of {80 * MIB} bytes"):
        region.prefault()
    region.close()


def test_rows_are_aligned_separate_and_of_the_asked_size() -> None:
    region = HostRegion.create(5, 5_000)
    assert (len(region), region.num_slots, region.chunk_bytes) == (5, 5, 5_000)
    assert region.row_bytes == 8_192
    for i in range(5):
        assert len(region[i]) == 5_000
        assert len(region.row(i)) == 8_192
        region[i][:] = pattern(numbered_key(i), 5_000)
    assert [bytes(view) for view in region[1:4]] == [
        pattern(numbered_key(i), 5_000) for i in (1, 2, 3)
    ]
    assert region.memory[8_192 : 8_192 + 5_000] == pattern(numbered_key(1), 5_000)
    for slot in (-1, 5):
        with pytest.raises(IndexError, match=str(slot)):
            region[slot]
    region.close()


def test_more_than_is_free_is_refused_before_anything_is_taken() -> None:
    # Field report F03.
    before = open_files()
    with pytest.raises(ConfigError) as caught:
        HostRegion.create(10, 4_096, free_memory=lambda: FreeMemory(40_959, "/fake/meminfo"))
    text = str(caught.value)
    assert text.startswith("primary: ")
    assert all(part in text for part in ("40960", "40959", "/fake/meminfo", "primary.num_chunks"))
    assert open_files() <= before
    HostRegion.create(10, 4_096, free_memory=lambda: FreeMemory(40_960, "/fake/meminfo")).close()
    HostRegion.create(10, 4_096, free_memory=lambda: None).close()


@pytest.mark.parametrize(("num_slots", "chunk_bytes"), [(0, 1), (1, 0), (-1, 8)])
def test_a_region_that_holds_nothing_is_refused(num_slots: int, chunk_bytes: int) -> None:
    # Field report H02: both numbers are named.
    with pytest.raises(ConfigError, match=f"{num_slots} chunks of {chunk_bytes} bytes"):
        HostRegion.create(num_slots, chunk_bytes)


def test_free_memory_is_known_on_linux() -> None:
    free = free_host_memory()
    assert free is not None
    assert free.num_bytes > 0
    assert "/" in free.where


@pytest.mark.parametrize("chunk_bytes", [65_537, 100_003, 1_000_003])
def test_memory_taken_is_what_was_asked_for(chunk_bytes: int) -> None:
    # Field report F04.
    num_slots = 64 * MIB // chunk_bytes
    before = shared_bytes()
    region = HostRegion.create(num_slots, chunk_bytes)
    for i in range(num_slots):
        region.row(i)[:] = b"x" * region.row_bytes
    grown = shared_bytes() - before
    region.close()
    asked = num_slots * chunk_bytes
    assert asked <= grown <= 1.1 * asked
    assert region.reserved_bytes <= 1.1 * asked
    assert shared_bytes() - before < MIB


def test_a_large_region_takes_memory_only_as_it_is_written() -> None:
    # Field report F05.
    before = shared_bytes()
    region = HostRegion.create(1_024, MIB, free_memory=lambda: None)
    assert shared_bytes() - before < MIB
    region[7][:] = b"x" * MIB
    assert MIB <= shared_bytes() - before < 2 * MIB
    region.close()


def test_views_outlive_the_region_and_a_second_close_does_nothing() -> None:
    region = HostRegion.create(2, 4_096)
    view = region[1]
    view[:] = b"x" * 4_096
    region.close()
    region.close()
    assert bytes(view) == b"x" * 4_096


def test_two_regions_of_one_shape_share_nothing() -> None:
    # Field report E13.
    one, two = HostRegion.create(2, 5_000), HostRegion.create(2, 5_000)
    one[0][:] = b"1" * 5_000
    two[0][:] = b"2" * 5_000
    assert bytes(one[0]) == b"1" * 5_000
    assert bytes(two[0]) == b"2" * 5_000
    one.close()
    assert bytes(two[0]) == b"2" * 5_000
    two.close()


def test_another_process_maps_the_same_memory() -> None:
    region = HostRegion.create(3, 5_000)
    region[1][:] = b"a" * 5_000
    handle = region.handle
    numbers = (handle.pid, handle.fd, handle.num_slots, handle.chunk_bytes)
    subprocess.run([sys.executable, "-c", ATTACH, *map(str, numbers)], check=True)
    assert bytes(region[2]) == b"b" * 5_000
    region.close()


def test_killed_processes_leave_no_shared_memory() -> None:
    # Field report F01.
    def named() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "kvstrata" in name}

    before = named()
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", HOLD_A_REGION], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            mapped = Path(f"/proc/{child.pid}/maps").read_text()
            assert "/memfd:kvstrata (deleted)" in mapped
            child.send_signal(signal.SIGKILL)
    assert named() == before
