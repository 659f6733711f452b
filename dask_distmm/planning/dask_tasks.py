"""The seconds that Dask takes around a run, and those of its own tasks for the same product. Pure.

::

    around a run    run + chunk * chunks of A, B and D
    Dask's tasks    start + task * tasks  +  compute + transfer
    tasks           I J K products of chunks, and for K > 1 the sums of each chunk of D
    compute         rounds of products, one on each thread at a time, and the sums
    transfer        each worker gets what it lacks of the smaller operand, and its share of the partial products
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from dask_distmm.config import DaskCosts, Machine
from dask_distmm.planning.demand import Worker
from dask_distmm.planning.placement import Estimate
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import Problem

# Of so many partial products Dask makes one sum.
_SUMMED = 4


def product_overhead(problem: Problem, costs: DaskCosts) -> float:
    """Return the seconds that Dask takes around a run; it knows nothing of chunks that ranks make."""
    made = {name for name, yes in zip("ab", problem.by_ranks, strict=True) if yes}
    names = (*(name for name in problem.inputs if name not in made and (name != "b" or not problem.shared)), "d")
    return costs.run + costs.chunk * sum(math.prod(problem.chunk_counts(name)) for name in names)


def product_by_tasks(problem: Problem, workers: Sequence[Worker], machine: Machine, costs: DaskCosts) -> Estimate:
    """Return what the product would take as Dask's own tasks; the formulas are at the top of this module."""
    count, threads = len(workers), sum(worker.nthreads for worker in workers)
    rows, cols = len(problem.a_chunks[0]), len(problem.b_chunks[1])
    edges = [set(itertools.accumulate(sizes)) for sizes in (problem.a_chunks[1], problem.b_chunks[0])]
    depth = len(edges[0] | edges[1])
    products = rows * cols * depth
    sums = rows * cols * math.ceil(max(0, depth - 1) / (_SUMMED - 1))
    # Where A and B are cut differently along k, one of them is cut again.
    again = products if edges[0] != edges[1] else 0
    a_bytes, b_bytes = problem.itemsize("a") * problem.m * problem.k, problem.itemsize("b") * problem.k * problem.n
    d_bytes = problem.itemsize("d") * problem.m * problem.n
    rounds = math.ceil(products / threads)
    compute = rounds * problem.flops / products / machine.rate(problem.compute_type.name)
    compute += (depth > 1) * depth * d_bytes / count / machine.memory_bandwidth
    foreign = 1 - 1 / count
    partial = (depth > 1) * depth * d_bytes * foreign / count
    received = foreign * min(a_bytes, b_bytes) * (1 + bool(again)) + partial
    transfer = received / (machine.dask_bandwidth or machine.bandwidth)
    tasks = products + sums + again
    kept = 1 + (depth > 1) * min(depth, _SUMMED)
    held = (a_bytes + b_bytes + kept * d_bytes) / count + received
    return Estimate(
        method="dask",
        grid=(rows, cols, depth),
        seconds=costs.start + tasks * costs.task + compute + transfer,
        compute_seconds=compute,
        transfer_seconds=transfer,
        bytes_moved=int(received * count),
        peak_bytes=int(held),
    )


def with_tasks(made: Plan, workers: Sequence[Worker], costs: DaskCosts, *, lazy: bool, by_tasks: bool = True) -> Plan:
    """Return a plan with the seconds that Dask takes around its run, and unless nobody asks those of its own tasks."""
    problem = made.problem
    around = product_overhead(problem, costs) + lazy * costs.start
    own = product_by_tasks(problem, workers, problem.machine_of_tasks(made.engine), costs) if by_tasks else None
    return dataclasses.replace(made, around=around, by_tasks=own)
