"""The seconds that Dask takes around a run, and the work of its own tasks for the same. Pure.

Dask adds a fixed time to each run, and more for each chunk of operands and outputs; to a graph of its own tasks a fixed
time, and more for each task. Of b x b blocks a Cholesky factorization has (b-2)(b-1)b/6 products of blocks, a
triangular system b(b-1)/2 for each column of blocks of its right-hand sides, and a few other tasks for each block.
Each worker gets what it lacks of the smaller operand and its share of partial products; of a triangular system only
parts of the right-hand sides.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from dask_distmm.config import DaskCosts, Machine
from dask_distmm.planning.computation import Computation, Worker
from dask_distmm.planning.factor import FactorProblem
from dask_distmm.planning.model import EngineModel, Estimate, Phase, Work, estimate
from dask_distmm.planning.placement import P
from dask_distmm.planning.problem import Problem
from dask_distmm.planning.program import ProgramProblem

# Number of partial products of which Dask makes one sum.
_SUMMED = 4
# LAPACK's QR of a chunk, as NumPy calls it, runs at this share of a product's rate; and tasks for each chunk.
_QR_SHARE, _QR_TASKS = 0.25, 6


def run_overhead(problem: Computation, costs: DaskCosts) -> float:
    """Return the seconds that Dask adds to a run; chunks that ranks compute are unknown to it."""
    names = [name for name in problem.inputs if not (problem[name].by_ranks or (name == "b" and problem.shared))]
    inputs = sum(problem[name].count for name in names)
    return costs.run + costs.chunk * (inputs + sum(output.count for output in problem.outputs))


def with_tasks(plan: P, workers: Sequence[Worker], costs: DaskCosts, *, lazy: bool = False, by_tasks: bool = True) -> P:
    """Return a plan with Dask's overhead, and with `by_tasks` the estimate for its own tasks."""
    problem = plan.problem
    around = run_overhead(problem, costs) + lazy * costs.start
    own = tasks_estimate(problem, workers, problem.machine_of_tasks(plan.engine), costs) if by_tasks else None
    return dataclasses.replace(plan, around=around, by_tasks=own)


def tasks_estimate(problem: Any, workers: Sequence[Worker], machine: Machine, costs: DaskCosts) -> Estimate:
    """Estimate the time of Dask's own tasks for a computation."""
    kinds: dict[str, Callable[..., _Tasks]] = {"product": _product, "factorization": _factor, "program": _program}
    threads = sum(worker.nthreads for worker in workers)
    grid, tasks, own, received, moved, held = kinds[problem.kind](problem, len(workers), threads, machine)
    phases = [own, Phase(waited={"dask": received})]
    work = Work(phases, seconds=costs.start + tasks * costs.task, moved=moved)
    return estimate(work, machine, "dask", grid, held)


# Numbers of blocks and of tasks; what a worker computes; bytes that a worker receives, that all move, a worker holds.
_Tasks = tuple[tuple[int, int, int], int, Phase, float, float, float]


def _product(problem: Problem, count: int, threads: int, machine: Machine) -> _Tasks:
    rows, cols = len(problem.a.chunks[0]), len(problem.b.chunks[1])
    edges = [set(itertools.accumulate(sizes)) for sizes in (problem.a.chunks[1], problem.b.chunks[0])]
    depth = len(edges[0] | edges[1])
    products = rows * cols * depth
    sums = rows * cols * math.ceil(max(0, depth - 1) / (_SUMMED - 1))
    # Where A and B are cut differently along k, one of them is cut again.
    again = products if edges[0] != edges[1] else 0
    a_bytes, b_bytes = problem.a.itemsize * problem.m * problem.k, problem.b.itemsize * problem.k * problem.n
    d_bytes = problem.d.itemsize * problem.m * problem.n
    flops = math.ceil(products / threads) * problem.flops / products
    added = (depth > 1) * depth * d_bytes / count
    received = (1 - 1 / count) * (min(a_bytes, b_bytes) * (1 + bool(again)) + added)
    held = (a_bytes + b_bytes + (1 + (depth > 1) * min(depth, _SUMMED)) * d_bytes) / count + received
    own = Phase(flops, machine.rate(problem.compute_type.name), added)
    return (rows, cols, depth), products + sums + again, own, received, received * count, held


def _program(problem: ProgramProblem, count: int, threads: int, machine: Machine) -> _Tasks:
    """QR of each chunk, and of all R; or products."""
    (rows, cols), chunks, dtype = problem["a"].shape, problem["a"].counts[0], problem.compute_type
    size = dtype.itemsize
    flops, tasks = 4 * (rows + chunks * cols) * cols**2 * (4 if dtype.kind == "c" else 1), _QR_TASKS
    rate, touched, moved = machine.rate(problem.dtype) * min(threads, chunks), 0.0, chunks * cols**2
    if problem.builder == "svd_compressed":
        # Products by narrow matrices, QR of the last one, and the products that make U.
        width, passes = problem.options_of_builder["width"], 2 + 2 * problem.options_of_builder["iterations"]
        flops, tasks = rows * width * (2 * passes * cols + 6 * width), 2 * passes + 2 * _QR_TASKS
        touched, moved = float(passes * rows * cols * size), chunks * passes * cols * width
    elif problem.builder == "cov":
        # Means, differences and their transposes are read and written beside the product.
        flops, touched = flops // 2, 4.0 * rows * cols * size
    else:
        rate *= _QR_SHARE
    return (chunks, 1, 1), chunks * tasks, Phase(flops, rate, touched), moved * size, moved * size, 0.0


def _factor(problem: FactorProblem, count: int, threads: int, machine: Machine) -> _Tasks:
    blocks, (rows, cols) = problem["a"].counts[0], problem.task.a_shape
    name, right, columns = problem.task.factored, 0, 0
    if problem.task.b_shape is not None:
        right, columns = problem["b"].counts[1], problem.task.b_shape[1]
    if name == "qr":
        # Q and R of each chunk; R of all of these R; its Q in parts, and their products with the first Q.
        products, small_tasks, elements = blocks, 4 * blocks, cols * cols
    else:
        triangles = right * (2 if name else 1)
        products = triangles * blocks * (blocks - 1) // 2
        if name:
            products += (blocks - 2) * (blocks - 1) * blocks // 6 + blocks * (blocks - 1) // 2
        small_tasks = (2 * blocks * blocks if name else 0) + triangles * blocks
        elements = rows // blocks * (cols // blocks if name else -(-columns // right))
    moved = (1 - 1 / count) * (products * elements + rows * cols * (name == "cholesky"))
    moved *= problem.compute_type.itemsize
    rate = machine.rate(problem.task.dtype) * min(threads, blocks) * EngineModel.shares[name][0]
    own = Phase(problem.flops, rate)
    return (blocks, blocks, blocks), products + small_tasks, own, moved / count, moved, 0.0
