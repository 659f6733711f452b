"""Stacks of matrices, and the array API's `linalg`: all functions in all types and chunks, against NumPy."""

from __future__ import annotations

import itertools
import types

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.linalg
import xarray as xr
from matrices import noise

import dask_distmm
from dask_distmm import PlanError, linalg
from dask_distmm.errors import MatrixError, NotSquareError

DTYPES = ("float32", "float64", "complex128")
# One chunk, square ones, chunks of rows and of columns, uneven ones, and a stack.
CHUNKS = (-1, 3, (4, -1), (-1, 4), "uneven", "stack")
# Vectors are unique only up to signs.
SIGNS = ("qr", "svd", "eigh")
FUNCTIONS = {
    "cholesky": lambda la, x: la.cholesky(x.s),
    "cholesky upper": lambda la, x: la.cholesky(x.s, upper=True),
    "cross": lambda la, x: la.cross(x.p, x.q),
    "det": lambda la, x: la.det(x.a),
    "diagonal": lambda la, x: la.diagonal(x.t, offset=-1),
    "eigh": lambda la, x: la.eigh(x.s),
    "eigvalsh": lambda la, x: la.eigvalsh(x.s),
    "inv": lambda la, x: la.inv(x.a),
    "matrix_norm": lambda la, x: la.matrix_norm(x.t),
    "matrix_norm 1": lambda la, x: la.matrix_norm(x.t, ord=1),
    "matrix_norm nuc": lambda la, x: la.matrix_norm(x.t, ord="nuc", keepdims=True),
    "matrix_power": lambda la, x: la.matrix_power(x.a, 3),
    "matrix_power 0": lambda la, x: la.matrix_power(x.a, 0),
    "matrix_power -2": lambda la, x: la.matrix_power(x.a, -2),
    "matrix_rank": lambda la, x: la.matrix_rank(x.t),
    "matrix_transpose": lambda la, x: la.matrix_transpose(x.t),
    "outer": lambda la, x: la.outer(x.v.ravel(), x.v.ravel()),
    "pinv": lambda la, x: la.pinv(x.t),
    "qr": lambda la, x: la.qr(x.t),
    "qr complete": lambda la, x: la.qr(x.t, mode="complete"),
    "slogdet": lambda la, x: la.slogdet(x.a),
    "solve": lambda la, x: la.solve(x.a, x.b),
    "svd": lambda la, x: la.svd(x.t, full_matrices=False),
    "svd full": lambda la, x: la.svd(x.t, full_matrices=True),
    "svdvals": lambda la, x: la.svdvals(x.t),
    "trace": lambda la, x: la.trace(x.t, offset=1),
    "vecdot": lambda la, x: la.vecdot(x.p, x.q),
    "vecdot axis": lambda la, x: la.vecdot(x.p, x.q, axis=-2),
    "vector_norm": lambda la, x: la.vector_norm(x.t),
    "vector_norm inf": lambda la, x: la.vector_norm(x.t, axis=-1, ord=np.inf),
    "vector_norm 3": lambda la, x: la.vector_norm(x.t, axis=(-1, -2), ord=3, keepdims=True),
}
# Not of the array API, or with arguments that are NumPy's alone.
NUMPYS = {
    "cond": lambda la, x: la.cond(x.t),
    "cond 1": lambda la, x: la.cond(x.a, 1),
    "norm 2": lambda la, x: la.norm(x.t, 2, axis=(-2, -1)),
    "svd values": lambda la, x: la.svd(x.t, compute_uv=False),
}
OURS = {
    "kron": (lambda x: linalg.kron(x.t, x.b), lambda x: np.kron(x.t, x.b)),
    "matvec": (lambda x: linalg.matvec(x.a, x.v), lambda x: np.matvec(x.a, x.v)),
    "vecmat": (lambda x: linalg.vecmat(x.v, x.a), lambda x: np.vecmat(x.v, x.a)),
    "lstsq": (
        lambda x: linalg.lstsq(x.t, x.t[..., :2], rcond=1e-6)[0],
        lambda x: np.linalg.pinv(x.t, 1e-6) @ x.t[..., :2],
    ),
}


def given(dtype, chunks):
    """Return matrices, or stacks of them, by name."""
    rng, batch = np.random.default_rng(1), (4,) if chunks == "stack" else ()
    shapes = {"a": (6, 6), "t": (8, 5), "b": (6, 2), "v": (6,), "p": (5, 3), "q": (5, 3)}
    found = {name: noise(rng, batch + shape, dtype) for name, shape in shapes.items()}
    found["a"] += 6 * np.eye(6, dtype=dtype)
    found["s"] = found["a"] @ found["a"].swapaxes(-1, -2).conj()
    return found


def cut(x, chunks):
    if chunks == "uneven":
        chunks = tuple((1, size - 1) for size in x.shape)
    elif chunks == "stack":
        chunks = (2, *(min(3, size) for size in x.shape[1:]))
    return da.from_array(x, chunks=chunks[: x.ndim] if isinstance(chunks, tuple) else chunks)


def check(name, ours, numpys):
    """Compare the results of a function in all cases: values, shapes, types, named tuples; they are lazy."""
    for dtype, chunks in itertools.product(DTYPES, CHUNKS):
        matrices = given(dtype, chunks)
        expected = numpys(types.SimpleNamespace(**matrices))
        found = ours(types.SimpleNamespace(**{key: cut(x, chunks) for key, x in matrices.items()}))
        where = f"{name}, {dtype}, {chunks}"
        assert getattr(found, "_fields", None) == getattr(expected, "_fields", None), where
        pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
        for x, right in pairs:
            assert isinstance(x, da.Array), where
            value = x.compute()
            assert value.shape == x.shape == np.shape(right), where
            assert value.dtype == x.dtype == right.dtype, where
            near = 5e-3 if dtype == "float32" else 1e-8
            both = (abs(value), abs(right)) if name.split()[0] in SIGNS else (value, right)
            np.testing.assert_allclose(*both, rtol=near, atol=near, err_msg=where)


@pytest.fixture
def sync():
    with dask.config.set(scheduler="sync"):
        yield


def test_all_functions(sync):
    for name, call in (FUNCTIONS | NUMPYS).items():
        check(name, lambda x, call=call: call(linalg, x), lambda x, call=call: call(np.linalg, x))
    for name, (ours, numpys) in OURS.items():
        check(name, ours, numpys)


def test_numpys_names(sync):
    with dask_distmm.enabled():
        for name, call in (FUNCTIONS | NUMPYS).items():
            check(name, lambda x, call=call: call(np.linalg, x), lambda x, call=call: call(np.linalg, x))


def test_the_array_api(sync):
    """As array-api-compat has it, which may have been imported before or not; it is left as it was."""
    compat = pytest.importorskip("array_api_compat.dask.array").linalg
    before = dict(vars(compat))
    with dask_distmm.enabled():
        for name, call in FUNCTIONS.items():
            check(name, lambda x, call=call: call(compat, x), lambda x, call=call: call(np.linalg, x))
    assert dict(vars(compat)) == before


def test_stacks_are_broadcast(sync):
    rng = np.random.default_rng()
    a, b = rng.standard_normal((4, 1, 3, 3)) + 5 * np.eye(3), rng.standard_normal((5, 3, 2))
    x, y = da.from_array(a, chunks=(3, 1, 2, 3)), da.from_array(b, chunks=2)
    for ours, numpys in (
        (linalg.solve(x, y), np.linalg.solve(a, b)),
        (linalg.solve(x[0, 0], y), np.linalg.solve(a[0, 0], b)),
        (linalg.solve(x, y[0, :, 0]), np.linalg.solve(a, b[0, :, 0])),
        (linalg.solve(x, y, transposed=True), np.linalg.solve(a.swapaxes(-1, -2), b)),
        (linalg.inv(x.astype("int64")), np.linalg.inv(a.astype("int64"))),
        (linalg.matrix_rank(x, hermitian=True), np.linalg.matrix_rank(a, hermitian=True)),
        (linalg.norm(x, "nuc", (0, 2), keepdims=True), np.linalg.norm(a, "nuc", (0, 2), keepdims=True)),
        (linalg.inv(x[x[:, 0, 0, 0] > 0]), np.linalg.inv(a[a[:, 0, 0, 0] > 0])),
        (linalg.svd(da.ones((2, 0, 3)), False)[2], np.linalg.svd(np.ones((2, 0, 3)), False)[2]),
        (linalg.inv(da.ones((0, 3, 3))), np.ones((0, 3, 3))),
        # A run for each matrix.
        (linalg.inv(x, method="local"), np.linalg.inv(a)),
    ):
        np.testing.assert_allclose(ours.compute(), numpys, atol=1e-10)
    assert len(linalg.explain(linalg.inv(x, method="local")).runs) == 4
    with dask.config.set({"distmm.batch.task-bytes": 8}):
        assert len(linalg.explain(linalg.svdvals(x)).runs) == 4
    assert linalg.explain(linalg.inv(x)).runs == ()


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [(3, 1, 2, 3), (1, 1, -1, -1)])
def test_equations_of_stacks(sync, dtype, chunks):
    """Of triangles and factors: both sides broadcast, all options, against NumPy of each matrix."""
    rng = np.random.default_rng()
    a, b = noise(rng, (4, 1, 3, 3), dtype), noise(rng, (5, 3, 2), dtype)
    a[:, 0] += 5 * np.eye(3, dtype=dtype)[[1, 2, 0]]
    s = a @ a.swapaxes(-1, -2).conj()
    x, y, h = da.from_array(a, chunks=chunks), da.from_array(b, chunks=2), da.from_array(s, chunks=chunks)
    ops = {"N": lambda z: z, "T": lambda z: z.swapaxes(-1, -2), "C": lambda z: z.swapaxes(-1, -2).conj()}
    near = {"rtol": 2e-3, "atol": 2e-3} if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-9}

    def same(found, expected):
        value = found.compute()
        assert (value.shape, value.dtype) == (found.shape, found.dtype) == (expected.shape, np.dtype(dtype))
        np.testing.assert_allclose(value, expected, **near)

    for (trans, op), lower, unit in itertools.product(ops.items(), (False, True), (False, True)):
        triangle = np.tril(s) if lower else np.triu(s)
        if unit:
            triangle[..., range(3), range(3)] = 1
        t, options = op(triangle), (trans, lower, unit)
        same(linalg.solve_triangular(h, y, *options), np.linalg.solve(t, b))
        same(linalg.solve_triangular(h, y[0], *options), np.linalg.solve(t, b[0]))
        same(linalg.solve_triangular(h, y[0, :, 0], *options), np.linalg.solve(t, b[0, :, 0]))
        same(linalg.solve_triangular(h[0, 0], y, *options), np.linalg.solve(t[0, 0], b))
        rows = linalg.solve_triangular(h, y.swapaxes(-1, -2), *options, right=True)
        same(rows, np.linalg.solve(t.swapaxes(-1, -2), b).swapaxes(-1, -2))
    for lower in (False, True):
        c, _ = factor = linalg.cho_factor(h, lower)
        same(c, np.linalg.cholesky(s) if lower else np.linalg.cholesky(s).swapaxes(-1, -2).conj())
        for right in (b, b[0], b[0, :, 0]):
            same(linalg.cho_solve(factor, da.from_array(right, chunks=2)), np.linalg.solve(s, right))
        same(linalg.cho_solve((c[0, 0], lower), y), np.linalg.solve(s[0, 0], b))
    lu, piv = linalg.lu_factor(x)
    each = [scipy.linalg.lu_factor(one) for one in a[:, 0]]
    same(lu[:, 0], np.stack([one for one, _ in each]))
    np.testing.assert_array_equal(piv[:, 0], np.stack([rows for _, rows in each]))
    assert (piv.dtype, piv.compute().dtype) == ("int32", "int32")
    for (trans, op), right in itertools.product(ops.items(), (b, b[0], b[0, :, 0])):
        same(linalg.lu_solve((lu, piv), da.from_array(right, chunks=2), trans), np.linalg.solve(op(a), right))
    same(linalg.lu_solve((lu[0, 0], piv[0, 0]), y), np.linalg.solve(a[0, 0], b))
    for ours, expected in (
        (linalg.lu(x), scipy.linalg.lu(a)),
        (linalg.lu(y), scipy.linalg.lu(b)),
        (linalg.lu(y, True), scipy.linalg.lu(b, True)),
        (linalg.lu(y, p_indices=True), scipy.linalg.lu(b, p_indices=True)),
    ):
        for found, right in zip(ours, expected, strict=True):
            np.testing.assert_allclose(found, right, **near)
            assert found.dtype == (right.dtype if right.dtype.kind != "i" else "int64")
    # A run for each matrix.
    runs = linalg.lu_solve(linalg.lu_factor(x, method="local"), y, method="local")
    same(runs, np.linalg.solve(a, b))


def test_xarray(sync):
    rng = np.random.default_rng()
    a = xr.DataArray(rng.standard_normal((6, 3, 3)), dims=("voxel", "i", "j"))
    options = {"input_core_dims": [["i", "j"]], "output_core_dims": [["j", "i"]], "dask": "allowed"}
    for function in (linalg.inv, np.linalg.inv):
        with dask_distmm.enabled():
            found = xr.apply_ufunc(function, a.chunk(voxel=4, j=2), **options)
        assert isinstance(found.data, da.Array)
        np.testing.assert_allclose(found, np.linalg.inv(a))


def test_errors_of_stacks(sync):
    x, y = da.ones((4, 3, 3), chunks=2), da.ones((5, 3, 2), chunks=2)
    for call, error, message in (
        (lambda: linalg.inv(y), NotSquareError, r"inv\(\): a must be square, got 3 x 2"),
        (lambda: linalg.solve(x, da.ones((4, 2, 2))), PlanError, "a is 3 x 3, so b must have 3 rows; it has 2"),
        (lambda: linalg.solve(x, y), PlanError, r"a is a stack of \(4,\) and b is a stack of \(5,\)"),
        (lambda: linalg.solve(x, x, assume_a="pos"), PlanError, "a stack of matrices has no assume_a="),
        (lambda: linalg.eigh(x, b=x), PlanError, "a stack of matrices has no b="),
        (lambda: linalg.polar(x), PlanError, "loop over the matrices"),
        (lambda: linalg.solve_triangular(x, y), PlanError, r"a is a stack of \(4,\) and b is a stack of \(5,\)"),
        (
            lambda: linalg.solve_triangular(x, da.ones((4, 2, 2)), right=True),
            PlanError,
            "a is 3 x 3, so b must have 3 columns; it has 2",
        ),
        (lambda: linalg.lu_solve((x, x), y), PlanError, "must be 3 pivots for each matrix, got shape"),
        (lambda: linalg.cho_solve((x, True), da.ones(2)), PlanError, "a is 3 x 3, so b must have 3 rows; it has 2"),
        (lambda: linalg.solve_triangular(0 * x, x).compute(), MatrixError, "an element of the diagonal is zero"),
        (lambda: linalg.cho_factor(-x)[0].compute(), MatrixError, "a matrix of the stack"),
        (lambda: linalg.lu_factor(x * np.nan)[0].compute(), MatrixError, "a must not contain infs or NaNs"),
        (lambda: linalg.cross(y, y), PlanError, "must have 3 elements along axis -1; they have 2"),
        (lambda: linalg.vecdot(x, y), PlanError, "x1 has 3 elements along axis -1, so x2 must have as many, got 2"),
        (lambda: linalg.trace(x[0, 0]), PlanError, "x must be at least 2-D, got 1-D"),
        (lambda: linalg.inv(x).compute(), MatrixError, "a matrix of the stack: Singular matrix"),
        (lambda: linalg.inv(x * np.nan).compute(), MatrixError, "a must not contain infs or NaNs"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert np.isnan(linalg.inv(x * np.nan, check_finite=False).compute()).all()


def test_products_of_bools_are_bools(sync):
    a = np.random.default_rng().random((6, 6)) > 0.5
    x = da.from_array(a, chunks=4)
    for ours, right in (
        (dask_distmm.matmul(x, x), a @ a),
        (dask_distmm.matmul(da.stack([x, x]), x), np.stack([a, a]) @ a),
        (dask_distmm.matmul(x.astype("int8"), x.astype("int8") * 50), a.astype("int8") @ (a.astype("int8") * 50)),
    ):
        assert ours.dtype == right.dtype
        np.testing.assert_array_equal(ours, right)
    with dask_distmm.enabled():
        assert (x @ x).dtype == np.dtype("int64"), "as stock Dask"
