"""The kernels of factorizations on CPUs: in place, on parts of matrices, and nowhere else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matrices import noise

from dask_distmm.engines.numpy.lapack import LapackKernels

K = LapackKernels()
DTYPES = ["float32", "float64", "complex64", "complex128"]


class Guarded:
    """A part of a larger matrix; what is around it must stay as it is."""

    def __init__(self, values):
        self.around = np.full((values.shape[0] + 4, values.shape[1] + 4), 7, values.dtype, order="F")
        self.part = self.around[2:-2, 2:-2]
        self.part[...] = values

    def __enter__(self):
        return self.part

    def __exit__(self, *error):
        self.part[...] = 7
        assert (self.around == 7).all(), "written outside of the part"


def close(found, expected, dtype=None):
    eps = np.finfo(dtype or found.dtype).eps
    np.testing.assert_allclose(found, expected, rtol=0, atol=200 * eps * max(1, np.abs(expected).max(initial=0)))


def written(a, op):
    return {"N": a, "T": a.T, "C": a.conj().T}[op]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", "CF")
def test_gemm(dtype, order):
    rng = np.random.default_rng()
    for op_a, op_b, (m, n, k) in itertools.product("NTC", "NTC", [(5, 6, 7), (1, 3, 1), (4, 0, 2), (3, 4, 0)]):
        a, b = (noise(rng, shape, dtype) for shape in ((m, k), (k, n)))
        a = np.array(a if op_a == "N" else written(a, op_a), order=order)
        b = np.array(b if op_b == "N" else written(b, op_b), order=order)
        product = written(a, op_a) @ written(b, op_b)
        c = noise(rng, (m, n), dtype)
        for alpha, beta, expected in ((1, 0, product), (-1, 1, c - product), (1, 1, c + product)):
            with Guarded(np.full_like(c, np.nan) if beta == 0 else c) as part:
                K.gemm(a, b, part, op_a, op_b, alpha=alpha, beta=beta)
                close(part.copy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_herk(dtype):
    rng = np.random.default_rng()
    a, c = noise(rng, (6, 4), dtype), noise(rng, (6, 6), dtype)
    c = c + c.conj().T
    for alpha in (-1, 1):
        with Guarded(c) as part:
            K.herk(Guarded(a).part, part, alpha=alpha)
            close(np.tril(part), np.tril(c + alpha * a @ a.conj().T))
            np.testing.assert_array_equal(np.triu(part, 1), np.triu(c, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("op", "NTC")
def test_trsm(dtype, right, lower, unit, op):
    rng, n = np.random.default_rng(), 5 if unit else 150
    a = noise(rng, (n, n), dtype) / n + 2 * np.eye(n, dtype=dtype)
    b = noise(rng, (3, n) if right else (n, 3), dtype)
    triangle = (np.tril if lower else np.triu)(a)
    if unit:
        np.fill_diagonal(triangle, 1)
    with Guarded(b) as part:
        K.trsm(Guarded(a).part, part, right=right, lower=lower, op=op, unit=unit)
        solved = part.copy()
        close(solved @ written(triangle, op) if right else written(triangle, op) @ solved, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_factorizations(dtype):
    rng = np.random.default_rng()
    for m, n in ((9, 4), (4, 4), (4, 9), (1, 1), (300, 150)):
        a = noise(rng, (m, n), dtype)
        k = min(m, n)
        with Guarded(a) as part:
            pivots = K.getrf(part)
            found, swapped = part.copy(), a.copy()
        assert pivots.dtype == np.int32
        assert pivots.shape == (k,)
        with Guarded(swapped) as part:
            K.laswp(part, pivots)
            swapped = part.copy()
        close((np.tril(found, -1)[:, :k] + np.eye(m, k)) @ np.triu(found)[:k], swapped, dtype)
        if m >= n:
            with Guarded(a) as part:
                t = K.geqrt(part)
                v = np.tril(part, -1) + np.eye(m, n)
                r = np.triu(part)[:n]
            np.testing.assert_array_equal(np.tril(t, -1), 0)
            q = np.eye(m) - v @ t @ v.conj().T
            close(q[:, :n] @ r, a, dtype)
            close(q.conj().T @ q, np.eye(m), dtype)
    s = noise(rng, (6, 6), dtype)
    s = s @ s.conj().T + np.eye(6)
    s = s.astype(dtype)
    with Guarded(s) as part:
        assert K.potrf(part) == 0
        lower = np.tril(part)
        close(lower @ lower.conj().T, s)
    s[3, 3] = -1
    with Guarded(s) as part:
        assert K.potrf(part) == 4


def test_triangles_and_distances():
    a = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    np.testing.assert_array_equal(K.triangle(a, lower=True, unit=False), np.tril(a))
    np.testing.assert_array_equal(K.triangle(a, lower=False, unit=True)[:, :3].diagonal(), 1)
    np.testing.assert_array_equal(K.diagonal(a), [0, 5, 10])
    lower = np.array([[3, np.nan], [3 + 4j, 0.5]], order="F")
    assert K.distance(lower) == (3 - 1) ** 2 + 2 * 25 + 0.5**2


@pytest.mark.parametrize("rows", [1, 5, 128, 512, 4096, 5000])
def test_columns_do_not_compete_for_a_line_of_the_cache(rows):
    a = K.empty((rows, 3), np.dtype("float64"))
    assert a.shape == (rows, 3)
    assert a.strides[0] == 8
    assert a.strides[1] % 64 == 0
    assert rows * 8 < 1024 or a.strides[1] % 1024


def test_rows_that_are_not_contiguous_are_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        K.potrf(np.eye(4)[::2, ::2])
