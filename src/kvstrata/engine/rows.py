"""Multiply matrices so that a row of the result never depends on the rows beside it.

A request's rows are computed beside other requests' rows, in larger and smaller prefill chunks, one
at a time while decoding. A BLAS picks kernels by shape, so the same row can round differently from
call to call, and a rounding difference in KV can change a token much later. An engine that promises
the same tokens whether a block was computed or loaded has to exclude that.

So every call is cut into tiles of few fixed heights. Before a kind of product is used for the first
time its tiles are tried: heights whose rows are not bit for bit those of the reference tile, at
every position in the tile, are not used.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

REFERENCE_ROWS = 16
TILE_ROWS = (256, 64, 32, 16, 8, 4)


def matmul(x: Array, w: Array) -> Array:
    """Return `x @ w` in float32, row by row independent of the other rows of `x`.

    Args:
        x: Shape (..., rows, k); the leading axes broadcast as in numpy.
        w: Shape (..., k, n), or such a view of a transposed array.
    """
    rows, k = x.shape[-2:]
    n = w.shape[-1]
    lead = np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    out = np.empty((*lead, rows, n), dtype=np.float32)
    at = 0
    for height in usable_tiles(k, n, transposed=w.strides[-1] != w.itemsize):
        while rows - at >= height:
            np.matmul(x[..., at : at + height, :], w, out=out[..., at : at + height, :])
            at += height
    if at < rows:  # only fewer rows than the lowest tile are left
        padded = np.zeros((*x.shape[:-2], height, k), dtype=np.float32)
        padded[..., : rows - at, :] = x[..., at:, :]
        out[..., at:, :] = np.matmul(padded, w)[..., : rows - at, :]
    return out


@cache
def usable_tiles(k: int, n: int, *, transposed: bool) -> tuple[int, ...]:
    """Return the tile heights, highest first, that agree for products of this kind.

    Single rows are the answer where even the reference tile depends on positions.
    """
    random = np.random.default_rng(k * 65537 + n)
    x = random.standard_normal((REFERENCE_ROWS, k), dtype=np.float32)
    w = random.standard_normal((n, k) if transposed else (k, n), dtype=np.float32)
    w = w.T if transposed else w
    expected = x @ w
    if not _agrees(REFERENCE_ROWS, x, w, expected):
        return (1,)
    return tuple(height for height in TILE_ROWS if _agrees(height, x, w, expected))


def _agrees(height: int, x: Array, w: Array, expected: Array) -> bool:
    """Say whether each row of `x` gives its expected row at other positions in a tile."""
    for shift in range(0, REFERENCE_ROWS, min(height, 5)):
        order = (np.arange(height) + shift) % REFERENCE_ROWS
        if not np.array_equal(x[order] @ w, expected[order]):
            return False
    return True
