"""Of a symmetric or Hermitian D: the triangle that a rank multiplies, and the other one, which is copied from it. Pure.

A rank's block of D has a square on D's diagonal in it: all of D where k is cut, or on one GPU. Above the diagonal
nothing is multiplied there. The square is cut into strips of columns, and a strip begins with its own rows, so that
GEMMs are large::

    x . .        x  multiplied
    x x .        .  copied from below the diagonal
    x x x
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dask_distmm.planning.plan import Plan, Rect
from dask_distmm.planning.problem import is_gram

# Squares of fewer rows are multiplied whole. Of 16 strips of 1024 columns in float64 and float32, N = 16384, GEMM took
# 0.55 of the time of one product, cuBLAS' syrk 0.53 (1 H200).
_LEAST_ROWS = 2048
_STRIPS, _NARROWEST, _WIDEST = 8, 512, 1024


class Triangle(NamedTuple):
    """The square on the diagonal of D."""

    # Its rows, and its columns.
    start: int
    stop: int
    # Columns of a strip.
    width: int

    @property
    def strips(self) -> list[tuple[int, int]]:
        """The first column of each strip, and its last + 1."""
        return [(at, min(at + self.width, self.stop)) for at in range(self.start, self.stop, self.width)]

    def kept(self, rect: Rect) -> Iterator[Rect]:
        """Yield the parts of a rectangle of D that are multiplied."""
        r0, r1, c0, c1 = rect
        yield from _filled((r0, r1, c0, min(c1, self.start)))
        yield from _filled((r0, r1, max(c0, self.stop), c1))
        for first, last in self.strips:
            left, right = max(c0, first), min(c1, last)
            # Rows above the square are whole; within it a strip begins with its own rows.
            yield from _filled((r0, min(r1, self.start), left, right))
            yield from _filled((max(r0, first), r1, left, right))

    def copied(self) -> Iterator[Rect]:
        """Yield the rectangles above the diagonal that are copied."""
        for left, right in self.strips[1:]:
            yield self.start, left, left, right


def _filled(rect: Rect) -> Iterator[Rect]:
    if rect[0] < rect[1] and rect[2] < rect[3]:
        yield rect


def square_on_diagonal(plan: Plan, rank: int, epilog: str | None) -> Triangle | None:
    """Return the square of which a rank multiplies a triangle; None if it multiplies all of its block of D."""
    top, bottom, left, right = plan.region(rank)
    start, stop = max(top, left), min(bottom, right)
    turns = plan.problem.result_type.kind == "c" and complex(*plan.problem.formula.alpha).imag != 0
    if stop - start < _LEAST_ROWS or not is_gram(plan.problem) or epilog or (epilog is not None and turns):
        return None
    width = max(_NARROWEST, min(_WIDEST, (stop - start) // _STRIPS // _NARROWEST * _NARROWEST))
    return Triangle(start, stop, width)
