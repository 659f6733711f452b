"""Algorithms on GPU workers: what scikit-learn and SciPy compute."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from algorithms.test_algorithms import CASES, check, lazily
from leaks import assert_nothing_left
from test_epilogs import finished
from test_jit import to_cupy, to_host

pytestmark = pytest.mark.engines("peer")
COUNTS = (1, 2)


@pytest.mark.parametrize("name", CASES)
def test_values(clusters, nworkers, name):
    client, _ = clusters(nworkers)
    function, arrays, expected = CASES[name](np.random.default_rng())
    before = finished(client)
    found = lazily(lambda *given: function(*(to_cupy(x) if isinstance(x, da.Array) else x for x in given)), arrays)
    check(type(found)(*map(to_host, dask.compute(*found))), expected)
    assert len(finished(client) - before) == 1
    assert_nothing_left(client)
