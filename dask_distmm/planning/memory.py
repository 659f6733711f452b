"""What a plan would take in memory, before anything moves.

`packing` decides which operands are copied into contiguous panels: BLAS works on chunks as they lie, F- or
C-ordered, unless they are small or have another type than is computed in. `project` adds up the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import ChunkGrid, redistribution
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.cuts import Bounds
from dask_distmm.planning.plan import Packing, Plan, Rect, everywhere
from dask_distmm.planning.problem import Problem

__all__ = ["chunk_bytes", "operand_grids", "packing", "panel_width", "project", "spread"]

# A panel of k narrower than this keeps BLAS from its speed.
_LEAST_WIDTH = 384


def packing(problem: Problem, cuts: tuple[Bounds, Bounds, Bounds]) -> Packing:
    """Decide which operands are packed, from the sizes of their chunks and their types."""
    # BLAS on small blocks loses more than the copy costs.
    m, n, k = (int(np.diff(cut).max()) for cut in cuts)

    def small(sizes: Sequence[int], extent: int) -> bool:
        mean = sum(sizes) / max(1, sum(size > 0 for size in sizes))
        return mean < min(problem.options.pack_below, extent)

    compute = problem.compute_type
    # Rounded on the way into a panel.
    rounded = problem.compute == "tf32"
    return Packing(
        a=rounded
        or dtype_from_name(problem.a_dtype) != compute
        or small(problem.a_chunks[0], m)
        or small(problem.a_chunks[1], k),
        b=rounded
        or dtype_from_name(problem.b_dtype) != compute
        or small(problem.b_chunks[0], k)
        or small(problem.b_chunks[1], n),
        d=problem.result_type != compute or small(problem.out_chunks[0], m) or small(problem.out_chunks[1], n),
    )


def panel_width(problem: Problem, region: Rect, depth: int) -> int:
    """Return how much of k one panel of op(A) and op(B) covers, so that both fit ``panel_bytes``."""
    per_k = (region[1] - region[0]) + (region[3] - region[2])
    itemsize = problem.compute_type.itemsize
    return max(1, min(depth, max(_LEAST_WIDTH, problem.options.panel_bytes // max(1, per_k * itemsize))))


def operand_grids(plan: Plan) -> tuple[ChunkGrid, ChunkGrid]:
    """Return the parts of A and B that the ranks need: (rows x depth), (depth x cols)."""
    rows, cols, depth = (tuple(np.diff(cut).tolist()) for cut in (plan.rows, plan.cols, plan.depth))
    return ChunkGrid((rows, depth)), ChunkGrid((depth, cols))


def chunk_bytes(problem: Problem, operand: str) -> NDArray[np.int64]:
    """Return the bytes of every chunk of operand ``"a"``, ``"b"`` or ``"d"``, in C order."""
    rows, cols = problem.chunks_of(operand)
    sizes = np.multiply.outer(np.asarray(rows, np.int64), np.asarray(cols, np.int64))
    return (sizes * problem.itemsize(operand)).ravel()


def spread(plan: Plan, operand: str, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how many bytes of A or B each participant has, from the bytes of its chunks."""
    where, npart = plan.where[operand], len(plan.participants)
    if where is None:
        # As evenly as whole chunks can be shared out.
        return np.full(npart, sizes.sum() / len(sizes) * -(-len(sizes) // npart))
    if everywhere(where):
        held = np.zeros(npart)
        held[list(plan.ranks)] = sizes.sum()
        return held
    return np.bincount(where, sizes, npart).astype(np.float64)


def project(plan: Plan) -> dict[str, int]:
    """Return the projected bytes that a run holds at its peak, for each participant.

    Counted are: chunks of A and B there, what the rank sums into, its chunks of D, panels in flight, packed
    panels, and partial sums of others. Not counted is what the worker holds anyway for other tasks.
    """
    problem, npart = plan.problem, len(plan.participants)
    staged = np.zeros(npart)
    for operand in "a" if problem.shared else "ab":
        staged += spread(plan, operand, chunk_bytes(problem, operand))

    # Where these lie is not looked at; the parts of them that a rank fetches are chunks' parts, one at a time.
    staged += sum(float(chunk_bytes(problem, extra.name).sum()) for extra in problem.extras) / npart

    total = staged.copy()
    compute = problem.compute_type.itemsize
    chunk_of = chunk_bytes(problem, "d")
    owned = np.bincount(plan.owners, chunk_of, len(plan.ranks))
    if problem.formula.saved:
        owned *= 2
    kept = _elements_kept(plan)
    for rank, index in enumerate(plan.ranks):
        r0, r1, c0, c1 = plan.region(rank)
        k0, k1 = plan.k_range(rank)
        total[index] += (r1 - r0) * (c1 - c0) * compute
        if plan.grid[2] > 1:
            # Another rank's partial sum of the part that is added up here, and the finished chunks.
            total[index] += sum((f[1] - f[0]) * (f[3] - f[2]) for f in plan.final_rects(rank)) * compute
            total[index] += owned[rank]
        elif plan.packing.d:
            total[index] += owned[rank]
        else:
            # Chunks are summed into in place; parts of them that others compute come on top.
            total[index] += max(0.0, owned[rank] - kept[rank] * problem.itemsize("d"))
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
