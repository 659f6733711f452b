"""Covariances and fits of DataArrays under `enable()` are runs, and what xarray has."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from run_events import newest_run, runs_after

import dask_distmm
from dask_distmm import linalg

xr = pytest.importorskip("xarray", reason="needs xarray")
T = 120


@pytest.fixture
def runs(inproc_client, take_all):
    """Compute under `enable()`; compare with xarray, and count the runs."""

    def compute(function, count):
        expected = function().compute()
        moment = newest_run(inproc_client)
        with dask_distmm.enabled():
            found = function()
        gate = 1e-6 if expected.dtype == np.float64 else 1e-3
        xr.testing.assert_allclose(found.compute(), expected, rtol=gate, atol=gate)
        assert (found.dims, found.name, found.attrs) == (expected.dims, expected.name, expected.attrs)
        assert found.dtype == expected.dtype
        assert list(found.coords) == list(expected.coords)
        assert count is None or runs_after(inproc_client, moment) == count

    return compute


def field(name, shape, start=0, missing=0.0, dtype="float64"):
    rng = np.random.default_rng()
    x = (rng.standard_normal((T, *shape)) * 3 + 50).astype(dtype)
    if missing:
        x[rng.random(x.shape) < missing] = np.nan
    dims = ("time", *(f"{name}{i}" for i in range(len(shape))))
    coords = {
        "time": np.arange(start, start + T),
        **{d: np.arange(n) * 0.5 for d, n in zip(dims[1:], shape, strict=True)},
    }
    return xr.DataArray(da.from_array(x, chunks=(50, *((3,) * len(shape)))), dims=dims, coords=coords, name=name)


@pytest.mark.cases(2)
@pytest.mark.parametrize("function", ["cov", "corr"])
@pytest.mark.parametrize("missing", [0.0, 0.1])
def test_of_different_places(runs, function, missing):
    x, y = field("x", (5,), missing=missing), field("y", (2, 4), missing=missing, start=7)
    z = x.isel(x0=0, drop=True) + 2 * y
    for a, b in ((x, y), (y, x), (x, field("w", (3,)).rename("x")), (x.astype("float32"), z.astype("float32"))):
        runs(lambda a=a, b=b: getattr(xr, function)(a, b, dim="time"), 1)
    if function == "cov":
        runs(lambda: xr.cov(x, y, dim="time", ddof=0), 1)
        runs(lambda: xr.cov(x.transpose(), y, "time"), 1)


@pytest.mark.parametrize("function", ["cov", "corr"])
def test_all_others_are_xarrays(runs, function):
    x, y = field("x", (5,)), field("y", (4,))
    weights = xr.DataArray(np.arange(1.0, T + 1), dims="time", coords={"time": x.time})
    for call in (
        lambda f: f(x, x, dim="time"),
        lambda f: f(x, y),
        lambda f: f(x, y, dim=["time"]),
        lambda f: f(x, y, dim="time", weights=weights),
        lambda f: f(x.isel(x0=0, drop=True), y, dim="time"),
        lambda f: f(x.compute(), y, dim="time"),
    ):
        # Weighted means are products.
        runs(lambda call=call: call(getattr(xr, function)), None)
    with dask_distmm.enabled(), pytest.raises(TypeError):
        xr.cov(x, y.data)
    assert not hasattr(xr.cov, "_distmm")


def test_polynomials(runs):
    x = field("x", (4, 3))
    runs(lambda: x.polyfit("time", 2, skipna=False).polyfit_coefficients, 1)
    # Columns may lack values of their own, unless it is said that they do not: each is fitted by itself.
    runs(lambda: x.polyfit("time", 2).polyfit_coefficients, 0)


@pytest.mark.parametrize("name", ["cov", "corrcoef"])
def test_linalg_keeps_the_labels(name):
    x = field("x", (5,))
    function, expected = getattr(linalg, name), getattr(np, name)(x.values.T)
    for found in (function(x, rowvar=False), function(x.transpose())):
        assert found.dims == ("x0", "x0_2")
        np.testing.assert_array_equal(found.x0_2, x.x0)
        np.testing.assert_allclose(found.compute(), expected)
    assert function(x.drop_vars("x0"), rowvar=False).dims == ("x0", "x0_2")
    assert isinstance(function(x.transpose(), x.transpose()), da.Array)
    assert isinstance(function(x.data.T), da.Array)
