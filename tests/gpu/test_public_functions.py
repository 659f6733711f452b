"""Each public function of linear algebra with default arguments, on CuPy chunks."""

from __future__ import annotations

import dask.array as da
import pytest
from function_calls import CALLS, IDS, check
from leaks import assert_nothing_left
from test_epilogs import on_gpus

import dask_distmm

# Some are products, some factorizations.
pytestmark = pytest.mark.engines("peer")
COUNTS = (1, 2)


def in_one_chunk(x):
    import cupy

    return da.from_array(x, chunks=-1).map_blocks(cupy.asarray, meta=cupy.empty((0,) * x.ndim, x.dtype))


@pytest.mark.parametrize("call", CALLS, ids=IDS)
@pytest.mark.parametrize("make", [on_gpus, in_one_chunk])
def test_call(clusters, nworkers, make, call):
    client, _ = clusters(nworkers)
    with dask_distmm.enabled():
        check(call, make, "cupy", lambda *arrays: client.compute(list(arrays), sync=True))
    assert_nothing_left(client)
