"""Factorizations with a thread for each rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.config import read_options
from dask_distmm.engines.base import Engine, Job, Side
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs.blas import Kernels
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.planning.computation import NamedMatrix, Worker
from dask_distmm.planning.factor import Factorization, FactorPlacement, FactorProblem, as_matrix, block_width
from dask_distmm.testing import random_chunks, run_jobs


def factor_plan(
    task: Factorization, ranks: int, width: int = 0, *, engine: str = "numpy", shared: bool = False
) -> FactorPlacement:
    """Return a plan by which ranks compute all results, of chunks of any sizes that lie anywhere."""
    rng = np.random.default_rng()

    def cut(shape: tuple[int, ...]) -> Any:
        return tuple(random_chunks(rng, size, 4) for size in as_matrix(shape))

    chunks = {name: cut(shape) for name, shape in zip("ab", (task.a_shape, task.b_shape), strict=True) if shape}
    outputs = tuple(NamedMatrix(one.name, cut(one.shape), one.dtype) for one in task.outputs)
    matrices = tuple(NamedMatrix(name, sizes, task.dtype) for name, sizes in chunks.items())
    problem = FactorProblem(
        name="test", task=task, matrices=matrices, wanted=outputs, engine=engine, options=read_options()
    )
    counts = {name: len(rows) * len(cols) for name, (rows, cols) in chunks.items()}
    plan = FactorPlacement(
        problem=problem,
        engine=engine,
        method="columns" if ranks > 1 or shared else "local",
        participants=tuple(Worker(f"w{number}") for number in range(ranks + 1)),
        ranks=tuple(range(ranks)),
        where={name: rng.integers(0, ranks + 1, count).astype(np.int32) for name, count in counts.items()},
        width=width or block_width(task, ranks, shared=shared),
        owners={},
    )
    holders = {one.name: plan.holders if plan.output_layout(one.name) is None else range(ranks) for one in outputs}
    owners = {one.name: rng.choice(holders[one.name], one.count).astype(np.int32) for one in outputs}
    plan = dataclasses.replace(plan, owners=owners)
    plan.check()
    return plan


class _OnKernels(Engine):
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def job(self, side: Side[Any]) -> Job[Any]:
        return ProgramJob(side, self._kernels)


def run_factorization(
    plan: FactorPlacement, a: NDArray[Any], b: NDArray[Any] | None = None, *, kernels: Kernels | None = None
) -> dict[str, NDArray[Any]]:
    """Run a plan with a thread for each rank; return all results by name.

    `kernels` is the arithmetic; None for NumPy's.
    """
    parts: dict[tuple[str, int], NDArray[Any]] = {}
    for matrix, x in zip(plan.problem.matrices, (a, b), strict=False):
        assert x is not None
        name, (rows, cols) = matrix.name, matrix.chunks
        across = (np.split(some, np.cumsum(cols)[:-1], axis=1) for some in np.split(x, np.cumsum(rows)[:-1]))
        parts |= {(name, number): part for number, part in enumerate(part for some in across for part in some)}
    found = run_jobs(_OnKernels(kernels or LapackKernels()), plan, parts)
    results = {}
    for one, output in zip(plan.problem.outputs, plan.task.outputs, strict=True):
        count = one.counts[1]
        blocks = [[found[one.name, i * count + j] for j in range(count)] for i in range(one.counts[0])]
        results[one.name] = np.block(blocks).reshape(output.shape)
    return results
