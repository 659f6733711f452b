"""The extents that GEMMs of NVIDIA's libraries are quick with. Pure.

Measured on H200 with cuBLAS 13.1 (docs/gpu-validation.md): bfloat16 products take three times as long where rows of A,
B or D have no multiple of 16 bytes, six times where they have an odd number of elements, and float64 ones 1.4 times,
however far apart rows are. How many rows there are makes no difference, nor does it to float32 and complex types. A
product of too few elements leaves multiprocessors idle: with k = 8192 and 16384 one of a quarter of 2048 x 2048 had
0.53 of the rate of a large one in bfloat16, one of a sixteenth 0.30.
"""

from __future__ import annotations

from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.problem import Problem

# For odd numbers of elements, and for even ones.
_SLOWDOWN = {"float16": (6.0, 3.0), "bfloat16": (6.0, 3.0), "float64": (1.4, 1.4)}
ALIGNED_BYTES = 16
# Of elements: what all types are aligned with, and tiles of a GEMM.
_ALIGNED, _TILE = 16, 128
# Rows and columns of a product that fills a GPU, of types of up to 16 bits and of others, whose tiles are smaller.
_FULL = (2048, 1024)
# The parts that the first product waits for are pulled in up to so many pieces.
_PIECES = 4


def unit(length: int, step: int = 1) -> int:
    """Return what pieces of a length are to be multiples of, so that GEMMs are quick: of `step`, which is 1 or 16."""
    return next((size for size, least in ((_TILE, 8), (_ALIGNED, 4)) if length >= least * size), step)


def full_side(problem: Problem) -> int:
    """Return how many rows and columns a product needs to fill a GPU."""
    return _FULL[dtype_from_name(problem.matrix_types[0]).itemsize > 2]


def pieces_that_fill(problem: Problem, length: int, other: int) -> int:
    """Return into how many pieces a length is cut, so that their products with an extent `other` still fill a GPU."""
    return max(1, min(_PIECES, length * other // full_side(problem) ** 2))


def slowdown(problem: Problem, *, in_chunks: bool) -> float:
    """Return how many times as long products take because of their extents; 1 where these are as they should be."""
    name = problem.matrix_types[0]
    if problem.compute or name not in _SLOWDOWN:
        return 1.0
    # As in C order. In F order, where m counts too, products are as quick as their chunks allow.
    sizes: tuple[int, ...] = (problem.n, problem.k)
    if in_chunks:
        # In chunks of X.T @ Y as they lie no row is along k.
        along_k = () if problem.turned == (True, False) else (*problem.a_chunks[1], *problem.b_chunks[0])
        sizes = (*along_k, *problem.b_chunks[1], *problem.out_chunks[1])
    step = ALIGNED_BYTES // dtype_from_name(name).itemsize
    if not any(size % step for size in sizes):
        return 1.0
    return _SLOWDOWN[name][0 if any(size % 2 for size in sizes) else 1]
