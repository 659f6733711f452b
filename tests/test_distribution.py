"""Distributions by hand: which methods have them, what is refused, and that laid-out arrays need not move."""

from __future__ import annotations

import dataclasses

import dask.array as da
import numpy as np
import pytest
from conformance import assert_product, make_problem
from distributed import wait
from hypothesis import given
from hypothesis import strategies as st
from matrices import fresh
from run_events import events

import dask_distmm
from dask_distmm import BlockCyclic, PlanError, Slab, distribute, explain, matmul
from dask_distmm.errors import ProtocolError
from dask_distmm.layout import Layout, redistribution
from dask_distmm.planning import Plan, Problem, Worker, plan
from dask_distmm.planning.cublasmp import make_tiles, own_kernel, returned_type
from dask_distmm.planning.cuts import free_axes, grid_cuts
from dask_distmm.planning.planner import operand_tiles

rng = np.random.default_rng()


def made(distributions, nworkers=4, shape=(60, 50, 70), method="auto", engine="numpy", dtype="float64"):
    m, n, k = shape
    chunks = ((m,), (k,)), ((k,), (n,))
    padded = (*distributions, None, None, None)[:3]
    problem = make_problem(*chunks, dtype, method=method, distributions=padded)
    return plan(problem, [Worker(f"w{i}") for i in range(nworkers)], engine=engine)


def ways(*args, **kwargs):
    return {(e.method, e.grid) for e in made(*args, **kwargs).alternatives}


# What there is


def test_values():
    assert Slab(-1) == Slab(1)
    assert Slab(-2) == Slab(0)
    assert BlockCyclic([2, 2], (np.int64(3), 4)) == BlockCyclic((2, 2), (3, 4))


@pytest.mark.parametrize("axis", [2, -3, "rows", None, True, 0.5])
def test_bad_slabs(axis):
    with pytest.raises(PlanError, match="Slab.*expected 0"):
        Slab(axis)


@pytest.mark.parametrize("pair", [(0, 1), (1,), (1, 2, 3), (1.5, 2), 3, None, ("a", "b")])
def test_bad_blocks(pair):
    with pytest.raises(PlanError, match=r"BlockCyclic\(grid=.*positive"):
        BlockCyclic(pair, (2, 2))
    with pytest.raises(PlanError, match=r"BlockCyclic\(blocks=.*positive"):
        BlockCyclic((2, 2), pair)


@given(
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.one_of(
        st.builds(Slab, st.integers(0, 1)),
        st.builds(
            BlockCyclic,
            st.tuples(st.integers(1, 3), st.integers(1, 3)),
            st.tuples(st.integers(1, 20), st.integers(1, 20)),
        ),
    ),
    st.integers(1, 9),
)
def test_blocks_lie_where_the_layout_says(shape, distribution, nranks):
    layout = distribution.layout(shape, nranks)
    (rows, cols), owners = layout.as_chunks()
    assert (sum(rows), sum(cols)) == shape
    assert min(*rows, *cols) > 0
    owners = owners.reshape(len(rows), len(cols))
    for i, top in enumerate(np.cumsum((0, *rows[:-1])).tolist()):
        for j, left in enumerate(np.cumsum((0, *cols[:-1])).tolist()):
            assert owners[i, j] == layout.owner(top, left) == layout.owner(top + rows[i] - 1, left + cols[j] - 1)


@pytest.mark.parametrize("distributions", [(Slab(0), None, Slab(1)), (None, BlockCyclic((2, 3), (4, 5)), None)])
def test_over_the_wire(distributions):
    problem = make_problem(((6,), (7,)), ((7,), (5,)), distributions=distributions, grid=(2, 1, 1))
    assert Problem.from_wire(problem.to_wire()) == problem
    for bad in ({"axis": 7}, {"grid": (0, 1), "blocks": (1, 1)}, {"rows": 1}, 3):
        with pytest.raises(ProtocolError):
            Problem.from_wire(problem.to_wire() | {"distributions": [bad, None, None]})


# Which methods have what

ROWS, COLS = Slab(0), Slab(1)


@pytest.mark.parametrize(
    ("distributions", "numpy", "cublasmp"),
    [
        ([ROWS], {"allgather 411", "allgather 141"}, {"allgather 411", "allgather 141"}),
        ([COLS], {"allgather 141", "reducescatter 114", "allreduce 114"}, {"reducescatter 114", "allreduce 114"}),
        ([None, COLS], {"allgather 411", "allgather 141"}, {"allgather 411", "allgather 141"}),
        ([ROWS, COLS], {"allgather 411", "allgather 141"}, {"allgather 411", "allgather 141"}),
        ([ROWS, ROWS], {"allgather 411"}, None),
        ([None, None, ROWS], {"allgather 411", "reducescatter 114"}, {"allgather 411", "reducescatter 114"}),
        ([COLS, ROWS, COLS], {"reducescatter 114"}, {"reducescatter 114"}),
        ([ROWS, COLS, COLS], {"allgather 141"}, {"allgather 141"}),
        ([BlockCyclic((2, 2), (30, 9))], {"allgather 141", "summa 221"}, {"summa 221"}),
        ([None, None, BlockCyclic((2, 2), (30, 25))], {"summa 221"}, {"summa 221"}),
        ([None, None, BlockCyclic((2, 2), (8, 9))], None, {"summa 221"}),
        ([BlockCyclic((2, 2), (8, 9)), BlockCyclic((2, 2), (9, 7))], None, {"summa 221"}),
        ([BlockCyclic((2, 2), (8, 9)), BlockCyclic((2, 2), (10, 7))], None, None),
        ([None, None, BlockCyclic((2, 2), (60, 25))], None, None),
        ([BlockCyclic((4, 1), (15, 7))], {"allgather 411", "allgather 141"}, {"allgather 411", "allgather 141"}),
        (
            [BlockCyclic((1, 3), (9, 24))],
            {"allgather 131", "reducescatter 113", "allreduce 113"},
            {"reducescatter 113", "allreduce 113"},
        ),
        ([BlockCyclic((3, 2), (9, 9))], None, None),
        ([BlockCyclic((2, 2), (30, 35)), BlockCyclic((2, 1), (35, 25))], None, None),
    ],
)
def test_methods_that_have_them(distributions, numpy, cublasmp):
    for engine, expected in (("numpy", numpy), ("cublasmp", cublasmp)):
        if expected is None:
            with pytest.raises(PlanError, match="distributions: ") as caught:
                made(distributions, engine=engine)
            assert repr(next(x for x in distributions if x)) in str(caught.value)
        else:
            found = ways(distributions, engine=engine)
            assert {f"{method} {''.join(map(str, grid))}" for method, grid in found} == expected, engine


def test_the_error_says_what_each_method_has():
    with pytest.raises(PlanError) as caught:
        made([Slab(0), Slab(0), Slab(1)])
    text = str(caught.value)
    for part in (
        "no way to multiply on 4 workers with engine 'numpy' has A as Slab(axis=0), B as Slab(axis=0), D as Slab",
        "allgather 4 x 1 x 1 has A in row slabs, B anywhere, D in row slabs",
        "summa 2 x 2 x 1 has A in blocks of 30 x any on a 2 x 2 grid",
        "allreduce 1 x 1 x 4 has A in column slabs, B in row slabs, D wherever its chunks will stay",
    ):
        assert part in text
    with pytest.raises(PlanError, match="there are 4: pass grids"):
        made([BlockCyclic((3, 2), (2, 2))])
    with pytest.raises(PlanError, match="local 1 x 1 x 1 has A on one worker"):
        made([Slab(0)], method="local")
    with pytest.raises(PlanError, match="blocks of k must agree, got 9 and 10"):
        made([BlockCyclic((2, 2), (8, 9)), BlockCyclic((2, 2), (10, 7))], engine="cublasmp")
    with pytest.raises(PlanError, match="leave ranks without"):
        made([None, None, BlockCyclic((2, 2), (60, 25))], engine="cublasmp")


def test_blocks_of_k_of_16_bit_types_are_summed_in_float32():
    """SUMMA rounds D, in the type that it is returned in, after each block of k."""
    found = made([BlockCyclic((2, 2), (8, 8))], shape=(48, 64, 80), engine="cublasmp", dtype="float16")
    assert found.method == "summa"
    assert (returned_type(found), own_kernel(found)) == (np.float32, True)
    found = made([BlockCyclic((2, 2), (8, 80))], shape=(48, 64, 80), engine="cublasmp", dtype="float16")
    assert (returned_type(found), own_kernel(found)) == (np.float16, False)


@given(
    st.sampled_from(["numpy", "cublasmp"]),
    st.tuples(*[st.integers(1, 40)] * 3),
    st.integers(1, 6),
    st.sampled_from(["auto", "allgather", "reducescatter", "allreduce", "summa"]),
    st.lists(st.sampled_from([None, Slab(0), Slab(1)]), min_size=3, max_size=3),
)
def test_plans_with_slabs_are_whole(engine, shape, nworkers, method, distributions):
    """What is not refused covers D, and what lies as asked is at home."""
    try:
        found = made(distributions, nworkers, shape, method, engine)
    except PlanError:
        return
    Plan.from_wire(found.to_wire())
    for operand, (chunks, ranks) in operand_tiles(found).items():
        size = (shape[0], shape[2]) if operand == "a" else (shape[2], shape[1])
        assert tuple(map(sum, chunks)) == size
        assert len(ranks) == len(chunks[0]) * len(chunks[1])
        assert set(ranks.tolist()) <= set(range(len(found.ranks)))
        asked = distributions["ab".index(operand)]
        if asked is not None and engine == "cublasmp":
            nranks = len(found.ranks)
            layout = getattr(make_tiles(found), operand).layout
            assert layout.as_chunks()[0] == asked.layout(size, nranks).as_chunks()[0]


@given(
    st.sampled_from(["numpy", "cublasmp"]),
    st.tuples(*[st.integers(1, 60)] * 3),
    st.integers(1, 6),
    st.sampled_from(["auto", "allgather", "reducescatter", "allreduce", "summa"]),
    st.integers(0, 2**32),
)
def test_a_plan_made_from_its_tiles_is_the_same(engine, shape, nworkers, method, seed):
    """What `Matmul` rests on: tiles on the ranks they are for give the same plan, and no operand is redistributed."""
    from conformance import random_chunks

    rng = np.random.default_rng(seed)
    m, n, k = shape
    chunks = [tuple(random_chunks(rng, length, 5) for length in pair) for pair in ((m, k), (k, n), (m, n))]
    problem = make_problem(*chunks[:2], method=method, out_chunks=chunks[2])
    counts = {name: len(x) * len(y) for name, (x, y) in zip("ab", chunks, strict=False)}
    where = {name: rng.integers(0, nworkers, count).astype(np.int32) for name, count in counts.items()}
    roster = [Worker(f"w{i}") for i in range(nworkers)]
    first = plan(problem, roster, where, engine=engine)
    tiles = operand_tiles(first)
    again = make_problem(
        tiles["a"][0], tiles["b"][0], method=first.method, out_chunks=chunks[2], workers=first.workers, grid=first.grid
    )
    cuts = zip("mnk", (first.rows, first.cols, first.depth), grid_cuts(problem, first.grid), strict=True)
    uneven = {axis for axis, own, even in cuts if own != even}
    if engine == "numpy" and not uneven <= set(free_axes(dataclasses.replace(again, grid=None))):
        return  # Cuts that leave chunks where they are take equal chunks along the axis, and D has others than tiles.
    ranks = [roster[index] for index in first.ranks]
    homes = {operand: tiles[operand][1].astype(np.int32) for operand in "ab"}
    second = plan(again, ranks, homes, engine=engine)
    for name in ("engine", "method", "grid", "rows", "cols", "depth", "d_cuts"):
        assert getattr(second, name) == getattr(first, name), name
    np.testing.assert_array_equal(second.owners, first.owners)
    assert second.bytes_moved <= first.bytes_moved
    p, q, s = first.grid
    if engine == "cublasmp":
        found, many = make_tiles(second), len(ranks)
        for operand, tile in (("a", found.a), ("b", found.b)):
            held = redistribution(Layout.of_chunks(tiles[operand][0]), tile.layout).traffic(tiles[operand][1], many)
            at_home = held[list(second.ranks), range(many)].sum()
            # Where a rank has nothing of an operand, which worker it is does not matter.
            assert at_home == held.sum()
    elif s == 1:
        delivered = second.bytes_moved - 8 * ((q - 1) * m * k + (p - 1) * k * n)
        assert 0 <= delivered <= 8 * m * n


def test_blocks_of_summa_are_those_asked_for():
    found = made([BlockCyclic((2, 2), (8, 9)), BlockCyclic((2, 2), (9, 7))], engine="cublasmp")
    tiles = make_tiles(found)
    assert (tiles.a.layout.blocks, tiles.b.layout.blocks, tiles.d.layout.blocks) == ((8, 9), (9, 7), (8, 7))
    tall = made([None, None, BlockCyclic((4, 1), (15, 50))], method="summa", engine="cublasmp")
    assert tall.grid == (4, 1, 1)


# On a cluster


@pytest.mark.parametrize(
    ("da_", "db", "dd", "out_chunks", "gathered"),
    [
        (Slab(0), Slab(0), None, (31, 77), 2 * 55 * 77 * 8),
        (Slab(1), Slab(1), Slab(1), (91, 26), 2 * 91 * 55 * 8),
        # Nothing but partial sums: of each slab of D from two others.
        (Slab(1), Slab(0), Slab(0), (31, 77), 2 * 91 * 77 * 8),
        (BlockCyclic((3, 1), (31, 55)), BlockCyclic((3, 1), (7, 77)), Slab(0), (31, 77), 2 * 55 * 77 * 8),
    ],
)
def test_laid_out_operands_do_not_move(client, da_, db, dd, out_chunks, gathered):
    a, b = fresh(91, 55, chunks=(20, 30)), fresh(55, 77, chunks=(13, 40))
    x, y = distribute(a, da_), distribute(b, db)
    wait([x, y])
    planned = explain(x, y, distributions=[da_, db, dd], out_chunks=out_chunks)
    assert "asked     A as" in repr(planned)
    assert planned.bytes_moved == gathered
    d = matmul(x, y, distributions=[da_, db, dd], out_chunks=out_chunks).compute()
    assert_product(a.compute(), b.compute(), d)
    event = events(client)[-1]
    assert event["action"] == "done"
    assert event["received_bytes"] == gathered
    np.testing.assert_array_equal(x.compute(), a.compute())
    np.testing.assert_array_equal(y.compute(), b.compute())


def test_later_multiplies_find_it_without_being_told(client):
    a, b = fresh(90, 60, chunks=(25, 60)), fresh(60, 30, chunks=(60, 30))
    x, y = distribute(a, Slab(0)), distribute(b, Slab(0))
    wait([x, y])
    assert explain(x, y, method="allgather").bytes_moved == 2 * 60 * 30 * 8
    assert_product(a.compute(), b.compute(), matmul(x, y, method="allgather").compute())
    assert events(client)[-1]["received_bytes"] == 2 * 60 * 30 * 8


def test_where_tiles_lie(client):
    addresses = list(client.nthreads())
    a = fresh(50, 40, chunks=20)
    x = distribute(a, BlockCyclic((1, 2), (20, 7)), workers=addresses[:0:-1])
    wait(x)
    assert x.chunks == ((50,), (7, 7, 7, 7, 7, 5))
    holders = {key: list(found) for key, found in client.who_has(x).items()}
    assert holders == {(x.name, i, j): [addresses[2 - j % 2]] for i in range(1) for j in range(6)}
    # The same again is the same, and what lies right already is not copied.
    assert distribute(a, BlockCyclic((1, 2), (20, 7)), workers=addresses[:0:-1]).name == x.name
    again = distribute(x, BlockCyclic((1, 2), (20, 7)), workers=addresses[:0:-1])
    np.testing.assert_array_equal(again.compute(), a.compute())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "int8", "bool"])
def test_types(client, dtype):
    from conformance import random_matrix

    from dask_distmm.numeric.types import dtype_from_name

    values = random_matrix(rng, (40, 33), dtype_from_name(dtype), "F")
    x = distribute(da.from_array(values, chunks=(15, 12)), Slab(1))
    assert x.dtype == values.dtype
    np.testing.assert_array_equal(x.compute(), values)


@pytest.mark.parametrize(
    ("a", "distribution", "options", "message"),
    [
        (np.ones((4, 4)), "rows", {}, "expected a Slab"),
        (np.ones(4), Slab(0), {}, "a must be 2-D"),
        (np.ones((0, 4)), Slab(0), {}, "a must be 2-D"),
        (np.ones((4, 4), object), Slab(0), {}, "no engine takes"),
        (np.ones((4, 4)), BlockCyclic((2, 2), (2, 2)), {}, "needs 4 workers, and there are 3"),
        (np.ones((4, 4)), Slab(0), {"workers": 4}, "workers=4, but the cluster has 3"),
        (np.ones((4, 4)), Slab(0), {"workers": ["tcp://127.0.0.1:1"]}, "not in the cluster"),
    ],
)
def test_what_can_not_be_distributed(client, a, distribution, options, message):
    with pytest.raises(PlanError, match=message):
        distribute(a, distribution, **options)


def test_without_a_cluster():
    with pytest.raises(PlanError, match="no cluster"):
        distribute(np.ones((4, 4)), Slab(0))


@pytest.mark.parametrize("distributions", ["rows", [Slab], [None] * 4, Slab(0)])
def test_bad_distributions(client, distributions):
    a = fresh(20, 20, chunks=10)
    for call in (matmul, explain):
        with pytest.raises(PlanError, match="expected up to three"):
            call(a, a, distributions=distributions)


def test_refused_at_the_call(client):
    a = fresh(20, 20, chunks=10)
    with pytest.raises(PlanError, match="no way to multiply"):
        matmul(a, a, distributions=[Slab(0), Slab(0), Slab(1)])
    with pytest.raises(PlanError, match="are for matrices"):
        matmul(a, a[0], distributions=[Slab(0)])
    assert matmul(a, a, distributions=[Slab(0)]).name != matmul(a, a).name
    assert dask_distmm.explain(a, a, workers=2, distributions=[Slab(0)]).grid == (2, 1, 1)
