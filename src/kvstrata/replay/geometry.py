"""How many bytes of KV a token takes, from a model's `config.json` as Hugging Face has it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from kvstrata.core.errors import ConfigError

_DTYPE_BYTES: Final = {
    "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "auto": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What decides the size of the KV of a token, over all layers and all ranks.

    Attributes:
        num_layers: Layers that keep KV.
        num_values: Numbers that one layer keeps for a token: keys and values of all KV heads, or
            the latent vector where attention compresses them.
        value_bytes: Of one number.
    """

    num_layers: int
    num_values: int
    value_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for a token."""
        return self.num_layers * self.num_values * self.value_bytes

    @classmethod
    def read(cls, path: Path, dtype: str | None = None) -> Self:
        """Read a `config.json`, or the one in a directory; `dtype` is that of the cache.

        Raises:
            ConfigError: It can't be read, or does not say enough.
        """
        path = path / "config.json" if path.is_dir() else path
        try:
            config = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError("--model", f"can't read {path}: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError("--model", f"{path} is not a model's config")
        return cls.parse(config, dtype)

    @classmethod
    def parse(cls, config: Mapping[str, Any], dtype: str | None = None) -> Self:
        """Take the fields from a decoded `config.json`; models with images keep them one below.

        Raises:
            ConfigError: A field is missing, or the dtype is unknown.
        """
        config = {**config, **(config.get("text_config") or {})}
        name = dtype or config.get("torch_dtype") or config.get("dtype") or "auto"
        name = str(name).removeprefix("torch.")
        if name not in _DTYPE_BYTES:
            raise ConfigError("--model", f"unknown dtype {name!r}; known: {sorted(_DTYPE_BYTES)}")
        kinds = config.get("layer_types") or []
        num_without = sum("linear" in kind or "mamba" in kind for kind in kinds)
        num_layers = _first(config, "num_hidden_layers", "n_layer", "num_layers") - num_without
        if config.get("kv_lora_rank"):
            num_values = config["kv_lora_rank"] + config.get("qk_rope_head_dim", 0)
            return cls(num_layers, num_values, _DTYPE_BYTES[name])
        num_heads = _first(config, "num_attention_heads", "n_head")
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        head_dim = config.get("head_dim") or _first(config, "hidden_size", "n_embd") // num_heads
        return cls(num_layers, 2 * num_kv_heads * head_dim, _DTYPE_BYTES[name])


def _first(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ConfigError("--model", f"config.json has no {names[0]}")
