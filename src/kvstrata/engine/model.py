"""A Llama-style transformer in numpy whose KV lives in paged blocks: GQA, RoPE, RMSNorm, SwiGLU."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstrata.engine.attention import ATTENTION_TILE_TOKENS, attention, gather, tile_start
from kvstrata.engine.rows import TILE_ROWS, Array, is_usable_tile, matmul

if TYPE_CHECKING:
    from kvstrata.engine.parallel import Meeting, StepThreads

PART_TOKENS_MIN = 32
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

    def __init__(
        self, config: ModelConfig, weights: Weights, threads: "StepThreads | None" = None
    ) -> None:
        """Take shapes and weights; neither is changed. Without threads the caller's one is used."""
        self.config = config
        self._threads = threads
        self.weights = weights
        self._place = {
            layer: (index, group.layers.index(layer))
            for index, group in enumerate(config.groups)
            for layer in group.layers
        }
        half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        self._frequencies = config.rope_theta**-half
        self._try_tiles()

    def _try_tiles(self) -> None:
        """Try every tile now, so that the first request does not pay for it."""
        dim, tile = self.config.head_dim, ATTENTION_TILE_TOKENS
        w = self.weights.layers[0]
        kinds = [(*m.shape, False) for m in (w.qkv, w.output, w.gate_up, w.down)]
        for k, n, transposed in (*kinds, (dim, tile, True), (tile, dim, False)):
            for height in TILE_ROWS:
                is_usable_tile(k, n, height, transposed=transposed)
        is_usable_tile(*self.weights.head.shape, TILE_ROWS[0], transposed=False)

    def forward(self, segments: Sequence[Segment], kv: PagedKV) -> Array:
        """Compute the segments and return the logits of each one's last token.

        Returns:
            Shape (segments, vocabulary). A row depends on its request's tokens alone, not on how
            they were cut into segments, nor on the other segments.
        """
        if self._threads is None:
            x = self._run(segments, None, kv=kv)
        else:
            parts = cut_into_parts(segments, self._threads.num_threads)
            x = np.concatenate(self._threads.run(parts, partial(self._run, kv=kv)))
        last = np.cumsum([len(s.tokens) for s in segments]) - 1
        normed = rms_norm(x[last], self.weights.final_norm, self.config.norm_eps)
        return matmul(normed, self.weights.head)

    def _run(self, segments: Sequence[Segment], meeting: "Meeting | None", *, kv: PagedKV) -> Array:
        """Compute all layers for segments whose tokens before are being computed elsewhere."""
        config, weights = self.config, self.weights
        positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
        tokens = np.concatenate([np.asarray(s.tokens, dtype=np.int64) for s in segments])
        rotation = self._rotation(positions)
        places = [_places(segments, i, g.tokens_per_block) for i, g in enumerate(config.groups)]
        x: Array = weights.embedding[tokens]
        for layer, w in enumerate(weights.layers):
            group, index = self._place[layer]
            qkv = matmul(rms_norm(x, w.attention_norm, config.norm_eps), w.qkv)
            q, k, v = self._split(qkv, rotation)
            blocks, offsets = places[group]
            kv.blocks[group][blocks, index, 0, offsets] = k
            kv.blocks[group][blocks, index, 1, offsets] = v
            if meeting is not None:
                meeting.wait()  # this layer's keys and values are there, of all parts
            x = x + matmul(self._attend(segments, q, kv, group, index), w.output)
            gate_up = matmul(rms_norm(x, w.ffn_norm, config.norm_eps), w.gate_up)
            gate, up = np.split(gate_up, 2, axis=1)
            x = x + matmul(gate / (1 + np.exp(-gate)) * up, w.down)
        return x

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
            start = segment.start - tile_start(first)
            out[rows] = attention(q[rows], keys, values, start, window)
            row = rows.stop
        return out.reshape(len(q), -1)


def cut_into_parts(segments: Sequence[Segment], num_parts: int) -> list[Sequence[Segment]]:
    """Cut segments into at most `num_parts` lists of about equally many tokens, in order."""
    num_tokens = sum(len(segment.tokens) for segment in segments)
    size = max(PART_TOKENS_MIN, -(-num_tokens // num_parts))
    parts: list[list[Segment]] = [[]]
    room = size
    for segment in segments:
        at = 0
        while at < len(segment.tokens):
            if room == 0:
                parts.append([])
                room = size
            tokens = segment.tokens[at : at + room]
            parts[-1].append(Segment(tokens, segment.start + at, segment.tables))
            at += len(tokens)
            room -= len(tokens)
    return list(parts)


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
