"""Distributions by hand: which ways to run a problem have the tiles that were asked for, and where tiles lie. Pure.

The tiles of each way, on cuBLASMp (`tiles.py` says why) and on the other engines, numpy and peer:

===============  ============================================  =======================  =======================
method, grid     A                                             B                        D
===============  ============================================  =======================  =======================
allgather P x 1  row slabs                                     cublasmp: column slabs;  row slabs
                                                               others: anywhere
allgather 1 x P  cublasmp: row slabs; others: anywhere         column slabs             column slabs
reducescatter    column slabs                                  row slabs                row or column slabs
allreduce        column slabs                                  row slabs                not by a distribution
summa p x q      blocks on a p x q grid                        the same                 the same
===============  ============================================  =======================  =======================

On engines other than cuBLASMp a rank computes one block of D, so that blocks of m and n are distributed once; those of
k may be of any size. SUMMA of cuBLASMp takes blocks of any size that agree: of m in A and D, of n in B and D, of k in
A and B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import PlanError
from dask_distmm.layout import ProcessGrid
from dask_distmm.planning.computation import Chunks
from dask_distmm.planning.cuts import uniform_cut
from dask_distmm.planning.distribution import BlockCyclic, Slab
from dask_distmm.planning.model import ENGINES
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import Problem

# The ways to share a multiply among P workers


def candidates(problem: Problem, nworkers: int, method: str = "auto") -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the (method, p x q x s) that can run a problem on up to `nworkers` workers.

    With ``method="auto"`` also on fewer: 1 and the powers of two, since a small product is faster on few
    workers. A method that is asked for takes as many workers as have something to do.
    """
    m, n, k = problem.m, problem.n, problem.k
    counts = {nworkers, 1} | {2**e for e in range(nworkers.bit_length()) if 2**e < nworkers}
    for count in sorted(counts if method == "auto" else range(1, nworkers + 1), reverse=True):
        found = list(grids(m, n, k, count, method))
        yield from found
        if found and method != "auto":
            return


def grids(m: int, n: int, k: int, count: int, method: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the ways that take exactly `count` workers."""

    def wanted(name: str) -> bool:
        # On one worker all methods are the same thing; by choice it is called by its name.
        return method == name or (method == "auto" and (name == "local") == (count == 1))

    if wanted("local"):
        yield "local", (1, 1, 1)
    if wanted("allgather"):
        if count <= m:
            yield "allgather", (count, 1, 1)
        if count <= n and count > 1:
            yield "allgather", (1, count, 1)
    if wanted("summa"):
        grid = ProcessGrid.best(count, m, n)
        if grid is not None and (method == "summa" or min(grid.nprow, grid.npcol) > 1):
            yield "summa", (grid.nprow, grid.npcol, 1)
    if wanted("reducescatter") and count <= min(k, max(m, n)):
        yield "reducescatter", (1, 1, count)
    if wanted("allreduce") and count <= k:
        yield "allreduce", (1, 1, count)


# Distributions by hand: which ways to run a problem have the tiles that were asked for, and where tiles lie. Pure


_Side = tuple[int, int | None]  # parts along an axis, and the size of a block; None for any
_Need = tuple[tuple[_Side, _Side], ...] | None  # one of these; None for anything
_ALL: _Side = (1, None)


def asked_ways(problem: Problem, nworkers: int, engine: str) -> list[tuple[str, tuple[int, int, int]]]:
    """Return the (method, p x q x s) whose tiles of A, B and D are those that were asked for.

    As many workers as the grids asked for have, or as there are.
    """
    sizes = {math.prod(asked.grid) for asked in problem.distributions if isinstance(asked, BlockCyclic)}
    if len(sizes) > 1 or max(sizes, default=0) > nworkers:
        raise PlanError(
            f"distributions: {_asked_text(problem)} need {' and '.join(map(str, sorted(sizes)))} workers, and there "
            f"are {nworkers}: pass grids of one size, of at most {nworkers} workers"
        )
    # No slab may be empty.
    lengths = [
        shape[asked.axis]
        for asked, shape in zip(problem.distributions, _shapes(problem).values(), strict=True)
        if isinstance(asked, Slab)
    ]
    count = max(sizes) if sizes else min(nworkers, *lengths)
    found, seen = [], []
    for method, grid in _asked_ways(problem, count):
        have = _tiles(problem, engine, method, grid)
        reason = _misfit(problem, engine, method, grid, count, have)
        if reason is None:
            found.append((method, grid))
        else:
            text = ", ".join(f"{operand.upper()} {_need_text(need)}" for operand, need in have.items())
            seen.append(f"{method} {' x '.join(map(str, grid))} has {text}{reason and f' ({reason})'}")
    if found:
        return found
    ways = "; ".join(seen) or f"method {problem.method!r} does not fit the shapes"
    raise PlanError(
        f"distributions: no way to multiply on {nworkers} workers with engine {engine!r} has {_asked_text(problem)}. "
        f"{ways}. Ask for one of these, or for less (None)"
    )


def _shapes(problem: Problem) -> dict[str, tuple[int, int]]:
    return {"a": (problem.m, problem.k), "b": (problem.k, problem.n), "d": (problem.m, problem.n)}


def _asked_ways(problem: Problem, count: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the ways that `count` workers can take, with those grids that were asked for."""
    ways = list(grids(problem.m, problem.n, problem.k, count, problem.method))
    for asked in problem.distributions:
        if isinstance(asked, BlockCyclic) and problem.method in ("auto", "summa") and count > 1:
            p, q = asked.grid
            if p <= problem.m and q <= problem.n and (problem.method == "summa" or min(p, q) > 1):
                ways.append(("summa", (p, q, 1)))
    yield from dict.fromkeys(ways)


def _tiles(problem: Problem, engine: str, method: str, grid: tuple[int, int, int]) -> dict[str, _Need]:
    """Return what tiles a way has of A, B and D."""
    p, q, s = grid
    count, (m, n, k) = p * q * s, (problem.m, problem.n, problem.k)

    def rows(length: int) -> tuple[_Side, _Side]:
        return (count, -(-length // count)), _ALL

    def cols(length: int) -> tuple[_Side, _Side]:
        return _ALL, (count, -(-length // count))

    if count == 1:
        alone = ((_ALL, _ALL),)
        return {"a": alone, "b": alone, "d": alone}
    blocks = not ENGINES[engine].collective
    if method == "allgather":
        by_rows = q == 1
        return {
            "a": None if blocks and not by_rows else (rows(m),),
            "b": None if blocks and by_rows else (cols(n),),
            "d": (rows(m),) if by_rows else (cols(n),),
        }
    if method in ("reducescatter", "allreduce"):
        slabs = [rows(m)] * (count <= m) + [cols(n)] * (count <= n)
        return {"a": (cols(k),), "b": (rows(k),), "d": tuple(slabs) if method == "reducescatter" else ()}

    def side(parts: int, length: int) -> _Side:
        return (parts, -(-length // parts) if blocks and parts > 1 else None)

    any_k = [(p, None), (q, None)]
    return {
        "a": ((side(p, m), any_k[1]),),
        "b": ((any_k[0], side(q, n)),),
        "d": ((side(p, m), side(q, n)),),
    }


def _misfit(
    problem: Problem, engine: str, method: str, grid: tuple[int, int, int], count: int, have: Mapping[str, _Need]
) -> str | None:
    """Return None if a way has what was asked for, else a reason (empty where what it has says it)."""
    shapes = _shapes(problem)
    for (operand, need), asked in zip(have.items(), problem.distributions, strict=True):
        if asked is None or need is None:
            continue
        found = asked.layout(shapes[operand], count)
        sides = (found.grid.nprow, found.blocks[0]), (found.grid.npcol, found.blocks[1])
        if not any(all(map(_fits, sides, one)) for one in need):
            return ""
    return ENGINES[engine].misfit(problem, grid) if method == "summa" and count > 1 else None


def _fits(side: tuple[int, int], need: _Side) -> bool:
    return side[0] == need[0] and (need[1] in (None, side[1]) or side[0] == 1)


def _asked_text(problem: Problem) -> str:
    named = zip("ABD", problem.distributions, strict=True)
    return ", ".join(f"{name} as {asked}" for name, asked in named if asked is not None)


def _need_text(need: _Need) -> str:
    """Say in words what tiles a way has."""
    if need is None:
        return "anywhere"
    texts = []
    for (nprow, mb), (npcol, nb) in need:
        if nprow == npcol == 1:
            texts.append("on one worker")
        elif min(nprow, npcol) == 1:
            texts.append("in row slabs" if npcol == 1 else "in column slabs")
        else:
            size = " x ".join("any" if block is None else str(block) for block in (mb, nb))
            texts.append(f"in blocks of {size} on a {nprow} x {npcol} grid")
    return " or ".join(texts) or "wherever its chunks will stay"


def operand_tiles(plan: Plan) -> dict[str, tuple[Chunks, NDArray[np.int64]]]:
    """Return for A and B the sizes of their tiles along both axes, and the rank that each tile, in C order, is for.

    With chunks that are these tiles, on these ranks, nothing is left for a run to move but what its method itself
    does: an operand that all gather is distributed evenly.
    """
    if (tiles := ENGINES[plan.engine].tiles(plan)) is not None:
        return {"a": tiles.a.layout.as_chunks(), "b": tiles.b.layout.as_chunks()}
    problem, (p, q, s) = plan.problem, plan.grid
    rows, cols, depth = (tuple(np.diff(cut).tolist()) for cut in (plan.rows, plan.cols, plan.depth))
    if s > 1:
        ranks = np.arange(s)
        return {"a": ((rows, depth), ranks), "b": ((depth, cols), ranks)}
    # k is gathered along the rows and columns of the grid: each rank brings a part of it.
    along, down = (tuple(np.diff(uniform_cut(problem.k, parts)).tolist()) for parts in (q, p))
    number = np.arange(p * q).reshape(p, q)
    return {"a": ((rows, along), number[:, : len(along)].ravel()), "b": ((down, cols), number[: len(down)].ravel())}
