"""Each public function of linear algebra with default arguments, on CuPy chunks."""

from __future__ import annotations

import dask.array as da
import pytest
from function_calls import CALLS, IDS, NARROW, check, in_narrow
from leaks import assert_nothing_left
from test_epilogs import on_gpus

import dask_distmm

# Some are products, some factorizations.
pytestmark = pytest.mark.engines("peer")
COUNTS = (1, 2)


def in_one_chunk(x):
    import cupy

    return da.from_array(x, chunks=-1).map_blocks(cupy.asarray, meta=cupy.empty((0,) * x.ndim, x.dtype))


def in_rows(x):
    """Return chunks of rows: each tall where the matrix is."""
    import cupy

    chunks = (max(1, -(-x.shape[0] // 3)), *x.shape[1:])
    return da.from_array(x, chunks=chunks).map_blocks(cupy.asarray, meta=cupy.empty((0,) * x.ndim, x.dtype)).persist()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("make", [on_gpus, in_one_chunk, in_rows])
def test_chunks_of_other_types(clusters, nworkers, make, dtype):
    client, _ = clusters(nworkers)
    failed = []
    with dask_distmm.enabled():
        for call in in_narrow(dtype):
            try:
                check(call, make, "cupy", lambda *arrays: client.compute(list(arrays), sync=True), dtype)
            except Exception as error:
                failed.append(f"{call.name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
    assert_nothing_left(client)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
@pytest.mark.parametrize("make", [on_gpus, in_one_chunk])
def test_call(clusters, nworkers, make, call):
    client, _ = clusters(nworkers)
    with dask_distmm.enabled():
        check(call, make, "cupy", lambda *arrays: client.compute(list(arrays), sync=True))
    assert_nothing_left(client)
