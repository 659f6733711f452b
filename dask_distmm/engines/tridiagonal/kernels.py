"""The arithmetic of divide and conquer on one rank's rows of eigenvectors: a protocol, and what CPUs do.

The eigenvalues are the roots of the secular equation ``1/rho + sum_i z_i^2 / (d_i - x) = 0``: one between each pole and
the next one, one above the last. A root is kept as the nearest pole and its distance from that, so that its distance
from every pole has a small relative error. Of roots with any error there is a vector z' close to z for which they are
exact (Gu and Eisenstat 1995)::

    z'_i^2 = (x_i - d_i) prod_{j != i} (x_j - d_i) / (d_j - d_i)        (times a constant)

The eigenvectors are ``z'_i / (d_i - x_j)``, which are orthogonal whatever the errors of the roots.

Roots are found by rational interpolation: the function is replaced by ``c + s / (d_p - x) + S / (d_q - x)`` with the
poles p and q on both sides of the root, the value and the derivatives of both sums (the *middle way*: R.-C. Li, LAPACK
Working Note 89, 1993). A bracket guards the steps; one that leaves it halves it.

The kernels for GPUs do the same with a group of threads for each root.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.tridiagonal import bisection

# The second half of a merge: eigenvalues and eigenvectors of ``diag(d) + rho z z^T`` with distinct poles d. Pure


_EPS = 2.0**-53
# Elements of a matrix of all differences that are worked on at once.
_ELEMENTS = 2**21
# A root takes 4 to 8 steps.
_MOST_STEPS = 100


class Secular:
    """Eigenvalues and eigenvectors of ``diag(poles) + rho weights weights^T``."""

    def __init__(self, poles: Vector, weights: Vector, rho: float) -> None:
        self._poles = poles
        count = len(poles)
        self._origins, self._shifts = np.empty(count, np.int64), np.empty(count)
        step = max(1, _ELEMENTS // count)
        for first in range(0, count, step):
            some = slice(first, first + step)
            which = np.arange(count)[some]
            self._origins[some], self._shifts[some] = roots(poles, weights, rho, which)
        self.values = poles[self._origins] + self._shifts
        self._fitted = np.copysign(np.sqrt(self._squares(step)), weights)

    def _squares(self, step: int) -> Vector:
        """Return the squares of the weights for which the roots are exact."""
        poles, count = self._poles, len(self._poles)
        found = np.empty(count)
        for first in range(0, count, step):
            rows = np.arange(count)[first : first + step]
            # Of each row i the distances of all roots j, and of all poles j, from pole i.
            far = (poles[self._origins] - poles[rows, None]) + self._shifts
            near = poles - poles[rows, None]
            near[np.arange(len(rows)), rows] = 1.0
            found[rows] = np.abs(np.prod(far / near, axis=1))
        return found

    def vectors(self, rows: NDArray[np.int64], which: NDArray[np.int64], out: Vector) -> None:
        """Write some eigenvectors, of length 1, to the columns of `out`."""
        difference = (self._poles[rows, None] - self._poles[self._origins[which]]) - self._shifts[which]
        np.divide(self._fitted[rows, None], difference, out=out)
        out /= np.sqrt((out * out).sum(axis=0))


def roots(poles: Vector, weights: Vector, rho: float, which: NDArray[np.int64]) -> tuple[NDArray[np.int64], Vector]:
    """Return some roots of the secular equation: for each the number of the nearest pole, and the distance from it."""
    count, squares, inverse = len(poles), weights * weights, 1.0 / rho
    if count == 1:
        return np.zeros(len(which), np.int64), np.full(len(which), rho * squares[0])
    with np.errstate(all="ignore"):
        found = _Search(poles, squares, inverse, which)
        found.run()
    return found.origins, found.shifts


class _Search:
    """The search of some roots, all at the same time; those that are found are not changed further."""

    def __init__(self, poles: Vector, squares: Vector, inverse: float, which: NDArray[np.int64]) -> None:
        self._poles, self._squares, self._inverse = poles, squares, inverse
        last = which == len(poles) - 1
        # The poles of the model are those on both sides of a root, below the last root the last two.
        self._below = np.minimum(which, len(poles) - 2)
        self._last = last
        p, q = squares[self._below], squares[self._below + 1]
        gap = poles[self._below + 1] - poles[self._below]
        # The sign in the middle of the two poles says which one is nearer.
        self.origins, self.shifts = self._below.copy(), gap / 2
        psi, phi, _, _ = self._sums(np.arange(len(which)))
        middle = inverse + psi + phi
        low = (middle >= 0) & ~last
        self.origins = np.where(low, self._below, self._below + 1)
        # With all other poles in the middle's place, the distance from the nearer pole solves a quadratic equation.
        rest = middle + 2 * (p - q) / gap
        near, far, rest = np.where(low, p, q), np.where(low, q, p), np.where(low, rest, -rest)
        a, b = rest * gap + near + far, near * gap
        guess = _root(a, b, rest, np.zeros(len(which), bool))
        # The last root is not below that of the last pole by itself, nor above that with all weights on this pole.
        guess = np.where(last, q / inverse, np.where(low, guess, -guess))
        self._low = np.where(low | last, 0.0, -gap / 2)
        self._high = np.where(last, squares.sum() / inverse, np.where(low, gap / 2, 0.0))
        self.shifts = self._inside(guess, self._low, self._high)

    def run(self) -> None:
        """Find all roots."""
        left = np.arange(len(self.shifts))
        for step in range(_MOST_STEPS):
            if not len(left):
                return
            shift, below = self.shifts[left], self._below[left]
            psi, phi, dpsi, dphi = self._sums(left)
            f, df = self._inverse + psi + phi, dpsi + dphi
            self._low[left] = np.where(f < 0, shift, self._low[left])
            self._high[left] = np.where(f < 0, self._high[left], shift)
            noise = _EPS * (8 * (np.abs(psi) + np.abs(phi)) + self._inverse + np.abs(shift) * df)
            base = self._poles[self.origins[left]]
            p, q = (self._poles[below] - base) - shift, (self._poles[below + 1] - base) - shift
            a, b, c = (p + q) * f - p * q * df, p * q * f, f - p * dpsi - q * dphi
            move = _root(a, b, c, self._last[left])
            # The function ascends.
            move = np.where(f * move < 0, move, -f / df)
            bisected = np.full(len(left), np.nan) if step > 8 and step % 2 else shift + move
            moved = self._inside(bisected, self._low[left], self._high[left])
            found = (np.abs(f) <= noise) | (np.abs(moved - shift) <= _EPS * np.abs(shift))
            self.shifts[left] = np.where(found, shift, moved)
            left = left[~found]

    def _sums(self, some: NDArray[np.int64]) -> tuple[Vector, Vector, Vector, Vector]:
        """Return the sums over the poles below some roots and above them, and the derivatives of these."""
        distance = (self._poles[:, None] - self._poles[self.origins[some]]) - self.shifts[some]
        terms = self._squares[:, None] / distance
        slopes = terms / distance
        below = np.arange(len(self._poles))[:, None] <= self._below[some]
        return tuple(np.where(side, x, 0.0).sum(axis=0) for x in (terms, slopes) for side in (below, ~below))

    @staticmethod
    def _inside(shift: Vector, low: Vector, high: Vector) -> Vector:
        """Return shifts, and in place of those outside of their brackets the middle: of orders of magnitude."""
        # One end of a bracket is the pole itself, until a step has left it.
        open_end = np.where(low == 0, high, low) / 32
        middle = np.where((low == 0) | (high == 0), open_end, np.copysign(np.sqrt(low * high), high))
        return np.where((shift > low) & (shift < high), shift, middle)


def _root(a: Vector, b: Vector, c: Vector, larger: NDArray[np.bool_]) -> Vector:
    """Return a root of ``c x^2 - a x + b``, without cancellation: the one that tends to ``b / a`` as c vanishes."""
    root = np.sqrt(np.maximum(a * a - 4 * b * c, 0))
    smaller = np.where(a > 0, 2 * b / (a + root), (a - root) / (2 * c))
    return np.where(larger, np.where(a >= 0, (a + root) / (2 * c), 2 * b / (a - root)), smaller)


# The arithmetic of divide and conquer on one rank's rows of eigenvectors: a protocol, and what CPUs do


Vector = NDArray[np.float64]


class Solved(Protocol):
    """A secular equation that has been solved; `dask_distmm.engines.tridiagonal.kernels.Secular` says more."""

    @property
    def values(self) -> Vector:
        """The eigenvalues in ascending order, on the host."""
        ...

    def vectors(self, rows: NDArray[np.int64], which: NDArray[np.int64], out: Any) -> None:
        """Write some eigenvectors to the columns of `out`."""
        ...


class Merging(Protocol):
    """The parts of a merge beside products of matrices. Matrices are column-major and in float64."""

    def secular(self, poles: Vector, weights: Vector, rho: float) -> Solved:
        """Solve the secular equation of at least one pole."""
        ...

    def rotate(self, z: Any, pairs: NDArray[np.int64], factors: Vector) -> None:
        """Rotate pairs of columns in their order: column p becomes c p + s q, column q c q - s p."""
        ...

    def take(self, source: Any, columns: NDArray[np.int64], target: Any) -> None:
        """Copy some columns of `source` to `target`, which may be of another type."""
        ...

    def eigenvalues(self, d: Vector, e: Vector, first: int, last: int) -> Vector:
        """Return eigenvalues of a tridiagonal matrix by bisection, on the host."""
        ...


class HostMerging:
    """`Merging` for NumPy arrays."""

    def secular(self, poles: Vector, weights: Vector, rho: float) -> Solved:
        """Solve the secular equation."""
        return Secular(poles, weights, rho)

    def rotate(self, z: Vector, pairs: NDArray[np.int64], factors: Vector) -> None:
        """Rotate pairs of columns."""
        for (p, q), (c, s) in zip(pairs.tolist(), factors.tolist(), strict=True):
            z[:, p], z[:, q] = c * z[:, p] + s * z[:, q], c * z[:, q] - s * z[:, p]

    def take(self, source: Vector, columns: NDArray[np.int64], target: NDArray[Any]) -> None:
        """Copy some columns."""
        target.T[...] = np.take(source.T, columns, axis=0)

    def eigenvalues(self, d: Vector, e: Vector, first: int, last: int) -> Vector:
        """Return eigenvalues by bisection."""
        return bisection.eigenvalues(d, e, first, last)
