"""Prompts that the engine's own blocks can't hold come back from offload, token for token."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvstrata.core.errors import ConfigError
from tests.vllm.engine import Tokens, engine, prompts
from tests.vllm.models import save_tiny_gemma

PRIMARY = {"primary": {"num_chunks": 100}}
BATCH = prompts(6, 1500, seed=1)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Tokens:
    with engine(tiny_model, None) as plain:
        return plain.run_each(BATCH)


def test_the_second_round_is_served_from_offload_with_the_same_tokens(
    tiny_model: Path, expected: Tokens
) -> None:
    with engine(tiny_model, PRIMARY) as ours:
        is_shared = "/memfd:kvstrata" in Path("/proc/self/maps").read_text()
        assert not is_shared, "the worker is in this process"
        assert ours.run_each(BATCH) == expected
        assert ours.counter("vllm:external_prefix_cache_hits") == 0
        assert ours.run_each(BATCH) == expected
        assert ours.counter("vllm:external_prefix_cache_hits") == 6 * 1408
        assert ours.counter("vllm:kvstrata_primary_tokens") == 6 * 1408
        assert ours.counter("vllm:kvstrata_stored_chunks") == 6 * 11


def test_chunks_of_several_blocks_and_chunked_prefill_change_nothing(
    tiny_model: Path, expected: Tokens
) -> None:
    settings = {**PRIMARY, "blocks_per_chunk": 3}
    with engine(tiny_model, settings, block_size=32, num_gpu_blocks_override=80,
                max_num_batched_tokens=200) as ours:  # fmt: skip
        assert ours.run_each(BATCH) == expected
        assert ours.run_each(BATCH) == expected
        assert ours.counter("vllm:external_prefix_cache_hits") == 6 * 1440


def test_a_prompt_of_whole_blocks_is_loaded_whole_and_its_last_token_computed(
    tiny_model: Path,
) -> None:
    tokens = prompts(1, 1536, seed=2)
    with engine(tiny_model, PRIMARY) as ours:
        first = ours.run(tokens)
        ours.settle()
        ours.llm.reset_prefix_cache()
        assert ours.run(tokens) == first
        assert ours.counter("vllm:external_prefix_cache_hits") == 1535


def test_a_reset_of_the_connector_forgets_everything(tiny_model: Path, expected: Tokens) -> None:
    with engine(tiny_model, PRIMARY) as ours:
        ours.run(BATCH[:2])  # stores are in flight when the cache is reset
        assert ours.llm.reset_prefix_cache(reset_connector=True)
        assert ours.run_each(BATCH[:2]) == expected[:2]
        assert ours.counter("vllm:external_prefix_cache_hits") == 0


def test_what_files_hold_is_served_after_a_restart(
    tiny_model: Path, expected: Tokens, tmp_path: Path
) -> None:
    settings = {**PRIMARY, "tiers": [{"type": "fs", "root": str(tmp_path), "max_bytes": "1GiB"}]}
    for num_hits in (0, 6 * 1408):
        with engine(tiny_model, settings, prefix_caching_hash_algo="sha256_cbor") as ours:
            assert ours.run_each(BATCH) == expected
            assert ours.counter("vllm:external_prefix_cache_hits") == num_hits
            ours.settle()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) > 66 * 512 * 1024


def test_another_models_chunks_are_never_served(
    tiny_model: Path, tmp_path: Path, expected: Tokens
) -> None:
    settings = {**PRIMARY, "tiers": [{"type": "fs", "root": str(tmp_path), "max_bytes": "1GiB"}]}
    with engine(tiny_model, settings) as ours:
        assert ours.run(BATCH[:1]) == expected[:1]
        ours.settle()
    with engine(tiny_model, settings, hf_overrides={"rms_norm_eps": 1e-3}) as other:
        other.run(BATCH[:1])
        assert other.counter("vllm:external_prefix_cache_hits") == 0


def test_window_and_full_attention_groups_are_served_together(tmp_path: Path) -> None:
    model = save_tiny_gemma(tmp_path / "gemma")
    options: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 160}
    with engine(model, None, **options) as plain:
        first = plain.run_each(BATCH)
    with engine(model, PRIMARY | {"primary": {"num_chunks": 800}}, **options) as ours:
        assert len(ours.scheduler.config.groups) == 2
        assert ours.run_each(BATCH) == first
        ours.settle()
        ours.llm.reset_prefix_cache()
        assert ours.run_each(BATCH) == first
        assert ours.counter("vllm:external_prefix_cache_hits") == 6 * 1472


def test_subscribers_are_told_what_host_memory_holds(tiny_model: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    options = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    with engine(tiny_model, PRIMARY, kv_events_config=options) as ours:
        context = zmq.Context()
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        subscriber.poll(2000, zmq.POLLIN)  # lets the connection come up
        ours.run(BATCH[:1])
        ours.settle()
        hosted: set[bytes] = set()
        while len(hosted) < 11 and subscriber.poll(10_000):
            _, events, _ = msgspec.msgpack.decode(subscriber.recv_multipart()[2])
            hosted.update(h for e in events if e.get("medium") == "CPU" for h in e["block_hashes"])
        context.destroy(linger=0)
        assert len(hosted) == 11


def test_tensors_that_are_not_as_described_are_refused_when_they_are_registered(
    tiny_model: Path,
) -> None:
    # A16.
    with engine(tiny_model, PRIMARY) as ours:
        worker = get_kv_transfer_group()
        good = dict(worker.worker_side.kv_caches)
        torn = {name: tensor[1:] for name, tensor in good.items()}
        with pytest.raises(ConfigError, match=r"tensors\[0\]\[0\].*not a multiple of 20 blocks"):
            worker.register_kv_caches(torn)
        large = {name: tensor.repeat(1, 2, 1, 1) for name, tensor in good.items()}
        with pytest.raises(ConfigError, match=r"kv_cache_groups\[0\].*bytes a block"):
            worker.register_kv_caches(large)
        elsewhere = {name: tensor.to("meta") for name, tensor in good.items()}
        with pytest.raises(ConfigError, match="are on meta; only cpu and cuda"):
            worker.register_kv_caches(elsewhere)
        worker.register_kv_caches(good)
        assert len(ours.run(BATCH[:1])[0]) == 8
