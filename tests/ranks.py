"""Programs on several ranks of this process."""

from __future__ import annotations

from unittest import mock

import numpy as np
from conformance import run_jobs
from matrices import problem_of

from dask_distmm.engines.base import get_engine
from dask_distmm.planning import program
from dask_distmm.planning.computation import Worker
from dask_distmm.planning.program import ProgramPlacement, plan_program


def on_ranks(results, arrays, ranks=3):
    """Return arrays that one program makes, from a run on several ranks whose chunks lie anywhere.

    The operands of a traced function have its own names, in the order of its arguments.
    """
    rng, problem = np.random.default_rng(), problem_of(results[0])
    if problem.builder == "traced":
        arrays = dict(zip(problem.operands, arrays.values(), strict=True))
    rows = problem["a"].chunks[0]
    where = {}
    for name in problem.operands:
        where[name] = rng.permutation(np.resize(rng.permutation(ranks + 1), len(rows))).astype(np.int32)
    workers = [Worker(f"w{number}") for number in range(ranks + 1)]
    # A small matrix would go to one of them.
    with mock.patch.object(program, "_WORTH_MOVING", np.inf):
        plan = plan_program(problem, workers[:ranks], where, engine="numpy", sources=workers[ranks:])
    assert len(plan.ranks) == ranks or len(rows) <= ranks
    assert ProgramPlacement.from_wire(plan.to_wire()).to_wire() == plan.to_wire()
    cuts = np.cumsum([0, *rows])
    chunks = {(name, i): array[cuts[i] : cuts[i + 1]] for name, array in arrays.items() for i in range(len(rows))}
    found = run_jobs(get_engine("numpy"), plan, chunks)
    made = {}
    for output in problem.outputs:
        numbers = range(output.count)
        made[output.name] = np.concatenate(
            [found[output.name, number] for number in numbers], axis=0 if output.counts[0] > 1 else 1
        )
    return made
