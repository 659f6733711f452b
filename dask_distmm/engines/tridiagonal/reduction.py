"""Reduction of a Hermitian matrix to a tridiagonal one by ranks that talk over Dask's comms, with NumPy.

Householder's reflectors ``H_j = I - tau v v^H`` eliminate column after column: ``T = Q^H A Q`` with
``Q = H_0 H_1 ...``, as LAPACK's ``hetrd`` has them. Of a column the owner makes the reflector. Each rank multiplies its
own block columns of the lower triangle by v, each element once for itself and once for its mirror image, and the owner
adds the products up. The matrix is updated after a narrow panel of columns by ``A - V W^H - W V^H``; within a panel
products are corrected for what has not been done yet (``latrd``).

The owner alone decides on a reflector, and tells the others: the same sums elsewhere may be rounded differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.exchange import Messages
from dask_distmm.programs.factor import Columns

# Columns of a narrow panel.
_NARROW = 64
# Squares of lengths that count as zero, by the type of real numbers.
TINY = {"float64": 2.0**-900, "float32": 2.0**-200}


class Tridiagonal(NamedTuple):
    """A tridiagonal matrix, and the reflectors that lead to it."""

    # Its diagonal, (n,), and the elements beside it, (n - 1,), in float64 on the host.
    d: NDArray[np.float64]
    e: NDArray[np.float64]
    # tau of each reflector, (n - 1,), on the host.
    factors: NDArray[Any]


def panel_width(width: int) -> int:
    """Return the columns of a narrow panel, of which a block column of a width has a whole number."""
    return width if width <= _NARROW else math.gcd(width, _NARROW)


class HostReduction:
    """One rank's part of a reduction."""

    def __init__(
        self,
        columns: Columns,
        rank: int,
        array: NDArray[Any],
        talk: Messages,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self._columns, self._rank, self._array, self._talk = columns, rank, array, talk
        self._check, self._progress = check, progress
        self._order, self._width = columns.matrices[0].shape[0], columns.matrices[0].width
        self._d, self._e = np.zeros(self._order), np.zeros(max(0, self._order - 1))
        self._factors = np.zeros(max(0, self._order - 1), array.dtype)

    def reduce(self) -> Tridiagonal:
        """Reduce the matrix, whose elements should be of about the size of 1."""
        step = panel_width(self._width)
        for number, start in enumerate(range(0, self._order, step)):
            self._check()
            stop, owner = min(start + step, self._order), self._columns.owner(start // self._width)
            if owner == self._rank:
                v, w = self._make(start, stop)
                here = slice(start, stop)
                if self._columns.ranks > 1:
                    told = v, w, self._d[here], self._e[here], self._factors[here]
                    self._talk.publish("reflectors", number, told)
            else:
                for column in range(start, min(stop, self._order - 1)):
                    (vector,) = self._talk.fetch("vector", column, owner)
                    self._talk.publish("product", column, (self._multiply(column, vector),))
                    if column > start:
                        self._talk.forget("product", column - 1)
                v, w, *others = self._talk.fetch("reflectors", number, owner)
                self._talk.forget("product", min(stop, self._order - 1) - 1)
                for values, found in zip((self._d, self._e, self._factors), others, strict=True):
                    values[start : start + len(found)] = found
            self._update(stop, v[stop - start :], w[stop - start :])
            self._progress(1 - (1 - stop / self._order) ** 3)
        return Tridiagonal(self._d, self._e, self._factors)

    def _make(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Make the reflectors of a panel of this rank; return V and W, whose rows begin with the panel's diagonal."""
        block = start // self._width
        place = self._columns.local(self._rank, block, block + 1).start + start - block * self._width
        columns = self._array[: self._order, place : place + stop - start]
        panel = columns[start:]
        v, w = (np.zeros(panel.shape, panel.dtype, order="F") for _ in range(2))
        for at, column in enumerate(range(start, stop)):
            x = panel[at:, at] - v[at:, :at] @ w[at, :at].conj() - w[at:, :at] @ v[at, :at].conj()
            self._d[column] = x[0].real
            if column == self._order - 1:
                break
            vector, tau, self._e[column] = reflector(x[1:])
            v[at + 1 :, at], self._factors[column] = vector, tau
            y = self._gather(column, vector)
            before, beside = v[at + 1 :, :at], w[at + 1 :, :at]
            y -= before @ (beside.conj().T @ vector) + beside @ (before.conj().T @ vector)
            w[at + 1 :, at] = tau * y - abs(tau) ** 2 / 2 * np.vdot(vector, y).real * vector
        panel[...] = v
        # Later the reflectors of a whole block column are one panel.
        columns[block * self._width : start] = 0
        return v, w

    def _gather(self, column: int, vector: NDArray[Any]) -> NDArray[Any]:
        """Return the matrix, as it was before the panel, times the reflector of a column of this rank."""
        if self._columns.ranks == 1:
            return self._multiply(column, vector)
        self._talk.publish("vector", column, (vector,))
        found = self._multiply(column, vector)
        owner = self._rank
        for rank in (rank for rank in range(self._columns.ranks) if rank != owner):
            found = found + self._talk.fetch("product", column, rank)[0]
        self._talk.forget("vector", column)
        return found

    def _multiply(self, column: int, vector: NDArray[Any]) -> NDArray[Any]:
        """Return this rank's part of the product with a reflector, which begins below the diagonal of a column."""
        found, first = np.zeros_like(vector), column + 1
        for start, stop, part in self._blocks(first):
            size, here, below = stop - start, slice(start - first, stop - first), slice(stop - first, None)
            corner = np.tril(part[:size], -1)
            found[here] += part.diagonal()[:size].real * vector[here] + corner @ vector[here]
            found[here] += corner.conj().T @ vector[here] + part[size:].conj().T @ vector[below]
            found[below] += part[size:] @ vector[here]
        return found

    def _update(self, first: int, v: NDArray[Any], w: NDArray[Any]) -> None:
        """Update the lower triangle of this rank's columns from one on."""
        for start, stop, part in self._blocks(first):
            here, below = slice(start - first, stop - first), slice(start - first, None)
            change = v[below] @ w[here].conj().T + w[below] @ v[here].conj().T
            np.subtract(part, change, out=part)

    def _blocks(self, first: int) -> Iterator[tuple[int, int, NDArray[Any]]]:
        """Yield this rank's block columns from a column on: first and last + 1, and the rows from the diagonal on."""
        for block in self._columns.owned(self._rank, first // self._width, self._columns.first(1)):
            _, start, stop = self._columns.blocks[block]
            begin = max(start, first)
            if begin < stop:
                place = self._columns.local(self._rank, block, block + 1)
                yield begin, stop, self._array[begin : self._order, place.start + begin - start : place.stop]


def reflector(x: NDArray[Any]) -> tuple[NDArray[Any], Any, float]:
    """Return v, tau and beta of ``(I - tau v v^H)^H x = beta e_0``; v begins with 1, and beta is real.

    Numbers far below the rounding of a matrix of about the size of 1 count as zero.
    """
    wide = x.astype(np.result_type(x.dtype, np.float64))
    head, rest = complex(wide[0]), wide[1:]
    square = float((rest.real**2).sum() + (rest.imag**2).sum() + head.imag**2)
    v = np.zeros_like(x)
    v[0] = 1
    if square <= TINY[x.real.dtype.name]:
        return v, x.dtype.type(0), head.real
    beta = -math.copysign(math.sqrt(head.real**2 + square), head.real)
    factor = (beta - head) / beta
    v[1:] = rest / (wide[0] - beta)
    return v, x.dtype.type(factor if x.dtype.kind == "c" else factor.real), beta
