"""Products of NumPy chunks that do not fit on the GPUs: A and B are read from host memory, D is made in blocks."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from gpu_products import random

import dask_distmm
from dask_distmm.testing import assert_nothing_left, assert_product

pytestmark = pytest.mark.engines("peer")
COUNTS = (1, 2, 3)
N = 768


@pytest.fixture
def little(clusters, nworkers):
    """Return a client, and a configuration in which each GPU has so many bytes."""
    import cupy

    client, _ = clusters(nworkers)
    total = cupy.cuda.runtime.memGetInfo()[1]

    def of(size):
        return dask.config.set({"distmm.memory.limit-fraction": size / total, "distmm.peer.buffer-bytes": 2**19})

    return client, of


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"])
@pytest.mark.parametrize("transposed", [False, True])
def test_operands_stay_in_host_memory(little, nworkers, dtype, transposed):
    client, of = little
    a, b = random((N, N + 40)).astype(dtype), random((N + 40, N - 30)).astype(dtype)
    if transposed:
        a, b = np.asfortranarray(a), np.asfortranarray(b)
    x, y = da.from_array(a, chunks=200).persist(), da.from_array(b, chunks=(250, 170)).persist()
    sums = 4 if np.dtype(a.dtype).itemsize == 2 else a.itemsize
    with of(int(N * N * (sums + a.itemsize) / nworkers) + 2**21):
        made = dask_distmm.explain(x, y)
        d = dask_distmm.matmul(x, y)
        found = d.compute()
    assert made.from_host, made
    assert "host memory" in repr(made)
    assert_product(a, b, found)


@pytest.mark.parametrize("options", [{"epilog": "relu_bias"}, {"alpha": 2.0}, {"transa": True}])
def test_blocks_of_d(little, nworkers, options):
    client, of = little
    a, b = random((N, N), "float32"), random((N, N), "float32")
    x, y = da.from_array(a, chunks=128).persist(), da.from_array(b, chunks=128).persist()
    more = {"bias": da.from_array(random((N,), "float32"), chunks=128).persist()} if "epilog" in options else {}
    plain = a.T if "transa" in options else a
    with of(int(N * N * 4 * 0.6 / nworkers) + 2**20):
        made = dask_distmm.explain(x, y, **options, **more)
        found = dask_distmm.matmul(x, y, **options, **more).compute()
    assert made.method == "waves", made
    assert made.scheme.name == "host"
    if "epilog" in options:
        wanted = np.maximum(a.astype(float) @ b.astype(float) + more["bias"].compute()[:, None], 0)
        assert np.allclose(found, wanted, atol=1e-3)
    else:
        assert_product(options.get("alpha", 1.0) * plain, b, found)
    del x, y, more
    assert_nothing_left(client)


def test_chunks_on_the_gpu_beside_chunks_in_host_memory(little, nworkers):
    import cupy

    client, of = little
    a, b = random((N, N), "float32"), random((N, N), "float32")
    x = da.from_array(a, chunks=128).map_blocks(cupy.asarray).map_blocks(cupy.asnumpy, meta=np.empty((0, 0), "f4"))
    y = da.from_array(b, chunks=128)
    x, y = dask.persist(x, y)
    with of(int(N * N * 4 * 1.5 / nworkers) + 2**20):
        found = dask_distmm.matmul(x, y).compute()
    assert_product(a, b, found)
