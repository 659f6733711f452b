"""Regions on GPU workers: a turn of a loop of `persist` is one run, with the values and chunks of Dask's own tasks."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait
from leaks import assert_nothing_left
from run_events import events_after, newest_run
from test_jit import to_cupy, to_host

import dask_distmm
from benchmarks.algorithms import CASES
from dask_distmm.errors import MatrixError

pytestmark = pytest.mark.engines("peer")
COUNTS = (1, 2)


@pytest.fixture
def regions():
    with dask.config.set({"distmm.dask.task": "1s", "distmm.minimum-flops": None, "distmm.engine": "auto"}), dask_distmm.enabled():
        yield


def as_chunk(x, kind):
    if kind == "numpy":
        return x
    import cupy

    return cupy.asarray(x)


def persisted(x, kind):
    array = da.from_array(x, chunks=(-(-len(x) // 4), *x.shape[1:]))
    (array,) = dask.persist(to_cupy(array) if kind == "cupy" else array)
    wait(array)
    return array


@pytest.mark.parametrize("kind", ["cupy", "numpy"])
@pytest.mark.parametrize("name", CASES)
def test_a_turn_of_an_algorithm_is_one_run(clusters, nworkers, regions, name, kind):
    client, _ = clusters(nworkers)
    case, rng = CASES[name], np.random.default_rng()
    large, square = case.cpu[0][0], case.cpu[0][0] == case.cpu[0][-1]

    def draw(shape):
        return rng.random(tuple((96 if square else 240) if n == large else min(n, 12) for n in shape))

    given, small = [draw(shape) for shape in case.cpu], [draw(shape) for shape in case.cpu_state]
    arrays, split = [persisted(x, kind) for x in given], len(given) - case.in_rows
    numpy = [*given[split:], *small]
    values = [*arrays[split:], *(da.from_array(as_chunk(x, kind), chunks=-1, asarray=False) for x in small)]
    for _ in range(3):
        before = newest_run(client)
        values = dask.persist(*case.turn(*arrays[:split], *values))
        wait(values)
        numpy = case.turn(*given[:split], *numpy)
        runs = [event.get("tasks") for event in events_after(client, before, "start")]
        assert len(runs) == 1, events_after(client, before, None)
        assert sum(runs[0].values()) > 10
    for result, expected in zip(dask.compute(*values), numpy, strict=True):
        assert type(result) is type(as_chunk(expected, kind))
        np.testing.assert_allclose(to_host(result), expected, rtol=1e-9, atol=1e-9 * abs(expected).max())
    del values, arrays
    assert_nothing_left(client)


def test_an_error_in_a_task_is_the_users(clusters, nworkers, regions):
    client, _ = clusters(nworkers)
    x = persisted(np.random.default_rng().random((64, 8)), "cupy")

    def fail(block):
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        (x.T @ x.map_blocks(fail, dtype=x.dtype, meta=x._meta)).sum().compute()
    assert_nothing_left(client)


def test_singular_matrices_are_refused_by_one_task(clusters, nworkers, regions):
    client, _ = clusters(nworkers)
    a = to_cupy(da.from_array(np.zeros((5, 5)), chunks=5))
    with pytest.raises(MatrixError):
        np.linalg.inv(a).compute()
    b = np.random.default_rng().random((5, 5)) + 5 * np.eye(5)
    inverse = np.linalg.inv(to_cupy(da.from_array(b, chunks=5)))
    np.testing.assert_allclose(to_host(inverse.compute()) @ b, np.eye(5), atol=1e-12)
    assert_nothing_left(client)
