"""Eigenvalues that ranks share: reduction, divide and conquer, reflections, a thread for each rank."""

from __future__ import annotations

import numpy as np
import pytest
from factoring import factor_plan, run_factorization
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import noise
from residuals import assert_eigh
from test_spectral import SPECTRA, hermitian

from dask_distmm.engines import tridiagonal
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.tridiagonal import HostReduction, panel_width, reflector, triangular_factor
from dask_distmm.errors import MatrixError, ProtocolError
from dask_distmm.programs.factorizations import Factorization

DTYPES = ["float32", "float64", "complex64", "complex128"]


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch):
    monkeypatch.setattr(tridiagonal, "_LEAF", 8)


def run(a, ranks, width, **options):
    """Return all results of a matrix of which one triangle is given; inputs stay as they are."""
    problem = Factorization("eigh", a.shape, a.dtype.name, **options)
    before, other = a.copy(), np.full_like(a, np.nan)
    given_matrix = np.tril(a) + np.triu(other, 1) if problem.lower else np.triu(a) + np.tril(other, -1)
    found = run_factorization(factor_plan(problem, ranks, width, shared=True), given_matrix)
    np.testing.assert_array_equal(a, before)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", SPECTRA)
@pytest.mark.parametrize("lower", [True, False])
def test_spectra(dtype, what, lower):
    for n, ranks, width in ((61, 3, 7), (50, 2, 16), (33, 1, 8)):
        a = hermitian(what, n, dtype)
        found = run(a, ranks, width, lower=lower)
        assert_eigh(a, found["w"], found["v"])
        first, last = np.sort(np.random.default_rng().integers(0, n, 2)).tolist()
        some = run(a, ranks, width, lower=lower, subset=(first, last))
        assert_eigh(a, some["w"], some["v"], first=first)
        alone = run(a, ranks, width, lower=lower, vectors=False)["w"]
        assert alone.dtype == found["w"].dtype
        np.testing.assert_allclose(alone, found["w"], rtol=0, atol=n * 30 * np.finfo(dtype).eps * abs(a).max())


def test_block_columns_of_several_narrow_panels():
    for n, ranks, width in ((200, 1, 300), (300, 2, 128), (210, 3, 70)):
        a = hermitian("random", n, "float64")
        found = run(a, ranks, width)
        assert_eigh(a, found["w"], found["v"])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 70), st.sampled_from(DTYPES), st.booleans())
def test_any_order(n, ranks, width, dtype, lower):
    width = min(width, n)
    ranks = min(ranks, -(-n // width))
    a = hermitian("random", n, dtype)
    found = run(a, ranks, width, lower=lower)
    assert_eigh(a, found["w"], found["v"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_diagonal_and_tridiagonal_matrices(dtype):
    """Reflectors that are none, and such that only turn a number."""
    rng = np.random.default_rng()
    for d, e in ((rng.standard_normal(40), np.zeros(39)), (np.zeros(40), rng.standard_normal(39))):
        a = (np.diag(d) + np.diag(e, 1) + np.diag(e, -1)).astype(dtype)
        if a.dtype.kind == "c":
            turn = np.exp(1j * rng.uniform(0, 6, 40)).astype(dtype)
            a = turn[:, None] * a * turn.conj()
            np.fill_diagonal(a, a.diagonal().real)
        found = run(a, 3, 5)
        assert_eigh(a, found["w"], found["v"])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(0, 0), (20, 3), (36, 36), (36, 0)], ids=str)
def test_elements_that_are_no_numbers(ranks, value, at):
    a = hermitian("random", 37, "float64")
    a[at] = a[at[::-1]] = value
    for vectors in (True, False):
        with pytest.raises(MatrixError, match="a must not contain infs or NaNs"):
            run(a, ranks, 5, vectors=vectors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reflectors(dtype):
    rng, eps = np.random.default_rng(), np.finfo(dtype).eps
    for x in (noise(rng, 9, dtype), noise(rng, 1, dtype), np.zeros(5, dtype), noise(rng, 9, dtype) * 1e-30):
        v, tau, beta = reflector(x)
        assert v[0] == 1
        h = np.eye(len(x)) - tau * np.outer(v, v.conj())
        np.testing.assert_allclose(h.conj().T @ h, np.eye(len(x)), atol=20 * eps)
        expected = np.zeros_like(x)
        expected[0] = beta
        # What is below some 1e-30 counts as zero in single precision.
        np.testing.assert_allclose(h.conj().T @ x, expected, atol=20 * eps * np.linalg.norm(x) + 1e-28)


class Alone:
    """There are no other ranks."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 6, 64, 100])
def test_a_reduction_is_a_similarity(dtype, width):
    n, a = 70, hermitian("random", 70, dtype)
    plan = factor_plan(Factorization("eigh", (n, n), dtype), 1, width, shared=True)
    array = np.asfortranarray(a)
    d, e, tau = HostReduction(plan.columns, 0, array, Alone()).reduce()
    q, eps = np.eye(n, dtype="complex128" if a.dtype.kind == "c" else "float64"), np.finfo(dtype).eps
    for column in range(n - 1):
        v = array[column + 1 :, column]
        assert v[0] == 1
        q[:, column + 1 :] -= tau[column] * np.outer(q[:, column + 1 :] @ v, v.conj())
    t = np.diag(d) + np.diag(e, 1) + np.diag(e, -1)
    np.testing.assert_allclose(q.conj().T @ q, np.eye(n), atol=20 * n * eps)
    np.testing.assert_allclose(q.conj().T @ a @ q, t, atol=20 * n * eps * np.linalg.norm(a, 2))
    # And by panels.
    kernels, product = LapackKernels(), np.eye(n, dtype=a.dtype)
    for start in range(0, n - 1, width):
        stop = min(start + width, n - 1)
        v = array[start + 1 :, start:stop]
        rest = product[:, start + 1 :]
        rest -= rest @ v @ triangular_factor(kernels, v, tau[start:stop]) @ v.conj().T
    np.testing.assert_allclose(product, q, atol=20 * n * eps)


def test_triangular_factors_of_reflectors_that_are_none():
    v = np.asfortranarray(np.tril(np.random.default_rng().standard_normal((9, 4)), -1) + np.eye(9, 4))
    tau = 2 / (v**2).sum(axis=0)
    tau[2] = 0
    expected = np.eye(9)
    for at in range(4):
        expected = expected @ (np.eye(9) - tau[at] * np.outer(v[:, at], v[:, at]))
    np.testing.assert_allclose(np.eye(9) - v @ triangular_factor(LapackKernels(), v, tau) @ v.T, expected, atol=1e-14)


@pytest.mark.parametrize(("width", "expected"), [(1, 1), (16, 16), (64, 64), (128, 64), (192, 64), (96, 32), (100, 4)])
def test_widths_of_narrow_panels(width, expected):
    assert panel_width(width) == expected


def test_what_can_not_be_shared():
    for problem in (
        Factorization("svd", (9, 9), "float64"),
        Factorization("eigh", (9, 9), "float64", (9, 9)),
    ):
        with pytest.raises(ProtocolError, match="do not fit 2 ranks"):
            factor_plan(problem, 2, 4, shared=True)
        assert not factor_plan(problem, 1, 4, shared=True).shared
