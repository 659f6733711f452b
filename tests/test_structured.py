"""Banded and Toeplitz matrices are solved as SciPy does, whatever the chunks of right-hand sides are."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import scipy.linalg
from matrices import assert_near

from dask_distmm import PlanError, linalg
from dask_distmm.linalg import MatrixError

N = 97
DTYPES = ("float32", "float64", "complex128")
# Chunks of right-hand sides: along columns, along rows, along both; some of them too short for a part of their own.
CHUNKS = [(N, 2), (30, 5), ((2, 40, 1, 1, 50, 3), 5), (20, 2)]


def noise(shape, dtype):
    rng = np.random.default_rng()
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def matrix_of(ab, lower, upper):
    """Return the matrix of these bands."""
    n = ab.shape[1]
    a = np.zeros((n, n), ab.dtype)
    for i, j in np.ndindex(n, n):
        if -upper <= i - j <= lower:
            a[i, j] = ab[upper + i - j, j]
    return a


def assert_solves(a, x, b):
    """By the backward error."""
    eps = float(np.finfo(b.dtype).eps)
    assert x.dtype == b.dtype
    assert abs(a @ x - b).max() <= 300 * eps * (abs(a) @ abs(x) + abs(b)).max()


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_banded(dtype, chunks):
    for lower, upper in ((1, 1), (0, 3), (2, 0), (0, 0), (4, 2)):
        ab, b = noise((lower + upper + 1, N), dtype), noise((N, 5), dtype)
        ab[upper] += 3
        x = linalg.solve_banded((lower, upper), da.from_array(ab, chunks=20), da.from_array(b, chunks=chunks))
        assert_solves(matrix_of(ab, lower, upper), x.compute(), b)
        vector = linalg.solve_banded([lower, upper], ab, da.from_array(b[:, 0], chunks=chunks[0])).compute()
        assert_near(vector, scipy.linalg.solve_banded((lower, upper), ab, b[:, 0]), rtol=2e-3)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_positive_definite(dtype, chunks):
    """Also one with a condition of 10^6, whose parts are no worse."""
    for bands in (0, 1, 2, 7, 12):
        ab, b = noise((bands + 1, N), dtype), noise((N, 5), dtype)
        ab /= abs(ab).max()
        ab[0] = 2 * bands + 0.1
        ab *= np.geomspace(1, 1e-3, N).astype(b.dtype)
        for d in range(bands + 1):
            # D A D, with a diagonal matrix D.
            ab[d, : N - d] *= np.geomspace(1, 1e-3, N).astype(b.dtype)[d:]
        upper = np.zeros_like(ab)
        for d in range(bands + 1):
            upper[bands - d, d:] = ab[d, : N - d].conj()
        lazy = da.from_array(b, chunks=chunks)
        a = matrix_of(upper, 0, bands)
        a = a + np.triu(a, 1).conj().T
        for x in (
            linalg.solveh_banded(ab, lazy, lower=True),
            linalg.solveh_banded(da.from_array(upper, chunks=9), lazy),
        ):
            assert x.shape == b.shape
            assert_solves(a, x.compute(), b)
        assert linalg.solveh_banded(upper, lazy[:, 0]).compute().shape == (N,)


def test_rows_stay_where_they_are():
    """A part of right-hand sides is read by its own task; what goes from part to part does not depend on rows."""
    ab, b = np.ones((2, 10_000)), da.ones((10_000, 2), chunks=(1000, 2))
    ab[0] = 4
    x = linalg.solveh_banded(ab, b, lower=True)
    assert x.chunks == b.chunks
    (separators,) = (task for key, task in x.dask.items() if "_separators" in str(key))
    assert len(separators.dependencies) == 10
    np.testing.assert_allclose(x.compute()[5000], 1 / 6, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_toeplitz(dtype):
    c, r, b = noise(N, dtype), noise(N, dtype), noise((N, 5), dtype)
    c[0] += 40
    for given in ((c, r), c):
        row = given[1] if isinstance(given, tuple) else c.conj()
        a = scipy.linalg.toeplitz(c, row)
        for chunks in CHUNKS[:2]:
            lazily = tuple(map(da.from_array, given)) if isinstance(given, tuple) else da.from_array(given)
            assert_solves(a, linalg.solve_toeplitz(lazily, da.from_array(b, chunks=chunks)).compute(), b)
    assert linalg.solve_toeplitz(c, b[:, 0]).compute().shape == (N,)


def test_on_a_cluster(inproc_client):
    ab, b = noise((3, 400), "float64"), noise((400, 6), "float64")
    ab[0] += 9
    for chunks in (100, (400, 2)):
        x = linalg.solveh_banded(ab, da.from_array(b, chunks=chunks), lower=True).compute()
        assert_near(x, scipy.linalg.solveh_banded(ab, b, lower=True))


def test_mistakes():
    ab, b = np.ones((3, 10)), np.ones((10, 2))
    for call, message in (
        (
            lambda: linalg.solve_banded((1, 2), ab, b),
            r"ab must have 4 rows, one for each band, got the shape \(3, 10\)",
        ),
        (lambda: linalg.solve_banded(3, ab, b), "l_and_u must be two numbers of diagonals, got 3"),
        (lambda: linalg.solve_banded((1, -1), ab, b), r"l_and_u must be two numbers of diagonals, got \(1, -1\)"),
        (lambda: linalg.solve_banded((1, 1), ab, b[:7]), "b must have 10 rows; it has 7"),
        (lambda: linalg.solveh_banded(ab[0], b), "ab must have .* rows"),
        (lambda: linalg.solve_toeplitz((b[:, 0], b[:5, 0]), b), "as many elements as the first column, 10; got 5"),
    ):
        with pytest.raises(PlanError, match=message):
            call()
    zero, lazy = 0 * ab, da.from_array(b, chunks=(10, 1))
    rows = lazy.rechunk((7, 2))
    for x in (
        linalg.solve_banded((1, 1), zero, lazy),
        linalg.solveh_banded(-ab, lazy),
        linalg.solveh_banded(-ab[:2], rows.rechunk((5, 2))),
        linalg.solve_toeplitz(zero[0], lazy),
    ):
        with pytest.raises(MatrixError, match="singular|positive definite"):
            x.compute()
    bad = da.where(da.arange(10, chunks=5)[:, None] == 3, np.nan, lazy)
    for x in (linalg.solve_banded((1, 1), ab, bad), linalg.solveh_banded(ab, bad), linalg.solve_toeplitz(ab[0], bad)):
        with pytest.raises(MatrixError, match="b must not contain infs or NaNs"):
            x.compute()
    with pytest.raises(MatrixError, match="a must not contain infs or NaNs"):
        linalg.solve_banded((1, 1), ab * np.inf, lazy).compute()
