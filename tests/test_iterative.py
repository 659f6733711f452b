"""Iterative solvers on worker processes."""

from __future__ import annotations

import collections
import uuid

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse.linalg
from distributed import get_worker, wait
from faults import inject
from matrices import until
from run_events import events_after, newest_run, runs_after

from dask_distmm import linalg
from dask_distmm.planning import program


@pytest.fixture(autouse=True)
def on_all_workers(monkeypatch):
    """Leave rows where they are: by itself a matrix of this size goes to one worker."""
    monkeypatch.setattr(program, "_WORTH_MOVING", np.inf)


def poisson(side):
    """Return the matrix of a Poisson problem on a square of so many points a side."""
    one = 2 * np.eye(side) - np.eye(side, k=1) - np.eye(side, k=-1)
    return np.kron(one, np.eye(side)) + np.kron(np.eye(side), one)


def test_on_worker_processes(client):
    a = poisson(12)
    n = len(a)
    b = np.random.default_rng(0).standard_normal(n)
    for chunks in ((n // 6, n), (n, n)):
        moment = newest_run(client)
        x, y = (da.from_array(one, chunks=chunks[: one.ndim]).persist() for one in (a, b))
        found, info = dask.compute(*linalg.cg(x, y))
        expected, _ = scipy.sparse.linalg.cg(a, b)
        assert info == 0
        np.testing.assert_allclose(found, expected, atol=1e-8 * abs(expected).max())
        assert runs_after(client, moment) == 1


def test_a_small_matrix_goes_to_one_worker(client, monkeypatch):
    monkeypatch.undo()
    a = poisson(12)
    b = np.random.default_rng().standard_normal(len(a))
    x, y = (da.from_array(one, chunks=(len(a) // 6, len(a))[: one.ndim]).persist() for one in (a, b))
    for workers, ranks in ((None, 1), (2, 2)):
        moment = newest_run(client)
        found, info = dask.compute(*linalg.cg(x, y, workers=workers))
        assert info == 0
        np.testing.assert_allclose(a @ found, b, atol=1e-3)
        (start,) = events_after(client, moment, "start")
        assert list(start["grid"]) == [ranks, 1, 1]


def test_a_callback_tells_the_client(client):
    """It finds its worker; one that raises ends the iteration."""
    topic = uuid.uuid4().hex

    def tell(norm):
        get_worker().log_event(topic, norm)
        if norm < 1e-3:
            raise ArithmeticError("near enough")

    a = poisson(8)
    b = np.random.default_rng().standard_normal(len(a))
    x, y = (da.from_array(one, chunks=(len(a) // 4, len(a))[: one.ndim]) for one in (a, b))
    with pytest.raises(ArithmeticError, match="near enough"):
        dask.compute(*linalg.gmres(x, y, rtol=1e-8, callback=tell, callback_type="pr_norm"))
    norms: list[float] = []

    def told():
        norms[:] = [norm for _, norm in client.get_events(topic)]
        return norms and norms[-1] < 1e-3

    until(told)
    assert sorted(norms, reverse=True) == norms
    assert norms[-1] < 1e-3 <= norms[-2]


def test_a_worker_dies_in_a_turn(fault_client):
    a = poisson(12)
    b = np.random.default_rng(0).standard_normal(len(a))
    x, y = (da.from_array(one, chunks=(len(a) // 6, len(a))[: one.ndim]) for one in (a, b))
    x, y = fault_client.persist([x, y])
    wait([x, y])
    # All rows may go to the worker that has most of them.
    holders = collections.Counter(held[0] for held in fault_client.who_has(x).values())
    address = holders.most_common(1)[0][0]
    fault_client.run(inject, "turn", "kill", skip=8, workers=[address])
    moment = newest_run(fault_client)
    found, info = [one.result(timeout=120) for one in fault_client.compute(list(linalg.cg(x, y)))]
    assert info == 0
    np.testing.assert_allclose(a @ found, b, atol=1e-4)
    assert events_after(fault_client, moment, "restart")
