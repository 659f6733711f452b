"""What is left of a multiply, as a problem of its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conformance import make_problem
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.errors import ProtocolError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import NamedMatrix, Problem, restrict
from dask_distmm.planning.problem import Slab

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def cut_again(draw, chunks):
    """Other chunks of the same length that may have edges in common with the first."""
    edges = list(itertools.accumulate(chunks))
    kept = draw(st.sets(st.sampled_from(edges))) | draw(st.sets(st.integers(1, edges[-1]), max_size=3)) | {edges[-1]}
    return tuple(np.diff([0, *sorted(kept)]).tolist())


@st.composite
def problems(draw):
    rows, cols, depth = (tuple(draw(sizes)) for _ in range(3))
    extras = (
        NamedMatrix("c", (cut_again(draw, rows), cut_again(draw, cols)), "float64"),
        NamedMatrix("bias", ((1,), cut_again(draw, cols)), "float64"),
    )
    out = (cut_again(draw, rows), cut_again(draw, cols))
    found = make_problem((rows, depth), (depth, cols), out_chunks=out, extras=extras)
    count = len(out[0]) * len(out[1])
    return found, draw(st.sets(st.integers(0, count - 1), min_size=1))


def elements(chunks, numbers):
    """Numbers of the elements of chunks along one axis."""
    starts = np.cumsum(chunks) - chunks
    return [e for i in numbers for e in range(starts[i], starts[i] + chunks[i])]


@given(problems())
def test_the_part_is_made_of_whole_chunks_and_has_what_is_missing(case):
    problem, missing = case
    part = restrict(problem, missing)
    ncols = problem.d.counts[1]
    if part is None:
        # Some chunk of each row, or of each column, from one common edge to the next is missing: both ways all of them.
        edges = [
            set.intersection(*(set(np.cumsum(chunking).tolist()) for chunking in axis))
            for axis in (
                (problem.d.chunks[0], problem.a.chunks[0], problem.extras[0].chunks[0]),
                (problem.d.chunks[1], problem.b.chunks[1], *(e.chunks[1] for e in problem.extras)),
            )
        ]
        for axis, common in enumerate(edges):
            at = np.cumsum(problem.d.chunks[axis])
            segments = {sum(edge < end for edge in common) for end in at.tolist()}
            hit = {sum(e < at[divmod(i, ncols)[axis]] for e in common) for i in missing}
            assert hit == segments
        return
    every = part.d.every.tolist()
    assert missing <= set(every)
    assert len(set(every)) == len(every) < len(problem.d.chunks[0]) * ncols
    found = {name: part[name].numbers for name in (*problem.operands, "d")}
    of_rows, of_cols = (elements(problem.d.chunks[axis], found["d"][axis]) for axis in (0, 1))
    assert elements(problem.a.chunks[0], found["a"][0]) == of_rows
    assert elements(problem.b.chunks[1], found["b"][1]) == of_cols
    assert elements(problem.extras[0].chunks[0], found["c"][0]) == of_rows
    assert elements(problem.extras[0].chunks[1], found["c"][1]) == of_cols
    assert elements(problem.extras[1].chunks[1], found["bias"][1]) == of_cols
    assert (part.m, part.n, part.k) == (len(of_rows), len(of_cols), problem.k)
    for name in (*problem.operands, "d"):
        for index, number in enumerate(part[name].every.tolist()):
            at = part[name].at(index)
            assert np.ravel_multi_index(at, problem[name].counts) == number
            i, j = divmod(index, part[name].counts[1])
            assert part[name].chunks[0][i] == problem[name].chunks[0][at[0]]
            assert part[name].chunks[1][j] == problem[name].chunks[1][at[1]]
    assert Problem.from_wire(part.to_wire()) == part


@given(problems(), st.data())
def test_a_part_of_a_part_is_the_same_part(case, data):
    problem, wanted = case
    fewer = data.draw(st.sets(st.sampled_from(sorted(wanted)), min_size=1))
    part, direct = restrict(problem, wanted), restrict(problem, fewer)
    if part is not None:
        again = restrict(part, fewer)
        assert (again or part) == direct


def test_of_a_times_a_both_operands_have_parts():
    problem = make_problem(((2, 2), (2, 2)), ((2, 2), (2, 2)), same=True, name="m")
    part = restrict(problem, [1])
    assert part.a.at(1) == (0, 1)
    assert part.b.at(1) == (1, 1)
    assert part.a.chunks == ((2,), (2, 2))
    assert part.b.chunks == ((2, 2), (2,))
    assert part.result_name == "m"


@pytest.mark.parametrize(
    "changes",
    [
        {"distributions": (Slab(0), None, None)},
        {"grid": (2, 1, 1), "method": "allgather"},
        {"formula": Formula(epilog="allreduce")},
        {"out_chunks": ((4, 0, 4), (8,))},
    ],
)
def test_what_can_not_be_made_in_parts(changes):
    problem = make_problem(((4, 4), (8,)), ((8,), (8,)), **({"out_chunks": ((4, 4), (8,))} | changes))
    assert restrict(problem, [0]) is None


def test_a_part_of_other_chunks_is_refused():
    wire = restrict(make_problem(((4, 4), (8,)), ((8,), (8,))), [0]).to_wire()
    wire["matrices"][0]["numbers"] = ((), *wire["matrices"][0]["numbers"][1:])
    with pytest.raises(ProtocolError, match="a part of other chunks"):
        Problem.from_wire(wire)
