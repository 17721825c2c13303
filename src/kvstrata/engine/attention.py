"""Attention over paged blocks, in tiles of fixed size at fixed positions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstrata.engine.rows import Array, matmul

ATTENTION_TILE_TOKENS = 128


def tile_start(position: int) -> int:
    """Return where the tile of a position begins."""
    return position - position % ATTENTION_TILE_TOKENS


def gather(layer: Array, table: Sequence[int], first: int, end: int) -> tuple[Array, Array]:
    """Collect keys and values of positions `first` to `end` through the block table.

    Returns:
        Each (tiles * ATTENTION_TILE_TOKENS, heads, channels), beginning at the tile that holds
        `first`. Rows outside `first` to `end` are finite and mean nothing.
    """
    tokens_per_block = layer.shape[2]
    origin = tile_start(first)
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
