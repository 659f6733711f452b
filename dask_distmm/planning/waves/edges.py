"""Where a product can be cut into waves: at edges of all chunks along an axis. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dask_distmm.planning.problem import Problem

# D is cut into this many blocks along an axis.
BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def common_edges(problem: Problem, axis: str) -> tuple[int, ...]:
    """Return where an axis, of ``"m"``, ``"n"`` and ``"k"``, can be cut: at edges of all chunks along it."""
    inputs = [extra.chunks for extra in problem.extras]
    chunkings = {
        "m": [problem.a_chunks[0], problem.out_chunks[0], *(c[0] for c in inputs if sum(c[0]) == problem.m)],
        "n": [problem.b_chunks[1], problem.out_chunks[1], *(c[1] for c in inputs if sum(c[1]) == problem.n)],
        "k": [problem.a_chunks[1], problem.b_chunks[0]],
    }[axis]
    common = set.intersection(*({0, *itertools.accumulate(sizes)} for sizes in chunkings))
    return tuple(sorted(common))


def grouped(edges: Sequence[int], groups: int) -> tuple[int, ...]:
    """Return those edges that cut the segments between edges into groups of about as many segments."""
    count = len(edges) - 1
    return tuple(edges[round(i * count / groups)] for i in range(groups + 1))
