"""How a matrix is to lie on the workers, as a user says it: in slabs or block-cyclic. Pure.

::

    Slab(0) on 3 workers        Slab(1) on 3 workers       BlockCyclic((2, 2), (4, 3)) on 4 workers
    +-----------+  worker 0     +---+---+---+              +---+---+---+
    +-----------+  worker 1     | 0 | 1 | 2 |              | 0 | 1 | 0 |
    +-----------+  worker 2     +---+---+---+              | 2 | 3 | 2 |
                                                           +---+---+---+

Which worker is which rank is the order of the workers, along the rows of a grid first.
"""

from __future__ import annotations

import dataclasses

from dask_distmm.errors import PlanError
from dask_distmm.layout import Layout, ProcessGrid


@dataclasses.dataclass(frozen=True, slots=True)
class Slab:
    """Consecutive rows (or columns) for each worker: ``ceil(length / workers)`` of them, the last ones fewer or none.

    Parameters
    ----------
    axis : int
        The axis that is cut: 0 for slabs of rows, 1 for slabs of columns; -2 and -1 mean the same.

    Raises
    ------
    PlanError
        A matrix has no such axis.

    See Also
    --------
    BlockCyclic, distribute, matmul
    """

    axis: int

    def __post_init__(self) -> None:
        """Check the axis."""
        if isinstance(self.axis, bool) or self.axis not in (-2, -1, 0, 1):
            raise PlanError(f"Slab(axis={self.axis!r}): expected 0 for slabs of rows or 1 for slabs of columns")
        object.__setattr__(self, "axis", int(self.axis) % 2)

    def layout(self, shape: tuple[int, int], nranks: int) -> Layout:
        """Return which element of a matrix is on which of `nranks` ranks."""
        size = max(1, -(-shape[self.axis] // nranks))
        blocks = (size, max(1, shape[1])) if self.axis == 0 else (max(1, shape[0]), size)
        return Layout(shape, blocks, ProcessGrid(*((nranks, 1) if self.axis == 0 else (1, nranks))))


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCyclic:
    """Blocks of one size, distributed round-robin over a grid of workers (ScaLAPACK's layout).

    Parameters
    ----------
    grid : tuple of int
        Rows and columns of the grid of workers; block (i, j) is on that at ``(i % grid[0], j % grid[1])``.
    blocks : tuple of int
        Rows and columns of a block.

    Raises
    ------
    PlanError
        These are not two positive numbers each.

    See Also
    --------
    Slab, distribute, matmul
    """

    grid: tuple[int, int]
    blocks: tuple[int, int]

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("grid", "blocks"):
            sides = getattr(self, name)
            try:
                pair = tuple(int(x) for x in sides)
                good = len(pair) == 2 and min(pair) >= 1 and all(x == y for x, y in zip(pair, sides, strict=True))
            except (TypeError, ValueError):
                good = False
            if not good:
                raise PlanError(f"BlockCyclic({name}={sides!r}): expected two positive numbers, of rows and columns")
            object.__setattr__(self, name, pair)

    def layout(self, shape: tuple[int, int], nranks: int) -> Layout:
        """Return which element of a matrix is on which of the grid's ranks."""
        return Layout(shape, self.blocks, ProcessGrid(*self.grid))


Distribution = Slab | BlockCyclic
# Of A, B and D; None leaves the choice to the planner.
Distributions = tuple[Distribution | None, Distribution | None, Distribution | None]
FREE: Distributions = (None, None, None)
