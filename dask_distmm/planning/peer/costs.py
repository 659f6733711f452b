"""Device memory and time that a run of the engine `peer` takes. Pure.

The estimate of a way is::

    seconds  = max(multiply, pulls) + exposed * pulls + start + end + latency
    multiply = max over ranks of flops / rate
    pulls    = max over ranks of bytes from others / bandwidth
    start    = bytes that must arrive before the first GEMM, if the rank has none of its operands / bandwidth
    end      = the last partial sums and chunks of D / bandwidth, and passes over D / memory bandwidth
    latency  = 4 messages (2 for a rank that is alone), 2 more for sums of others, 1 where several ranks pull parts of
               both A and B, 0.75 each time that twice as many chunks are pulled: as two H200 took for small products;
               0.5 more on a grid of two dimensions, where a rank has less of both A and B (`benchmarks.gpu.model`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dask_distmm.planning.cuts import pieces_that_fill, slowdown
from dask_distmm.planning.footprint import chunk_bytes, is_by_ranks, spread, upload_seconds
from dask_distmm.planning.peer.block_schedule import (
    BlockSchedule,
    block_schedules,
    blocks,
    extent_multiple,
    in_place,
    multiplied_sizes,
    native,
    peer_reads,
    stored_again,
    sums_in,
)
from dask_distmm.planning.peer.streams import rate, streams
from dask_distmm.planning.peer.triangle import square_on_diagonal
from dask_distmm.planning.placement import Estimate
from dask_distmm.planning.plan import Plan, Rect

# Latency beside the work of a run, in messages: see the formula for `latency` above.
_ALONE, _TOGETHER, _SUMS, _BOTH, _TWICE_AS_MANY, _GRID = 2.0, 4.0, 2.0, 1.0, 0.75, 0.5


def project(plan: Plan) -> dict[str, int]:
    """Return the projected bytes of device memory that a run takes at its peak, by the address of each participant.

    Counted are chunks of A and B (also in the type in which they are multiplied) unless they are read from host memory,
    buffers, the sums, and D; of operands whose chunks ranks make themselves those that are there at a time.
    """
    problem, npart = plan.problem, len(plan.participants)
    total = np.zeros(npart)
    for operand, given in zip("ab" * (not plan.from_host), multiplied_sizes(problem), strict=False):
        if is_by_ranks(problem, operand):
            continue
        own = problem.itemsize(operand)
        sizes = chunk_bytes(problem, operand)
        converted = sizes // own * given if given != own else 0 * sizes
        sizes = converted if operand == "b" and problem.shared else sizes + converted
        total += spread(plan, operand, sizes)
    copied = np.array([worker.address.startswith("ucx") for worker in plan.participants])
    if copied.any():
        # Chunks that others read are copied into memory that UCX does not map: see the engine's `memory`.
        for name, read in peer_reads(plan, [name for name in "ab" if name in plan.where]).items():
            given = multiplied_sizes(problem)["ab".index(name)]
            total += copied * (read @ chunk_bytes(problem, name)) / problem.itemsize(name) * given
    # Inputs of the formula count as spread evenly; each rank has copies of the parts that its chunks need.
    total += sum(float(chunk_bytes(problem, extra.name).sum()) for extra in problem.extras) * 2 / npart
    found = block_schedules(plan)
    sums = sums_in(plan, found).itemsize
    stored = stored_again(plan, found, sums)
    buffers = [one.buffer_bytes for one in found] or [one.bytes for one in streams(plan)]
    if not found:
        # All that they need of an operand that they do not make is there from the start.
        total[list(plan.ranks)] += [_bytes_of(plan, rank, made=False) for rank in range(len(plan.ranks))]
    for rank, index in enumerate(plan.ranks):
        total[index] += buffers[rank]
        lying = in_place(plan, rank)
        total[index] += sum(map(_area, blocks(plan, rank))) * sums
        owned = [plan.chunk_rect(number) for number in plan.owned(rank).tolist()]
        total[index] += sum(_area(rect) for rect in owned if rect not in lying) * sums
        if stored:
            area = sum(map(_area, owned))
            total[index] += area * problem.itemsize("d") * (2 if problem.formula.saved else 1)
        if plan.grid[2] > 1:
            final = sum(map(_area, plan.final_rects(rank))) * sums
            total[index] += 2 * min(final, problem.options.buffer_bytes // 4)
    return {worker.address: int(total[i]) for i, worker in enumerate(plan.participants)}


def _area(rect: Rect) -> int:
    return (rect[1] - rect[0]) * (rect[3] - rect[2])


def estimate(
    plan: Plan, needed: NDArray[np.float64], home: NDArray[np.float64], delivered: NDArray[np.float64]
) -> Estimate:
    """Return the estimate of a plan, by the formulas at the top of this module."""
    problem, machine = plan.problem, plan.problem.options.machine("peer")
    ranks, s = range(len(plan.ranks)), plan.grid[2]
    found = block_schedules(plan)
    sums = sums_in(plan, found).itemsize
    epilog = native(plan, found)
    area = np.array([_multiplied(plan, rank, epilog) for rank in ranks], float)
    depth = np.array([np.diff(plan.k_range(rank))[0] for rank in ranks], float)
    compute = problem.flops * area * depth / (problem.m * problem.n * problem.k) / rate(plan)
    if extent_multiple(problem) == 1:
        compute *= slowdown(problem, in_chunks=True)
    if any(problem.by_ranks) and problem.array == "numpy" and machine.host_bandwidth:
        # Chunks are copied to the GPU while others are multiplied.
        uploaded = [_uploaded(plan, rank, one.made) for rank, one in enumerate(streams(plan))]
        compute = np.maximum(compute, np.array(uploaded) / machine.host_bandwidth)

    final = np.array([sum(map(_area, plan.final_rects(rank))) for rank in ranks], float)
    # What ranks make is nobody's.
    needed = needed - [_bytes_of(plan, rank, made=True) for rank in ranks]
    away = 1 - home / np.maximum(needed, 1.0)
    pulled = needed - home
    bandwidth = machine.bandwidth
    if plan.from_host:
        # All comes from host memory, at the rate of the host's bus.
        away, pulled, bandwidth = np.ones(len(ranks)), needed, machine.host_bandwidth or bandwidth
    partial, begin = (s - 1) * final * sums, pulled / bandwidth
    if found:
        again = np.array([len(one.parts) - 1 for one in found])
        streamed = np.array([_streamed_bytes(plan, rank, found[rank].stationary) for rank in ranks])
        pulled = pulled + away * (again - 1) * streamed
        # The first GEMM needs one piece of the stationary part and one piece of a panel.
        cut = np.array([pieces_that_fill(problem, one.parts[1] - one.parts[0], one.width) for one in found])
        begin = away**2 * np.array([one.stationary_bytes + one.panel_bytes for one in found]) / cut / bandwidth
    last = (partial / max(1, s - 1) + delivered * sums) / machine.bandwidth
    copied = 3.0 * partial + 2.0 * _passes(plan, found, sums) * sums
    end = last + copied / machine.memory_bandwidth
    between = bandwidth / machine.bandwidth
    pulls = (pulled + between * partial * (s > 1) * (s - 2) / max(1, s - 1)) / bandwidth
    exposed = dict(machine.exposed).get(plan.method, 1.0)
    moving = np.maximum(pulls - compute, 0.0) + exposed * pulls + begin + end
    worst, upload = int(np.argmax(compute + moving)), upload_seconds(plan)
    chunks = max((one.others for one in found), key=sum, default=(0.0, 0.0))
    several, messages = len(plan.ranks) > 1, _ALONE
    if several or any(chunks):
        messages = _TOGETHER + _SUMS * (s > 1) + _BOTH * (several and all(chunks))
        messages += _TWICE_AS_MANY * math.log2(max(1.0, sum(chunks))) + _GRID * (min(plan.grid[:2]) > 1)
    return Estimate(
        method=plan.method,
        grid=plan.grid,
        seconds=float((compute + moving)[worst]) + messages * machine.latency + upload,
        compute_seconds=float(compute[worst]),
        transfer_seconds=float(moving[worst]) + upload,
        bytes_moved=int((pulled + partial + delivered * sums).sum()),
        peak_bytes=max(plan.projected_bytes.values()),
    )


def _multiplied(plan: Plan, rank: int, epilog: str | None) -> int:
    """Return the elements of D that a rank multiplies."""
    triangle = square_on_diagonal(plan, rank, epilog)
    return _area(plan.region(rank)) - (sum(map(_area, triangle.copied())) if triangle is not None else 0)


def _elements(plan: Plan, rank: int) -> tuple[float, float]:
    """Elements of a rank's parts of A and of B."""
    (r0, r1, c0, c1), (k0, k1) = plan.region(rank), plan.k_range(rank)
    return float(r1 - r0) * (k1 - k0), float(k1 - k0) * (c1 - c0)


def _uploaded(plan: Plan, rank: int, operands: Sequence[int]) -> float:
    """Bytes of a rank's parts of some operands as they are made."""
    return sum(_elements(plan, rank)[operand] * plan.problem.itemsize("ab"[operand]) for operand in operands)


def _bytes_of(plan: Plan, rank: int, *, made: bool) -> float:
    """Bytes of a rank's parts of operands: of those that it makes as they are made, of others as multiplied."""
    problem = plan.problem
    sizes = (problem.itemsize("a"), problem.itemsize("b")) if made else multiplied_sizes(problem)
    every = zip(_elements(plan, rank), sizes, problem.by_ranks, strict=True)
    return sum(count * size for count, size, by_rank in every if by_rank == made)


def _streamed_bytes(plan: Plan, rank: int, stationary: int) -> float:
    """Bytes of a rank's part of the streamed operand."""
    (r0, r1, c0, c1), (k0, k1) = plan.region(rank), plan.k_range(rank)
    return float(
        ((c1 - c0) if stationary == 0 else (r1 - r0)) * (k1 - k0) * multiplied_sizes(plan.problem)[1 - stationary]
    )


def _passes(plan: Plan, found: Sequence[BlockSchedule], sums: int) -> NDArray[np.float64]:
    """Elements of D that each rank copies once more: from its sums to its chunks, and to store these."""
    stored = stored_again(plan, found, sums)
    elements = []
    for rank in range(len(plan.ranks)):
        lying = in_place(plan, rank)
        owned = [plan.chunk_rect(number) for number in plan.owned(rank).tolist()]
        elements.append(sum(_area(rect) * (stored + (rect not in lying)) for rect in owned))
    return np.array(elements, float)
