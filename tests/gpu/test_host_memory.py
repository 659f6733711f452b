"""Products of NumPy chunks that do not fit on the GPUs: A and B are read from host memory, D is made in blocks."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from device_memory import limit_device_memory
from distributed import wait
from gpu_products import random
from leaks import assert_nothing_left

import dask_distmm

pytestmark = pytest.mark.engines("peer")
COUNTS = (1, 2, 3)
N = 768


@pytest.fixture
def little(clusters, nworkers):
    """Return a client; and a function that gives each GPU so many bytes, and returns a configuration."""
    client, _ = clusters(nworkers)

    def of(size):
        limit_device_memory(client, size)
        return dask.config.set({"distmm.peer.buffer-bytes": 2**20})

    dask_distmm.matmul(*(da.ones((8, 8), chunks=4) for _ in "ab")).compute()
    yield client, of
    limit_device_memory(client, 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"])
@pytest.mark.parametrize("transposed", [False, True])
def test_operands_stay_in_host_memory(little, nworkers, dtype, transposed):
    _, of = little
    a, b = random((N, N + 40)).astype(dtype), random((N + 40, N - 30)).astype(dtype)
    if transposed:
        a, b = np.asfortranarray(a), np.asfortranarray(b)
    x, y = da.from_array(a, chunks=200).persist(), da.from_array(b, chunks=(250, 170)).persist()
    wait([x, y])
    with of(0):
        made = dask_distmm.explain(x, y)
    most = max(made.projected_bytes.values())
    # A rank that is alone reads host memory anyway; of several ways others come first that fit.
    assert made.from_host == (nworkers == 1)
    while not made.from_host:
        most *= 0.9
        with of(most):
            made = dask_distmm.explain(x, y)
    with of(most * (1.1 if nworkers == 1 else 1)):
        found = dask_distmm.matmul(x, y).compute()
    assert_product(a, b, found)
    assert "host memory" in repr(made)


@pytest.mark.parametrize("options", [{"epilog": "bias"}, {"alpha": 2.0}, {"op_a": "T"}], ids=str)
def test_blocks_of_d(little, nworkers, options):
    client, of = little
    a, b, bias = random((N, N), "float32"), random((N, N), "float32"), random((N,), "float32")
    x, y = (da.from_array(one, chunks=128).persist() for one in (a, b))
    wait([x, y])
    if "epilog" in options:
        options = options | {"epilog_inputs": {"bias": da.from_array(bias, chunks=128)}}
    with of(N * N * 4 / nworkers + 1.4e6):
        made = dask_distmm.explain(x, y, **options)
        found = dask_distmm.matmul(x, y, **options).compute()
    assert made.method == "waves", made
    assert made.scheme.name == "host"
    if "epilog" in options:
        assert_product(np.c_[a, np.ones(N, "f4")], np.r_[b, bias[None]], found)
    else:
        assert_product(options.get("alpha", 1.0) * (a.T if "op_a" in options else a), b, found)
    del x, y
    assert_nothing_left(client)
