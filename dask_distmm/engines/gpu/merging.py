"""The arithmetic of divide and conquer on GPUs, beside products: `dask_distmm.engines.tridiagonal.HostMerging`."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.gpu.host import kernel
from dask_distmm.engines.tridiagonal import bounds

_THREADS = 256
# Warps find one root each; this few are in a block that a small equation has many blocks.
_ROOT_THREADS = 128
# Bisection waits for one division after the other: threads are spread over the whole GPU.
_VALUE_THREADS = 32

Vector = NDArray[np.float64]


class DeviceMerging:
    """`HostMerging` for CuPy arrays; kernels run on the current stream."""

    def secular(self, poles: Vector, weights: Vector, rho: float) -> DeviceSecular:
        """Solve the secular equation."""
        return DeviceSecular(poles, weights, rho)

    def rotate(self, z: Any, pairs: NDArray[np.int64], factors: Vector) -> None:
        """Rotate pairs of columns."""
        if len(z):
            arguments = z, _ld(z), np.int64(len(z)), cp.asarray(pairs), cp.asarray(factors), np.int32(len(pairs))
            kernel("merging", "rotate_columns")((-(-len(z) // _THREADS),), (_THREADS,), arguments)

    def take(self, source: Any, columns: NDArray[np.int64], target: Any) -> None:
        """Copy some columns."""
        if target.size:
            blocks = -(-len(target) // _THREADS)
            arguments = source, _ld(source), cp.asarray(columns), target, _ld(target), np.int64(len(target))
            function = kernel("tridiagonal", "take_columns", target.dtype)
            function((blocks * len(columns),), (_THREADS,), (*arguments, np.int64(blocks)))

    def eigenvalues(self, d: Vector, e: Vector, first: int, last: int) -> Vector:
        """Return eigenvalues by bisection."""
        count = last - first + 1
        values = cp.empty(count, np.float64)
        sizes = (np.int32(size) for size in (len(d), first, count))
        limits = map(np.float64, bounds(d, e))
        # An array of no elements has no address.
        squares = cp.asarray(np.append(e * e, 0.0))
        kernel("merging", "bisected_values")(
            (-(-count // _VALUE_THREADS),), (_VALUE_THREADS,), (cp.asarray(d), squares, *sizes, *limits, values)
        )
        found: Vector = np.sort(values.get())
        return found


class DeviceSecular:
    """`dask_distmm.engines.tridiagonal.Secular` on a GPU."""

    def __init__(self, poles: Vector, weights: Vector, rho: float) -> None:
        count, inverse = len(poles), 1.0 / rho
        self._poles, z = cp.asarray(poles), cp.asarray(weights)
        self._origins, self._shifts = cp.empty(count, np.int64), cp.empty(count, np.float64)
        self._fitted = cp.empty(count, np.float64)
        blocks = (-(-count * 32 // _ROOT_THREADS),)
        limits = np.float64(inverse), np.float64((weights * weights).sum() / inverse)
        arguments = self._poles, z, np.int32(count), *limits, self._origins, self._shifts
        kernel("merging", "secular_roots")(blocks, (_ROOT_THREADS,), arguments)
        fitted = self._poles, z, np.int32(count), self._origins, self._shifts, self._fitted
        kernel("merging", "fitted_weights")(blocks, (_ROOT_THREADS,), fitted)
        self.values: Vector = poles[self._origins.get()] + self._shifts.get()

    def vectors(self, rows: NDArray[np.int64], which: NDArray[np.int64], out: Any) -> None:
        """Write some eigenvectors, whose numbers follow each other, to the columns of `out`."""
        if len(which):
            arguments = self._poles, self._fitted, np.int32(len(rows)), self._origins, self._shifts
            places = cp.asarray(rows), np.int32(which[0]), out, _ld(out)
            kernel("merging", "secular_vectors")((len(which),), (_THREADS,), (*arguments, *places))


def _ld(x: Any) -> np.int64:
    """Return the distance of the columns of a column-major matrix, in elements."""
    rows, cols = x.shape
    if rows > 1 and x.size and x.strides[0] != x.itemsize:
        raise ValueError(f"a matrix of shape {x.shape} has strides {x.strides}: its columns are not contiguous")
    return np.int64(x.strides[1] // x.itemsize if cols > 1 and x.size else max(1, rows))
