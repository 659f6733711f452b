"""CUDA tensors of PyTorch: as operands, as chunks, and as what a process gets of D."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import assert_product
from distributed import wait
from leaks import assert_nothing_left
from matrices import random
from run_events import newest_run, runs_after
from test_epilogs import computed, on_gpus

from dask_distmm import matmul, to_torch
from dask_distmm.arrays.kinds import shared_array, tensor_of

torch = pytest.importorskip("torch", reason="PyTorch is no requirement")

COUNTS = (1, 2)
SHAPES = (192, 128), (128, 160)


def with_tensors(x):
    """A Dask array with CUDA tensors for chunks."""
    return on_gpus(x).map_blocks(tensor_of, meta=tensor_of(on_gpus(x)._meta))


def in_one(client, d):
    """A Dask array with tensors as one NumPy array."""
    meta = shared_array(d._meta)
    chunks = [[d.blocks[i, j] for j in range(d.numblocks[1])] for i in range(d.numblocks[0])]

    def one(x):
        return client.compute(x.map_blocks(shared_array, dtype=meta.dtype, meta=meta)).result().get()

    return np.block([[one(x) for x in row] for row in chunks])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex64"])
def test_chunks_that_are_tensors(clusters, nworkers, dtype):
    client, _ = clusters(nworkers)
    a, b = (random(shape, dtype) for shape in SHAPES)
    before = newest_run(client)
    d = matmul(with_tensors(a), with_tensors(b)).persist()
    wait(d)
    assert runs_after(client, before) == 1
    assert d.dtype == getattr(torch, dtype)
    found = client.run(lambda name, dask_worker: [x.is_cuda for x in to_torch(name, dask_worker).values()], d.name)
    assert sum(map(len, found.values())) == d.npartitions
    assert all(map(all, found.values()))
    assert_product(a, b, in_one(client, d))
    del d
    assert_nothing_left(client)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_tensors_as_operands(clusters, nworkers, dtype):
    """Of this process' GPU; D has CuPy chunks."""
    client, _ = clusters(nworkers)
    a, b = (torch.randn(*shape, device="cuda").to(getattr(torch, dtype)) for shape in SHAPES)
    assert shared_array(a).data.ptr == a.data_ptr()
    d = matmul(a, b, out_chunks=64)
    assert type(d._meta).__module__.startswith("cupy")
    assert_product(shared_array(a.cpu()), shared_array(b.cpu()), computed(client, d))


def test_shards_share_memory(clusters, nworkers):
    """Changes of a shard are changes of the array."""
    client, _ = clusters(nworkers)
    a = random(SHAPES[0], "float64")
    d = matmul(on_gpus(a), on_gpus(a), op_b="T").persist()
    wait(d)

    def change(name, dask_worker):
        for tensor in to_torch(name, dask_worker).values():
            tensor.add_(1)
        torch.cuda.synchronize()

    client.run(change, d.name)
    np.testing.assert_allclose(computed(client, d), a @ a.T + 1, rtol=1e-12, atol=1e-11)
