"""The facade keeps bytes, streams prefixes larger than the primary, and survives a restart."""

import threading
from pathlib import Path
from typing import Any

import pytest

import kvstrata
from kvstrata import ConfigError, ContractError, OffloadKey, build_manager, make_offload_key
from kvstrata.testing import pattern

CHUNK_BYTES = 8192


def keys(count: int, first: int = 0) -> list[OffloadKey]:
    return [make_offload_key(i.to_bytes(32, "big"), 0) for i in range(first, first + count)]


def rows(wanted: list[OffloadKey]) -> list[bytes]:
    return [pattern(key, CHUNK_BYTES) for key in wanted]


def blank(count: int) -> list[bytearray]:
    return [bytearray(CHUNK_BYTES) for _ in range(count)]


def settings(tmp_path: Path, num_chunks: int = 8) -> dict[str, Any]:
    tier = {"type": "fs", "root": str(tmp_path / "kv"), "max_bytes": "64MiB"}
    return {
        "chunk_bytes": CHUNK_BYTES,
        "primary": {"num_chunks": num_chunks, "policy": "lru"},
        "tiers": [tier],
    }


def test_a_prefix_larger_than_the_primary_comes_back_whole(tmp_path: Path) -> None:
    wanted = keys(32)
    with kvstrata.open(settings(tmp_path)) as store:
        assert store.put(wanted, rows(wanted)) == 32
        loaded = blank(32)
        assert store.get(wanted, loaded) == 32
    assert [bytes(row) for row in loaded] == rows(wanted)


def test_its_memory_is_its_own_and_that_of_a_manager_is_for_others_to_map(tmp_path: Path) -> None:
    def num_shared() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:kvstrata")

    before = num_shared()
    with kvstrata.open(settings(tmp_path)):
        assert num_shared() == before
    manager = build_manager({"primary": {"num_chunks": 1}}, chunk_bytes=1, namespace="n")
    assert num_shared() == before + 1
    manager.shutdown(1)


def test_chunks_survive_a_restart(tmp_path: Path) -> None:
    wanted = keys(6)
    with kvstrata.open(settings(tmp_path)) as store:
        store.put(wanted, rows(wanted))
    with kvstrata.open(settings(tmp_path)) as store:
        loaded = blank(6)
        assert store.get(wanted, loaded) == 6
    assert [bytes(row) for row in loaded] == rows(wanted)


def test_rows_past_the_prefix_stay_untouched(tmp_path: Path) -> None:
    wanted = keys(3)
    with kvstrata.open(settings(tmp_path)) as store:
        store.put(wanted[:2], rows(wanted[:2]))
        loaded = blank(3)
        assert store.get(wanted, loaded) == 2
    assert loaded[2] == bytearray(CHUNK_BYTES)


def test_a_deleted_chunk_is_gone_from_every_tier(tmp_path: Path) -> None:
    wanted = keys(4)
    with kvstrata.open(settings(tmp_path)) as store:
        store.put(wanted, rows(wanted))
        assert store.flush()
        store.delete(wanted[1:2])
        assert store.contains(wanted) == [True, False, True, True]
    with kvstrata.open(settings(tmp_path)) as store:
        assert store.contains(wanted) == [True, False, True, True]


def test_l07_a_tenant_is_deleted_from_every_tier_with_what_earlier_runs_stored(
    tmp_path: Path,
) -> None:
    wanted, config = keys(4), settings(tmp_path)
    config["tiers"].append({"type": "memory"})
    tenants: list[dict[str, str] | None] = [{"tenant": "a"}, {"tenant": "b"}, None]
    with kvstrata.open(config) as store:
        for hints in tenants:
            store.put(wanted, rows(wanted), hints)
            assert store.flush()
    with kvstrata.open(config) as store:
        store.put(wanted[:1], rows(wanted[:1]), {"tenant": "a"})  # the others are below only
        store.delete_tenant("a")
        found = [store.contains(wanted, hints) for hints in tenants]
        assert found == [[False] * 4, [True] * 4, [True] * 4]
        assert store.put(wanted[:1], rows(wanted[:1]), {"tenant": "a"}) == 1
        assert store.flush()
    with kvstrata.open(config) as store:
        found = [store.contains(wanted, hints) for hints in tenants]
        assert found == [[True] + [False] * 3, [True] * 4, [True] * 4]


def test_l07_clearing_a_namespace_leaves_others_below_the_same_root(tmp_path: Path) -> None:
    wanted, config = keys(4), settings(tmp_path)
    with (
        kvstrata.open(config | {"namespace": "one"}) as one,
        kvstrata.open(config | {"namespace": "two"}) as two,
    ):
        for store in (one, two):
            store.put(wanted, rows(wanted))
            assert store.flush()
        one.clear()
        assert one.contains(wanted) == [False] * 4
    with (
        kvstrata.open(config | {"namespace": "one"}) as one,
        kvstrata.open(config | {"namespace": "two"}) as two,
    ):
        assert one.contains(wanted) == [False] * 4
        assert two.contains(wanted) == [True] * 4


def test_clear_forgets_everything(tmp_path: Path) -> None:
    wanted = keys(4)
    with kvstrata.open(settings(tmp_path)) as store:
        store.put(wanted, rows(wanted))
        store.clear()
        assert store.contains(wanted) == [False] * 4


def test_tenants_do_not_share_and_each_hits_itself(tmp_path: Path) -> None:
    wanted = keys(2)
    with kvstrata.open(settings(tmp_path)) as store:
        store.put(wanted, rows(wanted), hints={"tenant": "a"})
        assert store.get(wanted, blank(2), hints={"tenant": "b"}) == 0
        assert store.get(wanted, blank(2)) == 0
        assert store.get(wanted, blank(2), hints={"tenant": "a"}) == 2


def test_a_row_of_the_wrong_size_is_refused_before_anything_is_stored(tmp_path: Path) -> None:
    wanted = keys(2)
    with kvstrata.open(settings(tmp_path)) as store:
        with pytest.raises(ValueError, match=r"rows\[1\] has 5 bytes"):
            store.put(wanted, [bytes(CHUNK_BYTES), b"short"])
        assert store.contains(wanted) == [False, False]


def test_a_call_that_is_refused_leaves_nothing_open(tmp_path: Path) -> None:
    wanted: Any = keys(4)
    with kvstrata.open(settings(tmp_path)) as store:
        store.put(wanted, rows(wanted))
        with pytest.raises(ValueError, match=r"rows\[0\] can't be written"):
            store.get(wanted, rows(wanted))
        with pytest.raises(TypeError, match="a key is bytes, not str"):
            store.put(["text"], rows(wanted[:1]))  # type: ignore[list-item]
        for call in (store.contains, store.delete, store.prefetch):
            with pytest.raises(TypeError, match="a key is bytes, not int"):
                call([7])  # type: ignore[list-item]
        stats = store.get_stats()
        assert stats["num_requests"] == stats["num_pinned"] == stats["num_writing"] == 0


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    wanted = keys(2)
    store = kvstrata.open(settings(tmp_path))
    store.put(wanted, rows(wanted))
    report = store.close()
    for call in (
        lambda: store.put(wanted, rows(wanted)),
        lambda: store.get(wanted, blank(2)),
        lambda: store.contains(wanted),
        lambda: store.prefetch(wanted),
        lambda: store.delete(wanted),
        lambda: store.delete_tenant("t"),
        store.clear,
        store.flush,
        store.suspend,
        lambda: store.set_epoch("2"),
    ):
        with pytest.raises(ContractError, match="the store is closed"):
            call()
    assert store.close() == report
    assert store.get_stats()["num_requests"] == 0


def test_prefetched_chunks_are_loaded_from_host_memory(tmp_path: Path) -> None:
    wanted = keys(4)
    with kvstrata.open(settings(tmp_path)) as store:
        store.put(wanted, rows(wanted))
    with kvstrata.open(settings(tmp_path)) as store:
        store.prefetch(wanted)
        assert store.flush()
        assert store.get_stats()["num_resident"] == 4


def test_several_threads_get_their_own_bytes(tmp_path: Path) -> None:
    wrong: list[int] = []
    with kvstrata.open(settings(tmp_path)) as store:

        def work(number: int) -> None:
            mine = keys(6, first=100 * number)
            for _ in range(10):
                store.put(mine, rows(mine))
                loaded = blank(6)
                count = store.get(mine, loaded)
                if [bytes(row) for row in loaded[:count]] != rows(mine)[:count]:
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_opening_without_a_chunk_size_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"^chunk_bytes: is required"):
        kvstrata.open({"primary": {"num_chunks": 2}})
