"""Blocks of D one after the other, for operands in host memory and a D that does not fit on the GPUs. Pure.

A block is one run over all of k: the ranks read A's rows and B's columns from host memory while they multiply
(`Plan.from_host`), and the block of D goes to host memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from dask_distmm.config import DaskCosts
from dask_distmm.errors import PlanError, ProjectedMemoryError
from dask_distmm.planning.dask_tasks import product_overhead
from dask_distmm.planning.demand import Worker
from dask_distmm.planning.engines import abilities_of
from dask_distmm.planning.planner import plan
from dask_distmm.planning.problem import Problem
from dask_distmm.planning.waves.edges import BLOCKS, common_edges, grouped
from dask_distmm.planning.waves.scheme import Scheme, Wave, wave_problem

# Blocks are planned for this share of what a worker may hold: whole chunks of D are shared out by where A and B lie,
# which may be less even than here.
_SHARE = 0.75


def in_host_memory(problem: Problem, engine: str | Sequence[str]) -> bool:
    """Whether chunks are in host memory, and the engines that may multiply work in the memory of GPUs."""
    names = [engine] if isinstance(engine, str) else engine
    return problem.array == "numpy" and all(one.on_gpus for one in abilities_of(names))


def in_host(worker: Worker) -> Worker:
    """Return a worker with its host memory in place of that of its GPU."""
    return dataclasses.replace(worker, memory_limit=worker.host_limit, used=0)


def choose_blocks(
    problem: Problem, workers: Sequence[Worker], costs: DaskCosts, engine: str | Sequence[str]
) -> Scheme | None:
    """Return the blocks that read the fewest bytes, of those that fit on the GPUs; None if none do."""
    names = [one.name for one in abilities_of([engine] if isinstance(engine, str) else engine) if one.reads_host]
    some = [dataclasses.replace(worker, memory_limit=int(_SHARE * worker.memory_limit)) for worker in workers]
    sizes = problem.m * problem.k * problem.itemsize("a"), problem.k * problem.n * problem.itemsize("b")
    edges = common_edges(problem, "m"), common_edges(problem, "n")
    counts = [sorted({min(len(along) - 1, count) for count in BLOCKS}) for along in edges]
    ways = [way for way in itertools.product(*counts) if way != (1, 1)]
    for rows, cols in sorted(ways, key=lambda way: (sizes[0] * way[1] + sizes[1] * way[0], way)):
        cuts = (itertools.pairwise(grouped(*one)) for one in zip(edges, (rows, cols), strict=True))
        blocks = enumerate(itertools.product(*cuts))
        waves = tuple(Wave(down, across, (0, problem.k), True, True, visit) for visit, (down, across) in blocks)
        read = sizes[0] * cols + sizes[1] * rows
        how = "host", waves, (False, False), False, problem.method
        scheme = Scheme(*how, problem.options.panel_bytes, problem.options.buffer_bytes, read, 0.0, 0.0, 0, 0)
        areas = [np.prod([stop - start for start, stop in (wave.rows, wave.cols)]) for wave in waves]
        try:
            made = plan(wave_problem(problem, scheme, int(np.argmax(areas))), some, engine=names)
        except (PlanError, ProjectedMemoryError):
            continue
        machine, fraction = problem.options.machine(made.engine), problem.options.limit_fraction
        seconds = made.estimate.compute_seconds if made.estimate else 0.0
        return dataclasses.replace(
            scheme,
            method=made.method,
            read_seconds=read / (len(made.ranks) * (machine.host_bandwidth or machine.bandwidth)),
            run_seconds=seconds * float(sum(areas) / max(areas)) + len(waves) * product_overhead(made.problem, costs),
            peak_bytes=max(made.projected_bytes.values()),
            budget_bytes=int(min(worker.memory_limit for worker in workers) * fraction),
        )
    return None
