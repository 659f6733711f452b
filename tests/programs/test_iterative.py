"""Iterative solvers beside SciPy's: the same solutions, infos and numbers of iterations, on one rank and several."""

from __future__ import annotations

import collections
import contextlib
import itertools
import warnings

import conformance
import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse.linalg
from matrices import assert_near, noise, problem_of
from ranks import on_ranks

from dask_distmm import PlanError, linalg
from dask_distmm.engines.base import Side
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.engines.programs.turns import Writer
from dask_distmm.errors import MatrixError, NotSquareError

DTYPES = ["float32", "float64", "complex64", "complex128"]
N = 60


@pytest.fixture(autouse=True)
def _here():
    with dask.config.set(scheduler="sync"):
        yield


def hermitian(rng, dtype, values):
    q = np.linalg.qr(noise(rng, (len(values),) * 2, "complex128" if np.dtype(dtype).kind == "c" else "float64"))[0]
    return ((q * values) @ q.conj().T).astype(dtype)


def both(function, a, b, x0=None, m=None, chunks=(17, 23), **options):
    """Return x and info of a solver, here and on three ranks, and SciPy's with its number of iterations."""
    x, y = da.from_array(a, chunks=chunks), da.from_array(b, chunks=13)
    results = getattr(linalg, function)(x, y, x0 if x0 is None else da.from_array(x0, chunks=60), M=m, **options)
    given = {"a": a, "b": b[:, None]} | ({} if x0 is None else {"g": x0[:, None]})
    given |= {} if m is None else {"m": m[:, None] if m.ndim == 1 else m}
    found = [tuple(dask.compute(*results))]
    made = on_ranks(results, given)
    found.append((made["r0"][:, 0], made["r1"].item()))
    if function == "minres" and a.dtype.kind == "c":
        # SciPy's does not conjugate.
        return found, (np.linalg.solve(a, b), int(options.get("maxiter", 0))), 0
    turns = []
    options |= {"callback_type": "x"} if function == "gmres" else {}
    with np.errstate(all="ignore"):
        of_scipy = getattr(scipy.sparse.linalg, function)(
            a, b, x0, M=np.diag(m) if m is not None and m.ndim == 1 else m, callback=turns.append, **options
        )
    return found, of_scipy, len(turns)


@pytest.mark.cases(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["cg", "minres", "gmres"])
def test_square_matrices(function, dtype):
    rng = np.random.default_rng(0)
    a, b = hermitian(rng, dtype, np.geomspace(1, 30, N)), noise(rng, (N,), dtype)
    exact = np.linalg.solve(a, b)
    near = (exact + 1e-3 * b).astype(dtype)
    cases = [
        {},
        {"x0": near},
        {"m": 1 / np.diag(a)},
        {"m": np.linalg.inv(a) + 1e-2 * np.eye(N, dtype=dtype)},
        {"x0": near, "m": 1 / np.diag(a), "chunks": (N, 9)},
        {"maxiter": 3},
        {"rtol": 1e-3, "chunks": (1, N)},
        {"shift": 0.5, "chunks": N} if function == "minres" else {"atol": 0.5, "chunks": N},
    ]
    for case in cases:
        if function == "minres" and np.dtype(dtype).kind == "c" and case.keys() & {"maxiter", "shift"}:
            continue  # SciPy's does not conjugate: there is nothing to compare with
        found, (expected, info), turns = both(function, a, b, **case)
        for x, said in found:
            assert x.dtype == dtype
            assert bool(said) == bool(info), case
            assert said in (info, turns), case
            close = 1e-5 if info else 1e-4
            assert np.linalg.norm(x - expected) <= close * 100 * case.get("rtol", 1e-5) / 1e-5 * np.linalg.norm(
                expected
            )
            if not info and function != "minres":
                limit = max(case.get("rtol", 1e-5) * np.linalg.norm(b), case.get("atol", 0.0))
                assert np.linalg.norm(b - a @ x) <= 1.01 * limit + 1e-5 * np.linalg.norm(b) * (
                    np.finfo(dtype).eps > 1e-10
                )


@pytest.mark.parametrize("function", ["cg", "minres", "gmres"])
def test_what_ends_an_iteration_at_once(function):
    rng = np.random.default_rng(1)
    a, b = hermitian(rng, "float64", np.geomspace(1, 30, N)), noise(rng, (N,), "float64")
    identity = np.eye(N)
    zero = np.zeros(N)
    for (x, info), expected in (
        # Nothing to solve, whatever x0 is.
        *((one, zero) for one in both(function, a, zero, b)[0]),
        # x0 is exact.
        *((one, b) for one in both(function, identity, b, b)[0]),
        *((one, b) for one in both(function, identity, b)[0]),
        *((one, b / 2) for one in both(function, np.diag(np.full(N, 2.0)), b)[0]),
    ):
        assert info == 0
        np.testing.assert_allclose(x, expected, rtol=1e-14)


@pytest.mark.parametrize("function", ["cg", "minres", "gmres"])
def test_what_has_no_solution_ends(function):
    rng = np.random.default_rng(2)
    a, b = hermitian(rng, "float64", np.geomspace(1, 30, N)), noise(rng, (N,), "float64")
    nothing = a.copy()
    nothing[3, 4] = np.nan
    infinite = a.copy()
    infinite[50, 4] = np.inf
    no_number = b.copy()
    no_number[7] = np.nan
    for one, right in ((nothing, b), (infinite, b), (a, no_number)):
        for x, info in both(function, one, right)[0]:
            assert info > 0
            assert np.isnan(x).any() or (x == 0).all()
    # Singular and inconsistent; a matrix of zeros; rtol that rounding does not allow.
    singular = hermitian(rng, "float64", [*np.zeros(5), *np.geomspace(1, 30, N - 5)])
    for one, options in (
        (singular, {"maxiter": 2 if function == "gmres" else 50}),
        (np.zeros((N, N)), {}),
        (a, {"rtol": 0.0, "maxiter": 2}),
    ):
        for _, info in both(function, one, b, **options)[0]:
            assert info == 0 if function == "minres" and one is not a else info > 0


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_least_squares(dtype):
    """LSQR and LSMR give what SciPy's do: x, why they stop, iterations and norms."""
    rng, eps = np.random.default_rng(3), np.finfo(dtype).eps
    for (m, n), options in (
        ((90, 30), {}),
        ((90, 30), {"damp": 0.5}),
        ((30, 50), {}),
        ((40, 40), {"atol": 1e-3, "btol": 1e-3}),
        ((40, 40), {"x0": noise(rng, (40,), dtype), "damp": 0.1}),
        ((90, 30), {"conlim": 2.0}),
        ((90, 30), {"most": 3}),
    ):
        size = min(m, n)
        u, v = (np.linalg.qr(noise(rng, (one, size), "complex128"))[0] for one in (m, n))
        if np.dtype(dtype).kind != "c":
            u, v = (np.linalg.qr(one.real)[0] for one in (u, v))
        a, b = ((u * np.geomspace(1, 3, size)) @ v.conj().T).astype(dtype), noise(rng, (m,), dtype)
        most = options.pop("most", None)
        for function, limit in (("lsqr", "iter_lim"), ("lsmr", "maxiter")):
            given = options | ({limit: most} if most else {})
            with np.errstate(all="ignore"):
                expected = getattr(scipy.sparse.linalg, function)(a, b, **given)
            results = getattr(linalg, function)(da.from_array(a, chunks=(17, 13)), da.from_array(b, chunks=19), **given)
            computed = dask.compute(*results)
            assert (results[0].dtype, results[0].chunks) == (dtype, (da.from_array(a, chunks=(17, 13)).chunks[1],))
            assert len(computed) == len(expected)
            start = given.get("x0")
            right = b if start is None else b - a @ start
            operands = {"a": a, "b": b[:, None]} | ({} if start is None else {"g": right[:, None]})
            of_ranks = on_ranks(results, operands)
            x = of_ranks["r0"][0] + (0 if start is None else start)
            close = max(1e-6, 1e3 * eps)
            # The last turns depend on rounding; SciPy's LSQR has float64 for float32.
            for count in (computed[2], of_ranks["r1"][0, 1]):
                assert abs(int(count) - int(expected[2])) <= 0.2 * expected[2]
            close = max(10 * options.get("atol", 1e-6), 1e4 * eps)
            for found in (computed[0], x):
                assert np.linalg.norm(found - expected[0]) <= close * np.linalg.norm(expected[0])
            if computed[2] == expected[2] and eps < 1e-10:
                assert computed[1] == expected[1]
                for number in (3, 4, 5, 7):
                    np.testing.assert_allclose(computed[number], expected[number], rtol=1e-3, atol=close)
    variances = linalg.lsqr(da.from_array(a, chunks=20), da.from_array(b, chunks=20), calc_var=True)[-1]
    expected = scipy.sparse.linalg.lsqr(a.astype("D" if a.dtype.kind == "c" else "d"), b, calc_var=True)[-1]
    np.testing.assert_allclose(variances.compute(), expected, rtol=0.02 if eps < 1e-10 else 0.2)


def test_least_squares_end():
    """Nothing to do, no solution, numbers that are no numbers, a matrix of zeros."""
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((40, 10)), rng.standard_normal(40)
    nothing = a.copy()
    nothing[3, 4] = np.nan
    # Integers, so that nothing is rounded.
    whole, solution = np.round(4 * a), np.round(4 * rng.standard_normal(10))
    for function in ("lsqr", "lsmr"):
        solver = getattr(linalg, function)
        x, stop, turns, *_ = dask.compute(*solver(da.from_array(a, chunks=9), da.zeros(40)))
        assert (stop, turns) == (0, 0)
        assert not x.any()
        x, stop, turns, *_ = dask.compute(*solver(da.zeros((40, 10), chunks=9), da.from_array(b)))
        assert (stop, turns) == (0, 0)
        assert not x.any()
        x, stop, *_ = dask.compute(*solver(da.from_array(nothing, chunks=9), da.from_array(b)))
        assert stop == 0
        x, stop, turns, *_ = dask.compute(*solver(da.from_array(whole, chunks=9), whole @ solution, x0=solution))
        assert (stop, turns) == (0, 0)
        np.testing.assert_array_equal(x, solution)
        # One column.
        x, stop, turns, *_ = dask.compute(*solver(da.from_array(a[:, :1], chunks=9), da.from_array(b)))
        assert turns == 1
        assert_near(x, np.linalg.lstsq(a[:, :1], b, rcond=None)[0], rtol=1e-12)


def test_gmres_of_matrices_that_are_not_hermitian():
    """Any matrix, many restarts; a breakdown with a singular one."""
    rng = np.random.default_rng(5)
    for dtype in DTYPES:
        a, b = (noise(rng, (N, N), dtype) / 8 + np.eye(N)).astype(dtype), noise(rng, (N,), dtype)
        for restart in (3, 20, 200):
            (first, second), (expected, info), _ = both("gmres", a, b, restart=restart, maxiter=20)
            for x, said in (first, second):
                assert bool(said) == bool(info)
                assert np.linalg.norm(b - a @ x) <= 1.02 * max(
                    1e-5 * np.linalg.norm(b), np.linalg.norm(b - a @ expected)
                )
    # A permutation takes n iterations; here nothing is near before the last one.
    for x, info in both("gmres", np.roll(np.eye(N), 1, axis=1), np.eye(N)[:, 0], restart=N, maxiter=1)[0]:
        assert info == 0
        np.testing.assert_allclose(x, np.eye(N)[:, 1], atol=1e-14)
    assert all(info > 0 for _, info in both("gmres", np.eye(N, k=1), np.eye(N)[:, 0], maxiter=5)[0])


def assert_eigenpairs(a, found, expected, gate=300):
    w, v = found
    eps, size = np.finfo(a.dtype).eps, abs(np.linalg.eigvalsh(a)).max() or 1
    assert w.dtype == a.real.dtype
    assert (np.diff(w) >= 0).all()
    assert abs(w - expected).max() <= gate * eps * size
    assert np.linalg.norm(a @ v - v * w) <= gate * eps * size
    assert np.linalg.norm(v.conj().T @ v - np.eye(len(w))) <= gate * eps


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_eigenvalues(dtype):
    """Of all kinds of ends, by way of restarts; of values that repeat; of all but one."""
    rng = np.random.default_rng(6)
    values = np.concatenate([np.geomspace(1e-2, 1, 30), -np.geomspace(2e-2, 1.7, 30)])
    repeated = np.repeat([3.0, 2.0, 1.0, 0.0], [2, 3, 5, 10])
    spread, twice = hermitian(rng, dtype, values), hermitian(rng, dtype, repeated)
    for a, k, options in (
        *((spread, 4, {"which": which}) for which in ("LM", "LA", "SA", "BE")),
        (hermitian(rng, dtype, np.geomspace(0.05, 1, N)), 3, {"which": "SM", "ncv": 30}),
        (spread, 3, {"which": "BE", "ncv": 9, "v0": np.ones(N)}),
        (spread, 1, {"ncv": 20}),
        (twice, 4, {"ncv": 20}),
        (twice, 4, {"which": "SA", "ncv": 12}),
        (twice, 5, {"which": "BE", "ncv": 14}),
        (np.eye(N, dtype=dtype), 5, {}),
        (np.zeros((N, N), dtype), 2, {}),
        (twice[:3, :3], 2, {}),
        (np.diag([2, 1]).astype(dtype), 1, {}),
    ):
        given = {name: x if name != "v0" else da.ones(N) for name, x in options.items()}
        results = linalg.eigsh(da.from_array(a, chunks=(17, 9)), k, rng=7, **given)
        everything = np.linalg.eigvalsh(a.astype("complex128"))
        keys = {"LM": -abs(everything), "SM": abs(everything), "LA": -everything, "SA": everything}
        if options.get("which") == "BE":
            chosen = np.r_[everything[: k // 2], everything[len(everything) - (k + 1) // 2 :]]
        else:
            chosen = np.sort(everything[np.argsort(keys[options.get("which", "LM")], kind="stable")[:k]])
        assert_eigenpairs(a, dask.compute(*results), chosen)
        operands = {"a": a} | ({"g": np.ones((N, 1))} if "v0" in options else {})
        made = on_ranks(results, operands)
        assert_eigenpairs(a, (made["r0"][0].astype(a.real.dtype), made["r1"]), chosen)
    only = linalg.eigsh(da.from_array(spread, chunks=30), 4, return_eigenvectors=False)
    np.testing.assert_allclose(
        only.compute(), np.sort(values[np.argsort(-abs(values))[:4]]), rtol=1e3 * np.finfo(dtype).eps
    )


def test_eigenvalues_that_are_refused():
    a = hermitian(np.random.default_rng(8), "float64", np.linspace(1, 2, N))
    x = da.from_array(a, chunks=17)
    for options, said in (
        ({"k": 0}, "k must be between 1 and 59, got 0"),
        ({"k": N}, "k must be between 1 and 59, got 60: use eigh"),
        ({"ncv": 6}, "ncv must be between 7 and 60, got 6"),
        ({"sigma": 0.0}, "sigma must be None: use eigh"),
        ({"M": x}, "M must be None: use eigh"),
        ({"tol": -1.0}, "tol must be at least 0"),
        ({"which": "LI"}, "unknown which 'LI'"),
        ({"v0": da.ones(3)}, "so v0 must have shape"),
    ):
        with pytest.raises(PlanError, match=said):
            linalg.eigsh(x, **options)
    for made, said in (
        (linalg.eigsh(x, 6, ncv=8, maxiter=1), "eigenvalues have converged after 1 restarts: pass a larger maxiter="),
        (linalg.eigsh(x, v0=da.zeros(N)), "v0 must be finite and not zero"),
        (linalg.eigsh(da.from_array(np.where(a > 1.4, np.nan, a), chunks=17)), "must not contain infs or NaNs"),
    ):
        with pytest.raises(MatrixError, match=said):
            made[0].compute()


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lobpcg(dtype):
    """Both ends of a spectrum, with values that repeat; as near as SciPy's after as many iterations."""
    rng, eps = np.random.default_rng(9), np.finfo(dtype).eps
    values = np.r_[-2, -1.5, -1.5, -1, np.linspace(0, 1, N - 8), 2, 3, 3, 4]
    a, x = hermitian(rng, dtype, values), noise(rng, (N, 4), dtype)
    m = (1 / np.geomspace(1, 2, N)).astype(a.real.dtype)
    for largest, with_m in itertools.product((True, False), (False, True)):
        lazily = linalg.lobpcg(
            da.from_array(a, chunks=(17, 30)), da.from_array(x, chunks=20), M=m if with_m else None,
            tol=100 * eps * N, maxiter=100, largest=largest,
        )  # fmt: skip
        made = on_ranks(lazily, {"a": a, "g": x} | ({"m": m[:, None]} if with_m else {}))
        for w, v in (dask.compute(*lazily), (made["r0"][0].astype(m.dtype), made["r1"])):
            expected = values[::-1][:4] if largest else values[:4]
            assert w.dtype == m.dtype
            assert abs(w - expected).max() <= 300 * eps * 4
            assert np.linalg.norm(a @ v - v * w, axis=0).max() <= 150 * eps * N
            assert np.linalg.norm(v.conj().T @ v - np.eye(4)) <= 300 * eps
    few = {"largest": True, "maxiter": 3, "tol": 1e-30}
    w = linalg.lobpcg(da.from_array(a, chunks=20), da.from_array(x, chunks=20), **few)[0].compute()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = scipy.sparse.linalg.lobpcg(a, x.copy(), **few)[0]
    np.testing.assert_allclose(w, expected, rtol=0.05)


def test_lobpcg_refuses():
    rng = np.random.default_rng(10)
    a, x = hermitian(rng, "float64", np.linspace(1, 2, N)), rng.standard_normal((N, 3))
    y, z = da.from_array(a, chunks=17), da.from_array(x, chunks=20)
    for arguments, options, said in (
        ((y, z[:, :0]), {}, "so X must have 60 rows and 1 to 12 columns; it is 60 x 0"),
        ((y, da.ones((N, 13))), {}, "it is 60 x 13"),
        ((y, z[:9]), {}, "it is 9 x 3"),
        ((y, z), {"B": y}, "B must be None"),
        ((y, z), {"Y": z}, "Y must be None"),
        ((y, z), {"M": z}, "so M must be 60 x 60"),
        ((y, z), {"verbosityLevel": 1}, "verbosityLevel must be 0"),
        ((y, z), {"retLambdaHistory": True}, "retLambdaHistory must be False"),
    ):
        with pytest.raises(PlanError, match=f"^lobpcg.*{said}"):
            linalg.lobpcg(*arguments, **options)
    same = np.repeat(x[:, :1], 3, axis=1)
    for array, start, said in (
        (a, same, "X must have independent columns: 1 of 3 are"),
        (np.where(a > 1.4, np.nan, a), x, "must not contain infs or NaNs"),
    ):
        with pytest.raises(MatrixError, match=said):
            linalg.lobpcg(da.from_array(array, chunks=17), da.from_array(start, chunks=20))[0].compute()


def test_layouts():
    """One row, more workers than chunks, chunks without rows, a matrix in columns of chunks."""
    for n, chunks in ((1, 1), (2, 1), (5, ((2, 0, 3), (5,))), (7, (7, 2))):
        a = np.diag(np.arange(1.0, n + 1))
        for x, info in both("cg", a, np.ones(n), m=np.ones(n), chunks=chunks)[0]:
            assert info == 0
            np.testing.assert_allclose(x, 1 / np.arange(1.0, n + 1), rtol=1e-10)
    x, _ = linalg.cg(da.ones((60, 60), chunks=(60, 20)), da.ones(60))
    assert (x.chunks, problem_of(x)["a"].counts[0]) == (((20, 20, 20),), 3)


def laplacian(x, rows):
    """Return rows of the product with tridiag(-1, 2, -1) + 0.1 I."""
    found = 2.1 * x[rows]
    found[1:] -= x[rows.start : rows.stop - 1]
    found[:-1] -= x[rows.start + 1 : rows.stop]
    if rows.start:
        found[0] -= x[rows.start - 1]
    if rows.stop < len(x):
        found[-1] -= x[rows.stop]
    return found


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_in_place_of_matrices(dtype):
    """The same results as of the matrix: of each solver of a square one, with a function as preconditioner."""
    rng = np.random.default_rng()
    a = laplacian(np.eye(N), slice(0, N)).astype(dtype)
    inverse = np.linalg.inv(a).astype(dtype)
    b = noise(rng, (N,), dtype)
    y = da.from_array(b, chunks=13)
    m = inverse + 0.1 * np.diag(np.diag(inverse))
    tight = 1e3 * np.finfo(dtype).eps
    for function in ("cg", "minres", "gmres"):
        for given in ({}, {"M": lambda x, rows: (m @ x)[rows]}):
            results = getattr(linalg, function)(laplacian, y, rtol=tight, **given)
            x, info = dask.compute(*results)
            made = on_ranks(results, {"b": b[:, None]})
            for found in (x, made["r0"][:, 0]):
                assert (found.dtype, info) == (np.dtype(dtype), 0)
                assert np.linalg.norm(a @ found - b) <= 20 * tight * np.linalg.norm(a, 2) * np.linalg.norm(found)
    exact = np.linalg.eigvalsh(a.astype("complex128"))
    w, v = dask.compute(*linalg.eigsh(laplacian, 4, which="LA", v0=y, ncv=30))
    np.testing.assert_allclose(w, exact[-4:], atol=tight * 10)
    np.testing.assert_allclose(a @ v, v * w, atol=tight * 100)
    x = da.from_array(noise(rng, (N, 3), dtype), chunks=(13, 3))
    w, _ = dask.compute(*linalg.lobpcg(laplacian, x, maxiter=60, M=lambda x, rows: (inverse @ x)[rows], largest=False))
    # It stops at residuals of SciPy's default tolerance, which in single precision is wider.
    np.testing.assert_allclose(w, exact[:3], atol=max(tight * 100, np.finfo(dtype).eps ** 0.5 * N))


@pytest.mark.cases(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(90, 30), (30, 50)])
def test_two_functions_in_place_of_a_matrix(m, n, dtype):
    """The same results as of the matrix: of solvers that multiply by its adjoint, too."""
    rng, eps = np.random.default_rng(), np.finfo(dtype).eps
    b, x0 = noise(rng, (m,), dtype), noise(rng, (n,), dtype)
    u, _, vh = np.linalg.svd(noise(rng, (m, n), dtype), full_matrices=False)
    a = ((u * np.geomspace(1, 3, min(m, n))) @ vh).astype(dtype)
    functions = (lambda x, rows: a[rows] @ x, lambda u, rows: (a[rows].conj().T @ u)[:, 0])
    y = da.from_array(b, chunks=13)
    for solver, start, damp in itertools.product((linalg.lsqr, linalg.lsmr), (x0, np.zeros(n, dtype)), (0, 0.3)):
        options = {"damp": damp, "x0": da.from_array(start, chunks=20), "conlim": 0, "atol": 10 * eps, "btol": 10 * eps}
        expected = dask.compute(*solver(da.from_array(a, chunks=(13, n)), y, **options))
        results = solver(functions, y, **options)
        assert results[0].chunks == options["x0"].chunks
        found = dask.compute(*results)
        right = (b - a @ start)[:, None]
        of_ranks = on_ranks(results, {"b": b[:, None], "g": right})
        for x, count in ((found[0], found[2]), (of_ranks["r0"][0] + start, of_ranks["r1"][0, 1])):
            assert x.dtype == dtype
            assert np.linalg.norm(x - expected[0]) <= 1e4 * eps * np.linalg.norm(expected[0])
            assert abs(count - expected[2]) <= 0.3 * expected[2]


# What `see` was called with. Pickled by its name, it is the same one where it is called.
SEEN: list[object] = []


def see(given):
    SEEN.append(given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("function", "kind"), [("cg", ""), ("minres", ""), ("gmres", "x"), ("gmres", "pr_norm")])
def test_callbacks(function, kind, dtype):
    """They are called with what SciPy's are called with, as often, on one rank of several."""
    rng, eps = np.random.default_rng(), np.finfo(dtype).eps
    if function == "minres":
        dtype = np.empty(0, dtype).real.dtype  # SciPy's does not conjugate
    a, b, x0 = hermitian(rng, dtype, np.geomspace(1, 3, N)), noise(rng, (N,), dtype), noise(rng, (N,), dtype)
    options = {"rtol": 1e-4} | ({"callback_type": kind, "restart": 5} if kind else {})
    expected = []
    getattr(scipy.sparse.linalg, function)(a, b, x0, callback=lambda x: expected.append(np.copy(x)), **options)
    results = getattr(linalg, function)(
        da.from_array(a, chunks=(17, 23)), da.from_array(b, chunks=13), da.from_array(x0), callback=see, **options
    )
    for run in (lambda: dask.compute(*results), lambda: on_ranks(results, {"a": a, "b": b[:, None], "g": x0[:, None]})):
        SEEN.clear()
        run()
        assert len(SEEN) == len(expected) > 1
        for found, one in zip(SEEN, expected, strict=True):
            assert (np.shape(found), type(found)) == ((), float) if kind == "pr_norm" else ((N,), np.ndarray)
            assert kind == "pr_norm" or found.dtype == b.dtype
            assert np.linalg.norm(found - one) <= 1e4 * eps * max(np.linalg.norm(one), 1e-2)


def test_functions_that_fail():
    """A user's error arrives as it is; what is returned has to fit."""
    b = da.ones(6, chunks=3)

    def broken(x, rows):
        raise LookupError(f"rows {rows.start}")

    with pytest.raises(LookupError, match="rows 0"):
        dask.compute(*linalg.cg(broken, b))
    with pytest.raises(LookupError, match="rows 0"):
        dask.compute(*linalg.cg(da.eye(6, chunks=3), b, callback=lambda x: broken(x, slice(int(x[0]) - 1, 6))))
    with pytest.raises(ValueError, match="read-only"):
        dask.compute(*linalg.cg(lambda x, rows: x.__setitem__(0, 1), b))
    for function, said in (
        (lambda x, rows: x, r"A returned float64 of shape \(6, 1\) for rows 0 to 3"),
        (lambda x, rows: 1j * x[rows], r"returned complex128 .* expected float64 of shape \(3, 1\)"),
    ):
        with pytest.raises(MatrixError, match=said):
            dask.compute(*linalg.cg(function, b))
    x0 = da.zeros(4)
    for functions, error, said in (
        ((lambda x, rows: x[rows], broken), LookupError, "rows 0"),
        ((lambda x, rows: np.ones((3, 1)), lambda u, rows: u), MatrixError, r"the adjoint of A .* shape \(4, 1\)"),
    ):
        with pytest.raises(error, match=said):
            dask.compute(*linalg.lsqr(functions, b, x0=da.zeros(6) if error is LookupError else x0))
    with pytest.raises(PlanError, match="A is two functions, so x0 must be passed"):
        linalg.lsmr((broken, broken), b)
    with pytest.raises(PlanError, match="A is a function, so v0 must be passed"):
        linalg.eigsh(laplacian, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["cg", "minres", "gmres", "eigsh", "lobpcg", "expm"])
def test_all_ranks_have_the_same_bits(function, dtype, monkeypatch):
    """Each computes the numbers of a solver and its flags for itself: also of NaN, and where M is a function."""
    rng, seen = np.random.default_rng(), collections.defaultdict(list)

    def noted(name, kernel):
        def call(self, *arguments, **options):
            kernel(self, *arguments, **options)
            seen[self].append((name, *(one.tobytes() for one in arguments)))

        return call

    def written_out(name, write):
        def written(self, call):
            write(self, call)
            self.names[f"note_{name}"] = lambda *numbers: seen[self.kernels].append((name, *map(bits, numbers)))
            self.line(f"note_{name}({', '.join(map(self.stored, call.arguments))})")

        return written

    def bits(number):
        return np.asarray(number).tobytes()

    for name in ("merge", "decide"):
        monkeypatch.setattr(ProgramKernels, name, noted(name, getattr(ProgramKernels, name)))
        monkeypatch.setattr(Writer, name, written_out(name, getattr(Writer, name)))
    a, b = hermitian(rng, dtype, np.geomspace(1, 30, N)), noise(rng, (N,), dtype)
    for matrix in (a, np.where(np.arange(N) == 7, np.nan, a).astype(dtype)):
        given, chunked = {"a": matrix}, da.from_array(matrix, chunks=(7, N))
        if function in ("eigsh", "lobpcg"):
            x = noise(rng, (N, 2), dtype)
            start = {} if function == "eigsh" else {"X": da.from_array(x, chunks=(7, 2))}
            given |= {} if function == "eigsh" else {"g": x}
            results = getattr(linalg, function)(chunked, *([3] if function == "eigsh" else []), **start)
        elif function == "expm":
            results = [linalg.expm(chunked / 10, method="rows")]
            given["a"] = matrix / 10
        else:
            m = {"M": lambda x, rows: 0.5 * x[rows]}
            results = getattr(linalg, function)(chunked, da.from_array(b, chunks=7), maxiter=20, **m)
            given["b"] = b[:, None]
        seen.clear()
        with contextlib.suppress(MatrixError):
            on_ranks(results, given)
        # An error, on one rank, ends the others in the middle.
        least = min(map(len, seen.values()))
        assert matrix is not a or (len(seen), {len(one) for one in seen.values()}) == (3, {least})
        assert len({tuple(one[:least]) for one in seen.values()}) == 1


def test_progress_follows_the_residual(monkeypatch):
    """A solver that ends long before its last turn has come all the way by then."""
    rng = np.random.default_rng()
    a, b = hermitian(rng, "float64", np.geomspace(1, 30, N)), noise(rng, (N,), "float64")
    for name in ("cg", "minres", "gmres", "lsqr", "lsmr"):
        seen = []

        def side(plan, me, *more, seen=seen):
            return Side(plan, me, *more, progress=seen.append if me == plan.ranks[0] else lambda share: None)

        monkeypatch.setattr(conformance, "Side", side)
        results = getattr(linalg, name)(da.from_array(a, chunks=(17, N)), da.from_array(b, chunks=17))
        on_ranks(results[:1], {"a": a, "b": b[:, None]})
        inside = [one for one in seen if one < 1]
        assert min(np.diff(inside)) > -1e-9, name
        assert len({round(one, 2) for one in inside}) > 5, name


def test_arguments_that_are_refused():
    a, b = da.eye(6, chunks=3), da.ones(6, chunks=3)
    for arguments, options, said in (
        ((a[:5], b), {}, "A must be square, got 5 x 6"),
        ((a, b[:5]), {}, r"A has 6 rows, so b must have shape \(6,\); it has \(5,\)"),
        ((a, da.ones((6, 2))), {}, "so b must have shape"),
        ((a, b, b[:2]), {}, r"so x0 must have shape \(6,\); it has \(2,\)"),
        ((a, b), {"M": a[:, :2]}, "so M must be 6 x 6, or its diagonal"),
        (
            (a, b),
            {"M": scipy.sparse.linalg.aslinearoperator(np.eye(6))},
            "M is a MatrixLinearOperator, which multiplies",
        ),
        (
            (scipy.sparse.linalg.aslinearoperator(np.eye(6)), b),
            {},
            r"for example lambda x, rows: A.matmat\(x\)\[rows\]",
        ),
        ((a, b), {"maxiter": 0}, "maxiter must be at least 1, got 0"),
        ((a, b), {"rtol": -1.0}, "rtol must be at least 0"),
        ((a, b), {"callback": 1}, "callback must be a function or None, got 1"),
        ((a, b), {"callback": [].append}, "callback is append of a list of this process, of which a worker would have"),
        ((a, b), {"method": "columns"}, "method='columns' is not for iterative solvers"),
    ):
        with pytest.raises(PlanError, match=f"^cg.*{said}"):
            linalg.cg(*arguments, **options)
    for solver, arguments, options, said in (
        (linalg.minres, (a, b), {"show": True}, "show must be False"),
        (linalg.minres, (a, b), {"check": True}, "check must be False"),
        (linalg.gmres, (a, b), {"callback": print}, "callback_type must be 'x' or 'pr_norm' if there is a callback"),
        (linalg.gmres, (a, b), {"callback_type": "legacy"}, "unknown callback_type 'legacy'"),
        (linalg.lsqr, (a, b), {"show": True}, "show must be False"),
        (linalg.lsqr, (a[:, :0], b), {}, "A must have rows and columns, got 6 x 0"),
        (linalg.lsmr, (a, b[:5]), {}, r"so b must have shape \(6,\)"),
        (linalg.lsmr, (a[:, :4], b), {"x0": b}, r"A is 6 x 4, so x0 must have shape \(4,\); it has \(6,\)"),
        (linalg.lsmr, (a, b), {"damp": -1.0}, "damp must be at least 0"),
        (linalg.lsqr, (lambda x: x, b), {}, "A is a function; expected an array, or two functions"),
        (
            linalg.lsmr,
            (scipy.sparse.linalg.aslinearoperator(np.eye(6)), b),
            {},
            "A is a MatrixLinearOperator; expected",
        ),
    ):
        with pytest.raises(PlanError, match=f"^{solver.__name__}.*{said}"):
            solver(*arguments, **options)
    with pytest.raises(NotSquareError):
        linalg.cg(a[:5], b)
    with pytest.raises(TypeError, match="tol"):
        linalg.cg(a, b, tol=1)


def test_a_plan_says_what_a_turn_takes():
    text = repr(linalg.explain(linalg.cg(da.ones((400, 400), chunks=100), da.ones(400, chunks=100))[0]))
    for line in ("Plan: cg on 1 of 1 workers", "A is read 100 times", "100 turns expected", "ik,k->i  "):
        assert line in text
