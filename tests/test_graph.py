from __future__ import annotations

import cProfile
import pickle

import dask
import dask.array as da
import numpy as np
from dask.array.optimization import optimize
from dask.highlevelgraph import HighLevelGraph
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.arrays import product
from dask_distmm.arrays.request import parse
from dask_distmm.graph import DaskTasks, ProductLayer, build_graph, pieces_of
from dask_distmm.runtime.keys import barrier_key, barrier_name, operand_keys


def lazy(a, b, **options):
    problem = parse(a, b).problem
    return da.Array(build_graph(problem, a, b), problem.name, problem.d.chunks, dtype=problem.result_type)


def barriers_of(graph):
    return {key: task for key, task in dict(graph).items() if barrier_name(key) is not None}


def test_keys():
    assert barrier_name(barrier_key("matmul-1a")) == "matmul-1a"
    for other in ("x", ("x", 1, 2), 7, ("distmm-barrier-m", 1), None):
        assert barrier_name(other) is None


def test_optimizing_leaves_our_keys_and_culls_the_rest():
    a = da.ones((40, 40), chunks=10) + 1
    c = (lazy(a, a.T) * 2)[:10, :20]
    graph = optimize(c.dask, c.__dask_keys__())
    (barrier,) = barriers_of(graph).values()
    # One row of chunks of A, two columns of A.T.
    wire, keys = operand_keys(barrier)
    assert [len(keys[operand]) for operand in (0, 1)] == [4, 8]
    assert len(barrier.dependencies) == 12
    assert barrier.dependencies <= set(graph)
    assert [sum(matrix["chunks"][axis]) for axis, matrix in enumerate(wire["matrices"])] == [10, 20]
    collects = [key for key in graph if isinstance(key, tuple) and str(key[0]).startswith("matmul-")]
    assert len(collects) == 2
    np.testing.assert_array_equal(c.compute(scheduler="sync"), np.full((10, 20), 2 * 40 * 4))


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_any_chunks_of_the_result(data, nrows, ncols, optimized):
    """Culled once or twice, with what else the same product is needed for: right, from no more inputs than needed."""
    rng = np.random.default_rng()
    x, y = rng.integers(-5, 5, (5 * nrows, 7)), rng.integers(-5, 5, (7, 3 * ncols))
    a, b = da.from_array(x, chunks=(5, 4)), da.from_array(y, chunks=(3, 3))
    c = lazy(a, b)
    blocks = data.draw(st.lists(st.tuples(st.integers(0, nrows - 1), st.integers(0, ncols - 1)), min_size=1))
    wanted = [c.blocks[i, j] for i, j in blocks]
    graph = optimize(HighLevelGraph.merge(*(w.dask for w in wanted)), [w.__dask_keys__() for w in wanted])
    needed = set().union(*(barrier.dependencies for barrier in barriers_of(graph).values()))
    rows, cols = {key[1] for key in needed if key[0] == a.name}, {key[2] for key in needed if key[0] == b.name}
    assert rows == {i for i, _ in blocks}
    assert cols == {j for _, j in blocks}
    if optimized:
        wanted = dask.optimize(*wanted)
    for (i, j), got in zip(blocks, dask.compute(*wanted, scheduler="sync"), strict=True):
        np.testing.assert_array_equal(got, x[5 * i : 5 * i + 5] @ y[:, 3 * j : 3 * j + 3])


def test_blocks_that_have_nothing_in_common_are_runs_of_their_own():
    """If that saves enough work: the diagonal blocks of a large product, and not of a small one."""
    for chunk, runs in ((1000, 3), (10, 1)):
        problem = parse(*(da.zeros((3 * chunk,) * 2, chunks=chunk) for _ in "ab")).problem
        pieces = pieces_of(problem, [0, 4, 8])
        assert len(pieces) == runs
        assert {0, 4, 8} <= {number for part in pieces for number in part.d.every.tolist()}
        assert len({part.name for part in pieces}) == runs


def test_operands_of_dasks_own_tasks():
    """They are loaded within the tasks of products, unless they are in memory, come of runs, or have annotations."""
    rng = np.random.default_rng()
    x, y = rng.integers(-9, 9, (60, 40)) + 0j, rng.integers(-9, 9, (40, 50)) + 1j
    plain = da.from_array(x, chunks=(20, 10)).map_blocks(abs, dtype=float) + 1j
    with dask.annotate(retries=3):
        annotated = plain * 2
    right = da.from_array(y.T, chunks=(30, 20)).conj().T
    for a, value, inside in ((plain, abs(x) + 1j, True), (annotated, 2 * (abs(x) + 1j), False)):
        request = parse(a, right)
        problem, under = request.problem, request.lying
        arrays = {name: problem[name].array for name in "ab"}
        for upstream, known in (((None, None), {*under[0].dask, *under[1].dask}), (tuple(x.dask for x in under), ())):
            key = (problem.name, np.int64(1), np.int64(0))
            tasks = DaskTasks((), (), None, upstream).tasks(problem, arrays, [key])
            needed = {name for task in tasks.values() for name in task.dependencies} - tasks.keys()
            assert bool(needed) == (bool(known) or not inside)
            assert not known or tasks.keys().isdisjoint(known)
            got = dask.get({**under[0].dask, **under[1].dask, **tasks}, key)
            np.testing.assert_array_equal(got, value[20:40] @ y.conj()[:, :30])


def test_an_auxiliary_output_needs_the_barrier_of_all():
    a = da.from_array(np.random.default_rng().standard_normal((40, 40)), chunks=10)
    d, aux = product.run_outputs(parse(a, a, epilog="relu_aux"))
    both = [d[:10, :10], aux["relu_aux"][:10, :10]]
    graph = optimize(HighLevelGraph.merge(*(x.dask for x in both)), [x.__dask_keys__() for x in both])
    (barrier,) = barriers_of(graph).values()
    assert len(barrier.dependencies) == 16
    (barrier,) = barriers_of(optimize(both[0].dask, both[0].__dask_keys__())).values()
    assert len(barrier.dependencies) == 7


def test_a_graph_is_small_and_pickles():
    a = da.ones((400, 400), chunks=10)
    graph = lazy(a, a).dask
    layer = next(layer for layer in graph.layers.values() if isinstance(layer, ProductLayer))
    assert len(pickle.dumps(layer)) < 5000
    assert not layer.is_materialized()
    assert len(layer) == 1 + 1600
    again = pickle.loads(pickle.dumps(layer))
    assert not again.is_materialized()
    assert again.keys() == layer.keys()
    assert layer.get_output_keys() == set(layer)


def test_hundred_thousand_chunks():
    """Work grows with the chunks and no faster: calls counted, not seconds."""
    counts = []
    for chunks in (20, 80):
        a = da.zeros((chunks * 10,) * 2, chunks=10)
        profile = cProfile.Profile()
        profile.enable()
        len(dict(lazy(a, a.T).dask))
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
