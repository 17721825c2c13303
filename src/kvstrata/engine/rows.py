"""Multiply matrices so that a row of the result never depends on the rows beside it.

A request's rows are computed beside other requests' rows, in larger and smaller prefill chunks, one
at a time while decoding. A BLAS picks kernels by shape, so the same row can round differently from
call to call, and a rounding difference in KV can change a token much later. An engine that promises
the same tokens whether a block was computed or loaded has to exclude that.

So every call is cut into tiles of few fixed heights. Before a kind of product is used for the first
time its tiles are tried: heights whose rows are not bit for bit those of the reference tile, at
every position in the tile, are not used.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

REFERENCE_ROWS = 16
TILE_ROWS = (4, 8, 16, 32, 64, 128, 256)
PADDED_SHARE_MIN = 0.6


def matmul(x: Array, w: Array) -> Array:
    """Return `x @ w` in float32, row by row independent of the other rows of `x`.

    Args:
        x: Shape (..., rows, k); the leading axes broadcast as in numpy.
        w: Shape (..., k, n), or such a view of a transposed array.
    """
    rows, k = x.shape[-2:]
    n = w.shape[-1]
    is_usable = partial(is_usable_tile, k, n, transposed=w.strides[-1] != w.itemsize)
    lead = np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    out = np.empty((*lead, rows, n), dtype=np.float32)
    at = 0
    while at < rows:
        height = _next_height(rows - at, is_usable)
        count = min(height, rows - at)
        part = x[..., at : at + count, :]
        if count == height:
            np.matmul(part, w, out=out[..., at : at + count, :])
        else:
            padded = np.zeros((*x.shape[:-2], height, k), dtype=np.float32)
            padded[..., :count, :] = part
            out[..., at : at + count, :] = np.matmul(padded, w)[..., :count, :]
        at += count
    return out


def _next_height(rows: int, is_usable: Callable[[int], bool]) -> int:
    """Choose a tile for the next of so many rows: a pass over the matrix costs some rows, too."""
    above = next((h for h in TILE_ROWS if h >= rows and is_usable(h)), None)
    if above is not None and rows > PADDED_SHARE_MIN * above:
        return above
    below = next((h for h in reversed(TILE_ROWS) if h < rows and is_usable(h)), None)
    return below or above or 1


@cache
def is_usable_tile(k: int, n: int, height: int, *, transposed: bool) -> bool:
    """Say whether tiles of this height give the rows of the reference tile, at every position.

    Where even the reference tile depends on positions none is usable, and rows go one by one.
    """
    random = np.random.default_rng(k * 65537 + n)
    x = random.standard_normal((REFERENCE_ROWS, k), dtype=np.float32)
    w = random.standard_normal((n, k) if transposed else (k, n), dtype=np.float32)
    w = w.T if transposed else w
    expected = x @ w
    shifts = (0, 5) if height >= REFERENCE_ROWS else range(0, REFERENCE_ROWS, height)
    orders = [(np.arange(height) + shift) % REFERENCE_ROWS for shift in shifts]
    if not all(np.array_equal(x[order] @ w, expected[order]) for order in orders):
        return False
    return height == REFERENCE_ROWS or is_usable_tile(k, n, REFERENCE_ROWS, transposed=transposed)
