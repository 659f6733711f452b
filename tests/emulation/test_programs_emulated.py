"""Programs on GPUs over the stand-ins. LAPACK computes."""

from __future__ import annotations

import sys

import dask.array as da
import devices
import numpy as np
import pytest
import scipy.linalg
from conformance import run_jobs
from lapack_kernels import QueuedKernels
from matrices import problem_of
from residuals import assert_least_squares, assert_qr

from dask_distmm import linalg
from dask_distmm.arrays.linalg import leading
from dask_distmm.engines.sources import Source, SourceChunk
from dask_distmm.errors import EngineError
from dask_distmm.planning import Worker
from dask_distmm.planning.program import ProgramPlacement, plan_program


@pytest.fixture(params=[0, 2**40], ids=["on devices", "on hosts"])
def run(make_peers, monkeypatch, request):
    ranks, _ = make_peers()
    monkeypatch.setattr(sys.modules["dask_distmm.engines.peer.transport"], "_LEAST_DIRECT", request.param)
    monkeypatch.setattr(sys.modules["dask_distmm.engines.gpu.program"], "_MOST_ON_HOST", request.param)
    state = sys.modules["dask_distmm.engines.peer.memory"].PeerState
    monkeypatch.setattr(state, "solver", lambda self: QueuedKernels(self.stream))

    def run(results, *matrices, nranks=3, made=False):
        problem = problem_of(results[0])
        rng, rows = np.random.default_rng(), problem["a"].chunks[0]
        cuts = np.cumsum([0, *rows])
        where = {name: rng.integers(0, nranks, len(rows)).astype(np.int32) for name in problem.operands}
        workers = [Worker(f"w{index}") for index in range(nranks)]
        problem = problem.made_by_ranks("a" * made)
        if made:
            del where["a"]
        plan = plan_program(problem, workers, where, engine="peer")
        chunks = {
            (name, number): x[cuts[number] : cuts[number + 1]].copy()
            for name, x in zip(problem.operands, matrices, strict=True)
            for number in range(len(rows))
        }
        there = {key: chunk for key, chunk in chunks.items() if key[0] in where}

        def sources(rank):
            numbers = [number for number, owner in enumerate(plan.owners) if owner == rank]
            return {("a", n): SourceChunk(Source(lambda n=n: chunks["a", n]), np.copy) for n in numbers if made}

        found = run_jobs(ranks, ProgramPlacement.from_wire(plan.to_wire()), there, sources=sources)
        moved = [key for key in there if plan.ranks[plan.owners[key[1]]] != where[key[0]][key[1]]]
        jobs = ranks.jobs[-len(plan.participants) :]
        near = [(problem.operands[at], number) for job in jobs for at, number, _ in job.exchange._offered if at >= 0]
        assert sorted(near) == sorted(moved)
        # And what ranks publish.
        pulled = sum(job.pulled_bytes for job in jobs)
        assert pulled >= sum(chunks[key].nbytes for key in moved)
        assert all(isinstance(chunk, devices.ndarray) for chunk in found.values())
        return {
            one.name: np.concatenate([np.asarray(found[one.name, number]) for number in range(one.count)])
            for one in problem.outputs
        }

    return run


def cupy_array(x, chunks):
    array = da.from_array(x, chunks=chunks)
    array._meta = array._meta.view(devices.ndarray)
    return array


@pytest.mark.parametrize("condition", [1, 1e5, 1e20])
def test_tall_matrices(run, condition):
    rng = np.random.default_rng()
    u, v = (np.linalg.qr(rng.standard_normal((size, 6)))[0] for size in (200, 6))
    a, b = (u * np.geomspace(1, 1 / condition, 6)) @ v.T, rng.standard_normal((200, 2))
    x, y = cupy_array(a, (40, 6)), cupy_array(b, (40, 2))
    for result in (linalg.qr(x), linalg.svdvals(x)) if condition < 1e20 else ():
        found, expected = (run((result[0],), a, made=made) for made in (True, False))
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], atol=1e-12)
    found = run(linalg.qr(x), a)
    assert_qr(a, found["q"], found["r"])
    found = run(linalg.svd(x, full_matrices=False), a)
    np.testing.assert_allclose((found["u"] * found["s"]) @ found["vh"], a, atol=1e-13)
    found = run(linalg.pca(x), a)
    np.testing.assert_allclose(found["mean"][0], a.mean(axis=0), atol=1e-15)
    if condition < 1e20:
        for made in (False, True):
            assert_least_squares(a, run(linalg.lstsq(x, y), a, b, made=made)["x"], b)


@pytest.mark.parametrize("iterations", [0, 2])
@pytest.mark.parametrize("cols", [6, 300])
def test_random_projections_of_chunks_of_rows(run, cols, iterations):
    """Of tall matrices, and of wide ones, whose chunks have fewer rows than random vectors."""
    rng = np.random.default_rng()
    a = rng.standard_normal((40, 3)) @ rng.standard_normal((3, cols))
    found = run(leading.compressed_by_rows(cupy_array(a, (4, cols)), 3, iterations, 3, 1, {}), a)
    np.testing.assert_allclose((found["u"] * found["s"]) @ found["vh"], a, atol=1e-12 * abs(a).max())


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("size", [1e-2, 30])
def test_exponentials(run, size, made):
    a = np.random.default_rng().standard_normal((50, 50)) * size / 50**0.5
    found = run((linalg.expm(cupy_array(a, (10, 50)), method="rows"),), a, made=made)
    expected = scipy.linalg.expm(a)
    np.testing.assert_allclose(next(iter(found.values())), expected, rtol=0, atol=1e-11 * abs(expected).max())


def test_matrices_of_another_gpu_that_can_not_be_read(make_peers, monkeypatch):
    ranks, _ = make_peers()
    memory, runtime = sys.modules["dask_distmm.engines.peer.memory"], sys.modules["cupy"].cuda.runtime

    def refuse(handle):
        raise runtime.CUDARuntimeError("cudaErrorMapBufferObjectFailed")

    monkeypatch.setattr(memory.PeerState, "solver", lambda self: QueuedKernels(self.stream))
    monkeypatch.setattr(runtime, "ipcOpenMemHandle", refuse)
    monkeypatch.setattr(memory, "_NEWS", 0.05)
    monkeypatch.setattr(sys.modules["dask_distmm.engines.peer.transport"], "_LEAST_DIRECT", 0)
    a = np.random.default_rng().standard_normal((40, 5))
    problem = problem_of(linalg.qr(cupy_array(a, (20, 5)))[1])
    made = plan_program(problem, [Worker("w0"), Worker("w1")], {"a": np.arange(2, dtype=np.int32)}, engine="peer")
    with pytest.raises(EngineError, match="memory of another GPU can't be mapped"):
        run_jobs(ranks, made, {("a", 0): a[:20].copy(), ("a", 1): a[20:].copy()})
