"""Factorizations with a thread for each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.config import read_options
from dask_distmm.engines.base import Engine, Job, Side
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs.blas import Kernels
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.planning.computation import NamedMatrix, Worker
from dask_distmm.planning.factor import FactorPlacement, FactorPlan, FactorProblem, as_matrix
from dask_distmm.testing import random_chunks, run_jobs


class _OnKernels(Engine):
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def job(self, side: Side[Any]) -> Job[Any]:
        return ProgramJob(side, self._kernels)


def run_factorization(
    plan: FactorPlan, a: NDArray[Any], b: NDArray[Any] | None = None, *, kernels: Kernels | None = None
) -> dict[str, NDArray[Any]]:
    """Run a plan with a thread for each rank, on chunks of any sizes that lie anywhere; return all results by name.

    `kernels` is the arithmetic; None for NumPy's.
    """
    rng, task = np.random.default_rng(), plan.problem

    def cut(shape: tuple[int, ...]) -> Any:
        return tuple(random_chunks(rng, size, 4) for size in as_matrix(shape))

    given = dict(zip(task.inputs, (a, b), strict=False))
    chunks = {name: cut(x.shape) for name, x in given.items()}
    outputs = tuple(NamedMatrix(one.name, cut(one.shape), one.dtype) for one in task.outputs)
    dtypes = dict.fromkeys(given, task.dtype)
    problem = FactorProblem("test", task, chunks, dtypes, outputs, "numpy", None, read_options())
    where, parts = {}, {}
    for name, x in given.items():
        rows, cols = chunks[name]
        where[name] = rng.integers(0, plan.ranks + 1, len(rows) * len(cols)).astype(np.int32)
        parts |= {(name, number): part for number, part in enumerate(_cut(x, rows, cols))}
    holders = {one.name: range(plan.ranks) if plan.output_layout(one.name) else plan.holders for one in task.outputs}
    made = FactorPlacement(
        problem=problem,
        engine="numpy",
        method="columns",
        participants=tuple(Worker(f"w{number}") for number in range(plan.ranks + 1)),
        ranks=tuple(range(plan.ranks)),
        where=where,
        width=plan.width,
        owners={one.name: rng.choice(holders[one.name], one.count).astype(np.int32) for one in outputs},
    )
    made.check()
    # In place of the plan that an engine would have.
    made.__dict__["work"] = plan
    found = run_jobs(_OnKernels(kernels or LapackKernels()), made, parts)
    results = {}
    for one, output in zip(outputs, task.outputs, strict=True):
        count = one.counts[1]
        rows = [[found[one.name, i * count + j] for j in range(count)] for i in range(one.counts[0])]
        results[one.name] = np.block(rows).reshape(output.shape)
    return results


def _cut(x: NDArray[Any], rows: tuple[int, ...], cols: tuple[int, ...]) -> list[NDArray[Any]]:
    """Return the chunks of a matrix in C order."""
    return [part for some in np.split(x, np.cumsum(rows)[:-1]) for part in np.split(some, np.cumsum(cols)[:-1], axis=1)]
