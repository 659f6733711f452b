"""Sparse chunks: products by tasks, and tall matrices whose rows stay sparse; without a cluster and on workers."""

from __future__ import annotations

import itertools

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
import sparse
from matrices import assert_near, noise, problem_of
from programs.test_numbers import on_ranks

from dask_distmm import PlanError, enabled, explain, linalg, matmul
from dask_distmm.errors import EngineError, ProtocolError, RunFailedError
from dask_distmm.numeric import sparse as sparse_chunks
from dask_distmm.numeric.sparse import add_thin_gram, compressed, dense, multiply, sparse_package
from dask_distmm.planning.computation import Worker
from dask_distmm.planning.program import ProgramPlacement, plan_program

# Dask takes no coo_matrix for meta.
EVERY = [
    *(getattr(sp, f"{name}_{kind}") for name, kind in itertools.product(("csr", "csc"), ("array", "matrix"))),
    sp.coo_array,
    sparse.COO.from_numpy,
]
CHUNKS = (100, 0, 30, 170)


def sparse_rows(rng, m, n, dtype, filled=0.05):
    """Return a matrix with an empty column, empty rows and an empty chunk of rows."""
    a = rng.standard_normal((m, n)) + (1j * rng.standard_normal((m, n)) if np.dtype(dtype).kind == "c" else 0)
    a = np.where(rng.random((m, n)) < filled, a, 0).astype(dtype)
    a[:, 1] = a[100:130] = a[7] = 0
    return a


def chunked(a, kind, rows=CHUNKS, cols=-1, **meta):
    return da.from_array(a, chunks=(rows, cols)).map_blocks(kind, dtype=a.dtype, **meta)


def odd(block):
    """Return rows with duplicates, zeros that are stored, and indices of 64 bits in no order."""
    i, j = np.nonzero(block)
    values = np.concatenate([block[i, j] * 0.25, block[i, j] * 0.75, np.zeros(3, block.dtype)])
    i, j = (np.concatenate([x, x, [0, 0, 0] if len(block) else []]).astype(np.int64) for x in (i, j))
    if not len(block):
        values, i, j = values[:0], i[:0], j[:0]
    order = np.random.default_rng().permutation(len(values))
    return sp.coo_array((values[order], (i[order], j[order])), shape=block.shape)


def lied(block):
    return sp.csr_array(block)


def close(found, expected, dtype):
    found = found.compute() if hasattr(found, "compute") else found
    assert found.dtype == expected.dtype
    tolerance = 100 * np.finfo(dtype).eps
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * max(1, abs(expected).max()))


def check_products(kind, dtype):
    rng = np.random.default_rng()
    a, w, v = sparse_rows(rng, 300, 40, dtype), rng.standard_normal((40, 9)).astype(dtype), np.ones(40, dtype)
    b = sparse_rows(rng, 300, 40, dtype)[:40]
    x = da.from_array(w, chunks=(15, 5))
    for rows, cols in ((CHUNKS, -1), (CHUNKS, (10, 30))):
        s = chunked(a, kind, rows, cols)
        with enabled():
            for found in (s @ x, matmul(s, x), da.matmul(s, x), s.dot(x), da.dot(s, x), s @ w):
                assert isinstance(found._meta, np.ndarray)
                assert found.chunks[0] == s.chunks[0]
            close(found, a @ w, dtype)
            close(s @ x, a @ w, dtype)
            close(s @ da.from_array(v, chunks=7), a @ v, dtype)
            close(da.from_array(w.T.copy(), chunks=(4, 15)) @ chunked(b, kind, (30, 10), 20), w.T @ b, dtype)
            both = s @ chunked(b, kind, (30, 10), 20)
            assert sparse_package(both._meta) == sparse_package(s._meta) == sparse_package(both.blocks[0, 0].compute())
            close(both.map_blocks(dense, dtype=dtype, meta=w[:0]), a @ b, dtype)
        close(matmul(s, x, alpha=2, epilog="relu"), np.maximum(2 * (a @ w), 0), dtype)


@pytest.mark.parametrize("kind", EVERY)
def test_products_without_a_cluster(kind):
    with dask.config.set(scheduler="sync"):
        check_products(kind, np.float64)
        if kind in EVERY[:1]:
            check_products(kind, np.float32)
            check_products(odd, np.float64)
            a = np.arange(12).reshape(3, 4)
            with enabled():
                np.testing.assert_array_equal(chunked(a, kind, 2) @ a.T, a @ a.T, strict=True)
                # One operand is SciPy's own.
                np.testing.assert_array_equal(da.from_array(a, chunks=2) @ sp.csr_array(a.T), a @ a.T, strict=True)


def test_compressed_chunks_of_the_package_sparse():
    # By themselves: Dask slices them, which takes half a minute to compile.
    rng = np.random.default_rng()
    a, w = sparse_rows(rng, 300, 40, np.float64), rng.standard_normal((40, 9))
    x = sparse.GCXS.from_scipy_sparse(sp.csr_array(a))
    np.testing.assert_array_equal(compressed(x).toarray(), a)
    close(multiply(x, w), a @ w, np.float64)
    both = multiply(x, sparse.COO.from_numpy(a.T.copy()))
    assert isinstance(both, sparse.GCXS)
    close(dense(both), a @ a.T, np.float64)


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_what_dask_has_of_the_package_sparse_is_as_without(dtype):
    """Sums of narrow integers in 64 bits, unknown sizes of what is summed over, and einsum, which is sparse."""
    rng = np.random.default_rng()
    s = da.from_array(rng.integers(-1, 2, (12, 8)).astype(dtype), chunks=4).map_blocks(sparse.COO.from_numpy)
    w = da.from_array(rng.integers(-9, 9, (8, 5)).astype(dtype), chunks=3)
    chosen = da.from_array(rng.random(12) < 0.5, chunks=4)

    def made():
        return s @ w, s[chosen].T @ s[chosen], da.einsum("ij,jk->ik", s, w), da.einsum("ij,kj->ik", s, s)

    with enabled():
        ours = made()
    for found, expected in zip(dask.compute(*ours), dask.compute(*made()), strict=True):
        assert (type(found), found.dtype) == (type(expected), expected.dtype)
        np.testing.assert_array_equal(*(x.todense() if hasattr(x, "todense") else x for x in (found, expected)))


def test_products_on_workers(inproc_client):
    check_products(sp.csr_array, np.float64)
    s, x = chunked(np.eye(300), sp.csr_array), da.ones((300, 3))
    assert "sparse" in explain(s, x).reason
    with pytest.raises(PlanError, match="method='local' needs a collective run"):
        matmul(s, x, method="local")
    with pytest.raises(PlanError, match="loop over the items of a batch"):
        matmul(s, da.ones((2, 300, 3)))
    # Nothing says that chunks are sparse: only workers see it.
    hidden = chunked(np.eye(300), lied, meta=np.empty((0, 0)))
    with pytest.raises(RunFailedError, match="is a csr_array, and the array does not say that"):
        matmul(hidden, x, method="allgather").compute()


def check_tall(kind, dtype, *, hidden=False, scale=1.0):
    """Compare what is made of sparse rows with what is made of dense ones."""
    rng = np.random.default_rng()
    a = sparse_rows(rng, 300, 12, dtype)
    a[:, 2], a[:, 3] = rng.random(300) + scale, np.arange(300) % 3
    a[:, 1] += np.arange(300) % 50 == 0
    b, eps = rng.standard_normal((300, 2)).astype(dtype), np.finfo(dtype).eps
    s = chunked(a, kind, **({"meta": np.empty((0, 0), dtype)} if hidden else {}))
    y, wide = da.from_array(b, chunks=(90, 1)), a.astype(np.result_type(dtype, np.float64))
    centred = wide - wide.mean(axis=0)
    if not hidden:
        g = linalg.gram(s)
        assert problem_of(g.rechunk(3)).builder == "gram"
        close(g, (wide.conj().T @ wide).astype(dtype), dtype)
    c = (wide.T - wide.mean(axis=0)[:, None]) @ centred.conj() / 299
    scale_c = 1e3 * eps * np.abs(c).max()
    np.testing.assert_allclose(linalg.cov(s, rowvar=False).compute(), c, atol=scale_c)
    if not hidden:
        with enabled():
            np.testing.assert_allclose(da.cov(s.T).compute(), c, atol=scale_c)
    found = linalg.corrcoef(s, rowvar=False).compute()
    np.testing.assert_allclose(found, np.corrcoef(wide, rowvar=False), atol=1e4 * eps)
    components, variances, mean = linalg.pca(s, 4)
    assert components.dtype == np.dtype(dtype)
    c, v, mu = dask.compute(components, variances, mean)
    np.testing.assert_allclose(v, np.linalg.eigvalsh(centred.conj().T @ centred / 299)[::-1][:4], rtol=1e3 * eps)
    np.testing.assert_allclose(mu, wide.mean(axis=0), rtol=100 * eps, atol=100 * eps)
    np.testing.assert_allclose(c @ c.conj().T, np.eye(4), atol=1e3 * eps)
    scores = linalg.pca(s, 4).transform(s)
    np.testing.assert_allclose(scores, (wide - wide.mean(axis=0)) @ c.conj().T, atol=1e3 * eps * abs(wide).max())
    values = np.linalg.svd(wide, compute_uv=False)
    np.testing.assert_allclose(linalg.svdvals(s).compute(), values, rtol=1e3 * eps, atol=100 * eps * values[0])
    u, found, vh = dask.compute(*linalg.svd(s, full_matrices=False))
    np.testing.assert_allclose((u * found) @ vh, a, atol=1e3 * eps * values[0])
    found = linalg.svd_compressed(s, 3, n_power_iter=1)[1].compute()
    np.testing.assert_allclose(found, values[:3], rtol=1e-3)
    q, r = dask.compute(*linalg.qr(s))
    np.testing.assert_allclose(q @ r, a, atol=1e3 * eps * values[0])
    x, residuals, *_ = dask.compute(*linalg.lstsq(s, y))
    expected = np.linalg.lstsq(wide, b.astype(wide.dtype), rcond=None)
    np.testing.assert_allclose(x, expected[0], atol=1e3 * eps * values[0] / values[-1])
    np.testing.assert_allclose(residuals, expected[1], rtol=1e3 * eps)
    regular = wide.conj().T @ wide + 0.5 * np.eye(12)
    expected = np.linalg.solve(regular, wide.conj().T @ b)
    np.testing.assert_allclose(linalg.ridge(s, y, 0.5).compute(), expected, atol=1e3 * eps * values[0] / values[-1])


@pytest.mark.parametrize("kind", [*EVERY, odd])
def test_tall_matrices_without_a_cluster(kind):
    with dask.config.set(scheduler="sync"):
        check_tall(kind, np.float64)
        if kind is EVERY[0]:
            check_tall(lied, np.float64, hidden=True)
            check_tall(sp.coo_matrix, np.float64, hidden=True)
            for dtype in (np.float32, np.complex64, np.complex128):
                check_tall(kind, dtype)


def test_tall_matrices_on_workers(inproc_client):
    check_tall(sp.csr_array, np.float64)
    check_tall(odd, np.float32)


def square(rng, n, dtype):
    """Return a Hermitian positive definite sparse matrix, dense, and its eigenvalues."""
    a = np.where(rng.random((n, n)) < 0.05, noise(rng, (n, n), dtype), 0)
    a = (a + a.conj().T).astype(dtype)
    np.fill_diagonal(a, 1 + abs(a).sum(axis=1) + rng.random(n))
    return a, np.linalg.eigvalsh(a)


def check_iterations(make, preconditioner, dtype="float64"):
    """Compare what solvers make of a sparse matrix with what NumPy makes of the dense one."""
    rng = np.random.default_rng()
    a, values = square(rng, 60, dtype)
    x, b, m = make(a), noise(rng, (60,), dtype), preconditioner(np.diag(1 / np.diag(a)))
    y, expected = da.from_array(b, chunks=13), np.linalg.solve(a, b)
    # What solvers reach in the type.
    tight, near = (1e-5, 1e-3) if np.finfo(dtype).eps > 1e-10 else (1e-12, 1e-8)
    for solver in (linalg.cg, linalg.minres, linalg.gmres):
        for right, options in ((b, {}), (y, {"M": m}), (y, {"x0": b})):
            found, info = dask.compute(*solver(x, right, rtol=tight, **options))
            assert (found.dtype, info) == (dtype, 0)
            np.testing.assert_allclose(found, expected, atol=near)
    w, v = dask.compute(*linalg.eigsh(x, 3))
    np.testing.assert_allclose(w, values[-3:], rtol=near)
    np.testing.assert_allclose(a @ v, v * w, atol=100 * near)
    start = da.from_array(noise(rng, (60, 2), dtype), chunks=(20, 2))
    w, _ = dask.compute(*linalg.lobpcg(x, start, M=m, tol=near, maxiter=300))
    np.testing.assert_allclose(w, values[:-3:-1], rtol=near)
    for solver in (linalg.lsqr, linalg.lsmr):
        for options in ({}, {"x0": b}):
            found, *_ = dask.compute(*solver(x, y, 0, tight, tight, 1e9, 400, **options))
            np.testing.assert_allclose(found, expected, atol=10 * near)


def in_chunks(kind, *chunks):
    return lambda a: da.from_array(a, chunks=chunks).map_blocks(kind, dtype=a.dtype)


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", EVERY)
def test_iterations_without_a_cluster(kind):
    with dask.config.set(scheduler="sync"):
        for chunks in ((17, 23), (-1, 9)):
            check_iterations(in_chunks(kind, *chunks), in_chunks(kind, 20, 35))
        for dtype in ("float32", "complex64", "complex128") if kind is EVERY[0] else ():
            check_iterations(kind, kind, dtype)


def test_iterations_on_workers(inproc_client):
    check_iterations(in_chunks(sp.csr_array, 17, 23), sp.csc_matrix)
    check_iterations(sp.coo_array, in_chunks(sp.csr_array, 40, 40), "complex128")


@pytest.mark.parametrize("dtype", ["float64", "complex128", "int64"])
@pytest.mark.parametrize("shape", [(50, 20), (20, 50)])
def test_least_squares_of_sparse_matrices_of_any_shape(dtype, shape):
    rng = np.random.default_rng()
    a = np.where(rng.random(shape) < 0.3, 3 * noise(rng, shape, "float64"), 0).astype(dtype)
    b = rng.standard_normal(shape[0])
    expected = np.linalg.lstsq(a, b)[0]
    for x, solver in itertools.product((sp.csc_array(a), chunked(a, sp.csr_array, 7, 9)), (linalg.lsqr, linalg.lsmr)):
        found, *_ = dask.compute(*solver(x, da.from_array(b, chunks=9), 0, 1e-13, 1e-13, 1e12, 999), scheduler="sync")
        np.testing.assert_allclose(found, expected, atol=1e-8)


def test_a_matrix_of_scipys_is_cut_as_the_right_side():
    a, b = sp.eye_array(60, format="csr"), da.ones(60, chunks=(20, 30, 10))
    assert problem_of(linalg.cg(a, b)[0])["a"].chunks == ((20, 30, 10), (60,))
    assert problem_of(linalg.lsqr(a[:, :9], b)[0])["a"].chunks == ((20, 30, 10), (9,))
    made = on_ranks(linalg.cg(2 * a, b), {"a": 2 * a, "b": np.ones((60, 1))})
    np.testing.assert_allclose(made["r0"], 0.5)
    for wrong, message in (((a, b[:50]), r"A has 60 rows, so b must have shape \(60,\); it has \(50,\)"),
                           ((a[:50], b), "A must be square, got 50 x 60")):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            linalg.cg(*wrong)


def test_rows_that_are_elsewhere():
    rng = np.random.default_rng()
    a, b = sparse_rows(rng, 300, 12, np.float64, filled=0.5), rng.standard_normal((300, 2))
    a[:, 1] = 1 + np.arange(300) % 2
    results = linalg.lstsq(chunked(a, sp.csr_array), da.from_array(b, chunks=90))[:2]
    made = on_ranks(results, {"a": sp.csr_array(a), "b": b})
    assert_near(made["x"], np.linalg.lstsq(a, b, rcond=None)[0], rtol=1e-9)


def test_peers_ask_for_whole_chunks_which_may_be_empty():
    s = chunked(np.eye(300, 12), sp.csr_array)
    plan = plan_program(problem_of(linalg.svdvals(s)), [Worker("w")], engine="numpy")
    plan.check_boxes("input", np.array([(0, i, *plan.whole("a", i)) for i in range(len(CHUNKS))]))
    for box in ((0, 0, 0, 12), (0, 50, 0, 12), (0, 101, 0, 12)):
        with pytest.raises(ProtocolError):
            plan.check_boxes("input", np.array([(0, 0, *box)]))


@pytest.mark.parametrize("filled", [0.02, 0.3])
def test_means_that_are_large_against_deviations(filled):
    rng = np.random.default_rng()
    a = sparse_rows(rng, 3000, 150, np.float64, filled)
    a[:, 5], a[:, 140] = 1e7 + rng.standard_normal(3000), rng.standard_normal(3000) - 1e5
    # Of two values, so that half of the rows have none.
    a[:, 60] = np.where(rng.random(3000) < 0.5, 1e3, 0)
    _, variances, mean = dask.compute(*linalg.pca(chunked(a, sp.csr_array, 800), 20), scheduler="sync")
    centred = a - a.mean(axis=0)
    expected = np.linalg.eigvalsh(centred.T @ centred / 2999)[::-1][:20]
    np.testing.assert_allclose(variances, expected, atol=1e-13 * expected[0])
    np.testing.assert_allclose(variances[1:5], expected[1:5], rtol=1e-8)
    np.testing.assert_allclose(mean, a.mean(axis=0), rtol=1e-12, atol=1e-15)


def test_variances_beyond_those_of_a_covariance_matrix():
    rng = np.random.default_rng()
    a = sparse_rows(rng, 500, 6, np.float64, 0.06) * 10.0 ** -np.arange(6)
    a[:, 1] = (np.arange(500) % 40 == 0) * 1e-8
    found = linalg.pca(chunked(a, sp.csr_array, 90))[1].compute(scheduler="sync")
    np.testing.assert_allclose(found, np.linalg.svd(a - a.mean(axis=0))[1] ** 2 / 499, rtol=1e-6)


def test_chunks_that_do_not_have_whole_rows():
    rng = np.random.default_rng()
    a = sparse_rows(rng, 300, 12, np.float32)
    for kind in (sp.coo_array, sparse.COO.from_numpy):
        g = linalg.gram(chunked(a, kind, 90, (5, 7)))
        assert g.chunks == ((5, 7),) * 2
        close(g.compute(scheduler="sync"), a.T @ a, np.float32)


def test_what_sparse_chunks_are_not_for():
    s = chunked(np.eye(40), sp.csr_array, 10)
    for function in (linalg.cholesky, linalg.inv, linalg.lu, linalg.eigh, linalg.det, linalg.polar, linalg.pinv):
        with pytest.raises(PlanError, match=r"sparse \(csr_array\); expected dense ones: convert them by a.map_blocks"):
            function(s)
    with pytest.raises(PlanError, match="m and y must be dense"):
        linalg.cov(s, s)
    with pytest.raises(PlanError, match="the chunks of b are sparse"):
        linalg.lstsq(s, s[:, :1])
    with pytest.raises(PlanError, match="a is sparse and 10 x 40; expected columns, and not more of them than rows"):
        linalg.pca(s[:10])
    with pytest.raises(PlanError, match="method='columns' is not for sparse rows"):
        linalg.svdvals(s, method="columns")
    with pytest.raises(PlanError, match="are sparse"):
        linalg.svd(s[:, :5])
    shifted = chunked(np.eye(40), lambda x: sparse.COO.from_numpy(x, fill_value=1.0), 10)
    with pytest.raises(EngineError, match="Elements that are not stored must be 0"):
        linalg.gram(shifted).compute(scheduler="sync")


def test_memory_of_sparse_rows():
    s = da.zeros((10**6, 2000), chunks=(10**5, 2000)).map_blocks(sp.csr_array)
    problem = problem_of(linalg.pca(s, 50)[0])
    plan = plan_program(problem, [Worker(f"w{number}", 1, 6 * 2**30) for number in range(2)], engine="numpy")
    # Dense ones have 8 GB on each of two workers.
    assert max(plan.projected_bytes.values()) < 4 * 2**30
    assert ProgramPlacement.from_wire(plan.to_wire()).problem == problem


def test_square_matrices_whose_dense_ones_nobody_can_hold():
    n = 10**6
    s = da.zeros((n, n), chunks=(n // 4, n)).map_blocks(sp.csr_array)
    problem = problem_of(linalg.cg(s, da.ones(n, chunks=n // 4))[0])
    plan = plan_program(problem, [Worker(f"w{number}", 1, 2**30) for number in range(2)], engine="numpy")
    assert max(plan.projected_bytes.values()) < 2**29
    # Of dense rows it would be a day.
    assert plan.seconds < 100


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(7, 5), (300, 40), (40, 300), (1, 1), (3, 0), (0, 3)])
@pytest.mark.parametrize("at_once", [2**18, 50])
@pytest.mark.parametrize("kernels", [True, False])
def test_gram_matrices_of_compressed_rows(dtype, shape, at_once, kernels, monkeypatch):
    (m, n), random = shape, np.random.default_rng()
    a = sp.random_array(shape, density=0.3, format="coo", rng=random)
    # Elements may be stored twice, and in any order; some rows have none.
    twice = [np.concatenate([x[::-1], x]) for x in (a.row, a.col, a.data)]
    twice = [x[twice[0] % 3 > 0] for x in twice]
    pointers, order = np.searchsorted(np.sort(twice[0]), np.arange(m + 1)), np.argsort(twice[0], kind="stable")
    data = twice[2] * np.exp(1j * random.uniform(0, 6, len(order))) if dtype.startswith("complex") else twice[2]
    a = sp.csr_array((data[order].astype(dtype), twice[1][order], pointers), shape=shape)
    before = a.copy()
    monkeypatch.setattr(sparse_chunks, "_AT_ONCE", at_once)
    monkeypatch.setattr(sparse_chunks, "_EACH", 0)
    if not kernels:
        monkeypatch.delattr(sp._sparsetools, "csc_matvec")
    g = np.asfortranarray(random.standard_normal((n, n)).astype(dtype))
    expected = g + np.tril(a.toarray().conj().T @ a.toarray())
    add_thin_gram(a, g)
    assert all((getattr(a, part) == getattr(before, part)).all() for part in ("data", "indices", "indptr"))
    tolerance = 1e-5 if dtype in ("float32", "complex64") else 1e-13
    np.testing.assert_allclose(np.tril(g), np.tril(expected), rtol=0, atol=tolerance * max(1, m))
