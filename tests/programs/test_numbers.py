"""Programs with numbers, by LAPACK's gates: on several ranks, of all conditions, types, scales and layouts."""

from __future__ import annotations

import itertools

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.linalg
from matrices import assert_near, noise, problem_of
from ranks import on_ranks
from residuals import assert_least_squares, assert_qr

from dask_distmm import PlanError, ProtocolError, linalg
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.errors import MatrixError
from dask_distmm.planning import problem_from_wire, program
from dask_distmm.programs.check import Rates
from dask_distmm.runtime.keys import barrier_name
from dask_distmm.tracing import lower

DTYPES = ["float32", "float64", "complex64", "complex128"]
CONDITIONS = [1, 1e3, 1e8, 1e14, 1e30]
GATE = 30


def matrix(rng, shape, dtype, condition):
    wide = "complex128" if np.dtype(dtype).kind == "c" else "float64"
    u, v = (np.linalg.qr(noise(rng, (size, shape[1]), wide))[0] for size in shape)
    return ((u * np.geomspace(1, 1 / condition, shape[1])) @ v.conj().T).astype(dtype)


@pytest.fixture(autouse=True)
def _here():
    with dask.config.set(scheduler="sync"):
        yield


def ratio(found, scale, size, dtype):
    return np.linalg.norm(found) / max(np.linalg.norm(scale), np.finfo(dtype).tiny) / size / np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_qr_and_svd(dtype):
    rng = np.random.default_rng()
    for condition, rows, scale in itertools.product(
        CONDITIONS, ([60, 0, 90, 3, 47], [41]), (1, 1e-150, 1e150) if dtype[-2:] != "32" and "64" in dtype else (1,)
    ):
        n = 9
        a = matrix(rng, (sum(rows), n), dtype, condition) * np.dtype(dtype).type(scale if dtype != "complex64" else 1)
        x = da.from_array(a, chunks=(tuple(rows), 4))
        q, r = linalg.qr(x, method="rows")
        assert (q.chunks, r.chunks) == (x.chunks, (x.chunks[1],) * 2)
        assert_qr(a, *dask.compute(q, r))
        made = on_ranks((q, r), {"a": a})
        assert_qr(a, made["q"], made["r"])
        only_r = on_ranks((linalg.qr(x, "r", method="rows"),), {"a": a})["r"]
        size = abs(a).max()
        scaled = a / size, only_r / size
        assert (
            ratio(np.subtract(*(one.conj().T @ one for one in scaled)), scaled[0].conj().T @ scaled[0], n, dtype) < GATE
        )
        assert not np.tril(only_r, -1).any()
        expected = np.linalg.svd(a, compute_uv=False)
        for u, s, vh in (
            dask.compute(*linalg.svd(x, full_matrices=False, method="rows")),
            map(on_ranks(linalg.svd(x, full_matrices=False, method="rows"), {"a": a}).get, ("u", "s", "vh")),
        ):
            assert ratio((u * s) @ vh - a, a, n, dtype) < GATE
            for one in (u, vh.conj().T):
                assert ratio(one.conj().T @ one - np.eye(n), 1, n, dtype) < GATE
            assert ratio(s - expected, expected[0], 1, dtype) < GATE
        assert ratio(linalg.svdvals(x, method="rows").compute() - expected, expected[0], 1, dtype) < GATE
        assert ratio(linalg.svdvals(x.T, method="rows").compute() - expected, expected[0], 1, dtype) < GATE


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_of_lower_rank_and_zeros(dtype):
    rng = np.random.default_rng()
    for kind in ("zero column", "repeated", "zero", "one row"):
        a = noise(rng, (150, 7), dtype)
        if kind == "zero column":
            a[:, 3] = 0
        elif kind == "repeated":
            a[:, 5] = a[:, 2]
        elif kind == "zero":
            a[...] = 0
        else:
            a[1:] = 0
        x = da.from_array(a, chunks=(50, 7))
        made = on_ranks(linalg.qr(x), {"a": a})
        assert_qr(a, made["q"], made["r"])
        made = on_ranks(linalg.svd(x, full_matrices=False), {"a": a})
        assert ratio((made["u"] * made["s"]) @ made["vh"] - a, max(1, np.linalg.norm(a)), 7, dtype) < GATE
        assert ratio(made["u"].conj().T @ made["u"] - np.eye(7), 1, 7, dtype) < GATE
        if kind == "one row":
            continue
        with pytest.raises(MatrixError, match="depends on those before it"):
            linalg.lstsq(x, x[:, :2])[0].compute()
        with pytest.raises(MatrixError, match="depends on those before it"):
            linalg.pinv(x).compute()
        b = noise(rng, (150, 2), dtype)
        rtol = 100 * float(np.finfo(dtype).eps)
        found, residuals, rank, s = dask.compute(*linalg.lstsq(x, da.from_array(b, chunks=(50, 2)), rcond=rtol))
        wanted = np.linalg.lstsq(a, b, rcond=rtol)
        assert rank == wanted[2]
        np.testing.assert_allclose(found, wanted[0], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(s, wanted[3], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(residuals, np.linalg.norm(b - a @ found, axis=0) ** 2, rtol=1e-3)
        np.testing.assert_allclose(linalg.pinv(x, rtol).compute(), np.linalg.pinv(a, rcond=rtol), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_least_squares(dtype):
    rng, eps = np.random.default_rng(), float(np.finfo(dtype).eps)
    for condition, scale in ((1, 1), (30, 1), (1e3, 1), (0.01 / eps, 1), (10, 1e15), (10, 1e-15)):
        a, b = matrix(rng, (300, 12), dtype, condition), noise(rng, (300, 5), dtype)
        a *= np.dtype(dtype).type(scale)
        x, y = da.from_array(a, chunks=(60, 5)), da.from_array(b, chunks=(70, 2))
        found, residuals, rank, s = linalg.lstsq(x, y)
        assert (rank, found.dtype, found.chunks) == (12, a.dtype, (x.chunks[1], y.chunks[1]))
        np.testing.assert_allclose(s.compute(), np.linalg.svd(a, compute_uv=False), rtol=1e-3, atol=1e3 * eps * scale)
        for one in (found.compute(), on_ranks((found,), {"a": a, "b": b})["x"]):
            assert_least_squares(a, one, b)
            expected = np.linalg.norm(b - a @ one, axis=0) ** 2
            np.testing.assert_allclose(residuals.compute(), expected, rtol=1e-3)
        # A system that has a solution.
        b = (a / scale) @ noise(rng, (12, 1), dtype)
        assert_least_squares(a, linalg.lstsq(x, da.from_array(b, chunks=(60, 1)))[0].compute(), b)
        vector, residuals, *_ = linalg.lstsq(x, y[:, 0])
        assert (vector.shape, residuals.shape) == ((12,), (1,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ridge(dtype):
    rng, eps = np.random.default_rng(), float(np.finfo(dtype).eps)
    for condition in (1, 100, 0.001 / eps):
        a, b = matrix(rng, (300, 12), dtype, condition), noise(rng, (300, 2), dtype)
        x, y = da.from_array(a, chunks=(60, 5)), da.from_array(b, chunks=60)
        alphas = [0.0, 1e-6, 0.5, 100]
        found = linalg.ridge(x, y, alphas)
        for one in (found.compute(), on_ranks((found,), {"a": a, "b": b})["x"].reshape(12, 4, 2).transpose(1, 0, 2)):
            for alpha, solution in zip(alphas, one, strict=True):
                # Least squares with alpha^(1/2) I below A.
                below = np.vstack([a, alpha**0.5 * np.eye(12, dtype=dtype)])
                assert_least_squares(below.astype(dtype), solution, np.vstack([b, np.zeros((12, 2), dtype)]))
        assert linalg.ridge(x, y[:, 0], 1).shape == (12,)
        assert linalg.ridge(x, y, 1).shape == (12, 2)
        np.testing.assert_allclose(linalg.ridge(x, y, 0.5).compute(), found[2].compute(), rtol=1e-3, atol=1e-5)
        # With a constant term it is that of centred columns, far from zero.
        distances = rng.standard_normal(12).astype(dtype) * 30, rng.standard_normal(2).astype(dtype) * 30
        far, fars = (z + shift for z, shift in zip((a, b), distances, strict=True))
        coef, intercept = linalg.ridge(*(da.from_array(z, chunks=60) for z in (far, fars)), alphas, fit_intercept=True)
        wide, wides = (z.astype("complex128" if a.dtype.kind == "c" else "float64") for z in (far, fars))
        center, level = wide.mean(0), wides.mean(0)
        for alpha, one, constant in zip(alphas[2:], *(z.compute()[2:] for z in (coef, intercept)), strict=True):
            expected = np.linalg.solve(
                (wide - center).conj().T @ (wide - center) + alpha * np.eye(12),
                (wide - center).conj().T @ (wides - level),
            )
            gate = 1e5 * eps * abs(expected).max()
            np.testing.assert_allclose(one, expected, atol=gate)
            np.testing.assert_allclose(constant, level - center @ expected, atol=100 * gate)
        single = linalg.ridge(x, y[:, 0], 1, fit_intercept=True)
        assert single.coef.shape == (12,)
        assert single.intercept.shape == ()
    for alpha in (-1.0, [], np.nan):
        with pytest.raises(PlanError, match="alpha must be a number that is not negative"):
            linalg.ridge(x, y, alpha)
    with pytest.raises(PlanError, match="so b must have 300 rows; it has 200"):
        linalg.ridge(x, y[:200], 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_principal_components(dtype):
    rng, eps = np.random.default_rng(), float(np.finfo(dtype).eps)
    for condition, distance in ((1, 0.0), (10, 1e4), (1e6, 0.0), (1e3, 1e4)):
        a = matrix(rng, (300, 8), dtype, condition)
        a += np.dtype(dtype).type(distance) * a.std()
        x = da.from_array(a, chunks=(60, 8))
        wide = a.astype("complex128" if a.dtype.kind == "c" else "float64")
        expected = np.linalg.svd(wide - wide.mean(axis=0), full_matrices=False)
        for k in (2, 8):
            results = linalg.pca(x, k)
            for found in (
                dict(zip(("components", "variances", "mean"), dask.compute(*results), strict=True)),
                on_ranks(results, {"a": a}),
            ):
                s = np.sqrt(found["variances"].ravel() * 299)
                # Data that are so far from zero have no more digits.
                gate = GATE * eps * (1 + distance)
                assert abs(s - expected[1][:k]).max() <= gate * expected[1][0]
                assert np.linalg.norm(found["components"] @ found["components"].conj().T - np.eye(k)) < GATE * k * eps
                assert abs(found["mean"].ravel() - wide.mean(axis=0)).max() <= GATE * eps * abs(wide).max()
            ratio = results.explained_variance_ratio.compute()
            np.testing.assert_allclose(ratio, expected[1][:k] ** 2 / (expected[1] ** 2).sum(), atol=GATE * gate)


def test_a_mean_of_a_million_deviations():
    rng = np.random.default_rng()
    a = rng.standard_normal((4000, 5)) * [5, 4, 3, 2, 1] + 1e6
    _, variances, mean = dask.compute(*linalg.pca(da.from_array(a, chunks=(700, 5))))
    centred = a - a.mean(axis=0)
    np.testing.assert_allclose(variances, np.linalg.eigvalsh(centred.T @ centred / 3999)[::-1], rtol=1e-8)
    np.testing.assert_allclose(mean, a.mean(axis=0), rtol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pseudo_inverses(dtype):
    rng, eps = np.random.default_rng(), float(np.finfo(dtype).eps)
    for condition in (1, 1e3, 0.01 / eps):
        a = matrix(rng, (130, 6), dtype, condition)
        for x, rtol in itertools.product((a, a.conj().T), (None, 1e-3 * eps)):
            found = linalg.pinv(da.from_array(x, chunks=(50, 50)), rtol)
            assert found.chunks[0] == found.chunks[0]
            # Each is right up to rounding times the condition.
            expected = np.linalg.pinv(x.astype("complex128"), rcond=0)
            assert abs(found.compute() - expected).max() < GATE * eps * condition * abs(expected).max()


def test_leading_singular_values():
    rng = np.random.default_rng()
    a = matrix(rng, (400, 20), "float64", 1e6)
    for x, array in ((da.from_array(a, chunks=(90, 20)), a), (da.from_array(a.T, chunks=(20, 90)), a.T)):
        u, s, vh = dask.compute(*linalg.svd_compressed(x, 3, n_power_iter=2))
        np.testing.assert_allclose(s, np.linalg.svd(array, compute_uv=False)[:3], rtol=1e-8)
        for one in (u, vh.T):
            np.testing.assert_allclose(one.T @ one, np.eye(3), atol=1e-13)
        np.testing.assert_allclose(u.T @ array @ vh.T, np.diag(s), atol=1e-10)
        oriented = vh if len(array) > array.shape[1] else u.T
        assert (oriented[np.arange(3), abs(oriented).argmax(axis=1)] > 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(value):
    a = np.random.default_rng().standard_normal((300, 12))
    a[150, 3] = value
    x = da.from_array(a, chunks=(60, 5))
    q, r = dask.compute(*linalg.qr(x, check_finite=False))
    assert not np.isfinite(q).all()
    assert not np.isfinite(r).all()
    assert np.isnan(linalg.svdvals(x, check_finite=False).compute()).all()
    y = x[:, :1]
    for made in (
        linalg.qr(x).Q, linalg.svdvals(x), linalg.svd(x, full_matrices=False)[0], linalg.pca(x)[0], linalg.pinv(x),
        linalg.pinv(x, 1e-8), linalg.svd_compressed(x, 2)[1], linalg.lstsq(x, y)[0], linalg.ridge(x, y, 1),
    ):  # fmt: skip
        with pytest.raises(MatrixError, match="a must not contain infs or NaNs"):
            made.compute()
    for made in (linalg.lstsq(y, x)[0], linalg.ridge(y, x, 1), linalg.lstsq(y, x, 1e-3)[0]):
        with pytest.raises(MatrixError, match="b must not contain infs or NaNs"):
            made.compute()
    assert np.isnan(linalg.lstsq(y, x, check_finite=False)[0].compute()[:, 3]).all()


def test_rows_of_unknown_number():
    rng = np.random.default_rng()
    a, b = rng.standard_normal((500, 6)), rng.standard_normal(500)
    kept = a[:, 0] > 0
    x, y = da.from_array(a, chunks=(90, 6)), da.from_array(b, chunks=90)
    x, y = x[da.from_array(kept, chunks=90)], y[da.from_array(kept, chunks=90)]
    a, b = a[kept], b[kept]
    q, r = linalg.qr(x)
    assert np.isnan(q.chunks[0]).all()
    assert_qr(a, *dask.compute(q, r))
    u, s, vh = dask.compute(*linalg.svd(x, full_matrices=False))
    np.testing.assert_allclose((u * s) @ vh, a, atol=1e-12)
    assert_near(linalg.lstsq(x, y)[0].compute(), np.linalg.lstsq(a, b, rcond=None)[0], rtol=1e-10)
    with pytest.raises(PlanError, match="so b must have as many chunks"):
        linalg.lstsq(x, da.from_array(b, chunks=30))


def test_which_matrices_go_by_rows():
    def rows(m, n, chunks, **how):
        return problem_of(linalg.qr(da.ones((m, n), chunks=chunks), "r", **how)).kind == "program"

    assert rows(1000, 100, 500)
    assert rows(1000, 100, 500, engine="numpy", workers=1)
    assert not rows(1000, 100, 100)
    assert not rows(300, 100, 300)
    assert not rows(1000, 100, 500, method="columns")
    for shape in ((10, 20), (10, 0)):
        with pytest.raises(PlanError, match="expected columns, and not more of them than rows"):
            linalg.qr(da.ones(shape), method="rows")


def test_a_plan_says_what_it_does():
    text = repr(linalg.explain(linalg.lstsq(da.ones((4000, 10), chunks=1000), da.ones(4000, chunks=1000))[0]))
    for line in ("Plan: lstsq on 1 of 1 workers", "A is read 2 times", "gram", "solve_normal", "reads A", "flops"):
        assert line in text


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_covariances_and_polar_factors(dtype):
    rng, rows = np.random.default_rng(), (60, 0, 90, 3, 47)
    a = noise(rng, (200, 7), dtype)
    deviations = np.cov(a, rowvar=False), np.corrcoef(a, rowvar=False)
    for mean in (0, 1e6):
        x = da.from_array(a + mean, chunks=(rows, 3))
        for made, expected in zip((linalg.cov(x, rowvar=False), linalg.corrcoef(x.T)), deviations, strict=True):
            # The rounding of the elements of A is a share of its mean.
            near = 1e3 * np.finfo(dtype).eps * (1 + mean)
            np.testing.assert_allclose(on_ranks((made,), {"a": a + mean})["c"], expected, atol=near)
            np.testing.assert_allclose(made.compute(), expected, atol=near)
    # A drift from row to row, and few rows in each strip.
    drift = a + 1e3 * np.arange(200)[:, None]
    made = linalg.cov(da.from_array(drift, chunks=(rows, 3)), rowvar=False)
    assert_near(on_ranks((made,), {"a": drift})["c"], np.cov(drift, rowvar=False), rtol=1e-12)
    y = da.from_array(a, chunks=(rows, 3))
    u, p = linalg.polar(y)
    found = on_ranks((u, p), {"a": a})
    expected = scipy.linalg.polar(a)
    for mine, theirs in zip((found["u"], found["h"], *dask.compute(u, p)), (*expected, *expected), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)
    assert (found["h"] == found["h"].conj().T).all()
    for one, theirs in zip(linalg.polar(y.T, "left"), scipy.linalg.polar(a.T, "left"), strict=True):
        np.testing.assert_allclose(one.compute(), theirs, atol=1e-12)


def test_broadcast_chunks_are_copied(monkeypatch):
    """BLAS can't read them, and NumPy is slow without it."""
    seen = []
    kernel = ProgramKernels.adjoint_times

    def noted(self, a, b, c, **at):
        seen.extend([*a.strides, *b.strides])
        kernel(self, a, b, c, **at)

    monkeypatch.setattr(ProgramKernels, "adjoint_times", noted)
    rng = np.random.default_rng()
    for a, b in (
        (noise(rng, (60, 5), "float64"), np.broadcast_to(2.0, (60, 3))),
        (np.broadcast_to(noise(rng, (5,), "float64"), (60, 5)), noise(rng, (60, 3), "float64")),
    ):
        results = linalg.ridge(da.from_array(a, chunks=(20, -1)), da.from_array(b, chunks=(20, -1)), 0.5)
        found = on_ranks([results], {"a": a, "b": b})["x"]
        np.testing.assert_allclose(found, np.linalg.solve(a.T @ a + 0.5 * np.eye(5), a.T @ b), rtol=1e-9, atol=1e-12)
    assert len(seen) >= 2 * 3 * 4
    assert 0 not in seen


def test_vectors_are_made_by_runs():
    """No task of Dask takes them out of matrices."""
    rng = np.random.default_rng()
    a, b = (da.from_array(noise(rng, shape, "float64"), chunks=20) for shape in ((60, 5), (60,)))
    spd = linalg.gram(a) + da.eye(5)
    right = a.T @ b
    results = [
        *(linalg.svd(a, full_matrices=False)[1], linalg.svdvals(spd), *linalg.lstsq(a, b)[:2], linalg.pca(a, 2)[1]),
        *(linalg.cg(spd, right)[0], linalg.solve(spd, right), linalg.lu_factor(spd)[1], linalg.eigvalsh(spd)),
    ]
    for x in results:
        (before,) = x.dask.dependencies[x.name]
        assert barrier_name(before) is not None
        assert (x.ndim, x.compute().shape) == (1, x.shape)
    wire = problem_of(results[0]).to_wire()
    (s,) = (one for one in wire["wanted"] if one["name"] == "s")
    for axes in ((), (0,), (1, 0), (2,), (0, 1, 1), "01", None):
        with pytest.raises(ProtocolError):
            problem_from_wire(wire | {"wanted": [s | {"axes": axes}]})


def test_what_is_known_of_a_program_is_of_the_same_program():
    a = da.from_array(noise(np.random.default_rng(), (60, 5), "float64"), chunks=(20, 5))
    owners = (0, 1, 0)

    def known(x):
        problem = problem_of(x)
        return problem.steps(owners, 2, 1), problem.figures(owners, 2, Rates(1.0, 1.0, 1.0, 1.0))

    first, again = (known(linalg.svd_compressed(a, 2, seed=1)[1]) for _ in range(2))
    assert all(one is other for one, other in zip(first, again, strict=True))
    for other in (linalg.svd_compressed(a, 2, seed=2)[1], linalg.svd_compressed(a, 3, seed=1)[1]):
        assert known(other)[0] != first[0]
    # Of many chunks steps are not kept.
    problem, owners = problem_of(linalg.qr(da.ones((4000, 2), chunks=(2, 2)), method="rows")[1]), (0,) * 2000
    assert problem.steps(owners, 1, 0) is not problem.steps(owners, 1, 0)


def test_the_plan_and_the_ranks_of_one_process_record_each_list_once(monkeypatch):
    b = noise(np.random.default_rng(), (65,), "float64")
    problem = problem_of(linalg.lsqr(da.from_array(np.diag(b), chunks=(20, 11)), da.from_array(b, chunks=20))[0])
    recorded, record = [], program.record

    def counted(*arguments, me):
        recorded.append(me)
        return record(*arguments, me=me)

    monkeypatch.setattr(program, "record", counted)
    owners = (0, 1, 2, 0)
    problem.figures(owners, 3, Rates(1.0, 1.0, 1.0, 1.0))
    steps = [problem.steps(owners, 3, rank) for rank in range(3)]
    assert recorded == [0, 1, 2]
    # What several ranks share does not depend on which rank is first.
    monkeypatch.setattr(lower, "placements_of", lower.placements_of.__wrapped__)
    for rank in (2, 0, 1):
        again = record(program._BUILDERS[problem.builder].record, *problem._arguments(owners, 3)[1:], me=rank)
        assert again == steps[rank]
