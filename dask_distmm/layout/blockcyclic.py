"""ScaLAPACK's layout: blocks of a matrix dealt out over a process grid.

Along each dimension the matrix is cut into equal blocks (the last may be smaller) and these go to the process
rows, or columns, in turn, as cards are dealt out.  Each process packs its blocks together into one local
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

from dask_distmm.layout.axis import Axis, Index, check_int
from dask_distmm.layout.grid import ProcessGrid


def numroc(n: int, nb: int, iproc: int, isrcproc: int, nprocs: int) -> int:
    """Count the rows or columns that a process holds (ScaLAPACK TOOLS, NUMROC)."""
    n = check_int("n", n, 0)
    turn = _round_turn(nb, iproc, isrcproc, nprocs)
    # Every full round gives each process one block; the rest is dealt out in turn, nb at a time.
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
