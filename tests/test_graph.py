from __future__ import annotations

import cProfile
import pickle

import dask
import dask.array as da
import numpy as np
from dask.array.optimization import optimize

from dask_distmm.graph import build_graph
from dask_distmm.keys import barrier_key, barrier_name, parse_stage_key, stage_name
from dask_distmm.problems import make_problem


def lazy(a, b, **options):
    problem = make_problem(a, b, "auto", "auto", None, None)
    return da.Array(build_graph(problem, a, b), problem.name, problem.out_chunks, dtype=problem.result_type)


def test_keys():
    assert parse_stage_key((stage_name("matmul-1a", "b"), 3, 4)) == ("matmul-1a", "b", (3, 4))
    assert barrier_name(barrier_key("matmul-1a")) == "matmul-1a"
    for other in ("x", ("x", 1, 2), 7, ("distmm-stage-a-m", 1), None):
        assert parse_stage_key(other) is None
        assert barrier_name(other) is None


def test_optimizing_leaves_our_keys_and_culls_the_rest():
    a = da.ones((40, 40), chunks=10) + 1
    c = (lazy(a, a.T) * 2)[:10, :10]
    graph = optimize(c.dask, c.__dask_keys__())
    stages = [key for key in graph if parse_stage_key(key)]
    assert len(stages) == 32
    assert sum(barrier_name(key) is not None for key in graph) == 1
    collects = [key for key in graph if isinstance(key, tuple) and str(key[0]).startswith("matmul-")]
    assert len(collects) == 1
    np.testing.assert_array_equal(c.compute(scheduler="sync"), np.full((10, 10), 2 * 40 * 4))


def test_a_graph_is_small_and_pickles():
    a = da.ones((400, 400), chunks=10)
    graph = lazy(a, a).dask
    ours = {key: task for key, task in graph.items() if "distmm" in str(key) or str(key[0]).startswith("matmul")}
    assert len(ours) == 1600 + 1 + 1600
    assert pickle.loads(pickle.dumps(ours)).keys() == ours.keys()


def test_hundred_thousand_chunks():
    """Work grows with the chunks and no faster: calls counted, not seconds."""
    counts = []
    for chunks in (20, 80):
        a = da.zeros((chunks * 10,) * 2, chunks=10)
        profile = cProfile.Profile()
        profile.enable()
        lazy(a, a.T)
        profile.disable()
        counts.append(sum(entry.callcount for entry in profile.getstats()) / chunks**2)
    assert counts[1] < 1.2 * counts[0]


def test_alone_without_a_cluster():
    rng = np.random.default_rng()
    x, y = rng.standard_normal((50, 40)), rng.standard_normal((40, 30))
    a, b = da.from_array(x, chunks=(20, 15)), da.from_array(y, chunks=(11, 30))
    got = dask.compute(lazy(a, b), lazy(a, b)[3], scheduler="sync")
    np.testing.assert_allclose(got[0], x @ y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got[1], (x @ y)[3], rtol=1e-12, atol=1e-12)


def test_alone_with_chunks_that_are_contributed_together():
    rng = np.random.default_rng()
    x, y = rng.standard_normal((50, 40)), rng.standard_normal((50, 30))
    a, b = da.from_array(x, chunks=(20, 15)), da.from_array(y, chunks=(20, 11))
    problem = make_problem(a.T, b, "auto", "auto", None, None)
    groups = {"a": [[1, 4, 8], [0, 7], [2, 3, 5, 6]], "b": [[3, 2, 1, 0], [4, 5, 6, 7, 8]]}
    found = da.Array(build_graph(problem, a, b, groups=groups), problem.name, problem.out_chunks, dtype=float)
    assert sum(parse_stage_key(key) is not None for key in dict(found.dask)) == 5
    np.testing.assert_allclose(found.compute(scheduler="sync"), x.T @ y, rtol=1e-12, atol=1e-12)
