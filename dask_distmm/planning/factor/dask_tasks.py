"""The seconds that Dask takes around a factorization's run, and those of its own tasks for the same. Pure.

::

    around a run    run + chunk * chunks of operands and outputs
    Dask's tasks    start + task * tasks  +  compute + transfer
    tasks           of b x b blocks: (b-2)(b-1)b/6 products of blocks of a Cholesky factorization, b(b-1)/2 of a
                    triangular one for each column of blocks of the right-hand sides; a few for each block besides
    compute         at the same share of a product's rate as a run, on all threads that have work
    transfer        each worker gets the blocks that it lacks, and of every partial product its share; of a triangular
                    system only parts of the right-hand sides
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dask_distmm.config import DaskCosts, Machine
from dask_distmm.planning.demand import Worker
from dask_distmm.planning.factor.phases import factored
from dask_distmm.planning.factor.planner import SHARES
from dask_distmm.planning.factor.problem import FactorProblem
from dask_distmm.planning.placement import Estimate
from dask_distmm.planning.program import ProgramProblem

# LAPACK's QR of a chunk, as NumPy calls it, runs at this share of a product's rate; each chunk takes so many tasks.
_QR_SHARE, _QR_TASKS = 0.25, 6


def program_by_tasks(
    problem: ProgramProblem, workers: Sequence[Worker], machine: Machine, costs: DaskCosts
) -> Estimate:
    """Return what Dask's own tasks would take for a program: QR of each chunk, and of all R; of `cov` a product."""
    rows, cols = (sum(sizes) for sizes in problem.chunks["a"])
    chunks, threads = len(problem.chunks["a"][0]), sum(worker.nthreads for worker in workers)
    flops = 4 * (rows + chunks * cols) * cols**2 * (4 if problem.dtype.kind == "c" else 1)
    compute = flops / (machine.rate(problem.compute_type) * min(threads, chunks) * _QR_SHARE)
    if problem.builder == "cov":
        # Means, differences and their transposes are read and written beside the product.
        compute = compute * _QR_SHARE / 2 + 4 * rows * cols * problem.dtype.itemsize / machine.memory_bandwidth
    moved = chunks * cols**2 * problem.dtype.itemsize
    transfer = moved / (machine.dask_bandwidth or machine.bandwidth)
    seconds = costs.start + chunks * _QR_TASKS * costs.task + compute + transfer
    return Estimate("dask", (chunks, 1, 1), seconds, compute, transfer, moved, 0)


def factor_overhead(problem: FactorProblem | ProgramProblem, costs: DaskCosts) -> float:
    """Return the seconds that Dask takes around a run."""
    given = sum(math.prod(problem.chunk_counts(name)) for name in problem.operands)
    return costs.run + costs.chunk * (given + sum(output.count for output in problem.outputs))


def factor_by_tasks(problem: FactorProblem, workers: Sequence[Worker], machine: Machine, costs: DaskCosts) -> Estimate:
    """Return what Dask's own tasks would take; the formulas are at the top of this module."""
    blocks, (rows, cols) = len(problem.chunks[0][0]), problem.task.a_shape
    name, right, columns = factored(problem.task), 0, 0
    if problem.task.b_shape is not None:
        right, columns = len(problem.chunks[1][1]), problem.task.b_shape[1]
    if name == "qr":
        # Q and R of each chunk; R of all of these R; its Q in parts, and their products with the first Q.
        products, others, elements = blocks, 4 * blocks, cols * cols
    else:
        triangles = right * (2 if name else 1)
        products = triangles * blocks * (blocks - 1) // 2
        if name:
            products += (blocks - 2) * (blocks - 1) * blocks // 6 + blocks * (blocks - 1) // 2
        others = (2 * blocks * blocks if name else 0) + triangles * blocks
        elements = rows // blocks * (cols // blocks if name else -(-columns // right))
    threads = sum(worker.nthreads for worker in workers)
    compute = problem.flops / (machine.rate(problem.task.dtype) * min(threads, blocks) * SHARES[name])
    moved = (1 - 1 / len(workers)) * (products * elements + rows * cols * (name == "cholesky")) * problem.dtype.itemsize
    transfer = moved / len(workers) / (machine.dask_bandwidth or machine.bandwidth)
    return Estimate(
        method="dask",
        grid=(blocks, blocks, blocks),
        seconds=costs.start + (products + others) * costs.task + compute + transfer,
        compute_seconds=compute,
        transfer_seconds=transfer,
        bytes_moved=int(moved),
        peak_bytes=0,
    )
