"""The layers of graphs that every computation has: tasks that are made late, and chunks that come from their sources.

A streamed operand's chunks are loaded for a wave and dropped after it. Dask makes them in the layers that lead to the
operand, which are copied under names of their own once for each visit of a stream, so that no chunk stays in memory
because something else needs it too::

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
import functools
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from dask import graph_manipulation
from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef, convert_legacy_graph
from dask.array.optimization import optimize
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer

from dask_distmm.engines.sources import ChunkTasks
from dask_distmm.runtime.keys import ChunkTask, RunTask, barrier_name, copied_key, copied_name, needed, restricted

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
