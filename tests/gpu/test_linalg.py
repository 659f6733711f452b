"""Factorizations on GPU workers, by LAPACK's residuals."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from leaks import assert_nothing_left
from matrices import noise, problem_of
from residuals import assert_eig, assert_eigh, assert_schur, assert_svd
from test_epilogs import computed, finished, on_gpus

import dask_distmm
from dask_distmm import linalg
from dask_distmm.arrays.linalg import factorize
from dask_distmm.planning import program

pytestmark = pytest.mark.engines("peer", "nccl")
# Of steps that are products, too, or of what one GPU computes alone.
on_one_host = pytest.mark.engines("peer")
COUNTS = (1, 2, 3, 4, 8)
# All workers take part: by itself a matrix of this size goes to one.
SHARED = {"method": "columns"}
DTYPES = ["float32", "float64", "complex64", "complex128"]
# LAPACK's TESTING takes 30.
GATE = 30


def positive(rng, n, dtype):
    x = noise(rng, (n, n), dtype)
    return (x @ x.conj().T + n * np.eye(n)).astype(dtype)


def residual(found, expected, scale, n):
    """||found - expected|| / (n scale eps), in the 1-norm and in the type of `expected`."""
    eps = np.finfo(expected.dtype).eps
    wide = np.promote_types(expected.dtype, np.float64)
    error = np.abs(found.astype(wide) - expected.astype(wide)).sum(axis=0).max()
    assert np.isfinite(error)
    return error / (max(1, n) * scale * eps)


def norm(x):
    return float(np.abs(x).sum(axis=0).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 70, 701])
@pytest.mark.parametrize("lower", [True, False])
def test_cholesky(clusters, nworkers, dtype, n, lower):
    client, _ = clusters(nworkers)
    s = positive(np.random.default_rng(), n, dtype)
    before = finished(client)
    found = computed(client, linalg.cholesky(on_gpus(s), lower=lower, **SHARED))
    assert len(finished(client) - before) == 1
    low = found if lower else found.conj().T
    assert not np.triu(low, 1).any()
    assert residual(low @ low.conj().T, s, norm(s), n) < GATE
    if lower:
        signs = np.where(np.arange(n) < n - n // 3, 1, -1)
        s = (s * np.where(signs[:, None] == signs, signs, 0.1)).astype(dtype)
        low, d = (computed(client, x) for x in client.persist(linalg.ldlt(on_gpus(s), **SHARED)))
        assert residual(low * d @ low.conj().T, s, norm(s), n) < GATE
        assert (d > 0).sum() == n - n // 3
        del low, d
    assert_nothing_left(client)


@on_one_host
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor_dtype", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("assume_a", ["gen", "pos"])
@pytest.mark.parametrize(("n", "condition", "nrhs"), [(700, 10, 3), (2100, 10, 1), (700, 1e3, 40), (300, 1e13, 3)])
def test_solutions_refined_with_factors_of_few_bits(
    clusters, nworkers, dtype, factor_dtype, assume_a, n, condition, nrhs
):
    single = np.finfo(dtype).bits == 32
    if single and (factor_dtype == "float32" or condition > 1e4):
        pytest.skip("as many bits as the matrix has, or a matrix that is singular in its own type")
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    wide = np.promote_types(dtype, np.float64)
    u, v = (np.linalg.qr(noise(rng, (n, n), wide))[0] for _ in range(2))
    a = (u * np.geomspace(1, 1 / condition, n)) @ (u if assume_a == "pos" else v).conj().T
    a, b = ((a + a.conj().T) / 2 if assume_a == "pos" else a).astype(dtype), noise(rng, (n, nrhs), dtype)
    how = {"assume_a": assume_a, "factor_dtype": factor_dtype, "full_output": True, **SHARED}
    before = finished(client)
    x, told = linalg.solve(on_gpus(a), on_gpus(b), **how)
    x, told_way = client.persist([x, told.way])
    found, way = computed(client, x), float(computed(client, told_way))
    assert len(finished(client) - before) == 1
    assert residual(a.astype(wide) @ found, b, norm(a) * norm(found) / max(1, n), n) < GATE
    assert way == 2 if condition > 1e12 else way in (0, 1) if condition == 10 else True
    # What is persisted keeps its barrier.
    del x, told_way
    assert_nothing_left(client)


@on_one_host
@pytest.mark.parametrize("view", [np.s_[::-1, :300], np.s_[:, ::2]], ids=["rows", "columns"])
def test_solutions_refined_with_chunks_that_are_views(clusters, nworkers, view):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    whole, b = rng.standard_normal((300, 600)), rng.standard_normal((300, 3))
    a = whole[view]
    x = computed(client, linalg.solve(on_gpus(whole)[view], on_gpus(b), factor_dtype="float32", **SHARED))
    assert residual(a @ x, b, norm(a) * norm(x) / 300, 300) < GATE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(90, 90), (640, 640), (300, 130), (130, 300)])
def test_lu(clusters, nworkers, dtype, shape):
    client, _ = clusters(nworkers)
    a = noise(np.random.default_rng(), shape, dtype)
    p, low, up = (computed(client, x) for x in client.persist(linalg.lu(on_gpus(a), p_indices=True, **SHARED)))
    assert sorted(p.tolist()) == list(range(shape[0]))
    # Of complex numbers LAPACK takes the one of largest |real| + |imaginary|.
    assert abs(low).max() <= (2**0.5 if np.dtype(dtype).kind == "c" else 1) + 1e-6
    assert residual((low @ up)[p], a, norm(a), max(shape)) < GATE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(90, 90), (640, 640), (900, 130), (130, 300)])
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_qr(clusters, nworkers, dtype, shape, mode):
    client, _ = clusters(nworkers)
    a = noise(np.random.default_rng(), shape, dtype)
    if mode == "r":
        r = computed(client, linalg.qr(on_gpus(a), mode=mode, **SHARED))
        assert residual(r.conj().T @ r, a.conj().T @ a, norm(a) ** 2, max(shape)) < GATE
        return
    q, r = (computed(client, x) for x in client.persist(linalg.qr(on_gpus(a), mode=mode, **SHARED)))
    assert residual(q @ r, a, norm(a), max(shape)) < GATE
    assert residual(q.conj().T @ q, np.eye(q.shape[1], dtype=dtype), 1, max(shape)) < GATE
    assert not np.tril(r, -1).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("assume_a", ["gen", "pos"])
@pytest.mark.parametrize("nrhs", [0, 1, 70])
def test_solve(clusters, nworkers, dtype, assume_a, nrhs):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    n = 350
    a = positive(rng, n, dtype) if assume_a == "pos" else noise(rng, (n, n), dtype)
    b = noise(rng, (n, nrhs) if nrhs else (n,), dtype)
    x = computed(client, linalg.solve(on_gpus(a), on_gpus(b), assume_a=assume_a, **SHARED))
    assert x.shape == b.shape
    error = a.astype(np.complex128) @ x - b
    eps = np.finfo(dtype).eps
    assert norm(error.reshape(n, -1)) / (norm(a) * norm(x.reshape(n, -1)) * eps * n) < GATE


def test_other_results(clusters, nworkers):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    a, tall, b = noise(rng, (210, 210), "float64"), noise(rng, (400, 90), "float64"), noise(rng, (400, 7), "float64")
    sign, logarithm = (computed(client, x) for x in client.persist(linalg.slogdet(on_gpus(a), **SHARED)))
    expected = np.linalg.slogdet(a)
    assert sign == expected[0]
    np.testing.assert_allclose(logarithm, expected[1], rtol=1e-12)
    inverse = computed(client, linalg.inv(on_gpus(a), **SHARED))
    assert residual(inverse @ a, np.eye(210), norm(a) * norm(inverse), 210) < GATE
    x, residuals, rank, _ = linalg.lstsq(on_gpus(tall), on_gpus(b), **SHARED)
    expected = np.linalg.lstsq(tall, b, rcond=None)
    np.testing.assert_allclose(computed(client, x), expected[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(computed(client, residuals), expected[1], rtol=1e-9)
    assert rank == 90
    np.testing.assert_allclose(computed(client, linalg.pinv(on_gpus(tall), **SHARED)), np.linalg.pinv(tall), atol=1e-12)
    factor = linalg.lu_factor(on_gpus(a), **SHARED)
    x = computed(client, linalg.lu_solve(factor, on_gpus(a[:, :5].copy()), **SHARED))
    np.testing.assert_allclose(x, np.eye(210)[:, :5], atol=1e-9)
    assert_nothing_left(client)


@on_one_host
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_functions_of_matrices(clusters, nworkers, dtype):
    client, _ = clusters(nworkers)
    a = noise(np.random.default_rng(), (150, 150), dtype)
    w, v = (computed(client, x) for x in client.persist(linalg.eig(on_gpus(a))))
    assert_eig(a, w, v)
    assert abs(computed(client, linalg.eigvals(on_gpus(a))).sum() - np.trace(a)) < 3e4 * np.finfo(dtype).eps
    w, vl, v = (computed(client, x) for x in client.persist(linalg.eig(on_gpus(a), left=True)))
    assert_eig(a, w, v, vl)
    assert_schur(a, *(computed(client, x) for x in client.persist(linalg.schur(on_gpus(a)))))
    near = {"rtol": 0, "atol": 1e6 * np.finfo(dtype).eps}
    root = computed(client, linalg.sqrtm(on_gpus(a)))
    np.testing.assert_allclose(root @ root, a, **near)
    logarithm = linalg.logm(on_gpus(a))
    for method in ("local", "rows"):
        np.testing.assert_allclose(computed(client, linalg.expm(logarithm, method=method)), a, **near)


@on_one_host
def test_results_by_singular_values(clusters, nworkers):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    a, tall = noise(rng, (210, 210), "float64"), noise(rng, (600, 40), "float64")
    deficient = tall[:, :30] @ noise(rng, (30, 50), "float64")
    values = np.linalg.svd(a, compute_uv=False)
    near = {"rtol": 1e-9, "atol": 1e-9}
    np.testing.assert_allclose(computed(client, linalg.svdvals(on_gpus(a))), values, **near)
    for order in (2, -2, "nuc"):
        np.testing.assert_allclose(
            computed(client, linalg.norm(on_gpus(a), ord=order)), np.linalg.norm(a, order), **near
        )
    np.testing.assert_allclose(computed(client, linalg.cond(on_gpus(a))), np.linalg.cond(a), rtol=1e-7)
    assert computed(client, linalg.matrix_rank(on_gpus(deficient))) == 30
    inverse = computed(client, linalg.pinv(on_gpus(deficient), rtol=1e-10))
    np.testing.assert_allclose(inverse, np.linalg.pinv(deficient, rtol=1e-10), atol=1e-9)
    np.testing.assert_allclose(
        computed(client, linalg.eigvalsh(on_gpus(a + a.T))), np.linalg.eigvalsh(a + a.T), rtol=0, atol=1e-10
    )
    u, p = (computed(client, x) for x in client.persist(linalg.polar(on_gpus(a))))
    np.testing.assert_allclose(u @ p, a, **near)
    np.testing.assert_allclose(u.T @ u, np.eye(210), **near)
    assert (np.linalg.eigvalsh(p) > 0).all()
    assert_nothing_left(client)


@on_one_host
@pytest.mark.parametrize("dtype", DTYPES)
def test_randomized_svd(clusters, nworkers, dtype):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    left, right = (np.linalg.qr(noise(rng, shape, dtype))[0] for shape in ((900, 12), (200, 12)))
    expected = np.geomspace(1e3, 1, 12).astype(dtype)
    x = ((left * expected) @ right.conj().T).astype(dtype)
    u, s, v = (computed(client, one) for one in client.persist(linalg.svd_compressed(on_gpus(x), 5)))
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(s, expected[:5].real, rtol=1e3 * eps)
    np.testing.assert_allclose(np.abs(u.conj().T @ left[:, :5]), np.eye(5), atol=1e4 * eps)
    np.testing.assert_allclose(np.abs(v @ right[:, :5]), np.eye(5), atol=1e4 * eps)
    assert_nothing_left(client)


@on_one_host
def test_functions_of_dask_and_numpy(clusters, nworkers):
    """Under `enable()`; stock Dask's do not take CuPy chunks, or factorize no such chunks."""
    client, _ = clusters(nworkers)
    a = noise(np.random.default_rng(), (210, 210), "float64")
    with dask_distmm.enabled():
        x = on_gpus(a)
        found = {
            "inv": computed(client, np.linalg.inv(x)),
            "det": computed(client, np.linalg.det(x)),
            "solve": computed(client, da.linalg.solve(x, on_gpus(a[:, 0].copy()))),
            "norm": computed(client, np.linalg.norm(x, 2)),
        }
    np.testing.assert_allclose(found["inv"] @ a, np.eye(210), atol=1e-9)
    np.testing.assert_allclose(found["det"], np.linalg.det(a), rtol=1e-9)
    np.testing.assert_allclose(found["solve"], np.eye(210)[:, 0], atol=1e-9)
    np.testing.assert_allclose(found["norm"], np.linalg.norm(a, 2), rtol=1e-9)


def test_matrices_that_have_none(clusters, nworkers):
    client, _ = clusters(nworkers)
    a = -np.eye(300)
    with pytest.raises(np.linalg.LinAlgError, match="leading minor of order 1 "):
        computed(client, linalg.cholesky(on_gpus(a), **SHARED))
    with pytest.raises(np.linalg.LinAlgError, match="singular"):
        computed(client, linalg.inv(on_gpus(0 * a), **SHARED))
    # And the workers are as good as before.
    np.testing.assert_allclose(computed(client, linalg.inv(on_gpus(a), **SHARED)), a)
    assert_nothing_left(client)


def test_matrices_that_are_given_up(clusters, nworkers):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    s, a, b = positive(rng, 701, "float64"), noise(rng, (701, 701), "float64"), noise(rng, (701, 3), "float64")
    low = computed(client, linalg.cholesky(on_gpus(s), lower=True, overwrite_a=True, **SHARED))
    assert residual(low @ low.T, s, norm(s), 701) < GATE
    kept = on_gpus(a).persist()
    x = computed(client, linalg.solve(kept, on_gpus(b), overwrite_a=True, **SHARED))
    assert norm(a @ x - b) / (norm(a) * norm(x) * np.finfo("float64").eps * 701) < GATE
    np.testing.assert_array_equal(computed(client, kept), a)
    del kept
    assert_nothing_left(client)


def test_numpy_chunks(clusters, nworkers):
    """Chunks on the host are factorized on GPUs and come back as NumPy's where a cluster has only the GPU engine."""
    client, _ = clusters(nworkers)
    s = positive(np.random.default_rng(), 300, "float64")
    low = client.compute(linalg.cholesky(da.from_array(s, chunks=77), lower=True, **SHARED), sync=True)
    assert isinstance(low, np.ndarray)
    assert residual(low @ low.T, s, norm(s), 300) < GATE


@pytest.mark.parametrize("dtype", DTYPES)
def test_triangular_systems(clusters, nworkers, dtype):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    a, b = positive(rng, 350, dtype), noise(rng, (350, 40), dtype)
    for lower, trans, right in ((True, "N", False), (False, "N", False), (True, "C", False), (False, "T", True)):
        whole = (np.tril if lower else np.triu)(a)
        given, side = on_gpus(a), on_gpus(b.T.copy() if right else b)
        x = computed(client, linalg.solve_triangular(given, side, trans, lower, right=right, **SHARED))
        op = {"N": whole, "T": whole.T, "C": whole.conj().T}[trans]
        error = x @ op - b.T if right else op @ x - b
        assert norm(error) / (norm(op) * norm(x) * np.finfo(dtype).eps * 350) < GATE


@on_one_host
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_engines_agree(clusters, nworkers, dtype):
    """Panels that are broadcast are those that are pulled."""
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    n, near = 900, {"rtol": 0, "atol": 1e4 * np.finfo(dtype).eps}
    s, a = positive(rng, n, dtype), noise(rng, (n, n), dtype)

    def both(function, x, **options):
        found = []
        for engine in ("peer", "nccl"):
            made = function(on_gpus(x), engine=engine, **SHARED, **options)
            parts = made if isinstance(made, tuple) else (made,)
            found.append([computed(client, one) for one in client.persist(parts)])
        return zip(*found, strict=True)

    for mine, theirs in both(linalg.cholesky, s, lower=True):
        np.testing.assert_allclose(mine / norm(mine), theirs / norm(mine), **near)
    (_, pivots), (_, others) = (list(pair) for pair in zip(*both(linalg.lu_factor, a), strict=True))
    if np.dtype(dtype).kind == "f":
        np.testing.assert_array_equal(pivots, others)
    for mine, theirs in both(linalg.qr, a, mode="r"):
        np.testing.assert_allclose(abs(mine) / norm(mine), abs(theirs) / norm(mine), **near)


@on_one_host
@pytest.mark.parametrize("dtype", DTYPES)
def test_eigenvalues_and_singular_values(clusters, nworkers, dtype):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    a, tall = noise(rng, (300, 300), dtype), noise(rng, (500, 120), dtype)
    b, h = positive(rng, 300, dtype), a + a.conj().T
    assert_eigh(h, *(computed(client, x) for x in client.persist(linalg.eigh(on_gpus(h)))))
    w, v = (computed(client, x) for x in client.persist(linalg.eigh(on_gpus(h), subset_by_index=(10, 19))))
    assert_eigh(h, w, v, first=10)
    assert_eigh(h, *(computed(client, x) for x in client.persist(linalg.eigh(on_gpus(h), b=on_gpus(b)))), b)
    for x, method in ((a, "local"), (tall, "local"), (tall, "columns"), (tall.conj().T.copy(), "columns")):
        assert_svd(x, *(computed(client, one) for one in client.persist(linalg.svd(on_gpus(x), False, method=method))))
    assert_nothing_left(client)


@on_one_host
@pytest.mark.parametrize("dtype", [*DTYPES, "int64"])
@pytest.mark.parametrize("condition", [1, 50, 1e30])
def test_tall_matrices(clusters, nworkers, dtype, condition):
    client, _ = clusters(nworkers)
    a = (noise(np.random.default_rng(), (2000, 60), "complex64" if dtype[0] == "c" else "float32") * 100).astype(dtype)
    if condition == 1e30:
        a[:, 7] = a[:, 3]
    elif condition > 1:
        a[:, 1:] += a[:, :1] * 20
    x = on_gpus(a)
    before = finished(client)
    q, r = (computed(client, one) for one in client.persist(linalg.qr(x, method="rows")))
    assert len(finished(client) - before) == 1
    wide = a.astype(q.dtype)
    assert residual(q @ r, wide, norm(wide), len(a)) < GATE
    assert residual(q.conj().T @ q, np.eye(60, dtype=q.dtype), 1, len(a)) < GATE
    assert not np.tril(r, -1).any()
    assert_svd(
        wide, *(computed(client, one) for one in client.persist(linalg.svd(x, full_matrices=False, method="rows")))
    )
    _, variances, mean = (computed(client, one) for one in client.persist(linalg.pca(x, 4)))
    expected = np.linalg.svd(wide - wide.mean(axis=0), compute_uv=False)[:4]
    np.testing.assert_allclose(np.sqrt(variances * 1999), expected, atol=GATE * np.finfo(q.dtype).eps * expected[0])
    np.testing.assert_allclose(mean, wide.mean(axis=0), atol=GATE * np.finfo(q.dtype).eps * abs(wide).max())
    s = computed(client, linalg.svd_compressed(x, 50, n_power_iter=2)[1])
    assert s[0] <= np.linalg.norm(wide, 2) * (1 + 1e-3)
    if condition < 1e30:
        b = on_gpus(wide[:, :5].copy())
        near = {"rtol": 0, "atol": 1e4 * np.finfo(q.dtype).eps}
        np.testing.assert_allclose(computed(client, linalg.lstsq(x, b)[0]), np.eye(60, 5), **near)
        np.testing.assert_allclose(computed(client, linalg.pinv(x)) @ wide, np.eye(60), **near)
        found = computed(client, linalg.ridge(x, b, [0.0, 1.0]))
        np.testing.assert_allclose(found[0], np.eye(60, 5), **near)
        coef, intercept = (
            computed(client, one) for one in client.persist(linalg.ridge(x, b + 7, 1.0, fit_intercept=True))
        )
        away = (wide - wide.mean(0)).astype("complex128")
        # The penalty as 60 more rows: a Gram matrix would have the square of the condition number.
        stacked = np.concatenate([away, np.eye(60)]), np.concatenate([away[:, :5], np.zeros((60, 5))])
        expected = np.linalg.lstsq(*stacked)[0]
        np.testing.assert_allclose(coef, expected, rtol=0, atol=1e5 * np.finfo(q.dtype).eps)
        np.testing.assert_allclose(intercept, wide[:, :5].mean(0) + 7 - wide.mean(0) @ expected, rtol=1e-3)
    assert_nothing_left(client)


def _rows_on_gpus(block):
    import cupy
    import cupyx.scipy.sparse

    return cupyx.scipy.sparse.csr_matrix(cupy.asarray(block))


@on_one_host
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sparse_rows(clusters, nworkers, dtype):
    import cupyx.scipy.sparse

    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    a = np.where(rng.random((2000, 60)) < 0.1, rng.standard_normal((2000, 60)), 0).astype(dtype)
    b, near = rng.standard_normal((2000, 3)).astype(dtype), {"rtol": 0, "atol": 1e3 * np.finfo(dtype).eps}
    meta = cupyx.scipy.sparse.csr_matrix((0, 0), dtype=dtype)
    s = da.from_array(a, chunks=(700, 60)).map_blocks(_rows_on_gpus, dtype=dtype, meta=meta)
    gram = a.T.astype("float64") @ a
    np.testing.assert_allclose(computed(client, linalg.gram(s)) / abs(gram).max(), gram / abs(gram).max(), **near)
    variances = computed(client, linalg.pca(s, 5)[1])
    np.testing.assert_allclose(variances, np.linalg.eigvalsh(np.cov(a.astype("float64").T))[::-1][:5], **near)
    x = computed(client, linalg.lstsq(s, on_gpus(b))[0])
    np.testing.assert_allclose(x, np.linalg.lstsq(a, b, rcond=None)[0], **near)
    np.testing.assert_allclose(computed(client, dask_distmm.matmul(s, on_gpus(b[:60]))), a @ b[:60], **near)
    assert_nothing_left(client)


@on_one_host
@pytest.mark.parametrize("dtype", DTYPES)
def test_iterations_on_sparse_rows(clusters, nworkers, dtype):
    import cupyx.scipy.sparse

    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    a = np.where(rng.random((300, 300)) < 0.02, noise(rng, (300, 300), dtype), 0)
    a = (a + a.conj().T).astype(dtype)
    np.fill_diagonal(a, 1 + abs(a).sum(axis=1))
    b, eps = noise(rng, (300,), dtype), np.finfo(dtype).eps
    meta = cupyx.scipy.sparse.csr_matrix((0, 0), dtype=dtype)
    s = da.from_array(a, chunks=(90, 300)).map_blocks(_rows_on_gpus, dtype=dtype, meta=meta)
    tall = da.from_array(a[:, :60], chunks=(90, 60)).map_blocks(_rows_on_gpus, dtype=dtype, meta=meta)
    y, expected, values = on_gpus(b), np.linalg.solve(a, b), np.linalg.eigvalsh(a)
    near = {"rtol": 0, "atol": 1e4 * eps}
    for solver in (linalg.cg, linalg.minres, linalg.gmres):
        for options in ({}, {"M": on_gpus(1 / np.diag(a))}):
            np.testing.assert_allclose(computed(client, solver(s, y, rtol=10 * eps, **options)[0]), expected, **near)
    np.testing.assert_allclose(computed(client, linalg.eigsh(s, 3)[0]), values[-3:], rtol=1e3 * eps)
    start = on_gpus(noise(rng, (300, 2), dtype))
    found = computed(client, linalg.lobpcg(s, start, tol=1e4 * eps, maxiter=500)[0])
    np.testing.assert_allclose(found, values[:-3:-1], rtol=1e3 * eps)
    for solver in (linalg.lsqr, linalg.lsmr):
        found = computed(client, solver(s, y, 0, 10 * eps, 10 * eps, 1e9, 900)[0])
        np.testing.assert_allclose(found, expected, **near)
        found = computed(client, solver(tall, y, 0, 10 * eps, 10 * eps, 1e9, 900)[0])
        np.testing.assert_allclose(found, np.linalg.lstsq(a[:, :60], b)[0], **near)
    assert_nothing_left(client)


@on_one_host
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_with_a_triangle(clusters, nworkers, dtype):
    client, _ = clusters(nworkers)
    x = noise(np.random.default_rng(), (300, 90), dtype)
    found = computed(client, linalg.gram(on_gpus(x)))
    np.testing.assert_array_equal(found, found.conj().T)
    near = {"rtol": 0, "atol": 50 * np.finfo(dtype).eps * np.linalg.norm(x, 2) ** 2}
    np.testing.assert_allclose(found, x.conj().T @ x, **near)
    a, b = x[:90].copy(), x[90:180].copy()
    found = computed(client, linalg.symm(on_gpus(a), on_gpus(b)))
    np.testing.assert_allclose(found, (np.triu(a) + np.triu(a, 1).T) @ b, **near)
    ones = np.triu(a, 1) + np.eye(90, dtype=dtype)
    found = computed(client, linalg.trmm(on_gpus(a), on_gpus(b), trans="C", unit_diagonal=True))
    np.testing.assert_allclose(found, ones.conj().T @ b, **near)


@on_one_host
def test_tall_matrices_whose_chunks_ranks_make(clusters, nworkers, monkeypatch):
    import cupy

    client, _ = clusters(nworkers)
    random = da.random.RandomState(3, RandomState=cupy.random.RandomState)
    x = random.standard_normal((8000, 50), chunks=(400, 50)) + 1
    a = computed(client, x)
    monkeypatch.setattr(factorize, "_fits", lambda problem, arrays: False)
    q, r = (computed(client, one) for one in client.persist(linalg.qr(x)))
    assert problem_of(linalg.qr(x).Q).by_ranks == ("a",)
    assert residual(q @ r, a, norm(a), len(a)) < GATE
    assert residual(q.T @ q, np.eye(50), 1, len(a)) < GATE
    _, variances, mean = (computed(client, one) for one in client.persist(linalg.pca(x, 4)))
    np.testing.assert_allclose(mean, a.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(variances, np.linalg.svd(a - mean, compute_uv=False)[:4] ** 2 / 7999, rtol=1e-12)
    assert_nothing_left(client)


@on_one_host
@pytest.mark.parametrize("stays", [False, True])
def test_iterations_with_functions(clusters, nworkers, stays, monkeypatch):
    """Operators and preconditioners that are functions see CuPy's vectors."""
    client, _ = clusters(nworkers)
    # By itself a matrix of this size goes to one GPU.
    monkeypatch.setattr(program, "_WORTH_MOVING", np.inf if stays else 0.0)
    n = 400
    rng = np.random.default_rng()
    b, m = rng.random(n), np.linspace(1, 3, n)
    a = np.diag(m + 2.1) - np.eye(n, k=1) - np.eye(n, k=-1)

    def operator(x, rows):
        import cupy

        assert isinstance(x, cupy.ndarray)
        return cupy.asarray(a[rows]) @ x

    def inverse(x, rows):
        import cupy

        return x[rows] / cupy.asarray(m[rows, None])

    expected = np.linalg.solve(a, b)
    for solver in (linalg.cg, linalg.minres, linalg.gmres):
        for matrix, m_inverse in ((operator, None), (on_gpus(a), inverse), (operator, inverse)):
            x, info = client.persist(solver(matrix, on_gpus(b), M=m_inverse, rtol=1e-10))
            np.testing.assert_allclose(computed(client, x), expected, rtol=1e-6)
            assert computed(client, info) == 0
            del x, info
    w, _ = (computed(client, one) for one in client.persist(linalg.eigsh(operator, 3, v0=on_gpus(b))))
    np.testing.assert_allclose(w, np.linalg.eigvalsh(a)[-3:], rtol=1e-8)
    assert_nothing_left(client)


@on_one_host
def test_stacks_and_contractions(clusters, nworkers):
    client, _ = clusters(nworkers)
    rng = np.random.default_rng()
    stack = noise(rng, (6, 90, 90), "float64") + 10 * np.eye(90)
    x = on_gpus(stack)
    unit = np.broadcast_to(np.eye(90), stack.shape)
    np.testing.assert_allclose(computed(client, linalg.inv(x)) @ stack, unit, atol=1e-10)
    np.testing.assert_allclose(computed(client, linalg.det(x)), np.linalg.det(stack), rtol=1e-9)
    u, s, vh = (computed(client, part) for part in client.persist(linalg.svd(x, full_matrices=False)))
    np.testing.assert_allclose((u * s[:, None]) @ vh, stack, atol=1e-10)
    a, b = noise(rng, (40, 30, 20), "float64"), noise(rng, (30, 20, 50), "float64")
    with dask_distmm.enabled():
        found = da.einsum("ijk,jkl->il", on_gpus(a), on_gpus(b))
        np.testing.assert_allclose(computed(client, found), np.einsum("ijk,jkl->il", a, b), rtol=1e-9, atol=1e-9)
        found = da.tensordot(on_gpus(a), on_gpus(b), axes=2)
        np.testing.assert_allclose(computed(client, found), np.tensordot(a, b, 2), rtol=1e-9, atol=1e-9)
    assert_nothing_left(client)
