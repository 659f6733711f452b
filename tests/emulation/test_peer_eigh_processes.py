"""Eigenvalues that GPU workers share, on a cluster of processes whose emulated devices share memory."""

from __future__ import annotations

import os
import signal
import sys

import compiled
import dask
import dask.array as da
import pytest
from faults import held_processes, inject
from leaks import assert_nothing_left
from matrices import until
from residuals import assert_eigh
from run_events import events
from test_peer_processes import become_gpu_worker, client, hosts, not_again, nworkers  # noqa: F401
from test_spectral import hermitian

from dask_distmm import linalg

pytestmark = pytest.mark.skipif(compiled.compiler() is None, reason="needs g++: kernels are compiled for the CPU")


def with_lapack(dask_worker=None):
    """Let a worker's engine call LAPACK in place of cuSOLVER, and have small grids."""
    import importlib

    import lapack_kernels
    from shared import current_stream

    engine = importlib.import_module("dask_distmm.engines.peer.engine").ENGINE
    sys.modules["dask_distmm.engines.gpu.tridiagonal"]._BLOCKS = 2
    kernels = lapack_kernels.QueuedKernels(engine.stream)
    type(engine).solver = lambda self: kernels
    sys.modules["cupy"].cuda.get_current_stream = lambda: current_stream(engine.stream)


def shared(a):
    x = da.from_array(a, chunks=90)
    return linalg.eigh(x, engine="peer", method="columns")


def test_processes_share_eigenvalues_and_outlive_one_that_is_killed(client, tmp_path):  # noqa: F811
    client.run(with_lapack)
    a = hermitian("random", 270, "float64")
    w, v = shared(a)
    made = linalg.explain(w)
    assert (made.engine, made.method, len(made.ranks)) == ("peer", "columns", 3)
    assert_eigh(a, *dask.compute(w, v))
    timings = [rank["timings"].keys() for rank in events(client, "done")[-1]["ranks"].values()]
    assert all({"reduce", "diagonalize", "reflect"} <= one for one in timings)

    # One dies while the others' kernels wait for it: they end, and the rest starts again.
    victim, *others = sorted(client.nthreads())
    survivors = client.run(os.getpid, workers=others)
    pids = client.run(os.getpid, workers=[victim])
    starts, release = len(events(client, "start")), tmp_path / "release"
    client.run(inject, "execute", "hold", release=str(release), workers=[victim])
    futures = client.compute(list(shared(2 * a)))
    until(lambda: held_processes(release))
    not_again(client, victim)
    os.kill(pids[victim], signal.SIGKILL)
    assert_eigh(2 * a, *client.gather(futures))
    assert client.run(os.getpid) == survivors
    assert [len(event["ranks"]) for event in events(client, "start")[starts:]] == [3, 2]
    del futures, w, v
    assert_nothing_left(client)
