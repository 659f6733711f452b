"""How a rank that pulls what it needs walks over its block of products; memory and time of that. Pure.

A rank computes ``D[rows, cols] = A[rows, depth] @ B[depth, cols]`` (see `plan`). Of one operand it holds a part, the
other one passes by in panels, each of which is pulled into a buffer while an earlier one is multiplied::

             panels of B                     what is held: rows of A, all of depth where that fits
             [ 0 ][ 1 ][ 2 ][ 3 ]            in flight: 1 and 2, while 0 is multiplied
    A held   [   ][   ][   ][   ]  D

What lies right already, in one chunk of this GPU, is multiplied as it lies and needs no buffer. Buffers together stay
below ``distmm.peer.buffer-bytes``: if what is to be held does not fit into half of them, it is cut along k (D is then
added to, in the type that is summed in), or along its own axis (the panels then pass by again).

The estimate of a way is::

    seconds  = max(multiply, pulls) + exposed * pulls + start + end + latency
    multiply = max over ranks of flops / rate
    pulls    = max over ranks of bytes from others / bandwidth
    start    = what must be here before the first GEMM, where nothing is at home
    end      = the last partial sums and chunks of D, and passes over D, at memory bandwidth
    latency  = 4 messages (2 for a rank that is alone), 2 more for sums of others, 1 where several ranks pull parts of
               both A and B, 0.75 each time that twice as many chunks are pulled: as two H200 took for small products;
               0.5 more on a grid of two dimensions, where less of both is here (`benchmarks.gpu.model`)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.cuts import Bounds, overlaps, padded
from dask_distmm.planning.gemm_sizes import pieces_that_fill, slowdown, unit
from dask_distmm.planning.library_epilogs import library_epilog
from dask_distmm.planning.memory import chunk_bytes, spread
from dask_distmm.planning.peer.reads import lent, others_chunks
from dask_distmm.planning.plan import EVERYWHERE, Estimate, Plan, Rect
from dask_distmm.planning.problem import Problem

__all__ = [
    "PANELS",
    "Walk",
    "blocks",
    "estimate",
    "in_place",
    "native",
    "project",
    "step_of",
    "sums_in",
    "walks",
]

# Buffers for panels: one is multiplied, the others fill.
PANELS = 3
# Rows of a GEMM: with fewer the panels that pass by again take longer to pull than to multiply (16-bit types).
_LEAST_ROWS = 4096
# Of k: with less each GEMM spends its time on reading and writing D.
_LEAST_DEPTH = 512
# Of k, for 16-bit types and a large D: tensor cores add up without rounding to nearest, and what is lost grows faster
# than the sum. On H200 sums of 131,072 products were 1.27 times as far off as 16 eps of float32 allow. For a small D
# the library cuts k itself, to have work for all multiprocessors.
_MOST_DEPTH = 32768
# Panels are this wide, or wider: as many of them as ranks, at least four.
_LEAST_WIDTH = 1024
_FEWEST_PANELS = 4
# Extents are padded in buffers, and in a D that is copied afterwards, where that takes less than it saves: for 16-bit
# types break-even is at a harmonic mean of the extents of 3 x 160, for float64 of 3 x 500. D is there twice then.
_LEAST_PADDED = 512
_MOST_PADDED_BYTES = 8 * 2**30
# What a run takes beside its work, in messages; see above.
_ALONE, _TOGETHER, _SUMS, _BOTH, _TWICE_AS_MANY, _GRID = 2.0, 4.0, 2.0, 1.0, 0.75, 0.5
# GEMMs into smaller chunks of D than this along an axis leave multiprocessors idle: D is made in one piece and copied.
_LEAST_BLOCK = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Walk:
    """The order of one rank's work, but for where things lie.

    Parameters
    ----------
    held
        The operand of which a part is held: 0 for A, 1 for B.
    parts, depth
        Cuts of the held operand's own axis (rows of A, columns of B) and of k, from the rank's first to its last.
    width
        Rows or columns of a panel of the other operand, at most.
    lies
        For A and B, whether all of the rank's part lies in single chunks on its own GPU, as far as a plan can tell.
    others
        For A and B, how many chunks that it multiplies some of others have.
    held_bytes, panel_bytes
        Of a buffer for either; 0 where what lies there is used.
    panels
        Buffers for panels.
    """

    held: int
    parts: Bounds
    depth: Bounds
    width: int
    lies: tuple[bool, bool]
    others: tuple[float, float]
    held_bytes: int
    panel_bytes: int
    panels: int = PANELS

    @property
    def held_buffers(self) -> int:
        """How many of the held parts there are at a time: the next one fills while one is used."""
        return 2 if (len(self.parts) - 1) * (len(self.depth) - 1) > 1 else 1

    @property
    def buffer_bytes(self) -> int:
        """Of all buffers together."""
        return self.held_buffers * self.held_bytes + self.panels * self.panel_bytes


def step_of(problem: Problem) -> int:
    """Return what extents of a GEMM are padded to a multiple of: FP8 needs 16; others are quick then, but copied."""
    if problem.fp8:
        return 16
    mean = 1 / sum(1 / max(1, extent) for extent in (problem.m, problem.n, problem.k))
    if mean < _LEAST_PADDED or problem.m * problem.n * problem.result_type.itemsize > _MOST_PADDED_BYTES:
        return 1
    return 16 if slowdown(problem, in_chunks=True) > 1 else 1


def walks(plan: Plan) -> list[Walk]:
    """Return how each rank walks over its block."""
    return [_walk(plan, rank) for rank in range(len(plan.ranks))]


def _walk(plan: Plan, rank: int) -> Walk:
    problem, (p, q, s) = plan.problem, plan.grid
    (r0, r1, c0, c1), (k0, k1) = plan.region(rank), plan.k_range(rank)
    extents, sizes, step = (r1 - r0, c1 - c0), _given(problem), step_of(problem)
    lies = (
        _lies(plan, 0, plan.ranks[rank], (r0, r1, k0, k1)),
        _lies(plan, 1, plan.ranks[rank], (k0, k1, c0, c1)),
    )
    if s > 1 and plan.method == "reducescatter":
        # Panels are what other ranks add up: slabs of D.
        held = 1 if _slabs_by_rows(plan) else 0
    elif q == 1 and p > 1:
        held = 0
    elif p == 1 and q > 1:
        held = 1
    else:
        held = int(extents[1] * sizes[1] < extents[0] * sizes[0])
    room = problem.options.buffer_bytes
    own, kk = extents[held], k1 - k0
    rows, depth, held_bytes = own, kk, 0
    if not lies[held] or step > 1:
        wide = problem.sum_type != problem.compute_type
        rows, depth = _fit(own, kk, sizes[held], room // 2, wide, step)
    if 2 in sizes and extents[0] * extents[1] >= _LEAST_BLOCK**2:
        depth = min(depth, _MOST_DEPTH)
    if not lies[held] or step > 1:
        held_bytes = padded(rows, step) * padded(depth, step) * sizes[held]
    parts, cuts = _even(r0 if held == 0 else c0, own, rows), _even(k0, kk, depth)
    passing = 1 - held
    left = room - held_bytes * (2 if (len(parts) - 1) * (len(cuts) - 1) > 1 else 1)
    most = max(left, room // 4) // PANELS // max(1, padded(depth, step) * sizes[passing])
    others = others_chunks(plan, rank)
    # Where nothing is pulled one panel is quickest.
    fewest = max(_FEWEST_PANELS, len(plan.ranks)) if s > 1 or any(others) else 1
    wanted = max(-(-extents[passing] // fewest), min(_LEAST_WIDTH, extents[passing]))
    width = max(step, _down(min(padded(wanted, unit(wanted, step)), most), step))
    panel_bytes = 0
    if not lies[passing] or step > 1:
        panel_bytes = min(width, padded(extents[passing], step)) * padded(depth, step) * sizes[passing]
    again = (len(parts) - 1) * (len(cuts) - 1) > 1
    panels = PANELS if again else min(PANELS, -(-extents[passing] // width))
    return Walk(held, parts, cuts, width, lies, others, held_bytes, panel_bytes, panels)


def _given(problem: Problem) -> tuple[int, int]:
    """Return the bytes of an element of A and B as they are multiplied."""
    a, b = (dtype_from_name(name).itemsize for name in problem.matrix_types)
    return a, b


def _slabs_by_rows(plan: Plan) -> bool:
    return plan.final_rects(0)[0][3] == plan.problem.n


def _lies(plan: Plan, operand: int, participant: int, part: Rect) -> bool:
    """Whether a part of an operand is on one participant, in chunks that span it along k."""
    problem, where = plan.problem, (plan.where_a, plan.where_b)[operand]
    if where is None or (problem.conjugated[operand] and (plan.order_a, plan.order_b)[operand] == "C"):
        # The library conjugates what it transposes; all else is copied first.
        return False
    sizes = (problem.a_chunks, problem.b_chunks)[operand]
    ends = [np.cumsum(axis) for axis in sizes]
    # Chunks along both axes that overlap the part; empty ones at its edges do not matter.
    (i0, i1), (j0, j1) = (
        (int(np.searchsorted(end, start, "right")), int(np.searchsorted(end, stop, "left")) + 1)
        for end, start, stop in zip(ends, part[::2], part[1::2], strict=True)
    )
    grid = where.reshape(len(sizes[0]), len(sizes[1]))[i0:i1, j0:j1]
    return grid.shape[1 - operand] == 1 and bool(np.isin(grid, (participant, EVERYWHERE)).all())


def _fit(own: int, kk: int, size: int, room: int, wide: bool, step: int) -> tuple[int, int]:
    """Return how much of its own axis and of k what is held may have.

    Parameters
    ----------
    wide
        Sums have more bits than D: with k cut they need memory of their own.
    """
    if own * kk * size <= room:
        return own, kk
    room //= 2
    rows = _down(room // (kk * size), step)
    if wide and rows >= min(own, _LEAST_ROWS):
        return min(rows, own), kk
    depth = _down(room // (own * size), step)
    if depth >= min(kk, _LEAST_DEPTH):
        return own, depth
    depth = min(kk, padded(_LEAST_DEPTH, step))
    return min(own, max(step, _down(room // (depth * size), step))), depth


def _down(length: int, step: int) -> int:
    """Return the most that is not longer, and that pieces may have; see `unit`."""
    return length // unit(length, step) * unit(length, step)


def _even(start: int, length: int, most: int) -> Bounds:
    """Cut a range into pieces of `most`, the last one smaller."""
    return (*range(start, start + length, most), start + length)


def sums_in(plan: Plan, found: Sequence[Walk]) -> np.dtype:
    """Return the type that all ranks sum in: D's own, unless D is added to several times in it."""
    if _several(plan, found):
        return plan.problem.compute_type
    return plan.problem.sum_type if native(plan, found) is None else plan.problem.result_type


def _several(plan: Plan, found: Sequence[Walk]) -> bool:
    return plan.grid[2] > 1 or any(len(one.depth) > 2 for one in found)


def native(plan: Plan, found: Sequence[Walk]) -> str | None:
    """Return the epilog that cuBLASLt does with each product, ``""`` for a factor alone; None if it can't do all."""
    problem = plan.problem
    if _several(plan, found) or step_of(problem) > 1:
        return None
    epilog = library_epilog(problem)
    if epilog and (problem.compute or problem.result_type.itemsize == 2):
        return None
    if epilog and "bias" in problem.finish.inputs and problem.chunks_of("bias")[0] != (1,):
        return None
    return epilog


def _stored_again(plan: Plan, found: Sequence[Walk], sums: int) -> bool:
    """Whether D is written once more after its sums, of so many bytes an element: finished, or rounded."""
    return sums != plan.problem.itemsize("d") or (plan.problem.finished and native(plan, found) is None)


def blocks(plan: Plan, rank: int) -> list[Rect]:
    """Return the pieces in which a rank's block of D lies, the same wherever it is asked for.

    Chunks of the result, or parts of them, where these are large; else all in one.
    """
    region = plan.region(rank)
    if plan.grid[2] > 1 or step_of(plan.problem) > 1:
        return [region]
    rows, cols = plan.chunk_cuts
    down, across = overlaps(rows, *region[:2]), overlaps(cols, *region[2:])
    if any(len(axis) > 1 and min(b - a for _, a, b in axis) < _LEAST_BLOCK for axis in (down, across)):
        return [region]
    return [(r0, r1, c0, c1) for _, r0, r1 in down for _, c0, c1 in across]


def in_place(plan: Plan, rank: int) -> set[Rect]:
    """Return those of a rank's blocks that are a chunk of D, if the rank holds that chunk: multiplied into as it is."""
    # Elsewhere others read what is not complete yet, or the library needs more room.
    return set() if plan.grid[2] > 1 or step_of(plan.problem) > 1 else set(blocks(plan, rank))


def project(plan: Plan) -> dict[str, int]:
    """Return the projected bytes of device memory that a run holds at its peak, for each participant.

    Counted are chunks of A and B, also in the type that they are multiplied in, buffers, what is summed into, and D.
    """
    problem, npart = plan.problem, len(plan.participants)
    total = np.zeros(npart)
    for operand, given in zip("ab", _given(problem), strict=True):
        held = problem.itemsize(operand)
        sizes = chunk_bytes(problem, operand)
        converted = sizes // held * given if given != held else 0 * sizes
        sizes = converted if operand == "b" and problem.shared else sizes + converted
        total += spread(plan, operand, sizes)
    copied = np.array([worker.address.startswith("ucx") for worker in plan.participants])
    if copied.any() and plan.where_a is not None and plan.where_b is not None:
        # What others read is copied into memory that UCX does not map: see the engine's `memory`.
        for (name, read), given in zip(lent(plan, "ab").items(), _given(problem), strict=True):
            total += copied * (read @ chunk_bytes(problem, name)) / problem.itemsize(name) * given
    # Where these lie is not looked at; each rank has copies of the parts that its chunks need.
    total += sum(float(chunk_bytes(problem, extra.name).sum()) for extra in problem.extras) * 2 / npart
    found = walks(plan)
    sums = sums_in(plan, found).itemsize
    stored = _stored_again(plan, found, sums)
    for rank, index in enumerate(plan.ranks):
        total[index] += found[rank].buffer_bytes
        lying = in_place(plan, rank)
        total[index] += sum(map(_area, blocks(plan, rank))) * sums
        owned = [plan.chunk_rect(number) for number in plan.owned(rank).tolist()]
        total[index] += sum(_area(rect) for rect in owned if rect not in lying) * sums
        if stored:
            area = sum(map(_area, owned))
            total[index] += area * problem.itemsize("d") * (2 if problem.finish.saved else 1)
        if plan.grid[2] > 1:
            final = sum(map(_area, plan.final_rects(rank))) * sums
            total[index] += 2 * min(final, problem.options.buffer_bytes // 4)
    return {worker.address: int(total[i]) for i, worker in enumerate(plan.participants)}


def _area(rect: Rect) -> int:
    return (rect[1] - rect[0]) * (rect[3] - rect[2])


def estimate(
    plan: Plan, needed: NDArray[np.float64], home: NDArray[np.float64], delivered: NDArray[np.float64]
) -> Estimate:
    """Apply the formulas at the top of this module.

    Parameters
    ----------
    needed, home
        Bytes of A and B that each rank multiplies, and how many of them are on its GPU.
    delivered
        Elements of finished chunks of D that each rank pulls from others.
    """
    problem, machine = plan.problem, plan.problem.options.machine("peer")
    ranks, s = range(len(plan.ranks)), plan.grid[2]
    found = walks(plan)
    sums = sums_in(plan, found).itemsize
    area = np.array([_area(plan.region(rank)) for rank in ranks], float)
    depth = np.array([np.diff(plan.k_range(rank))[0] for rank in ranks], float)
    rate = machine.rate(problem.compute or ("float8" if problem.fp8 else problem.matrix_types[0]))
    compute = problem.flops * area * depth / (problem.m * problem.n * problem.k) / rate
    if step_of(problem) == 1:
        compute *= slowdown(problem, in_chunks=True)

    final = np.array([sum(map(_area, plan.final_rects(rank))) for rank in ranks], float)
    away = 1 - home / np.maximum(needed, 1.0)
    pulled = needed - home
    again = np.array([len(one.parts) - 1 for one in found])
    passing = np.array([_passing_bytes(plan, rank, found[rank].held) for rank in ranks])
    pulled = pulled + away * (again - 1) * passing
    partial = (s - 1) * final * sums
    # A piece of what is held and of a panel are enough to begin with.
    cut = np.array([pieces_that_fill(problem, one.parts[1] - one.parts[0], one.width) for one in found])
    begin = away**2 * np.array([one.held_bytes + one.panel_bytes for one in found]) / cut / machine.bandwidth
    last = (partial / max(1, s - 1) + delivered * sums) / machine.bandwidth
    copied = 3.0 * partial + 2.0 * _passes(plan, found, sums) * sums
    end = last + copied / machine.memory_bandwidth
    pulls = (pulled + partial * (s > 1) * (s - 2) / max(1, s - 1)) / machine.bandwidth
    exposed = dict(machine.exposed).get(plan.method, 1.0)
    moving = np.maximum(pulls - compute, 0.0) + exposed * pulls + begin + end
    worst = int(np.argmax(compute + moving))
    chunks = max((one.others for one in found), key=sum)
    several, messages = len(plan.ranks) > 1, _ALONE
    if several or any(chunks):
        messages = _TOGETHER + _SUMS * (s > 1) + _BOTH * (several and all(chunks))
        messages += _TWICE_AS_MANY * math.log2(max(1.0, sum(chunks))) + _GRID * (min(plan.grid[:2]) > 1)
    return Estimate(
        method=plan.method,
        grid=plan.grid,
        seconds=float((compute + moving)[worst]) + messages * machine.latency,
        compute_seconds=float(compute[worst]),
        transfer_seconds=float(moving[worst]),
        bytes_moved=int((pulled + partial + delivered * sums).sum()),
        peak_bytes=max(plan.projected_bytes.values()),
    )


def _passing_bytes(plan: Plan, rank: int, held: int) -> float:
    """Bytes of the operand that passes by, once."""
    (r0, r1, c0, c1), (k0, k1) = plan.region(rank), plan.k_range(rank)
    return float(((c1 - c0) if held == 0 else (r1 - r0)) * (k1 - k0) * _given(plan.problem)[1 - held])


def _passes(plan: Plan, walked: Sequence[Walk], sums: int) -> NDArray[np.float64]:
    """Elements of D that each rank copies once more: to its chunks from where they were summed up, to store them."""
    stored = _stored_again(plan, walked, sums)
    found = []
    for rank in range(len(plan.ranks)):
        lying = in_place(plan, rank)
        owned = [plan.chunk_rect(number) for number in plan.owned(rank).tolist()]
        found.append(sum(_area(rect) * (stored + (rect not in lying)) for rect in owned))
    return np.array(found, float)
