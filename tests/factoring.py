"""Factorizations with a thread for each rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from conformance import random_chunks, run_jobs
from numpy.typing import NDArray

from dask_distmm.config import read_options
from dask_distmm.engines.base import Engine, Job, Side
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs.blas import HALVED, Kernels
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.numeric.types import dtype_from_name, round_tf32
from dask_distmm.planning.computation import NamedMatrix, Worker
from dask_distmm.planning.factor import FactorPlacement, FactorProblem, block_width, plan_factorization
from dask_distmm.programs.factorizations import Factorization, as_matrix


def factor_problem(task: Factorization, **how: Any) -> FactorProblem:
    """Return a factorization, with all results, whose matrices are in chunks of any sizes."""
    rng = np.random.default_rng()

    def cut(shape: tuple[int, ...]) -> Any:
        return tuple(random_chunks(rng, size, 4) for size in as_matrix(shape))

    few, n = "complex64" if task.dtype[0] == "c" else "float32", task.a_shape[0]
    kinds = {"a": (task.a_shape, task.dtype), "b": (task.b_shape, task.dtype)}
    kinds |= {"f": (task.a_shape, few), "p": ((1, n), "int32")}
    matrices = tuple(NamedMatrix(name, cut(kinds[name][0] or ()), kinds[name][1]) for name in task.inputs)
    outputs = tuple(NamedMatrix(one.name, cut(one.shape), one.dtype) for one in task.outputs)
    how = {"options": read_options()} | how
    return FactorProblem(name="test", task=task, matrices=matrices, wanted=outputs, **how)


def random_holders(problem: FactorProblem, workers: int) -> dict[str, NDArray[np.int32]]:
    """Return for each chunk of the operands one of so many workers."""
    rng = np.random.default_rng()
    return {one.name: rng.integers(0, workers, one.count).astype(np.int32) for one in problem.matrices}


def factor_plan(
    task: Factorization, ranks: int, width: int = 0, *, engine: str = "numpy", shared: bool = False
) -> FactorPlacement:
    """Return a plan by which ranks compute all results, of chunks of any sizes that lie anywhere."""
    rng = np.random.default_rng()
    problem = factor_problem(task, engine=engine)
    plan = FactorPlacement(
        problem=problem,
        engine=engine,
        method="columns" if ranks > 1 or shared else "local",
        participants=tuple(Worker(f"w{number}") for number in range(ranks + 1)),
        ranks=tuple(range(ranks)),
        where=random_holders(problem, ranks + 1),
        width=width or block_width(task, ranks, shared=shared),
        owners={},
    )
    outputs = problem.wanted
    holders = {one.name: plan.holders if plan.output_layout(one.name) is None else range(ranks) for one in outputs}
    owners = {one.name: rng.choice(holders[one.name], one.count).astype(np.int32) for one in outputs}
    plan = dataclasses.replace(plan, owners=owners)
    plan.check()
    return plan


def planned(task: Factorization, workers: int, *, engine: str, sources: int = 0, **how: Any) -> FactorPlacement:
    """Return the plan of some workers, as the planner makes it and they get it, of chunks that lie anywhere."""
    problem = factor_problem(task, engine=engine, **how)
    where = random_holders(problem, workers + sources)
    roster, others = (
        [Worker(f"{letter}{number}") for number in range(n)] for letter, n in (("w", workers), ("s", sources))
    )
    made = plan_factorization(problem, roster, where, engine=engine, sources=others)
    return FactorPlacement.from_wire(made.to_wire())


def _rounded(x: NDArray[Any], compute: str) -> NDArray[Any]:
    """Return a matrix whose elements have as many bits as tensor cores read."""
    parts = []
    for part in (x.real, x.imag) if x.dtype.kind == "c" else (x,):
        copy = np.array(part, np.float32)
        if compute == HALVED:
            high = (64 * copy).astype(np.float16).astype(np.float32)
            parts.append((high + (64 * copy - high).astype(np.float16)) / np.float32(64))
            continue
        if compute == "tf32":
            round_tf32(copy)
        parts.append(copy.astype(dtype_from_name(compute.replace("tf32", "float32"))).astype(np.float32))
    return np.asfortranarray((parts[0] + 1j * parts[1] if len(parts) > 1 else parts[0]).astype(x.dtype))


class NarrowKernels(LapackKernels):
    """LAPACK, with products of few bits, as GPUs have them."""

    def gemm(self, a: Any, b: Any, c: Any, *ops: str, compute: str = "", **factors: float) -> None:
        if compute:
            assert c.dtype.name in ("float32", "complex64")
            a, b = _rounded(a, compute), _rounded(b, compute)
        super().gemm(a, b, c, *ops, **factors)


class _OnKernels(Engine):
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def job(self, side: Side[Any]) -> Job[Any]:
        return ProgramJob(side, self._kernels)


def run_factorization(
    plan: FactorPlacement, *matrices: NDArray[Any] | None, kernels: Kernels | None = None
) -> dict[str, NDArray[Any]]:
    """Run a plan with a thread for each rank, of matrices in the order of the task; return all results by name.

    `kernels` is the arithmetic; None for NumPy's.
    """
    found = run_plan(_OnKernels(kernels or LapackKernels()), plan, *(x for x in matrices if x is not None))
    return {one.name: found[one.name].reshape(one.shape) for one in plan.task.outputs}


def run_plan(engine: Any, plan: FactorPlacement, *matrices: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Run a plan with a thread for each rank; return all results as matrices by name.

    Chunks lie in any memory order, and must not change.
    """
    rng, parts = np.random.default_rng(), dict[tuple[str, int], NDArray[Any]]()
    for matrix, x in zip(plan.problem.matrices, matrices, strict=True):
        name, (rows, cols) = matrix.name, matrix.chunks
        across = (np.split(some, np.cumsum(cols)[:-1], axis=1) for some in np.split(x, np.cumsum(rows)[:-1]))
        every = enumerate(part for some in across for part in some)
        parts |= {(name, number): part.copy(order=rng.choice(["C", "F"])) for number, part in every}
    before = {key: part.copy() for key, part in parts.items()}
    found, results = run_jobs(engine, plan, parts), {}
    for key, part in parts.items():
        np.testing.assert_array_equal(part, before[key])
    for one in plan.problem.outputs:
        count = one.counts[1]
        blocks = [[np.asarray(found[one.name, i * count + j]) for j in range(count)] for i in range(one.counts[0])]
        results[one.name] = np.block(blocks)
        assert results[one.name].dtype == one.dtype
    return results
