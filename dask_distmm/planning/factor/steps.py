"""The steps of a rank's program."""

from __future__ import annotations

from typing import Literal, NamedTuple

# The part of a panel that others need. "lower": its rows from the diagonal on, with the pivots (LU) or T (QR);
# "upper": its rows up to and with the diagonal block; "pivots": pivots and diagonal alone. "carried" is no part: the
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

    # ``"cholesky"``, ``"lu"``, ``"qr"``: as the factorization goes on. ``"substitute"``: one block row of a
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


class Orient(NamedTuple):
    """Give the rank's own columns of eigenvectors the factors of modulus one that make them unique."""


Step = Decompose | Tridiagonalize | Diagonalize | Orient | Factor | Check | Publish | Ask | Get | Apply | Drop
