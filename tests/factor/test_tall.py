"""QR and least squares of tall matrices by their chunks of rows, by LAPACK's gates."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from unittest import mock

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import noise

from dask_distmm import PlanError, linalg
from dask_distmm.arrays.linalg import tall as by_rows
from dask_distmm.engines.factor import tall
from dask_distmm.engines.factor.tall import gram_reflectors, tall_qr
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.errors import MatrixError
from dask_distmm.planning.factor import Factorization, factor_plan
from dask_distmm.testing import assert_least_squares, assert_qr, run_factorization

K = LapackKernels()
DTYPES = ["float32", "float64", "complex64", "complex128"]


def matrix(rng, shape, dtype, condition):
    wide = "complex128" if np.dtype(dtype).kind == "c" else "float64"
    u, v = (np.linalg.qr(noise(rng, (size, shape[1]), wide))[0] for size in shape)
    return ((u * np.geomspace(1, 1 / condition, shape[1])) @ v.conj().T).astype(dtype)


@pytest.fixture(autouse=True)
def _here():
    with dask.config.set(scheduler="sync"):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("condition", [1, 1e2, 1e4, 1e6, 1e8, 1e12, 1e30])
@pytest.mark.parametrize("order", "CF")
def test_one_chunk(dtype, condition, order):
    rng = np.random.default_rng()
    for shape in ((300, 20), (20, 20), (5, 1)):
        a = np.array(matrix(rng, shape, dtype, condition), order=order)
        before = a.copy()
        assert_qr(a, *tall_qr(K, a))
        np.testing.assert_array_equal(a, before)


@pytest.mark.parametrize("scale", [1e-200, 1e-100, 1e100, 1e200])
def test_squares_that_overflow(scale):
    a = np.random.default_rng().standard_normal((100, 10)) * scale
    a[:, 3] *= 1e-90
    assert_qr(a, *tall_qr(K, a))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (60, 7), (300, 40), (60, 20)])
def test_reflectors_out_of_the_gram_matrix(monkeypatch, dtype, shape):
    monkeypatch.setattr(tall, "_COLUMNS", 4)
    a = noise(np.random.default_rng(), shape, dtype)
    (m, n), panel = shape, K.empty(shape, a.dtype)
    panel[...] = a
    t = gram_reflectors(K, panel)
    v = np.tril(panel, -1) + np.eye(m, n, dtype=dtype)
    assert not np.tril(t, -1).any()
    q = np.eye(m, dtype=dtype) - v @ t @ v.conj().T
    assert_qr(a, q, np.vstack([np.triu(panel[:n]), np.zeros((m - n, n), dtype)]))


class Device(LapackKernels):
    asynchronous = True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (60, 7), (300, 40)])
def test_gram_matrices_of_asynchronous_engines(monkeypatch, dtype, shape):
    monkeypatch.setattr(tall, "_COLUMNS", 4)
    monkeypatch.setattr(np.linalg, "qr", lambda a: pytest.fail("Householder"))
    a = noise(np.random.default_rng(), shape, dtype)
    assert_qr(a, *tall_qr(Device(), a))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_with_an_inverse_are_as_exact_as_solutions(dtype):
    """Where a matrix is neither well-conditioned nor so ill-conditioned that its Gram matrix is of no use."""
    rng = np.random.default_rng()
    a = noise(rng, (400, 30), dtype)
    a[:, 1:] += (20 if dtype in ("float32", "complex64") else 1e4) * a[:, :1]
    first = tall.first_divisor(Device(), tall.gram(Device(), a))
    assert not first.well
    assert len(tall.both_divisors(Device(), first, tall.gram_of_quotient(Device(), a, first)).each) == 2
    with mock.patch.multiple(tall, _COLUMNS=8, _DEVICE_BYTES=4096):
        assert_qr(a, *tall_qr(Device(), a))


def test_a_divisor_travels_without_what_can_be_computed_again():
    a = np.random.default_rng().standard_normal((200, 30))
    first = tall.first_divisor(K, tall.gram(K, a))
    found = pickle.loads(pickle.dumps(first))
    assert (found.well, found._inverse) == (first.well, None)
    np.testing.assert_array_equal(found.r(K), first.r(K))
    np.testing.assert_allclose(found.inverse(K) @ found.r(K), np.eye(30), atol=1e-13)


@pytest.mark.parametrize(("condition", "safe"), [(1, True), (1e3, True), (1e12, False)])
@pytest.mark.parametrize("parts", [2, 9, 70])
def test_chunks_that_are_divided_by_what_their_gram_matrices_give(monkeypatch, condition, safe, parts):
    factorized = []
    monkeypatch.setattr(by_rows, "_pays", lambda a: True)
    monkeypatch.setattr(tall, "tall_qr", lambda kernels, a: factorized.append(a.shape) or tall_qr(kernels, a))
    a = matrix(np.random.default_rng(), (parts * 40, 8), "float64", condition)
    q, r = linalg.qr(da.from_array(a, chunks=(40, 5)))
    assert_qr(a, *dask.compute(q, r))
    assert (factorized == []) == safe
    assert safe or factorized.count((40, 8)) == parts


@pytest.mark.parametrize(("limits", "twice"), [([48_000] * 2, True), ([48_000, 47_000], False), ([0, 0], True)])
def test_what_may_be_spilled_is_read_once(monkeypatch, limits, twice):
    """A matrix of 32 kB is read more than once where the workers have three times its size, or no limit."""
    workers = {f"w{i}": {"memory_limit": limit} for i, limit in enumerate(limits)}
    client = SimpleNamespace(asynchronous=False, scheduler_info=lambda n_workers: {"workers": workers})
    monkeypatch.setattr(by_rows, "current_client", lambda: client)
    monkeypatch.setattr(by_rows, "_pays", lambda a: True)
    x = da.ones((1000, 4), chunks=(100, 4))

    def by_gram(array):
        return any(key[0].startswith("qr-rows-gram-") for key in array.__dask_graph__())

    assert [by_gram(one) for one in linalg.qr(x)] == [twice] * 2
    assert not by_gram(linalg.qr(x, "r"))


@pytest.mark.parametrize("value", [0, np.nan, np.inf])
def test_no_reflectors_out_of_a_bad_gram_matrix(value):
    a = np.asfortranarray(np.random.default_rng().standard_normal((40, 6)))
    a[:, 2] = value
    before = a.copy()
    with np.errstate(all="ignore"):
        assert gram_reflectors(K, a) is None
    np.testing.assert_array_equal(a, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeated", [False, True])
def test_panels_of_asynchronous_engines(monkeypatch, dtype, repeated):
    asked = []
    monkeypatch.setattr(Device, "geqrt", lambda self, a: asked.append(a.shape) or LapackKernels.geqrt(self, a))
    a = noise(np.random.default_rng(), (120, 80), dtype)
    if repeated:
        a[:, 1] = a[:, 0]
    found = run_factorization(factor_plan(Factorization("qr", a.shape, dtype), 2, 16), a, kernels=Device())
    assert_qr(a, found["q"], found["r"])
    assert ((120, 16) in asked) == repeated


def test_the_quick_way_is_taken_where_it_is_safe(monkeypatch):
    def refused(a):
        raise AssertionError("Householder")

    monkeypatch.setattr(np.linalg, "qr", refused)
    rng = np.random.default_rng()
    tall_qr(K, rng.standard_normal((200, 10)))
    for wrong in (np.ones((200, 10)), np.full((200, 10), np.nan), rng.standard_normal((5, 10))):
        with pytest.raises(AssertionError, match="Householder"):
            tall_qr(K, wrong)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=20),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 1e5, 1e30]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_any_chunks(rows, cols, dtype, condition, large, seed):
    rng = np.random.default_rng(seed)
    rows = [*rows, max(0, sum(cols) - sum(rows))]
    a = matrix(rng, (sum(rows), sum(cols)), dtype, condition)
    x = da.from_array(a, chunks=(tuple(rows), tuple(cols)))
    with mock.patch.object(by_rows, "_pays", return_value=large):
        q, r = linalg.qr(x, method="rows")
    assert (q.chunks, r.chunks[1]) == (x.chunks, x.chunks[1])
    assert_qr(a, *dask.compute(q, r))
    assert_qr(a, dask.compute(q)[0], linalg.qr(x, "r", method="rows").compute())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("condition", [1, 1e2])
def test_least_squares(dtype, condition):
    rng = np.random.default_rng()
    a, b = matrix(rng, (300, 12), dtype, condition), noise(rng, (300, 5), dtype)
    x, residuals, rank, _ = linalg.lstsq(da.from_array(a, chunks=(60, 5)), da.from_array(b, chunks=(70, 2)))
    assert not any("lstsq" in name for name in x.dask.layers)
    assert (rank, x.dtype) == (12, a.dtype)
    assert_least_squares(a, x.compute(), b)
    expected = np.linalg.norm(b - a @ x.compute(), axis=0) ** 2
    np.testing.assert_allclose(residuals.compute(), expected, rtol=1e-4)
    x, residuals, *_ = linalg.lstsq(da.from_array(a, chunks=(60, 5)), da.from_array(b[:, 0], chunks=70))
    assert (x.shape, residuals.shape) == ((12,), (1,))


def test_a_matrix_of_lower_rank_is_an_error():
    a = np.random.default_rng().standard_normal((300, 12))
    a[:, 7] = a[:, :7] @ np.arange(7)
    with pytest.raises(MatrixError, match="column 7 depends on those before it"):
        linalg.lstsq(da.from_array(a, chunks=(60, 5)), da.from_array(a[:, :2], chunks=60))[0].compute()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_is_no_result(value):
    a = np.random.default_rng().standard_normal((300, 12))
    a[150, 3] = value
    with np.errstate(all="ignore"):
        q, r = dask.compute(*linalg.qr(da.from_array(a, chunks=(60, 5)), check_finite=False))
    assert not np.isfinite(q).all()
    assert not np.isfinite(r).all()


def test_which_matrices_are_tall():
    def rows(m, n, chunks, **how):
        r = linalg.qr(da.ones((m, n), chunks=chunks), "r", **how)
        return any(name.startswith("qr-rows-") for name in r.dask.layers)

    assert rows(1000, 100, 500)
    assert not rows(1000, 100, 100)
    assert not rows(300, 100, 300)
    assert not rows(1000, 100, 500, method="columns")
    assert not rows(1000, 100, 500, engine="numpy")
    for shape in ((10, 20), (10, 0)):
        with pytest.raises(PlanError, match="needs from 1 to 10 columns"):
            linalg.qr(da.ones(shape), method="rows")
    with pytest.raises(PlanError, match="has no engine="):
        linalg.qr(da.ones((20, 10)), method="rows", engine="numpy")
