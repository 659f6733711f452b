"""The bytes of A and B that each rank of a plan needs, and how many of them each worker has. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import ChunkGrid, redistribution
from dask_distmm.planning.chunk_order import free_axes
from dask_distmm.planning.footprint import is_by_ranks, operand_grids
from dask_distmm.planning.placement import everywhere
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import Problem


def needed_and_held(made: Plan, nroster: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the input bytes that each rank needs, and how many of them each worker of the roster has."""
    p, q, s = made.grid
    npart = len(made.participants)
    (need_a, held_a), (need_b, held_b) = _operand_needs(made, "a"), _operand_needs(made, "b")
    need = need_a[:, None, :] + need_b.T[None, :, :]
    home = held_a[:, :, None, :] + held_b.transpose(0, 2, 1)[:, None, :, :]
    return need.reshape(p * q * s), home.reshape(npart, p * q * s).T[:, :nroster]


def gathered_bytes(made: Plan, operand: str) -> NDArray[np.float64]:
    """Return the bytes of A or B that each rank fetches in order to multiply."""
    needed, held = _operand_needs(made, operand)
    found = []
    for rank, me in enumerate(made.ranks):
        i, j, depth = made.coords(rank)
        part = (i, depth) if operand == "a" else (depth, j)
        found.append(needed[part] - held[(me, *part)])
    return np.array(found)


def _operand_needs(made: Plan, operand: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bytes of each part of A (rows x depth) or B (depth x cols), and those that each participant has."""
    problem, npart = made.problem, len(made.participants)
    rows, cols, depth = (np.diff(cut).astype(float) for cut in (made.rows, made.cols, made.depth))
    needed = np.outer(rows, depth) if operand == "a" else np.outer(depth, cols)
    where, parts = made.where.get(operand), operand_grids(made)["ab".index(operand)]
    held: NDArray[Any]
    if is_by_ranks(problem, operand):
        # They come from their source as others come from other workers.
        held = np.zeros((npart, *needed.shape))
    elif where is None and needed.size > 1 and _lies_in_slabs(problem, operand, needed.shape):
        held = np.zeros((npart, needed.size))
        np.fill_diagonal(held, needed.ravel())
        held = held.reshape(npart, *needed.shape)
    elif where is None or everywhere(where):
        held = np.broadcast_to(needed / (npart if where is None else 1), (npart, *needed.shape))
    else:
        held = redistribution(ChunkGrid(problem.chunks_of(operand)), parts).traffic(where, npart)
        held = held.reshape(npart, *needed.shape)
    itemsize = float(problem.itemsize(operand))
    return needed * itemsize, np.asarray(held * itemsize, float)


def _lies_in_slabs(problem: Problem, operand: str, parts: tuple[int, ...]) -> bool:
    """Whether an operand of which nothing is known lies in whole slabs as ranks need them: see `chunk_order`."""
    axis, counts = int(parts[1] > 1), problem.chunk_counts(operand)
    slabs = parts[1 - axis] == 1 == counts[1 - axis] and counts[axis] >= parts[axis]
    return slabs and {"a": "mk", "b": "kn"}[operand][axis] in free_axes(problem)
