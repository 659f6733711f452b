"""The programs of factorizations, without numbers."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from check_programs import check_programs
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm.engines.factor.job import inside
from dask_distmm.errors import PlanError
from dask_distmm.layout.redistribute import Copy
from dask_distmm.planning.factor.plan import FactorPlan, block_width, factor_plan, launch_order
from dask_distmm.planning.factor.problem import Factorization
from dask_distmm.planning.factor.steps import Apply, Columns, Drop, Factor, Get, Key, Matrix, Publish

WAYS = [
    {"kind": "cholesky"},
    {"kind": "lu"},
    *({"kind": "qr", "mode": mode} for mode in ("reduced", "complete", "r")),
    *({"kind": "solve", "assume_a": assume_a} for assume_a in ("gen", "pos")),
    *({"kind": "solve_triangular", "lower": low, "op": op} for low, op in itertools.product((True, False), "NTC")),
    {"kind": "solve_triangular", "right": True},
    {"kind": "inv"},
    {"kind": "det"},
    {"kind": "slogdet"},
    {"kind": "lstsq"},
    {"kind": "pinv"},
]
SQUARE = {"cholesky", "solve", "solve_triangular", "inv", "det", "slogdet"}


def problem(way: dict, m: int, n: int, nrhs: int) -> Factorization:
    shape = (m, m) if way["kind"] in SQUARE else (m, n)
    with_b = way["kind"] in ("solve", "solve_triangular", "lstsq")
    b = ((nrhs, m) if way.get("right") else (m, nrhs)) if with_b else None
    return Factorization(a_shape=shape, dtype="float64", b_shape=b, **way)


@given(
    st.sampled_from(WAYS),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 12),
    st.integers(1, 8),
    st.integers(1, 12),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_programs_are_right(way, m, n, nrhs, ranks, width, carries):
    check_programs(factor_plan(problem(way, m, n, nrhs), ranks, width, carries=carries))


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12), st.booleans(), st.integers(0), st.integers(0))
@settings(max_examples=200, deadline=None)
def test_programs_of_shared_eigenvalues(n, ranks, width, vectors, first, count):
    subset = (first % n, min(n - 1, first % n + count % n))
    problem = Factorization("eigh", (n, n), "float64", vectors=vectors, subset=subset)
    plan = factor_plan(problem, ranks, width, shared=True)
    travelled = check_programs(plan)
    assert plan.shared
    assert (travelled == 0) or (vectors and ranks > 1)
    # Reflectors are one fewer than columns.
    assert len(plan.phases[0].panels if plan.phases else ()) == (-(-(n - 1) // width) if vectors else 0)
    assert plan.output("w").matrix is None


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("way", [way for way in WAYS if way["kind"] in ("solve", "solve_triangular", "lstsq")], ids=str)
def test_one_right_hand_side_travels_in_place_of_panels(way, ranks):
    pulled = check_programs(factor_plan(problem(way, 60, 60, 1), ranks, 3))
    carried = factor_plan(problem(way, 60, 60, 1), ranks, 3, carries=True)
    assert carried.phases[-1].carried
    assert check_programs(carried) == (0 if way["kind"] == "solve_triangular" else pulled - 20 + 20 // ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_many_blocks(way, ranks):
    travelled = check_programs(factor_plan(problem(way, 60, 60, 20), ranks, 3))
    assert (travelled == 0) == (ranks == 1)


@given(
    st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(1, 8), st.integers(1, 9), st.integers(1, 9)
)
@settings(max_examples=100, deadline=None)
def test_every_column_is_in_one_place(m, n, nrhs, ranks, width, width_b):
    columns = Columns((Matrix((m, n), width), Matrix((m, nrhs), width_b)), ranks)
    assert sum(columns.local_cols(rank) for rank in range(ranks)) == n + nrhs
    for rank in range(ranks):
        places = [columns.local(rank, block, block + 1) for block in columns.owned(rank)]
        assert [x for place in places for x in range(place.start, place.stop)] == list(range(columns.local_cols(rank)))
        for matrix in (0, 1):
            layout = columns.layout(matrix)
            part = columns.local(rank, columns.first(matrix), columns.first(matrix + 1))
            assert layout.local_shape(rank) == (m, part.stop - part.start)
            for block in columns.owned(rank, columns.first(matrix), columns.first(matrix + 1)):
                assert not m or layout.owner(0, columns.blocks[block].start) == rank


def changed(plan: FactorPlan, rank: int, steps: list) -> FactorPlan:
    """The plan with other steps for one rank."""

    class Changed(FactorPlan):
        def steps(self, other):
            return tuple(steps) if other == rank else plan.steps(other)

    return Changed(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)})


PLAN = factor_plan(Factorization("lu", (40, 40), "float64"), 2, 8)


def swapped(steps: list, one: object, other: object) -> list:
    steps = list(steps)
    i, j = steps.index(one), steps.index(other)
    steps[i], steps[j] = steps[j], steps[i]
    return steps


def without(steps: list, kind: type) -> list:
    found = next(step for step in steps if isinstance(step, kind))
    return [step for step in steps if step is not found]


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (0, lambda steps: without(steps, Publish), "for ever"),
        (0, lambda steps: without(steps, Drop), "holds|keeps"),
        (1, lambda steps: without(steps, Apply), "too early"),
        (1, lambda steps: without(steps, Get), "not there"),
        (0, lambda steps: [*steps, steps[0]], "twice"),
        (
            0,
            lambda steps: [*steps[:-1], next(s for s in steps if isinstance(s, Apply)), steps[-1]],
            "after it was made",
        ),
        (
            1,
            lambda steps: [
                *(s for s in steps if s != Publish(Key("lower", 3))),
                Publish(Key("lower", 3)),
            ],
            "for ever|wait",
        ),
    ],
)
def test_the_check_finds_wrong_programs(rank, change, message):
    check_programs(PLAN)
    with pytest.raises((AssertionError, KeyError), match=message):
        check_programs(changed(PLAN, rank, change(list(PLAN.steps(rank)))))


def test_a_panel_without_lookahead_is_found():
    steps = list(PLAN.steps(1))
    made = next(at for at, step in enumerate(steps) if isinstance(step, Factor) and step.panel == 1)
    rest = next(at for at, step in enumerate(steps) if at > made and isinstance(step, Apply))
    early = [*steps[: made - 1], steps[rest], *steps[made - 1 : rest], *steps[rest + 1 :]]
    with pytest.raises(AssertionError, match="first|wait"):
        check_programs(changed(PLAN, 1, early))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hessenberg", (3, 3), "float64"), "unknown factorization 'hessenberg'"),
        (("lu", (3, 3), "int64"), "convert A and B to one of"),
        (("cholesky", (3, 4), "float64"), "must be square, got 3 x 4"),
        (("solve", (3, 3), "float64"), "needs right-hand sides"),
        (("lu", (3, 3), "float64", (3, 1)), "has no right-hand sides"),
        (("solve", (3, 3), "float64", (4, 1)), "b must have 3 rows; it has 4"),
    ],
)
def test_bad_problems(arguments, message):
    with pytest.raises(PlanError, match=message):
        Factorization(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "full"}, "mode='full'; expected one of 'reduced'"),
        ({"op": "X"}, "op='X'"),
        ({"assume_a": "sym"}, "assume_a='sym'"),
        ({"right": True}, "solve has no option right"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(PlanError, match=message):
        Factorization("solve", (3, 3), "float64", (3, 1), **options)


def test_bad_numbers_of_ranks():
    with pytest.raises(PlanError, match="0 ranks"):
        factor_plan(Factorization("lu", (3, 3), "float64"), 0)


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_widths(n, ranks):
    width = block_width(Factorization("lu", (n, n), "float64"), ranks)
    # One rank has LAPACK cut the matrix.
    most = 512 if n >= 32 * ranks * 512 else 256
    assert width >= max(n, 256) if ranks == 1 else 32 <= width <= most
    assert most == 256 or ranks == 1 or width == 512


@given(st.sampled_from(["full", "lower", "unit lower", "upper"]), *[st.integers(0, 9)] * 2, *[st.integers(1, 9)] * 2)
def test_what_is_outside_of_a_triangle_is_not_copied(form, row, col, rows, cols):
    whole = np.arange(400).reshape(20, 20)
    copy = Copy(0, 0, 0, 0, 0, 0, rows, cols, row, col)
    source, found = whole[row : row + rows, col : col + cols], np.full((rows, cols), -1)
    parts = list(inside(form, [copy]))
    for part in parts:
        assert (found[part.dst_index] == -1).all(), "copied twice"
        found[part.dst_index] = source[part.src_index]
        assert (part.row, part.col) == (row + part.dst_row, col)
    triangle = {"full": np.ones_like(whole), "upper": np.triu(np.ones_like(whole))}.get(form, np.tri(20, dtype=int))
    inner = triangle[row : row + rows, col : col + cols].astype(bool)
    np.testing.assert_array_equal(found[inner], source[inner])
    assert all(inner[part.dst_index].any() for part in parts)
    assert any(inner[part.dst_index].all() for part in parts) or len(parts) < 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_updates_are_launched_before_panels_that_are_waited_for(ranks):
    plan = factor_plan(Factorization("qr", (90, 70), "float64"), ranks, 16)
    for rank in range(ranks):
        steps = plan.steps(rank)
        found = list(launch_order(steps))
        assert sorted(map(repr, found)) == sorted(map(repr, steps))
        for first, second in itertools.pairwise(steps):
            if isinstance(first, Apply) and first.ahead and isinstance(second, Factor):
                rest = [x for x in found if isinstance(x, Apply) and x[:2] == first[:2] and not x.ahead]
                assert all(found.index(x) < found.index(second) for x in rest)
        # Where all updates are short the panels come first, as in the plan.
        assert list(launch_order(steps, lambda step: True)) == list(steps)
