"""Eigenvalues and singular values of Dask arrays: by LAPACK's gates, and beside LAPACK's values."""

from __future__ import annotations

import dataclasses
import functools
import math

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import assert_nothing_left
from matrices import assert_near, lazy, positive, problem_of, random
from residuals import assert_eig, assert_eigh, assert_polar, assert_pseudoinverse, assert_schur, assert_svd
from run_events import newest_run, runs_after

from dask_distmm import PlanError, ProjectedMemoryError, linalg
from dask_distmm.algorithms import iterative
from dask_distmm.arrays.linalg.factors import weights
from dask_distmm.errors import MatrixError, NotSquareError
from dask_distmm.planning.computation import Worker
from dask_distmm.planning.factor import plan_factorization

DTYPES = ["float32", "float64", "complex64", "complex128"]
SPECTRA = ["random", "clustered", "graded", "deficient", "zero", "tiny", "huge"]


def spectrum(what, n, dtype):
    """Return values of all sizes that occur, in no order."""
    rng, real = np.random.default_rng(), np.finfo(dtype)
    values = {
        "random": rng.uniform(-1, 1, n),
        "clustered": np.sign(rng.uniform(-1, 1, n)) * (1 + real.eps * rng.integers(0, 4, n)),
        "graded": np.geomspace(1, float(real.eps) ** 2, n),
        # Those that are not zero are far from it.
        "deficient": np.where(np.arange(n) % 3, rng.uniform(0.1, 1, n) * rng.choice([-1, 1], n), 0),
        "zero": np.zeros(n),
        "tiny": rng.uniform(-1, 1, n) * float(real.tiny) ** 0.8,
        "huge": rng.uniform(-1, 1, n) * float(real.max) ** 0.8,
    }
    return values[what]


def orthonormal(n, dtype):
    return np.linalg.qr(random((n, n), "complex128" if np.dtype(dtype).kind == "c" else "float64"))[0]


def hermitian(what, n, dtype):
    v = orthonormal(n, dtype)
    x = (v * spectrum(what, n, dtype)) @ v.conj().T
    return ((x + x.conj().T) / 2).astype(dtype)


def general(what, shape, dtype):
    (m, n), k = shape, min(shape)
    u, v = orthonormal(m, dtype)[:, :k], orthonormal(n, dtype)[:, :k]
    return ((u * spectrum(what, k, dtype)) @ v.conj().T).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", SPECTRA)
def test_eigenvalues_of_all_spectra(dtype, what):
    a = hermitian(what, 61, dtype)
    for lower in (True, False):
        # The other triangle is not read.
        given = np.tril(a) + np.triu(a * np.nan, 1) if lower else np.triu(a) + np.tril(a * np.nan, -1)
        assert_eigh(a, *dask.compute(*linalg.eigh(lazy(given), lower=lower)))
    first, last = np.sort(np.random.default_rng().integers(0, 61, 2)).tolist()
    w, v = dask.compute(*linalg.eigh(lazy(a), subset_by_index=(first, last)))
    assert len(w) == last - first + 1
    assert_eigh(a, w, v, first=first)
    values = linalg.eigvalsh(lazy(a), subset_by_index=(first, last)).compute()
    np.testing.assert_allclose(values, w, rtol=0, atol=61 * 30 * np.finfo(dtype).eps * abs(a).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", SPECTRA)
@pytest.mark.parametrize("shape", [(40, 40), (90, 33), (33, 90)], ids=str)
def test_singular_values_of_all_spectra(dtype, what, shape):
    a = general(what, shape, dtype)
    for options in ({}, {"method": "rows"}, {"full_matrices": True}):
        u, s, vh = dask.compute(*linalg.svd(lazy(a), **{"full_matrices": False, **options}))
        assert_svd(a, u, s, vh)
    np.testing.assert_allclose(linalg.svdvals(lazy(a)), s, rtol=0, atol=90 * 30 * np.finfo(dtype).eps * s[0])


@pytest.mark.parametrize(
    ("dtype", "what"),
    [("float64", what) for what in SPECTRA] + [(dtype, "deficient") for dtype in DTYPES if dtype != "float64"],
)
def test_polar_decompositions_and_singular_values_by_them(dtype, what):
    shape = [(40, 40), (60, 33), (33, 60)][np.random.default_rng().integers(3)]
    a = general(what, shape, dtype)
    assert_polar(a, *dask.compute(*linalg.polar(lazy(a), method="columns")))
    u, s, vh = dask.compute(*linalg.svd(lazy(a), False, method="columns"))
    assert_svd(a, u, s, vh)
    values = linalg.svdvals(lazy(a), method="columns").compute()
    np.testing.assert_allclose(values, s, rtol=0, atol=60 * 30 * np.finfo(dtype).eps * s[0])


@pytest.mark.parametrize("shape", [(40, 40), (60, 33), (33, 60)], ids=str)
@pytest.mark.parametrize("method", ["local", "columns"])
def test_polar_as_scipy_has_it(shape, method):
    a = random(shape, "complex128")
    for side in ("right", "left"):
        u, p = dask.compute(*linalg.polar(lazy(a), side, method=method))
        expected = scipy.linalg.polar(a, side)
        np.testing.assert_allclose(u, expected[0], atol=1e-10)
        np.testing.assert_allclose(p, expected[1], atol=1e-10)
    assert_polar(a, *dask.compute(*linalg.polar(lazy(a), method=method)))


@given(st.floats(1e-40, 1), st.sampled_from([1e-7, 2e-16]))
def test_weights_take_all_singular_values_to_one(least, eps):
    steps = weights(least, eps)
    assert len(steps) <= 7
    s = np.geomspace(least, 1, 1000)
    for a, b, c in steps:
        assert c <= 1.1 * a**2
        s = s * (a + b * s**2) / (1 + c * s**2)
    np.testing.assert_allclose(s, 1, rtol=0, atol=20 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_workers(client, dtype):
    n = int(np.random.default_rng().integers(60, 120))
    a, b, tall = hermitian("random", n, dtype), positive(n, dtype), random((3 * n, n), dtype)
    assert_eigh(a, *dask.compute(*linalg.eigh(lazy(a))))
    for lower in (True, False):
        w, v = dask.compute(*linalg.eigh(lazy(a), b=lazy(b), lower=lower))
        assert_eigh(a, w, v, b)
        np.testing.assert_allclose(w, scipy.linalg.eigvalsh(a, b), atol=30 * n * np.finfo(dtype).eps)
    for x, method in ((tall, "rows"), (a, "local")):
        assert_svd(x, *dask.compute(*linalg.svd(lazy(x), False, method=method)))
    assert_nothing_left(client)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eigenvalues_that_workers_share(client, dtype):
    n = int(np.random.default_rng().integers(100, 140))
    a = hermitian("random", n, dtype)
    for lower in (True, False):
        given = np.tril(a) + np.triu(a * np.nan, 1) if lower else np.triu(a) + np.tril(a * np.nan, -1)
        w, v = linalg.eigh(lazy(given), lower=lower, method="columns")
        made = linalg.explain(w)
        assert (made.method, len(made.ranks)) == ("columns", 3)
        assert "reduce the matrix to a tridiagonal one" in repr(made)
        assert_eigh(a, *dask.compute(w, v))
    w, v = dask.compute(*linalg.eigh(lazy(a), subset_by_index=(7, 20), method="columns"))
    assert_eigh(a, w, v, first=7)
    values = linalg.eigvalsh(lazy(a), subset_by_index=(7, 20), method="columns").compute()
    np.testing.assert_allclose(values, w, rtol=0, atol=n * 30 * np.finfo(dtype).eps * abs(a).max())
    a[5, 3] = a[3, 5] = np.nan
    with pytest.raises(np.linalg.LinAlgError, match="must not contain infs or NaNs"):
        linalg.eigh(lazy(a), method="columns")[1].compute()
    assert_nothing_left(client)


def test_which_orders_workers_share(monkeypatch):
    """On GPUs large ones; on any those alone that one worker can't hold; never on CPUs."""
    roster = [Worker("a"), Worker("b")]
    for engine, n, method, limit, expected in (
        ("peer", 20_000, "auto", None, "columns"),
        ("peer", 1000, "auto", None, "local"),
        ("peer", 1000, "columns", None, "columns"),
        ("peer", 20_000, "local", None, "local"),
        ("peer", 10_000, "auto", 6 * 10**9, "columns"),
        ("numpy", 20_000, "auto", None, "local"),
    ):
        problem = problem_of(linalg.eigh(da.zeros((n, n), chunks=n), method=method)[0])
        workers = [dataclasses.replace(one, memory_limit=limit) for one in roster] if limit else roster
        where = {"a": np.zeros(1, np.int32)}
        made = plan_factorization(problem, workers, where, engine=engine)
        assert made.method == expected, (engine, n, method)
    pair = da.zeros((20_000, 20_000), chunks=20_000)
    assert plan_factorization(problem_of(linalg.eigh(pair, b=pair)[0]), roster, engine="peer").method == "local"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.booleans(), st.sampled_from(["auto", "columns"]))
def test_small_and_empty_matrices(m, n, full, method):
    a = random((m, n))
    u, s, vh = dask.compute(*linalg.svd(lazy(a), full, method="auto" if full else method))
    assert u.shape == (m, m if full else min(m, n))
    assert vh.shape == (n if full else min(m, n), n)
    assert_svd(a, u, s, vh)
    assert linalg.matrix_rank(lazy(a)).compute() == min(m, n)
    square = hermitian("random", m, "float64")
    assert_eigh(square, *dask.compute(*linalg.eigh(lazy(square), method=method)))


def test_how_many_runs(client):
    a, h = random((150, 50), "complex128"), hermitian("random", 50, "complex128")
    for call, gate, runs in (
        (lambda: linalg.svd(lazy(a), False), functools.partial(assert_svd, a), 1),
        # QR, QDWH (three steps by QR, three by Cholesky), its product, eigenvalues, two products.
        (
            lambda: linalg.svd(lazy(a), False, method="columns"),
            functools.partial(assert_svd, a),
            1 + 6 * 2 + 1 + 1 + 2,
        ),
        (lambda: linalg.eigh(lazy(h), b=lazy(np.eye(50))), functools.partial(assert_eigh, h), 1),
    ):
        before = newest_run(client)
        gate(*dask.compute(*call()))
        assert runs_after(client, before) == runs


def test_signs_do_not_depend_on_chunks_or_method():
    a = random((70, 30), "complex128")
    first = dask.compute(*linalg.svd(lazy(a), False))
    for method in ("local", "columns"):
        for mine, other in zip(first, dask.compute(*linalg.svd(lazy(a), False, method=method)), strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_numpy_has_them(dtype):
    a, h = general("deficient", (60, 30), dtype), hermitian("deficient", 30, dtype)
    eps = float(np.finfo(dtype).eps)
    rtol, close = 1e3 * eps, {"rtol": 1e4 * eps, "atol": 1e4 * eps}
    square = positive(30, dtype)
    for order in ("fro", "nuc", 2, -2, 1, np.inf, None):
        np.testing.assert_allclose(linalg.norm(lazy(square), order), np.linalg.norm(square, order), **close)
    np.testing.assert_allclose(linalg.norm(lazy(a[0])).compute(), np.linalg.norm(a[0]), **close)
    for p in (None, 2, -2, 1, "fro"):
        np.testing.assert_allclose(linalg.cond(lazy(square), p), np.linalg.cond(square, p), **close)
    assert linalg.cond(lazy(a * 0)).compute() == np.inf
    assert linalg.matrix_rank(lazy(a), rtol=rtol).compute() == np.linalg.matrix_rank(a, rtol=rtol) == 20
    assert linalg.matrix_rank(lazy(h), hermitian=True, tol=rtol).compute() == 20
    assert linalg.matrix_rank(lazy(square)).compute() == 30
    x = linalg.pinv(lazy(a), rtol=rtol).compute()
    assert_pseudoinverse(a, x)
    assert_pseudoinverse(h, linalg.pinv(lazy(h), rtol=rtol, hermitian=True).compute())
    b = random((60, 4), dtype)
    solution, residuals, rank, s = dask.compute(*linalg.lstsq(lazy(a), lazy(b), rcond=rtol))
    np.testing.assert_allclose(solution, x @ b, rtol=0, atol=1e4 * eps * abs(x).max())
    np.testing.assert_allclose(residuals, (abs(b - a @ solution) ** 2).sum(axis=0), rtol=1e3 * eps)
    assert (rank, s.shape) == (20, (30,))


def test_matrices_that_have_none(client):
    a = random((50, 50))
    a[3, 2] = np.inf
    for call in (linalg.eigh, linalg.svd, functools.partial(linalg.svd, method="columns")):
        with pytest.raises(np.linalg.LinAlgError, match="must not contain infs or NaNs"):
            call(lazy(a))[1].compute()
    good = a[10:40, 10:40]
    with pytest.raises(np.linalg.LinAlgError, match="leading minor of order 1 of B"):
        linalg.eigvalsh(lazy(good), b=lazy(-positive(30))).compute()
    with pytest.raises(np.linalg.LinAlgError, match="pass rcond="):
        linalg.pinv(lazy(good * 0)).compute()
    assert_nothing_left(client)


def test_mistakes():
    a = lazy(random((40, 30)))
    square = a[:30]
    for call, message in (
        (lambda: linalg.eigh(a), "square"),
        (lambda: linalg.eigh(square, b=a), "b must have 30 rows; it has 40"),
        (lambda: linalg.eigh(square, subset_by_index=(3, 30)), "last < 30"),
        (lambda: linalg.eigh(square, subset_by_index=(3, 2)), "first <= last"),
        (lambda: linalg.eigh(square, subset_by_index=3), "subset_by_index must be 2 integers or None, got 3"),
        (lambda: linalg.eigh(square, b=square, method="columns"), "a pair of matrices is computed by one worker"),
        (lambda: linalg.svd(a, full_matrices=True, method="columns"), "pass full_matrices=False"),
        (lambda: linalg.svd(a[0]), r"svd\(\): a must be 2-D, got 1-D"),
        (lambda: linalg.polar(a, "up"), "unknown side 'up'"),
        (lambda: linalg.svd(a.astype("datetime64[s]")), "expected float32"),
        (lambda: linalg.norm(a[:0], 2), "empty"),
        (lambda: linalg.svd_compressed(a, 31), "between 1 and 30, got 31"),
        (lambda: linalg.pca(a, 31), "between 1 and 30, got 31"),
        (lambda: linalg.pca(a[:1]), "at least 2 rows"),
        (lambda: linalg.cond(a[:0]), "empty"),
    ):
        with pytest.raises(PlanError, match=message):
            call()
    with pytest.raises(TypeError, match="has no option 'driver'"):
        linalg.svd(a, method="auto", driver="gesvd")


def test_where_one_worker_does_it():
    problem = problem_of(linalg.eigvalsh(da.zeros((40, 40), chunks=20)))
    roster, sources = [Worker("a"), Worker("b", nthreads=2), Worker("c", nthreads=2)], [Worker("d", nthreads=4)]
    for holders, rank in ([0, 0, 0, 0], 1), ([2, 1, 2, 2], 2), ([3, 3, 3, 2], 2), ([3, 3, 3, 3], 1):
        where = {"a": np.array(holders, np.int32)}
        made = plan_factorization(problem, roster, where, engine="numpy", sources=sources)
        assert made.ranks == (rank,)
    # More workers would be of no use.
    with pytest.raises(ProjectedMemoryError, match="Use a higher memory_limit"):
        plan_factorization(problem, [Worker("a", memory_limit=30_000)], engine="numpy")
    problem = problem_of(linalg.svd(da.zeros((10_000, 10), chunks=(1000, 10)))[1])
    with pytest.raises(ProjectedMemoryError, match="Pass full_matrices=False.* or use a higher memory_limit"):
        plan_factorization(problem, [Worker("a", memory_limit=2**28)], engine="numpy")
    for kind, options, advised in (
        (linalg.eigvalsh, {"method": "local"}, "Use a higher"),
        (linalg.cholesky, {}, "Use more workers or use a higher"),
        (linalg.cholesky, {"method": "local"}, "Use method='auto', by which workers share it or use a higher"),
        (linalg.cholesky, {"workers": 1}, "Name more workers by workers= or use a higher"),
    ):
        problem = problem_of(kind(da.zeros((400, 400), chunks=100), **options))
        with pytest.raises(ProjectedMemoryError, match=advised):
            plan_factorization(problem, [Worker("a", memory_limit=30_000)], engine="numpy")


def test_explained(client):
    made = linalg.explain(linalg.svd(lazy(random((90, 60))), False)[0])
    assert len(made.ranks) == 1
    assert "svd on 1 of 3 workers" in repr(made)
    assert "one worker has the whole matrix" in repr(made)
    # Chunks, LAPACK's copies and its workspace.
    assert made.estimate.peak_bytes > 8 * (4 * 90 * 60 + 4 * 60 * 60)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("shape", [(90, 40), (40, 90)], ids=str)
def test_leading_singular_values(dtype, shape):
    k, eps = 5, float(np.finfo(dtype).eps)
    u, v = orthonormal(shape[0], dtype)[:, :40], orthonormal(shape[1], dtype)[:, :40]
    values = np.geomspace(1, 1e-6, 40)
    a = ((u * values) @ v.conj().T).astype(dtype)
    u, s, vh = dask.compute(*linalg.svd_compressed(lazy(a), k, n_power_iter=2))
    np.testing.assert_allclose(s, values[:k], rtol=1e3 * eps + 1e-9)
    # Orthonormal, and as near as a matrix of this rank can be.
    for one in (u, vh.conj().T):
        np.testing.assert_allclose(one.conj().T @ one, np.eye(k), rtol=0, atol=1e3 * eps)
    assert np.linalg.norm(a - u * s @ vh, 2) < 1.01 * values[k]


def test_leading_singular_values_in_few_runs(client):
    a = da.from_array(random((300, 30)), chunks=(100, 30))
    before = newest_run(client)
    first = dask.compute(*linalg.svd_compressed(a, 4))
    assert runs_after(client, before) == 1
    for mine, other in zip(first, dask.compute(*linalg.svd_compressed(a, 4)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", [(200, 20), (20, 30)], ids=str)
def test_principal_components(shape):
    k, a = 7, random(shape) + 3
    components, variances, mean = dask.compute(*linalg.pca(lazy(a), k))
    centred = a - a.mean(axis=0)
    assert_near(mean, a.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(variances, np.linalg.svd(centred, compute_uv=False)[:k] ** 2 / (len(a) - 1), rtol=1e-10)
    # What is left of the data in the directions of the components has their variances, and is not correlated.
    np.testing.assert_allclose(np.cov(centred @ components.T, rowvar=False), np.diag(variances), atol=1e-10)
    np.testing.assert_allclose(components @ components.T, np.eye(k), atol=1e-12)
    found, other = linalg.pca(lazy(a), k), random((31, shape[1]))
    scores = found.transform(other)
    np.testing.assert_allclose(scores, (other - mean) @ components.T, atol=1e-10)
    np.testing.assert_allclose(found.inverse_transform(scores), scores.compute() @ components + mean, atol=1e-10)
    # All components describe all of the data.
    whole = linalg.pca(lazy(a[: shape[1] + 5] if len(a) > shape[1] else a))
    rows = lazy(a[: len(whole.components)])
    np.testing.assert_allclose(whole.inverse_transform(whole.transform(rows)), rows, atol=1e-9)


def general_of(what, n, dtype):
    """A matrix that is not Hermitian: random; far from normal; that lacks eigenvectors; of pairs; with zeros."""
    rng, x = np.random.default_rng(), random((n, n), dtype)
    found = {
        "random": lambda: x,
        "not normal": lambda: np.triu(x) + 1e3 * np.eye(n, k=1),
        "jordan": lambda: 2 * np.eye(n) + np.eye(n, k=1),
        "pairs": lambda: np.kron(np.diag(rng.uniform(1, 2, n // 2)), [[0, 1], [-1, 0]]),
        "singular": lambda: np.diag(np.arange(n) % 3) + np.triu(x, 2),
        "zero": lambda: np.zeros((n, n)),
        "identity": lambda: np.eye(n),
    }
    return found[what]().astype(dtype)


GENERAL = ["random", "not normal", "jordan", "pairs", "singular", "zero", "identity"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", GENERAL)
def test_eigenvalues_of_any_matrices(dtype, what):
    a = general_of(what, 2 * int(np.random.default_rng().integers(10, 40)), dtype)
    w, v = dask.compute(*linalg.eig(lazy(a)))
    assert_eig(a, w, v)
    w, vl, v = dask.compute(*linalg.eig(lazy(a), left=True))
    assert_eig(a, w, v, vl)
    values, some = dask.compute(*linalg.eig(lazy(a), left=True, right=False))
    assert_eig(a.conj().T, values.conj(), some)
    for found in (linalg.eigvals(lazy(a)), linalg.eig(lazy(a), right=False)):
        assert found.dtype == w.dtype
        np.testing.assert_allclose(found.sum(), np.trace(a), rtol=0, atol=900 * np.finfo(dtype).eps * abs(a).max())
    for output in ("real", "complex"):
        lazily = linalg.schur(lazy(a), output)
        t, z = dask.compute(*lazily)
        assert lazily[0].dtype == t.dtype == (np.result_type(dtype, np.complex64) if output == "complex" else dtype)
        assert_schur(a, t, z)
    # Eigenvalues of real matrices come in pairs.
    if np.dtype(dtype).kind != "c":
        assert sorted(w.imag) == sorted(-w.imag)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["random", "jordan", "pairs", "identity"])
@pytest.mark.parametrize("n", [1, 2, 24, 150])
def test_roots_and_logarithms(dtype, what, n):
    """By their inverses, and beside SciPy's; the branch is the principal one."""
    n = n + n % 2 * (what == "pairs")
    a = general_of(what, n, dtype)
    if what == "random":
        # No eigenvalue is near the cut.
        a = (a / (4 * n**0.5) + np.eye(n)).astype(dtype)
    eps, wide = float(np.finfo(dtype).eps), a.astype(np.result_type(dtype, np.float64))
    root, logarithm = dask.compute(linalg.sqrtm(lazy(a)), linalg.logm(lazy(a)))
    assert root.dtype == logarithm.dtype == np.result_type(dtype, np.complex64)
    size = np.linalg.norm(root, 1) ** 2
    assert np.linalg.norm(root @ root - a, 1) <= 30 * n * eps * size
    assert (np.linalg.eigvals(root).real >= 0).all()
    near = {"rtol": 0, "atol": 1e4 * n * eps}
    np.testing.assert_allclose(root, scipy.linalg.sqrtm(wide), **near)
    np.testing.assert_allclose(logarithm, scipy.linalg.logm(wide), **near)
    np.testing.assert_allclose(scipy.linalg.expm(logarithm.astype("complex128")), wide, **near)


def test_negative_eigenvalues_are_on_the_upper_side_of_the_cut():
    v = random((20, 20))
    a = v @ np.diag(-np.arange(1.0, 21)) @ np.linalg.inv(v)
    root, logarithm = dask.compute(linalg.sqrtm(lazy(a)), linalg.logm(lazy(a)))
    np.testing.assert_allclose(np.trace(root), 1j * np.sqrt(np.arange(1, 21)).sum(), atol=1e-6)
    np.testing.assert_allclose(np.trace(logarithm).imag, 20 * np.pi, rtol=1e-6)


def test_matrices_without_a_root_or_a_logarithm():
    zero, shift = np.zeros((5, 5)), np.eye(5, k=1)
    assert not linalg.sqrtm(lazy(zero)).compute().any()
    singular = np.diag([0.0, 0, 1, 4, 9])
    np.testing.assert_allclose(linalg.sqrtm(lazy(singular)), np.sqrt(singular), atol=1e-12)
    for call, x, message in (
        (linalg.sqrtm, shift, "singular, and has no square root"),
        (linalg.logm, shift, "singular, and has no logarithm"),
        (linalg.logm, zero, "singular, and has no logarithm"),
        (linalg.expm, 1e200 * np.ones((5, 5)), "too large elements"),
        (linalg.expm, zero * np.nan, "A must not contain infs or NaNs"),
    ):
        with pytest.raises(MatrixError, match=message):
            call(lazy(x)).compute()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 1, 20])
def test_exponentials(dtype, size):
    n = int(np.random.default_rng().integers(2, 60))
    eps = float(np.finfo(dtype).eps)
    x = random((n, n), dtype)
    for a in (one.astype(dtype) for one in (x * size / n**0.5, np.triu(x, n // 2) * 1e3, 0 * x)):
        wide = a.astype(np.result_type(dtype, np.float64))
        expected, scale = scipy.linalg.expm(wide), max(1, np.linalg.norm(wide, 1))
        for method in ("rows", "local", "auto"):
            found = linalg.expm(lazy(a), method=method).compute()
            assert found.dtype == dtype
            assert np.linalg.norm(found - expected, 1) <= 100 * n * eps * scale * np.linalg.norm(expected, 1)


def test_exponentials_of_matrices_far_from_normal():
    """The norm of A says nothing: A / 2^s with its s would lose all digits of A in the identity."""
    for size in (1e3, 1e6):
        a = size * np.array([[1.0, 1], [-1, -1]])
        np.testing.assert_allclose(linalg.expm(lazy(a)), np.eye(2) + a, rtol=1e-9)


def test_the_polynomial_is_taylors():
    """Its coefficients, from products of polynomials, are 1 / k!."""
    polynomial = np.polynomial.Polynomial
    powers = [polynomial([0] * k + [1]) for k in (0, 1, 2, 3, 6)]
    b1, b2, b3, b4, b5 = (sum(c * x for c, x in zip(row, powers, strict=True)) for row in iterative._TAYLOR)
    middle = b4 + b1 * b5
    found = (b2 + (b3 + middle) * middle).coef
    assert len(found) == 19
    # Of the last ones little more is left of numbers of 16 digits.
    np.testing.assert_allclose(found * [math.factorial(k) for k in range(19)], 1, rtol=1e-6)
    np.testing.assert_allclose(found, [1 / math.factorial(k) for k in range(19)], rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_functions_of_matrices_on_workers(client, dtype):
    n = int(np.random.default_rng().integers(60, 90))
    a = (random((n, n), dtype) / (3 * n**0.5) + np.eye(n)).astype(dtype)
    eps = float(np.finfo(dtype).eps)
    assert_eig(a, *dask.compute(*linalg.eig(lazy(a))))
    assert_schur(a, *dask.compute(*linalg.schur(lazy(a))))
    np.testing.assert_allclose(linalg.expm(linalg.logm(lazy(a)), method="rows"), a, rtol=0, atol=1e3 * n * eps)
    root = linalg.sqrtm(lazy(a)).compute()
    np.testing.assert_allclose(root @ root, a, rtol=0, atol=1e3 * n * eps)
    x = da.from_array(a, chunks=(-(-n // 3), n))
    plan = linalg.explain(linalg.expm(x, method="rows"))
    assert (len(plan.ranks), plan.method) == (3, "rows")
    assert len(linalg.explain(linalg.expm(x)).ranks) == 1
    plan = linalg.explain(linalg.eig(x)[0])
    assert "eig on 1 of 3 workers" in repr(plan)
    # The matrix, vectors twice, and what the chunks are.
    assert plan.estimate.peak_bytes > 4 * n * n * x.itemsize
    for call in (linalg.eigvals, linalg.schur, linalg.sqrtm, linalg.logm, linalg.expm):
        bad = a.copy()
        bad[3, 4] = np.inf
        with pytest.raises(MatrixError, match="must not contain infs or NaNs"):
            dask.compute(call(lazy(bad)))
    assert_nothing_left(client)


def test_mistakes_in_functions_of_matrices():
    a = lazy(random((40, 30)))
    square = a[:30]
    for call in (linalg.eig, linalg.eigvals, linalg.schur, linalg.sqrtm, linalg.logm, linalg.expm):
        name = call.__name__
        with pytest.raises(NotSquareError, match=rf"{name}\(\): .* must be square, got 40 x 30"):
            call(a)
        with pytest.raises(PlanError, match="expected float32"):
            call(square.astype("datetime64[s]"))
        with pytest.raises(PlanError, match="must be 2-D, got 1-D"):
            call(a[0])
        with pytest.raises(PlanError, match="local"):
            call(square, method="columns")
        empty = dask.compute(call(a[:0, :0]))[0]
        assert {one.shape for one in (empty if isinstance(empty, tuple) else (empty,))} <= {(0,), (0, 0)}
    with pytest.raises(PlanError, match="unknown output 'rael': did you mean 'real'"):
        linalg.schur(square, "rael")
    with pytest.raises(TypeError, match="has no option 'sort'"):
        linalg.schur(square, sort="lhp")
    with pytest.raises(TypeError, match="has no option 'b'"):
        linalg.eigvals(square, b=square)
    problem = problem_of(linalg.logm(da.zeros((1000, 1000), chunks=500)))
    with pytest.raises(ProjectedMemoryError, match="logm of a matrix of 1000 x 1000"):
        plan_factorization(problem, [Worker("a", memory_limit=2**26)], engine="numpy")
