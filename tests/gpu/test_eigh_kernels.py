"""The kernels of shared eigenvalues and of products by halves on one GPU, in this process, beside NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from factoring import factor_plan
from matrices import noise

from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.tridiagonal import HostReduction
from dask_distmm.programs.factorizations import Factorization

pytestmark = pytest.mark.engines("peer")
DTYPES = ["float32", "float64", "complex64", "complex128"]


@pytest.fixture(scope="module")
def kernels():
    import cupy

    from dask_distmm.engines.gpu.lapack import SolverKernels

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        yield SolverKernels(stream)
        stream.synchronize()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width"), [(1, 128), (65, 128), (513, 128), (1200, 256)])
def test_reductions(kernels, dtype, n, width):
    """The tridiagonal matrix has the eigenvalues of the matrix, and those of NumPy's reduction, column by column."""
    import cupy

    from dask_distmm.engines.gpu.tridiagonal import DeviceReduction, Peers, exchange_bytes

    a = noise(np.random.default_rng(), (n, n), dtype)
    a = (a + a.conj().T).astype(dtype)
    columns = factor_plan(Factorization("eigh", a.shape, dtype), 1, width, shared=True).columns
    array = cupy.asfortranarray(cupy.asarray(np.tril(a) + np.triu(np.full(a.shape, np.nan, a.dtype), 1)))
    exchange = cupy.zeros((exchange_bytes(n, a.itemsize), 1), np.uint8)
    one = DeviceReduction(columns, 0, a.dtype, ["this one"], 60.0)
    peers = Peers([int(exchange.data.ptr)], lambda rank, places: None)
    d, e, factors = one.reduce(array, kernels, peers, lambda: None, lambda share: None)
    assert factors.dtype == a.dtype
    expected = HostReduction(columns, 0, np.array(np.tril(a), order="F"), None).reduce()
    # The first panel, before rounding has grown.
    close = {"rtol": 1e4 * np.finfo(dtype).eps, "atol": 1e4 * np.finfo(dtype).eps}
    for found, numpys in zip((d, e, factors), expected, strict=True):
        np.testing.assert_allclose(found[:5], numpys[:5], **close)
    values = np.linalg.eigvalsh(a.astype("complex128"))
    unit = n * np.finfo(dtype).eps * np.abs(a).sum(axis=0).max()
    assert abs(np.linalg.eigvalsh(np.diag(d) + np.diag(e, -1)) - values).max() < 10 * unit
    # Columns of reflectors, with their ones and zeros.
    v = array.get()[:, : n - 1]
    for column in range(n - 1):
        start = column // width * width
        np.testing.assert_array_equal(v[start : column + 1, column], 0)
        assert v[column + 1, column] == 1


@pytest.mark.parametrize("n", [1, 2, 40, 3000])
@pytest.mark.parametrize("spread", [0, 12])
def test_secular_equations(kernels, n, spread):
    import cupy

    rng = np.random.default_rng()
    poles = np.sort(rng.uniform(1, 2, n)) * 10.0 ** np.sort(rng.uniform(-spread, 0, n))
    weights = rng.standard_normal(n) * 10.0 ** -rng.uniform(0, spread, n)
    weights /= np.linalg.norm(weights)
    found, expected = (one.secular(poles, weights, 0.7) for one in (kernels, LapackKernels()))
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-12)
    rows, which = rng.permutation(n), np.arange(n // 3, n)
    vectors, numpys = cupy.empty((n, len(which)), order="F"), np.empty((n, len(which)), order="F")
    found.vectors(rows, which, vectors)
    expected.vectors(rows, which, numpys)
    np.testing.assert_allclose(vectors.get(), numpys, rtol=0, atol=1e-11)
    np.testing.assert_allclose((vectors.T @ vectors).get(), np.eye(len(which)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 70, 2000])
def test_bisection(kernels, n):
    rng = np.random.default_rng()
    for d, e in (
        (rng.standard_normal(n), rng.standard_normal(n - 1)),
        (np.full(n, 2.0), np.full(n - 1, -1.0)),
        (np.ones(n), np.zeros(n - 1)),
    ):
        first, last = np.sort(rng.integers(0, n, 2)).tolist()
        expected = np.linalg.eigvalsh(np.diag(d) + np.diag(e, -1))[first : last + 1]
        np.testing.assert_allclose(kernels.tridiagonal_values(d, e, first, last), expected, rtol=0, atol=n * 1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_that_are_taken_and_rotated(kernels, dtype):
    import cupy

    rng = np.random.default_rng()
    given, columns = rng.standard_normal((300, 20)), rng.integers(0, 17, 9)
    source = cupy.asfortranarray(cupy.asarray(given))[7:290, 3:]
    frame = cupy.asfortranarray(cupy.full((290, 12), 7, dtype))
    kernels.take(source, columns, frame[4:287, 1:10])
    np.testing.assert_array_equal(frame.get()[4:287, 1:10], given[7:290, 3:][:, columns].astype(dtype))
    frame[4:287, 1:10] = 7
    assert (frame.get() == 7).all()
    pairs, angles = np.array([[0, 1], [1, 2], [2, 9], [0, 9]]), rng.uniform(0, 6, 4)
    factors, expected = np.stack([np.cos(angles), np.sin(angles)], 1), given[7:290, 3:].copy()
    LapackKernels().rotate(expected, pairs, factors)
    kernels.rotate(source, pairs, factors)
    np.testing.assert_allclose(source.get(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("ops", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("ranged", [False, True])
@pytest.mark.parametrize(("m", "n", "depth"), [(300, 70, 130), (1, 5, 3), (64, 64, 1), (40, 30, 0)])
def test_products_of_float32_by_three_of_float16(kernels, ops, ranged, m, n, depth):
    import cupy

    rng, size = np.random.default_rng(), 1e6 if ranged else 1
    a = (rng.standard_normal((m, depth) if ops[0] == "N" else (depth, m)) * 10.0 ** rng.uniform(-3, 1)).astype("f4")
    b = (rng.standard_normal((depth, n) if ops[1] == "N" else (n, depth)) * size).astype("f4")
    c = rng.standard_normal((m, n)).astype("f4")
    left, right, out = (cupy.asarray(x, order="F") for x in (a, b, c))
    if ranged:
        right = kernels.operand(right, "fp16x3", right=True, op=ops[1], ranged=True)
    kernels.gemm(left, right, out, *ops, alpha=-1, beta=1, compute="fp16x3")
    a, b = (x.astype("f8") if op == "N" else x.T.astype("f8") for x, op in zip((a, b), ops, strict=True))
    # 22 bits of each number, of the largest ones where others are far below them; sums in float32.
    bound = 2e-6 * (abs(a) @ abs(b) + abs(c)) + 1e-9 * depth * (abs(a).max(initial=1) * abs(b).max(initial=1))
    assert (abs(kernels.host(out) - (c - a @ b)) <= bound).all()
