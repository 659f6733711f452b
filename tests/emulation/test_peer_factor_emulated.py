"""Factorizations by pulls over the stand-ins: block columns, panels and flags in others' memory. LAPACK solves."""

from __future__ import annotations

import dataclasses
import importlib
import sys

import devices
import numpy as np
import pytest

from dask_distmm.config import read_options
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.planning import ENGINES, Worker
from dask_distmm.planning.computation import Output
from dask_distmm.planning.factor import Factorization
from dask_distmm.planning.factor.computation import FactorProblem, as_matrix
from dask_distmm.planning.factor.placement import FactorPlacement, plan_factorization
from dask_distmm.testing import (
    assert_cholesky,
    assert_eigh,
    assert_lu,
    assert_qr,
    assert_solution,
    random_chunks,
    random_matrix,
    run_jobs,
)


class QueuedKernels(LapackKernels):
    """LAPACK in place of cuSOLVER: each call comes after all that is queued on the stream of the work."""

    def __init__(self, stream):
        self.streams = (stream, stream)
        self.merging = importlib.import_module("dask_distmm.engines.gpu.merging").DeviceMerging()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if callable(found):
            self.streams[0].synchronize()
        return found

    def getrf(self, a):
        return super().getrf(a).view(devices.ndarray)


@pytest.fixture
def factorize(make_peers, monkeypatch):
    ranks, world = make_peers()
    monkeypatch.setitem(ENGINES, "peer", dataclasses.replace(ENGINES["peer"], widths=(16, 16)))

    def solver(state):
        # Panels are published on the stream of the work.
        monkeypatch.setattr(sys.modules["cupy"].cuda, "get_current_stream", streams.__getitem__, raising=False)
        return QueuedKernels(state.stream)

    streams = type("Streams", (), {"__getitem__": lambda self: ranks.engines[world.memory.process].stream})()
    monkeypatch.setattr(sys.modules["dask_distmm.engines.peer.state"].PeerState, "solver", solver)

    def run(kind, nranks, *matrices, sources=0, host=False, **options):
        ranks.host = host
        rng = np.random.default_rng()
        given = [x.shape for x in matrices]
        task = Factorization(kind, given[0], matrices[0].dtype.name, *given[1:], **options)

        def cut(shape):
            rows, cols = (random_chunks(rng, size, 4) for size in shape)
            return rows, cols

        chunks = tuple(map(cut, given))
        outputs = tuple(Output(one.name, cut(as_matrix(one.shape)), one.dtype) for one in task.outputs)
        problem = FactorProblem(
            *(
                "test",
                task,
                chunks,
                (task.dtype,) * len(given),
                outputs,
                "peer",
                None,
                read_options(),
                "cupy",
                "columns",
            )
        )
        parts, where = {}, {}
        for name, x, (rows, cols) in zip(problem.operands, matrices, chunks, strict=True):
            edges = [np.cumsum((0, *sizes)) for sizes in (rows, cols)]
            for number in range(len(rows) * len(cols)):
                i, j = divmod(number, len(cols))
                parts[name, number] = x[edges[0][i] : edges[0][i + 1], edges[1][j] : edges[1][j + 1]].copy()
            where[name] = rng.integers(0, nranks + sources, len(rows) * len(cols)).astype(np.int32)
        workers = [Worker(f"w{index}") for index in range(nranks)]
        others = [Worker(f"s{index}") for index in range(sources)]
        made = plan_factorization(problem, workers, where, engine="peer", sources=others)
        found = run_jobs(ranks, FactorPlacement.from_wire(made.to_wire()), parts)
        results = {}
        for one in outputs:
            counts, numbers = one.counts, iter(range(one.count))
            results[one.name] = np.block(
                [[np.asarray(found[one.name, next(numbers)]) for _ in range(counts[1])] for _ in range(counts[0])]
            )
        return results

    run.ranks = ranks
    return run


@pytest.fixture
def matrix():
    rng = np.random.default_rng()
    return lambda *shape: random_matrix(rng, shape, np.dtype(np.float64), "C")


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_cholesky(factorize, matrix, nranks, lower):
    a = matrix(90, 90)
    a = a @ a.T + np.eye(90)
    (factor,) = factorize("cholesky", nranks, a, lower=lower).values()
    assert_cholesky(a, factor, lower=lower)


@pytest.mark.parametrize("shape", [(90, 90), (120, 70), (70, 120)])
def test_lu_and_qr(factorize, matrix, shape):
    a = matrix(*shape)
    found = factorize("lu", 3, a)
    assert_lu(a, found["l"], found["u"], found["p"][0])
    found = factorize("qr", 3, a)
    assert_qr(a, found["q"], found["r"])
    assert any(job.received_bytes > job.comm.received_bytes for job in factorize.ranks.jobs[-3:])


@pytest.mark.parametrize("nrhs", [1, 40])
def test_chunks_of_workers_that_offer_nothing(factorize, matrix, nrhs):
    factorize.ranks.silent.add("s0")
    a, b = matrix(80, 80), matrix(80, nrhs)
    assert_solution(a, factorize("solve", 2, a, b, sources=1)["x"], b)
    assert_solution(a, factorize("solve", 2, a, b, host=True)["x"], b)


@pytest.fixture
def hermitian(matrix):
    def make(n, dtype="float64"):
        a = matrix(n, n) + (1j * matrix(n, n) if np.dtype(dtype).kind == "c" else 0)
        return (a + a.conj().T).astype(dtype)

    return make


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_eigh(factorize, hermitian, nranks, dtype):
    a = hermitian(90, dtype)
    found = factorize("eigh", nranks, a)
    assert_eigh(a, found["w"][0], found["v"])
