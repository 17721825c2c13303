"""A directory and memory as stores, without the detour of a tier."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from kvstrata.core.settings import parse_settings
from kvstrata.tiers.object.client import FailureKind, ObjectClient, ObjectStoreError
from kvstrata.tiers.object.local_clients import DirectoryClient, MemoryClient
from kvstrata.tiers.object.settings import ObjectSettings

HEAD, BODY = b"h" * 4096, b"b" * 50_000
PATH = "ab/cd/object"


def settings(url: str) -> ObjectSettings:
    return parse_settings(ObjectSettings, {"url": url}, "tiers[0]")


@pytest.fixture
def client(tmp_path: Path) -> DirectoryClient:
    return DirectoryClient(settings(f"file://{tmp_path}/a%20store"), "object", "tiers[0]")


def files(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if path.is_file()]


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """Let writes beyond come short and then fail, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_object_is_where_obstore_has_it(client: DirectoryClient, tmp_path: Path) -> None:
    plain = ObjectClient(settings(f"file://{tmp_path}/a%20store"), "object", "tiers[0]")
    assert client.create(PATH, (HEAD, BODY))
    assert plain.read(PATH, len(HEAD + BODY)) == HEAD + BODY
    assert not plain.create(PATH, (BODY,))
    assert [found.path for found in plain.find(None)] == [PATH]
    assert plain.create("from/obstore", (BODY,))
    assert client.read("from/obstore", len(BODY)) == BODY
    assert client.read_start("from/obstore", 10, len(BODY)) == BODY[:10]


def test_what_is_there_is_not_written_again(client: DirectoryClient) -> None:
    assert client.create(PATH, (BODY,))
    assert not client.create(PATH, (BODY[::-1], HEAD))
    assert client.read(PATH, len(BODY)) == BODY


def test_a_write_that_comes_short_fails_and_leaves_no_file(
    client: DirectoryClient, tmp_path: Path
) -> None:
    with no_file_longer_than(10_000), pytest.raises(ObjectStoreError, match="EFBIG"):
        client.create(PATH, (HEAD, BODY))
    assert files(tmp_path) == []
    assert client.create(PATH, (HEAD, BODY))


@pytest.fixture(params=["directory", "memory"])
def either(request: pytest.FixtureRequest, client: DirectoryClient) -> ObjectClient:
    if request.param == "directory":
        return client
    return MemoryClient(settings("memory://"), "object", "tiers[0]")


@pytest.mark.parametrize("change_bytes", [-50_000, -1, 1])
def test_an_object_of_another_size_is_told_apart(either: ObjectClient, change_bytes: int) -> None:
    client = either
    client.create(PATH, (BODY,))
    with pytest.raises(ObjectStoreError) as caught:
        client.read(PATH, len(BODY) + change_bytes)
    assert caught.value.kind is FailureKind.WRONG_SIZE
    with pytest.raises(ObjectStoreError) as caught:
        client.read_start(PATH, 10, len(BODY) + change_bytes)
    assert caught.value.kind is FailureKind.WRONG_SIZE


def test_an_absent_object_is_told_apart(either: ObjectClient) -> None:
    client = either
    with pytest.raises(ObjectStoreError) as caught:
        client.read(PATH, 10)
    assert caught.value.kind is FailureKind.NOT_FOUND
    with pytest.raises(ObjectStoreError) as caught:
        client.read_start(PATH, 10, 10)
    assert caught.value.kind is FailureKind.NOT_FOUND


def test_no_descriptor_is_left_open(client: DirectoryClient) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        client.create(PATH, (BODY,))
        client.read(PATH, len(BODY))
        client.read_start(PATH, 10, len(BODY))
        with pytest.raises(ObjectStoreError):
            client.read(PATH, 10)
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_unnamed_files_obstore_writes(
    client: DirectoryClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def open_as_nfs_does(path: str, flags: int, *args: int, **more: Any) -> int:  # noqa: ANN401
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real_open(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", open_as_nfs_does)
    os.makedirs(tmp_path / "a store" / "ab" / "cd")
    assert client.create(PATH, (HEAD, BODY))
    assert not client.create(PATH, (BODY,))
    assert client.read(PATH, len(HEAD + BODY)) == HEAD + BODY


def test_without_links_an_object_is_looked_for_before_it_is_written(
    client: DirectoryClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert client.create(PATH, (HEAD, BODY))
    assert caplog.text.count("asking before each write") == 1
    assert not client.create(PATH, (BODY,))
    assert client.read(PATH, len(HEAD + BODY)) == HEAD + BODY
    assert files(tmp_path) == ["object"]


def test_memory_keeps_what_it_was_given_and_not_the_buffer() -> None:
    client = MemoryClient(settings("memory://"), "object", "tiers[0]")
    row = bytearray(BODY)
    client.create(PATH, (memoryview(row),))
    row[:] = bytes(len(row))
    assert client.read(PATH, len(BODY)) == BODY
