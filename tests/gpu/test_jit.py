"""Traced functions on GPU workers: what NumPy computes."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from leaks import assert_nothing_left
from test_epilogs import finished
from traced_cases import CASES, arguments, assert_equal, operands

import dask_distmm
from dask_distmm.tracing.control import flattened

pytestmark = pytest.mark.engines("peer")
COUNTS = (1, 2, 4)


def to_cupy(x):
    import cupy

    return x.map_blocks(cupy.asarray, dtype=x.dtype, meta=cupy.empty((0,) * x.ndim, x.dtype))


def to_host(x):
    return x.get() if hasattr(x, "get") else np.asarray(x)


@pytest.mark.parametrize("name", CASES)
def test_values(clusters, nworkers, name):
    client, _ = clusters(nworkers)
    function = CASES[name]
    arrays, lazy = operands(np.random.default_rng())
    if name in ("map_rows", "map_rows2", "sum_rows"):
        pytest.skip("the functions are NumPy's")
    with np.errstate(all="ignore"):
        expected, _ = flattened(function(*arguments(function, arrays)))
    before = finished(client)
    given = [to_cupy(x) if isinstance(x, da.Array) else x for x in arguments(function, lazy)]
    found, _ = flattened(dask_distmm.jit(function)(*given))
    found = dask.compute(*found)
    assert len(finished(client) - before) == 1
    for one, other in zip(found, expected, strict=True):
        assert_equal(to_host(one), other)
    assert_nothing_left(client)
