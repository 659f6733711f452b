"""Chunks in the order of the workers that hold them: the same product, with less to move."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conformance import make_problem
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import NamedMatrix, Problem, Worker, plan, restrict
from dask_distmm.planning.cuts import by_holder, free_axes, reorder
from dask_distmm.planning.problem import Slab

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)


@st.composite
def cases(draw):
    rows, cols, depth = (draw(sizes) for _ in range(3))
    extras = (NamedMatrix("c", (rows, cols), "float64"), NamedMatrix("bias", ((1,), cols), "float64"))
    problem = make_problem((rows, depth), (depth, cols), extras=extras, name="m")
    if draw(st.booleans()):
        wanted = draw(st.sets(st.integers(0, len(rows) * len(cols) - 1), min_size=1))
        problem = restrict(problem, wanted) or problem
    orders = {}
    for axis, length in zip("mnk", (*problem.d.counts, problem.a.counts[1]), strict=True):
        if draw(st.booleans()):
            orders[axis] = draw(st.permutations(range(length)))
    return problem, orders


@given(cases())
def test_it_is_the_same_product(case):
    problem, orders = case
    made, before = reorder(problem, orders)
    assert (made.m, made.n, made.k) == (problem.m, problem.n, problem.k)
    assert Problem.from_wire(made.to_wire()) == made
    assert made.result_name == "m"
    for name in (*problem.operands, "d"):
        assert sorted(before[name].tolist()) == list(range(len(before[name])))
        for index, old in enumerate(before[name].tolist()):
            assert made[name].at(index) == problem[name].at(old)
            shapes = []
            for one, number in ((made, index), (problem, old)):
                i, j = divmod(number, one[name].counts[1])
                shapes.append((one[name].chunks[0][i], one[name].chunks[1][j]))
            assert shapes[0] == shapes[1]
    # What is multiplied with each other stays so: k of A and of B, rows of A, C and D, columns of B, C, bias and D.
    at = {name: [made[name].at(index) for index in range(len(before[name]))] for name in before}
    rows = [[at[name][i * made[name].counts[1]][0] for i in range(made[name].counts[0])] for name in "abcd"]
    cols = [[at[name][j][1] for j in range(made[name].counts[1])] for name in ("a", "b", "c", "d", "bias")]
    assert rows[0] == rows[2] == rows[3]
    assert cols[1] == cols[2] == cols[3] == cols[4]
    assert cols[0] == rows[1]


def test_every_other_chunk_of_a_tall_matrix():
    problem = make_problem(((10,) * 6, (8,)), ((8,), (4,)))
    where = {"a": np.array([0, 1, 0, 1, 0, 1], np.int32), "b": np.array([0], np.int32)}
    orders = by_holder(problem, where)
    assert orders == {"m": [0, 2, 4, 1, 3, 5]}
    made, before = reorder(problem, orders)
    roster = [Worker("x"), Worker("y")]
    options = {"engine": "numpy"}
    moved = plan(
        dataclasses.replace(problem, method="allgather"), roster, {name: where[name] for name in "ab"}, **options
    )
    stay = plan(
        dataclasses.replace(made, method="allgather"),
        roster,
        {"a": where["a"][before["a"]], "b": where["b"]},
        **options,
    )
    assert stay.bytes_moved == 8 * 4 * 8 < moved.bytes_moved
    assert [stay.workers[rank] for rank in stay.owners] == ["x"] * 3 + ["y"] * 3


def test_a_gram_product_moves_nothing_but_sums():
    problem = make_problem(((8,), (10,) * 6), ((10,) * 6, (8,)), arrays=("x", "x"), transposed=(True, False))
    where = dict.fromkeys("ab", np.array([0, 1, 1, 0, 0, 1], np.int32))
    made, before = reorder(problem, by_holder(problem, where))
    assert made.shared
    stay = plan(
        dataclasses.replace(made, method="allreduce"),
        [Worker("x"), Worker("y")],
        {name: where[name][before[name]] for name in "ab"},
    )
    assert stay.bytes_moved == 8 * 8 * 8


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({}, "mnk"),
        ({"distributions": (Slab(0), None, None)}, ""),
        ({"grid": (2, 1, 1), "method": "allgather"}, ""),
        ({"formula": Formula(epilog="allreduce")}, ""),
        ({"out_chunks": ((3, 5), (4, 4))}, "nk"),
        ({"extras": (NamedMatrix("c", ((4, 4), (8,)), "float64"),)}, "mk"),
        ({"extras": (NamedMatrix("bias", ((1,), (4, 4)), "float64"),)}, "mnk"),
    ],
)
def test_axes_that_may_be_reordered(changes, free):
    problem = make_problem(((4, 4), (4, 4)), ((4, 4), (4, 4)), **({"out_chunks": ((4, 4), (4, 4))} | changes))
    assert free_axes(problem) == free


def test_a_grid_that_lies_all_over_the_place_stays_as_it_is():
    problem = make_problem(((4,) * 4, (4,) * 4), ((4,) * 4, (4,) * 4))
    where = {"a": np.arange(16, dtype=np.int32) % 3, "b": np.arange(16, dtype=np.int32) % 2}
    assert by_holder(problem, where).keys() <= {"n"}
