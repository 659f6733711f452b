"""Epilogs and their auxiliary outputs on GPU workers, against their formulas in extended precision."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from epilog_cases import ALL, Case

from dask_distmm import matmul
from dask_distmm.dtypes import typed
from dask_distmm.testing import random_chunks

METHODS = ["local", "allgather", "reducescatter", "allreduce", "summa"]


def on_gpus(x):
    import cupy

    chunks = tuple(random_chunks(np.random.default_rng(), size, 4) for size in x.shape)
    return da.from_array(x, chunks=chunks).map_blocks(cupy.asarray, meta=cupy.empty((0,) * x.ndim, x.dtype))


def computed(client, array):
    """A Dask array of CuPy chunks as one NumPy array; bfloat16 included, which Dask can't concatenate."""
    parts = np.empty(array.numblocks, object)
    futures = client.compute(list(array.to_delayed().ravel()))
    for index, part in zip(np.ndindex(array.numblocks), client.gather(futures), strict=True):
        parts[index] = typed(part.get() if hasattr(part, "get") else part, array.dtype.name)
    return np.block(parts.tolist()) if array.ndim else parts[()]


def check(client, case, method, with_c=False, kind="cupy", **more):
    make = on_gpus if kind == "cupy" else lambda x: da.from_array(x, chunks=tuple(max(1, s // 2) for s in x.shape))
    operands = [make(x) for x in (case.a, case.b, case.c)[: 3 if with_c else 2]]
    inputs = {name: make(x) for name, x in case.inputs.items()}
    found = matmul(*operands, epilog_inputs=inputs or None, method=method, **case.options, **more)
    d, aux = found if isinstance(found, tuple) else (found, {})
    before = sum(1 for _, event in client.get_events("distmm") if event["action"] == "done")
    d, aux = dask.persist(d, aux)
    case.check(computed(client, d), {name: computed(client, x) for name, x in aux.items()})
    after = [event for _, event in client.get_events("distmm") if event["action"] == "done"][before:]
    assert len(after) == 1


@pytest.mark.parametrize("epilog", ALL)
def test_each_epilog(clusters, nworkers, epilog):
    check(clusters(nworkers)[0], Case(epilog), "auto")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epilog", ["relu_aux_bias", "gelu_aux", "drelu_bgrad", "silu_bias"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_methods_and_types(clusters, nworkers, method, epilog, dtype):
    check(clusters(nworkers)[0], Case(epilog, dtype, alpha=0.5, beta=-2.0), method, with_c=True)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_factors(clusters, nworkers, dtype):
    check(clusters(nworkers)[0], Case("bias", dtype, alpha=0.5 - 2j, beta=1j), "auto", with_c=True)


@pytest.mark.parametrize("epilog", ["relu_aux_bias", "dgelu_bgrad"])
def test_numpy_chunks(clusters, nworkers, epilog):
    case = Case(epilog, bias="row", bias_axis=0)
    check(clusters(nworkers)[0], case, "allgather", kind="numpy", engine="cublasmp")
