"""How A, B and D lie on the ranks for a collective library: block-cyclic tiles, memory orders and op(). Pure.

cuBLASMp works on column-major local matrices and computes ``Z = op(X) @ op(Y)``. A C-ordered matrix is the
column-major matrix of its transpose, so nothing is ever transposed for the sake of the library:

* D in F order:  ``Z = D``,    ``X = A``,    ``Y = B``
* D in C order:  ``Z = D^T``,  ``X = B^T``,  ``Y = A^T``

and an operand is taken with op N if it has D's memory order, with op T if it has the other one. The library's
tuned 1-D paths want the operands in slabs (found from its log, docs/gpu-validation.md):

===============  ==================  ================  ==========================================
method, grid     A                   B                 D
===============  ==================  ================  ==========================================
allgather P x 1  row slabs           column slabs      row slabs, F order
allgather 1 x P  row slabs           column slabs      column slabs, C order
reducescatter    column slabs (of k) row slabs (of k)  row slabs, C order; or column slabs, F order
allreduce        column slabs, C     row slabs, F      all of D on every rank, C order
summa p x q      p x q blocks        p x q blocks      p x q blocks; all of one order
===============  ==================  ================  ==========================================

The slabs must be of one size, so all are as large as the largest: the last rank's tile has rows or columns
that stand for nothing. Where these would be summed over (k), they are filled with zeros.

FP8 wants op T for the first operand and op N for the second, k being the fast axis of both: A in C order, B in F order.
And m, n and k of each rank's own multiply must be multiples of 16: slabs are, and other dimensions are padded.
SUMMA and the fallback have no FP8.

Of 16-bit types they are multiples of 8, which are 16 bytes, for another reason: where they are not, cuBLASMp's
all-gather and SUMMA may cut k and add the parts up in D, rounded each time (docs/gpu-validation.md), and all methods
take 3 to 6 times as long. Blocks that the caller asked for, and the last blocks of SUMMA, can't be padded: their D is
returned in the type of the sums; see `epilogs.returned_type`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from dask_distmm.layout import Layout, ProcessGrid
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.cuts import ALIGNED_BYTES, padded
from dask_distmm.planning.plan import Plan, once
from dask_distmm.planning.problem import Problem

# SUMMA multiplies a panel of k at a time; wider ones are faster and need more workspace.
_WIDEST_PANEL = 16384
# Elements of a 16-bit type.
HALVES_STEP = ALIGNED_BYTES // 2


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one of A, B and D is distributed."""

    # Memory order of each rank's tile, ``"C"`` or ``"F"``.
    order: str
    # Which element is where, without padding; its parts are the ranks. None where every rank has all.
    layout: Layout
    # The whole, padding included.
    shape: tuple[int, int]
    # Rows and columns of a rank's tile, padding included; None where they differ between ranks.
    local_shape: tuple[int, int] | None
    # The padding is summed over and must be zero.
    zeroed: bool = False
    # It holds the conjugate of the operand's chunks.
    conjugated: bool = False

    def local(self, rank: int) -> tuple[int, int]:
        """Rows and columns of the tile of a rank, padding included."""
        return self.local_shape or self.layout.local_shape(rank)

    @property
    def elements(self) -> NDArray[np.int64]:
        """Elements of each rank's tile, padding included."""
        return (
            self.layout.elements
            if self.local_shape is None
            else np.full(self.layout.grid.size, math.prod(self.local_shape))
        )

    @property
    def stored(self) -> Layout:
        """The whole as the library sees it, padding included: the transpose of a C-ordered matrix is column-major."""
        (m, n), (mb, nb), grid = self.shape, self.layout.blocks, self.layout.grid
        return Layout((m, n), (mb, nb), grid) if self.order == "F" else Layout((n, m), (nb, mb), grid.transpose())


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The three matrices of a plan."""

    # How they are distributed.
    a: Tile
    b: Tile
    d: Tile
    # Every rank ends up with all of D (``d`` then describes the library's view, one copy beside the other).
    replicated: bool = False
    # Whether the library conjugates A and B, which it does by op C, for those that it transposes.
    conjugated: tuple[bool, bool] = (False, False)

    @property
    def flipped(self) -> bool:
        """Whether the library computes the transpose of D."""
        return self.d.order == "C"

    @property
    def ops(self) -> tuple[str, str]:
        """Op of the library's first and second operand, ``"N"``, ``"T"`` or ``"C"``."""
        ops = tuple(
            "C" if conjugated else "N" if tile.order == self.d.order else "T"
            for tile, conjugated in zip((self.a, self.b), self.conjugated, strict=True)
        )
        return (ops[1], ops[0]) if self.flipped else (ops[0], ops[1])


def slab_step(problem: Problem) -> int:
    """Return what the sizes of slabs, and other dimensions, are padded to multiples of."""
    if problem.fp8:
        return 16
    # Distributions that were asked for are as they are.
    halves = dtype_from_name(problem.matrix_types[0]).itemsize == 2
    return HALVES_STEP if halves and not any(problem.distributions) else 1


@once
def make_tiles(plan: Plan) -> Tiles:
    """Return how A, B and D are distributed for a plan."""
    tiles = _blocks(plan) if plan.method == "summa" and math.prod(plan.grid) > 1 else _slabs(plan)
    if not any(plan.problem.conjugated):
        return tiles
    # The all-reduce wants op T and N; else a transposed operand is conjugated by the library, for nothing.
    found, by_library = [], []
    for tile, wanted in zip((tiles.a, tiles.b), plan.problem.conjugated, strict=True):
        by_library.append(wanted and tile.order != tiles.d.order and not tiles.replicated)
        found.append(dataclasses.replace(tile, conjugated=wanted and not by_library[-1]))
    return dataclasses.replace(tiles, a=found[0], b=found[1], conjugated=(by_library[0], by_library[1]))


def _slabs(plan: Plan) -> Tiles:
    """Return slabs of one size for all ranks; the other axis of a matrix is as long as all slabs of another one."""
    problem, nranks, step = plan.problem, math.prod(plan.grid), slab_step(plan.problem)
    lengths, cuts, finals = (problem.m, problem.n, problem.k), (plan.rows, plan.cols, plan.depth), plan.d_cuts
    for length, found in zip((*lengths, *lengths[: 2 if finals else 0]), (*cuts, *(finals or ())), strict=True):
        size = padded(length, step, len(found) - 1)
        if found != tuple(min(i * size, length) for i in range(len(found))):
            raise ValueError(f"{length} is cut at {found}, expected {len(found) - 1} slabs of {size}")
    by_rows, reduces = len((finals or cuts)[0]) > 2, len(plan.depth) > 2
    # Whether A has slabs of m and B those of n, each rank all of D, and there is a slab of m, n, k for each rank.
    both, replicated = nranks > 1 and not reduces, reduces and plan.method == "allreduce"
    slabs = both or by_rows, both or (reduces and not replicated and not by_rows), reduces
    mb, nb, kb = (padded(x, step, nranks if cut else 1) for x, cut in zip(lengths, slabs, strict=True))
    m, n, k = (size * (nranks if cut else 1) for size, cut in zip((mb, nb, kb), slabs, strict=True))
    row, col = ProcessGrid(nranks, 1), ProcessGrid(1, nranks)
    order_a, order_b = ("C", "F") if problem.fp8 or replicated else (plan.order_a, plan.order_b)
    order = order_a if order_a == order_b else "C"
    if nranks > 1:
        order = "C" if replicated or by_rows != both else "F"

    def tile(
        order: str, shape: tuple[int, int], block: tuple[int, int], whole: tuple[int, int], grid: ProcessGrid
    ) -> Tile:
        return Tile(order, Layout(shape, block, grid), whole, (whole[0] // grid.nprow, whole[1] // grid.npcol))

    a = tile(order_a, (problem.m, problem.k), (mb, kb), (m, k), col if reduces else row)
    b = tile(order_b, (problem.k, problem.n), (kb, nb), (k, n), row if reduces else col)
    # D^T is n x m; of replicas the library sees all side by side.
    d = tile(order, (problem.m, problem.n), (mb, nb), (m, n), row if by_rows or replicated else col)
    if replicated:
        d = tile(order, (m * nranks, n), (m, n), (m * nranks, n), row)
    zeroed = k != problem.k
    return Tiles(dataclasses.replace(a, zeroed=zeroed), dataclasses.replace(b, zeroed=zeroed), d, replicated)


def _blocks(plan: Plan) -> Tiles:
    """Return the blocks of SUMMA."""
    problem, grid = plan.problem, ProcessGrid(*plan.grid[:2])
    order = plan.order_a if plan.order_a == plan.order_b else "C"
    (mb,), (nb,), (kb,) = summa_blocks(problem, plan.grid)

    def tile(shape: tuple[int, int], block: tuple[int, int]) -> Tile:
        return Tile(order, Layout(shape, block, grid), shape, None)

    m, n, k = problem.m, problem.n, problem.k
    return Tiles(tile((m, k), (mb, kb)), tile((k, n), (kb, nb)), tile((m, n), (mb, nb)))


def summa_blocks(problem: Problem, grid: tuple[int, int, int]) -> tuple[set[int], set[int], set[int]]:
    """Return the block sizes of m, n and k on a grid: those that were asked for, or one that does.

    There may be several of each, if the distributions of two matrices do not agree.
    """
    (p, q, _), (m, n, k) = grid, (problem.m, problem.n, problem.k)
    a, b, d = problem.distributions
    asked: dict[str, set[int]] = {"m": set(), "n": set(), "k": set()}
    for found, (rows, cols), (nprow, npcol) in ((a, "mk", (p, q)), (b, "kn", (p, q)), (d, "mn", (p, q))):
        if found is not None:
            shape = {"m": m, "n": n, "k": k}
            blocks = found.layout((shape[rows], shape[cols]), p * q).blocks
            # Along a side of one rank blocks of all sizes are the same thing.
            asked[rows] |= {blocks[0]} if nprow > 1 else set()
            asked[cols] |= {blocks[1]} if npcol > 1 else set()
    # The library rounds D after each panel of k: 16-bit types have one, if no others were asked for.
    panel = k if problem.sum_type.itemsize == 2 else min(-(-k // math.lcm(p, q)), _WIDEST_PANEL)
    step = slab_step(problem)
    return asked["m"] or {padded(m, step, p)}, asked["n"] or {padded(n, step, q)}, asked["k"] or {panel}


def blocks_misfit(problem: Problem, grid: tuple[int, int, int]) -> str | None:
    """Return why SUMMA can't have the blocks that were asked for, or None."""
    sizes = summa_blocks(problem, grid)
    for name, several in zip("mnk", sizes, strict=True):
        if len(several) > 1:
            return f"blocks of {name} must agree, got {' and '.join(map(str, sorted(several)))}"
    (mb,), (nb,), _ = sizes
    for name, size, parts, length in (("m", mb, grid[0], problem.m), ("n", nb, grid[1], problem.n)):
        if parts > 1 and size * (parts - 1) >= length:
            return f"blocks of {size} of {name} leave ranks without any of {length}"
    return None
