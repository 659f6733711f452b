"""Products of CuPy chunks that check themselves."""

from __future__ import annotations

import dask.array as da
import numpy as np
from conformance import assert_product
from matrices import assert_large_product

import dask_distmm

N = 512


def on_gpus(array, chunks):
    """A Dask array of CuPy chunks."""
    import cupy

    return da.from_array(array, chunks=chunks).map_blocks(cupy.asarray, meta=cupy.empty((0, 0), array.dtype))


def random(shape, dtype="float64"):
    return np.random.default_rng().standard_normal(shape).astype(dtype)


def check(client, shape=(N, N, N), chunks=128, dtype="float64", **options):
    m, n, k = shape
    a, b = random((m, k), dtype), random((k, n), dtype)
    d = dask_distmm.matmul(on_gpus(a, chunks), on_gpus(b, chunks), **options)
    look = assert_product if m * n * k <= N**3 else assert_large_product
    look(a, b, client.compute(d, sync=True).get())
    del d
