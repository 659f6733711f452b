"""Rows, columns and k in the order of the workers that hold their chunks.

A rank's part of m, n or k is one range, and Dask deals chunks out as it likes: every other chunk of a tall matrix may
lie on the other worker, so that half of it would have to move. But the product does not depend on the order of k, and
in another order of m or n it has the same chunks in another order. So chunks along an axis are taken in the order of
their holders, where each of them is on one worker::

    chunk    0 1 2 3 4 5        0 2 4 1 3 5
    worker   x y x y x y   ->   x x x y y y
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dask_distmm.planning.computation import Chunks, Part
from dask_distmm.planning.cuts import Bounds
from dask_distmm.planning.placement import Where
from dask_distmm.planning.problem import Problem

# So large a share of what is along an axis must be whole on one worker, chunk by chunk of the axis.
_WHOLE = 0.9
# The axes of an operand; those of C and other inputs are D's.
_AXES = {"a": "mk", "b": "kn"}


def free_axes(problem: Problem) -> str:
    """Return the axes, of m, n and k, whose chunks can be taken in another order."""
    if any(problem.distributions) or problem.grid is not None or problem.replicated:
        return ""
    out = problem.out_chunks
    extras = [extra.chunks for extra in problem.extras]
    free = {
        "m": problem.a_chunks[0] == out[0] and all(x[0] == out[0] or sum(x[0]) == 1 != problem.m for x in extras),
        "n": problem.b_chunks[1] == out[1] and all(x[1] == out[1] or sum(x[1]) == 1 != problem.n for x in extras),
        "k": problem.a_chunks[1] == problem.b_chunks[0],
    }
    if problem.stationary:
        # In another order of m or n the chunks of D would come to lie elsewhere.
        free["m"] = free["n"] = False
    return "".join(axis for axis, yes in free.items() if yes)


def by_holder(problem: Problem, where: Where) -> dict[str, list[int]]:
    """Return the order of the chunks of some axes, where it differs from what it is."""
    found = {}
    for axis in free_axes(problem):
        amounts = _amounts(problem, where, axis)
        if amounts is None or len(amounts) < 2:
            continue
        order = np.argsort(amounts.argmax(axis=1), kind="stable").tolist()
        if amounts.max(axis=1).sum() >= _WHOLE * amounts.sum() and order != list(range(len(order))):
            found[axis] = order
    return found


def _amounts(problem: Problem, where: Where, axis: str) -> NDArray[np.float64] | None:
    """Return for each chunk of an axis how many bytes of A and B along it each holder has; None if nothing is known."""
    held = []
    for operand in "ab":
        if axis not in _AXES[operand] or operand not in where or (where[operand] < 0).any():
            continue
        sizes = np.multiply.outer(*(np.asarray(x, float) for x in problem.chunks_of(operand)))
        table, weight = where[operand].reshape(sizes.shape), sizes * problem.itemsize(operand)
        if _AXES[operand].index(axis):
            table, weight = table.T, weight.T
        held.append((table, weight))
    if not held:
        return None
    count = 1 + max(int(table.max()) for table, _ in held)
    amounts = np.zeros((len(held[0][0]), count))
    for table, weight in held:
        np.add.at(amounts, (np.arange(len(table))[:, None], table), weight)
    return amounts


def holder_cuts(problem: Problem, where: Where, grid: tuple[int, int, int]) -> tuple[Bounds, Bounds, Bounds] | None:
    """Return cuts of m, n and k by which each rank has what is whole on one worker; None if there are none."""
    axes = [(axis, parts) for axis, parts in zip("mnk", grid, strict=True) if parts > 1]
    if len(axes) != 1 or axes[0][0] not in free_axes(problem):
        return None
    ((axis, parts),) = axes
    amounts = _amounts(problem, where, axis)
    if amounts is None or amounts.max(axis=1).sum() < _WHOLE * amounts.sum():
        return None
    holders = amounts.argmax(axis=1)
    starts = np.flatnonzero(np.diff(holders)) + 1
    if len(starts) + 1 != parts or len(np.unique(holders)) != parts:
        return None
    lengths = {"m": problem.m, "n": problem.n, "k": problem.k}
    sizes = {"m": problem.a_chunks[0], "n": problem.b_chunks[1], "k": problem.a_chunks[1]}[axis]
    edges = np.concatenate([[0], np.cumsum(sizes)])
    cut = (0, *edges[starts].tolist(), lengths[axis])
    if min(np.diff(cut)) <= 0:
        return None
    m, n, k = (cut if name == axis else (0, length) for name, length in lengths.items())
    return m, n, k


def reorder(problem: Problem, orders: Mapping[str, Sequence[int]]) -> tuple[Problem, dict[str, NDArray[np.int64]]]:
    """Return the same problem with the chunks along some axes in another order."""
    if not orders:
        return problem, {name: np.arange(math.prod(problem.chunk_counts(name))) for name in (*problem.operands, "d")}
    lengths = {"m": len(problem.out_chunks[0]), "n": len(problem.out_chunks[1])}
    numbers, before = [], {}
    chunks: dict[str, Chunks] = {}
    for name in (*problem.operands, "d"):
        own = problem.chunks_of(name)
        every = np.arange(len(own[0]) * len(own[1])).reshape(len(own[0]), len(own[1]))
        of_whole = (range(len(own[0])), range(len(own[1])), len(own[1]))
        rows, cols, ncols = of_whole if problem.part is None else problem.part.of(name)
        taken = []
        for sizes, axis in zip(own, _AXES.get(name, "mn"), strict=True):
            # An input that is broadcast along an axis has one chunk there.
            moved = axis in orders and len(sizes) == lengths.get(axis, len(sizes))
            taken.append(list(orders[axis]) if moved else list(range(len(sizes))))
        before[name] = every[np.ix_(*taken)].ravel()
        numbers.append((name, tuple(rows[i] for i in taken[0]), tuple(cols[j] for j in taken[1]), ncols))
        chunks[name] = tuple(own[0][i] for i in taken[0]), tuple(own[1][j] for j in taken[1])
    made = dataclasses.replace(
        problem,
        a_chunks=chunks["a"],
        b_chunks=chunks["b"],
        out_chunks=chunks["d"],
        extras=tuple(dataclasses.replace(extra, chunks=chunks[extra.name]) for extra in problem.extras),
        same=False,
        arrays=problem.anonymous,
        part=Part(tuple(numbers), problem.result_name),
    )
    return made, before
