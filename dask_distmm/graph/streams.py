"""The chunks of operands as streams: loaded for a wave, not before its turn, and dropped after it. Pure.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef

Key = Any
# Arrays of more bytes are not sent about with tasks.
_SMALL = 2**16
_Waves = dict[int, tuple[int, int]]  # by visit: the first and the last wave that need a task


@dataclasses.dataclass(frozen=True)
class Streams:
    """The result of `stream`."""

    # Tasks with names of their own.
    tasks: dict[Key, GraphNode]
    # For each wave, the names of its chunks by the names that they have in the operand.
    names: list[dict[Key, Key]]


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
    return Streams(tasks, names)


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
