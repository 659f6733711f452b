"""Products of lazy chunks that ranks make while they multiply: CuPy and NumPy chunks, all schemes, faults."""

from __future__ import annotations

import functools
import time

import dask
import dask.array as da
import numpy as np
import pytest
from device_memory import limit_device_memory
from faults import inject
from gpu_products import random
from leaks import assert_nothing_left
from run_events import events

import dask_distmm
from dask_distmm.arrays.product import run_outputs
from dask_distmm.arrays.request import parse
from dask_distmm.config import dask_costs
from dask_distmm.errors import ProjectedMemoryError
from dask_distmm.graph import can_be_made
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning import Worker
from dask_distmm.planning.waves import Budget, choose_scheme

pytestmark = pytest.mark.engines("peer")
COUNTS = (1, 2, 3)
_SPIN = r"""extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}"""
_BITS = 20


@functools.cache
def _spin():
    import cupy

    return cupy.RawKernel(_SPIN, "spin")


def values(xp, seed, rows, cols, dtype):
    """Return a part of a matrix of random numbers that NumPy and CuPy make alike: integers of 20 bits, hashed."""

    def hashed(seed):
        i = xp.arange(*rows, dtype=xp.uint64)[:, None] * xp.uint64(6364136223846793005)
        j = xp.arange(*cols, dtype=xp.uint64)[None] * xp.uint64(1442695040888963407)
        found = i ^ (j + xp.uint64(seed))
        for shift, factor in ((31, 2862933555777941757), (29, 3202034522624059733)):
            found = (found ^ (found >> xp.uint64(shift))) * xp.uint64(factor)
        return (found >> xp.uint64(64 - _BITS)).astype(xp.float64) / 2**_BITS - 0.5

    real = hashed(seed)
    return (real + 1j * hashed(seed + 1) if dtype.startswith("complex") else real).astype(dtype_from_name(dtype))


def make(seed, dtype, cycles, kind, block_info=None):
    """Return a chunk; its kernels take their time, so that who does not wait for them reads something else."""
    rows, cols = block_info[None]["array-location"]
    if kind == "numpy":
        return values(np, seed, rows, cols, dtype)
    import cupy

    _spin()((1,), (1,), (np.int64(cycles),))
    return values(cupy, seed, rows, cols, dtype)


def lazy(shape, chunks, dtype="float64", cycles=10**6, kind="cupy"):
    """Return a lazy array of generated chunks, and its numbers."""
    seed = int(np.random.default_rng().integers(2**40))
    if kind == "cupy":
        import cupy as xp
    else:
        xp = np
    array = da.map_blocks(
        make, seed, dtype, cycles, kind, chunks=da.core.normalize_chunks(chunks, shape), dtype=dtype_from_name(dtype),
        meta=xp.empty((0, 0), dtype_from_name(dtype)),
    )  # fmt: skip
    assert can_be_made(array)
    return array, values(np, seed, (0, shape[0]), (0, shape[1]), dtype)


def small(client):
    """Multiply something, so that all plugins are there."""
    client.compute(dask_distmm.matmul(*(da.ones((8, 8), chunks=4) for _ in "ab")), sync=True)


@pytest.fixture
def little(clusters, nworkers):
    """Return a client, and a function that gives each GPU so many bytes, with small buffers."""
    client, _ = clusters(nworkers)

    def of(size):
        limit_device_memory(client, size)
        return dask.config.set({"distmm.peer.buffer-bytes": 2**23})

    small(client)
    yield client, of
    limit_device_memory(client, 0)


def assert_right(a, b, found):
    """Check a product times a random vector, by 16 eps of its type, or of the one that it is summed in."""
    kind = np.dtype(found.dtype)
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(kind.name) or np.finfo(kind).eps
    wide = complex if kind.kind == "c" else float
    assert found.dtype == a.dtype == b.dtype
    a, b, found = (x.astype(wide) for x in (a, b, found))
    v = np.random.default_rng().standard_normal(found.shape[1])
    assert (abs(found @ v - a @ (b @ v)) <= 16 * eps * (abs(a) @ (abs(b) @ abs(v)))).all(), "a product is wrong"


def whole(client, d):
    found = client.compute(d, sync=True)
    return found.get() if hasattr(found, "get") else found


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64", "complex128"])
@pytest.mark.parametrize("chunks", [(1500, 384), (1500, 128), (100, 384)], ids=["as they lie", "columns", "joined"])
def test_gram_matrices(little, nworkers, dtype, chunks):
    client, of = little
    x, exact = lazy((40_000, 384), chunks, dtype)
    left = x.conj().T if exact.dtype.kind == "c" else x.T
    with of(exact.nbytes / 2):
        made = dask_distmm.explain(left, x)
        found = whole(client, dask_distmm.matmul(left, x))
    assert (made.method, made.scheme.name, made.scheme.by_ranks) == ("waves", "sums", True), made
    assert_right(exact.conj().T, exact, found)
    assert {event["engine"] for event in events(client, "start")[-len(made.scheme.waves) :]} == {"peer"}
    assert_nothing_left(client)


def test_enabled_takes_it(little, nworkers):
    client, of = little
    x, exact = lazy((40_000, 256), (1500, 256))
    # What fits into the memory of all GPUs may be left to Dask.
    with of(exact.nbytes / max(2, nworkers)), dask_distmm.enabled():
        starts = len(events(client, "start"))
        found = whole(client, x.T @ x)
    assert len(events(client, "start")) > starts
    assert_right(exact.T, exact, found)


@pytest.mark.parametrize("order", ["rows", "cols"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("size", [1500, 90])
def test_tall_by_small(little, order, dtype, size):
    client, of = little
    x, exact = lazy((40_000, 320), (size, 320), dtype)
    few = random((320, 64)).astype(dtype)
    import cupy

    y = da.from_array(few, chunks=(100, 64)).map_blocks(cupy.asarray, meta=cupy.empty((0, 0), few.dtype)).persist()
    a, b = (x, y) if order == "rows" else (y.T, x.T)
    with of(exact.nbytes / 3):
        made = dask_distmm.explain(a, b)
        found = whole(client, dask_distmm.matmul(a, b))
    assert (made.scheme.name, made.scheme.by_ranks) == (order, True), made
    if order == "rows":
        assert_right(exact, few, found)
    else:
        assert_right(few.T, exact.T, found)


@pytest.mark.parametrize("options", [{}, {"epilog": "relu"}, {"alpha": -2.0}], ids=str)
def test_two_operands(little, options):
    client, of = little
    (x, a), (y, b) = lazy((512, 16_000), (256, 1000)), lazy((16_000, 384), (800, 384))
    with of(a.nbytes / 2):
        made = dask_distmm.explain(x, y, **options)
        found = whole(client, dask_distmm.matmul(x, y, **options))
    assert made.scheme.by_ranks, made
    if "epilog" in options:
        np.testing.assert_allclose(found, np.maximum(a @ b, 0), atol=1e-9)
    else:
        assert_right(options.get("alpha", 1.0) * a, b, found)


def as_planned(client, x, host_limit, nworkers):
    """Return the Gram matrix of NumPy chunks as GPU workers with so little host memory would make it."""
    request = parse(x.T, x)
    problem = request.problem
    names = [str(number) for number in range(nworkers)]
    workers = [Worker(f"tcp://{n}", 1, 2**36, "host", n, tuple({*names} - {n}), host_limit=host_limit) for n in names]
    scheme = choose_scheme(
        problem, workers, (True, True), Budget(0.6, 0.7, 1e9), dask_costs(), engine="peer", by_ranks=(True, True)
    )
    assert scheme.by_ranks
    return run_outputs(request, scheme)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("size", [1000, 64])
def test_numpy_chunks_are_copied_to_the_gpu(little, nworkers, dtype, size):
    client, of = little
    x, exact = lazy((12_000, 256), (size, 256), dtype, kind="numpy")
    with of(0):
        found = whole(client, as_planned(client, x, 200 * 2**20, nworkers))
    assert isinstance(found, np.ndarray)
    assert_right(exact.T, exact, found)


def test_a_worker_with_several_threads(start):
    with dask.config.set({"distmm.peer.buffer-bytes": 2**23}), start(1, "tcp", threads_per_worker=4) as client:
        x, exact = lazy((40_000, 384), (500, 384))
        small(client)
        limit_device_memory(client, exact.nbytes / 2)
        for _ in range(3):
            assert_right(exact.T, exact, whole(client, dask_distmm.matmul(x.T, x)))


def used():
    """Return the bytes that arrays of this process take, once nothing is collected any more."""
    import gc

    import cupy

    gc.collect()
    return cupy.get_default_memory_pool().used_bytes()


def tasks(dask_scheduler):
    """Return the states of the scheduler's tasks."""
    return {str(key): ts.state for key, ts in dask_scheduler.tasks.items()}


def test_errors_and_cancelled_products_leave_nothing(little):
    client, of = little

    def torn(part, block_info=None):
        if block_info[0]["chunk-location"][0] == 7:
            raise OSError("it is torn")
        time.sleep(0.02)
        return part

    x, exact = lazy((40_000, 256), (500, 256))
    with of(exact.nbytes / 2):
        whole(client, dask_distmm.matmul(x.T, x))
        before = client.run(used)
        bad = x.map_blocks(torn, dtype=float, meta=x._meta)
        with pytest.raises(OSError, match="it is torn") as found:
            whole(client, dask_distmm.matmul(bad.T, bad))
        assert "chunk (0, 7) of A can't be made" in found.value.__notes__[0]

        def slowly(part):
            time.sleep(0.05)
            return part

        slow = x.map_blocks(slowly, dtype=float)
        starts = len(events(client, "start"))
        # Dask keeps those of the product that has failed as long as its exception is about.
        earlier = client.run_on_scheduler(tasks)
        future = client.compute(dask_distmm.matmul(slow.T, slow))
        while len(events(client, "start")) == starts:
            time.sleep(0.02)
        time.sleep(0.3)
        future.release()
        del future, found
        released = time.monotonic()
        while (left := client.run_on_scheduler(tasks).keys() - earlier) or any(
            size > before[address] + 2**16 for address, size in client.run(used).items()
        ):
            assert time.monotonic() < released + 2, (left, client.run(used), before)
            time.sleep(0.05)
        assert_right(exact.T, exact, whole(client, dask_distmm.matmul(x.T, x)))
    assert_nothing_left(client)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("point", ["step"])
def test_a_rank_that_is_killed(start, point):
    quiet = {"distributed.deploy.lost-worker-timeout": "1h", "distmm.peer.buffer-bytes": 2**23}
    with dask.config.set(quiet), start(2, "tcp") as client:
        x, exact = lazy((40_000, 256), (500, 256))
        small(client)
        limit_device_memory(client, exact.nbytes / 2)
        whole(client, dask_distmm.matmul(x.T, x))
        victim = sorted(client.nthreads())[0]
        client.run(inject, point, "kill", 3, workers=[victim])
        assert_right(exact.T, exact, whole(client, dask_distmm.matmul(x.T, x)))
        client.wait_for_workers(2, timeout=30)
        assert_nothing_left(client)


def test_too_little_memory_says_so(little):
    _, of = little
    x, _ = lazy((40_000, 1024), (6000, 1024))
    with of(2**22), pytest.raises(ProjectedMemoryError):
        dask_distmm.matmul(x.T, x)
