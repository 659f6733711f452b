"""The task graph of a factorization or a program: a barrier, which depends on all chunks of its operands, and outputs.

On a cluster no worker runs any of these tasks, as for products (`graph.build`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dask._task_spec import List, TaskRef
from dask.highlevelgraph import HighLevelGraph

from dask_distmm.engines.sources import ChunkTasks
from dask_distmm.graph.build import TasksLayer, barrier, output_tasks
from dask_distmm.planning.factor.problem import FactorProblem
from dask_distmm.planning.program import ProgramProblem
from dask_distmm.runtime.keys import RunTask, barrier_key, output_name


def build_factor_graph(
    problem: FactorProblem | ProgramProblem, operands: Sequence[Any], made: Mapping[str, ChunkTasks]
) -> HighLevelGraph:
    """Return the graph of all outputs: a layer for the barrier, and one for each output, called after its array.

    `made` has the tasks of those operands whose chunks ranks make.
    """
    before = barrier_key(problem.name)
    inputs: list[Any] = []
    for name, array in zip(problem.operands, operands, strict=True):
        nrows, ncols = problem.chunk_counts(name)
        places = itertools.product(range(nrows), range(ncols))
        inputs.append(made.get(name) or List(*(TaskRef((array.name, i, j)) for i, j in places)))
    run = TasksLayer({before: RunTask(before, barrier, problem.to_wire(), *inputs)})
    given = [array for name, array in zip(problem.operands, operands, strict=True) if name not in made]
    graph = HighLevelGraph.from_collections(before, run, dependencies=given)
    layers = {
        name: TasksLayer(output_tasks(name, output.name, output.counts, before))
        for output in problem.outputs
        for name in [output_name(problem.name, output.name)]
    }
    dependencies = dict(graph.dependencies) | {name: {before} for name in layers}
    return HighLevelGraph({**graph.layers, **layers}, dependencies)
