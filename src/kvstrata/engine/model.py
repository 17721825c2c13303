"""A Llama-style transformer in numpy whose KV lives in paged blocks: GQA, RoPE, RMSNorm, SwiGLU."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstrata.engine.rows import Array, matmul

ATTENTION_TILE_TOKENS = 128
NULL_BLOCK = 0
"""Stands in a block table where a sliding window has passed; it is never read nor written."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table. `window`: tokens a row sees, its own included; None: all."""

    layers: tuple[int, ...]
    tokens_per_block: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes of the model, and how its layers are grouped for the KV cache."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    groups: tuple[KVGroup, ...]
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if layers != list(range(self.num_layers)):
            raise ValueError("every layer must be in exactly one KV group")

    def block_bytes(self, group: KVGroup) -> int:
        """Return the bytes of one block: keys and values of all layers of its group."""
        token_bytes = 2 * self.num_kv_heads * self.head_dim * np.dtype(np.float32).itemsize
        return len(group.layers) * group.tokens_per_block * token_bytes


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are (inputs, outputs), so that a row of activations stands left of them.

    `qkv` holds queries, keys and values side by side, `gate_up` both halves of the SwiGLU.
    """

    attention_norm: Array
    qkv: Array
    output: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters, float32. `head` is (hidden, vocabulary)."""

    embedding: Array
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head: Array


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of one request's tokens to compute in this step.

    `tables[g]` lists the blocks of group g from the request's first token on; the ones that these
    tokens fall into are there already.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Sequence[int]]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


class PagedKV:
    """The engine's own KV memory: per group one array of blocks, block first.

    `blocks[g]` has the shape (block, layer in group, key or value, token in block, head, channel):
    one block is one dense run of bytes.
    """

    def __init__(self, config: ModelConfig, num_blocks: Sequence[int]) -> None:
        """Allocate `num_blocks[g]` blocks for each group, the null block included."""
        self.config = config
        self.blocks: list[Array] = [
            np.zeros(
                (
                    count,
                    len(group.layers),
                    2,
                    group.tokens_per_block,
                    config.num_kv_heads,
                    config.head_dim,
                ),
                dtype=np.float32,
            )
            for group, count in zip(config.groups, num_blocks, strict=True)
        ]


class Transformer:
    """The model: computes segments, writing their KV into blocks and reading what is before."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Take shapes and weights; neither is changed."""
        self.config = config
        self.weights = weights
        self._place = {
            layer: (index, group.layers.index(layer))
            for index, group in enumerate(config.groups)
            for layer in group.layers
        }
        half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        self._frequencies = config.rope_theta**-half

    def forward(self, segments: Sequence[Segment], kv: PagedKV) -> Array:
        """Compute the segments and return the logits of each one's last token.

        Returns:
            Shape (segments, vocabulary). A row depends on its request's tokens alone, not on how
            they were cut into segments, nor on the other segments.
        """
        config, weights = self.config, self.weights
        positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
        tokens = np.concatenate([np.asarray(s.tokens, dtype=np.int64) for s in segments])
        rotation = self._rotation(positions)
        places = [_places(segments, i, g.tokens_per_block) for i, g in enumerate(config.groups)]
        x = weights.embedding[tokens]
        for layer, w in enumerate(weights.layers):
            group, index = self._place[layer]
            qkv = matmul(rms_norm(x, w.attention_norm, config.norm_eps), w.qkv)
            q, k, v = self._split(qkv, rotation)
            blocks, offsets = places[group]
            kv.blocks[group][blocks, index, 0, offsets] = k
            kv.blocks[group][blocks, index, 1, offsets] = v
            x = x + matmul(self._attend(segments, q, kv, group, index), w.output)
            gate_up = matmul(rms_norm(x, w.ffn_norm, config.norm_eps), w.gate_up)
            gate, up = np.split(gate_up, 2, axis=1)
            x = x + matmul(gate / (1 + np.exp(-gate)) * up, w.down)
        last = np.cumsum([len(s.tokens) for s in segments]) - 1
        return matmul(rms_norm(x[last], weights.final_norm, config.norm_eps), weights.head)

    def _rotation(self, positions: NDArray[np.int64]) -> NDArray[np.complex64]:
        angles = positions[:, None] * self._frequencies
        rotation: NDArray[np.complex64] = np.exp(1j * angles).astype(np.complex64)[:, None]
        return rotation

    def _split(self, qkv: Array, rotation: NDArray[np.complex64]) -> tuple[Array, Array, Array]:
        """Cut rows into heads of queries, keys and values, and rotate the first two."""
        config = self.config
        heads = qkv.reshape(len(qkv), -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        # Neighbouring channels are the two parts of one complex number: GGUF's order for Llama.
        pairs = np.ascontiguousarray(heads[:, :num_rotated]).view(np.complex64)
        rotated = (pairs * rotation).view(np.float32)
        return (
            rotated[:, : config.num_heads],
            rotated[:, config.num_heads :],
            heads[:, num_rotated:],
        )

    def _attend(
        self, segments: Sequence[Segment], q: Array, kv: PagedKV, group: int, index: int
    ) -> Array:
        out = np.empty_like(q)
        row = 0
        for segment in segments:
            rows = slice(row, row + len(segment.tokens))
            window = self.config.groups[group].window
            first = 0 if window is None else max(0, segment.start - window + 1)
            keys, values = gather(
                kv.blocks[group][:, index], segment.tables[group], first, segment.end
            )
            first -= first % ATTENTION_TILE_TOKENS
            out[rows] = attention(q[rows], keys, values, segment.start - first, window)
            row = rows.stop
        return out.reshape(len(q), -1)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale each row to unit mean square, then by `weight`."""
    mean_square = np.sum(x * x, axis=-1, keepdims=True) / np.float32(x.shape[-1])
    scaled: Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return scaled


def _places(
    segments: Sequence[Segment], group: int, tokens_per_block: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return block and offset of every row."""
    blocks, offsets = [], []
    for segment in segments:
        positions = np.arange(segment.start, segment.end)
        blocks.append(np.asarray(segment.tables[group])[positions // tokens_per_block])
        offsets.append(positions % tokens_per_block)
    return np.concatenate(blocks), np.concatenate(offsets)


def gather(layer: Array, table: Sequence[int], first: int, end: int) -> tuple[Array, Array]:
    """Collect keys and values of positions `first` to `end` through the block table.

    Returns:
        Each (tiles * ATTENTION_TILE_TOKENS, heads, channels), beginning at the tile that holds
        `first`. Rows outside `first` to `end` are finite and mean nothing.
    """
    tokens_per_block = layer.shape[2]
    origin = first - first % ATTENTION_TILE_TOKENS
    num_tokens = -(-(end - origin) // ATTENTION_TILE_TOKENS) * ATTENTION_TILE_TOKENS
    out = np.zeros((2, num_tokens, *layer.shape[3:]), dtype=np.float32)
    first_block, last_block = first // tokens_per_block, (end - 1) // tokens_per_block
    blocks = layer[np.asarray(table[first_block : last_block + 1])]
    rows = blocks.swapaxes(0, 1).reshape(2, -1, *layer.shape[3:])
    skipped = first - first_block * tokens_per_block
    out[:, first - origin : end - origin] = rows[:, skipped : skipped + end - first]
    return out[0], out[1]


def attention(q: Array, keys: Array, values: Array, start: int, window: int | None) -> Array:
    """Attend from rows at positions `start`, `start + 1` ... to keys at positions 0, 1 ...

    Keys are handled in tiles of fixed size at fixed positions, added up in order, and a tile that
    is masked out adds exact zeros. So a row's result depends on its own keys alone.

    Args:
        q: Shape (rows, heads, channels).
        keys: Shape (tokens, KV heads, channels), whole tiles.
        values: As `keys`.
        start: Position of the first row.
        window: How many positions a row sees, its own included; None: all up to its own.
    """
    num_rows, num_heads, dim = q.shape
    num_kv_heads = keys.shape[1]
    share = num_heads // num_kv_heads
    tiles = (-1, ATTENTION_TILE_TOKENS, num_kv_heads, dim)
    grouped = q.reshape(num_rows, num_kv_heads, share, dim).transpose(1, 0, 2, 3)
    grouped = grouped.reshape(num_kv_heads, 1, num_rows * share, dim) * np.float32(dim**-0.5)
    scores = matmul(grouped, keys.reshape(tiles).transpose(2, 0, 3, 1))
    seen = _seen(num_rows, start, len(keys), window).repeat(share, axis=1)
    np.copyto(scores, np.float32(-np.inf), where=~seen)
    scores -= scores.max(axis=-1).max(axis=1)[:, None, :, None]
    weights = np.exp(scores, out=scores)
    parts = matmul(weights, values.reshape(tiles).transpose(2, 0, 1, 3))
    totals = weights.sum(axis=-1)
    out, total = parts[:, 0], totals[:, 0]
    for tile in range(1, parts.shape[1]):
        out += parts[:, tile]
        total += totals[:, tile]
    out /= total[..., None]
    out = out.reshape(num_kv_heads, num_rows, share, dim).transpose(1, 0, 2, 3)
    return out.reshape(num_rows, num_heads, dim)


def _seen(num_rows: int, start: int, num_keys: int, window: int | None) -> NDArray[np.bool_]:
    """Return which keys each row sees: shape (tiles, rows, tokens of a tile)."""
    rows = np.arange(start, start + num_rows)[:, None]
    keys = np.arange(num_keys)
    seen = keys <= rows
    if window is not None:
        seen &= keys > rows - window
    return seen.reshape(num_rows, -1, ATTENTION_TILE_TOKENS).swapaxes(0, 1)
