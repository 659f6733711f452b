"""Factorizations by pulls over the stand-ins: block columns, panels and flags in others' memory. LAPACK solves."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import scipy.linalg
from conformance import random_matrix
from factoring import planned, run_plan
from lapack_kernels import QueuedKernels
from residuals import assert_cholesky, assert_eig, assert_ldlt, assert_lu, assert_qr, assert_schur, assert_solution

from dask_distmm.config import read_options
from dask_distmm.errors import MatrixError
from dask_distmm.programs.factorizations import Factorization
from dask_distmm.programs.refine import WAY


@pytest.fixture
def matrix():
    rng = np.random.default_rng()
    return lambda *shape: random_matrix(rng, shape, np.dtype(np.float64), "C")


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_cholesky(factorize, matrix, nranks, lower, monkeypatch):
    monkeypatch.setattr(sys.modules["dask_distmm.engines.peer.transport"], "_QUEUED", 1)
    a = matrix(90, 90)
    a = a @ a.T + np.eye(90)
    (factor,) = factorize("cholesky", nranks, a, lower=lower).values()
    assert_cholesky(a, factor, lower=lower)
    if lower:
        signs = np.where(np.arange(90) < 60, 1.0, -1.0)
        a = a * np.where(signs[:, None] == signs, signs, 0.1)
        assert_ldlt(a, *factorize("ldlt", nranks, a).values())


@pytest.mark.parametrize("shape", [(90, 90), (120, 70), (70, 120)])
def test_lu_and_qr(factorize, matrix, shape):
    a = matrix(*shape)
    found = factorize("lu", 3, a)
    assert_lu(a, found["l"], found["u"], found["p"][0])
    found = factorize("qr", 3, a)
    assert_qr(a, found["q"], found["r"])
    assert any(job.exchange.pulled_bytes for job in factorize.ranks.jobs[-3:])


@pytest.mark.parametrize("nrhs", [1, 40])
def test_chunks_of_workers_that_offer_nothing(factorize, matrix, nrhs):
    factorize.ranks.silent.add("s0")
    a, b = matrix(80, 80), matrix(80, nrhs)
    assert_solution(a, factorize("solve", 2, a, b, sources=1)["x"], b)
    assert_solution(a, factorize("solve", 2, a, b, host=True)["x"], b)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("assume_a", ["gen", "pos"])
@pytest.mark.parametrize("factor_dtype", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize(("nranks", "nrhs", "condition"), [(1, 3, 10), (3, 3, 10), (2, 40, 10), (3, 3, 1e13)])
def test_solutions_refined_with_factors_of_few_bits(factorize, nranks, nrhs, condition, factor_dtype, assume_a, dtype):
    factorize.ranks.silent.add("s0")
    rng = np.random.default_rng()
    u, v = (np.linalg.qr(random_matrix(rng, (90, 90), np.dtype(dtype), "C"))[0] for _ in range(2))
    a = (u * np.geomspace(1, 1 / condition, 90)) @ (u if assume_a == "pos" else v).conj().T
    a = (a + a.conj().T) / 2 if assume_a == "pos" else a
    b = random_matrix(rng, (90, nrhs), np.dtype(dtype), "C")
    given = a * np.tri(90) if assume_a == "pos" else a
    found = factorize("solve", nranks, given, b, sources=1, factor_dtype=factor_dtype, assume_a=assume_a)
    assert_solution(a, found["x"], b)
    assert (found["info"][0, WAY] == 2) == (condition > 10)


@pytest.mark.parametrize("nrhs", [1, 40])
def test_solutions_refined_with_factors_that_are_given(factorize, matrix, nrhs):
    a, b = matrix(90, 90), matrix(90, nrhs)
    factors, pivots = scipy.linalg.lu_factor(a.astype(np.float32))
    task = Factorization("solve", a.shape, "float64", b.shape, factor_dtype="float32", has_factors=True)
    plan = planned(task, 3, engine="peer", options=read_options(), array="cupy", method="columns")
    assert_solution(a, run_plan(factorize.ranks, plan, a, pivots[None], factors, b)["x"], b)


@pytest.mark.parametrize("factor_dtype", ["tf32", "bfloat16"])
@pytest.mark.parametrize("nranks", [1, 3])
def test_factors_of_few_bits(factorize, matrix, nranks, factor_dtype):
    a = matrix(90, 90).astype(np.float32) + 20 * np.eye(90, dtype=np.float32)
    found = factorize("lu", nranks, a, factor_dtype=factor_dtype)
    error = abs((found["l"] @ found["u"])[found["p"][0]] - a).max() / abs(a).max()
    eps = {"tf32": 2.0**-11, "bfloat16": 2.0**-8}[factor_dtype]
    assert eps / 100 < error < 10 * eps


@pytest.mark.parametrize("minor", [1, 20, 50])
def test_all_ranks_name_the_first_minor(factorize, minor, monkeypatch):
    """Also where calls are asynchronous, so that all panels after a wrong one are made, and are wrong."""
    monkeypatch.setattr(QueuedKernels, "asynchronous", True)
    a = np.eye(90)
    a[minor - 1 :] *= -1
    for _ in range(5):
        with pytest.raises(MatrixError, match=f"leading minor of order {minor} is not positive"):
            factorize("cholesky", 3, a)


def test_kernels_that_wait_for_a_panel_end_with_the_run(factorize, matrix, monkeypatch):
    made, potrf = itertools.count(), QueuedKernels.potrf

    def failing(self, a):
        if next(made) == 3:
            raise ArithmeticError("a GPU is broken")
        return potrf(self, a)

    monkeypatch.setattr(QueuedKernels, "potrf", failing)
    a = matrix(90, 90)
    with pytest.raises(ArithmeticError, match="broken"):
        factorize("cholesky", 3, a @ a.T + np.eye(90))


@pytest.mark.parametrize("nranks", [1, 3])
def test_what_one_rank_makes_of_a_whole_matrix(factorize, matrix, nranks):
    a = matrix(90, 90)
    found = factorize("eig", nranks, a, left=True)
    assert_eig(a, found["w"][0], found["v"], found["vl"])
    found = factorize("schur", nranks, a)
    assert_schur(a, found["t"], found["z"])
    root = factorize("sqrtm", nranks, a)["x"]
    np.testing.assert_allclose(root @ root, a, atol=1e-9)
    logarithm = factorize("logm", nranks, a)["x"]
    np.testing.assert_allclose(scipy.linalg.expm(logarithm), a, atol=1e-9)
    with pytest.raises(MatrixError, match="has no logarithm"):
        factorize("logm", nranks, 0 * a)
