"""Contractions over several axes, of several operands, with axes in common: beside NumPy's."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from matrices import noise

import dask_distmm
from dask_distmm.arrays import dispatch

# Each with the number of products that are made here; where there is none Dask's function does it all.
SPECS = {
    "ijk,jkl->il": 1,
    "kij,ljk->li": 1,
    "ij,jkl->ikl": 1,
    "ijk,k->ij": 1,
    "ijk,jk->i": 1,
    "ijkl,klm": 1,
    "aij,ajk->aik": 1,
    "aij,ajk->kia": 1,
    "aijk,akj->ai": 1,
    "abij,bjc->abic": 1,
    "ij,jk,kl->il": 2,
    "ijk,jl,km->ilm": 2,
    "ij,ij->": 0,
    "ij,kl->ijkl": 0,
    "ii,ij->j": 0,
    "ij,jk->k": 0,
}
SIZES = dict(zip("abcijklm", (3, 2, 4, 7, 6, 5, 8, 4), strict=True))


@pytest.fixture
def products(monkeypatch):
    """The shapes of what is multiplied here."""
    found, before = [], dispatch._product

    def product(a, b):
        found.append((a.shape, b.shape))
        return before(a, b)

    monkeypatch.setattr(dispatch, "_product", product)
    return found


def cut(rng, array, letters):
    sizes = {one: int(rng.integers(1, size + 1)) for one, size in SIZES.items()}
    return da.from_array(array, chunks=tuple(sizes[one] for one in letters))


@pytest.mark.filterwarnings("ignore:Increasing number of chunks:dask.array.core.PerformanceWarning")
def test_einsum(inproc_client, take_all, products):
    rng = np.random.default_rng()
    for spec, count in SPECS.items():
        dtype = str(rng.choice(["float32", "float64", "complex128", "int64"]))
        terms = spec.split("->")[0].split(",")
        shapes = [tuple(SIZES[x] for x in letters) for letters in terms]
        given = [rng.integers(-9, 9, x) if dtype == "int64" else noise(rng, x, dtype) for x in shapes]
        lazy = [cut(rng, x, letters) for x, letters in zip(given, terms, strict=True)]
        products.clear()
        with dask_distmm.enabled():
            found = np.einsum(spec, *lazy) if rng.integers(2) else da.einsum(spec, *lazy)
        assert len(products) == count, spec
        assert found.chunks == da.einsum(spec, *lazy).chunks, spec
        expected, bound = np.einsum(spec, *given), np.einsum(spec, *map(np.abs, given))
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        eps = 0 if dtype == "int64" else np.finfo(dtype).eps
        assert (np.abs(found.compute() - expected) <= 64 * eps * bound).all(), (spec, dtype)


@pytest.mark.filterwarnings("ignore:Increasing number of chunks:dask.array.core.PerformanceWarning")
def test_outer_products_keep_chunks_small(products):
    """Chunks of the result are not the products of those of the operands, which may not fit into memory."""
    rng = np.random.default_rng()
    x, y = (da.from_array(noise(rng, (4, 12, 10), "float64"), chunks=(2, 6, 10)) for _ in "xy")
    z = da.from_array(noise(rng, (50, 2, 4, 2, 4), "float64"))
    specs = {"aij,akl->ijkl": [x, y], "aij,aik->jk": [x, y], "aij,akl,km->ijlm": [x, y, x[0]]}
    specs["abcde,bfc,dfe->acef"] = [z, x[:2, :, :4].rechunk(-1), y[:2, :, :4].rechunk(-1)]
    for spec, given in specs.items():
        expected = da.einsum(spec, *given)
        with dask_distmm.enabled():
            found = da.einsum(spec, *given)
        assert found.chunks == expected.chunks, spec
        np.testing.assert_allclose(found.compute(), expected.compute(), atol=1e-12)


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_parts_of_a_contraction_are_not_cut_further_than_the_whole(dtype):
    """A pair's chunks may be larger than its operands' are: no warning of many chunks, and no more tasks."""
    rng = np.random.default_rng()
    a, b = rng.integers(-9, 9, (240, 240)).astype(dtype), rng.integers(-9, 9, (240, 5)).astype(dtype)
    x, y = da.from_array(a, chunks=80), da.from_array(b, chunks=(80, 5))
    for spec, lazy, known in (
        ("ij,jk,kl->il", (x, y, y.T), (a, b, b.T)),
        ("ij,ik,jk,lk->il", (x, y, y, y), (a, b, b, b)),
        ("ii,ij,jk->k", (x, x, y), (a, a, b)),
    ):
        expected = da.einsum(spec, *lazy)
        with dask_distmm.enabled(), dask.config.set({"distmm.minimum-flops": 1e15}):
            result = da.einsum(spec, *lazy)
        assert (result.dtype, result.chunks) == (expected.dtype, expected.chunks)
        assert len(result.dask) < 200
        np.testing.assert_allclose(result.compute(), np.einsum(spec, *known, optimize=True), atol=1e-6)


def test_outer_products_of_several_operands_are_dasks(recwarn):
    """A pair's chunks would be larger than those of all operands: no warning but Dask's own of the whole."""
    lazy = [da.ones(size, chunks=size // 2) for size in (24, 20, 18)]
    expected = da.einsum("i,j,k->ijk", *lazy)
    own = [str(warning.message) for warning in recwarn]
    with dask_distmm.enabled():
        result = da.einsum("i,j,k->ijk", *lazy)
    assert result.name == expected.name
    assert [str(warning.message) for warning in recwarn] == 2 * own
    assert own


def test_einsum_of_unknown_sizes_is_dasks(products):
    x = da.from_array(noise(np.random.default_rng(), (12, 6), "float64"), chunks=4)
    rows = x[x[:, 0] > 0]
    with dask_distmm.enabled():
        found = da.einsum("ij,jk,kl->il", rows, x[:6], x[:6])
    known = rows.compute()
    np.testing.assert_allclose(found.compute(), known @ x[:6].compute() @ x[:6].compute())


@pytest.mark.filterwarnings("ignore:Increasing number of chunks:dask.array.core.PerformanceWarning")
def test_chunks_and_parts(inproc_client, take_all, products):
    """Chunks are those that Dask gives; a part is a part."""
    rng = np.random.default_rng()
    a, b = noise(rng, (6, 8, 10), "float64"), noise(rng, (8, 10, 9), "float64")
    x, y = da.from_array(a, chunks=(4, 3, 5)), da.from_array(b, chunks=(3, 5, 4))
    expected = np.tensordot(a, b, axes=2)
    for axes in (2, ([1, 2], [0, 1]), ([2, 1], [1, 0]), ([-1, -2], [1, 0])):
        with dask_distmm.enabled():
            found = da.tensordot(x, y, axes=axes)
        assert found.chunks == da.tensordot(x, y, axes=([1, 2], [0, 1])).chunks
        np.testing.assert_allclose(found.compute(), expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found[5:, :3].compute(), expected[5:, :3], rtol=1e-12, atol=1e-12)
    assert len(products) == 4
    # More axes than einsum has small letters.
    a, b = noise(rng, (5, *(1,) * 24, 2, 3, 4), "float64"), noise(rng, (*(1,) * 24, 2, 3, 4), "float64")
    with dask_distmm.enabled():
        found = da.tensordot(da.from_array(a, chunks=2), da.from_array(b, chunks=2), axes=27)
    assert len(products) == 5
    np.testing.assert_allclose(found.compute(), np.tensordot(a, b, axes=27))
    # Chunks that do not match are cut, as Dask cuts them; unknown ones are Dask's.
    with dask_distmm.enabled():
        np.testing.assert_allclose(da.tensordot(x, y.rechunk(2), axes=2).compute(), expected, rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match=r"Chunks|align|shape|match"):
            da.tensordot(x, y, axes=([0, 1], [0, 1])).compute()


def test_xarrays_dot(inproc_client, take_all, products):
    """Over two dimensions, and sums that skip NaN: xarray's weighted sums are products with zeros in their place."""
    xr = pytest.importorskip("xarray", reason="needs xarray")
    rng = np.random.default_rng()
    values, weights = rng.random((6, 8, 10)), rng.random((8, 10))
    values[rng.random(values.shape) < 0.2] = np.nan
    field = xr.DataArray(da.from_array(values, chunks=(3, 4, 5)), dims=("time", "y", "x"))
    weight = xr.DataArray(da.from_array(weights, chunks=(4, 5)), dims=("y", "x"))
    with dask_distmm.enabled():
        found = xr.dot(field.fillna(0.0), weight, dim=("y", "x"))
        assert products
        mean = field.weighted(weight).mean(("y", "x"))
    expected = np.nansum(values * weights, axis=(1, 2))
    np.testing.assert_allclose(found.compute(), expected)
    np.testing.assert_allclose(mean.compute(), expected / np.sum(~np.isnan(values) * weights, axis=(1, 2)))


def test_pairs_that_take_more_tasks_than_they_save_are_dasks(inproc_client):
    rng = np.random.default_rng()
    small = [da.from_array(rng.random((60, 30)), chunks=15) for _ in range(3)]
    large = [da.from_array(rng.random((200, 200)), chunks=100) for _ in range(3)]
    for spec, given, left in (("ij,ij,kj->ik", small, True), ("ij,jk,kl->il", large, False)):
        expected = da.einsum(spec, *given)
        with dask_distmm.enabled():
            found = da.einsum(spec, *given)
        assert (found.name == expected.name) == left
        np.testing.assert_allclose(found.compute(), np.einsum(spec, *(x.compute() for x in given), optimize=True))
