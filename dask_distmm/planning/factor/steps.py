"""The steps of a rank's program.

A factorization works on the matrix A and often on a second one with as many rows: right-hand sides, or an identity that
becomes Q. Both are cut into block columns, which are numbered on: A's first, then the second one's. Block ``g`` belongs
to rank ``g mod P``. Here A has four blocks, B two, and there are three ranks::

    block       0   1   2   3 | 4   5
    rank        0   1   2   0 | 1   2
    rank 0     [0][3]
    rank 1     [1][4]
    rank 2     [2][5]

All rows of a block column are on one rank. So a panel is factorized without any message, pivots are searched for over
the whole column, and rows are swapped at home.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import Layout, ProcessGrid

# Where block columns lie: distributed round-robin over the ranks, each rank's side by side in one array


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that is cut into block columns."""

    # Its rows and columns.
    shape: tuple[int, int]
    # Columns of a block; the last one may have fewer.
    width: int

    @property
    def count(self) -> int:
        """Number of its blocks."""
        return -(-self.shape[1] // self.width)


class BlockColumn(NamedTuple):
    """A block column."""

    # 0 for A, 1 for the second one.
    matrix: int
    # Its columns of that matrix.
    start: int
    stop: int


class DiagonalBlock(NamedTuple):
    """Where the diagonal block of a panel is."""

    # Its rows and columns. In the last panel of a matrix with more columns than rows the panel continues beyond `stop`.
    start: int
    stop: int
    # Number of diagonal elements of the matrix.
    order: int


@dataclasses.dataclass(frozen=True)
class Columns:
    """Block columns of one or two matrices over `ranks` ranks."""

    # A, and the second matrix if there is one.
    matrices: tuple[Matrix, ...]
    # Number of ranks.
    ranks: int
    # Whether the second matrix begins on rank 0, too, as libraries want it: between the two there are as many blocks
    # without columns as it takes.
    aligned: bool = False
    # Rows below the diagonal at which panels begin: 1 for the reflectors of a tridiagonal reduction.
    below: int = 0

    @property
    def rows(self) -> int:
        """Rows of each rank's array: those of the longest matrix."""
        return max(matrix.shape[0] for matrix in self.matrices)

    @property
    def count(self) -> int:
        """Number of all blocks."""
        return self.first(len(self.matrices))

    def first(self, matrix: int) -> int:
        """Return the number of the first block of a matrix, and behind the last matrix the number of all blocks."""
        found = 0
        for number, one in enumerate(self.matrices[:matrix], start=1):
            found += one.count
            if self.aligned and number < len(self.matrices):
                found = -(-found // self.ranks) * self.ranks
        return found

    def owner(self, block: int) -> int:
        """Return the rank that has a block."""
        return block % self.ranks

    @functools.cached_property
    def blocks(self) -> tuple[BlockColumn, ...]:
        """All blocks in the order of their numbers."""
        found: list[BlockColumn] = []
        for number, matrix in enumerate(self.matrices):
            cols = matrix.shape[1]
            found += (BlockColumn(number, at, min(at + matrix.width, cols)) for at in range(0, cols, matrix.width))
            found += [BlockColumn(number, cols, cols)] * (self.first(number + 1) - len(found))
        return tuple(found)

    def place(self, panel: int) -> DiagonalBlock:
        """Return where the diagonal block of a panel of A is, or the block `below` it."""
        order = min(self.matrices[0].shape)
        _, start, stop = self.blocks[panel]
        return DiagonalBlock(start + self.below, min(stop + self.below, order), order)

    def owned(self, rank: int, first: int = 0, stop: int | None = None) -> range:
        """Return the numbers of a rank's blocks in ``range(first, stop)``; without `stop`, of all from `first`."""
        return range(first + (rank - first) % self.ranks, self.count if stop is None else stop, self.ranks)

    @functools.cached_property
    def _starts(self) -> tuple[int, ...]:
        """For each block, the column of its rank's array at which it begins; behind the last one the ranks' columns."""
        ends = [0] * self.ranks
        found = []
        for number, block in enumerate(self.blocks):
            found.append(ends[self.owner(number)])
            ends[self.owner(number)] += block.stop - block.start
        return (*found, *ends)

    def local_cols(self, rank: int) -> int:
        """Return the number of columns of a rank's array."""
        return self._starts[self.count + rank]

    def local(self, rank: int, first: int, stop: int) -> slice:
        """Return the columns of a rank's array that hold its blocks in ``range(first, stop)``, which are neighbours."""
        owned = self.owned(rank, first, stop)
        if not owned:
            return slice(0, 0)
        last = self.blocks[owned[-1]]
        return slice(self._starts[owned[0]], self._starts[owned[-1]] + last.stop - last.start)

    def held(self, matrix: int, rank: int) -> NDArray[np.int64]:
        """Return which columns of a matrix a rank's array has, in the order in which they lie there."""
        blocks = (self.blocks[block] for block in self.owned(rank, self.first(matrix), self.first(matrix + 1)))
        return np.concatenate([np.arange(0), *(np.arange(start, stop) for _, start, stop in blocks)])

    def layout(self, matrix: int, shape: tuple[int, int] | None = None) -> Layout:
        """Return the layout of a matrix, or of one of `shape` whose block columns lie as those of that matrix do."""
        rows, cols = shape or self.matrices[matrix].shape
        width = self.matrices[matrix].width
        return Layout(
            (rows, cols), (max(1, rows), width), ProcessGrid(1, self.ranks), (0, self.first(matrix) % self.ranks)
        )


# The steps of a rank's program


# The part of a panel that others need. "lower": its rows from the diagonal on, with the pivots (LU) or T (QR);
# "upper": its rows up to and with the diagonal block; "pivots": only pivots and diagonal. "carried" is not a part: the
# right-hand side on its way to the owner of the panel, or to its own rank under its own number.
#
# Of shared eigenvalues, each kind with numbers of its own. "size": the largest element of a rank's block columns.
# "vector": the reflector of a column; "product": the matrix times that, a rank's part; "reflectors": those of a narrow
# panel. "above" and "below": what a merge needs of the parts on both sides of a rank's first row; "values": all
# eigenvalues; "rows": a rank's rows of eigenvectors, in the columns of another one.
Part = Literal[
    "lower",
    "upper",
    "pivots",
    "carried",
    "size",
    "vector",
    "product",
    "reflectors",
    "above",
    "below",
    "values",
    "rows",
]


class Key(NamedTuple):
    """Names a part of a panel; it is the same until the end of the run."""

    part: Part
    panel: int


class Operation(NamedTuple):
    """How a panel changes block columns."""

    # ``"cholesky"``, ``"lu"``, ``"qr"``: as the factorization continues. ``"substitute"``: one block row of a
    # triangular system is solved. ``"reflect"``: the columns are multiplied by I - V T V^H.
    name: str
    # Of the triangle that is solved with: whether it is the lower one, ``"N"``, ``"T"`` or ``"C"``, and whether its
    # diagonal is taken for ones.
    lower: bool = False
    op: str = "N"
    unit: bool = False


class Factor(NamedTuple):
    """Factorize the rank's own panel in place."""

    operation: Operation
    panel: int


class Check(NamedTuple):
    """Raise if the diagonal of the rank's own panel says that the matrix is singular."""

    # Number of the panel.
    panel: int
    # Whether a diagonal element that is no more than rounding of its column counts as zero, too.
    rank: bool


class Publish(NamedTuple):
    """From now on others may have this part of the rank's own panel."""

    key: Key


class Ask(NamedTuple):
    """Ask the owner for a part of its panel, and do not wait for it."""

    key: Key
    owner: int


class Get(NamedTuple):
    """Wait for what was asked for."""

    key: Key


class Apply(NamedTuple):
    """Apply a panel, the rank's own or one that is here, to the rank's own blocks in ``range(first, stop)``.

    `ahead`: to the next panel, before the rest, so that it can be factorized.
    """

    operation: Operation
    key: Key
    first: int
    stop: int
    ahead: bool = False


class Drop(NamedTuple):
    """Free what came from another rank."""

    key: Key


class Decompose(NamedTuple):
    """Compute eigenvalues or singular values, and vectors, of the whole matrix, which one rank has."""


class Tridiagonalize(NamedTuple):
    """Reduce the Hermitian matrix, whose block columns all ranks have, to a tridiagonal one, with all other ranks.

    Panels are reflectors afterwards.
    """


class Diagonalize(NamedTuple):
    """Compute eigenvalues, and block columns of eigenvectors, of the tridiagonal matrix, with all other ranks."""


class NormalizePhases(NamedTuple):
    """Give the rank's own columns of eigenvectors the factors of modulus one that make them unique."""


Step = Decompose | Tridiagonalize | Diagonalize | NormalizePhases | Factor | Check | Publish | Ask | Get | Apply | Drop
