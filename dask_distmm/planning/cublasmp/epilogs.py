"""The part of a plan's formula that cuBLASMp does itself, inside of a multiply. Pure.

cuBLASMp 0.10 has epilogs on its tuned all-gather and reduce-scatter paths only, where they save a pass over D: the
activations relu and gelu, a bias of one value for each row of the matrix that it computes, and both. That matrix is D
where D's tiles are in F order and the transpose of D where they are in C order (see `tiles`): so a value for each
column of D is native to an all-gather of A and to a reduce-scatter into rows, a value for each row to the others.
Factors of the product are native to every method.

Not all that the library offers is as good as the engine's own kernel (measured, docs/gpu-validation.md): its gelu of
float64 is off by up to 3e-10, and its all-gather with 16-bit types rounds the product before it adds a bias or applies
gelu. These are not left to it. And where extents of 16-bit matrices are not multiples of 16 bytes, its all-gather and
SUMMA may round parts of the sums (see `tiles`), as SUMMA does after each panel of k wherever there are several: there
it returns D in the type that is summed in, and does no epilog.
"""

from __future__ import annotations

import numpy as np

from dask_distmm.planning.cublasmp.tiles import HALVES_STEP, Tiles, make_tiles
from dask_distmm.planning.library_epilogs import library_epilog
from dask_distmm.planning.plan import Plan


def native_epilog(plan: Plan, tiles: Tiles | None = None) -> str | None:
    """Return the epilog that cuBLASMp does, ``""`` for a factor alone; None where it can't do all of the formula."""
    if len(plan.ranks) == 1:
        return None
    formula, found = plan.problem.formula, library_epilog(plan.problem)
    if found is None or _rounds_parts(plan, tiles):
        return None
    if not found:
        return found
    if plan.method not in ("allgather", "reducescatter"):
        return None
    dtype = plan.problem.result_type
    if dtype.itemsize == 2 and plan.method == "allgather" and formula.epilog != "relu":
        return None
    if "bias" in formula.inputs:
        by_rows = not (tiles or make_tiles(plan)).flipped
        rows, cols = (sum(sizes) for sizes in plan.problem.chunks_of("bias"))
        if (rows, cols) != ((plan.problem.m, 1) if by_rows else (1, plan.problem.n)):
            return None
    return found


def returned_type(plan: Plan, tiles: Tiles | None = None) -> np.dtype:
    """Return the type in which cuBLASMp returns D: its own, or the one that is summed in if more is done to it."""
    if _rounds_parts(plan, tiles):
        return plan.problem.compute_type
    return plan.problem.sum_type if native_epilog(plan, tiles) is None else plan.problem.result_type


def own_kernel(plan: Plan, tiles: Tiles | None = None) -> bool:
    """Whether what cuBLASMp returns is finished, or rounded, by the engine's own kernel."""
    return native_epilog(plan, tiles) is None and (plan.problem.finished or _rounds_parts(plan, tiles))


def _rounds_parts(plan: Plan, tiles: Tiles | None) -> bool:
    """Whether the library might add up parts of k in a 16-bit D."""
    if len(plan.ranks) == 1 or plan.method not in ("allgather", "summa"):
        return False
    if plan.problem.result_type.itemsize != 2 or plan.problem.result_type.kind in "iu":
        return False
    found = tiles or make_tiles(plan)
    if plan.method == "summa" and found.a.layout.blocks[1] < plan.problem.k:
        return True
    lengths = [x for tile in (found.a, found.b, found.d) for x in (*tile.shape, *tile.layout.blocks)]
    return any(length % HALVES_STEP for length in lengths)


def all_reduced(plan: Plan) -> bool:
    """Whether a plan's multiply itself leaves all of D, as it will be stored, on every rank."""
    return plan.method == "allreduce" and len(plan.ranks) > 1 and not own_kernel(plan)
