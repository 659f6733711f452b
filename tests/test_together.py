"""Chunks that are in memory are contributed together: which they are, and that the product is right."""

from __future__ import annotations

import itertools

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait
from hypothesis import given
from hypothesis import strategies as st
from run_events import events

from dask_distmm import graph, matmul
from dask_distmm.graph import together
from dask_distmm.keys import parse_stage_key
from dask_distmm.testing import assert_product, inject, make_problem


def contributed(d):
    """How many tasks contribute chunks of each operand, and how many chunks each of them has."""
    found = {}
    for key, task in dict(d.dask).items():
        if (stage := parse_stage_key(key)) is not None:
            found.setdefault(stage[1], []).append(len(task.dependencies))
    return {operand: sorted(counts) for operand, counts in found.items()}


def in_memory(*shape, chunks):
    a = np.random.default_rng().standard_normal(shape)
    x = da.from_array(a, chunks=chunks).persist()
    wait(x)
    return a, x


@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(1, 20), st.integers(1, 2000))
def test_groups_are_parts_of_what_a_worker_has(data, workers, nrows, ncols, most, room):
    sizes = st.lists(st.integers(0, 20), min_size=nrows, max_size=nrows), st.just([7] * ncols)
    rows, cols = (tuple(data.draw(one)) for one in sizes)
    problem = make_problem((rows, cols), (cols, (3,)))
    where = np.array(data.draw(st.lists(st.integers(0, workers - 1), min_size=nrows * ncols, max_size=nrows * ncols)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_MOST_CHUNKS", most)
        patch.setattr(graph, "_MOST_BYTES", room)
        groups = together(problem, {"a": where}).get("a")
    if groups is None:
        return
    assert sorted(number for group in groups for number in group) == list(range(nrows * ncols))
    for group in groups:
        assert len(set(where[group])) == 1
        assert len(group) <= most
        assert len(group) == 1 or sum(rows[n // ncols] * 7 * 8 for n in group) <= room
    # No two that follow each other could be one.
    for one, two in itertools.pairwise(groups):
        if where[one[0]] == where[two[0]]:
            first = rows[two[0] // ncols] * 7 * 8
            assert len(one) == most or sum(rows[n // ncols] * 7 * 8 for n in one) + first > room


def test_single_chunks_are_not_grouped():
    problem = make_problem(((4, 4), (5,)), ((5,), (3, 3)))
    assert together(problem, {"a": np.array([0, 1]), "b": np.array([1, 1])}) == {"b": [[0, 1]]}


def test_chunks_in_memory_are_contributed_by_worker(client):
    a, x = in_memory(90, 80, chunks=10)
    b, y = in_memory(80, 70, chunks=10)
    before = {key: set(found) for key, found in client.who_has(x).items()}
    d = matmul(x, y, method="summa")
    tasks = contributed(d)
    assert [sum(tasks[operand]) for operand in "ab"] == [72, 56]
    assert [len(tasks[operand]) for operand in "ab"] == [len(set().union(*client.who_has(z).values())) for z in (x, y)]
    assert_product(a, b, d.compute())
    # They were contributed where they are.
    assert {key: set(found) for key, found in client.who_has(x).items()} == before


def test_transposes_c_and_the_same_operand_twice(client):
    a, x = in_memory(60, 50, chunks=(10, 25))
    b, c = in_memory(50, 50, chunks=(50, 5))
    d = matmul(x.T, x, c, beta=1.0, method="reducescatter")
    # C is one column of chunks; A.T and A are the same chunks, the one transposed.
    assert {operand: sum(counts) for operand, counts in contributed(d).items()} == {"a": 12, "b": 12, "c": 10}
    assert all(len(counts) <= 3 for counts in contributed(d).values())
    np.testing.assert_allclose(d.compute(), a.T @ a + b, rtol=1e-12, atol=1e-12)
    s, y = in_memory(40, 40, chunks=10)
    square = matmul(y, y)
    assert set(contributed(square)) == {"a"}
    assert_product(s, s, square.compute())


def test_what_is_not_in_memory_is_contributed_chunk_by_chunk(client):
    a, x = in_memory(60, 60, chunks=20)
    lazy = da.from_array(a, chunks=20)
    d = matmul(x, lazy + 0)
    assert sum(contributed(d)["a"]) == 9
    assert contributed(d)["b"] == [1] * 9
    assert_product(a, a, d.compute())


def test_what_may_go_any_time_is_contributed_chunk_by_chunk(client):
    """Chunks that somebody else holds: the graph of the product does not keep them."""
    a = np.random.default_rng().standard_normal((60, 60))
    x = da.from_array(a, chunks=20)
    held = x.persist()
    wait(held)
    d = matmul(x, held)
    assert contributed(d)["a"] == [1] * 9
    del held
    assert_product(a, a, d.compute())


def test_names_differ_where_tasks_do(client):
    """The same product before and after its operands are in memory: both are right, also side by side."""
    a = np.random.default_rng().standard_normal((60, 60))
    x = da.from_array(a, chunks=20)
    first = matmul(x, x)
    x = x.persist()
    wait(x)
    second, third = matmul(x, x), matmul(x, x)
    assert second.name == third.name != first.name
    before = len(events(client, "start"))
    for found in dask.compute(first, second, third):
        assert_product(a, a, found)
    assert len(events(client, "start")) == before + 2


def test_chunks_that_several_workers_have(client):
    a, x = in_memory(60, 60, chunks=10)
    d = matmul(x, x)
    client.replicate(x, n=3)
    assert len(contributed(matmul(x, x))["a"]) <= 3
    assert_product(a, a, d.compute())


@pytest.mark.parametrize("point", ["stage", "vote", "execute"])
def test_a_worker_dies_with_all_that_it_contributed(fault_client, point):
    """What it held is computed again, and contributed again."""
    a, x = in_memory(300, 260, chunks=60)
    b, y = in_memory(260, 280, chunks=70)
    d = matmul(x, y, method="summa")
    victim = sorted(set().union(*fault_client.who_has(x).values()))[0]
    fault_client.run(inject, point, "kill", workers=[victim])
    assert_product(a, b, fault_client.compute(d).result(timeout=60))
    assert_product(a, b, fault_client.compute(matmul(x, y)).result(timeout=60))
