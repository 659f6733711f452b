"""The conformance suite on GPU workers, and which of cuBLASMp's paths each method takes."""

from __future__ import annotations

import pytest
from cluster_runner import ClusterRunner
from conformance import conformance

COUNTS = range(1, 9)
METHODS = ["allgather", "reducescatter", "allreduce", "summa", "local", "auto"]
TYPES = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"]
PATHS = {
    "allgather": "AllGather + Matmul",
    "reducescatter": "Matmul + ReduceScatter",
    "allreduce": "Matmul + AllReduce",
}


@pytest.fixture
def runner(clusters, nworkers):
    return ClusterRunner(clusters(nworkers)[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("orders", ["CC", "FF", "CF", "FC"])
def test_orders(runner, nworkers, method, orders):
    conformance(runner, method, nworkers, orders=orders, own_out_chunks=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", TYPES)
def test_types(runner, nworkers, method, dtype):
    conformance(runner, method, nworkers, dtype, shape=(131, 97, 258))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(3, 2, 5), (1, 1, 1), (1, 200, 3), (128, 64, 32), (257, 1, 1000)])
def test_shapes(runner, nworkers, method, shape):
    conformance(runner, method, nworkers, shape=shape, most_chunks=3)


@pytest.mark.parametrize("method", METHODS)
def test_extents_of_16_bit_types(runner, nworkers, method):
    """Of such an unaligned product cuBLAS adds up parts of k, each rounded to D's type, unless it is kept from that."""
    conformance(runner, method, nworkers, "bfloat16", shape=(2001, 1999, 10007), most_chunks=2)


@pytest.mark.parametrize("method", METHODS)
def test_few_chunks_are_used_as_they_lie(runner, nworkers, method):
    conformance(runner, method, nworkers, shape=(96, 96, 96), most_chunks=1)
    conformance(runner, method, nworkers, shape=(96, 96, 96), most_chunks=1, transposed=(True, False))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "complex128", "bfloat16"])
def test_numpy_chunks(clusters, nworkers, method, dtype):
    conformance(ClusterRunner(clusters(nworkers)[0], kind="numpy"), method, nworkers, dtype)


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float16", "float32"), ("float64", "complex64")])
def test_two_types(runner, nworkers, dtypes):
    conformance(runner, "auto", nworkers, dtypes[0], b_dtype=dtypes[1])


@pytest.mark.gpus(8)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(("shape", "grid"), [((211, 103, 157), (4, 2, 1)), ((103, 211, 157), (2, 4, 1))])
def test_grids_of_eight(clusters, shape, grid, dtype):
    for orders in ("CC", "FC"):
        assert conformance(ClusterRunner(clusters(8)[0]), "summa", 8, dtype, shape=shape, orders=orders).grid == grid


@pytest.mark.gpus(2)
@pytest.mark.parametrize("method", ["allgather", "local", "reducescatter"])
def test_chunks_on_workers_that_are_no_ranks(clusters, method):
    runner = ClusterRunner(clusters(2)[0])
    conformance(runner, method, 1, sources=1)
    conformance(runner, method, 1, "bfloat16", sources=1)


@pytest.mark.engines("cublasmp")
@pytest.mark.parametrize("method", PATHS)
def test_tuned_paths_are_taken(clusters, nworkers, method):
    """For all memory orders and uneven shapes cuBLASMp's log names the tuned path, and never the fallback."""
    if nworkers == 1:
        pytest.skip("one GPU needs no cuBLASMp")
    client, logs = clusters(nworkers)
    before = {path: path.stat().st_size for path in logs.glob("*.log")}
    runs = 0
    for orders in ("CC", "FF", "CF", "FC"):
        conformance(ClusterRunner(client), method, nworkers, orders=orders)
        runs += 1
    for path in logs.glob("*.log"):
        text = path.read_text(errors="replace")[before.get(path, 0) :]
        assert "fallback" not in text
        if "cublasMpMatmul]" in text:
            assert text.count(f"Using {PATHS[method]}") == runs
