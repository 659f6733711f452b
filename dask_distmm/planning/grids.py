"""The ways to share a multiply among P workers."""

from __future__ import annotations

from collections.abc import Iterator

from dask_distmm.layout import ProcessGrid
from dask_distmm.planning.problem import Problem


def candidates(problem: Problem, nworkers: int, method: str = "auto") -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the (method, p x q x s) that can run a problem on up to `nworkers` workers.

    With ``method="auto"`` also on fewer: 1 and the powers of two, since a small product is quicker on few
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
        try:
            grid = ProcessGrid.best(count, m, n)
        except ValueError:
            pass
        else:
            if method == "summa" or min(grid.nprow, grid.npcol) > 1:
                yield "summa", (grid.nprow, grid.npcol, 1)
    if wanted("reducescatter") and count <= min(k, max(m, n)):
        yield "reducescatter", (1, 1, count)
    if wanted("allreduce") and count <= k:
        yield "allreduce", (1, 1, count)
