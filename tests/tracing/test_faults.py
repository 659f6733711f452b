"""Traced functions when something goes wrong in a random turn: right results or one typed error, and nothing left."""

from __future__ import annotations

import contextlib
import os
import signal

import dask.array as da
import numpy as np
import pytest
from distributed import wait
from matrices import until
from run_events import events_after, newest_run

import dask_distmm
from dask_distmm import fori_loop
from dask_distmm.planning import program

pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def on_all_workers(monkeypatch):
    """Leave rows where they are: by themselves arrays of this size go to one worker."""
    monkeypatch.setattr(program, "_WORTH_MOVING", np.inf)


def spill(dask_worker):
    """Write all chunks to disk; return how many there are."""
    while dask_worker.data.fast:
        dask_worker.data.evict()
    return len(dask_worker.data.slow)


@pytest.mark.parametrize("number", range(8))
def test_a_round(fault_client, tmp_path, number):
    rng = np.random.default_rng()
    fault = ("kill", "cancel", "error", "spill")[number % 4]
    m, n, k, turns = (int(rng.integers(*limits)) for limits in ((60, 900), (4, 30), (1, 5), (4, 40)))
    bad, keep_every = int(rng.integers(turns)), rng.choice([None, 3, 10])
    chunks = int(rng.integers(m // 9 + 1, m // 3 + 1))
    arrays = rng.random((m, n)), rng.random((m, k)), rng.random((k, n))
    lazy = [da.from_array(x, chunks=(chunks, -1)).persist() for x in arrays[:2]]
    wait(lazy)
    if fault == "spill":
        assert sum(fault_client.run(spill).values()) >= len(lazy[0].chunks[0])

    def happens(rows, i):
        # In one chunk, once: others, and a run that begins again, go on.
        with contextlib.suppress(FileExistsError):
            if i == bad and fault != "spill":
                (tmp_path / "happened").touch(exist_ok=False)
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "error":
                    raise KeyError(f"turn {i}")
        return rows

    def function(X, W, H):
        def turn(i, state):
            W, H = state
            W = dask_distmm.map_rows(happens, W, i, meta=arrays[1][:1])
            H = H * (W.T @ X) / (W.T @ W @ H + 1e-9)
            return W * (X @ H.T) / (W @ (H @ H.T) + 1e-9), H

        return fori_loop(0, turns, turn, (W, H))

    moment = newest_run(fault_client)
    jitted = dask_distmm.jit(function, keep_every=None if keep_every is None else int(keep_every))
    futures = fault_client.compute(list(jitted(*lazy, arrays[2])))
    if fault == "error":
        assert {repr(future.exception(timeout=120)) for future in futures} == {f"KeyError('turn {bad}')"}
    elif fault == "cancel":
        until((tmp_path / "happened").exists)
        fault_client.cancel(futures)
        # It may have been done before.
        until(lambda: not fault_client.run_on_scheduler(live_runs))
    else:
        found = [future.result(timeout=120) for future in futures]
        assert bool(events_after(fault_client, moment, "restart")) == (fault == "kill")
        bad = -1
        for one, other in zip(found, function(*arrays), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-8)


def live_runs(dask_scheduler):
    return len(dask_scheduler.extensions["distmm"].queue)
