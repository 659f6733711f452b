"""Linear algebra on Dask arrays: without a cluster, and on worker processes; by LAPACK's gates."""

from __future__ import annotations

import contextlib

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.linalg
from distributed import wait
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import assert_nothing_left
from matrices import assert_near, lazy, positive, random
from residuals import (
    assert_cholesky,
    assert_inverse,
    assert_least_squares,
    assert_lu,
    assert_pseudoinverse,
    assert_qr,
    assert_solution,
)
from run_events import events, events_after, newest_run, runs_after

from dask_distmm import PlanError, ProjectedMemoryError, linalg
from dask_distmm.planning import plan_from_wire

DTYPES = ["float32", "float64", "complex64", "complex128"]
METHODS = ["local", "columns"]


def check_all(dtype, method):
    n = int(np.random.default_rng().integers(60, 160))
    a, s, tall, b = random((n, n), dtype), positive(n, dtype), random((2 * n, n // 2), dtype), random((n, 7), dtype)
    for lower in (True, False):
        read = np.where(np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T, s, np.nan).astype(dtype)
        assert_cholesky(s, linalg.cholesky(lazy(read), lower=lower, method=method).compute(), lower=lower)
    p, low, up = dask.compute(*linalg.lu(lazy(a), p_indices=True, method=method))
    assert_lu(a, low, up, p)
    for x in (tall, tall.conj().T.copy(), a):
        assert_qr(x, *dask.compute(*linalg.qr(lazy(x), method=method)))
    q, r = dask.compute(*linalg.qr(lazy(tall), "complete", method=method))
    assert q.shape == (2 * n, 2 * n)
    assert_qr(tall, q, r)
    assert_solution(a, linalg.solve(lazy(a), lazy(b), method=method).compute(), b)
    assert_solution(s, linalg.solve(lazy(s), lazy(b), assume_a="pos", method=method).compute(), b)
    assert_inverse(a, linalg.inv(lazy(a), method=method).compute())
    x, *_ = linalg.lstsq(lazy(tall), lazy(tall[:, :3].copy()), method=method)
    assert_least_squares(tall, x.compute(), tall[:, :3])
    wide = tall.conj().T.copy()
    x, *_ = linalg.lstsq(lazy(wide), lazy(b[: n // 2]), method=method)
    assert_least_squares(wide, x.compute(), b[: n // 2])
    assert_pseudoinverse(tall, linalg.pinv(lazy(tall), method=method).compute())
    sign, logarithm = dask.compute(*linalg.slogdet(lazy(a), method=method))
    expected = np.linalg.slogdet(a.astype(np.complex128))
    eps = np.finfo(dtype).eps
    assert abs(sign - expected[0]) < 1e3 * n * eps
    assert abs(logarithm - expected[1]) < 1e3 * n * eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_cluster(dtype):
    check_all(dtype, "auto")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_on_workers(client, dtype, method):
    check_all(dtype, method)
    assert_nothing_left(client)


def test_one_run_makes_all_outputs(client):
    before = newest_run(client)
    p, low, up = linalg.lu(lazy(random((90, 90))), method="columns")
    dask.compute(p, low, up)
    last = events(client, "start")[-1]
    assert runs_after(client, before) == 1
    assert (last["method"], len(last["ranks"])) == ("columns", 3)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("method", METHODS)
def test_factors_of_few_bits_in_one_run(client, dtype, method):
    a, s, b = random((150, 150), dtype), positive(150, dtype), random((150, 7), dtype)
    how = {"factor_dtype": "float32", "method": method}
    for x, lower in ((a, None), (s, True), (s, False)):
        read = x if lower is None else np.where(np.tri(150).T if not lower else np.tri(150), x, np.nan).astype(dtype)
        options = {} if lower is None else {"assume_a": "pos", "lower": lower}
        before = newest_run(client)
        found, told = dask.compute(*linalg.solve(lazy(read), lazy(b), full_output=True, **options, **how))
        assert runs_after(client, before) == 1
        assert len(events(client, "start")[-1]["ranks"]) == (3 if method == "columns" else 1)
        assert_solution(x, found, b)
        assert (told.way, told.iterations.dtype) == (0, np.int64)
        assert 0 < told.backward_error < 1e-14
        assert 0 < told.forward_error < 1e-5
        transposed = linalg.solve(lazy(read), lazy(b), transposed=True, **options, **how).compute()
        assert_solution(x.T.copy(), transposed, b)
    x, residuals, rank, values = dask.compute(*linalg.lstsq(lazy(a), lazy(b), **how))
    assert_solution(a, x, b)
    assert (residuals.shape, rank) == ((0,), 150)
    np.testing.assert_allclose(values, np.linalg.svd(a, compute_uv=False))
    assert_inverse(s, linalg.inv(lazy(s), assume_a="pos", **how).compute())
    one = linalg.solve(lazy(a), lazy(b[:, 0]), overwrite_a=True, **how).compute()
    assert_solution(a, one[:, None], b[:, :1])
    assert_nothing_left(client)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("method", METHODS)
def test_factors_of_few_bits_that_are_kept(client, dtype, method):
    a, s, b = random((150, 150), dtype), positive(150, dtype), random((150, 3), dtype)
    few, how = np.dtype("complex64" if dtype[0] == "c" else "float32"), {"method": method}
    factors = dask.persist(*linalg.lu_factor(lazy(a), factor_dtype="float32", **how))
    wait(factors)
    assert factors[0].dtype == few
    for trans, op in (("N", a), ("T", a.T.copy()), ("C", a.conj().T.copy())):
        before = newest_run(client)
        assert_solution(op, linalg.lu_solve(factors, lazy(b), trans, a=lazy(a), **how).compute(), b)
        assert runs_after(client, before) == 1
    for lower in (True, False):
        factor = linalg.cho_factor(lazy(s), lower, factor_dtype="float32", **how)
        assert factor.c.dtype == few
        x = linalg.cho_solve(factor, lazy(b[:, 0]), a=lazy(s), **how).compute()
        assert_solution(s, x[:, None], b[:, :1])
    with pytest.raises(PlanError, match=f"cho_solve.*must be that, of {few}; it is 150 x 150 of {dtype}"):
        linalg.cho_solve(linalg.cho_factor(lazy(s)), lazy(b), a=lazy(s))
    del factors
    assert_nothing_left(client)


def test_matrices_that_few_bits_do_not_factorize(client):
    n, b = 90, random((90, 2))
    u, v = (np.linalg.qr(random((n, n)))[0] for _ in range(2))
    a, before = (u * np.geomspace(1, 1e-12, n)) @ v, newest_run(client)
    how = {"factor_dtype": "float32", "method": "columns"}
    x, told = dask.compute(*linalg.solve(lazy(a), lazy(b), full_output=True, **how))
    assert runs_after(client, before) == 1
    assert told.way == 2
    assert np.isnan([told.backward_error, told.forward_error]).all()
    assert_solution(a, x, b)
    with pytest.raises(linalg.MatrixError, match="singular: diagonal element 1 "):
        linalg.solve(lazy(np.ones((n, n))), lazy(b), **how).compute()
    with pytest.raises(linalg.MatrixError, match="leading minor of order 1 is not positive"):
        linalg.solve(lazy(-np.eye(n)), lazy(b), assume_a="pos", **how).compute()
    assert_nothing_left(client)


def test_stacks_and_empty_matrices_with_factors_of_few_bits():
    a, b = random((3, 20, 20)) + 9 * np.eye(20), random((3, 20, 2))
    x = linalg.solve(a, b, factor_dtype="float32").compute()
    for one, other, found in zip(a, b, x, strict=True):
        assert_solution(one, found, other)
    assert linalg.solve(np.empty((0, 0)), np.empty((0, 2)), factor_dtype="float32").compute().shape == (0, 2)
    assert linalg.solve(a[0], b[0][:, :0], factor_dtype="float32").compute().shape == (20, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor_dtype": "tf32"}, "solve.*factor_dtype='tf32' is for GPUs of one host, engine 'numpy' has 'float32'"),
        ({"factor_dtype": "float32", "engine": "nccl"}, "engine 'nccl' has none"),
        ({"factor_dtype": "int8"}, "unknown factor_dtype 'int8'; known are 'float32', 'tf32'"),
        ({"factor_dtype": "float32", "assume_a": "upper triangular"}, "solved without a factorization"),
        ({"full_output": True}, "pass factor_dtype, too"),
        ({"factor_dtype": "float32", "dtype": "float32"}, "has as many bits as a has, float32"),
    ],
)
def test_factors_that_there_are_not(options, message):
    a = random((20, 20), options.pop("dtype", "float64"))
    with pytest.raises(PlanError, match=message):
        linalg.solve(a, a[:, 0], **options)


def test_least_squares_that_few_bits_are_not_for():
    a = random((20, 20))
    for x, options in ((a[:, :9], {}), (a, {"rcond": 1e-9}), (a, {"method": "rows"})):
        with pytest.raises(PlanError, match="factor_dtype is for square matrices of full rank"):
            linalg.lstsq(x, a[:, 0], factor_dtype="float32", **options)


@pytest.mark.parametrize("trans", ["N", "T", "C"])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_triangular_systems(client, trans, lower, right):
    n = 90
    a = random((n, n), "complex128") + n * np.eye(n)
    b = random((5, n) if right else (n, 5), "complex128")
    used = np.tril(a) if lower else np.triu(a)
    read = np.where(np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T, a, np.nan)
    x = linalg.solve_triangular(lazy(read), lazy(b), trans, lower, right=right, method="columns").compute()
    used = {"N": used, "T": used.T, "C": used.conj().T}[trans]
    if right:
        assert_solution(used.T.copy(), x.T.copy(), b.T.copy())
    else:
        assert_solution(used, x, b)


def test_as_scipy_has_them(client):
    a, s, v = random((70, 70)), positive(70), random(70)
    for mine, theirs in zip(dask.compute(*linalg.lu(lazy(a))), scipy.linalg.lu(a), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-10)
    found, piv = dask.compute(*linalg.lu_factor(lazy(a)))
    expected, swaps = scipy.linalg.lu_factor(a)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    np.testing.assert_array_equal(piv, swaps)
    assert_solution(a, linalg.lu_solve(linalg.lu_factor(lazy(a)), lazy(v)).compute()[:, None], v[:, None])
    assert_solution(s, linalg.cho_solve(linalg.cho_factor(lazy(s)), lazy(v)).compute()[:, None], v[:, None])
    for x in (s, s + 1j * (np.tri(70) - np.tri(70).T)):
        for lower in (True, False):
            found = linalg.cho_factor(lazy(x), lower)
            assert found.lower is lower
            assert_near(found.logdet(), np.linalg.slogdet(x)[1], rtol=1e-10)
            assert found.logdet().dtype == np.float64
    np.testing.assert_allclose(linalg.det(lazy(a / 5)).compute(), scipy.linalg.det(a / 5), rtol=1e-9)
    x, residuals, rank, _ = linalg.lstsq(lazy(a[:, :20].copy()), lazy(v))
    np.testing.assert_allclose(residuals.compute(), np.linalg.lstsq(a[:, :20], v)[1][0], rtol=1e-9)
    assert (x.shape, rank) == ((20,), 20)
    assert_near(linalg.solve(lazy(a), lazy(v), transposed=True).compute(), scipy.linalg.solve(a.T, v))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from(["reduced", "complete", "r"]))
def test_small_and_empty_matrices(m, n, mode):
    a = random((m, n))
    r = linalg.qr(lazy(a), mode)
    q, r = (None, r.compute()) if mode == "r" else dask.compute(*r)
    if q is not None:
        assert_qr(a, q, r)
    low = linalg.cholesky(lazy(positive(m)), lower=True).compute()
    assert low.shape == (m, m)


@pytest.mark.parametrize("method", METHODS)
def test_matrices_that_have_none(client, method):
    a = np.eye(80)
    a[40, 40] = -1
    with pytest.raises(np.linalg.LinAlgError, match="leading minor of order 41 "):
        linalg.cholesky(lazy(a), lower=True, method=method).compute()
    a[40, 40] = 0
    with pytest.raises(np.linalg.LinAlgError, match="diagonal element"):
        linalg.inv(lazy(a), method=method).compute()
    with pytest.raises(np.linalg.LinAlgError, match="full rank"):
        linalg.lstsq(lazy(a[:, :60].copy() * 0), lazy(a), method=method)[0].compute()
    assert linalg.slogdet(lazy(a), method=method)[1].compute() == -np.inf
    a[0, 0] = np.nan
    with contextlib.suppress(np.linalg.LinAlgError):
        assert np.isnan(linalg.inv(lazy(a), method=method).compute()).any()
    assert_nothing_left(client)


def test_mistakes():
    a = lazy(random((40, 30)))
    for call, message in (
        (lambda: linalg.cholesky(a), "square"),
        (lambda: linalg.solve(a, a), "square"),
        (lambda: linalg.solve(a[:, :30][:30], lazy(random(31))), "b must have 30 rows; it has 31"),
        (lambda: linalg.lu(a[0]), "must be 2-D, got 1-D"),
        (lambda: linalg.solve(a, a, assume_a="circulant"), "'positive definite', 'upper tri"),
        (lambda: linalg.symm(a, a), r"symm\(\): a must be square, got 40 x 30"),
        (lambda: linalg.lu(a[a[:, 0] > 0]), "unknown chunk sizes"),
        (lambda: linalg.lu(a, engine="cuda"), "unknown engine"),
        (lambda: linalg.lu(a, method="summa"), "unknown method"),
        (lambda: linalg.qr(a, "full"), "unknown mode 'full'"),
        (lambda: linalg.lu(a.astype("datetime64[s]")), "expected float32"),
        (lambda: linalg.explain(a.persist(scheduler="sync")), "expected a lazy result"),
        (lambda: linalg.explain(3), "expected a lazy result"),
    ):
        with pytest.raises(PlanError, match=message):
            call()
    with pytest.raises(TypeError, match=r"lu\(\) has no option 'enginee': did you mean 'engine'"):
        linalg.lu(a, enginee="numpy")


def test_explained(client):
    made = linalg.explain(linalg.lu(lazy(random((90, 90))), method="columns")[1])
    assert len(made.ranks) == 3
    assert made.bytes_moved > 0
    assert "lu on 3 of 3 workers" in repr(made)
    assert "Block columns, by the ranks that have them" in made._repr_html_()
    assert repr(plan_from_wire(made.to_wire()).problem) == repr(made.problem)


@pytest.mark.parametrize("name", ["lu", "qr", "solve", "eigh", "eigvalsh"])
def test_runs_receive_what_is_estimated(client, name):
    """Also what kernels send that are no steps: those by which ranks share eigenvalues."""
    n = 200
    x, b = da.from_array(positive(n, "float64"), chunks=50).persist(), lazy(random((n, 90)))
    wait(x)
    call = {"solve": lambda: linalg.solve(x, b, method="columns")}.get(
        name, lambda: getattr(linalg, name)(x, method="columns")
    )
    results, moment = call(), newest_run(client)
    made = linalg.explain(results[0] if isinstance(results, tuple) else results)
    dask.compute(results)
    (event,) = events_after(client, moment)
    assert len(made.ranks) == 3
    assert event["received_bytes"] == pytest.approx(made.bytes_moved, rel=0.2)


def test_a_lost_worker_costs_a_run_and_no_result(fault_client):
    a = random((300, 300))
    x = lazy(a).persist()
    wait(x)
    up = linalg.lu(x, method="columns")[2].persist()
    fault_client.restart_workers([next(iter(fault_client.scheduler_info(n_workers=-1)["workers"]))])
    np.testing.assert_allclose(up.compute(), scipy.linalg.lu(a)[2], atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gram_is_exactly_hermitian(inproc_client, dtype):
    x = random((50, 30), dtype)
    found, transposed = dask.compute(linalg.gram(lazy(x)), linalg.gram(lazy(x).conj().T))
    near = {"rtol": 0, "atol": 50 * np.finfo(dtype).eps * np.linalg.norm(x, 2) ** 2}
    np.testing.assert_allclose(found, x.conj().T @ x, **near)
    np.testing.assert_allclose(transposed, x @ x.conj().T, **near)
    for one in (found, transposed):
        np.testing.assert_array_equal(one, one.conj().T)
        assert one.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lower", [True, False])
def test_products_with_a_triangle(dtype, lower):
    a, b, c = (random(shape, dtype) for shape in ((30, 30), (30, 7), (7, 30)))
    near = {"rtol": 0, "atol": 2000 * np.finfo(dtype).eps}
    with dask.config.set(scheduler="sync"):
        half, rest = (np.tril, np.triu) if lower else (np.triu, np.tril)
        offset = -1 if lower else 1
        given = half(a) + rest(np.full_like(a, np.nan), -offset)
        symmetric = half(a) + half(a, offset).T
        hermitian = half(a, offset) + half(a, offset).conj().T + np.diag(np.diagonal(a).real)
        for whole, how in ((symmetric, False), (hermitian, True)):
            left = linalg.symm(lazy(given), lazy(b), lower=lower, hermitian=how)
            right = linalg.symm(lazy(given), lazy(c), lower=lower, right=True, hermitian=how)
            np.testing.assert_allclose(left.compute(), whole @ b, **near)
            np.testing.assert_allclose(right.compute(), c @ whole, **near)
        for unit in (True, False):
            triangle = half(a, offset) + (np.eye(30) if unit else np.diag(np.diagonal(a)))
            for trans, op in (("N", triangle), ("T", triangle.T), ("C", triangle.conj().T)):
                options = {"lower": lower, "trans": trans, "unit_diagonal": unit}
                left = linalg.trmm(lazy(given), lazy(b), **options)
                right = linalg.trmm(lazy(given), lazy(c), right=True, **options)
                np.testing.assert_allclose(left.compute(), op @ b, **near)
                np.testing.assert_allclose(right.compute(), c @ op, **near)


STRUCTURES = {
    "general": lambda a: a,
    "diagonal": lambda a: np.diag(np.diagonal(a)),
    "tridiagonal": lambda a: np.triu(np.tril(a, 1), -1),
    "banded": lambda a: np.triu(np.tril(a, 3), -2),
    "symmetric": lambda a: a + a.T,
    "hermitian": lambda a: a + a.conj().T,
    "positive definite": lambda a: a @ a.conj().T + np.eye(len(a)),
    "upper triangular": lambda a: np.triu(a) + 10 * np.eye(len(a)),
    "lower triangular": lambda a: np.tril(a) + 10 * np.eye(len(a)),
}
SHORT = {"sym": "symmetric", "her": "hermitian", "pos": "positive definite", "gen": "general"}


@pytest.mark.parametrize("structure", [*STRUCTURES, *SHORT])
def test_structures_as_scipy_has_them(structure):
    a, b = random((20, 20), "complex128"), random((20, 3), "complex128")
    made, half = STRUCTURES[SHORT.get(structure, structure)](a), ("symmetric", "hermitian", "positive definite")
    for lower in (True, False):
        given = made
        if SHORT.get(structure, structure) in half:
            given = np.tril(made) if lower else np.triu(made)
        for transposed in (True, False):
            x = linalg.solve(lazy(given), lazy(b), assume_a=structure, lower=lower, transposed=transposed)
            assert_solution(made.T if transposed else made, x.compute(scheduler="sync"), b)


def test_chains_are_lazy(client):
    """Gaussian process regression: kernel matrix, Cholesky, two solutions."""
    x = np.sort(np.random.default_rng().uniform(0, 6, 120))
    y = np.sin(x)
    k = np.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-6 * np.eye(120)
    weights = linalg.cho_solve(linalg.cho_factor(lazy(k), lower=True), lazy(y))
    np.testing.assert_allclose((lazy(k) @ weights).compute(), y, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (lambda x: linalg.svd(x), "svd of a matrix of 1000000 x 3 .* Pass full_matrices=False or"),
        (lambda x: linalg.qr(x, "complete"), "qr of a matrix of 1000000 x 3 .* Pass mode='reduced' or"),
    ],
)
def test_full_matrices_that_this_process_cannot_hold(function, advice):
    with pytest.raises(ProjectedMemoryError, match=advice):
        function(da.ones((1_000_000, 3), chunks=(100_000, 3)))
