"""Stateful multiplies and distributions by hand on GPU workers."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import wait
from leaks import assert_nothing_left
from run_events import events
from test_epilogs import computed, on_gpus

import dask_distmm
from dask_distmm import BlockCyclic, Matmul, Slab, distribute, explain, matmul

METHODS = ["auto", "local", "allgather", "reducescatter", "allreduce", "summa"]


def random(*shape, dtype="float64"):
    return np.random.default_rng().standard_normal(shape).astype(dtype)


def received(client):
    return events(client, "done")[-1]["received_bytes"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(256, 384, 128), (67, 59, 71)])
def test_executions(clusters, nworkers, method, shape):
    client, _ = clusters(nworkers)
    m, n, k = shape
    a, b = random(m, k), random(k, n)
    with Matmul(on_gpus(a), on_gpus(b), method=method) as mm:
        mm.plan()
        for _ in range(3):
            assert_product(a, b, computed(client, mm.execute()))
        mm.reset_operands(b=None, alpha=2.0)
        assert_product(2 * a, b, computed(client, mm.execute()))
    assert_nothing_left(client)


def test_workspaces(clusters, nworkers):
    client, _ = clusters(nworkers)
    a = random(512, 512)
    with Matmul(on_gpus(a), on_gpus(a)) as mm:
        mm.plan(epilog="relu_aux")
        d, aux = mm.execute(release_workspace=True)
        assert dask_distmm.free_workspaces(client) == 0
        np.testing.assert_array_equal(computed(client, aux["relu_aux"]), computed(client, d) > 0)
        wait(mm.execute())
    assert dask_distmm.free_workspaces(client) == 0


@pytest.mark.engines("cublasmp")
@pytest.mark.gpus(2)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("da_", "db", "dd"), [(Slab(0), Slab(1), Slab(0)), (Slab(0), Slab(1), Slab(1)), (Slab(1), Slab(0), Slab(0))]
)
def test_laid_out_operands_do_not_move(clusters, da_, db, dd, dtype):
    import cupy

    from dask_distmm.numeric.types import dtype_from_name

    client, _ = clusters(2)
    a, b = (random(256, 256, dtype="float32").astype(dtype_from_name(dtype)) for _ in range(2))
    x, y = distribute(on_gpus(a), da_), distribute(on_gpus(b), db)
    wait([x, y])
    assert type(x._meta) is cupy.ndarray
    out = (128, 256) if dd == Slab(0) else (256, 128)
    asked = {"distributions": [da_, db, dd], "out_chunks": out}
    assert "asked" in repr(explain(x, y, **asked))
    d = matmul(x, y, **asked).persist()
    wait(d)
    assert received(client) == 0
    assert_product(a, b, computed(client, d))


@pytest.mark.engines("cublasmp")
@pytest.mark.gpus(4)
@pytest.mark.parametrize("blocks", [(32, 48, 64), (128, 192, 128), (40, 56, 72)])
def test_summa_with_blocks_by_hand(clusters, blocks):
    client, _ = clusters(4)
    mb, nb, kb = blocks
    a, b = random(256, 320), random(320, 384)
    asked = [BlockCyclic((2, 2), (mb, kb)), BlockCyclic((2, 2), (kb, nb)), BlockCyclic((2, 2), (mb, nb))]
    x, y = distribute(on_gpus(a), asked[0]), distribute(on_gpus(b), asked[1])
    d = matmul(x, y, distributions=asked, out_chunks=(mb, nb))
    assert isinstance(d, da.Array)
    assert_product(a, b, computed(client, d))
