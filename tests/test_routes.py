"""All routes to one result compute the same from the same input: of products, least squares and singular values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
from conformance import assert_product, random_chunks
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from matrices import noise
from residuals import assert_least_squares, assert_svd

import dask_distmm
from dask_distmm import linalg, matmul
from dask_distmm.planning import METHODS

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(["float32", "float64", "complex64", "complex128"])
# The cluster is the same in all examples; on it there is no time to look for a smaller one that fails.
several = settings(
    max_examples=4, phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def conditioned(rng: np.random.Generator, m: int, n: int, dtype: str) -> np.ndarray:
    """A matrix of full rank whose singular values lie between 1 and 30."""
    u, _, vh = np.linalg.svd(noise(rng, (m, n), dtype), full_matrices=False)
    return ((u * rng.uniform(1, 30, min(m, n))) @ vh).astype(dtype)


def cut(rng: np.random.Generator, x: np.ndarray, *, rows_alone: bool = False) -> da.Array:
    """The matrix in random chunks, or in random chunks of rows."""
    rows, *cols = (random_chunks(rng, size, 5) for size in x.shape)
    return da.from_array(x, chunks=(rows, *((-1,) if rows_alone and cols else cols)))


def everywhere(results: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Compute all results at once on the cluster, then without it."""
    for place, how in (("cluster", {}), ("here", {"scheduler": "sync"})):
        for name, value in dask.compute(results, **how)[0].items():
            yield f"{name}, {place}", value


@several
@given(seeds, dtypes, st.tuples(*[st.integers(1, 60)] * 3))
def test_products(inproc_client, seed, dtype, shape):
    rng, (m, k, n) = np.random.default_rng(seed), shape
    a, b = noise(rng, (m, k), dtype), noise(rng, (k, n), dtype)
    # Chunks that ranks make, too.
    x, y = cut(rng, a), cut(rng, b)
    made = x.map_blocks(np.copy, dtype=x.dtype, meta=x._meta)
    results = {method: matmul(x, y, method=method) for method in ("auto", *METHODS)}
    results |= {"chunks that are made": matmul(made, y), "by rows": matmul(x, y.rechunk(-1), method="allgather")}
    results["transposed"] = matmul(y.T, x.T).T
    results["one worker"] = matmul(x, y, workers=1)
    with dask_distmm.enabled():
        results["operator"] = x @ y
        results["einsum"] = da.einsum("ij,jk->ik", x, y)
    results["Dask"] = da.matmul(x, y)
    for name, product in everywhere(results):
        assert product.shape == (m, n), name
        try:
            assert_product(a, b, product)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@several
@given(seeds, dtypes, st.integers(1, 60), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_least_squares(inproc_client, seed, dtype, m, n, k, square):
    rng, m = np.random.default_rng(seed), n if square else m
    a, b = conditioned(rng, m, n, dtype), noise(rng, (m, k) if k else (m,), dtype)
    x, y = cut(rng, a), cut(rng, b)
    rcond = 10 * float(np.finfo(dtype).eps)
    routes = {method: linalg.lstsq(x, y, method=method) for method in ("local", "columns")}
    routes |= {f"{method}, any rank": linalg.lstsq(x, y, rcond, method=method) for method in ("local", "columns")}
    if m >= n:
        rows = da.from_array(a, chunks=(x.chunks[0], -1))
        routes["rows"] = linalg.lstsq(rows, y, method="rows")
        routes["rows, any rank"] = linalg.lstsq(rows, y, rcond, method="rows")
    if m == n and dtype in ("float64", "complex128"):
        routes["refined"] = linalg.lstsq(x, y, factor_dtype="float32")
    with dask_distmm.enabled():
        routes["NumPy's"] = np.linalg.lstsq(x, y, rcond=None)
    expected, _, _, values = np.linalg.lstsq(a.astype("complex128"), b.astype("complex128"), rcond=None)
    eps = float(np.finfo(dtype).eps)
    for name, (solution, residuals, rank, s) in everywhere(routes):
        assert solution.dtype == a.dtype, name
        assert solution.shape == expected.shape, name
        columns = solution.reshape(n, -1)
        assert_least_squares(a, columns, b.reshape(m, -1))
        # Of matrices of this condition.
        scale = max(1.0, float(abs(expected).max(initial=0)))
        assert abs(solution - expected).max(initial=0) <= 1e4 * eps * scale, name
        assert int(rank) == min(m, n), name
        np.testing.assert_allclose(s, values, rtol=0, atol=1e3 * eps * values[0], err_msg=name)
        left = abs(b.reshape(m, -1) - a @ columns) ** 2
        # Dask computes them of square matrices, too.
        assert len(residuals) == (columns.shape[1] if m > n else 0) or name.startswith("NumPy's"), name
        if m > n:
            np.testing.assert_allclose(residuals, left.sum(axis=0), rtol=0, atol=1e4 * eps * m, err_msg=name)


@several
@given(seeds, dtypes, st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_singular_values(inproc_client, seed, dtype, m, n, wide):
    rng = np.random.default_rng(seed)
    a = conditioned(rng, max(m, n), min(m, n), dtype)
    a = a.T.copy() if wide else a
    x = cut(rng, a)
    strips = da.from_array(a, chunks=(-1, x.chunks[1]) if wide else (x.chunks[0], -1))
    routes = {method: linalg.svd(x, full_matrices=False, method=method) for method in ("local", "columns")}
    routes["rows"] = linalg.svd(strips, full_matrices=False, method="rows")
    with dask_distmm.enabled():
        routes["NumPy's"] = np.linalg.svd(x, full_matrices=False)
        if a.dtype.kind != "c":  # of which stock Dask makes a warning
            routes["Dask's"] = da.linalg.svd(strips)
    numbers = {"values, rows": linalg.svdvals(strips), "values": linalg.svdvals(x)}
    values = np.linalg.svd(a.astype("complex128"), compute_uv=False)
    near = {"rtol": 0, "atol": 1e3 * float(np.finfo(dtype).eps) * values[0]}
    for name, (u, s, vh) in everywhere(routes):
        assert u.dtype == vh.dtype == a.dtype, name
        if not name.startswith(("NumPy's", "Dask's")):
            assert_svd(a, u, s, vh)
        np.testing.assert_allclose((u * s) @ vh, a, **near, err_msg=name)
        np.testing.assert_allclose(s, values, **near, err_msg=name)
    for name, s in everywhere(numbers):
        np.testing.assert_allclose(s, values, **near, err_msg=name)
