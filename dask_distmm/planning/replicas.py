"""All of D on every worker besides its chunks: what that costs a plan. Pure."""

from __future__ import annotations

import dataclasses

import numpy as np

from dask_distmm.planning.engines import ENGINES
from dask_distmm.planning.memory import chunk_bytes
from dask_distmm.planning.plan import Plan

__all__ = ["ALONE_BYTES", "with_replicas"]

# Between GPUs chunks of so many bytes travel by themselves, smaller ones packed: in one vector to each rank.
ALONE_BYTES = 2**16


def with_replicas(made: Plan, count: int) -> Plan:
    """Return a plan after whose run the first `count` participants keep all of D, with its estimate and memory.

    Each gets what it does not own itself, from those who own it.
    """
    sizes = chunk_bytes(made.problem, "d")
    missing = np.full(len(made.participants), sizes.sum())
    missing[list(made.ranks)] -= np.bincount(made.owners, sizes, len(made.ranks)).astype(np.int64)
    missing[count:] = 0
    held = missing.copy()
    engine = ENGINES[made.engine]
    if engine.all_reduced(made):
        missing[list(made.ranks)] = 0
    elif engine.collective:
        small = np.where(sizes < ALONE_BYTES, sizes, 0)
        own = np.bincount(made.owners, small, len(made.ranks)).astype(np.int64)
        # A vector to each other rank, and one from it.
        held[list(made.ranks)] += own * (len(made.ranks) - 1) + (small.sum() - own)
    projected = {
        worker.address: made.projected_bytes[worker.address] + int(size)
        for worker, size in zip(made.participants, held, strict=True)
    }
    assert made.estimate is not None
    machine = made.problem.options.machine(made.engine)
    seconds = float(missing.max()) / machine.bandwidth
    estimate = dataclasses.replace(
        made.estimate,
        seconds=made.estimate.seconds + seconds + (machine.latency if seconds else 0.0),
        transfer_seconds=made.estimate.transfer_seconds + seconds,
        bytes_moved=made.estimate.bytes_moved + int(missing.sum()),
        peak_bytes=max(projected.values()),
    )
    return dataclasses.replace(made, replicas=count, projected_bytes=projected, estimate=estimate)
