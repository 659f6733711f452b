"""One key, one task: what a new graph asks for that the scheduler has already, from a graph of other parts of D.

A chunk of D has one key, whichever chunks are wanted with it; the barrier that it depends on is that of a part of the
multiply. The layer of D, which makes the parts, knows no other graph. So a new graph is looked at where the scheduler
takes it up, with all its tasks:

- a chunk that is there, or that a run is to make, stays with the barrier that it has;
- the others of its part become a part of their own, which needs no more inputs than they do;
- a chunk that is known, and that nobody waits for, goes to the barrier of the new graph;
- a task of Dask's own, which Dask fuses with others in one graph and not in another, stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from dask._task_spec import GraphNode

from dask_distmm.runtime import direct
from dask_distmm.runtime.keys import ChunkTask
from dask_distmm.runtime.parts import needed, restricted

if TYPE_CHECKING:
    from distributed.scheduler import TaskState


def reconcile(
    tasks: Mapping[Any, TaskState], graph: dict[Any, GraphNode], keys: Collection[Any], order: dict[Any, int]
) -> list[TaskState]:
    """Change a new graph, and known tasks, so that each key has one task; return tasks that lost a dependent."""
    chunks = {key: task for key, task in graph.items() if isinstance(task, ChunkTask)}
    # Dask's own tasks may make chunks of D, in a new graph as in one before.
    if not chunks and not any(isinstance(tasks[key].run_spec, ChunkTask) for key in graph.keys() & tasks.keys()):
        return []
    known = {
        key: ts
        for key, task in graph.items()
        if (ts := tasks.get(key)) is not None
        and isinstance(ts.run_spec, GraphNode)
        and ts.run_spec.dependencies != task.dependencies
    }
    kept = {key: ts.run_spec for key, ts in known.items() if key not in chunks or ts.state != "released"}
    left: dict[Any, dict[Any, ChunkTask]] = {chunks[key].barrier: {} for key in kept if key in chunks}
    for key, task in chunks.items():
        if key not in kept and task.barrier in left:
            left[task.barrier][key] = task
    graph |= kept
    for barrier, others in left.items():
        if others and barrier in graph:
            part = restricted(graph[barrier], others)
            order |= {key: order[barrier] for key in part if key not in order and barrier in order}
            graph |= part
    for key in graph.keys() - needed(graph, keys).keys() if known else ():
        del graph[key]
    lost: list[TaskState] = []
    for key, ts in known.items():
        if key not in kept and key in graph and graph[key].dependencies != ts.run_spec.dependencies:
            lost += direct.forget_run_spec(ts)
    return lost
