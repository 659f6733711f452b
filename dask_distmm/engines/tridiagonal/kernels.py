"""The arithmetic of divide and conquer on one rank's rows of eigenvectors: a protocol, and what CPUs do."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.tridiagonal import bisection
from dask_distmm.engines.tridiagonal.secular import Secular

Vector = NDArray[np.float64]


class Solved(Protocol):
    """A secular equation that has been solved; `dask_distmm.engines.tridiagonal.secular.Secular` says more."""

    @property
    def values(self) -> Vector:
        """The eigenvalues in ascending order, on the host."""
        ...

    def vectors(self, rows: NDArray[np.int64], which: NDArray[np.int64], out: Any) -> None:
        """Write some eigenvectors to the columns of `out`."""
        ...


class Merging(Protocol):
    """What merges take beside products of matrices. Matrices are column-major and in float64."""

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
