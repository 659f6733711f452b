"""Eigenvalues of a symmetric tridiagonal matrix by bisection, without vectors. Pure.

The number of negative pivots of ``T - x`` is that of the eigenvalues below x (Sturm). All eigenvalues are looked for at
the same time, each in a bracket of its own; the kernel for GPUs has a thread for each. Counts as LAPACK's ``stebz`` has
them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_EPS = 2.0**-52
# More halvings than a bracket of finite numbers can have.
_MOST_STEPS = 1200


class Bounds:
    """What bisection needs beside the matrix."""

    def __init__(self, low: float, high: float, pivot: float, tolerance: float) -> None:
        self.low, self.high, self.pivot, self.tolerance = low, high, pivot, tolerance


def bounds(d: NDArray[np.float64], e: NDArray[np.float64]) -> Bounds:
    """Return the bounds of a matrix with diagonal d, (n,), and e beside it, (n - 1,); n is at least 1."""
    beside = np.abs(e)
    radius = np.concatenate([beside, [0.0]]) + np.concatenate([[0.0], beside])
    low, high = float((d - radius).min()), float((d + radius).max())
    size = max(abs(low), abs(high), float(np.finfo(float).tiny))
    pivot = float(np.finfo(float).tiny) * max(1.0, float((e * e).max(initial=0.0)))
    wider = 2 * size * _EPS * len(d) + 2 * pivot
    return Bounds(low - wider, high + wider, pivot, _EPS * size / 2)


def eigenvalues(d: NDArray[np.float64], e: NDArray[np.float64], first: int, last: int) -> NDArray[np.float64]:
    """Return the eigenvalues with numbers `first` to `last`, in ascending order."""
    around, squares = bounds(d, e), e * e
    numbers = np.arange(first, last + 1)
    low, high = np.full(len(numbers), around.low), np.full(len(numbers), around.high)
    for _ in range(_MOST_STEPS):
        middle = low + (high - low) / 2
        width = around.tolerance + _EPS * np.maximum(np.abs(low), np.abs(high))
        wide = high - low > width
        if not wide.any():
            break
        above = _count(d, squares, middle, around.pivot) > numbers
        low, high = np.where(wide & ~above, middle, low), np.where(wide & above, middle, high)
    return np.sort(low + (high - low) / 2)


def _count(
    d: NDArray[np.float64], squares: NDArray[np.float64], x: NDArray[np.float64], pivot: float
) -> NDArray[np.int64]:
    """Return how many eigenvalues are below each x."""
    found, last = np.zeros(len(x), np.int64), np.ones(len(x))
    for number, element in enumerate(d):
        last = element - x - (squares[number - 1] / last if number else 0.0)
        last = np.where(np.abs(last) < pivot, -pivot, last)
        found += last < 0
    return found
