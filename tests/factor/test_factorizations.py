"""Factorizations and solutions by LAPACK's gates, a thread for each rank."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from factoring import factor_plan, run_factorization
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import noise
from residuals import (
    assert_cholesky,
    assert_inverse,
    assert_ldlt,
    assert_least_squares,
    assert_lu,
    assert_pseudoinverse,
    assert_qr,
    assert_solution,
)

from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs import factor
from dask_distmm.errors import MatrixError
from dask_distmm.programs.factor import FACTORED
from dask_distmm.programs.factorizations import Factorization

DTYPES = ["float32", "float64", "complex64", "complex128"]
RANKS = [1, 2, 3, 4, 5, 6, 8]
MATRICES = ["random", "graded", "ill-conditioned", "permuted", "scaled"]


def matrix(rng, shape, dtype, what="random", worst=10):
    """A matrix of full rank, of the kinds that LAPACK's own tests have; `worst` is its least singular value in eps."""
    k = min(shape)
    if what == "random" or not k:
        return noise(rng, shape, dtype)
    if what == "permuted":
        # Its leading blocks are zero: pivots in the diagonal block alone would be.
        found = noise(rng, shape, dtype) * np.finfo(dtype).eps
        found[np.arange(k)[::-1], np.arange(k)] += 1
        return found
    if what == "scaled":
        return noise(rng, shape, dtype) * np.dtype(dtype).type(1e15)
    u, v = (np.linalg.qr(noise(rng, (size, k), "complex128" if dtype[0] == "c" else "float64"))[0] for size in shape)
    least = {"graded": 1e-3, "ill-conditioned": worst * float(np.finfo(dtype).eps)}[what]
    return ((u * np.geomspace(1, least, k)) @ v.conj().T).astype(dtype)


def positive(rng, n, dtype, what="random"):
    a = matrix(rng, (n, n), dtype, "random" if what == "permuted" else what)
    # The squares of singular values must be above the rounding.
    shift = np.linalg.norm(a, 2) ** 2 * 1e-2 if what == "ill-conditioned" and n else 0
    found = a @ a.conj().T + shift * np.eye(n, dtype=dtype) + (np.eye(n, dtype=dtype) if what != "scaled" else 0)
    if what == "scaled" and n:
        found += np.eye(n, dtype=dtype) * np.linalg.norm(found, 1).astype(dtype) / 100
    return ((found + found.conj().T) / 2).astype(dtype)


def run(kind, ranks, width, a, b=None, **options):
    problem = Factorization(kind, a.shape, a.dtype.name, None if b is None else b.shape, **options)
    before = [x.copy() for x in (a, b) if x is not None]
    results = run_factorization(factor_plan(problem, ranks, width), a, b)
    for x, copy in zip((a, b), before, strict=False):
        np.testing.assert_array_equal(x, copy)
    for output in problem.outputs:
        assert results[output.name].shape == output.shape
        assert results[output.name].dtype == output.dtype
    return results


CASES = [*((ranks, "float64", "random") for ranks in RANKS), *itertools.product([3], DTYPES, MATRICES)]


@pytest.mark.parametrize(("ranks", "dtype", "what"), CASES)
@pytest.mark.parametrize("lower", [True, False])
def test_cholesky(ranks, dtype, what, lower):
    rng = np.random.default_rng(ranks)
    for n, width in ((1, 4), (37, 5), (64, 16), (50, 64)):
        a = positive(rng, n, dtype, what)
        # The other triangle is not read.
        given = np.tril(a) + np.triu(np.full_like(a, np.nan), 1) if lower else np.triu(a) + np.tril(a * np.nan, -1)
        assert_cholesky(a, run("cholesky", ranks, width, given, lower=lower)["l" if lower else "u"], lower=lower)


class Device(LapackKernels):
    asynchronous = True


def quasi_definite(rng, n, dtype):
    """A matrix with a positive definite block and a negative definite one, as many eigenvalues of each sign."""
    signs = np.where(np.arange(n) < n - n // 3, 1, -1)
    beside = noise(rng, (n, n), dtype)
    beside = (beside + beside.conj().T) * (signs[:, None] != signs)
    return (beside + positive(rng, n, dtype) * (signs[:, None] == signs) * signs).astype(dtype)


@pytest.mark.parametrize("kernels", [LapackKernels(), Device()], ids=["cpu", "as on gpus"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ldlt(ranks, dtype, kernels):
    rng = np.random.default_rng()
    for n, width in ((1, 4), (37, 5), (64, 16), (50, 64)):
        a = quasi_definite(rng, n, dtype)
        # The other triangle is not read, nor imaginary parts of the diagonal.
        given = np.tril(a) + np.triu(np.full_like(a, np.nan), 1)
        plan = factor_plan(Factorization("ldlt", a.shape, dtype), ranks, width)
        found = run_factorization(plan, given, kernels=kernels)
        assert_ldlt(a, found["l"], found["d"])
        assert (found["d"] > 0).sum() == n - n // 3


@pytest.mark.parametrize("kernels", [LapackKernels(), Device()], ids=["cpu", "as on gpus"])
@pytest.mark.parametrize("at", [0, 20])
def test_ldlt_of_a_matrix_that_needs_pivots(kernels, at):
    a = np.eye(40)
    a[at : at + 2, at : at + 2] = [[0, 1], [1, 0]]
    plan = factor_plan(Factorization("ldlt", a.shape, "float64"), 3, 8)
    with pytest.raises(MatrixError, match=f"element {at} of D is exactly zero.*lu, or by eigh"):
        run_factorization(plan, a, kernels=kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("n", "width"), [(90, 8), (83, 4), (64, 16)])
def test_updates_of_several_block_columns(monkeypatch, dtype, ranks, n, width):
    """As on GPUs: with more or fewer elements above the diagonal, which nobody reads; in fewer calls."""
    a = positive(np.random.default_rng(), n, dtype)
    given = np.tril(a) + np.triu(np.full_like(a, np.nan), 1)
    plan = factor_plan(Factorization("cholesky", a.shape, dtype), ranks, width)
    counts = []
    for beside in (0, 1 / 4, 1):
        calls = []
        monkeypatch.setattr(factor, "_BESIDE", (beside, beside))
        monkeypatch.setattr(Device, "gemm", lambda self, *a, **k: calls.append(a) or LapackKernels.gemm(self, *a, **k))
        assert_cholesky(a, run_factorization(plan, given, kernels=Device())["l"])
        counts.append(len(calls))
    assert counts == sorted(counts, reverse=True)
    assert counts[2] < counts[0] or (n, ranks) in ((64, 2), (64, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", [*MATRICES, "singular"])
def test_panels_that_are_multiplied_by_inverses(monkeypatch, dtype, what):
    """As on GPUs, if they have many rows."""
    rows, rng, solve = [], np.random.default_rng(), LapackKernels.trsm
    monkeypatch.setattr(factor, "_ROWS", 30)
    monkeypatch.setattr(factor, "_INVERTED", 8)
    monkeypatch.setattr(Device, "trsm", lambda self, a, b, **how: rows.append(len(b)) or solve(self, a, b, **how))
    if what == "singular":
        x = noise(rng, (100, 40), dtype)
        a = x @ x.conj().T
        a += np.eye(100, dtype=dtype) * np.linalg.norm(a, 2) * 100 * np.finfo(dtype).eps
    else:
        a = positive(rng, 100, dtype, what)
    plan = factor_plan(Factorization("cholesky", a.shape, dtype), 2, 16)
    assert_cholesky(a, run_factorization(plan, np.tril(a), kernels=Device())["l"])
    assert max(rows) < 30


@pytest.mark.parametrize("columns", [1, 70])
@pytest.mark.parametrize("ranks", [2, 3])
def test_solutions_with_updates_of_several_block_columns(ranks, columns):
    """Some ranks have right-hand sides alone in the end."""
    rng = np.random.default_rng()
    a, b = positive(rng, 90, "float64"), noise(rng, (90, columns), "float64")
    plan = factor_plan(Factorization("solve", a.shape, "float64", b.shape, assume_a="pos"), ranks, 8)
    assert_solution(a, run_factorization(plan, a, b, kernels=Device())["x"], b)


@pytest.mark.parametrize("shape", [(90, 90), (120, 70), (70, 120)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_that_are_picked_all_at_once(shape, ranks):
    """As on GPUs, in place of the swaps of one panel after the other: the results are the same."""
    a = noise(np.random.default_rng(), shape, "float64")
    plan = factor_plan(Factorization("lu", a.shape, "float64"), ranks, 8)
    found, expected = run_factorization(plan, a, kernels=Device()), run_factorization(plan, a)
    assert_lu(a, found["l"], found["u"], found["p"])
    np.testing.assert_array_equal(found["piv"], expected["piv"])
    for name in ("l", "lu"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reflections_in_parts(monkeypatch, dtype):
    monkeypatch.setattr(factor, "_DEPTH", 16)
    monkeypatch.setattr(factor, "_WIDE", 20)
    a = noise(np.random.default_rng(), (130, 70), dtype)
    found = run_factorization(factor_plan(Factorization("qr", a.shape, dtype), 2, 8), a, kernels=Device())
    assert_qr(a, found["q"], found["r"])


@pytest.mark.parametrize("name", ["cholesky", "lu", "qr"])
def test_short_updates(name):
    """An update is short from some number of columns down, whatever the number of rows is."""
    assert FACTORED[name].is_short(4096, 512)
    assert not FACTORED[name].is_short(65536, 16384)


@pytest.mark.parametrize(("ranks", "dtype", "what"), CASES)
@pytest.mark.parametrize("shape", [(40, 40), (61, 33), (33, 61)], ids=str)
def test_lu(ranks, dtype, what, shape):
    rng = np.random.default_rng(ranks)
    for width in (1, 7, 16, 64):
        a = matrix(rng, shape, dtype, what)
        found = run("lu", ranks, width, a)
        assert_lu(a, found["l"], found["u"], found["p"])
        k = min(shape)
        np.testing.assert_array_equal(np.tril(found["lu"], -1)[:, :k], np.tril(found["l"], -1))
        np.testing.assert_array_equal(np.triu(found["lu"])[:k], found["u"])
        rows = np.arange(len(a))
        for i, other in enumerate(found["piv"].tolist()):
            rows[[i, other]] = rows[[other, i]]
        np.testing.assert_array_equal(np.argsort(rows), found["p"])


@pytest.mark.parametrize(("ranks", "dtype", "what"), CASES)
@pytest.mark.parametrize("shape", [(40, 40), (61, 33), (33, 61)], ids=str)
def test_qr(ranks, dtype, what, shape):
    rng = np.random.default_rng(ranks)
    for width in (1, 7, 16, 64):
        a = matrix(rng, shape, dtype, what)
        for mode in ("reduced", "complete"):
            found = run("qr", ranks, width, a, mode=mode)
            assert_qr(a, found["q"], found["r"])
            alone = run("qr", ranks, width, a, mode="r")["r"]
            np.testing.assert_array_equal(alone, found["r"][: min(shape)])


def written(a, op):
    return {"N": a, "T": a.T, "C": a.conj().T}[op]


@pytest.mark.parametrize(("ranks", "dtype", "what"), CASES)
@pytest.mark.parametrize("op", "NTC")
def test_solve(ranks, dtype, what, op):
    rng = np.random.default_rng(ranks)
    for n, width, nrhs in ((37, 5, 1), (64, 16, 20), (30, 64, 3)):
        a, b = matrix(rng, (n, n), dtype, what), noise(rng, (n, nrhs), dtype)
        assert_solution(written(a, op), run("solve", ranks, width, a, b, op=op)["x"], b)
        a = positive(rng, n, dtype, what)
        for lower in (True, False):
            given = np.tril(a) if lower else np.triu(a)
            x = run("solve", ranks, width, given, b, op=op, lower=lower, assume_a="pos")["x"]
            assert_solution(written(a, op), x, b)


@pytest.mark.parametrize("op", "NTC")
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize(("ranks", "dtype"), [*((ranks, "float64") for ranks in RANKS), *((3, x) for x in DTYPES)])
def test_solve_triangular(ranks, dtype, right, lower, op):
    rng = np.random.default_rng(ranks)
    for (n, width, nrhs), unit in itertools.product(((37, 5, 1), (64, 16, 20), (30, 64, 3)), (True, False)):
        given = noise(rng, (n, n), dtype) / n + np.eye(n, dtype=dtype)
        a = (np.tril if lower else np.triu)(given)
        if unit:
            np.fill_diagonal(a, 1)
        b = noise(rng, (nrhs, n) if right else (n, nrhs), dtype)
        x = run("solve_triangular", ranks, width, given, b, lower=lower, op=op, unit_diagonal=unit, right=right)["x"]
        if right:
            assert_solution(written(a, op).T, x.T, b.T)
        else:
            assert_solution(written(a, op), x, b)


@pytest.mark.parametrize(("ranks", "dtype", "what"), CASES)
def test_inverse_and_determinant(ranks, dtype, what):
    rng = np.random.default_rng(ranks)
    for n, width in ((1, 4), (37, 5), (50, 64)):
        a = matrix(rng, (n, n), dtype, what)
        if what != "ill-conditioned":
            assert_inverse(a, run("inv", ranks, width, a)["x"])
        found, expected = run("slogdet", ranks, width, a), np.linalg.slogdet(a)
        eps = n * 100 * np.finfo(dtype).eps * (np.linalg.cond(a) if what != "permuted" else 1)
        np.testing.assert_allclose(found["logdet"], expected.logabsdet, rtol=eps, atol=eps)
        np.testing.assert_allclose(found["sign"], expected.sign, atol=eps)
        if n < 50 and what != "scaled":
            expected = np.linalg.det(a)
            np.testing.assert_allclose(run("det", ranks, width, a)["det"], expected, atol=eps * abs(expected))
        a = positive(rng, n, dtype, what)
        assert_inverse(a, run("inv", ranks, width, np.triu(a), assume_a="pos", lower=False)["x"])


@pytest.mark.parametrize(("ranks", "dtype", "what"), CASES)
@pytest.mark.parametrize("shape", [(40, 40), (61, 33), (33, 61)], ids=str)
def test_least_squares(ranks, dtype, what, shape):
    rng = np.random.default_rng(ranks)
    for width in (7, 64):
        # Not so near to a lower rank that it would be refused.
        a, b = matrix(rng, shape, dtype, what, worst=10**4), noise(rng, (shape[0], 5), dtype)
        found = run("lstsq", ranks, width, a, b)
        assert_least_squares(a, found["x"], b)
        if shape[0] >= shape[1]:
            residuals = np.linalg.norm(b - a @ found["x"], axis=0) ** 2
            np.testing.assert_allclose(found["residuals"][0], residuals, rtol=1e-3, atol=1e-2)
        if what != "ill-conditioned":
            assert_pseudoinverse(a, run("pinv", ranks, width, a)["x"])


@given(
    st.sampled_from(["cholesky", "ldlt", "lu", "qr", "solve", "lstsq"]),
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(0, 9),
    st.integers(1, 8),
    st.integers(1, 60),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_any_shape(kind, m, n, nrhs, ranks, width, dtype, seed):
    rng = np.random.default_rng(seed)
    a, b = matrix(rng, (m, n), dtype), noise(rng, (m, nrhs), dtype)
    if kind == "cholesky":
        a = positive(rng, m, dtype)
        assert_cholesky(a, run(kind, ranks, width, a)["l"])
    elif kind == "ldlt":
        a = quasi_definite(rng, m, dtype)
        assert_ldlt(a, *run(kind, ranks, width, a).values())
    elif kind == "lu":
        found = run(kind, ranks, width, a)
        assert_lu(a, found["l"], found["u"], found["p"])
    elif kind == "qr":
        found = run(kind, ranks, width, a)
        assert_qr(a, found["q"], found["r"])
    elif kind == "solve":
        a = positive(rng, m, dtype)
        assert_solution(a, run(kind, ranks, width, a, b)["x"], b)
    else:
        a[: min(m, n), : min(m, n)] += 20 * np.eye(min(m, n), dtype=dtype)
        assert_least_squares(a, run(kind, ranks, width, a, b)["x"], b)


@pytest.mark.parametrize("ranks", [1, 3])
def test_sizes_of_zero(ranks):
    none, tall, wide = np.zeros((0, 0)), np.zeros((3, 0)), np.zeros((0, 3))
    assert run("cholesky", ranks, 4, none)["l"].shape == (0, 0)
    assert run("solve", ranks, 4, none, np.zeros((0, 2)))["x"].shape == (0, 2)
    assert run("solve", ranks, 4, np.eye(3), np.zeros((3, 0)))["x"].shape == (3, 0)
    assert run("inv", ranks, 4, none)["x"].shape == (0, 0)
    assert run("det", ranks, 4, none) == {"det": 1}
    assert run("slogdet", ranks, 4, none) == {"sign": 1, "logdet": 0}
    for a in (none, tall, wide):
        assert run("lu", ranks, 4, a)["u"].shape == (0, a.shape[1])
        np.testing.assert_array_equal(run("lu", ranks, 4, a)["p"], np.arange(len(a)))
        np.testing.assert_array_equal(run("qr", ranks, 4, a, mode="complete")["q"], np.eye(len(a)))
        assert run("pinv", ranks, 4, a)["x"].shape == a.shape[::-1]
    np.testing.assert_array_equal(run("lstsq", ranks, 4, wide, np.zeros((0, 2)))["x"], np.zeros((3, 2)))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("minor", [1, 2, 20, 21, 37])
def test_not_positive_definite(ranks, minor):
    a = np.eye(37)
    a[minor - 1, minor - 1] = 0 if minor % 2 else -1
    for kind, b in (("cholesky", None), ("solve", np.ones((37, 2)))):
        options = {"assume_a": "pos"} if b is not None else {}
        with pytest.raises(MatrixError, match=f"leading minor of order {minor} is not positive") as caught:
            run(kind, ranks, 4, a, b, **options)
        assert isinstance(caught.value, np.linalg.LinAlgError)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_singular(ranks, dtype):
    rng = np.random.default_rng(ranks)
    a = noise(rng, (30, 30), dtype)
    a[:, 17] = 0
    found = run("lu", ranks, 4, a)
    assert_lu(a, found["l"], found["u"], found["p"])
    found = run("qr", ranks, 4, a)
    assert_qr(a, found["q"], found["r"])
    for kind, b in (("solve", noise(rng, (30, 2), dtype)), ("inv", None)):
        with pytest.raises(MatrixError, match="singular: diagonal element 17"):
            run(kind, ranks, 4, a, b)
    with pytest.raises(MatrixError, match="column 17 depends"):
        run("pinv", ranks, 4, a)
    found = run("slogdet", ranks, 4, a)
    assert found["sign"] == 0
    assert found["logdet"] == -np.inf
    assert run("det", ranks, 4, a)["det"] == 0
    triangle = np.tril(noise(rng, (30, 30), dtype)) + 5 * np.eye(30, dtype=dtype)
    triangle[5, 5] = 0
    with pytest.raises(MatrixError, match="element 5"):
        run("solve_triangular", ranks, 4, triangle, noise(rng, (30, 2), dtype))


def test_a_dependent_column_is_no_full_rank():
    rng = np.random.default_rng()
    a = rng.standard_normal((60, 20))
    a[:, 13] = a[:, :13] @ rng.standard_normal(13)
    with pytest.raises(MatrixError, match="column 13 depends on those before it"):
        run("lstsq", 3, 4, a, np.ones((60, 1)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("at", [(0, 0), (20, 3), (36, 36), slice(None)], ids=str)
def test_nan_is_never_a_hang(ranks, value, at):
    """As with NumPy, an error or NaN: no number that looks like a result."""
    rng = np.random.default_rng(ranks)
    a = positive(rng, 37, "float64")
    a[at] = value
    a = (a + a.T) / 2
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        for kind, options in (
            ("cholesky", {}),
            ("lu", {}),
            ("qr", {}),
            ("solve", {}),
            ("solve", {"assume_a": "pos"}),
            ("inv", {}),
            ("slogdet", {}),
            ("pinv", {}),
        ):
            b = np.ones((37, 3)) if kind == "solve" else None
            try:
                found = run(kind, ranks, 5, a, b, **options)
            except MatrixError:
                continue
            numbers = [x for x in found.values() if x.dtype.kind == "f"]
            # One divided by infinity is zero, and so may a solution be.
            finite = all(np.isfinite(x).all() for x in numbers)
            assert not finite or value == np.inf, f"{kind} of {value} looks like a result"


def test_a_rank_that_fails_ends_the_others():
    a = -np.eye(40)
    with pytest.raises(MatrixError, match="order 1 "):
        run("cholesky", 4, 4, a)


def test_known_cases():
    """By hand: pivots come from the whole column."""
    a = np.array([[0.0, 2, 1], [1, 1, 0], [4, 0, 2]])
    found = run("lu", 2, 1, a)
    np.testing.assert_array_equal(found["p"], [1, 2, 0])
    np.testing.assert_array_equal(found["piv"], [2, 2, 2])
    np.testing.assert_array_equal(found["l"], [[1, 0, 0], [0, 1, 0], [0.25, 0.5, 1]])
    np.testing.assert_array_equal(found["u"], [[4, 0, 2], [0, 2, 1], [0, 0, -1]])
    determinant = run("slogdet", 2, 1, a)
    assert determinant["sign"] == -1
    assert np.isclose(determinant["logdet"], np.log(8))
