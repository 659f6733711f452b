"""The steps of a rank that shares the eigenvalues of a Hermitian matrix with others: by way of a tridiagonal one.

::

    Tridiagonalize   Q^H A Q = T; block columns of A become those of reflectors
    Diagonalize      T = Z W Z^T by divide and conquer, where ranks have rows of Z; then block columns are dealt out
    (reflections)    V = Q Z, panel by panel
    Orient           the factors of modulus one

The matrix is scaled by a power of two to elements of about 1, so that no square overflows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.factor.exchange import Messages
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.factor.spectral import not_finite, unit_factors
from dask_distmm.engines.tridiagonal.conquer import Conquest, row_bounds
from dask_distmm.engines.tridiagonal.reduction import HostReduction, Tridiagonal
from dask_distmm.errors import MatrixError
from dask_distmm.planning.factor import FactorPlan

# Matrices whose largest element is between 2^-16 and 2^16 are not scaled. No factor overflows.
_MODERATE, _MOST = 16, {"float32": 100, "float64": 1000}
# Columns of vectors that are looked at together.
_STRIP = 1024


class Shares(Protocol):
    """What an engine has for it: the reduction, and the way of rows of vectors between ranks."""

    def reduce(self, array: Any, check: Callable[[], None], progress: Callable[[float], None]) -> Tridiagonal:
        """Reduce the matrix whose block columns ranks have in `array`, which then has reflectors."""
        ...

    def memory(self) -> tuple[Any, Any]:
        """Return memory for a rank's rows of all eigenvectors of the tridiagonal matrix, and as much more."""
        ...

    def deal(self, columns: NDArray[np.int64], target: Any) -> None:
        """Fill block columns of vectors, after all ranks' rows are complete."""
        ...


class HostShares:
    """`Shares` of ranks that talk over Dask's comms."""

    def __init__(self, plan: FactorPlan, rank: int, messages: Messages) -> None:
        self._plan, self._rank, self._messages = plan, rank, messages
        self._order = plan.problem.a_shape[0]
        self._bounds = row_bounds(self._order, plan.ranks)
        self._rows: NDArray[np.float64]

    def reduce(self, array: Any, check: Callable[[], None], progress: Callable[[float], None]) -> Tridiagonal:
        """Reduce the matrix."""
        return HostReduction(self._plan.columns, self._rank, array, self._messages, check, progress).reduce()

    def memory(self) -> tuple[Any, Any]:
        """Return memory for rows of vectors."""
        shape = self._bounds[self._rank + 1] - self._bounds[self._rank], self._order
        self._rows, spare = (np.empty(shape, order="F") for _ in range(2))
        return self._rows, spare

    def deal(self, columns: NDArray[np.int64], target: Any) -> None:
        """Send each rank its columns of this rank's rows, and get those of the others."""
        for turn in range(self._plan.ranks):
            rank = (self._rank + turn) % self._plan.ranks
            held = columns[self._plan.columns.held(1, rank)]
            if rank == self._rank:
                target[self._bounds[rank] : self._bounds[rank + 1]] = self._rows[:, held]
            else:
                self._messages.publish("rows", rank, (self._rows[:, held],))
        for rank in range(self._plan.ranks):
            if rank != self._rank:
                (rows,) = self._messages.fetch("rows", self._rank, rank)
                target[self._bounds[rank] : self._bounds[rank + 1]] = rows


class SharedEigh:
    """One rank's part of the eigenvalues that ranks share."""

    def __init__(
        self,
        plan: FactorPlan,
        rank: int,
        kernels: Kernels,
        messages: Messages,
        check: Callable[[], None],
        progress: Callable[[float], None],
    ) -> None:
        self._plan, self._rank, self._kernels, self._messages = plan, rank, kernels, messages
        self._check, self._progress = check, progress
        self.shares: Shares = HostShares(plan, rank, messages)
        self.timings: dict[str, float] = {}
        self._exponent, self._reduced = 0, Tridiagonal(*(np.zeros(0) for _ in range(3)))
        self._last = 0.0

    def reduce(self, a: Any) -> dict[int, Any]:
        """Reduce the matrix; return for each of this rank's panels T of its reflectors, ``I - V T V^H``."""
        self._last = time.perf_counter()
        self._scale(a)
        self._reduced = self.shares.reduce(a, self._check, self._progress)
        if not all(np.isfinite(x).all() for x in self._reduced):
            # The matrix had no such elements.
            raise MatrixError(f"the reduction of A, {self._plan.problem.a_shape}, has overflowed: scale A")
        found = {}
        for panel in self._plan.phases[0].panels if self._plan.phases else ():
            if self._plan.columns.owner(panel) == self._rank:
                start, stop, _ = self._plan.columns.place(panel)
                rows = a[start:, self._plan.columns.local(self._rank, panel, panel + 1)][:, : stop - start]
                found[panel] = triangular_factor(self._kernels, rows, self._reduced.factors[start - 1 : stop - 1])
        self._note("reduce", a)
        return found

    def _scale(self, a: Any) -> None:
        """Multiply the matrix by a power of two, the same one on all ranks."""
        sizes = np.array([self._largest(a)])
        if self._plan.ranks > 1:
            self._messages.publish("size", self._rank, (sizes,))
            others = (rank for rank in range(self._plan.ranks) if rank != self._rank)
            sizes = np.concatenate([sizes, *(self._messages.fetch("size", rank, rank)[0] for rank in others)])
        if not np.isfinite(sizes).all():
            raise MatrixError(not_finite("a"))
        exponent = int(np.frexp(sizes.max())[1])
        most = _MOST[np.finfo(self._plan.problem.dtype).dtype.name]
        self._exponent = 0 if abs(exponent) <= _MODERATE else max(-most, min(most, exponent))
        if self._exponent:
            with np.errstate(all="ignore"):
                # What is above the diagonal may be anything.
                turned = a.T
                turned *= math.ldexp(1.0, -self._exponent)

    def _largest(self, a: Any) -> float:
        """Return the largest modulus of a real or imaginary part in this rank's block columns; NaN if there is one."""
        columns, xp, found = self._plan.columns, self._kernels.xp, []
        for block in columns.owned(self._rank, 0, columns.first(1)):
            _, start, stop = columns.blocks[block]
            rows = a[start:, columns.local(self._rank, block, block + 1)]
            corner = self._kernels.triangle(rows[: stop - start], lower=True, unit=False)
            parts = [x for x in (corner, rows[stop - start :]) if x.size]
            real = [y for x in parts for y in ((x.real, x.imag) if x.dtype.kind == "c" else (x,))]
            found += [xp.abs(x.T).max() for x in real]
        return float(self._kernels.host(xp.stack(found).max())) if found else 0.0

    def diagonalize(self, target: Any) -> Any:
        """Return the wanted eigenvalues, on the device; fill block columns of the tridiagonal matrix' eigenvectors."""
        problem, (d, e, _) = self._plan.problem, self._reduced
        first, last = problem.subset or (0, len(d) - 1)
        if target is not None:
            single = np.finfo(problem.dtype).dtype == np.float32
            conquest = Conquest(
                self._kernels,
                self._messages,
                (self._rank, self._plan.ranks),
                (d, e),
                self.shares.memory(),
                rounding=2.0**-24 if single else 2.0**-53,
                check=self._check,
            )
            values, columns = conquest.solve(first, last)
            self.shares.deal(columns, target)
        elif self._rank not in self._plan.holders:
            return None
        elif d.any() or e.any():
            values = self._kernels.merging.eigenvalues(d, e, first, last)
        else:
            values = np.zeros(last - first + 1)
        self._note("diagonalize", target)
        real = next(one.dtype for one in problem.outputs if one.name == "w")
        return self._kernels.xp.asarray(np.ldexp(values, self._exponent).astype(real))

    def orient(self, vectors: Any) -> None:
        """Make the first one of the largest components of each of this rank's vectors real and positive."""
        for at in range(0, vectors.shape[1], _STRIP):
            strip = vectors[:, at : at + _STRIP]
            # The transpose is in the order in which CuPy's kernels are quickest.
            turned = strip.T
            turned *= unit_factors(self._kernels, strip)[:, None]
        self._note("reflect", vectors)

    def _note(self, name: str, made: Any) -> None:
        """Note the seconds since the last note, when a matrix is complete."""
        if made is not None and made.size:
            self._kernels.host(made[:1, :1])
        now = time.perf_counter()
        self.timings[name], self._last = now - self._last, now


def triangular_factor(kernels: Kernels, v: Any, tau: NDArray[Any]) -> Any:
    """Return T with ``H_0 H_1 ... = I - V T V^H``, where ``H_i = I - tau_i v_i v_i^H``.

    Its inverse is the upper triangle of V^H V with 1 / tau in place of the diagonal: C. Puglisi, Modification of the
    Householder method based on the compact WY representation, SIAM J. Sci. Stat. Comput. 13 (1992).
    """
    xp, size = kernels.xp, v.shape[1]
    gram = kernels.empty((size, size), v.dtype)
    kernels.gemm(v, v, gram, "C", alpha=1, beta=0)
    some = tau != 0
    diagonal = np.arange(size)
    inverse = kernels.triangle(gram, lower=False, unit=False)
    inverse *= xp.asarray(np.outer(some, some).astype(v.dtype))
    inverse[diagonal, diagonal] = xp.asarray(1 / np.where(some, tau, 1).astype(v.dtype))
    found = kernels.empty((size, size), v.dtype)
    found[...] = xp.asarray(np.diag(some).astype(v.dtype))
    kernels.trsm(inverse, found, right=False, lower=False, op="N", unit=False)
    return found
