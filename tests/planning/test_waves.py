"""Schemes of waves: they cover the product, fit, and each wave is a problem that can cross the network."""

from __future__ import annotations

import dataclasses

import dask
import numpy as np
import pytest
from conformance import make_problem
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_distmm  # noqa: F401
from dask_distmm import PlanError, ProjectedMemoryError
from dask_distmm.config import DaskCosts
from dask_distmm.planning import NamedMatrix, Problem, Worker
from dask_distmm.planning.waves import Budget, choose_scheme, wave_problem

MIB = 2**20
COSTS = DaskCosts(0.01, 0.0001, 0.01, 0.0005)
BUDGET = Budget(0.6, 0.7, 5e8)


def problem(m, k, n, sizes, **changes):
    """A product of chunks of the given sizes along m, k and n."""
    rows, depth, cols = (
        (*(size,) * (length // size), *([length % size] if length % size else []))
        for length, size in zip((m, k, n), sizes, strict=True)
    )
    return make_problem((rows, depth), (depth, cols), **{"name": "x", "engine": "numpy", **changes})


def workers(count, limit):
    return [Worker(f"w{i}", 1, limit, used=limit // 4) for i in range(count)]


sizes = st.integers(1, 6)


@settings(max_examples=20)
@given(
    st.tuples(*[st.integers(8, 30)] * 3),
    st.tuples(*[sizes] * 3),
    st.integers(1, 4),
    st.integers(15_000, 60_000),
    st.booleans(),
)
def test_waves_cover_the_product_once_and_fit(shape, chunks, count, limit, by_ranks):
    with dask.config.set({"distmm.numpy.pack-below": 0}):
        whole = problem(*shape, chunks)
    try:
        scheme = choose_scheme(whole, workers(count, limit), (True, True), BUDGET, COSTS, by_ranks=(by_ranks, by_ranks))
    except ProjectedMemoryError:
        return
    assert by_ranks or not scheme.by_ranks
    assert scheme.peak_bytes <= scheme.budget_bytes
    done = np.zeros((*shape[::2], shape[1]), int)
    assert len(scheme.waves) == scheme.count
    for rows, cols, depth in scheme.waves:
        done[slice(*rows), slice(*cols), slice(*depth)] += 1
    assert (done == 1).all()
    finished = []
    for number, (rows, cols, depth) in enumerate(scheme.waves):
        one = wave_problem(whole, scheme, number)
        assert Problem.from_wire(one.to_wire()) == one
        assert (one.m, one.k, one.n) == tuple(stop - start for start, stop in (rows, depth, cols))
        # Waves of a block of D follow one another along k.
        assert ("partial" in one.operands) == (depth[0] > 0)
        assert depth[0] == 0 or scheme.waves[number - 1][:2] == (rows, cols)
        finished += one.d.every.tolist() if depth[1] == whole.k else []
    assert sorted(finished) == list(range(whole.d.count))


def gram(rows, cols, size):
    return problem(cols, rows, cols, (cols, size, cols), arrays=("x", "x"), transposed=(True, False))


@pytest.mark.parametrize(
    ("whole", "lazy", "name"),
    [
        (gram(2_000_000, 500, 10_000), (True, True), "sums"),
        (problem(2_000_000, 500, 20, (10_000, 500, 20)), (True, True), "rows"),
        (problem(20, 500, 2_000_000, (20, 500, 10_000)), (True, True), "cols"),
        (problem(12_000, 12_000, 12_000, (500, 500, 500)), (True, True), "blocks"),
        (problem(2_000_000, 100, 20, (10_000, 100, 20)), (True, False), "rows"),
    ],
)
def test_the_scheme_that_reads_least_is_taken(whole, lazy, name):
    scheme = choose_scheme(whole, workers(2, 500 * MIB), lazy, BUDGET, COSTS)
    assert scheme.name == name
    if name in ("sums", "rows", "cols"):
        read = sum(
            8 * size
            for size, wanted in ((whole.m * whole.k, lazy[0]), (whole.k * whole.n, lazy[1] and not whole.shared))
            if wanted
        )
        assert scheme.read_bytes == pytest.approx(read)
    assert scheme.peak_bytes < 500 * MIB * 0.6


@pytest.mark.parametrize(
    "whole", [gram(500_000, 500, 10_000), problem(500_000, 500, 20, (10_000, 500, 20))], ids=["sums", "rows"]
)
def test_waves_that_ranks_make_are_long(whole):
    """Memory does not limit them, nor is a chunk made twice; small chunks are left to Dask, which has them packed."""
    loaded, made = (
        choose_scheme(whole, workers(2, 500 * MIB), (True, True), BUDGET, COSTS, by_ranks=(yes, yes))
        for yes in (False, True)
    )
    assert made.by_ranks
    assert made.read_bytes == loaded.read_bytes
    assert len(made.waves) < len(loaded.waves)
    small = problem(100_000, 500, 20, (100, 500, 20))
    assert not choose_scheme(small, workers(2, 500 * MIB), (True, True), BUDGET, COSTS, by_ranks=(True, True)).by_ranks


def test_the_formula_is_the_last_waves():
    formula = dataclasses.replace(problem(4, 4, 4, (4, 4, 4)).formula, alpha=(2.0, 0.0), beta=(1.0, 0.0))
    whole = gram(2_000_000, 500, 10_000)
    c = NamedMatrix("c", ((500,), (500,)), "float64")
    whole = dataclasses.replace(whole, formula=formula, matrices=(*whole.matrices, c))
    scheme = choose_scheme(whole, workers(2, 500 * MIB), (True, True), BUDGET, COSTS)
    first, *middle, last = (wave_problem(whole, scheme, number) for number in range(len(scheme.waves)))
    assert first.operands == ("a", "b")
    assert {one.operands for one in middle} == {("a", "b", "partial")}
    assert last.operands == ("a", "b", "c", "partial")
    assert last.formula == dataclasses.replace(formula, partial=True)
    assert [one.result_name for one in (first, last)] == ["x-sum-00000", "x"]


@pytest.mark.parametrize(
    ("changes", "lazy", "reason"),
    [({}, (False, False), "in memory already"), ({"grid": (2, 1, 1), "method": "allgather"}, (True, True), "layout")],
)
def test_why_not(changes, lazy, reason):
    whole = problem(40, 40, 40, (4, 4, 4), **changes)
    with pytest.raises(PlanError, match=reason):
        choose_scheme(whole, workers(2, 10**6), lazy, BUDGET, COSTS)


def test_chunks_too_large():
    with pytest.raises(ProjectedMemoryError, match="Use smaller chunks"):
        choose_scheme(gram(80_000, 1000, 40_000), workers(2, 500 * MIB), (True, True), BUDGET, COSTS)
