"""`kvstrata fs` and `kvstrata bench fs` on a real root."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli.main import app
from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import OffloadKey
from kvstrata.core.tenants import TenantResolver
from tests.disks import bytes_below, chunk_files
from tests.fs_world import FILE_BYTES, World, cap, quick_dir


@pytest.fixture
def world() -> Iterator[World]:
    with quick_dir() as root:
        world = World(root / "kv")
        world.open()
        world.store(0, 1, 2)
        yield world
        world.close()


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_ls_names_every_chunk_with_key_size_and_times(world: World) -> None:
    lines = [json.loads(line) for line in run("fs", "ls", world.root, "--json").splitlines()]
    assert {line["key"] for line in lines} == {key.hex() for key in world.keys[:3]}
    assert {line["bytes"] for line in lines} == {FILE_BYTES}
    used_s = [line["used_at_s"] for line in lines]  # heads after tails, by a little
    assert used_s == pytest.approx([world.clock.wall_s()] * len(lines), abs=0.001)
    text = run("fs", "ls", world.root)
    assert all(key.hex() in text for key in world.keys[:3])


def test_stat_agrees_with_what_is_on_disk(world: World) -> None:
    totals = json.loads(run("fs", "stat", world.root, "--json"))
    assert list(totals["namespaces"].values()) == [[3, 3 * FILE_BYTES]]
    assert totals["used_bytes"] == totals["disk_bytes"] == bytes_below(world.root)
    assert totals["num_members"] == 1
    assert "49,152" in run("fs", "stat", world.root)


def test_verify_finds_damage_and_removes_it_on_request(world: World) -> None:
    assert "3 chunks, 0 damaged" in run("fs", "verify", world.root)
    content = bytearray(world.path_of(0).read_bytes())
    content[9000] ^= 1
    world.path_of(0).write_bytes(content)
    os.truncate(world.path_of(1), 5000)
    assert "3 chunks, 2 damaged" in run("fs", "verify", world.root, code=1)
    run("fs", "verify", world.root, "--remove", code=1)
    assert chunk_files(world.root) == [world.path_of(2)]
    assert json.loads(run("fs", "stat", world.root, "--json"))["used_bytes"] == cap(1)


def test_verify_finds_a_chunk_under_a_wrong_name(world: World) -> None:
    world.path_of(0).write_bytes(world.path_of(1).read_bytes())
    assert "1 damaged" in run("fs", "verify", world.root, code=1)


def test_gc_removes_what_is_expired_unused_or_too_much(world: World) -> None:
    world.store(5, expires_at_s=[world.clock.wall_s() + 60.0])
    run("fs", "gc", world.root)  # the test's clock is years ago
    assert len(chunk_files(world.root)) == 3
    os.utime(world.path_of(0))
    run("fs", "gc", world.root, "--max-bytes", cap(2))
    assert len(chunk_files(world.root)) == 2
    run("fs", "gc", world.root, "--unused-for", "1h")
    assert chunk_files(world.root) == [world.path_of(0)]


def test_wipe_removes_one_namespace_or_all_and_nothing_foreign(world: World) -> None:
    other = World(world.root)
    other.open("other")
    other.store(9)
    (world.root / "mine.txt").write_text("mine")
    directory = other.path_of(9).relative_to(world.root).parts[0]
    run("fs", "wipe", world.root, code=1)  # nobody said yes
    assert len(chunk_files(world.root)) == 4
    run("fs", "wipe", world.root, "--namespace", directory, "--yes")
    assert len(chunk_files(world.root)) == 3
    run("fs", "wipe", world.root, "--yes")
    assert chunk_files(world.root) == []
    assert (world.root / "mine.txt").read_text() == "mine"
    other.close()


def test_l07_wipe_removes_a_namespace_by_its_name_or_a_tenant(world: World) -> None:
    other = World(world.root)
    other.keys[9] = OffloadKey(TenantResolver().tag_of("t") + other.keys[9])
    other.open("other")
    other.store(8, 9)
    run("fs", "wipe", world.root, "--tenant", "nobody", "--yes")
    assert len(chunk_files(world.root)) == 5
    run("fs", "wipe", world.root, "--tenant", "t", "--yes")
    assert len(chunk_files(world.root)) == 4
    assert other.path_of(8).exists()
    run("fs", "wipe", world.root, "--namespace", "other", "--yes")
    assert set(chunk_files(world.root)) == {world.path_of(i) for i in range(3)}
    run("fs", "wipe", world.root, "--namespace", "none", "--yes")
    assert len(chunk_files(world.root)) == 3
    other.close()


def test_a_directory_that_is_no_root_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the root of an fs tier"):
        run("fs", "stat", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bench_verifies_every_byte_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # without fio
    options = ["--chunk-bytes", "16KiB", "--chunks", "20", "--rounds", "1", "--json"]
    options += ["--adopt-chunks", "300"]
    figures = json.loads(run("bench", "fs", "--root", tmp_path, *options))
    assert figures["bytes_verified"] == 20 * 16384
    assert figures["store_GBps"] > 0
    assert figures["load_GBps"] > 0
    assert figures["max_call_ms"] > 0
    assert figures["fio_write_GBps"] is None
    assert figures["num_adopted"] == 300
    assert figures["adopt_s"] > 0
    assert list(tmp_path.iterdir()) == []
