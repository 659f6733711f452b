"""Which chunks participants read of each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dask_distmm.planning.footprint import chunk_bytes, is_by_ranks
from dask_distmm.planning.placement import EVERYWHERE
from dask_distmm.planning.plan import Plan


def peer_reads(plan: Plan, names: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """Return for each operand the chunks of each participant that other participants read."""
    problem, found = plan.problem, {}
    mine = np.arange(len(plan.participants))[:, None]
    for name in names:
        sizes = problem.chunks_of(name)
        if name in ("a", "b"):
            reads = np.zeros((len(plan.participants), len(sizes[0]), len(sizes[1])), bool)
            for rank, index in enumerate(plan.ranks):
                reads[index] |= _reads(plan, rank, name)
            flat = reads.reshape(len(reads), -1)
            needed = flat.sum(0) > flat
        else:
            # Any rank may need any chunk of an input of the formula: the owners of D's chunks are not looked at.
            needed = np.ones(1, bool)
        if plan.from_host and name in ("a", "b"):
            needed = np.zeros(1, bool)  # they are not on GPUs
        if is_by_ranks(problem, name):
            found[name] = np.zeros((len(plan.participants), len(chunk_bytes(problem, name))), bool)
            continue
        found[name] = needed & (np.asarray(plan.where[name]) == mine) & (chunk_bytes(problem, name) > 0)
    return found


def others_chunks(plan: Plan, rank: int) -> tuple[float, float]:
    """Return the numbers of chunks of A and of B that a rank reads and another participant has.

    Chunks in host memory count as those of others. The numbers are averages, and no whole numbers, if the plan does not
    know where the chunks are.
    """

    def count(name: str) -> float:
        reads, where, me = _reads(plan, rank, name).ravel(), plan.where.get(name), plan.ranks[rank]
        if plan.from_host:
            return float(reads.sum())
        if where is None:
            return float(reads.sum()) * (1 - 1 / len(plan.participants))
        return float((reads & (where != me) & (where != EVERYWHERE)).sum())

    return count("a"), count("b")


def _reads(plan: Plan, rank: int, name: str) -> NDArray[np.bool_]:
    """Return, by row and column of chunks, whether a rank multiplies a part of a chunk of A or B."""
    (r0, r1, c0, c1), depth = plan.region(rank), plan.k_range(rank)
    part = ((r0, r1), depth) if name == "a" else (depth, (c0, c1))
    rows, cols = (_touched(axis, *cut) for axis, cut in zip(plan.problem.chunks_of(name), part, strict=True))
    found: NDArray[np.bool_] = np.logical_and.outer(rows, cols)
    return found


def _touched(sizes: Sequence[int], start: int, stop: int) -> NDArray[np.bool_]:
    """Whether each chunk along an axis overlaps a part of the axis."""
    ends: NDArray[np.int64] = np.cumsum(sizes)
    found: NDArray[np.bool_] = (ends > start) & (ends - np.asarray(sizes) < stop)
    return found


def independent(plan: Plan) -> bool:
    """Whether each rank can make its own chunks of D from the chunks that are offered before the run starts.

    If a rank of such a run dies, the other ranks still finish theirs, and the missing chunks of D are computed as a
    problem of their own.
    """
    problem = plan.problem
    whole = not any(problem.distributions) and problem.grid is None
    kept = bool(plan.replicas) or any(plan.replica_runs)
    offered = plan.engine == "peer" and len(plan.participants) > 1 and not plan.from_host
    return offered and plan.grid[2] == 1 and whole and not kept
