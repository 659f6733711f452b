"""Which part of a matrix is where: an axis cut into segments, and the product of two of these.

An `Axis` says, for every index of ``range(length)``, which *part* holds it (a chunk, or a row of processes) and at
which *local* index in that part. It stores that per segment, not per index: a segment is a run of indices which lie one
after the other in one part. There are two kinds. Dask's chunks have any sizes, 0 included, and each is a part.
ScaLAPACK's blocks have one size (the last one may be smaller) and go to the parts round-robin; each part packs its
blocks together. Nine rows in blocks of two over two rows of processes::

    global row      0 1 | 2 3 | 4 5 | 6 7 | 8
    part             0  |  1  |  0  |  1  | 0
    local row       0 1 | 0 1 | 2 3 | 2 3 | 4

**ScaLAPACK counts rows and columns from 1, here they count from 0**; process coordinates count from 0 in both.

A `Layout` is the product of an axis of rows and one of columns. Its parts, chunks or processes, are a grid and have one
number each. A 2 x 3 grid can count along the rows or along the columns::

    order "row":   0 1 2      order "col":   0 2 4
                   3 4 5                     1 3 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Axis:
    """A cut of ``range(length)`` into consecutive segments, each stored contiguously in one part."""

    # Global indices where segments begin, and at the end the length; strictly increasing from 0. An axis of length 0
    # has ``bounds == [0]`` and no segment.
    bounds: Index
    # The part which holds each segment, in ``range(nparts)``. Neighbours in one part are one segment.
    part: Index
    # Local index in that part at which each segment begins.
    offset: Index
    # Number of parts; parts without any element are allowed.
    nparts: int

    @classmethod
    def from_chunks(cls, sizes: Sequence[int]) -> Axis:
        """Make the axis whose parts are consecutive chunks."""
        every = np.asarray(sizes, np.int64)
        filled = np.flatnonzero(every)
        return cls(np.append(0, np.cumsum(every[filled])), filled, np.zeros_like(filled), len(every))

    # Asked for once per rank and result.
    @classmethod
    @lru_cache(maxsize=32)
    def block_cyclic(cls, length: int, block: int, nparts: int, source: int = 0) -> Axis:
        """Make the axis whose blocks are distributed round-robin over parts, `source` the first."""
        # Blocks that stay together are one segment.
        block = block if nparts > 1 else max(1, length)
        number = np.arange(-(-length // block), dtype=np.int64)
        return cls(np.append(number * block, length), (number + source) % nparts, number // nparts * block, nparts)

    @property
    def length(self) -> int:
        """Number of elements."""
        return int(self.bounds[-1])

    @cached_property
    def local_sizes(self) -> list[int]:
        """Elements of each part."""
        sizes: list[int] = np.bincount(self.part, np.diff(self.bounds), self.nparts).astype(int).tolist()
        return sizes

    def locate(self, index: ArrayLike) -> tuple[Index, Index]:
        """Find where elements are stored."""
        at = np.asarray(index, dtype=np.int64)
        segment = np.searchsorted(self.bounds, at, side="right") - 1
        return self.part[segment], self.offset[segment] + at - self.bounds[segment]

    def local_to_global(self, part: int) -> list[tuple[int, int, int]]:
        """List the segments of a part in local order: first index, local index, size."""
        mine = np.flatnonzero(self.part == part)
        sizes = self.bounds[mine + 1] - self.bounds[mine]
        return list(zip(self.bounds[mine].tolist(), self.offset[mine].tolist(), sizes.tolist(), strict=True))


@dataclass(frozen=True)
class ProcessGrid:
    """A grid of `nprow` x `npcol` processes, or chunks, numbered along rows first (C order) or along columns first."""

    nprow: int
    npcol: int
    order: Literal["row", "col"] = "row"

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.nprow * self.npcol

    def coords(self, rank: int) -> tuple[int, int]:
        """Return the process row and column of a rank."""
        if not 0 <= rank < self.size:
            raise IndexError(f"part is {rank}, expected it in range({self.size}): pass a part of {self}")
        if self.order == "row":
            return divmod(rank, self.npcol)
        pcol, prow = divmod(rank, self.nprow)
        return prow, pcol

    def ranks(self, prow: Index, pcol: Index) -> Index:
        """Return the ranks at many coordinates: int64 arrays which broadcast, unchecked."""
        return prow * self.npcol + pcol if self.order == "row" else pcol * self.nprow + prow

    def transpose(self) -> ProcessGrid:
        """Return the grid in which each rank has its row and column swapped.

        The order is swapped too, which leaves every rank its place in the transposed matrix.
        """
        return ProcessGrid(self.npcol, self.nprow, "col" if self.order == "row" else "row")

    @classmethod
    def best(cls, nprocs: int, m: int, n: int) -> ProcessGrid | None:
        """Choose the grid on which an m x n matrix product communicates least; None if none fits.

        To make its piece of the product over an inner dimension k, each process of a p x q grid receives m/p rows of
        the left factor and n/q columns of the right one. Among the grids of exactly `nprocs` processes with ``p <= m``
        and ``q <= n``, this is the one with the smallest ``m/p + n/q`` (R. van de Geijn and J. Watts, SUMMA: Scalable
        Universal Matrix Multiplication Algorithm, 1997). Ties go to the squarer grid, then to the one with more rows.
        """
        low = [(p, nprocs // p) for p in range(1, isqrt(nprocs) + 1) if nprocs % p == 0]
        fitting = [(p, q) for p, q in (*low, *((q, p) for p, q in low)) if p <= m and q <= n]
        # m/p + n/q times p*q, which is the same for all: integers compare exactly.
        found = min(fitting, key=lambda x: (m * x[1] + n * x[0], abs(x[0] - x[1]), -x[0]), default=None)
        return None if found is None else cls(*found)


@dataclass(frozen=True)
class Layout:
    """Where the elements of a matrix are: chunks, slabs, block columns, or blocks over a grid of processes."""

    # Rows and columns of the matrix.
    shape: tuple[int, int]
    # For rows and for columns the size of a block (ScaLAPACK's MB, NB); or the sizes of all chunks.
    blocks: tuple[Any, Any]
    # The parts.
    grid: ProcessGrid
    # Row and column of the part that has the first block (ScaLAPACK's RSRC, CSRC).
    source: tuple[int, int] = (0, 0)

    @classmethod
    def of_chunks(cls, chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Layout:
        """Return Dask's layout: each chunk is a part, numbered in C order."""
        rows, cols = chunks
        return cls((sum(rows), sum(cols)), (rows, cols), ProcessGrid(len(rows), len(cols)))

    @cached_property
    def rows(self) -> Axis:
        """Layout of the rows over the rows of parts."""
        return self._axis(0, self.grid.nprow)

    @cached_property
    def cols(self) -> Axis:
        """Layout of the columns over the columns of parts."""
        return self._axis(1, self.grid.npcol)

    def _axis(self, axis: int, nparts: int) -> Axis:
        block = self.blocks[axis]
        if isinstance(block, tuple):
            return Axis.from_chunks(block)
        return Axis.block_cyclic(self.shape[axis], block, nparts, self.source[axis])

    def local_shape(self, part: int) -> tuple[int, int]:
        """Return the rows and columns which a part holds."""
        prow, pcol = self.grid.coords(part)
        return self.rows.local_sizes[prow], self.cols.local_sizes[pcol]

    @property
    def elements(self) -> Index:
        """Elements of each part."""
        found = np.multiply.outer(self.rows.local_sizes, self.cols.local_sizes)
        return (found if self.grid.order == "row" else found.T).ravel()

    def owner(self, i: int, j: int) -> int:
        """Return the part which holds element ``(i, j)``, counted from 0."""
        return int(self.grid.ranks(self.rows.locate(i)[0], self.cols.locate(j)[0]))

    def as_chunks(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], Index]:
        """Return the sizes of its segments along both axes, and the part of each rectangle of them, in C order."""
        rows, cols = (tuple(np.diff(axis.bounds).tolist()) for axis in (self.rows, self.cols))
        return (rows, cols), self.grid.ranks(self.rows.part[:, None], self.cols.part).ravel()
