"""The tasks of runs, and their names, from which scheduler and workers know which multiply a task belongs to.

What a chunk's task makes is in the task, and not in its key. For a result array called ``matmul-3f...`` there are

- ``"distmm-barrier-matmul-3f..."``: the barrier, which depends on the chunks of A and B;
- ``("matmul-3f...", i, j)``: one for each chunk of D, which depends on the barrier;
- ``("matmul-3f...-relu_aux", i, j)``: the same for an auxiliary output.

Where only a part of D is wanted the barrier has the name of that part, ``distmm-barrier-matmul-3f...-part-9b...``.

A product in waves has a run for each, called ``matmul-3f...-wave-00012``; sums over k that it leaves for the next one
are chunks of ``matmul-3f...-sum-00012``.

``("distmm-tile-7a...", i, j)`` is a chunk that was laid out by hand on a certain worker.

A product of a group that is multiplied by plain tasks is called ``distmm-group-c-00012-3f...``: a letter for how long
a task takes (Dask keeps average times by names without their numbers), and its place in the order.

Parts of a product at the level of tasks: which chunks of D a run makes, and what it needs for them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from dask._task_spec import Alias, GraphNode, List, Task, TaskRef
from dask.base import clone_key, tokenize

from dask_distmm.engines.sources import ChunkTasks
from dask_distmm.errors import ProtocolError
from dask_distmm.planning import Computation, Problem, problem_from_wire, restrict

# The tasks of runs, and their names, from which scheduler and workers know which multiply a task belongs to


GROUP_PREFIX = "distmm-group-"
_BARRIER, _TILE = "distmm-barrier-", "distmm-tile-"
_SUM = re.compile(r".*-sum-\d{5,}")
_WAVE = re.compile(r"(.*)-wave-(\d{5,})")


class RunTask(Task):  # type: ignore[misc]
    """A task that Dask's optimizer must not fuse with others: its key is known to the plugins."""

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        """Keep this task and its key as they are."""
        return True

    def substitute(self, subs: Mapping[Any, Any], key: Any = None) -> Any:
        """Replace keys that this task needs, but never its own: a copy under another key is this task's result.

        ``dask.delayed`` makes such copies of whole graphs that are given to it. A copied barrier would ask for the
        run of another one.
        """
        if key is None and subs.get(self.key, self.key) != self.key:
            return Alias(self.key)
        return super().substitute(subs, key)


class ChunkTask(RunTask):
    """The task of a chunk that a run makes: its arguments are `output`, `index` and `barrier`."""

    __slots__ = ()

    @property
    def output(self) -> str:
        """Name of the output."""
        return str(self.args[0])

    @property
    def index(self) -> int:
        """Number of the chunk among those that the run makes."""
        return int(self.args[1])

    @property
    def barrier(self) -> Any:
        """Key of the barrier of the run."""
        return self.args[2].key


def output_name(name: str, output: str) -> str:
    """Return the name of D's array (for ``""``) or of an auxiliary output's."""
    return f"{name}-{output}" if output else name


def part_name(part: Problem) -> str:
    """Return the name of a part of a multiply: the same for the same chunks, however they were asked for."""
    return f"{part.whole}-part-{tokenize([(name, part[name].numbers) for name in (*part.operands, 'd')])}"


def copied_name(name: str, seed: Hashable) -> str:
    """Return the name of a copy of a run; which wave or part it is, at the end, stays."""
    return f"copy-{tokenize(seed)[:8]}-{name}"


def copied_key(key: Any, seed: Hashable) -> Any:
    """Return the key of a copy of a task, as `dask.graph_manipulation.clone` makes it."""
    return clone_key(key, seed) if (name := barrier_name(key)) is None else barrier_key(copied_name(name, seed))


def barrier_key(name: str) -> str:
    """Return the key of the barrier of the multiply called `name`."""
    return _BARRIER + name


def barrier_name(key: Any) -> str | None:
    """Return the name of the multiply whose barrier has this key, or None for other keys."""
    return key[len(_BARRIER) :] if isinstance(key, str) and key.startswith(_BARRIER) else None


def is_barrier(task: GraphNode | None) -> bool:
    """Whether a task stands for a run: Dask's copies of graphs give such keys to other tasks, too."""
    if not isinstance(task, Task) or barrier_name(task.key) is None:
        return False
    return isinstance(next(iter(task.args), None), Mapping) and "is_isolated" not in task.kwargs


def wave_name(name: str, number: int) -> str:
    """Return the name of a wave of the product called `name`."""
    return f"{name}-wave-{number:05d}"


def wave_of(name: str) -> tuple[str, int] | None:
    """Return the name of the product of which a run is a wave, and the wave's number; None if it is not a wave."""
    matched = _WAVE.fullmatch(name)
    return (matched[1], int(matched[2])) if matched is not None else None


def series_of_waves(keys: Iterable[Any]) -> list[list[Any]]:
    """Return the keys of waves' barriers among some keys, in the order of waves: a list for each product or series."""
    series: dict[str, dict[int, Any]] = {}
    for key in keys:
        if (name := barrier_name(key)) is not None and (wave := wave_of(name)) is not None:
            series.setdefault(wave[0], {})[wave[1]] = key
    return [[waves[number] for number in sorted(waves)] for waves in series.values()]


def held_back(graph: Mapping[Any, GraphNode]) -> dict[Any, Any]:
    """Return the tasks that begin what waves load, each with the barrier of the wave before the last one.

    They wait for that wave's run; so two waves' inputs are in memory. Where nothing is loaded for a wave its barrier
    waits. A task that anything but waves of the same series needs, and what such a task needs, waits for nothing.
    """
    series = series_of_waves(graph)
    before = {waves[at]: waves[at - 2] for waves in series for at in range(2, len(waves))}
    # For each task the first wave that needs it, and the series of that wave.
    first: dict[Any, tuple[Any, int]] = {}
    for number, waves in enumerate(series):
        for barrier in waves:
            todo = [barrier]
            while todo:
                key = todo.pop()
                if key in graph and key not in first and (key == barrier or not isinstance(graph[key], RunTask)):
                    first[key] = barrier, number
                    todo += graph[key].dependencies
    shared = [
        dep
        for key, task in graph.items()
        for dep in task.dependencies
        if dep in first and barrier_name(dep) is None and first.get(key, ("", -1))[1] != first[dep][1]
    ]
    while shared:
        if first.pop(key := shared.pop(), None) is not None:
            shared += graph[key].dependencies
    return {
        key: before[barrier]
        for key, (barrier, _) in first.items()
        if barrier in before and not any(first.get(dep, ("", -1))[0] == barrier for dep in graph[key].dependencies)
    }


def is_sum(name: str) -> bool:
    """Whether an array is the sums that a wave leaves for the next one."""
    return _SUM.fullmatch(name) is not None


def tile_name(token: str) -> str:
    """Return the name of an array that is laid out by hand."""
    return _TILE + token


def is_tile(key: Any) -> bool:
    """Whether this is the key of a chunk that was laid out by hand."""
    return isinstance(key, tuple) and isinstance(key[0], str) and key[0].startswith(_TILE)


def group_name(token: str, rank: int, seconds: float) -> str:
    """Return the array name of a product of a group: `rank` in the order, a task of it takes this many seconds."""
    size = "abcdefgh"[min(7, max(0, math.ceil(math.log(max(seconds, 1e-9) / 1e-3, 4))))]
    return f"{GROUP_PREFIX}{size}-{rank:05d}-{token}"


def parse_group_key(key: Any) -> int | None:
    """Return the place in the order of a task of a group's product, or None for others."""
    if not (isinstance(key, tuple) and len(key) == 3 and isinstance(key[0], str) and key[0].startswith(GROUP_PREFIX)):
        return None
    place = key[0].split("-")[3]
    return int(place) if place.isdigit() else None


def barrier_task(
    problem: Computation, run: Callable[..., Any], inputs: Mapping[str, Sequence[Any] | ChunkTasks], **waited_for: Any
) -> RunTask:
    """Return the task of a run: it needs the chunks of `inputs` by their keys, but those that ranks make."""
    operands = (inputs[name] for name in problem.inputs)
    lists = (keys if isinstance(keys, ChunkTasks) else List(*map(TaskRef, keys)) for keys in operands)
    return RunTask(barrier_key(problem.name), run, problem.to_wire(), *lists, **waited_for)


def operand_keys(barrier: Task) -> tuple[Any, list[list[Any]]]:
    """Return the problem of a barrier, as plain types, and for each of its inputs the chunks' keys, or their tasks.

    The optimizer may have renamed what the barrier depends on, but not reordered it.
    """
    wire, *inputs = barrier.args
    lists = [operand.tasks if isinstance(operand, ChunkTasks) else operand.args for operand in inputs]
    return wire, [[ref.key if isinstance(ref, TaskRef) else ref for ref in keys] for keys in lists]


# Parts of a product at the level of tasks: which chunks of D a run makes, and what it needs for them


def part_of(
    problem: Problem, keys: Mapping[str, list[Any]], numbers: Collection[int]
) -> tuple[Problem, dict[str, list[Any]]]:
    """Return the smallest part of a product that computes some chunks of D, and the keys of its operands' chunks."""
    # What a wave adds to the sums of the one before it is for all of its chunks.
    part = restrict(problem, numbers) if wave_of(problem.name) is None else None
    if part is None:
        return problem, dict(keys)
    kept = {}
    for name in part.operands:
        places = np.searchsorted(problem[name].every, part[name].every)
        every = keys[problem.source_of(name)]
        kept[name] = [every[place] for place in places.tolist()]
    return part, kept


def restricted(barrier: Any, chunks: Mapping[Any, ChunkTask]) -> dict[Any, GraphNode]:
    """Return the tasks of the smallest part of a product that computes some chunks; empty if it is all of it."""
    wire, keys = operand_keys(barrier)
    try:
        problem = problem_from_wire(wire)
    except ProtocolError:
        return {}  # the barrier will fail with it
    if not isinstance(problem, Problem):
        return {}
    numbers = problem.d.every.tolist()
    wanted = {numbers[task.index] for task in chunks.values()}
    part, inputs = part_of(problem, dict(zip(problem.inputs, keys, strict=True)), wanted)
    if part is problem:
        return {}
    part = dataclasses.replace(part, name=part_name(part))
    key = barrier_key(part.name)
    graph: dict[Any, GraphNode] = {key: barrier_task(part, barrier.func, inputs, **barrier.kwargs)}
    index = {number: index for index, number in enumerate(part.d.every.tolist())}
    for name, task in chunks.items():
        graph[name] = ChunkTask(name, task.func, task.output, index[numbers[task.index]], TaskRef(key))
    return graph


def needed(graph: Mapping[Any, GraphNode], keys: Collection[Any]) -> dict[Any, GraphNode]:
    """Return the closure of some keys under dependencies in a graph."""
    closure: dict[Any, GraphNode] = {}
    todo = list(keys)
    while todo:
        key = todo.pop()
        if key in graph and key not in closure:
            closure[key] = graph[key]
            todo += graph[key].dependencies
    return closure
