r"""The task graphs of computations, and the layers that they are made of.

**A product**: one barrier, which depends on the chunks of A and B, and the chunks of D::

    A(i,j) \                       / D(0,0)
    ...     >  barrier (one a run) <  ...
    B(i,j) /                       \ D(p,q)

The graph does not know the cluster. On a cluster no worker runs any of these tasks: the scheduler's plugin parks the
barrier, has the multiply run once all inputs are in memory, and puts the chunks of D into memory where they lie.

Where only some chunks of D are wanted, culling makes barriers for parts of the multiply, each of which depends on the
rows of chunks of A and the columns of chunks of B that its part needs. A product under `enable` that is left to Dask
where its own tasks are faster may be left to them in part, too: the chunks have the same keys then.

A product in waves has a barrier for each of them. Where waves follow one another along k each adds to the sums of the
one before; where each finishes chunks of D no barrier depends on another::

    A(:, 0), B(0, :) > barrier 0 < sums 0 \
    A(:, 1), B(1, :) ------------------> barrier 1 < sums 1 \
    A(:, 2), B(2, :) -----------------------------------> barrier 2 < D

The same graph runs without a cluster too (``compute(scheduler="threads")``): then the barrier gets all chunks and
multiplies them in this process.

**A factorization or a program**: a barrier, which depends on all chunks of its operands, and outputs. On a cluster no
worker runs any of these tasks, as for products.

**Streams**: a streamed operand's chunks are loaded for a wave and dropped after it. Dask makes them in the layers that
lead to the operand, which are copied under names of their own once for each visit of a stream, so that no chunk stays
in memory because something else needs it too::

    random > add                        the operand
    random-7a01-0 > add-7a01-0          the same for the waves of the first block of D
    random-7a01-1 > add-7a01-1          and for those of the second one

The scheduler holds back what begins there until its wave's turn (`runtime.keys.held_back`). A layer with a task for
waves far from one another, as the mean in ``X - X.mean(0)``, is left as it is, with all that it needs: it is computed
once, and kept. So are layers of ours, futures, and objects that are not arrays, as an open store.

Where ranks make the chunks the barrier has tasks in their place, which depend on nothing but small data.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from dask import graph_manipulation
from dask._task_spec import Alias, DataNode, GraphNode, List, Task, TaskRef, convert_legacy_graph
from dask.array.core import Array
from dask.array.optimization import optimize
from dask.array.routines import matmul
from dask.base import tokenize
from dask.blockwise import Blockwise, fuse_roots, optimize_blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer
from distributed import Reschedule, get_worker
from distributed.utils import sync

from dask_distmm.config import DaskCosts
from dask_distmm.engines.base import Side, get_engine
from dask_distmm.engines.sources import ChunkTasks
from dask_distmm.errors import EngineError, PlanError, ProjectedMemoryError
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning import (
    Computation,
    Placement,
    Problem,
    Worker,
    plan,
    plan_computation,
    problem_from_wire,
    restrict,
)
from dask_distmm.planning.factor import FactorProblem
from dask_distmm.planning.placement import CLEARLY
from dask_distmm.planning.planner import with_tasks
from dask_distmm.planning.program import ProgramProblem
from dask_distmm.planning.waves import Scheme, part_scheme, wave_problem
from dask_distmm.runtime.chunks import arrays_of, check_chunks, order_of, ready_event
from dask_distmm.runtime.keys import (
    ChunkTask,
    RunTask,
    barrier_key,
    barrier_name,
    barrier_task,
    copied_key,
    copied_name,
    needed,
    output_name,
    part_name,
    restricted,
)
from dask_distmm.runtime.messages import NAME

Key = Any
Span = tuple[int, int]
# A key that no layer has.
_NO_KEY = ("distmm-none",)
# Arrays of more bytes are not sent about with tasks.
_SMALL = 2**16


# Tasks that are made late


class TasksLayer(Layer):  # type: ignore[misc]
    """A layer whose tasks are made, as `_tasks`, only when they are looked at: Dask's interface of it."""

    has_legacy_tasks = False
    _tasks: Mapping[Any, GraphNode]

    def __init__(self, tasks: Mapping[Any, GraphNode] | None = None, annotations: Any = None) -> None:
        super().__init__(annotations=annotations)
        if tasks is not None:
            self._tasks = tasks

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made when it is looked at: attributes that the class makes."""
        return {name: value for name, value in self.__dict__.items() if not hasattr(type(self), name)}

    def __getitem__(self, key: Any) -> GraphNode:
        return self._tasks[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def is_materialized(self) -> bool:
        """Whether the tasks have been made."""
        return "_tasks" in self.__dict__

    def get_output_keys(self) -> set[Any]:
        """Return the keys that other layers may need."""
        return set(self)

    def cull(self, keys: Collection[Any], all_hlg_keys: Collection[Any]) -> tuple[Layer, Mapping[Any, Collection[Any]]]:
        """Return a layer of the tasks that some keys need, and for each of them the keys of other layers."""
        tasks = needed(self._tasks, keys)
        wanted: dict[Any, dict[Any, ChunkTask]] = {}
        for key, task in tasks.items():
            if isinstance(task, ChunkTask):
                wanted.setdefault(task.barrier, {})[key] = task
        for before, chunks in wanted.items():
            # An output of another layer needs a barrier as it is.
            if before in tasks and before not in keys:
                tasks |= restricted(tasks[before], chunks)
        tasks = needed(tasks, keys)
        layer = TasksLayer(tasks, self.annotations)
        layer.collection_annotations = self.collection_annotations
        return layer, needs_of(tasks)

    def clone(self, keys: Collection[Any], seed: Hashable, bind_to: Any = None) -> tuple[Layer, bool]:
        """Return copies of the tasks under other keys; those that need nothing that is copied wait for `bind_to`.

        Keys of the layer that others never need are not among `keys`.
        """
        inner = self.keys() - self.get_output_keys()
        tasks: dict[Any, GraphNode] = {}
        bound = False
        for key, task in self.items():
            if key not in keys and key not in inner:
                tasks[key] = task
                continue
            subs = {dep: copied_key(dep, seed) for dep in task.dependencies if dep in keys or dep in inner}
            new = copied_key(key, seed)
            copy = task.substitute(subs, key=new)
            if (name := barrier_name(key)) is not None:
                wire, *inputs = copy.args
                wire = {**wire, "name": copied_name(name, seed)}
                if whole := wire.get("whole"):
                    wire["whole"] = copied_name(whole, seed)
                binding = {} if subs or bind_to is None else {"bound": TaskRef(bind_to)}
                copy = RunTask(new, copy.func, wire, *inputs, **copy.kwargs, **binding)
                bound |= bool(binding)
            elif bind_to is not None and not subs:
                if isinstance(task, ChunkTask):
                    # A run puts into memory what waits for nothing else.
                    tasks[key], copy = task, TaskRef(key)
                bind, produces = graph_manipulation.chunks.bind, task.data_producer
                copy, bound = Task(new, bind, copy, TaskRef(bind_to), _data_producer=produces), True
            tasks[new] = copy
        return TasksLayer(tasks, self.annotations), bound


def is_annotated(graph: HighLevelGraph) -> bool:
    """Whether tasks have annotations, of which Dask knows what they mean."""
    return any(set(layer.annotations or ()) - {"span"} for layer in graph.layers.values())


def needs_of(tasks: Mapping[Any, GraphNode]) -> dict[Any, set[Any]]:
    """Return for each task of a layer the keys of other layers that it needs."""
    # A set less a view of keys looks at all of these.
    needs = {key: {dep for dep in task.dependencies if dep not in tasks} for key, task in tasks.items()}
    if needs:
        # Dask keeps all layers that are left, whole, once no key is: here those of what tasks load themselves.
        next(iter(needs.values())).add(_NO_KEY)
    return needs


# Chunks that Dask makes for a wave


class StreamLayer(TasksLayer):
    """Tasks of another layer under other names; made only when they are looked at."""

    def __init__(self, tasks: Mapping[Key, GraphNode], copied: Collection[Key], suffix: str, annotations: Any) -> None:
        super().__init__(annotations=annotations)
        self.tasks, self.copied, self.suffix = tasks, copied, suffix

    @functools.cached_property
    def _tasks(self) -> dict[Key, GraphNode]:  # type: ignore[override]
        tasks: dict[Key, GraphNode] = {}
        for key, task in self.tasks.items():
            name, needs = _renamed(key, self.suffix), [dep for dep in task.dependencies if dep in self.copied]
            tasks[name] = task.substitute({dep: _renamed(dep, self.suffix) for dep in needs}, key=name)
        return tasks


def streams(
    graph: HighLevelGraph, visits: Mapping[int, Sequence[Iterable[Key]]], token: str
) -> tuple[HighLevelGraph, dict[tuple[str, int], str]]:
    """Return the layers that make chunks for the waves of each visit, and their names by those of the originals."""
    layers, needs, names = dict[str, Layer](), dict[str, set[str]](), dict[tuple[str, int], str]()
    for visit, waves in visits.items():
        suffix = f"-{token}-{visit}"
        copies = _copies(graph, waves, suffix)
        for name, layer in copies.items():
            names[name, visit] = name + suffix
            layers[name + suffix] = layer
            needs[name + suffix] = {dep + suffix * (dep in copies) for dep in graph.dependencies[name]}
    return HighLevelGraph(layers, needs), names


def _copies(graph: HighLevelGraph, waves: Sequence[Iterable[Key]], suffix: str) -> dict[str, StreamLayer]:
    """Return copies of the layers that make chunks for the waves of one visit, by the names of these layers."""
    every = graph.get_all_external_keys()
    # For each layer's keys the first and the last wave that need them.
    spans = collections.defaultdict[Key, dict[Key, Span]](dict)
    for number, keys in enumerate(waves):
        for key in keys:
            _widen(spans[_layer_of(key)], [key], (number, number))
    copies: dict[str, StreamLayer] = {}
    copied: set[Key] = set()
    for name in reversed(graph._toposort_layers()):
        layer = graph.layers[name]
        own = dict(spans[name])
        if not own or isinstance(layer, TasksLayer):
            continue
        culled, needs = layer.cull(set(own), every)
        todo = list(own)
        while todo:
            key = todo.pop()
            todo += _widen(own, [dep for dep in needs[key] if dep in needs], own[key])
        tasks = culled if isinstance(culled, Blockwise) else convert_legacy_graph(dict(culled), every)
        has_made = tasks is culled or any(_is_made(task, every) for task in tasks.values())
        if not has_made or any(last - first > 1 for first, last in own.values()):
            continue
        for key, span in own.items():
            for dep in (dep for dep in needs[key] if dep not in needs):
                _widen(spans[_layer_of(dep)], [dep], span)
        copied.update(needs)
        copies[name] = StreamLayer(tasks, copied, suffix, layer.annotations)
    return copies


def _layer_of(key: Key) -> Key:
    return key[0] if isinstance(key, tuple) else key


def _widen(spans: dict[Key, Span], keys: Iterable[Key], span: Span) -> list[Key]:
    """Keep some keys from one wave to another one; return those that were not kept before."""
    changed = []
    for key in keys:
        before = spans.get(key, span)
        wide = min(before[0], span[0]), max(before[1], span[1])
        if key not in spans or wide != before:
            spans[key] = wide
            changed.append(key)
    return changed


def _is_made(task: GraphNode, every: Collection[Key]) -> bool:
    """Whether a node is a task or a part of an array; others are futures, which no layer has, and objects."""
    if isinstance(task, Alias):
        return task.target in every
    return not isinstance(task, DataNode) or isinstance(task.value, np.ndarray)


def _renamed(key: Key, suffix: str) -> Key:
    return (key[0] + suffix, *key[1:]) if isinstance(key, tuple) else f"{key}{suffix}"


# Chunks that ranks make


def self_contained(
    upstream: Mapping[Key, GraphNode], keys: Iterable[Key], *, trees: bool = False
) -> dict[Key, Task] | None:
    """Return tasks that make chunks from their sources, each a chain of tasks that no other chunk needs; else None.

    With `trees` a task of a chain may need several others.
    """
    tasks: dict[Key, Task] = {}
    taken: set[Key] = set()
    for key in keys:
        chain = _chain(upstream, key, most=len(upstream) if trees else 1)
        if chain is None or not taken.isdisjoint(chain.keys()):
            return None
        # A node that is not a task, for example an open store, is shared by all chunks.
        taken.update(name for name, node in list(chain.items())[1:] if isinstance(node, Task))
        last = next(iter(chain.values()))
        tasks[key] = Task.fuse(*chain.values(), key=last.key) if len(chain) > 1 else last
    return tasks


def _chain(upstream: Mapping[Key, GraphNode], key: Key, most: int) -> dict[Key, Any] | None:
    """Return the task that makes a chunk, those that it needs, and so on; with small data beside them.

    None where a task needs more than `most` others, or what is not in the graph: they would all be in memory at once.
    """
    chain: dict[Key, GraphNode] = {}
    todo = [key]
    while todo:
        task = upstream.get(todo.pop())
        if isinstance(task, Alias):
            chain |= {task.key: task} if chain else {}
            todo.append(task.target)
            continue
        if not isinstance(task, Task) or isinstance(task, RunTask):
            return None
        nodes = {name: upstream.get(name) for name in task.dependencies}
        computed = [name for name, node in nodes.items() if not isinstance(node, DataNode)]
        data = {name: node for name, node in nodes.items() if isinstance(node, DataNode)}
        if len(computed) > most or any(map(_has_data, (task, *data.values()))):
            return None
        chain |= {task.key: task} | data
        todo += (name for name in computed if name not in chain)
    return chain


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


def can_be_made(*arrays: Any, sampled: bool = False) -> bool:
    """Whether ranks can make all chunks of lazy Dask arrays: each of them by a chain of tasks of its own.

    Tasks with annotations are left to Dask, which knows what these mean. With `sampled` a few chunks are looked at, in
    a time that does not depend on how many there are.
    """
    keys = [key for array in arrays for key in _some_keys(array, sampled)]
    graph = HighLevelGraph.merge(*(array.dask for array in arrays))
    return not is_annotated(graph) and made_by_ranks(graph, keys) is not None


def tasks_of_chunks(array: Any) -> ChunkTasks | None:
    """Return the tasks by which ranks make the chunks of a lazy array, each a tree of its own; None if they can't."""
    keys = _some_keys(array, sampled=False)
    tasks = None if is_annotated(array.dask) else made_by_ranks(array.dask, keys, trees=True)
    return ChunkTasks([tasks[key] for key in keys]) if tasks is not None else None


def _some_keys(array: Any, sampled: bool) -> list[Any]:
    if not sampled:
        return list(flatten(array.__dask_keys__()))
    last = [count - 1 for count in array.numblocks]
    # A chunk that comes of the same task as another one is beside it.
    places = itertools.product(*({0, min(1, at), at} for at in last))
    return [(array.name, *place) for place in places]


def made_by_ranks(graph: HighLevelGraph, keys: Sequence[Any], *, trees: bool = False) -> dict[Any, Task] | None:
    """Return for some chunks the tasks by which ranks make them; None if they can't make all."""
    return self_contained(convert_legacy_graph(dict(optimize(graph, keys))), keys, trees=trees)


# Graphs


# A part of its own is worth a run if it saves this many floating-point operations.
_FLOPS_OF_A_RUN = 1e9
# A part of a product in waves is culled if it is at most this share of the work, and is made without waves if it needs
# less than this share of the memory of a worker.
_SHARE_OF_A_PART = 0.5
# How a worker without peers asks them: never.
_NO_PEERS: Any = SimpleNamespace(received_bytes=0)


@dataclasses.dataclass(frozen=True)
class DaskTasks:
    """The inputs of the choice whether Dask's own tasks make some chunks of D in place of runs."""

    workers: tuple[Worker, ...]
    engines: tuple[str, ...]
    costs: DaskCosts
    # The graphs of A and of B; None where chunks are in memory.
    upstream: tuple[HighLevelGraph | None, HighLevelGraph | None]

    def is_faster(self, problems: Sequence[Problem]) -> bool:
        """Whether they are expected to be over clearly before runs, one after the other, would be."""
        try:
            plans = [plan(problem, self.workers, engine=self.engines) for problem in problems]
        except ProjectedMemoryError:
            return True
        lazy = any(graph is not None for graph in self.upstream)
        plans = [with_tasks(plan, self.workers, self.costs, lazy=lazy) for plan in plans]
        own = self.costs.start + sum(plan.by_tasks.seconds - self.costs.start for plan in plans if plan.by_tasks)
        return own < CLEARLY * sum(plan.seconds for plan in plans)

    def tasks(self, whole: Problem, arrays: Mapping[str, str], wanted: Collection[Any]) -> dict[Any, GraphNode]:
        """Return Dask's own tasks for some chunks of D, given by their keys, with those that load what they need.

        Dask loads what one task needs within that task. Chunks that are in memory, that runs make, or that have
        annotations of their own are taken from other layers.
        """
        operands = []
        for number, name in enumerate("ab"):
            below, graph = arrays.get(name, arrays["a"]), self.upstream[number]
            ours = graph is None or any(isinstance(layer, TasksLayer) for layer in graph.layers.values())
            if graph is None or ours or is_annotated(graph):
                graph = HighLevelGraph({below: {}}, {below: set()})
            operand = whole[name]
            chunks = operand.chunks[:: -1 if operand.transposed else 1]
            x = Array(graph, below, chunks, dtype=dtype_from_name(operand.dtype))
            x = x.T if operand.transposed else x
            operands.append(x.conj() if operand.conjugated else x)
        d = matmul(*operands)
        keys = {(d.name, *at) for _, *at in wanted}
        # The other steps of Dask's optimizer come after this.
        graph = fuse_roots(optimize_blockwise(d.dask, keys=keys), keys=keys).cull(keys)
        tasks: dict[Any, GraphNode] = convert_legacy_graph(graph.to_dict())
        for key in wanted:
            tasks[key] = tasks.pop((d.name, *key[1:])).substitute({}, key=key)
        return tasks


class ProductLayer(TasksLayer):
    """The tasks of D and of its barriers; made only when they are looked at."""

    def __init__(
        self,
        whole: Problem,
        arrays: Mapping[str, str],
        wanted: Collection[int] | None = None,
        pieces: Sequence[Problem] = (),
        by_tasks: DaskTasks | None = None,
        scheme: Scheme | None = None,
        streams: Mapping[tuple[str, int], str] | HighLevelGraph | None = None,
    ) -> None:
        super().__init__()
        self.whole, self.arrays, self.by_tasks = whole, dict(arrays), by_tasks
        # The chunks of D that it is for, by their numbers, and the parts of the multiply that make them.
        self.wanted, self.pieces = range(whole.d.count) if wanted is None else wanted, tuple(pieces) or (whole,)
        # The waves in which a part is made; None: it is one run. And where the chunks that are streamed come from: the
        # names of copies by those of arrays and the numbers of visits, or the graph of which ranks make them.
        self.scheme, self.streams = scheme, streams or {}

    @functools.cached_property
    def runs(self) -> list[tuple[Problem, int]]:
        """The runs in their order, each with the number of its visit."""
        if self.scheme is None:
            return [(problem, 0) for problem in self.pieces]
        runs = []
        for problem in self.pieces:
            part = problem if problem.whole else None
            scheme = self.scheme if part is None else part_scheme(self.whole, self.scheme, part)
            waves = (wave_problem(self.whole, scheme, number, part) for number in range(scheme.count))
            runs += [(wave, scheme.visit(number)) for number, wave in enumerate(waves) if wave.m and wave.n]
        return runs

    def _made(self) -> dict[Any, Task] | None:
        """Return the tasks by which ranks make the chunks that are streamed; None if that can't be."""
        chunk_tasks: dict[Any, Task] = {}
        for operand in "ab":
            # Each operand by itself, as `can_be_made` looks at it: what both are made of is made for each.
            keys = {key for run, _ in self.runs if run[operand].by_ranks for key in self._inputs(run, operand)}
            if new := list(keys - chunk_tasks.keys()):
                tasks = made_by_ranks(self.streams, new)
                if tasks is None:
                    return None
                chunk_tasks |= tasks
        return chunk_tasks

    @functools.cached_property
    def _tasks(self) -> dict[Any, Task]:  # type: ignore[override]
        tasks: dict[Any, Task] = {}
        chunk_tasks, sums = self._made(), ""
        for run, visit in self.runs:
            problem = run if chunk_tasks is not None else run.made_by_ranks(())
            inputs: dict[str, Any] = {name: self._inputs(problem, name, visit, sums) for name in problem.inputs}
            if chunk_tasks is not None:
                inputs |= {name: ChunkTasks([chunk_tasks[key] for key in inputs[name]]) for name in problem.by_ranks}
            tasks[barrier_key(problem.name)] = barrier_task(problem, barrier, inputs)
            sums = problem.result_name
            tasks |= chunks_of(problem, "", self.wanted if sums == self.whole.name else None)
        return tasks

    def _inputs(self, problem: Problem, operand: str, visit: int = 0, sums: str = "") -> list[Any]:
        """Return the keys of an operand's chunks, in the order of their numbers in a problem."""
        matrix, name = problem[operand], sums if operand == "partial" else self.arrays.get(operand, self.arrays["a"])
        if self._is_streamed(operand) and isinstance(self.streams, dict):
            name = self.streams.get((name, visit), name)
        return [(name, *matrix.place(number)) for number in matrix.every.tolist()]

    def _is_streamed(self, operand: str) -> bool:
        return self.scheme is not None and operand in "ab" and self.scheme.streamed["ab".index(operand)]

    # Dask's interface of a layer

    def get_output_keys(self) -> set[Any]:
        """Return the keys that other layers may need: of chunks of D, and of the barriers for auxiliary outputs."""
        name, ncols = self.whole.name, self.whole.d.counts[1]
        return {(name, *divmod(number, ncols)) for number in self.wanted} | self._barriers

    @property
    def _barriers(self) -> set[str]:
        return {barrier_key(run.name) for run, _ in self.runs}

    def cull(self, keys: Collection[Any], all_hlg_keys: Collection[Any]) -> tuple[Layer, Mapping[Any, Collection[Any]]]:
        """Return a layer that makes only some chunks of D, and for each of its tasks the keys of other layers."""
        name, ncols = self.whole.name, self.whole.d.counts[1]
        own = {key for key in keys if isinstance(key, tuple) and len(key) == 3 and key[0] == name}
        barriers = self._barriers.intersection(keys)
        if not own and not barriers:
            return self, {}
        numbers = {int(i) * ncols + int(j) for _, i, j in own}
        # Auxiliary outputs need a barrier as it is.
        whole = bool(barriers) or len(numbers) == self.whole.d.count
        wanted, pieces, scheme = (self.wanted, self.pieces, self.scheme) if whole else self._part(numbers)
        part = ProductLayer(self.whole, self.arrays, wanted, pieces, scheme=scheme, streams=scheme and self.streams)
        layer: Layer = part
        if scheme is not None:
            layer, needs = TasksLayer.cull(part, own | barriers, all_hlg_keys)
        elif not whole and self.by_tasks is not None and self.by_tasks.is_faster(pieces):
            tasks = self.by_tasks.tasks(self.whole, self.arrays, own)
            layer, needs = TasksLayer(tasks), needs_of(tasks)
        else:
            needs = {key: set() for key in own}
            for problem in pieces:
                inputs = [part._inputs(problem, operand) for operand in problem.inputs]
                needs[barrier_key(problem.name)] = set().union(*inputs)
        layer.annotations, layer.collection_annotations = self.annotations, self.collection_annotations
        return layer, needs

    def _part(self, wanted: Collection[int]) -> tuple[Collection[int], Sequence[Problem], Scheme | None]:
        """Return some chunks of D, the parts that make them, and their waves: a small part needs none."""
        pieces = pieces_of(self.whole, wanted)
        if self.scheme is None:
            return wanted, pieces, None
        if sum(problem.flops for problem in pieces) > _SHARE_OF_A_PART * self.whole.flops:
            return self.wanted, self.pieces, self.scheme
        held = sum(problem[name].bytes.sum() for problem in pieces for name in "abd")
        least = self.scheme.budget_bytes * _SHARE_OF_A_PART
        return wanted, pieces, self.scheme if 0 < least <= held else None


def pieces_of(whole: Problem, wanted: Collection[int]) -> list[Problem]:
    """Return the runs that make some chunks of D with little work.

    They are one run of the least part that has all of them, or several of parts that have no row and no column of
    chunks in common, as the blocks on the diagonal of D, where that saves enough.
    """
    undivided = _piece(whole, wanted)
    ncols = whole.d.counts[1]
    by_row: dict[int, set[int]] = {}
    for number in wanted:
        by_row.setdefault(number // ncols, set()).add(number % ncols)
    groups: list[tuple[set[int], list[int]]] = []
    for row, cols in by_row.items():
        touching = [group for group in groups if group[0] & cols]
        groups = [group for group in groups if not group[0] & cols]
        groups.append((cols.union(*(x for x, _ in touching)), [row, *(r for _, rows in touching for r in rows)]))
    parts = [_piece(whole, [i * ncols + j for i in rows for j in by_row[i]]) for _, rows in groups]
    saved = undivided.flops - sum(part.flops for part in parts)
    return parts if len(parts) > 1 and saved > (len(parts) - 1) * _FLOPS_OF_A_RUN else [undivided]


def _piece(whole: Problem, wanted: Collection[int]) -> Problem:
    part = restrict(whole, wanted)
    return whole if part is None else dataclasses.replace(part, name=part_name(part))


def build_graph(
    problem: Problem,
    a: Any,
    b: Any,
    extras: Sequence[Any] = (),
    by_tasks: DaskTasks | None = None,
    scheme: Scheme | None = None,
) -> HighLevelGraph:
    """Return the graph of D under the array name ``problem.name``: of one run, or of waves."""
    operands = {"a": a, "b": b} | dict(zip(problem.operands[2:], extras, strict=True))
    arrays = {name: operands[name].name for name in problem.inputs}
    dependencies = [operands[name] for name in problem.inputs]
    layer = ProductLayer(problem, arrays, by_tasks=by_tasks, scheme=scheme)
    graph = HighLevelGraph.from_collections(problem.name, layer, dependencies=dependencies)
    if scheme is None:
        return graph
    streamed = [name for name in "ab" if layer._is_streamed(name)]
    upstream = HighLevelGraph.merge(*(operands[name].dask for name in streamed))
    if scheme.by_ranks:
        layer.streams = upstream
        return graph
    visits: dict[int, list[set[Any]]] = {}
    for run, visit in layer.runs:
        keys = (layer._inputs(run, name) for name in streamed)
        visits.setdefault(visit, []).append(set().union(*keys))
    loads, layer.streams = streams(upstream, visits, tokenize(problem.name)[:8])
    needs = graph.dependencies | loads.dependencies
    needs[problem.name] = needs[problem.name] | set(layer.streams.values())
    return HighLevelGraph({**graph.layers, **loads.layers}, needs)


def build_output(problem: Problem, output: str, d: Any) -> HighLevelGraph:
    """Return the graph of an auxiliary output: chunks that the same runs make."""
    runs = [run for run, _ in d.dask.layers[problem.name].runs if run.result_name == problem.name]
    tasks = {key: task for run in runs for key, task in chunks_of(run, output).items()}
    return HighLevelGraph.from_collections(output_name(problem.name, output), TasksLayer(tasks), dependencies=[d])


def chunks_of(problem: Computation, output: str, wanted: Collection[int] | None = None) -> dict[Any, Task]:
    """Return the tasks of an output's chunks that one run makes: of those with some numbers; None for all."""
    name, before, out = (output_name(problem.result_name, output), barrier_key(problem.name), problem.output(output))
    keys = {
        (name, *out.place(number)): index
        for index, number in enumerate(out.every.tolist())
        if wanted is None or number in wanted
    }
    return {key: ChunkTask(key, chunk, output, index, TaskRef(before)) for key, index in keys.items()}


# The tasks themselves, for where no scheduler's plugin takes them


def barrier(
    wire: dict[str, Any], *inputs: Sequence[Any] | ChunkTasks, is_isolated: bool = False, **waited_for: None
) -> dict[Any, Any]:
    """Multiply in this process, without a cluster; return the chunks of the result.

    On a worker it has the plugin installed on the scheduler, which takes this task then: a scheduler that was started
    again has lost it.
    """
    try:
        worker = get_worker()
        # A task on a worker may compute something by itself, without the cluster, and in threads of its own.
        is_isolated |= worker.active_threads.get(threading.get_ident()) != barrier_key(wire["name"])
    except ValueError:
        is_isolated = True
    if is_isolated:
        return _run_alone(problem_from_wire(wire), inputs)
    from distributed.protocol.pickle import dumps

    from dask_distmm.runtime.plugin import DistMMSchedulerPlugin

    # A scheduler that lacks something refuses it, by an error that names that.
    plugin = dumps(DistMMSchedulerPlugin())
    sync(worker.loop, worker.scheduler.register_scheduler_plugin, plugin=plugin, name=NAME, idempotent=True)
    raise Reschedule


def _run_alone(problem: Computation, inputs: Sequence[Sequence[Any] | ChunkTasks]) -> dict[Any, Any]:
    if (workers := problem.demand.workers) not in (None, 1):
        raise PlanError(
            f"workers={workers!r} was asked for, and this is computed without a cluster; compute it with a "
            "distributed.Client, or leave workers out"
        )
    sources = {
        name: [task() for task in source.tasks] if isinstance(source, ChunkTasks) else source
        for name, source in zip(problem.inputs, inputs, strict=True)
    }
    problem = problem.made_by_ranks(())
    operands = {
        name: [x.T if problem[name].transposed else x for x in sources[problem.source_of(name)]]
        for name in problem.operands
    }
    where = {name: np.zeros(len(chunks), np.int32) for name, chunks in operands.items()}
    placement: Placement
    if isinstance(problem, Problem):
        orders = order_of(operands["a"][0]), order_of(operands["b"][0])
        placement = plan(problem, [Worker("here")], where, engine=problem.engine_alone, orders=orders)
    else:
        placement = plan_computation(problem, [Worker("here")], where, engine=(problem.engine_alone,))
    chunks = check_chunks(placement, {(name, i): x for name, all_of in operands.items() for i, x in enumerate(all_of)})
    job = get_engine(placement.engine).job(Side(placement, 0, chunks, _NO_PEERS, ready=ready_event(chunks.values())))
    job.prepare()
    job.accept([job.offer])
    return arrays_of(problem, job.execute())


def chunk(output: str, index: int, result: Any, kept: Any = None) -> Any:
    """Return one chunk of D (``output=""``) or of an auxiliary output; on a cluster no worker runs this."""
    if not isinstance(result, dict):
        raise EngineError(f"chunk {index} is made by a run; this task can't run by itself")
    return result[output, index]


# The task graph of a factorization or a program: a barrier, which depends on all chunks of its operands, and outputs


def build_factor_graph(
    problem: FactorProblem | ProgramProblem, operands: Sequence[Any], own: Mapping[str, ChunkTasks]
) -> HighLevelGraph:
    """Return the graph of all outputs: a layer for the barrier, and one for each output, called after its array.

    `own` has the tasks of those operands whose chunks ranks compute.
    """
    before = barrier_key(problem.name)
    plain = {name: array for name, array in zip(problem.operands, operands, strict=True) if name not in own}
    inputs: dict[str, Any] = {name: list(flatten(array.__dask_keys__())) for name, array in plain.items()} | dict(own)
    run = TasksLayer({before: barrier_task(problem, barrier, inputs)})
    graph = HighLevelGraph.from_collections(before, run, dependencies=list(plain.values()))
    outputs = [output.name for output in problem.outputs]
    chunks = {output_name(problem.name, output): chunks_of(problem, output) for output in outputs}
    kept = List(*(TaskRef(key) for name in problem.kept for key in inputs[name]))
    for tasks in chunks.values() if problem.kept else ():
        # Of what two tasks wait for Dask keeps two copies, once there are two.
        first = next(iter(tasks))
        tasks[first] = ChunkTask(first, chunk, *tasks[first].args, kept=kept)
    layers = {name: TasksLayer(tasks) for name, tasks in chunks.items()}
    beside = {plain[name].name for name in problem.kept}
    dependencies = dict(graph.dependencies) | {name: {before, *beside} for name in layers}
    return HighLevelGraph({**graph.layers, **layers}, dependencies)
