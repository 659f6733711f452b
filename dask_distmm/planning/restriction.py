"""A part of a multiply as a problem of its own: where only some chunks of D are wanted, or others are there already."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.part import Part
from dask_distmm.planning.problem import Problem

_AXIS_OF_K = {"a": 1, "b": 0}


def restrict(problem: Problem, wanted: Collection[int]) -> Problem | None:
    """Return the problem whose D is the least part of another's that has some chunks, cut where all chunks are.

    Chunks have the numbers that they have for the user, also where the problem itself is a part.
    """
    if any(problem.distributions) or problem.grid or problem.replicated:
        return None
    extras = [extra.chunks for extra in problem.extras]
    sizes = ([problem.out_chunks[0], problem.a_chunks[0]], [problem.out_chunks[1], problem.b_chunks[1]])
    at = np.divmod(np.asarray(sorted(wanted), np.int64), problem.columns(""))
    marks: list[NDArray[np.bool_]] = []
    for axis, length in enumerate((problem.m, problem.n)):
        # An input that is broadcast along an axis is needed whole.
        long = [*sizes[axis], *(chunks[axis] for chunks in extras if sum(chunks[axis]) == length)]
        if any(0 in chunking for chunking in long):
            return None
        numbers_here = np.unique(at[axis])
        if problem.part is not None:
            numbers_here = np.searchsorted(problem.part.of("d")[axis], numbers_here)
        marks.append(_mark(long, numbers_here, length))
    if all(mask.all() for mask in marks):
        return None

    def taken(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        found = []
        for axis, chunking in enumerate(problem.chunks_of(name)):
            # Neither k nor what is broadcast is cut.
            cut = axis != _AXIS_OF_K.get(name) and sum(chunking) == len(marks[axis])
            starts = np.cumsum(chunking) - chunking
            found.append(tuple(np.flatnonzero(marks[axis][starts]).tolist() if cut else range(len(chunking))))
        return found[0], found[1]

    names = (*problem.operands, "d")
    numbers = {name: taken(name) for name in names}

    def of_user(name: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        (rows, cols), ncols = numbers[name], problem.chunk_counts(name)[1]
        if problem.part is None:
            return rows, cols, ncols
        whole_rows, whole_cols, ncols = problem.part.of(name)
        return tuple(whole_rows[i] for i in rows), tuple(whole_cols[j] for j in cols), ncols

    def sizes_of(name: str) -> Chunks:
        (rows, cols), (of_rows, of_cols) = problem.chunks_of(name), numbers[name]
        return tuple(rows[i] for i in of_rows), tuple(cols[j] for j in of_cols)

    return dataclasses.replace(
        problem,
        a_chunks=sizes_of("a"),
        b_chunks=sizes_of("b"),
        out_chunks=sizes_of("d"),
        extras=tuple(dataclasses.replace(extra, chunks=sizes_of(extra.name)) for extra in problem.extras),
        method="auto",
        same=False,
        arrays=("", ""),
        part=Part(tuple((name, *of_user(name)) for name in names), problem.result_name),
    )


def _mark(chunkings: Sequence[Sequence[int]], chunks: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """Mark the elements of an axis from one common edge of all chunkings to another that have any of these chunks."""
    ends = [np.cumsum(sizes) for sizes in chunkings]
    common = np.concatenate([[0], ends[0][np.all([np.isin(ends[0], other) for other in ends], axis=0)]])
    marked = np.zeros(length, bool)
    for chunk in chunks.tolist():
        start = int(ends[0][chunk] - chunkings[0][chunk])
        at = int(np.searchsorted(common, start, "right"))
        marked[common[at - 1] : common[at]] = True
    return marked
