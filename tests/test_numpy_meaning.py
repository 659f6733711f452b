"""NumPy's functions on Dask arrays under ``enable()`` mean what they mean in NumPy: values, axes, errors."""

from __future__ import annotations

import itertools
import logging

import dask
import dask.array as da
import numpy as np
import pytest

import dask_distmm

SHAPES = [(), (3,), (4, 3), (3, 3), (3, 1), (2, 3, 4)]
AXES = [
    *(0, 1, 2, 3, -1, (0, 0), (1, 1), (2, 2), (-1, -1), (-1, 0), (0, -1), (-2, -1), (-1, -2), (5, 0), (0, -7)),
    *(([-1], [-1]), ((), ()), ((0, 1), (0,)), ((0, 0), (0, 0)), ((-1, 1), (0, 1)), ((0, 1), (0, 1))),
    *(((-1, -2), (1, 0)), ((-1, -2), (-2, -1)), ((1, 2), (-1, -2)), ((1, 2), (0, 1))),
]
SPECS = ["ij,jk", "ij,kj->ki", "i,ij", "ij,ij", "ii,ij->j", "...ij,...jk->...ik", "bij,bjk->bik", "ij,jk->", "i,j"]
CHAINS = [(4, 3), (3, 4), (3,), (2, 3, 4)]


def calls():
    """Yield a function, its arguments, where a shape stands for an array, and those with a name."""
    for pair in itertools.product(SHAPES, repeat=2):
        yield from ((f, pair, {}) for f in (np.matmul, np.linalg.matmul, np.inner, np.vdot))
        if () not in pair:  # stock Dask has no product with a number under this name
            yield np.dot, pair, {}
        yield from ((f, pair, {"axes": x}) for f in (np.tensordot, np.linalg.tensordot) for x in AXES)
        yield from ((np.einsum, (spec, *pair), {}) for spec in SPECS)
    for power in (-1, 0, 1, 5, np.int64(3), 1.5):
        yield from ((np.linalg.matrix_power, (shape, power), {}) for shape in SHAPES)
    for shapes in itertools.product(CHAINS, repeat=3):
        yield np.linalg.multi_dot, (list(shapes),), {}


def value(function, args, options, convert):
    """Return what a call returns, or its error."""

    def given(x):
        if isinstance(x, list):
            return [given(one) for one in x]
        # The same numbers for the same shape.
        return convert(np.random.default_rng(len(x)).integers(-9, 9, x) * 1.0) if isinstance(x, tuple) else x

    try:
        return dask.compute(function(*map(given, args), **options))[0]
    except Exception as error:
        return error


def check(chosen):
    wrong = []
    for function, args, options in chosen:
        expected = value(function, args, options, np.asarray)
        found = value(function, args, options, lambda x: da.from_array(x, chunks=2))
        if isinstance(expected, Exception):
            # Those of Dask's own functions are Dask's.
            right = isinstance(found, Exception if hasattr(da, function.__name__) else type(expected))
        else:
            right = np.shape(found) == expected.shape and np.array_equal(found, expected)
        if not right:
            wrong.append((function.__name__, args, options, expected, found))
    assert not wrong, f"{len(wrong)} calls, first {wrong[0]}"


@pytest.mark.filterwarnings("ignore:The `numpy:FutureWarning")
def test_products_without_a_cluster():
    with dask_distmm.enabled(), dask.config.set(scheduler="sync"):
        check(calls())


@pytest.mark.filterwarnings("ignore:The `numpy:FutureWarning")
def test_products_on_a_cluster(inproc_client, take_all, caplog):
    """A sample: a call takes a run each."""
    caplog.set_level(logging.CRITICAL, "distributed.worker")
    with dask_distmm.enabled():
        check(itertools.islice(calls(), 3, None, 23))


def test_negative_axes_are_right_where_stock_dask_is_wrong(inproc_client):
    a, b = np.arange(12.0).reshape(4, 3), np.arange(12.0).reshape(3, 4)
    x, y = (da.from_array(one, chunks=2) for one in (a, b))
    for axes in (((-1, -2), (0, 1)), ([-2, -1], [1, 0])):
        with dask_distmm.enabled():
            found = da.tensordot(x, y, axes=axes)
        np.testing.assert_array_equal(found, np.tensordot(a, b, axes=axes))


def positive(n):
    a = np.random.default_rng(n).standard_normal((n, n))
    return a @ a.T + n * np.eye(n)


def test_cholesky_is_numpys_or_dasks_by_its_name(inproc_client):
    s = positive(20)
    with dask_distmm.enabled():
        for dtype, chunks in itertools.product(("float32", "complex128", "int64"), (20, 10, (7, 20))):
            a = np.rint(s).astype(dtype)
            x, low, close = da.from_array(a, chunks=chunks), np.linalg.cholesky(a), {"rtol": 1e-4, "atol": 1e-4}
            np.testing.assert_allclose(np.linalg.cholesky(x), low, **close)
            np.testing.assert_allclose(np.linalg.cholesky(x, upper=True), low.conj().T, **close)
            np.testing.assert_allclose(da.linalg.cholesky(x), low.conj().T, **close)
            np.testing.assert_allclose(da.linalg.cholesky(x, lower=True), low, **close)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, for its own results
def test_what_is_not_finite(inproc_client, caplog):
    """Dask's names refuse what they refuse without us, NumPy's compute."""
    caplog.set_level(logging.CRITICAL, "distributed.worker")
    b = np.ones(20)
    functions = {
        "cholesky": lambda x, la: la.cholesky(x),
        "inv": lambda x, la: la.inv(x),
        "lstsq": lambda x, la: la.lstsq(x, da.from_array(b, chunks=x.chunks[0]))[0],
        "lu": lambda x, la: la.lu(x)[2],
        "solve": lambda x, la: la.solve(x, da.from_array(b, chunks=x.chunks[0])),
        "solve_triangular": lambda x, la: la.solve_triangular(x, da.from_array(b, chunks=x.chunks[0])),
        "qr": lambda x, la: la.qr(x)[1],
    }
    for chunks, bad in itertools.product((20, 10, (15, 20)), (np.nan, np.inf)):
        a = positive(20)
        a[2, 2] = bad
        x = da.from_array(a, chunks=chunks)
        for name, call in functions.items():
            # Of one chunk Dask calls NumPy's, and what LAPACK says to that depends on LAPACK.
            if (name, chunks) == ("cholesky", 20):
                continue
            stock = value(call, (x, da.linalg), {}, None)
            with dask_distmm.enabled():
                found = value(call, (x, da.linalg), {}, None)
            assert isinstance(found, ValueError) == (name != "qr"), (name, chunks, bad, found)
            # Dask refuses some of the chunks, too.
            assert isinstance(stock, ValueError | NotImplementedError) or name == "qr", (name, chunks, bad, stock)
        with dask_distmm.enabled():
            found = np.linalg.inv(x).compute(), np.linalg.solve(x, da.from_array(b, chunks=5)).compute()
            assert np.isnan(np.linalg.slogdet(x)[1].compute()) == np.isnan(np.linalg.slogdet(a)[1])
            assert not np.isfinite(np.linalg.det(x)), (chunks, bad)
            # LAPACK's iterations may end with or without an error.
            assert isinstance(value(np.linalg.eigvalsh, (x,), {}, None), np.ndarray | np.linalg.LinAlgError)
            if chunks != 20:
                with pytest.raises(np.linalg.LinAlgError):
                    np.linalg.cholesky(x).compute()
        for ours, numpys in zip(found, (np.linalg.inv(a), np.linalg.solve(a, b)), strict=True):
            assert np.isfinite(ours).all() == np.isfinite(numpys).all()
