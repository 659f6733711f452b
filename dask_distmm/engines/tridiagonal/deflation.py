"""The first half of a merge in divide and conquer: what of ``diag(d) + rho z z^T`` is solved already. Pure.

A tridiagonal matrix is torn at an element off its diagonal. With the eigenvectors of its two parts it becomes a
diagonal matrix and one of rank one. An eigenvalue does not change where z is zero, or where two elements of d are the
same and a rotation makes one of theirs in z zero: M. Gu, S. C. Eisenstat, A divide-and-conquer algorithm for the
symmetric tridiagonal eigenproblem, SIAM J. Matrix Anal. Appl. 16 (1995); LAPACK's ``laed2``.

Several ranks decide on the same numbers each for itself, and must come to the same decisions. So there are only sums,
products, quotients, square roots and comparisons of single numbers here, which IEEE 754 rounds alike everywhere;
nothing is summed in an order that a library chooses.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

# The tolerance in units of rounding, as LAPACK has it.
_TOLERANCE = 8.0
# Where a column of eigenvectors is not zero: in the rows of the first part, of both, of the second one.
_FIRST, _BOTH, _SECOND = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Merge:
    """What is left of ``diag(d) + rho z z^T`` after deflation, and the order of the columns of eigenvectors."""

    # d and z of what is left, (k,); the poles ascend.
    poles: NDArray[np.float64]
    weights: NDArray[np.float64]
    # The factor; positive.
    rho: float
    # Eigenvalues that are found, (n - k,).
    deflated: NDArray[np.float64]
    # The columns of the two parts, (n,): those that are not zero in the first part's rows alone, those that are not
    # in any, those in the second part's rows alone; and those of `deflated`.
    columns: NDArray[np.int64]
    # How many columns the first three of these groups have; their sum is k.
    counts: tuple[int, int, int]
    # For each of the first k columns the number of its pole.
    order: NDArray[np.int64]
    # Rotations of columns that come before, in their order, (r, 2): column p becomes c p + s q, column q c q - s p.
    pairs: NDArray[np.int64]
    factors: NDArray[np.float64]


def deflate(d: NDArray[np.float64], z: NDArray[np.float64], coupling: float, first: int, rounding: float) -> Merge:
    """Return what is left of the merge of two parts."""
    # z z^T of a vector of length 1.
    z, rho = z * np.sqrt(0.5), 2.0 * coupling
    size = np.abs(z)
    tolerance = _TOLERANCE * rounding * max(np.abs(d).max(initial=0.0), size.max(initial=0.0))
    order = np.argsort(d, kind="stable")
    left = order[rho * size[order] > tolerance]
    found = _Chains(d[left], z[left], np.where(left < first, _FIRST, _SECOND), tolerance)
    kept = found.kept
    gone = np.setdiff1d(order, left[kept], assume_unique=True)
    values = d.copy()
    values[left] = found.d
    kinds = found.kinds[kept]
    grouped = np.argsort(kinds, kind="stable")
    counts = tuple(int(np.count_nonzero(kinds == kind)) for kind in (_FIRST, _BOTH, _SECOND))
    return Merge(
        poles=found.d[kept],
        weights=found.z[kept],
        rho=rho,
        deflated=values[gone],
        columns=np.concatenate([left[kept][grouped], gone]),
        counts=counts,  # type: ignore[arg-type]
        order=grouped,
        pairs=left[np.array(found.pairs, np.int64).reshape(-1, 2)],
        factors=np.array(found.factors, np.float64).reshape(-1, 2),
    )


class _Chains:
    """Pairs of neighbouring poles that are nearly the same: one of each pair is deflated, the next pair looked at."""

    def __init__(
        self, d: NDArray[np.float64], z: NDArray[np.float64], kinds: NDArray[np.int64], tolerance: float
    ) -> None:
        self.d, self.z, self.kinds, self.kept = d, z, kinds, np.ones(len(d), bool)
        self.pairs: list[tuple[int, int]] = []
        self.factors: list[tuple[float, float]] = []
        # Few pairs are close, and are looked for all at once. The second one of a pair that is rotated changes.
        close = np.abs((d[1:] - d[:-1]) * z[1:] * z[:-1]) <= tolerance * (z[1:] * z[1:] + z[:-1] * z[:-1])
        at = 0
        for start in np.flatnonzero(close).tolist():
            at = max(at, start)
            while at + 1 < len(d) and self._rotate(at, tolerance):
                at += 1

    def _rotate(self, at: int, tolerance: float) -> bool:
        """Deflate a pole against the next one if they are close; return whether they are."""
        d, z = self.d, self.z
        p, q, gap = float(z[at]), float(z[at + 1]), float(d[at + 1] - d[at])
        length = (p * p + q * q) ** 0.5
        c, s = q / length, -p / length
        if abs(gap * c * s) > tolerance:
            return False
        z[at], z[at + 1] = 0.0, length
        low, high = float(d[at]), float(d[at + 1])
        d[at], d[at + 1] = low * c * c + high * s * s, low * s * s + high * c * c
        if self.kinds[at] != self.kinds[at + 1]:
            self.kinds[at + 1] = _BOTH
        self.kept[at] = False
        self.pairs.append((at, at + 1))
        self.factors.append((c, s))
        return True
