"""The task graph of a factorization: one barrier, which depends on all chunks of its operands, and its outputs' chunks.

On a cluster no worker runs any of these tasks, as for products (`graph.build`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from dask._task_spec import List, TaskRef
from dask.highlevelgraph import HighLevelGraph

from dask_distmm.graph.build import RunTask, barrier, chunk
from dask_distmm.planning.factor.computation import FactorProblem
from dask_distmm.runtime.keys import barrier_key, output_name


def build_factor_graph(problem: FactorProblem, operands: Sequence[Any]) -> HighLevelGraph:
    """Return the graph of all outputs: a layer for the barrier, and one for each output, called after its array."""
    before = barrier_key(problem.name)
    inputs = []
    for name, array in zip(problem.operands, operands, strict=True):
        nrows, ncols = problem.chunk_counts(name)
        places = itertools.product(range(nrows), range(ncols))
        inputs.append(List(*(TaskRef((array.name, i, j)) for i, j in places)))
    layers: dict[str, Any] = {before: {before: RunTask(before, barrier, problem.to_wire(), *inputs)}}
    for output in problem.outputs:
        name, (nrows, ncols) = output_name(problem.name, output.name), output.counts
        layers[name] = {
            (name, i, j): RunTask((name, i, j), chunk, output.name, i * ncols + j, TaskRef(before))
            for i, j in itertools.product(range(nrows), range(ncols))
        }
    graph = HighLevelGraph.from_collections(before, layers.pop(before), dependencies=list(operands))
    dependencies = dict(graph.dependencies) | {name: {before} for name in layers}
    return HighLevelGraph({**graph.layers, **layers}, dependencies)
