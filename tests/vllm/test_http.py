"""The OpenAI server with the connector, in all its processes."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import prompts
from tests.vllm.server import Server, server

HITS = "vllm:external_prefix_cache_hits_total"
BLOCKS = ("--block-size", "128", "--num-gpu-blocks-override", "40")
BATCH = prompts(8, 1000, seed=3)
NUM_CHUNKS = 7  # full blocks of a prompt


def settings(root: Path) -> dict[str, Any]:
    tier = {"type": "fs", "root": str(root), "max_bytes": "1GiB"}
    return {"primary": {"num_chunks": 200}, "tiers": [tier]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def running(
    tiny_model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with server(tiny_model, settings(root), log, *BLOCKS) as started:
        yield started


def test_tenants_never_share_and_one_tenant_does(running: Server) -> None:
    before = running.metric(HITS)
    first = running.complete(BATCH[0], tenant="a")
    running.forget_device_blocks()
    assert running.complete(BATCH[0], tenant="b") == first
    assert running.metric(HITS) == before
    running.forget_device_blocks()
    assert running.complete(BATCH[0]) == first
    assert running.metric(HITS) == before
    running.forget_device_blocks()
    assert running.complete(BATCH[0], tenant="a") == first
    assert running.metric(HITS) == before + NUM_CHUNKS * 128


def test_a_request_that_says_so_is_not_stored(running: Server, root: Path) -> None:
    running.complete(BATCH[1])
    stored = running.metric("vllm:kvstrata_stored_chunks_total")
    running.wait_for_metric("vllm:kvstrata_tier_stored_chunks_total", stored, tier="fs")
    files = sum(1 for path in root.rglob("*"))
    before = running.metric(HITS)
    first = running.complete(BATCH[2], store=False)
    running.forget_device_blocks()
    assert running.complete(BATCH[2], store=False) == first
    assert running.metric(HITS) == before
    assert running.metric("vllm:kvstrata_stored_chunks_total") == stored
    assert sum(1 for path in root.rglob("*")) == files


def test_metrics_show_what_is_stored_where(running: Server) -> None:
    assert running.metric("vllm:kvstrata_num_slots") == 200
    assert running.metric("vllm:kvstrata_num_resident") > 0
    assert running.metric("vllm:kvstrata_primary_tokens_total") > 0
    assert running.metric("vllm:kvstrata_tier_stored_bytes_total", tier="fs") > 0


def test_killed_in_the_middle_of_traffic_it_starts_again_and_serves_its_files(
    running: Server, root: Path, tiny_model: Path, tmp_path: Path
) -> None:
    expected = [running.complete(tokens) for tokens in BATCH[3:]]
    stored = running.metric("vllm:kvstrata_stored_chunks_total")
    running.wait_for_metric("vllm:kvstrata_tier_stored_chunks_total", stored, tier="fs")
    under_way = threading.Event()

    def send(seed: int) -> None:
        under_way.set()
        with pytest.raises(OSError):  # noqa: PT011
            running.complete(prompts(1, 1500, seed)[0], num_new=400)

    clients = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    for client in clients:
        client.start()
    under_way.wait()
    before = running.metric("vllm:kvstrata_stored_chunks_total")
    running.wait_for_metric("vllm:kvstrata_stored_chunks_total", before + 1)
    mine = regions(running.process.pid)
    assert len(mine) == 1  # shared by all processes of the server
    running.kill()
    for client in clients:
        client.join()
    pause = threading.Event()
    while mine & regions():
        pause.wait(0.1)
    with server(tiny_model, settings(root), tmp_path / "server.log", *BLOCKS) as again:
        assert [again.complete(tokens) for tokens in BATCH[3:]] == expected
        assert again.metric(HITS) == 5 * NUM_CHUNKS * 128


def test_told_to_stop_it_writes_down_what_only_host_memory_held(
    tiny_model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "kv"
    late = settings(root)
    late["tiers"][0]["write"] = "on_evict"
    with server(tiny_model, late, tmp_path / "log", *BLOCKS, "--shutdown-timeout", "60") as first:
        expected = [first.complete(tokens) for tokens in BATCH[:4]]
        first.wait_for_metric("vllm:kvstrata_stored_chunks_total", 4 * NUM_CHUNKS)
        assert num_chunk_files(root) == 0
        first.terminate()
    assert num_chunk_files(root) == 4 * NUM_CHUNKS
    with server(tiny_model, settings(root), tmp_path / "log", *BLOCKS) as again:
        assert [again.complete(tokens) for tokens in BATCH[:4]] == expected
        assert again.metric("vllm:kvstrata_tier_tokens_total") == 4 * NUM_CHUNKS * 128


def num_chunk_files(root: Path) -> int:
    """Files that are large enough to hold a chunk of the tiny model in float32."""
    files = (path for path in root.rglob("*") if path.is_file())
    return sum(path.stat().st_size > 512 * 1024 for path in files)


def regions(group: int | None = None) -> set[str]:
    """The primaries' memory that is mapped, by its number: of all processes or of one group."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if group is None or os.getpgid(int(maps.parent.name)) == group:
                lines = maps.read_text().splitlines()
                found.update(line.split()[4] for line in lines if "memfd:kvstrata" in line)
        except OSError:
            continue  # it has ended
    return found


def test_two_ranks_load_what_two_ranks_stored(tiny_model: Path, tmp_path: Path) -> None:
    options = (*BLOCKS, "--tensor-parallel-size", "2")
    environment = {
        "VLLM_CPU_SIM_MULTI_NUMA": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "auto",
    }
    with server(
        tiny_model, settings(tmp_path / "kv"), tmp_path / "log", *options, **environment
    ) as two:
        first = [two.complete(tokens) for tokens in BATCH[:4]]
        two.forget_device_blocks()
        assert [two.complete(tokens) for tokens in BATCH[:4]] == first
        assert two.metric(HITS) == 4 * NUM_CHUNKS * 128
