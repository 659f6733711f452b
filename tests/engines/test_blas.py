from __future__ import annotations

import numpy as np
import pytest
from conformance import assert_product, random_matrix
from matrices import until
from threadpoolctl import threadpool_info

from dask_distmm.engines.numpy import blas
from dask_distmm.engines.numpy.blas import add_lower, blas_threads, gemm, mirror
from dask_distmm.numeric.types import dtype_from_name

LAYOUTS = {
    "C": lambda x: np.ascontiguousarray(x),
    "F": lambda x: np.asfortranarray(x),
    "C part": lambda x: np.pad(x, 3)[3:-3, 3:-3],
    "F part": lambda x: np.asfortranarray(np.pad(x, 3))[3:-3, 3:-3],
    "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
    "reversed": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128", "int64", "uint32", "bool"])
@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("c_order", "CF")
def test_gemm_adds_in_place(dtype, a_layout, b_layout, c_order):
    rng = np.random.default_rng()
    m, n, k = (int(x) for x in rng.integers(1, 40, 3))
    a, b = random_matrix(rng, (m, k), np.dtype(dtype), "C"), random_matrix(rng, (k, n), np.dtype(dtype), "C")
    guarded = np.ones((m + 4, n + 4), dtype, order=c_order)
    c = guarded[2:-2, 2:-2]
    c[...] = 0
    x, y = LAYOUTS[a_layout](a), LAYOUTS[b_layout](b)
    gemm(x, y, c)
    assert_product(a, b, c)
    np.testing.assert_array_equal(x, a)
    guarded[2:-2, 2:-2] = 1
    assert (guarded == 1).all(), "written outside of c"
    if dtype in ("int64", "uint32"):
        c[...] = 5
        gemm(x, y, c)
        np.testing.assert_array_equal(c, a @ b + np.dtype(dtype).type(5))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 5), (7, 1, 5), (7, 5, 1), (0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_thin_matrices(shape):
    m, n, k = shape
    rng = np.random.default_rng()
    a, b, c = rng.standard_normal((m, k)), rng.standard_normal((k, n)), np.zeros((m, n))
    gemm(a, b, c)
    np.testing.assert_allclose(c, a @ b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("conjugated", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("c_order", "CF")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_a_matrix_by_itself_turned_around(dtype, layout, conjugated, c_order):
    """Half of the operations, where the operand that is conjugated lies in the other order than c."""
    rng, is_complex = np.random.default_rng(), np.dtype(dtype).kind == "c"
    m, k = (int(x) for x in rng.integers(2, 100, 2))
    x = LAYOUTS[layout](random_matrix(rng, (m, k), np.dtype(dtype), "C"))
    guarded = np.full((m + 4, m + 4), 1, dtype, order=c_order)
    c, x_order = guarded[2:-2, 2:-2], "C" if layout[0] == "C" else "F"
    symmetric = layout[0] in "CF" and (not is_complex or conjugated[0] != conjugated[1])
    before = random_matrix(rng, (m, m), np.dtype(dtype), "C")
    c[...] = before = before + before.conj().T
    a, b = (y.conj() if conj else y for y, conj in zip((x, x.T), conjugated, strict=True))
    if symmetric:
        # A lies as x does, and B in the other order.
        fits = not is_complex or c_order == (x_order if conjugated[1] else "FC"[x_order == "F"])
        assert add_lower(x, c, conjugated) == fits
        if fits:
            np.testing.assert_array_equal(np.triu(c, 1), np.triu(before, 1))
            mirror(c)
            np.testing.assert_array_equal(c, c.conj().T)
            np.testing.assert_allclose(c, before + a @ b, rtol=1e-3, atol=1e-3 * np.abs(a @ b).max())
    guarded[2:-2, 2:-2] = 1
    assert (guarded == 1).all(), "written outside of c"


def test_refuses_what_it_could_only_copy():
    c = np.zeros((8, 8))[::2, ::2]
    with pytest.raises(ValueError, match="neither its rows nor its columns"):
        gemm(np.ones((4, 4)), np.ones((4, 4)), c)


def test_other_types_are_numpys():
    a = np.ones((3, 4), dtype_from_name("longdouble"))
    c = np.zeros((3, 3), a.dtype)
    gemm(a, a.T, c)
    np.testing.assert_array_equal(c, np.full((3, 3), 4))


def blas_thread_counts():
    return {info["filepath"]: info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"}


def test_blas_threads_are_set_and_put_back():
    # A run of an earlier test in this process that was ended ends soon, on a thread of its own.
    until(lambda: not blas._threads_users)
    gemm(np.ones((2, 2)), np.ones((2, 2)), np.zeros((2, 2)))
    before = blas_thread_counts()
    with blas_threads(1):
        assert set(blas_thread_counts().values()) == {1}
        with blas_threads(1):
            pass
        assert set(blas_thread_counts().values()) == {1}
    assert blas_thread_counts() == before


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "clongdouble"])
@pytest.mark.parametrize("conjugated", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("orders", [x + y + z for x in "CF" for y in "CF" for z in "CF"])
def test_conjugates(dtype, conjugated, orders, monkeypatch):
    """Without a copy, where an operand lies in the other order than c."""
    rng = np.random.default_rng()
    shapes = ((7, 5), (5, 6), (7, 6))
    a, b, c = (random_matrix(rng, shape, np.dtype(dtype), order) for shape, order in zip(shapes, orders, strict=True))
    expected = c + (a.conj() if conjugated[0] else a) @ (b.conj() if conjugated[1] else b)
    copies = []
    monkeypatch.setattr(np, "conjugate", lambda x: copies.append(x) or x.conj())
    gemm(a, b, c, conjugated)
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-5)
    if dtype != "clongdouble":
        assert len(copies) == sum(x == orders[2] and conj for x, conj in zip(orders[:2], conjugated, strict=True))
