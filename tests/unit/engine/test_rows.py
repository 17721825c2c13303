import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine.rows import Array, matmul

shapes = st.tuples(st.integers(2, 80), st.integers(2, 80), st.booleans())


def make_product(seed: int, rows: int, k: int, n: int, transposed: bool) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, k), dtype=np.float32)
    w = random.standard_normal((n, k) if transposed else (k, n), dtype=np.float32)
    return x, w.T if transposed else w


@given(shapes, st.integers(1, 300), st.integers(0, 299), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_rows_are_the_same_whichever_rows_are_beside_them(
    shape: tuple[int, int, bool], rows: int, first: int, count: int
) -> None:
    x, w = make_product(rows, 300, *shape)
    together = matmul(x, w)
    assert np.array_equal(matmul(x[first : first + count], w), together[first : first + count])
    assert np.array_equal(matmul(x[:rows], w), together[:rows])


def test_wide_products_are_the_same_row_by_row() -> None:
    for transposed in (False, True):
        x, w = make_product(0, 270, 576, 960, transposed)
        together = matmul(x, w)
        alone = [matmul(x[i : i + 1], w)[0] for i in range(0, 270, 9)]
        assert np.array_equal(np.stack(alone), together[::9])


@given(shapes, st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_products_are_those_of_numpy_but_for_rounding(
    shape: tuple[int, int, bool], rows: int
) -> None:
    x, w = make_product(1, rows, *shape)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    assert np.allclose(matmul(x, w), exact, atol=1e-4)


def test_leading_axes_broadcast() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 1, 21, 8), dtype=np.float32)
    w = random.standard_normal((2, 5, 8, 32), dtype=np.float32)
    result = matmul(x, w)
    assert result.shape == (2, 5, 21, 32)
    assert np.allclose(result, x @ w, atol=1e-5)
