"""Host memory is taken lazily, mapped by others, never more than asked for, and never leaked."""

import faulthandler
import gc
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstrata.core.errors import ConfigError, ContractError
from kvstrata.primary.region import (
    FreeMemory,
    HostRegion,
    free_host_memory,
    why_no_huge_pages,
)
from kvstrata.testing import numbered_key, pattern
from tests.host_memory import taken_bytes

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
region = HostRegion.attach(RegionHandle(*map(int, sys.argv[1:]), shared=True))
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


KINDS = pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])


@KINDS
def test_prefaulting_takes_all_pages_and_writes_find_them(*, shared: bool) -> None:
    region = HostRegion.create(40, 2 * MIB, shared=shared)
    before = taken_bytes()
    region.prefault()
    taken = taken_bytes()
    assert taken - before >= 80 * MIB
    for i in range(40):
        region[i][:] = b"x" * len(region[i])
    assert taken_bytes() - taken < MIB
    region.close()
    assert taken_bytes() - before < MIB


def test_prefaulting_works_on_a_kernel_that_can_not_do_it_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstrata.primary.region.POPULATE_WRITE", 9999)
    region = HostRegion.create(40, 2 * MIB)
    before = taken_bytes()
    region.prefault()
    assert taken_bytes() - before >= 80 * MIB
    region.close()


def test_memory_that_can_not_be_taken_is_an_error_and_no_crash() -> None:
    region = HostRegion.create(40, 2 * MIB)
    os.ftruncate(region.handle.name, 70 * MIB)  # the rest is not there for anybody
    with pytest.raises(ConfigError, match=rf"^primary.prefault: {64 * MIB} of {80 * MIB} bytes"):
        region.prefault()
    region.close()


@KINDS
def test_rows_are_aligned_separate_and_of_the_asked_size(*, shared: bool) -> None:
    region = HostRegion.create(5, 5_000, shared=shared)
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


@KINDS
@pytest.mark.parametrize("chunk_bytes", [65_537, 100_003, 1_000_003])
def test_memory_taken_is_what_was_asked_for(chunk_bytes: int, *, shared: bool) -> None:
    # Field report F04.
    num_slots = 64 * MIB // chunk_bytes
    before = taken_bytes()
    region = HostRegion.create(num_slots, chunk_bytes, shared=shared)
    for i in range(num_slots):
        region.row(i)[:] = b"x" * region.row_bytes
    grown = taken_bytes() - before
    region.close()
    asked = num_slots * chunk_bytes
    assert asked <= grown <= 1.1 * asked
    assert region.reserved_bytes <= 1.1 * asked
    assert taken_bytes() - before < MIB


@KINDS
def test_a_large_region_takes_memory_only_as_it_is_written(*, shared: bool) -> None:
    # Field report F05.
    before = taken_bytes()
    region = HostRegion.create(1_024, MIB, shared=shared, free_memory=lambda: None)
    assert taken_bytes() - before < MIB
    region[7][:] = b"x" * MIB
    assert MIB <= taken_bytes() - before <= 4 * MIB, "at most two huge pages"
    region.close()


@KINDS
def test_views_outlive_the_region_and_a_second_close_does_nothing(*, shared: bool) -> None:
    region = HostRegion.create(2, 4_096, shared=shared)
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
    numbers = (handle.pid, handle.name, handle.num_slots, handle.chunk_bytes)
    subprocess.run([sys.executable, "-c", ATTACH, *map(str, numbers)], check=True)
    assert bytes(region[2]) == b"b" * 5_000
    region.close()


@KINDS
def test_memory_of_released_rows_is_given_back_and_the_others_keep_theirs(*, shared: bool) -> None:
    region = HostRegion.create(64, MIB // 4, shared=shared)
    before = taken_bytes()
    for i in range(64):
        region[i][:] = bytes([i + 1]) * (MIB // 4)
    region.release_rows([*range(40), 50])
    assert taken_bytes() - before <= 8 * MIB
    for i in range(64):
        value = 0 if i < 40 or i == 50 else i + 1
        assert bytes(region[i]) == bytes([value]) * (MIB // 4)
    region.close()


def test_private_memory_can_be_attached_to_in_its_own_process_only() -> None:
    region = HostRegion.create(2, 5_000, shared=False)
    handle = pickle.loads(pickle.dumps(region.handle))
    second = HostRegion.attach(handle)
    region[1][:] = b"x" * 5_000
    region.close()
    assert bytes(second[1]) == b"x" * 5_000
    with pytest.raises(ContractError, match="private memory of process 1 "):
        HostRegion.attach(replace(handle, pid=1))
    second.close()
    del region, second
    gc.collect()
    with pytest.raises(ContractError, match="private"):
        HostRegion.attach(handle)


def test_no_child_gets_a_copy_of_private_memory() -> None:
    # Direct I/O into memory that a fork has just made copy-on-write would go to the child's copy.
    region = HostRegion.create(1, 4_096, shared=False)
    region[0][:] = b"x" * 4_096
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os._exit(region[0] == b"x" * 4_096)  # not reached: this memory is not there
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    region.close()


@KINDS
@pytest.mark.parametrize("huge_pages", [True, False])
def test_the_kernel_is_told_whether_huge_pages_are_wanted(
    *, shared: bool, huge_pages: bool
) -> None:
    region = HostRegion.create(8, MIB, shared=shared, huge_pages=huge_pages)
    assert has_flag(region, "hg") is huge_pages
    assert has_flag(region, "nh") is not huge_pages
    region.close()


def has_flag(region: HostRegion, flag: str) -> bool:
    start = f"{np.frombuffer(region.memory, np.uint8).ctypes.data:x}-"
    found = Path("/proc/self/smaps").read_text().partition(f"\n{start}")[2]
    return flag in found.partition("VmFlags:")[2].partition("\n")[0].split()


def test_a_kernel_without_huge_pages_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9999)
    HostRegion.create(1, 4_096).close()


@pytest.mark.parametrize(
    ("shared", "name", "text", "words"),
    [
        (True, "shmem_enabled", "always within_size advise [never] deny force", "write advise"),
        (True, "shmem_enabled", "always within_size advise never [deny] force", "write advise"),
        (True, "shmem_enabled", "always within_size [advise] never deny force", None),
        (False, "enabled", "always madvise [never]", "write madvise"),
        (False, "enabled", "always [madvise] never", None),
        (False, "defrag", "", "has none"),
    ],
)
def test_what_forbids_huge_pages_is_named(
    *,
    shared: bool,
    name: str,
    text: str,
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstrata.primary.region.HUGE_PAGE_SETTINGS", tmp_path)
    (tmp_path / name).write_text(text)
    problem = why_no_huge_pages(shared=shared)
    assert (problem is None) if words is None else (problem is not None and words in problem)


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
