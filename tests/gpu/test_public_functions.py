"""Each public function of linear algebra with default arguments, on CuPy chunks."""

from __future__ import annotations

import pytest
from function_calls import CALLS, IDS, check
from test_epilogs import on_gpus

import dask_distmm
from dask_distmm.testing import assert_nothing_left

# Some are products, some factorizations.
pytestmark = pytest.mark.engines("peer")
COUNTS = (1, 2)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_call(clusters, nworkers, call):
    client, _ = clusters(nworkers)
    with dask_distmm.enabled():
        check(call, on_gpus, "cupy", lambda *arrays: client.compute(list(arrays), sync=True))
        check(call, lambda x: on_gpus(x).rechunk(-1), "cupy", lambda *arrays: client.compute(list(arrays), sync=True))
    assert_nothing_left(client)
