"""Parts of a product at the level of tasks: which chunks of D a run makes, and what it needs for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from dask._task_spec import GraphNode, List, TaskRef

from dask_distmm.errors import ProtocolError
from dask_distmm.planning import Problem, problem_from_wire, restrict
from dask_distmm.runtime.keys import ChunkTask, RunTask, barrier_key, operand_keys, part_name, wave_of


def part_of(
    problem: Problem, keys: Mapping[str, list[Any]], numbers: Collection[int]
) -> tuple[Problem, dict[str, list[Any]]]:
    """Return the least part of a product that has some chunks of D, and the keys of its operands' chunks."""
    # What a wave adds to the sums of the one before it is for all of its chunks.
    part = restrict(problem, numbers) if wave_of(problem.name) is None else None
    if part is None:
        return problem, dict(keys)
    found = {}
    for name in part.operands:
        places = np.searchsorted(problem.numbers(name), part.numbers(name))
        every = keys[problem.source_of(name)]
        found[name] = [every[place] for place in places.tolist()]
    return part, found


def restricted(barrier: Any, chunks: Mapping[Any, ChunkTask]) -> dict[Any, GraphNode]:
    """Return the tasks of the least part of a barrier's multiply that has some chunks; none if that is all of it."""
    wire, keys = operand_keys(barrier)
    try:
        problem = problem_from_wire(wire)
    except ProtocolError:
        return {}  # the barrier will fail with it
    if not isinstance(problem, Problem):
        return {}
    numbers = problem.numbers("").tolist()
    wanted = {numbers[task.index] for task in chunks.values()}
    part, inputs = part_of(problem, dict(zip(problem.inputs, keys, strict=True)), wanted)
    if part is problem or part.part is None:
        return {}
    part = dataclasses.replace(part, name=part_name(part.part))
    key = barrier_key(part.name)
    lists = [List(*map(TaskRef, inputs[name])) for name in part.inputs]
    found: dict[Any, GraphNode] = {key: RunTask(key, barrier.func, part.to_wire(), *lists, **barrier.kwargs)}
    index = {number: index for index, number in enumerate(part.numbers("").tolist())}
    for name, task in chunks.items():
        found[name] = ChunkTask(name, task.func, task.output, index[numbers[task.index]], TaskRef(key))
    return found


def needed(graph: Mapping[Any, GraphNode], keys: Collection[Any]) -> dict[Any, GraphNode]:
    """Return the tasks of a graph that some keys need."""
    found: dict[Any, GraphNode] = {}
    todo = list(keys)
    while todo:
        key = todo.pop()
        if key in graph and key not in found:
            found[key] = graph[key]
            todo += graph[key].dependencies
    return found
