"""The memory that a plan takes, before anything moves.

`packing` decides which operands are copied into contiguous panels: BLAS works on chunks as they lie, F- or
C-ordered, unless they are small or have another type than is computed in.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import Layout, redistribution
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.cuts import Bounds, chunk_cuts, free_axes, traffic
from dask_distmm.planning.model import ENGINES, Phase
from dask_distmm.planning.placement import everywhere
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import AXES, Problem, is_gram

# A panel of k narrower than this keeps BLAS from its speed.
_LEAST_WIDTH = 384


def packing(problem: Problem, cuts: tuple[Bounds, Bounds, Bounds]) -> str:
    """Decide which operands are packed, from the sizes of their chunks and their types."""
    extents = dict(zip("mnk", (int(np.diff(cut).max()) for cut in cuts), strict=True))

    def packed(name: str) -> bool:
        if name != "d" and problem.compute == "tf32":
            return True  # rounded on the way into a panel
        # BLAS on small blocks loses more than the copy costs.
        means = [sum(sizes) / max(1, sum(size > 0 for size in sizes)) for sizes in problem[name].chunks]
        most = (min(problem.options.pack_below, extents[axis]) for axis in AXES.get(name, "mn"))
        small = any(mean < x for mean, x in zip(means, most, strict=True))
        return small or dtype_from_name(problem[name].dtype) != problem.compute_type

    return "".join(filter(packed, "abd"))


def panel_width(problem: Problem, per_k: Any, depth: Any) -> Any:
    """Return how much of a depth one panel of op(A) and op(B) covers, so that both fit ``panel_bytes``."""
    fitting = problem.options.panel_bytes // np.maximum(1, per_k * problem.compute_type.itemsize)
    return np.maximum(1, np.minimum(depth, np.maximum(_LEAST_WIDTH, fitting)))


# The bytes of an operand that each rank needs, and those of them (columns) that each participant (rows) has.
Needs = tuple[NDArray[np.float64], NDArray[np.float64]]


def operand_needs(plan: Plan, operand: str) -> Needs:
    """Return the bytes of A or B that each rank needs, and how many of these each participant has."""
    problem, npart = plan.problem, len(plan.participants)
    where, tiles, (_, q, s) = plan.where.get(operand), ENGINES[plan.engine].tiles(plan), plan.grid
    parts, chunks = np.arange(len(plan.ranks)), problem[operand].chunks
    if tiles is None:
        cuts = (plan.rows, plan.depth) if operand == "a" else (plan.depth, plan.cols)
        needed = np.multiply.outer(*map(np.diff, cuts)).ravel().astype(float)
        parts = parts // (q * s) * s + parts % s if operand == "a" else parts % s * q + parts // s % q
    else:
        layout = getattr(tiles, operand).layout
        needed = layout.elements.astype(float)
    held: NDArray[np.float64]
    if problem[operand].by_ranks:
        # They come from their source as others come from other workers.
        held = np.zeros((npart, len(needed)))
    elif where is None and tiles is None and len(needed) > 1 and _lies_in_slabs(plan, operand):
        held = np.zeros((npart, len(needed)))
        np.fill_diagonal(held, needed)
    elif where is None or everywhere(where):
        held = np.broadcast_to(needed / (npart if where is None else 1), (npart, len(needed)))
    elif tiles is None:
        held = traffic(chunks, cuts, where, npart)
    else:
        held = redistribution(Layout.of_chunks(chunks), layout).traffic(where, npart).astype(float)
    itemsize = float(problem[operand].itemsize)
    return needed[parts] * itemsize, held[:, parts] * itemsize


def _lies_in_slabs(plan: Plan, operand: str) -> bool:
    """Whether an operand of which nothing is known is stored in whole slabs as ranks need them: see `cuts`."""
    (p, q, s), counts = plan.grid, plan.problem[operand].counts
    parts = (p, s) if operand == "a" else (s, q)
    axis = int(parts[1] > 1)
    slabs = parts[1 - axis] == 1 == counts[1 - axis] and counts[axis] >= parts[axis]
    return slabs and AXES[operand][axis] in free_axes(plan.problem)


def delivered(plan: Plan) -> NDArray[np.float64]:
    """Return the elements of finished chunks of D that each rank gets from other ranks."""
    moved = plan.final_traffic
    return np.asarray(moved.sum(axis=1) - np.diagonal(moved), float)


def formula_inputs(plan: Plan) -> NDArray[np.float64]:
    """Return the bytes of what the formula reads beside sums for the chunks of each rank, and those from others."""
    problem, total, npart = plan.problem, np.zeros((2, len(plan.ranks))), len(plan.participants)
    counts, homes = problem.d.counts, np.asarray(plan.ranks)[plan.owners]
    for extra in problem.extras:
        axes = [*zip(problem.d.chunks, problem.varies(extra.name), strict=True)]
        cuts = [chunk_cuts(sizes) if varies else (0, 1) for sizes, varies in axes]
        parts = [len(sizes) if varies else 1 for sizes, varies in axes]
        needed = np.broadcast_to(np.multiply.outer(*map(np.diff, cuts)), counts).ravel().astype(float)
        if (where := plan.where.get(extra.name)) is None:
            missing = needed * (1 - 1 / npart)
        else:
            held = traffic(extra.chunks, (cuts[0], cuts[1]), where, npart).reshape(npart, *parts)
            missing = needed - np.broadcast_to(held, (npart, *counts)).reshape(npart, -1)[homes, np.arange(len(homes))]
        # A part that several chunks of a rank need is there once.
        part = np.broadcast_to(np.arange(math.prod(parts)).reshape(parts), counts).ravel()
        _, first = np.unique(plan.owners.astype(np.int64) * part.size + part, return_index=True)
        weights = (sizes[first] * extra.itemsize for sizes in (needed, missing))
        total += [np.bincount(plan.owners[first], weight, len(plan.ranks)) for weight in weights]
    return total


def spread(plan: Plan, operand: str, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how many bytes of A, B or D each participant has, from the bytes of its chunks."""
    where = np.asarray(plan.ranks)[plan.owners] if operand == "d" else plan.where.get(operand)
    npart, held = len(plan.participants), np.zeros(len(plan.participants))
    if plan.problem[operand].by_ranks:
        # Some ahead, and those in use: both operands' chunks at one place of k are in use together.
        in_use = plan.problem[operand].counts["ab".index(operand)] if len(plan.problem.by_ranks) == 2 else 1
        for index in plan.ranks:
            held[index] = min(len(sizes), in_use + made_ahead(plan.participants[index].nthreads)) * sizes.max()
    elif where is None:
        # As evenly as whole chunks can be shared out.
        held[:] = sizes.sum() / len(sizes) * -(-len(sizes) // npart)
    elif everywhere(where):
        held[list(plan.ranks)] = sizes.sum()
    else:
        held = np.bincount(where, sizes, npart).astype(np.float64)
    return held


def multiplied_sizes(problem: Problem) -> tuple[int, int]:
    """Return the bytes of an element of A and of B as a GPU library is given them."""
    a, b = (dtype_from_name(name).itemsize for name in problem.matrix_types)
    return a, b


def multiply_rate(plan: Plan) -> float:
    """Return the operations that a GPU does in a second."""
    problem = plan.problem
    return plan.machine.rate(problem.compute or ("float8" if problem.fp8 else problem.matrix_types[0]))


def uploaded(plan: Plan) -> Phase:
    """Return the copying of NumPy chunks to GPUs before a run of an engine that works there."""
    problem = plan.problem
    if problem.array != "numpy" or plan.from_host or not plan.machine.host_bandwidth:
        return Phase()
    # Those that ranks make are copied while others are multiplied.
    before = [name for name in ("a" if problem.shared else "ab") if not problem[name].by_ranks]
    return Phase(waited={"host": sum((spread(plan, name, problem[name].bytes) for name in before), np.zeros(1))})


def held_operands(plan: Plan, *, on_gpus: bool = False) -> NDArray[np.float64]:
    """Return the bytes of chunks of A and B that each participant has.

    On GPUs also in the types in which they are multiplied, and without those that ranks make.
    """
    problem, total = plan.problem, np.zeros(len(plan.participants))
    for operand, passed in zip("ab", multiplied_sizes(problem), strict=True):
        sizes, size = problem[operand].bytes, problem[operand].itemsize
        if on_gpus and problem[operand].by_ranks:
            continue
        if operand == "a" or not problem.shared:
            total += spread(plan, operand, sizes)
        if on_gpus and passed != size:
            total += spread(plan, operand, sizes // size * passed)
    return total


def held_bytes(plan: Plan) -> NDArray[np.float64]:
    """Return the bytes of chunks of A, B and D that each participant has."""
    return held_operands(plan) + spread(plan, "d", plan.problem.d.bytes)


def made_ahead(threads: int) -> int:
    """Return how many chunks a rank of this many threads makes before it needs them."""
    return threads + 1


def made_bytes(plan: Plan) -> float:
    """Return the bytes of all chunks that ranks make themselves; a chunk that several need is made by each of them."""
    problem, total = plan.problem, 0.0
    sizes = {name: problem[name].bytes.reshape(problem[name].counts) for name in problem.by_ranks}
    both = len(sizes) == 2 and is_gram(problem)
    for rank in range(len(plan.ranks)):
        read = {name: plan.chunks_read(rank, name) for name in sizes}
        total += sum(float(sizes[name][read[name]].sum()) for name in sizes)
        if both:
            # A rank makes a chunk once, and has it on both sides.
            (rows, depth), (_, cols) = read["a"], read["b"]
            twice = slice(max(rows.start, cols.start), max(rows.start, cols.start, min(rows.stop, cols.stop)))
            total -= float(sizes["a"][twice, depth].sum())
    return total
