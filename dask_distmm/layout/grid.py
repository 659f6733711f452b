"""Processes arranged in rows and columns.

Processes are numbered by one *rank*; a two-dimensional layout wants two coordinates.  A 2 x 3 grid can count
its ranks along the rows or along the columns::

    order "row":   0 1 2      order "col":   0 2 4
                   3 4 5                     1 3 5

The shape of the grid decides how much a matrix product communicates.  To make its piece of an m x n product
over an inner dimension k, each process of a p x q grid receives m/p rows of the left factor and n/q columns
of the right one, together ``(m/p + n/q) * k`` elements, so a tall product wants a tall grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal

from dask_distmm.layout.axis import Index, check_int


@dataclass(frozen=True)
class ProcessGrid:
    """A grid of `nprow` x `npcol` processes."""

    # Number of process rows and of process columns, 1 or more each.
    nprow: int
    npcol: int
    # Whether ranks count along a row first (C order) or along a column first.
    order: Literal["row", "col"] = "row"

    def __post_init__(self) -> None:
        """Check the numbers."""
        object.__setattr__(self, "nprow", check_int("nprow", self.nprow, 1))
        object.__setattr__(self, "npcol", check_int("npcol", self.npcol, 1))
        if self.order not in ("row", "col"):
            raise ValueError(f"order is {self.order!r}, expected 'row' or 'col': pass one of these")

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.nprow * self.npcol

    def coords(self, rank: int) -> tuple[int, int]:
        """Return the process row and column of a rank."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank is {rank}, expected it in range({self.size}): pass a rank of {self}")
        if self.order == "row":
            return divmod(rank, self.npcol)
        pcol, prow = divmod(rank, self.nprow)
        return prow, pcol

    def rank(self, prow: int, pcol: int) -> int:
        """Return the rank at a process row and column."""
        if not (0 <= prow < self.nprow and 0 <= pcol < self.npcol):
            raise IndexError(
                f"process coordinates are ({prow}, {pcol}), expected them in {self.nprow} x {self.npcol}: "
                f"pass coordinates of {self}"
            )
        return prow * self.npcol + pcol if self.order == "row" else pcol * self.nprow + prow

    def ranks(self, prow: Index, pcol: Index) -> Index:
        """Return the ranks at many coordinates: as `rank`, for int64 arrays which broadcast, unchecked."""
        return prow * self.npcol + pcol if self.order == "row" else pcol * self.nprow + prow

    def transpose(self) -> ProcessGrid:
        """Return the grid in which each rank has its row and column swapped.

        The order is swapped too, which leaves every rank its place in the transposed matrix.
        """
        return ProcessGrid(self.npcol, self.nprow, "col" if self.order == "row" else "row")

    @staticmethod
    def factorizations(nprocs: int) -> list[tuple[int, int]]:
        """List every ``(nprow, npcol)`` with product `nprocs`, by increasing `nprow`."""
        nprocs = check_int("nprocs", nprocs, 1)
        wide = [(p, nprocs // p) for p in range(1, isqrt(nprocs) + 1) if nprocs % p == 0]
        tall = [(q, p) for p, q in reversed(wide) if p != q]
        return wide + tall

    @classmethod
    def best(cls, nprocs: int, m: int, n: int, order: Literal["row", "col"] = "row") -> ProcessGrid:
        """Choose the grid on which an m x n matrix product communicates least.

        Among the p x q grids of exactly `nprocs` processes with ``p <= m`` and ``q <= n``, this is the one
        with the smallest ``m/p + n/q``, the volume which each process receives in SUMMA per step of the
        inner dimension (R. van de Geijn and J. Watts, SUMMA: Scalable Universal Matrix Multiplication
        Algorithm, 1997).  Ties go to the squarer grid, then to the one with more rows.
        """
        m, n = check_int("m", m, 0), check_int("n", n, 0)
        fitting = _fitting(check_int("nprocs", nprocs, 1), m, n)
        if not fitting:
            smaller = next((size for size in range(min(nprocs, m * n), 0, -1) if _fitting(size, m, n)), None)
            advice = "an empty product needs no grid" if smaller is None else f"use {smaller} processes"
            raise ValueError(
                f"no grid of {nprocs} processes fits {m} x {n}, expected one with at most {m} rows and {n} "
                f"columns: {advice}"
            )

        def cost(shape: tuple[int, int]) -> tuple[int, int, int]:
            p, q = shape
            # m/p + n/q times p*q, which is the same for all: integers compare exactly.
            return m * q + n * p, abs(p - q), -p

        return cls(*min(fitting, key=cost), order)


def _fitting(nprocs: int, m: int, n: int) -> list[tuple[int, int]]:
    return [(p, q) for p, q in ProcessGrid.factorizations(nprocs) if p <= m and q <= n]
