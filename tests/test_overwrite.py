"""``overwrite_a``: chunks of A go as soon as all ranks have read them, and what is right stays right."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait
from faults import held_processes, inject
from matrices import assert_near, lazy, positive, problem_of, random, until
from residuals import assert_cholesky, assert_eigh, assert_lu, assert_qr, assert_solution

from dask_distmm import PlanError, linalg
from dask_distmm.linalg import MatrixError
from dask_distmm.planning import Worker, plan_computation

N = 240
SHARED = {"method": "columns", "overwrite_a": True}


def made(matrix, chunk=80):
    """A matrix whose chunks tasks make: they are in no graph, and can be made again."""
    return da.map_blocks(
        lambda block_info=None: matrix[tuple(slice(*at) for at in block_info[None]["array-location"])].copy(),
        chunks=da.core.normalize_chunks(chunk, matrix.shape),
        dtype=matrix.dtype,
        meta=np.empty((0, 0), matrix.dtype),
    )


def states(client, array):
    """The scheduler's states of an array's chunks, and how many of these are in the memory of workers."""
    keys = list(dask.core.flatten(array.__dask_keys__()))

    def here(dask_worker):
        return sum(key in dask_worker.data for key in keys)

    def known(dask_scheduler):
        return {getattr(dask_scheduler.tasks.get(key), "state", "unknown") for key in keys}

    return client.run_on_scheduler(known), sum(client.run(here).values())


@contextlib.contextmanager
def ranks_that_hold(client, folder):
    """Let ranks stand still between reading A and working on it; yields what waits until one does."""
    release = folder / "release"
    client.run(inject, "steps", "hold", release=str(release))
    try:
        yield lambda: until(lambda: held_processes(release))
    finally:
        release.touch()


def test_chunks_go_while_ranks_work(client, tmp_path):
    s = positive(N, "float64")
    x = made(s)
    with ranks_that_hold(client, tmp_path):
        low = linalg.cholesky(x, lower=True, **SHARED).persist()
        until(lambda: states(client, x) == ({"released"}, 0))
        assert any(future.status == "pending" for future in client.futures_of(low))
    assert_cholesky(s, low.compute())


def test_chunks_that_a_client_holds_stay(client, tmp_path):
    s = positive(N, "float64")
    x = made(s).persist()
    wait(x)
    with ranks_that_hold(client, tmp_path) as wait_until_held:
        low = linalg.cholesky(x, lower=True, **SHARED).persist()
        wait_until_held()
        assert states(client, x) == ({"memory"}, 9)
    assert_cholesky(s, low.compute())
    np.testing.assert_array_equal(x.compute(), s)


def test_chunks_that_other_tasks_want_stay_for_them(client):
    s = positive(N, "float64")
    x = made(s)

    def slow(block):
        time.sleep(0.1)
        return block + 1

    # Each chunk is read twice; who comes first is Dask's business.
    low, more = dask.persist(linalg.cholesky(x, lower=True, **SHARED), x.map_blocks(slow, dtype=x.dtype))
    assert_cholesky(s, low.compute())
    np.testing.assert_array_equal(more.compute(), s + 1)


def test_chunks_that_are_wanted_once_they_are_gone(client, tmp_path):
    s = positive(N, "float64")
    x = made(s)
    with ranks_that_hold(client, tmp_path):
        low = linalg.cholesky(x, lower=True, **SHARED).persist()
        until(lambda: states(client, x) == ({"released"}, 0))
        np.testing.assert_array_equal((x + 1).compute(), s + 1)
        assert any(future.status == "pending" for future in client.futures_of(low))
    assert_cholesky(s, low.compute())


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_dies_when_chunks_are_gone(fault_client, victim, tmp_path):
    s = positive(N, "float64")
    x = made(s)
    address = sorted(fault_client.nthreads())[victim]
    with ranks_that_hold(fault_client, tmp_path):
        low = linalg.cholesky(x, lower=True, **SHARED).persist()
        until(lambda: states(fault_client, x)[0] == {"released"})
        fault_client.restart_workers([address])
    assert_cholesky(s, fault_client.compute(low).result(timeout=120))


def test_a_matrix_that_has_no_factor(client):
    a = -np.eye(N)
    with pytest.raises(MatrixError, match="not positive"):
        linalg.cholesky(made(a), **SHARED).compute()
    with pytest.raises(MatrixError, match="singular"):
        linalg.solve(made(0 * a), made(a), **SHARED).compute()


@pytest.mark.parametrize("method", ["local", "columns"])
def test_all_functions_take_it(client, method):
    how = {"method": method, "overwrite_a": True}
    a, s, b = random((N, N), "float64"), positive(N, "float64"), random((N, 5), "float64")
    p, low, up = dask.compute(*linalg.lu(made(a), p_indices=True, **how))
    assert_lu(a, low, up, p)
    assert_qr(a, *dask.compute(*linalg.qr(made(a), **how)))
    assert_solution(a, linalg.solve(made(a), made(b), **how).compute(), b)
    factor = linalg.lu_factor(made(a), **how)
    assert_solution(a, linalg.lu_solve(factor, made(b), method=method).compute(), b)
    np.testing.assert_allclose(linalg.inv(made(a), **how).compute() @ a, np.eye(N), atol=1e-8)
    np.testing.assert_allclose(linalg.det(made(a), **how).compute(), np.linalg.det(a), rtol=1e-9)
    tall = random((N, 60), "float64")
    x, *_ = linalg.lstsq(made(tall), made(b), **how)
    assert_near(x.compute(), np.linalg.lstsq(tall, b, rcond=None)[0], rtol=1e-8)
    alone = how | {"method": "auto"}
    assert_eigh(s, *dask.compute(*linalg.eigh(made(s), **alone)))
    u, p = dask.compute(*linalg.polar(made(a), **how))
    np.testing.assert_allclose(u @ p, a, atol=1e-9)


def test_without_a_cluster_and_mistakes():
    s = positive(50, "float64")
    assert_cholesky(s, linalg.cholesky(lazy(s), lower=True, overwrite_a=True).compute())
    with pytest.raises(PlanError, match="overwrite_a must be True or False, got 'yes'"):
        linalg.cholesky(lazy(s), overwrite_a="yes")


def test_memory_is_projected_without_the_chunks():
    x = da.zeros((8192, 8192), chunks=2048)
    workers = [Worker(f"w{i}", memory_limit=2**36) for i in range(2)]
    kept, given = (
        plan_computation(problem_of(linalg.cholesky(x, method="columns", overwrite_a=over)), workers, engine=("numpy",))
        for over in (False, True)
    )
    size = 8 * 8192 * 8192 // 2
    assert all(kept.projected_bytes[w.address] - given.projected_bytes[w.address] == size for w in workers)
    assert plan_computation(kept.problem.keeping(), workers, engine=("numpy",)).projected_bytes == kept.projected_bytes
    fields = {field.name: getattr(given.problem, field.name) for field in dataclasses.fields(given.problem)}
    assert given.problem.keeping() == kept.problem.__class__(**fields | {"overwrite_a": False})
