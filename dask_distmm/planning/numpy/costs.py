"""Seconds and bytes of a run whose operands come in panels over Dask's comms, while BLAS works on those before. Pure.

::

    seconds = compute + transfer + messages * latency
    compute = max over ranks of  flops / (rate * threads)  +  packed bytes / memory bandwidth
    transfer = max over ranks of  received bytes / bandwidth  +  added-up bytes / memory bandwidth
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import ChunkGrid, redistribution
from dask_distmm.planning.footprint import chunk_bytes, is_by_ranks, panel_width, spread
from dask_distmm.planning.placement import Estimate
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import goes_on, is_gram

# The share of the operations that is left of a symmetric product.
_HALF = 0.55


def estimate(
    made: Plan, needed: NDArray[np.float64], home: NDArray[np.float64], delivered: NDArray[np.float64]
) -> Estimate:
    """Apply the formulas at the top of this module."""
    problem, machine = made.problem, made.problem.options.machine(made.engine)
    p, q, s = made.grid
    nranks = len(made.ranks)
    threads = np.array([made.participants[index].nthreads for index in made.ranks])
    regions = np.array([made.region(rank) for rank in range(nranks)])
    kranges = np.array([made.k_range(rank) for rank in range(nranks)])
    height, width, k = regions[:, 1] - regions[:, 0], regions[:, 3] - regions[:, 2], np.diff(kranges)[:, 0]
    itemsize = problem.compute_type.itemsize

    flops = problem.flops * (height / problem.m) * (width / problem.n) * (k / problem.k)
    packed = (made.packing.a * height * k + made.packing.b * k * width + made.packing.d * height * width) * itemsize
    # Complex operands that are packed are two matrices.
    apart = problem.compute_type.kind == "c" and (made.packing.a or made.packing.b)
    half = is_gram(problem) and p == q == 1 and problem.out_chunks[0] == problem.out_chunks[1] and not apart
    if half:
        # A triangle of D is multiplied, and what is A's and B's arrives once.
        flops, needed, home = _HALF * flops, needed / 2, home / 2
    compute = flops / (machine.rate(problem.compute_type.name) * threads) + packed / machine.memory_bandwidth

    finals = [made.final_rects(rank) for rank in range(nranks)]
    final = np.array([sum((r[1] - r[0]) * (r[3] - r[2]) for r in rects) for rects in finals], float)
    added = (s - 1) * final * itemsize
    arriving = delivered * problem.itemsize("d")
    received = needed - home + added + arriving
    panels = max(-(-int(k[r]) // panel_width(problem, made.region(r), int(k[r]))) for r in range(nranks))
    messages = 4 + (min(panels, 2) + (s > 1) + bool(arriving.any())) * (len(made.participants) > 1)
    transfer = float(np.max(received / machine.bandwidth + added / machine.memory_bandwidth))
    compute_seconds = float(compute.max())
    return Estimate(
        method=made.method,
        grid=(p, q, s),
        seconds=compute_seconds + transfer + messages * machine.latency,
        compute_seconds=compute_seconds,
        transfer_seconds=transfer,
        bytes_moved=int(received.sum()),
        peak_bytes=max(made.projected_bytes.values()),
    )


def project(plan: Plan) -> dict[str, int]:
    """Return the projected bytes that a run holds at its peak, for each participant.

    Counted are: chunks of A and B there, what the rank sums into, its chunks of D, panels in flight, packed
    panels, and partial sums of others. Not counted is what the worker holds anyway for other tasks.
    """
    problem, npart = plan.problem, len(plan.participants)
    lying = np.zeros(npart)
    for operand in "a" if problem.shared else "ab":
        lying += spread(plan, operand, chunk_bytes(problem, operand))

    # Where these lie is not looked at; the parts of them that a rank fetches are chunks' parts, one at a time.
    inputs = [extra.name for extra in problem.extras if extra.name != "partial"]
    lying += sum(float(chunk_bytes(problem, name).sum()) for name in inputs) / npart

    total = lying.copy()
    compute = problem.compute_type.itemsize
    chunk_of = chunk_bytes(problem, "d")
    owned = np.bincount(plan.owners, chunk_of, len(plan.ranks))
    if problem.formula.saved:
        owned *= 2
    begun = np.zeros(len(plan.ranks))
    if problem.formula.partial and not goes_on(problem):
        # Else the earlier sums become the chunks of D.
        begun += np.bincount(plan.owners, chunk_bytes(problem, "partial"), len(plan.ranks))
    kept = _elements_kept(plan)
    for rank, index in enumerate(plan.ranks):
        r0, r1, c0, c1 = plan.region(rank)
        k0, k1 = plan.k_range(rank)
        total[index] += (r1 - r0) * (c1 - c0) * compute + begun[rank]
        if plan.grid[2] > 1:
            # Another rank's partial sum of the part that is added up here, and the finished chunks.
            total[index] += sum((f[1] - f[0]) * (f[3] - f[2]) for f in plan.final_rects(rank)) * compute
            total[index] += owned[rank]
        elif plan.packing.d:
            total[index] += owned[rank]
        else:
            # Chunks are summed into in place; parts of them that others compute come on top.
            total[index] += max(0.0, owned[rank] - kept[rank] * problem.itemsize("d"))
        if any(problem.by_ranks):
            # All that it needs of the other operand is there from the start.
            total[index] += sum(
                extent * (k1 - k0) * problem.itemsize(name)
                for name, extent in (("a", r1 - r0), ("b", c1 - c0))
                if not is_by_ranks(problem, name)
            )
            continue
        width = panel_width(problem, (r0, r1, c0, c1), k1 - k0)
        panel = width * ((r1 - r0) + (c1 - c0)) * compute
        if plan.packing.a:
            total[index] += width * (r1 - r0) * compute
        if plan.packing.b:
            total[index] += width * (c1 - c0) * compute
        if len(plan.participants) > 1:
            # In flight towards this rank, and one on its way out.
            flights = min(problem.options.prefetch_panels + 1, -(-(k1 - k0) // width))
            total[index] += (flights + 1) * panel * (1 - 1 / len(plan.participants))
    return {worker.address: int(total[i]) for i, worker in enumerate(plan.participants)}


def _elements_kept(plan: Plan) -> NDArray[np.int64]:
    """Elements of D that each rank both computes and holds in the end (where no sums are added up)."""
    if plan.grid[2] > 1:
        return np.zeros(len(plan.ranks), np.int64)
    regions = ChunkGrid((tuple(np.diff(plan.rows).tolist()), tuple(np.diff(plan.cols).tolist())))
    moved = redistribution(ChunkGrid(plan.problem.out_chunks), regions).traffic(plan.owners, len(plan.ranks))
    return np.asarray(np.diagonal(moved))
