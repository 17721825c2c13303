"""A small model with random weights, equal for equal seeds: to test with, and where no other is."""

from collections.abc import Sequence

import numpy as np

from kvstrata.engine.model import KVGroup, LayerWeights, ModelConfig, Weights
from kvstrata.engine.rows import Array

FULL_16 = (KVGroup(layers=(0, 1), tokens_per_block=16),)


def tiny_config(groups: Sequence[KVGroup] = FULL_16, *, vocab_size: int = 128) -> ModelConfig:
    """Return the shapes of a model with as many layers as the groups name."""
    return ModelConfig(
        name="tiny",
        num_layers=sum(len(group.layers) for group in groups),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_dim=32,
        ffn_dim=64,
        vocab_size=vocab_size,
        groups=tuple(groups),
    )


def tiny_weights(config: ModelConfig, seed: int = 0) -> Weights:
    """Return random weights, large enough that every token of the context sways the next one."""
    random = np.random.default_rng(seed)

    def matrix(inputs: int, outputs: int) -> Array:
        scale = 2.0 / inputs**0.5
        values: Array = (random.standard_normal((inputs, outputs)) * scale).astype(np.float32)
        return values

    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    ones = np.ones(config.hidden_dim, dtype=np.float32)
    return Weights(
        embedding=matrix(config.vocab_size, config.hidden_dim) * np.float32(config.vocab_size**0.5),
        layers=tuple(
            LayerWeights(
                attention_norm=ones,
                qkv=matrix(config.hidden_dim, heads + 2 * kv_heads),
                output=matrix(heads, config.hidden_dim),
                ffn_norm=ones,
                gate_up=matrix(config.hidden_dim, 2 * config.ffn_dim),
                down=matrix(config.ffn_dim, config.hidden_dim),
            )
            for _ in range(config.num_layers)
        ),
        final_norm=ones,
        head=matrix(config.hidden_dim, config.vocab_size),
    )
