"""Dask's layout: a grid of chunks, each its own small matrix.

Along each dimension the chunks may have any sizes, 0 included, and follow one another; nothing cycles.  The
chunks are numbered in C order.  With ``chunks=((2, 3), (4, 1, 4))``::

             4 cols   1   4 cols
           +--------+---+--------+
    2 rows |   0    | 1 |   2    |
           +--------+---+--------+
    3 rows |   3    | 4 |   5    |
           +--------+---+--------+

Processes are numbered by one *rank*; a two-dimensional layout wants two coordinates.  A 2 x 3 grid can count
its ranks along the rows or along the columns::

    order "row":   0 1 2      order "col":   0 2 4
                   3 4 5                     1 3 5

The shape of the grid decides how much a matrix product communicates.  To make its piece of an m x n product
over an inner dimension k, each process of a p x q grid receives m/p rows of the left factor and n/q columns
of the right one, together ``(m/p + n/q) * k`` elements, so a tall product wants a tall grid.

Along each dimension the matrix is cut into equal blocks (the last may be smaller) and these go to the process
rows, or columns, round-robin.  Each process packs its blocks together into one local
matrix.  Nine rows in blocks of two over two process rows::

    global row      0 1 | 2 3 | 4 5 | 6 7 | 8
    process row      0  |  1  |  0  |  1  | 0
    local row       0 1 | 0 1 | 2 3 | 2 3 | 4

`numroc` carries the name of ``numroc.f`` in ScaLAPACK's TOOLS directory, and computes the same.  **ScaLAPACK counts
rows and columns from 1, here they count from 0**; process coordinates count from 0 in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isnan, isqrt
from typing import Literal

from dask_distmm.layout.axis import Axis, Index, check_int

# ScaLAPACK's layout: blocks of a matrix distributed over a process grid


def numroc(n: int, nb: int, iproc: int, isrcproc: int, nprocs: int) -> int:
    """Count the rows or columns that a process holds (ScaLAPACK TOOLS, NUMROC)."""
    n = check_int("n", n, 0)
    turn = _round_turn(nb, iproc, isrcproc, nprocs)
    # Every full round gives each process one block; the rest is distributed round-robin, nb at a time.
    rounds, left = divmod(n, nb * nprocs)
    return rounds * nb + min(max(left - turn * nb, 0), nb)


def _round_turn(nb: int, iproc: int, isrcproc: int, nprocs: int) -> int:
    """Check the arguments and return which turn in a round is the process's, from 0."""
    check_int("nb", nb, 1)
    check_int("nprocs", nprocs, 1)
    for name, value in (("iproc", iproc), ("isrcproc", isrcproc)):
        if check_int(name, value, 0) >= nprocs:
            raise ValueError(f"{name} is {value}, expected it in range({nprocs}): pass an existing process")
    return (iproc - isrcproc) % nprocs


def _pair(name: str, values: tuple[int, int], least: int) -> tuple[int, int]:
    if len(values) != 2:
        raise ValueError(f"{name} is {values}, expected two numbers: pass (rows, columns)")
    return check_int(f"{name}[0]", values[0], least), check_int(f"{name}[1]", values[1], least)


@dataclass(frozen=True)
class BlockCyclicLayout:
    """The two-dimensional block-cyclic layout of a matrix over a process grid; its parts are ranks."""

    # Rows and columns of the matrix, 0 or more each.
    shape: tuple[int, int]
    # Rows and columns of a block (ScaLAPACK's MB, NB), 1 or more each.
    blocks: tuple[int, int]
    # The processes.
    grid: ProcessGrid
    # Process row and column of the first block (ScaLAPACK's RSRC, CSRC).
    source: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Check the numbers."""
        object.__setattr__(self, "shape", _pair("shape", self.shape, 0))
        object.__setattr__(self, "blocks", _pair("blocks", self.blocks, 1))
        object.__setattr__(self, "source", _pair("source", self.source, 0))
        if self.source[0] >= self.grid.nprow or self.source[1] >= self.grid.npcol:
            raise ValueError(
                f"source is {self.source}, expected it inside {self.grid.nprow} x {self.grid.npcol}: "
                f"pass coordinates of {self.grid}"
            )

    @cached_property
    def rows(self) -> Axis:
        """Layout of the rows over the process rows."""
        return Axis.block_cyclic(self.shape[0], self.blocks[0], self.grid.nprow, self.source[0])

    @cached_property
    def cols(self) -> Axis:
        """Layout of the columns over the process columns."""
        return Axis.block_cyclic(self.shape[1], self.blocks[1], self.grid.npcol, self.source[1])

    @property
    def nparts(self) -> int:
        """Number of parts, which are the ranks."""
        return self.grid.size

    def part(self, prow: Index, pcol: Index) -> Index:
        """Return the ranks at process coordinates: int64 arrays which broadcast, unchecked."""
        return self.grid.ranks(prow, pcol)

    def coords(self, part: int) -> tuple[int, int]:
        """Return the process row and column of a rank."""
        return self.grid.coords(part)

    def local_shape(self, part: int) -> tuple[int, int]:
        """Return the rows and columns which a rank holds."""
        prow, pcol = self.grid.coords(part)
        return (
            numroc(self.shape[0], self.blocks[0], prow, self.source[0], self.grid.nprow),
            numroc(self.shape[1], self.blocks[1], pcol, self.source[1], self.grid.npcol),
        )

    def owner(self, i: int, j: int) -> int:
        """Return the rank which holds element ``(i, j)``, counted from 0."""
        if not (0 <= i < self.shape[0] and 0 <= j < self.shape[1]):
            raise IndexError(f"element is ({i}, {j}), expected it in shape {self.shape}: pass indices from 0")
        return self.grid.rank(int(self.rows.locate(i)[0]), int(self.cols.locate(j)[0]))


# Dask's layout: a grid of chunks, each its own small matrix


# Processes arranged in rows and columns


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


# Dask's layout: a grid of chunks, each its own small matrix


@dataclass(frozen=True)
class ChunkGrid:
    """The layout of a chunked matrix; its parts are chunks, numbered in C order."""

    # Rows of each row of chunks, and columns of each column of chunks, as ``dask.array.Array.chunks``.
    chunks: tuple[tuple[int, ...], tuple[int, ...]]

    def __post_init__(self) -> None:
        """Check the sizes."""
        if len(self.chunks) != 2:
            raise ValueError(f"chunks has {len(self.chunks)} dimensions, expected 2: pass a matrix's chunks")
        checked = (_sizes("rows", self.chunks[0]), _sizes("columns", self.chunks[1]))
        object.__setattr__(self, "chunks", checked)

    @cached_property
    def rows(self) -> Axis:
        """Layout of the rows over the rows of chunks."""
        return Axis.from_chunks(self.chunks[0])

    @cached_property
    def cols(self) -> Axis:
        """Layout of the columns over the columns of chunks."""
        return Axis.from_chunks(self.chunks[1])

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return sum(self.chunks[0]), sum(self.chunks[1])

    @property
    def numblocks(self) -> tuple[int, int]:
        """Number of rows of chunks and of columns of chunks."""
        return len(self.chunks[0]), len(self.chunks[1])

    @property
    def nparts(self) -> int:
        """Number of parts, which are the chunks, empty ones included."""
        return len(self.chunks[0]) * len(self.chunks[1])

    def part(self, prow: Index, pcol: Index) -> Index:
        """Return the numbers of the chunks at chunk coordinates: int64 arrays which broadcast, unchecked."""
        return prow * len(self.chunks[1]) + pcol

    def coords(self, part: int) -> tuple[int, int]:
        """Return the row and the column of chunks of a chunk number."""
        if not 0 <= part < self.nparts:
            raise IndexError(f"chunk is {part}, expected it in range({self.nparts}): pass a chunk number")
        return divmod(part, len(self.chunks[1]))

    def local_shape(self, part: int) -> tuple[int, int]:
        """Return the rows and columns of a chunk, given its number."""
        return self.chunk_shape(*self.coords(part))

    def chunk_shape(self, i: int, j: int) -> tuple[int, int]:
        """Return the rows and columns of the chunk in row `i` and column `j` of the chunks."""
        self._check(i, j)
        return self.chunks[0][i], self.chunks[1][j]

    def slices(self, i: int, j: int) -> tuple[slice, slice]:
        """Return where in the whole matrix the chunk in row `i` and column `j` of the chunks is."""
        self._check(i, j)
        top, left = self._starts[0][i], self._starts[1][j]
        return slice(top, top + self.chunks[0][i]), slice(left, left + self.chunks[1][j])

    @cached_property
    def _starts(self) -> tuple[list[int], list[int]]:
        return _starts(self.chunks[0]), _starts(self.chunks[1])

    def _check(self, i: int, j: int) -> None:
        if not (0 <= i < self.numblocks[0] and 0 <= j < self.numblocks[1]):
            raise IndexError(
                f"chunk is ({i}, {j}), expected it inside {self.numblocks[0]} x {self.numblocks[1]} chunks: "
                "pass coordinates from 0"
            )


def _sizes(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not sizes:
        raise ValueError(f"there are no chunks of {name}, expected one or more: use (0,) for no {name}")
    if any(isnan(size) for size in sizes):  # NaN is Dask's size of a chunk that it does not know yet
        raise ValueError(
            f"a chunk's number of {name} is unknown (nan), expected known sizes: "
            "call compute_chunk_sizes() on the array first"
        )
    return tuple(check_int(f"a chunk's number of {name}", size, 0) for size in sizes)


def _starts(sizes: tuple[int, ...]) -> list[int]:
    return list(accumulate(sizes, initial=0))
