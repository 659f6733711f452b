"""Traced functions on several ranks of this process, checked before they run."""

from __future__ import annotations

from unittest import mock

import dask.array as da
import numpy as np
from conformance import run_jobs
from proof import check

from dask_distmm.arrays.jit import Jitted
from dask_distmm.engines.base import get_engine
from dask_distmm.engines.programs import job
from dask_distmm.planning import program
from dask_distmm.planning.computation import Worker
from dask_distmm.planning.program import ProgramPlacement, plan_program
from dask_distmm.programs.steps import messages_to_all
from dask_distmm.tracing.control import flattened, nested


def plan_of(problem, ranks, rng):
    """Return a plan on several ranks, whose chunks lie anywhere."""
    count = len(problem["a"].chunks[0])
    where = {}
    for name in problem.operands:
        holders = np.resize(rng.permutation(ranks + 1), max(count, problem[name].count))
        where[name] = rng.permutation(holders)[: problem[name].count].astype(np.int32)
    workers = [Worker(f"w{number}") for number in range(ranks + 1)]
    with mock.patch.object(program, "_WORTH_MOVING", np.inf):
        plan = plan_program(problem, workers[:ranks], where, engine="numpy", sources=workers[ranks:])
    assert ProgramPlacement.from_wire(plan.to_wire()).to_wire() == plan.to_wire()
    return plan


def compiled(fun, *args, **kwargs):
    """Return a function with its arguments as a problem and its operands."""
    jitted = fun if isinstance(fun, Jitted) else Jitted(fun, ())
    return jitted.compiled(*jitted.bound(args, kwargs))


def on_ranks(fun, *args, ranks=3, checked=True, **kwargs):
    """Return what a function makes of Dask and NumPy arrays, from a run on ranks of this process."""
    found = compiled(fun, *args, **kwargs)
    plan = plan_of(found.problem, ranks, np.random.default_rng())
    lists = [plan.steps(rank) for rank in range(len(plan.ranks))]
    if checked:
        check(lists)
        first, *others = (messages_to_all(steps, len(lists)) for steps in lists)
        assert all(one == first for one in others)
    chunks = {}
    for matrix, array in zip(found.problem.matrices, found.arrays, strict=True):
        rows = np.cumsum([0, *matrix.chunks[0]])
        whole = array.compute(scheduler="sync")
        chunks |= {(matrix.name, i): whole[rows[i] : rows[i + 1]] for i in range(matrix.counts[0])}
    # Turns are written out from the first or the second one on.
    with mock.patch.object(job, "_BY_STEPS", ranks % 2):
        made = run_jobs(get_engine("numpy"), plan, chunks)

    def result(problem, arrays, made_by_ranks):
        outputs = []
        for output in problem.outputs:
            parts = [made[output.name, i] for i in range(output.count)]
            array = np.concatenate(parts)
            array = array.reshape([n for axis, n in enumerate(output.shape) if axis in output.axes])
            chunks = [sizes for axis, sizes in enumerate(output.chunks) if axis in output.axes]
            outputs.append(da.from_array(array, chunks=chunks))
        return outputs

    with mock.patch("dask_distmm.arrays.jit.program_arrays", result):
        leaves, tree = flattened(found.results())
    return nested([x.compute(scheduler="sync") if isinstance(x, da.Array) else x for x in leaves], tree)
