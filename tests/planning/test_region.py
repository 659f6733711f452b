"""Regions without a cluster: who calls which task, and parts of a region."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.config import read_options
from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.planning import Worker, plan_computation, plan_from_wire, problem_from_wire
from dask_distmm.planning.computation import NamedMatrix
from dask_distmm.planning.region import INPUTS, TASKS, RegionProblem, assign, operand


@st.composite
def regions(draw):
    """Return a region whose tasks need random values before them, and where its inputs are."""
    inputs, tasks = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    needs = [draw(st.lists(st.integers(0, inputs + task - 1), max_size=4, unique=True)) for task in range(tasks)]
    results = draw(st.lists(st.integers(0, tasks - 1), min_size=1, max_size=tasks, unique=True))
    sizes = draw(st.lists(st.integers(0, 10**6), min_size=inputs + tasks, max_size=inputs + tasks))
    places = tuple((number, 0) for number in range(len(results)))
    problem = RegionProblem(
        name="region-x",
        matrices=(operand(INPUTS, sizes[:inputs]), operand(TASKS, sizes[inputs:])),
        wanted=(NamedMatrix("y", ((0,) * len(results), (1,)), "uint8", places=places),),
        options=read_options(),
        needs=needs,
        results=results,
        sizes=sizes[inputs:],
        seconds=[1e-3] * tasks,
        counts={"x": tasks},
    )
    where = draw(st.lists(st.integers(0, 2), min_size=inputs, max_size=inputs))
    return problem, np.array(where, np.int32)


@given(regions())
def test_each_task_has_an_owner_that_reads_most_of_its_bytes_there(region):
    problem, where = region
    made = plan_computation(problem, [Worker(f"tcp://{i}") for i in range(3)], {INPUTS: where}, engine=["numpy"])
    assert plan_from_wire(made.to_wire()).owners == made.owners
    assert [*map(list, problem_from_wire(problem.to_wire()).needs)] == problem.needs
    holders, every = made.holders(), [*problem[INPUTS].chunks[0], *problem.sizes]
    for task, needed in enumerate(problem.needs):
        held = {rank: sum(every[value] + 1 for value in needed if holders[value] == rank) for rank in set(holders)}
        roots = [value for value in needed if value >= len(where) and not problem.needs[value - len(where)]]
        if needed and not roots:
            assert held[made.owners[task]] == max(held.values())
    numbers = np.concatenate([made.needed(rank, TASKS) for rank in range(len(made.ranks))])
    assert sorted(numbers.tolist()) == list(range(len(problem.needs)))


@given(regions(), st.integers(0, 100))
def test_a_part_has_what_its_chunks_need(region, number):
    problem, _ = region
    number %= problem["y"].count
    part, inputs, tasks = problem.part({("y", number)})
    part.check()
    first = problem[INPUTS].count
    needed, todo = set(), [problem.results[number]]
    while todo:
        task = todo.pop()
        needed.add(task)
        todo += [value - first for value in problem.needs[task] if value >= first]
    assert tasks == sorted(needed)
    assert set(inputs) == {value for task in needed for value in problem.needs[task] if value < first}
    assert [task for task in part.results if task >= 0] == [tasks.index(problem.results[number])]


def test_equal_tasks_are_shared_out():
    found = assign([[i] for i in range(8)], [10] * 8, [1.0] * 8, [100] * 8, [i % 2 for i in range(8)], 2)
    assert [found.owners.count(worker) for worker in (0, 1)] == [4, 4]
    assert found.messages == [0, 0]
    # Of chunks of the same size on several workers the idlest one gets the sum.
    assert assign([[0], [0, 1]], [1, 1], [1.0, 1.0], [100, 100], [0, 1], 2).owners == [0, 1]


def test_what_can_not_be():
    with pytest.raises(ProtocolError, match="malformed problem"):
        problem_from_wire({"kind": "region"})
    problem = RegionProblem(
        name="r", matrices=(operand(INPUTS, [1]), operand(TASKS, [1])),
        wanted=(NamedMatrix("y", ((0,), (1,)), "uint8", places=((0,),)),),
        options=read_options(), needs=[[0]], results=[0], sizes=[1], seconds=[0.0], counts={"x": 1},
    )  # fmt: skip
    with pytest.raises(ProtocolError, match=r"task 0 needs"):
        problem_from_wire(problem.to_wire() | {"needs": [[1]]})
    with pytest.raises(PlanError, match="can't take part"):
        plan_computation(
            problem, [Worker("a")], {INPUTS: np.array([1], np.int32)}, engine=["numpy"], sources=[Worker("b")]
        )
