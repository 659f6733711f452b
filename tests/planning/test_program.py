"""On which workers the rows of a program's chunks are."""

from __future__ import annotations

import collections

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm import algorithms
from dask_distmm.planning import Worker, plan_computation
from dask_distmm.planning.planner import problem_from_wire
from dask_distmm.planning.program import _evened
from dask_distmm.runtime.keys import is_barrier, operand_keys


def loads(workers, rows):
    counted = collections.Counter(dict.fromkeys(workers, 0))
    for worker, size in zip(workers, rows, strict=True):
        counted[worker] += abs(size)
    return counted


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), min_size=1, max_size=30))
def test_workers_have_about_as_many_rows_each(chunks):
    workers, rows = zip(*chunks, strict=True)
    before = loads(workers, rows)
    for evened in _evened(workers, rows):
        after = loads(evened, rows)
        assert {*after} <= {*before}
        assert sum(size**2 for size in after.values()) < sum(size**2 for size in before.values())
        assert max(after.values()) <= max(before.values())
        assert min(after.values()) >= min(before.values())
    if len({*rows}) == 1:
        after = loads((_evened(workers, rows) or [workers])[0], rows)
        assert max(after.values()) - min(after.values()) <= rows[0]


@pytest.mark.parametrize(("turns", "owners"), [(1, [5, 3]), (50, [4, 4])])
def test_rows_move_for_a_loop_that_takes_longer(turns, owners):
    x = da.ones((100_000, 200), chunks=(12_500, 200))
    h = algorithms.nmf(x, 16, init="random", max_iter=turns, tol=0).H
    (barrier,) = (task for task in dict(h.dask).values() if is_barrier(task))
    problem = problem_from_wire(operand_keys(barrier)[0])
    workers = [Worker(f"tcp://127.0.0.1:{port}", nthreads=1) for port in (1, 2)]
    where = {"a": np.array([0] * 5 + [1] * 3, np.int32)}
    plan = plan_computation(problem, workers, where, engine=("numpy",))
    assert np.bincount(plan.owners).tolist() == owners
