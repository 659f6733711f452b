"""Dask's layout: a grid of chunks, each its own small matrix.

Along each dimension the chunks may have any sizes, 0 included, and follow one another; nothing cycles.  The
chunks are numbered in C order.  With ``chunks=((2, 3), (4, 1, 4))``::

             4 cols   1   4 cols
           +--------+---+--------+
    2 rows |   0    | 1 |   2    |
           +--------+---+--------+
    3 rows |   3    | 4 |   5    |
           +--------+---+--------+
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isnan

from dask_distmm.layout.axis import Axis, Index, check_int


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
        """Return where in the whole matrix the chunk in row `i` and column `j` of the chunks lies."""
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
