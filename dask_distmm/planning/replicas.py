"""All of D, or of an operand, on every worker besides its chunks: what that costs a plan. Pure."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from dask_distmm.planning.engines import ENGINES
from dask_distmm.planning.footprint import chunk_bytes, spread
from dask_distmm.planning.needs import gathered_bytes
from dask_distmm.planning.plan import Plan

# Between GPUs chunks of so many bytes travel by themselves, smaller ones packed: in one vector to each rank.
ALONE_BYTES = 2**16


def with_replicas(made: Plan, count: int) -> Plan:
    """Return a plan after whose run the first `count` participants keep all of `Plan.kept`, with estimate and memory.

    Each gets the chunks that it lacks from those who have them.
    """
    if not made.kept:
        return made
    found = [
        _result_replicas(made, count) if matrix == "d" else _operand_replicas(made, matrix, count)
        for matrix in made.kept
    ]
    held, moved = (np.sum(sizes, axis=0) for sizes in zip(*found, strict=True))
    projected = {
        worker.address: made.projected_bytes[worker.address] + int(size)
        for worker, size in zip(made.participants, held, strict=True)
    }
    assert made.estimate is not None
    machine = made.problem.options.machine(made.engine)
    seconds = float(moved.max()) / machine.bandwidth
    estimate = dataclasses.replace(
        made.estimate,
        seconds=made.estimate.seconds + seconds + (machine.latency if seconds else 0.0),
        transfer_seconds=made.estimate.transfer_seconds + seconds,
        bytes_moved=made.estimate.bytes_moved + int(moved.sum()),
        peak_bytes=max(projected.values()),
    )
    return dataclasses.replace(made, replicas=count, projected_bytes=projected, estimate=estimate)


def _result_replicas(made: Plan, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bytes that each participant holds, and gets, more than without replicas of D."""
    sizes = chunk_bytes(made.problem, "d")
    missing = np.full(len(made.participants), float(sizes.sum()))
    missing[list(made.ranks)] -= np.bincount(made.owners, sizes, len(made.ranks))
    missing[count:] = 0
    held = missing.copy()
    engine = ENGINES[made.engine]
    if engine.all_reduced(made):
        missing[list(made.ranks)] = 0
    elif engine.collective:
        small = np.where(sizes < ALONE_BYTES, sizes, 0)
        own = np.bincount(made.owners, small, len(made.ranks))
        # A vector to each other rank, and one from it.
        held[list(made.ranks)] += own * (len(made.ranks) - 1) + (small.sum() - own)
    return held, missing


def _operand_replicas(made: Plan, operand: str, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bytes that each participant holds, and gets, more than without replicas of A or B."""
    sizes = chunk_bytes(made.problem, operand)
    held = np.maximum(sizes.sum() - spread(made, operand, sizes), 0.0)
    held[count:] = 0
    moved = held.copy()
    if ENGINES[made.engine].keeps_gathered:
        moved[list(made.ranks)] -= gathered_bytes(made, operand)
    return held, np.maximum(moved, 0.0)
