"""What vLLM's configuration comes to: which engines are refused, groups, namespace, settings.

Nothing here imports vLLM: its objects are read by attribute, so that all of it can be tested where
vLLM is not installed.
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvstrata.config_sources import over, read_environment, read_file
from kvstrata.connector import GroupKind, KVGroup, SchedulerOffloadConfig
from kvstrata.core.config import Config, WritePolicy
from kvstrata.core.errors import ConfigError
from kvstrata.core.namespace import Namespace
from kvstrata.core.settings import optional, parse_count, parse_text

TESTED_VERSIONS: Final = ("0.32.",)
NULL_BLOCK_ID: Final = 0
SEEDED_ALGORITHMS: Final = frozenset({"sha256", "sha256_cbor"})
SAMPLE_BYTES: Final = 1 << 20
WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".gguf"})
WRITTEN_LATE: Final = frozenset({WritePolicy.ON_EVICT, WritePolicy.ON_REUSE})
EXTRA: Final = "kv_connector_extra_config"
OWN_SETTINGS: Final = ("config_file", "blocks_per_chunk", "match_tokens")
ENGINE_SETTINGS: Final = ("chunk_bytes", "namespace", "num_ranks", "tokens_per_chunk")


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """Everything that the two sides of the connector need to know.

    Attributes:
        config: Settings of the manager.
        offload: The engine as the connector sees it.
        block_bytes: Bytes of one block on one rank, of each group.
        layer_names: Of each group, in the order of its layers.
        shared: Whether workers run in other processes than the scheduler.
    """

    config: Config
    offload: SchedulerOffloadConfig
    block_bytes: tuple[int, ...]
    layer_names: tuple[tuple[str, ...], ...]
    shared: bool

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a slot: the chunk's share of every rank."""
        return self.offload.chunk_bytes(self.block_bytes)


def make_plan(vllm_config: Any, kv_cache_config: Any) -> VllmPlan:  # noqa: ANN401
    """Read vLLM's configuration.

    Raises:
        ConfigError: Something in it is not supported, or a setting of ours is wrong; the text
            starts with the setting's name.
    """
    refuse_unsupported(vllm_config, kv_cache_config)
    raw = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    own = {name: raw.pop(name) for name in OWN_SETTINGS if name in raw}
    for name in ENGINE_SETTINGS:
        if name in raw:
            raise ConfigError(f"{EXTRA}.{name}", "is known from vLLM: leave it out")
    blocks_per_chunk = parse_count()(own.get("blocks_per_chunk", 1), f"{EXTRA}.blocks_per_chunk")
    match_tokens = optional(parse_count())(own.get("match_tokens"), f"{EXTRA}.match_tokens")
    groups = tuple(
        _group(group.kv_cache_spec, blocks_per_chunk, i)
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    tokens_per_hash = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
    offload = SchedulerOffloadConfig(
        groups=groups,
        tokens_per_hash=tokens_per_hash,
        num_ranks=vllm_config.parallel_config.tensor_parallel_size,
        null_block_id=NULL_BLOCK_ID,
        match_tokens=match_tokens,
    )
    config = replace(_settings(own, raw), tokens_per_chunk=groups[0].tokens_per_chunk)
    block_bytes = kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks
    return VllmPlan(
        config=config,
        offload=offload,
        block_bytes=(block_bytes,) * len(groups),
        layer_names=tuple(tuple(g.layer_names) for g in kv_cache_config.kv_cache_groups),
        shared=vllm_config.parallel_config.distributed_executor_backend != "uni",
    )


def _settings(own: Mapping[str, Any], raw: Mapping[str, Any]) -> Config:
    if "config_file" not in own:
        return Config.parse(raw)
    path = Path(parse_text(own["config_file"], f"{EXTRA}.config_file"))
    from_file = over(read_file(path), read_environment(os.environ))
    return Config.parse(over(from_file, raw))


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
    """Refuse what would be done wrongly.

    Raises:
        ConfigError: Names the setting.
    """
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "nnodes",
    ):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(name, "kvstrata supports only 1 with vLLM")
    backend = parallel.distributed_executor_backend
    if backend not in {None, "mp", "uni"} and not isinstance(backend, type):
        raise ConfigError(
            "distributed_executor_backend",
            f"is {backend!r}; workers must share the scheduler's host: use mp or uni",
        )
    if vllm_config.kv_transfer_config.kv_role != "kv_both":
        raise ConfigError("kv_role", "must be kv_both: kvstrata both stores and loads")
    if vllm_config.speculative_config is not None:
        raise ConfigError("speculative_config", "is not supported by kvstrata yet")
    if vllm_config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing:
        raise ConfigError(
            "VLLM_USE_V2_MODEL_RUNNER",
            "this model's cache blocks are zeroed before the connector is told; set it to 0",
        )
    _refuse_groups(kv_cache_config.kv_cache_groups)


def unwise_settings(vllm_config: Any, config: Config) -> list[str]:  # noqa: ANN401
    """Return a sentence for each setting that is allowed and hardly what an operator wants."""
    found = []
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        found.append(
            'kv_load_failure_policy is "fail", so a failed load ends its request with an error; '
            'set it to "recompute"'
        )
    late = [tier.name for tier in config.tiers if tier.write in WRITTEN_LATE]
    if late and vllm_config.shutdown_timeout == 0:
        found.append(
            f"tier {late[0]!r} gets chunks when they leave host memory, and what is there when a "
            "server stops is lost: vLLM kills its engine at once unless --shutdown-timeout is set"
        )
    return found


def _refuse_groups(groups: Any) -> None:  # noqa: ANN401
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if len(sizes) > 1:
        raise ConfigError(
            "block_size", f"KV groups with unequal blocks ({sorted(sizes)} tokens) are unsupported"
        )
    for i, group in enumerate(groups):
        if group.host_resident or not group.enable_kv_transfer or group.is_eagle_group:
            raise ConfigError(f"kv_cache_groups[{i}]", "a group of this kind is not supported")


def _group(spec: Any, blocks_per_chunk: int, idx: int) -> KVGroup:  # noqa: ANN401
    """Translate one KV group; kinds are told by their exact class, since subclasses differ."""
    match type(spec).__name__:
        case "UniformTypeKVCacheSpecs":
            parts = [_group(part, blocks_per_chunk, idx) for part in spec.kv_cache_specs.values()]
            if len(set(parts)) > 1:
                raise ConfigError(f"kv_cache_groups[{idx}]", "its layers differ in kind")
            return parts[0]
        case "FullAttentionSpec" if spec.attention_chunk_size is None:
            return KVGroup(spec.block_size, blocks_per_chunk)
        case "SlidingWindowSpec":
            return KVGroup(
                spec.block_size,
                blocks_per_chunk,
                GroupKind.WINDOW,
                spec.sliding_window + spec.extra_retained_tokens,
            )
        case other:
            raise ConfigError(
                f"kv_cache_groups[{idx}]",
                f"{other} is not supported by kvstrata, only FullAttentionSpec and "
                "SlidingWindowSpec; serve this model without the connector",
            )


def make_namespace(
    vllm_config: Any,  # noqa: ANN401
    plan: VllmPlan,
    *,
    version: str,
    hash_seed: str,
    device: str,
    kv_layout: str | None,
) -> Namespace:
    """Name everything that changes the bytes of equal block hashes.

    Args:
        vllm_config: vLLM's configuration.
        plan: Made from it.
        version: Of vLLM; the inside of a block is its private matter.
        hash_seed: What vLLM starts its chains of hashes with.
        device: What the model runs on.
        kv_layout: Name of the layout that vLLM chose.

    Raises:
        ConfigError: Hashes differ in every process, and a tier would keep chunks beyond this one.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    beyond = [tier.name for tier in plan.config.tiers if tier.type != "memory"]
    if algorithm not in SEEDED_ALGORITHMS and "PYTHONHASHSEED" not in os.environ and beyond:
        raise ConfigError(
            "prefix_caching_hash_algo",
            f"{algorithm} makes other hashes in each process, so tier {beyond[0]!r} would never be "
            "hit after a restart; use sha256_cbor, or set PYTHONHASHSEED",
        )
    extra = {
        "vllm": version,
        "hash_seed": hashlib.sha256(hash_seed.encode()).hexdigest(),
        "device": f"{device} {cpu_features()}" if device == "cpu" else device,
        "quantization": str(model.quantization),
        "hf_overrides": str(model.hf_overrides),
        "load_format": str(vllm_config.load_config.load_format),
        "max_model_len": str(model.max_model_len),
        "groups": repr(plan.offload.groups),
        "match_tokens": str(plan.offload.match_tokens),
    }
    if algorithm == "sha256":  # hashes a pickle, whose form may change with Python's version
        extra["python"] = platform.python_version()
    return Namespace(
        model=model_fingerprint(model.model, model.revision),
        revision=model.revision,
        dtype=str(model.dtype),
        kv_dtype=str(cache.cache_dtype),
        layout=kv_layout,
        tokens_per_block=plan.offload.groups[0].tokens_per_block,
        blocks_per_chunk=plan.offload.groups[0].blocks_per_chunk,
        tensor_parallel=plan.offload.num_ranks,
        hash_algorithm=algorithm,
        extra=tuple(sorted(extra.items())),
    )


def cpu_features(table: Path = Path("/proc/cpuinfo")) -> str:
    """Return what decides how a CPU engine packs its blocks: architecture and vector units."""
    flags: set[str] = set()
    try:
        for line in table.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags.update(line.partition(":")[2].split())
    except OSError:
        pass  # not Linux: the architecture alone
    vector = sorted(f for f in flags if f.startswith(("avx", "amx", "asimd", "sve", "sme", "bf16")))
    return " ".join([platform.machine(), *vector])


def model_fingerprint(name: str, revision: str | None) -> str:
    """Return a text that differs when the weights do, whatever folder they are in.

    For a folder: its configuration, and size, start and end of each file of weights. For a name of
    a model hub: the name, and the resolved revision where the local cache knows it.
    """
    folder = Path(name)
    if folder.is_file():
        return _digest_of([folder])
    if not folder.is_dir():
        return f"{name}@{revision or _cached_revision(name)}"
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in WEIGHT_SUFFIXES or path.name == "config.json"
    ]
    return _digest_of(files)


def _digest_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        num_bytes = path.stat().st_size
        digest.update(f"{path.name}:{num_bytes};".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, num_bytes - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _cached_revision(name: str) -> str | None:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    pointer = hub / f"models--{name.replace('/', '--')}" / "refs" / "main"
    try:
        return pointer.read_text().strip()
    except OSError:
        return None
