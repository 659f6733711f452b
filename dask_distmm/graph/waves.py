r"""The task graph of a product in waves: a barrier for each wave, and the operands' chunks as streams.

::

    A(:, 0), B(0, :) > barrier 0 < sums 0 \
    A(:, 1), B(1, :) ------------------> barrier 1 < sums 1 \
    A(:, 2), B(2, :) -----------------------------------> barrier 2 < D
      ^ wait for gate 0, which opens when the run of barrier 0 is over

Here for waves along k; where each wave finishes chunks of D no barrier depends on another. Several products, as the
items of a batch, have their waves one after the other. What the operands are made of is looked at, and copied under
other names, when the tasks are asked for.

Where only some chunks of D are wanted, culling leaves a part of the product, as in `graph.build`: without waves if it
is small, else in waves of its own.

The chunks of operands as streams: loaded for a wave, not before its turn, and dropped after it. Pure.

The tasks that lead to an operand's chunks are given names of their own for each visit of a stream, so that no chunk
stays in memory because something else needs it too. A task that can begin at once is made to wait for the gate of the
wave before the last one::

    source task of wave w + 2   <--   gate of wave w, which opens when the run of wave w is over

Tasks that waves far from one another need, as the mean in ``X - X.mean(0)``, are left as they are, with all that they
need: they are computed once, and kept. If a source task is needed by such a task and by a wave too, it runs twice.
Results of other multiplies, futures, and objects that are not arrays, as an open store, are used as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from dask._task_spec import Alias, DataNode, GraphNode, List, Task, TaskRef, convert_legacy_graph
from dask.array.optimization import optimize
from dask.base import tokenize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer

from dask_distmm.engines.sources import ChunkTasks
from dask_distmm.graph.build import (
    DaskTasks,
    ProductLayer,
    TasksLayer,
    barrier,
    chunk,
    is_annotated,
    needs_of,
    pieces_of,
)
from dask_distmm.planning import Problem
from dask_distmm.planning.computation import Part
from dask_distmm.planning.footprint import chunk_bytes
from dask_distmm.planning.waves import Scheme, part_scheme, wave_problem
from dask_distmm.runtime.keys import ChunkTask, RunTask, barrier_key, gate_key, is_sum, needed, output_name

# The chunks of operands as streams: loaded for a wave, not before its turn, and dropped after it. Pure


Key = Any
# Arrays of more bytes are not sent about with tasks.
_SMALL = 2**16
_Waves = dict[int, tuple[int, int]]  # by visit: the first and the last wave that need a task


# Tasks with names of their own; and for each wave the names of its chunks by those that they have in the operand.
Streams = tuple[dict[Key, GraphNode], list[dict[Key, Key]]]


def self_contained(
    upstream: Mapping[Key, GraphNode], keys: Iterable[Key], *, trees: bool = False
) -> dict[Key, Task] | None:
    """Return tasks that make chunks from their sources, each a chain of tasks that no other chunk needs; else None.

    With `trees` a task of a chain may need several others.
    """
    found: dict[Key, Task] = {}
    taken: set[Key] = set()
    for key in keys:
        chain = _chain(upstream, key, most=len(upstream) if trees else 1)
        if chain is None or not taken.isdisjoint(chain.keys()):
            return None
        # A node that is not a task, for example an open store, is shared by all chunks.
        taken.update(name for name, node in list(chain.items())[1:] if isinstance(node, Task))
        last = next(iter(chain.values()))
        found[key] = Task.fuse(*chain.values(), key=last.key) if len(chain) > 1 else last
    return found


def _chain(upstream: Mapping[Key, GraphNode], key: Key, most: int) -> dict[Key, Any] | None:
    """Return the task that makes a chunk, those that it needs, and so on; with small data beside them.

    None where a task needs more than `most` others, or what is not in the graph: they would all be in memory at once.
    """
    found: dict[Key, GraphNode] = {}
    todo = [key]
    while todo:
        task = upstream.get(todo.pop())
        if isinstance(task, Alias):
            found |= {task.key: task} if found else {}
            todo.append(task.target)
            continue
        if not isinstance(task, Task):
            return None
        needed = {name: upstream.get(name) for name in task.dependencies}
        others = [name for name, node in needed.items() if not isinstance(node, DataNode)]
        data = {name: node for name, node in needed.items() if isinstance(node, DataNode)}
        if len(others) > most or any(map(_has_data, (task, *data.values()))):
            return None
        found |= {task.key: task} | data
        todo += (name for name in others if name not in found)
    return found


def _has_data(node: Any) -> bool:
    """Whether a task brings an array along, which then travels with it."""
    if isinstance(node, DataNode):
        return _has_data(node.value)
    if isinstance(node, Task):
        return any(map(_has_data, (*node.args, *node.kwargs.values())))
    if isinstance(node, Mapping):
        return any(map(_has_data, node.values()))
    if isinstance(node, list | tuple):
        return any(map(_has_data, node))
    return isinstance(node, np.ndarray) and node.nbytes > _SMALL


def stream(
    upstream: Mapping[Key, GraphNode],
    waves: Sequence[Iterable[Key]],
    visits: Sequence[int],
    gates: Sequence[Key],
    token: str,
    is_fixed: Callable[[GraphNode], bool] = lambda task: False,
) -> Streams:
    """Give the tasks behind streamed chunks names of their own, and hold them back until it is their turn."""

    def fixed(key: Key) -> bool:
        task = upstream.get(key)
        plain = isinstance(task, DataNode) and not isinstance(task.value, np.ndarray)
        return task is None or plain or is_fixed(task)

    needed: dict[Key, _Waves] = {}
    for number, (keys, visit) in enumerate(zip(waves, visits, strict=True)):
        for key in keys:
            _add(needed.setdefault(key, {}), visit, number)
    kept: set[Key] = set()
    for key in _users_first(upstream, list(needed), fixed):
        found = needed.get(key, {})
        if key in kept or any(last - first > 1 for first, last in found.values()):
            kept.add(key)
            needed.pop(key, None)
        else:
            for dependency in upstream[key].dependencies:
                for visit, (first, _) in found.items():
                    _add(needed.setdefault(dependency, {}), visit, first)
    for key in [key for key in needed if fixed(key)]:
        del needed[key]
    return _renamed(upstream, needed, waves, visits, gates, token)


def _renamed(
    upstream: Mapping[Key, GraphNode],
    needed: Mapping[Key, _Waves],
    waves: Sequence[Iterable[Key]],
    visits: Sequence[int],
    gates: Sequence[Key],
    token: str,
) -> Streams:
    """Return the tasks that waves need under their new names, the first ones behind gates."""
    tasks: dict[Key, GraphNode] = {}
    for key, found in needed.items():
        for visit, (wave, _) in found.items():
            task = upstream[key]
            own = [dependency for dependency in task.dependencies if dependency in needed]
            begun = any(needed[dependency][visit][0] == wave for dependency in own)
            name = _name(key, token, visit)
            renamed = task.substitute({dep: _name(dep, token, visit) for dep in own}, key=name)
            tasks[name] = renamed if begun or wave < 2 else _gated(renamed, name, gates[wave - 2])
    names = [
        {key: _name(key, token, visit) if key in needed else key for key in keys}
        for keys, visit in zip(waves, visits, strict=True)
    ]
    return tasks, names


def _add(found: _Waves, visit: int, wave: int) -> None:
    first, last = found.get(visit, (wave, wave))
    found[visit] = min(first, wave), max(last, wave)


def _users_first(upstream: Mapping[Key, GraphNode], keys: list[Key], fixed: Callable[[Key], bool]) -> list[Key]:
    """Return some keys and all that they need, but for what is fixed; each key after those that need it."""
    order: list[Key] = []
    seen: set[Key] = set()
    todo: list[tuple[Key, bool]] = [(key, False) for key in keys]
    while todo:
        key, done = todo.pop()
        if done:
            order.append(key)
        elif key not in seen and not fixed(key):
            seen.add(key)
            todo.append((key, True))
            todo += [(dependency, False) for dependency in upstream[key].dependencies]
    return order[::-1]


def _name(key: Key, token: str, visit: int) -> Key:
    suffix = f"-{token}-{visit}"
    return (key[0] + suffix, *key[1:]) if isinstance(key, tuple) else f"{key}{suffix}"


def _gated(task: GraphNode, key: Key, gate: Key) -> GraphNode:
    """Return a task that waits for a gate before it does what another one does."""
    if isinstance(task, Alias):
        return task
    ref = TaskRef(gate)
    # As a producer of data Dask queues it, and looks for an idle worker and not for one that has the gate.
    if isinstance(task, DataNode):
        return Task(key, after, ref, _itself, task.value, _data_producer=True)
    if type(task) is Task:
        return Task(key, after, ref, task.func, *task.args, _data_producer=True, **task.kwargs)
    return Task(key, after, ref, _itself, task, _data_producer=True)


def after(gate: None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; the gate has had its use when this begins."""
    return function(*args, **kwargs)


def opened() -> None:
    """Return nothing: the task of a gate, for which others wait."""


def _itself(value: Any) -> Any:
    return value


# The task graph of a product in waves: a barrier for each wave, and the operands' chunks as streams


# A part of a product is culled if it is at most this share of the work, and is made without waves if it needs less than
# this share of the memory of a worker.
_SHARE_OF_A_PART = 0.5


@dataclasses.dataclass(frozen=True)
class InWaves:
    """A product that is made in waves."""

    # The product and its waves.
    problem: Problem
    scheme: Scheme
    # For each operand the name of the array whose chunks it is made of, and whether these are transposed.
    arrays: Mapping[str, tuple[str, bool]]
    # Which part of the product is made; None for all of it.
    part: Part | None = None

    def is_streamed(self, operand: str) -> bool:
        """Whether the chunks of an operand are loaded for a wave and dropped after it."""
        return operand in "ab" and self.scheme.streamed["ab".index(operand)]


class WavesLayer(TasksLayer):
    """The tasks of waves, but for chunks of D; made only when they are looked at."""

    def __init__(
        self,
        products: Sequence[InWaves],
        upstream: HighLevelGraph,
        only: frozenset[Any] | None = None,
        chunks: frozenset[Any] = frozenset(),
    ) -> None:
        super().__init__()
        self.products, self.upstream, self.only = tuple(products), upstream, only
        # Those of D that are among the tasks.
        self.chunks = chunks

    @functools.cached_property
    def waves(self) -> list[tuple[InWaves, Problem]]:
        """For each wave its product, and its problem."""
        return [
            (one, wave_problem(one.problem, one.scheme, number, one.part))
            for one in self.products
            for number in range(len(one.scheme.waves))
        ]

    @functools.cached_property
    def _tasks(self) -> dict[Any, GraphNode]:  # type: ignore[override]
        made = self._made_by_ranks() if self.products[0].scheme.by_ranks else None
        if made is None:
            schemes = [dataclasses.replace(one.scheme, by_ranks=False) for one in self.products]
            pairs = zip(self.products, schemes, strict=True)
            self.products = tuple(dataclasses.replace(one, scheme=scheme) for one, scheme in pairs)
            self.__dict__.pop("waves", None)
        found = self._tasks_behind_gates() if made is None else self._tasks_by_ranks(made)
        for _, problem in self.waves if self.chunks else ():
            if not is_sum(problem.result_name):
                found |= {key: task for key, task in _chunks(problem, "").items() if key in self.chunks}
        return found if self.only is None else needed(found, self.only)

    def _made_by_ranks(self) -> dict[Any, Task] | None:
        """Return for each chunk that is streamed the task by which ranks make it; None if that can't be."""
        made: dict[Any, Task] = {}
        for name in "ab":
            # Each operand by itself, as `can_be_made` looks at it: what both are made of is made for each.
            if streamed := set().union(*self._streamed(name)) - made.keys():
                tasks = _tasks_of(self.upstream, list(streamed))
                if tasks is None:
                    return None
                made |= tasks
        return made

    def _tasks_by_ranks(self, made: Mapping[Any, Task]) -> dict[Any, GraphNode]:
        """Return the tasks where ranks make the chunks that are streamed."""
        found: dict[Any, GraphNode] = {}
        for number, (one, problem) in enumerate(self.waves):
            inputs = []
            for operand in problem.inputs:
                keys = self._inputs(number, operand)
                streamed = one.is_streamed(operand)
                inputs.append(ChunkTasks([made[key] for key in keys]) if streamed else List(*map(TaskRef, keys)))
            found.update(self._run_of(number, inputs, behind=True))
        return found

    def _run_of(self, number: int, inputs: Sequence[Any], *, behind: bool) -> dict[Any, GraphNode]:
        """Return the tasks of one wave but for those that make its inputs."""
        problem = self.waves[number][1]
        before, gate = barrier_key(problem.name), gate_key(problem.name)
        waits = {"gate": TaskRef(gate_key(self.waves[number - 2][1].name))} if behind and number >= 2 else {}
        found: dict[Any, GraphNode] = {before: RunTask(before, barrier, problem.to_wire(), *inputs, **waits)}
        if number + 2 < len(self.waves):
            found[gate] = RunTask(gate, opened)
        return found | (_chunks(problem, "") if is_sum(problem.result_name) else {})

    def _tasks_behind_gates(self) -> dict[Any, GraphNode]:
        """Return the tasks where Dask makes the chunks that are streamed, each behind a gate."""
        streamed = self._streamed("ab")
        gates = [gate_key(problem.name) for _, problem in self.waves]
        chunks = sorted(set().union(*streamed), key=str)
        # As Dask would: what is fused is loaded by one task, and slices are read as slices.
        upstream = convert_legacy_graph(dict(optimize(self.upstream, chunks)))
        token = tokenize([one.problem.name for one in self.products])[:8]
        tasks, renamed = stream(
            upstream, streamed, self._visits(), gates, token, lambda task: isinstance(task, RunTask)
        )
        found: dict[Any, GraphNode] = dict(tasks)
        for number, (one, problem) in enumerate(self.waves):
            inputs, loads = [], False
            for operand in problem.inputs:
                keys = self._inputs(number, operand)
                names = renamed[number] if one.is_streamed(operand) else {}
                loads |= any(names.get(key, key) != key for key in keys)
                inputs.append(List(*(TaskRef(names.get(key, key)) for key in keys)))
            # Where nothing is loaded the runs themselves wait.
            found.update(self._run_of(number, inputs, behind=not loads))
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

    def _visits(self) -> list[int]:
        """Return the number of each wave's visit; those of a product come after those of the product before."""
        found: list[int] = []
        for one in self.products:
            begin = found[-1] + 1 if found else 0
            found += [begin + wave.visit for wave in one.scheme.waves]
        return found

    def _streamed(self, operands: str) -> list[set[Any]]:
        """Return for each wave the keys of those chunks of operands that are streamed."""
        return [
            {key for operand in operands if one.is_streamed(operand) for key in self._inputs(number, operand)}
            for number, (one, _) in enumerate(self.waves)
        ]

    def _inputs(self, number: int, operand: str) -> list[Any]:
        """Return the keys of an operand's chunks, in the order of their numbers in a wave's problem."""
        one, problem = self.waves[number]
        assert problem.part is not None
        rows, cols, _ = problem.part.of(operand)
        places = itertools.product(rows, cols)
        if operand == "partial":
            before = self.waves[number - 1][1].result_name
            return [(before, i, j) for i, j in places]
        name, transposed = one.arrays[operand]
        return [(name, j, i) if transposed else (name, i, j) for i, j in places]

    # Dask's interface of a layer

    def get_output_keys(self) -> set[Any]:
        """Return the keys that other layers may need: of the barriers, for chunks of D and auxiliary outputs."""
        return {barrier_key(problem.name) for _, problem in self.waves} | self.chunks

    def cull(self, keys: Collection[Any], all_hlg_keys: Collection[Any]) -> tuple[Layer, Mapping[Any, Collection[Any]]]:
        """Return a layer of the tasks that some keys need, and for each of them the keys of other layers."""
        tasks, layer = needed(self._tasks, keys), self
        if len(tasks) < len(self._tasks):
            layer = WavesLayer(self.products, self.upstream, frozenset(tasks), self.chunks & tasks.keys())
            layer.__dict__["_tasks"] = tasks
            layer.annotations, layer.collection_annotations = self.annotations, self.collection_annotations
        return layer, needs_of(tasks)


class WaveOutputLayer(TasksLayer):
    """The chunks of D, or of an auxiliary output, of a product in waves; made only when they are looked at."""

    def __init__(self, one: InWaves, output: str, waves: WavesLayer, by_tasks: DaskTasks | None = None) -> None:
        super().__init__()
        self.one, self.output, self.waves, self.by_tasks = one, output, waves, by_tasks

    @functools.cached_property
    def _tasks(self) -> dict[Any, Task]:  # type: ignore[override]
        found: dict[Any, Task] = {}
        for number, wave in enumerate(self.one.scheme.waves):
            if wave.last:
                found.update(_chunks(wave_problem(self.one.problem, self.one.scheme, number), self.output))
        return found

    def get_output_keys(self) -> set[Any]:
        """Return the keys of all chunks."""
        problem = self.one.problem
        name, (nrows, ncols) = output_name(problem.name, self.output), problem.chunk_counts("d")
        return {(name, i, j) for i in range(nrows) for j in range(ncols)}

    def cull(self, keys: Collection[Any], all_hlg_keys: Collection[Any]) -> tuple[Layer, Mapping[Any, Collection[Any]]]:
        """Return a layer that makes only some chunks, and for each of its tasks the keys of other layers."""
        own = self.get_output_keys() & set(keys)
        # Auxiliary outputs need the waves as they are; so do the other products of a series.
        others = self.output or len(self.waves.products) > 1 or not self.waves.get_output_keys().isdisjoint(keys)
        part = self._part(own) if not others and own else None
        layer: Layer
        layer, needs = super().cull(own, all_hlg_keys) if part is None else part.cull(own, all_hlg_keys)
        layer.annotations, layer.collection_annotations = self.annotations, self.collection_annotations
        return layer, needs

    def _part(self, own: Collection[Any]) -> Layer | None:
        """Return a layer of the runs that make some chunks of D: small ones as they are, others in waves."""
        one, whole = self.one, self.one.problem
        ncols = whole.chunk_counts("d")[1]
        pieces = pieces_of(whole, {int(i) * ncols + int(j) for _, i, j in own})
        if sum(problem.flops for problem, _ in pieces) > _SHARE_OF_A_PART * whole.flops:
            return None
        held = sum(chunk_bytes(problem, name).sum() for problem, _ in pieces for name in ("a", "b", "d"))
        if not one.scheme.budget_bytes or held < one.scheme.budget_bytes * _SHARE_OF_A_PART:
            return ProductLayer(whole, one.arrays, by_tasks=self.by_tasks)
        parts = [
            InWaves(whole, part_scheme(whole, one.scheme, problem.part, problem.name), one.arrays, problem.part)
            for problem, _ in pieces
            if problem.part is not None
        ]
        return WavesLayer(parts, self.waves.upstream, None, frozenset(own)) if len(parts) == len(pieces) else None


def _chunks(problem: Problem, output: str) -> dict[Any, Task]:
    """Return the chunks that the run of a wave makes, of an output or of D or its sums."""
    name, before = output_name(problem.result_name, output), barrier_key(problem.name)
    keys = [(name, *divmod(number, problem.columns(""))) for number in problem.numbers("").tolist()]
    return {key: ChunkTask(key, chunk, output, index, TaskRef(before)) for index, key in enumerate(keys)}


def can_be_made(*arrays: Any, sampled: bool = False) -> bool:
    """Whether ranks can make all chunks of lazy Dask arrays: each of them by a chain of tasks of its own.

    Tasks with annotations are left to Dask, which knows what these mean. With `sampled` a few chunks are looked at, in
    a time that does not depend on how many there are.
    """
    keys = [key for array in arrays for key in _some_keys(array, sampled)]
    graph = HighLevelGraph.merge(*(array.dask for array in arrays))
    return not is_annotated(graph) and _tasks_of(graph, keys) is not None


def tasks_of_chunks(array: Any) -> ChunkTasks | None:
    """Return the tasks by which ranks make the chunks of a lazy array, each a tree of its own; None if they can't."""
    keys = _some_keys(array, sampled=False)
    made = None if is_annotated(array.dask) else _tasks_of(array.dask, keys, trees=True)
    return ChunkTasks([made[key] for key in keys]) if made is not None else None


def _some_keys(array: Any, sampled: bool) -> list[Any]:
    if not sampled:
        return list(flatten(array.__dask_keys__()))
    last = [count - 1 for count in array.numblocks]
    # A chunk that comes of the same task as another one is beside it.
    places = itertools.product(*({0, min(1, at), at} for at in last))
    return [(array.name, *place) for place in places]


def _tasks_of(graph: HighLevelGraph, keys: Sequence[Any], *, trees: bool = False) -> dict[Any, Task] | None:
    return self_contained(convert_legacy_graph(dict(optimize(graph, keys))), keys, trees=trees)


def build_waves(products: Sequence[tuple[Problem, Scheme, Mapping[str, Any]]]) -> HighLevelGraph:
    """Return the graph of the waves of products, one product after the other; `build_wave_output` adds chunks of D."""
    found: list[InWaves] = []
    sources: dict[str, Any] = {}
    for problem, scheme, operands in products:
        transposed = dict(zip("ab", problem.transposed, strict=True))
        arrays = {name: (array.name, transposed.get(name, False)) for name, array in operands.items()}
        found.append(InWaves(problem, scheme, arrays))
        sources |= {array.name: array for array in operands.values()}
    upstream = HighLevelGraph.merge(*(array.dask for array in sources.values()))
    layer = WavesLayer(found, upstream)
    return HighLevelGraph.from_collections(_layer_name(*products[0][:2]), layer, dependencies=list(sources.values()))


def _layer_name(problem: Problem, scheme: Scheme) -> str:
    return f"{scheme.series or problem.name}-waves"


def build_wave_output(
    waves: HighLevelGraph, problem: Problem, scheme: Scheme, output: str = "", by_tasks: DaskTasks | None = None
) -> HighLevelGraph:
    """Return the graph of D, or of an auxiliary output: chunks that those runs make which finish chunks of D."""
    name, before = output_name(problem.name, output), _layer_name(problem, scheme)
    runs = waves.layers[before]
    (one,) = (one for one in runs.products if one.problem.name == problem.name)
    # A part of D needs chunks of the operands. What auxiliary outputs need is known before what D does.
    needs = {before, *((problem.name,) if output else (array for array, _ in one.arrays.values()))}
    layer = WaveOutputLayer(one, output, runs, by_tasks)
    return HighLevelGraph({**waves.layers, name: layer}, {**waves.dependencies, name: needs})
