"""What is read from vLLM's configuration, where vLLM is not installed."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.connector import GroupKind
from kvstrata.core.errors import ConfigError
from kvstrata.integrations.vllm_plan import (
    cpu_features,
    make_namespace,
    make_plan,
    model_fingerprint,
    unwise_settings,
)


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    attention_chunk_size: int | None = None


@dataclass
class SlidingWindowSpec:
    block_size: int = 16
    sliding_window: int = 64
    extra_retained_tokens: int = 0


@dataclass
class MambaSpec:
    block_size: int = 16


@dataclass
class UniformTypeKVCacheSpecs:
    block_size: int = 16
    kv_cache_specs: dict[str, Any] = field(default_factory=dict)


MIXED = {"a": FullAttentionSpec(), "b": SlidingWindowSpec()}


def group(spec: Any, **changes: Any) -> SimpleNamespace:
    known = {"host_resident": False, "enable_kv_transfer": True, "is_eagle_group": False}
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"], **{**known, **changes})


def kv_config(*groups: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    known = {
        "kv_cache_groups": list(groups) or [group(FullAttentionSpec())],
        "kv_cache_tensors": [SimpleNamespace(size=100 * 8192)],
        "num_blocks": 100,
        "hash_block_size": 16,
        "needs_kv_cache_zeroing": False,
    }
    return SimpleNamespace(**{**known, **changes})


def vllm_config(extra: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """vLLM's settings; a changed one is named by its last word."""
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "tensor_parallel_size": 1,
            "nnodes": 1,
            "distributed_executor_backend": "mp",
        },
        "kv_transfer_config": {
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra or {"primary": {"num_chunks": 4}},
        },
        "model_config": {
            "model": "some/model",
            "revision": "abc",
            "dtype": "bfloat16",
            "quantization": None,
            "hf_overrides": {},
            "max_model_len": 4096,
        },
        "cache_config": {
            "block_size": 16,
            "cache_dtype": "auto",
            "prefix_caching_hash_algo": "sha256_cbor",
        },
        "load_config": {"load_format": "auto"},
    }
    single: dict[str, Any] = {
        "speculative_config": None,
        "use_v2_model_runner": False,
        "shutdown_timeout": 0,
    }
    for name, value in changes.items():
        home = next((part for part in parts.values() if name in part), single)
        home[name] = value
    return SimpleNamespace(
        **{name: SimpleNamespace(**part) for name, part in parts.items()}, **single
    )


def fingerprint(*, hash_seed: str = "seed", device: str = "cpu", **changes: Any) -> str:
    config = vllm_config(**changes)
    namespace = make_namespace(
        config,
        make_plan(config, kv_config()),
        version="0.32.0",
        hash_seed=hash_seed,
        device=device,
        kv_layout="LBHNC",
    )
    return namespace.fingerprint()


def test_groups_and_sizes_are_read_from_vllm() -> None:
    extra = {"primary": {"num_chunks": 4}, "blocks_per_chunk": 2}
    config = vllm_config(extra, tensor_parallel_size=2)
    plan = make_plan(config, kv_config(group(FullAttentionSpec()), group(SlidingWindowSpec())))
    full, window = plan.offload.groups
    assert (full.kind, full.tokens_per_chunk) == (GroupKind.FULL, 32)
    assert (window.kind, window.window_tokens) == (GroupKind.WINDOW, 64)
    assert plan.chunk_bytes == 2 * 2 * 8192  # blocks and ranks
    assert plan.config.tokens_per_chunk == 32


@pytest.mark.parametrize(
    ("backend", "shared"), [("uni", False), ("mp", True), (None, True), (object, True)]
)
def test_memory_is_private_only_where_the_worker_is_in_the_schedulers_process(
    backend: object, *, shared: bool
) -> None:
    plan = make_plan(vllm_config(distributed_executor_backend=backend), kv_config())
    assert plan.shared is shared


def test_layers_of_one_kind_in_one_group_count_as_that_kind() -> None:
    specs = {"a": FullAttentionSpec(), "b": FullAttentionSpec()}
    plan = make_plan(vllm_config(), kv_config(group(UniformTypeKVCacheSpecs(16, specs))))
    assert plan.offload.groups[0].kind is GroupKind.FULL


def test_a_config_file_is_read_and_inline_settings_go_over_it(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('max_wait_s = "2s"\n[primary]\nnum_chunks = 7\n')
    extra = {"config_file": str(file), "max_wait_s": 3}
    plan = make_plan(vllm_config(extra), kv_config())
    assert (plan.config.primary.num_chunks, plan.config.max_wait_s) == (7, 3.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("nnodes", 2),
        ("distributed_executor_backend", "ray"),
        ("kv_role", "kv_producer"),
        ("speculative_config", object()),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        make_plan(vllm_config(**{name: value}), kv_config())


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([group(MambaSpec())], "MambaSpec"),
        ([group(FullAttentionSpec(attention_chunk_size=64))], "FullAttentionSpec"),
        ([group(FullAttentionSpec(16)), group(SlidingWindowSpec(32))], "unequal blocks"),
        ([group(FullAttentionSpec(), is_eagle_group=True)], r"kv_cache_groups\[0\]"),
        ([group(FullAttentionSpec(), host_resident=True)], r"kv_cache_groups\[0\]"),
        ([group(FullAttentionSpec(), enable_kv_transfer=False)], r"kv_cache_groups\[0\]"),
        ([group(UniformTypeKVCacheSpecs(16, MIXED))], "differ in kind"),
    ],
)
def test_a_kv_group_of_another_kind_is_refused_by_its_name(groups: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_plan(vllm_config(), kv_config(*groups))


def test_the_second_model_runner_is_refused_where_blocks_are_zeroed_too_early() -> None:
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER"):
        make_plan(vllm_config(use_v2_model_runner=True), kv_config(needs_kv_cache_zeroing=True))


@pytest.mark.parametrize("name", ["chunk_bytes", "namespace", "num_ranks", "tokens_per_chunk"])
def test_what_vllm_knows_may_not_be_set(name: str) -> None:
    extra = {"primary": {"num_chunks": 4}, name: 1}
    with pytest.raises(ConfigError, match=name):
        make_plan(vllm_config(extra), kv_config())


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"primary.num_chunk: .*num_chunks"):
        make_plan(vllm_config({"primary": {"num_chunk": 4}}), kv_config())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other/model"},
        {"revision": "def"},
        {"dtype": "float32"},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
        {"hf_overrides": {"rope_theta": 1}},
        {"load_format": "dummy"},
        {"tensor_parallel_size": 2},
        {"prefix_caching_hash_algo": "sha256"},
        {"hash_seed": "other"},
        {"device": "H200"},
        {"extra": {"primary": {"num_chunks": 4}, "blocks_per_chunk": 2}},
    ],
)
def test_whatever_changes_the_bytes_changes_the_namespace(changes: dict[str, Any]) -> None:
    assert fingerprint() == fingerprint()
    assert fingerprint(**changes) != fingerprint()


def test_hashes_that_differ_in_each_process_are_refused_with_a_tier_that_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    files = {"primary": {"num_chunks": 4}, "tiers": [{"type": "fs", "root": str(tmp_path)}]}
    with pytest.raises(ConfigError, match="prefix_caching_hash_algo"):
        fingerprint(extra=files, prefix_caching_hash_algo="xxhash")
    fingerprint(prefix_caching_hash_algo="xxhash")  # in memory only
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    fingerprint(extra=files, prefix_caching_hash_algo="xxhash")


def test_a_folder_is_known_by_its_weights_wherever_it_is(tmp_path: Path) -> None:
    prints = []
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(3 << 20) + weights)
        prints.append(model_fingerprint(str(folder), None))
    assert prints[0] == prints[1] != prints[2]


def test_a_name_is_known_by_the_revision_that_the_local_cache_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_fingerprint("org/name", None) == "org/name@None"
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("1234\n")
    assert model_fingerprint("org/name", None) == "org/name@1234"
    assert model_fingerprint("org/name", "v2") == "org/name@v2"


def test_vector_units_tell_cpus_apart(tmp_path: Path) -> None:
    table = tmp_path / "cpuinfo"
    table.write_text("processor: 0\nflags\t\t: fpu avx2 amx_tile sse\n")
    assert cpu_features(table).endswith("amx_tile avx2")
    table.write_text("flags : fpu avx2\n")
    assert cpu_features(table).endswith(" avx2")


def unwise(write: str = "through", **changes: Any) -> list[str]:
    tier = {"type": "fs", "root": "/kv", "max_bytes": "1GiB", "write": write}
    config = vllm_config({"primary": {"num_chunks": 4}, "tiers": [tier]}, **changes)
    return unwise_settings(config, make_plan(config, kv_config()).config)


def test_a_load_failure_that_would_end_its_request_is_pointed_out() -> None:
    assert unwise() == []
    (text,) = unwise(kv_load_failure_policy="fail")
    assert text.startswith("kv_load_failure_policy")


@pytest.mark.parametrize("write", ["on_evict", "on_reuse"])
def test_chunks_that_a_stopping_server_would_lose_are_pointed_out(write: str) -> None:
    (text,) = unwise(write)
    assert "--shutdown-timeout" in text
    assert unwise(write, shutdown_timeout=30) == []
