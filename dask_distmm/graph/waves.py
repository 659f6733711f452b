r"""The task graph of a product in waves: a barrier for each wave, and the operands' chunks as streams.

::

    A(:, 0), B(0, :) > barrier 0 < sums 0 \
    A(:, 1), B(1, :) ------------------> barrier 1 < sums 1 \
    A(:, 2), B(2, :) -----------------------------------> barrier 2 < D
      ^ wait for gate 0, which opens when the run of barrier 0 is over

Here for waves along k; where each wave finishes chunks of D no barrier depends on another. What the operands are made
of is looked at, and copied under other names, when the tasks are asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dask._task_spec import GraphNode, List, Task, TaskRef, convert_legacy_graph
from dask.array.optimization import optimize
from dask.base import tokenize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer

from dask_distmm.engines.sources import Sources
from dask_distmm.graph.build import RunTask, TasksLayer, barrier, chunk
from dask_distmm.graph.streams import opened, self_contained, stream
from dask_distmm.planning import Problem
from dask_distmm.planning.waves import Scheme, wave_problem
from dask_distmm.runtime.keys import barrier_key, gate_key, output_name

__all__ = ["WavesLayer", "build_wave_output", "build_waves", "can_be_made"]


class WavesLayer(TasksLayer):
    """The tasks of a product in waves; made only when they are looked at.

    Parameters
    ----------
    whole
        The product.
    scheme
        Its waves.
    arrays
        For each operand the name of the array whose chunks it is made of, and whether these are transposed.
    upstream
        The graph of the operands.
    only
        Keys of those tasks that are needed; None for all.
    """

    def __init__(
        self,
        whole: Problem,
        scheme: Scheme,
        arrays: Mapping[str, tuple[str, bool]],
        upstream: HighLevelGraph,
        only: frozenset[Any] | None = None,
    ) -> None:
        super().__init__()
        self.whole, self.scheme, self.arrays, self.upstream, self.only = whole, scheme, dict(arrays), upstream, only

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_tasks", "problems")}

    @functools.cached_property
    def problems(self) -> list[Problem]:
        """The problem of each wave."""
        return [wave_problem(self.whole, self.scheme, number) for number in range(len(self.scheme.waves))]

    @functools.cached_property
    def _tasks(self) -> dict[Any, GraphNode]:  # type: ignore[override]
        found = self._all_tasks()
        return found if self.only is None else _needed(found, self.only)

    def _all_tasks(self) -> dict[Any, GraphNode]:
        return self._tasks_by_ranks() if self.scheme.by_ranks else self._tasks_behind_gates()

    def _tasks_by_ranks(self) -> dict[Any, GraphNode]:
        """Return the tasks where ranks make the chunks that are streamed."""
        tasks: dict[str, Mapping[Any, Task]] = {}
        for name in filter(self._is_streamed, "ab"):
            # Each operand by itself, as `can_be_made` has looked at it: what both are made of is made for each.
            streamed = {key for number in range(len(self.problems)) for key in self._inputs(number, name)}
            array = self.arrays[name][0]
            tasks.setdefault(array, _tasks_of(self.upstream, list(streamed)) or {})
        found: dict[Any, GraphNode] = {}
        for number in range(len(self.problems)):
            inputs = [
                Sources([tasks[self.arrays[operand][0]][key] for key in self._inputs(number, operand)])
                if self._is_streamed(operand)
                else List(*map(TaskRef, self._inputs(number, operand)))
                for operand in self.problems[number].inputs
            ]
            found |= self._run_of(number, inputs, behind=True)
        return found

    def _run_of(self, number: int, inputs: Sequence[Any], *, behind: bool) -> dict[Any, GraphNode]:
        """Return the tasks of one wave but for those that make its inputs.

        Parameters
        ----------
        number
            Of the wave.
        inputs
            The arguments of its barrier.
        behind
            Whether the barrier itself waits for the gate of the wave before the last one.
        """
        problem, gates = self.problems[number], [gate_key(problem.name) for problem in self.problems]
        before, ncols = barrier_key(problem.name), self.whole.chunk_counts("d")[1]
        waits = {"gate": TaskRef(gates[number - 2])} if behind and number >= 2 else {}
        found: dict[Any, GraphNode] = {before: RunTask(before, barrier, problem.to_wire(), *inputs, **waits)}
        if number + 2 < len(gates):
            found[gates[number]] = RunTask(gates[number], opened)
        for index, at in enumerate(problem.numbers("").tolist()):
            key = (problem.result_name, *divmod(at, ncols))
            found[key] = RunTask(key, chunk, "", index, TaskRef(before))
        return found

    def _tasks_behind_gates(self) -> dict[Any, GraphNode]:
        """Return the tasks where Dask makes the chunks that are streamed, each behind a gate."""
        waves = self.scheme.waves
        streamed = [
            {key for name in "ab" if self._is_streamed(name) for key in self._inputs(number, name)}
            for number in range(len(waves))
        ]
        gates = [gate_key(problem.name) for problem in self.problems]
        chunks = sorted(set().union(*streamed), key=str)
        # As Dask would: what is fused is loaded by one task, and slices are read as slices.
        upstream = convert_legacy_graph(dict(optimize(self.upstream, chunks)))
        visits = [wave.visit for wave in waves]
        streams = stream(
            upstream, streamed, visits, gates, tokenize(self.whole.name)[:8], lambda task: isinstance(task, RunTask)
        )
        found: dict[Any, GraphNode] = dict(streams.tasks)
        for number, problem in enumerate(self.problems):
            inputs = []
            for operand in problem.inputs:
                keys = self._inputs(number, operand)
                names = streams.names[number] if self._is_streamed(operand) else {}
                inputs.append(List(*(TaskRef(names.get(key, key)) for key in keys)))
            found |= self._run_of(number, inputs, behind=False)
        return found | self._missing(found, upstream)

    def _missing(self, found: Mapping[Any, GraphNode], upstream: Mapping[Any, GraphNode]) -> dict[Any, GraphNode]:
        """Return tasks that others need and that only the optimized graph has."""
        made: dict[Any, GraphNode] = {}
        todo = [key for task in found.values() for key in task.dependencies]
        while todo:
            key = todo.pop()
            if key not in found and key not in made and key in upstream and key not in self.upstream:
                made[key] = upstream[key]
                todo += upstream[key].dependencies
        return made

    def _is_streamed(self, operand: str) -> bool:
        return operand in "ab" and self.scheme.streamed["ab".index(operand)]

    def _inputs(self, number: int, operand: str) -> list[Any]:
        """Return the keys of an operand's chunks, in the order of their numbers in a wave's problem."""
        problem = self.problems[number]
        counts = problem.chunk_counts(operand)
        places = [problem.place_of(operand, index) for index in range(counts[0] * counts[1])]
        if operand == "partial":
            before = self.problems[number - 1].result_name
            return [(before, i, j) for i, j in places]
        name, turned = self.arrays[operand]
        return [(name, j, i) if turned else (name, i, j) for i, j in places]

    # Dask's interface of a layer

    def get_output_keys(self) -> set[Any]:
        """Return the keys that other layers may need: of chunks of D, and of the barriers for auxiliary outputs."""
        nrows, ncols = self.whole.chunk_counts("d")
        chunks = {(self.whole.name, i, j) for i in range(nrows) for j in range(ncols)}
        return chunks | {barrier_key(problem.name) for problem in self.problems}

    def cull(self, keys: Collection[Any], all_hlg_keys: Collection[Any]) -> tuple[Layer, Mapping[Any, Collection[Any]]]:
        """Return a layer of the tasks that some keys need, and for each of them the keys of other layers."""
        tasks, layer = _needed(self._tasks, keys), self
        if len(tasks) < len(self._tasks):
            layer = WavesLayer(self.whole, self.scheme, self.arrays, self.upstream, frozenset(keys))
            layer.__dict__["_tasks"] = tasks
            layer.annotations, layer.collection_annotations = self.annotations, self.collection_annotations
        return layer, {key: task.dependencies - tasks.keys() for key, task in tasks.items()}


def _needed(tasks: Mapping[Any, GraphNode], keys: Collection[Any]) -> dict[Any, GraphNode]:
    """Return those of some tasks that keys need."""
    found: dict[Any, GraphNode] = {}
    todo = list(keys)
    while todo:
        key = todo.pop()
        if key not in found and key in tasks:
            found[key] = tasks[key]
            todo += tasks[key].dependencies
    return found


def can_be_made(array: Any) -> bool:
    """Whether ranks can make the chunks of a lazy Dask array: each of them by one task that needs no other."""
    keys = list(flatten(array.__dask_keys__()))
    return _tasks_of(array.dask, keys) is not None


def _tasks_of(graph: HighLevelGraph, keys: Sequence[Any]) -> dict[Any, Task] | None:
    return self_contained(convert_legacy_graph(dict(optimize(graph, keys))), keys)


def build_waves(problem: Problem, scheme: Scheme, a: Any, b: Any, extras: Sequence[Any] = ()) -> HighLevelGraph:
    """Return the graph of D under the array name ``problem.name``.

    Parameters
    ----------
    problem, scheme
        The product and its waves.
    a, b, extras
        Dask arrays of 2 dimensions; A's and B's transposes where the problem says so.
    """
    turned = dict(zip("ab", problem.turned, strict=True))
    operands = {"a": a, "b": b} | dict(zip(problem.operands[2:], extras, strict=True))
    arrays = {name: (array.name, turned.get(name, False)) for name, array in operands.items()}
    upstream = HighLevelGraph.merge(*(array.dask for array in operands.values()))
    layer = WavesLayer(problem, scheme, arrays, upstream)
    made = {name for name, streamed in zip("ab", scheme.streamed, strict=True) if streamed and scheme.by_ranks}
    # Culling keeps the layers before one that needs no key of theirs.
    needed = [array for name, array in operands.items() if name not in made]
    return HighLevelGraph.from_collections(problem.name, layer, dependencies=needed)


def build_wave_output(problem: Problem, scheme: Scheme, output: str, d: Any) -> HighLevelGraph:
    """Return the graph of an auxiliary output: chunks that those runs make which finish chunks of D.

    Parameters
    ----------
    problem, scheme
        The product and its waves.
    output
        Name of the output.
    d
        The array of D.
    """
    name, ncols = output_name(problem.name, output), problem.chunk_counts("d")[1]
    layer: dict[Any, Task] = {}
    for number, wave in enumerate(scheme.waves):
        if wave.last:
            one = wave_problem(problem, scheme, number)
            for index, at in enumerate(one.numbers("").tolist()):
                key = (name, *divmod(at, ncols))
                layer[key] = RunTask(key, chunk, output, index, TaskRef(barrier_key(one.name)))
    return HighLevelGraph.from_collections(name, layer, dependencies=[d])
