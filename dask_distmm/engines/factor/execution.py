"""One rank's run of the program of a factorization; and the kernels for eigenvalues that ranks share.

The matrix is scaled by a power of two to elements of about 1, so that no square overflows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.exchange import Messages, RankExchange
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.factor.operations import FactorKernels
from dask_distmm.engines.factor.spectral import not_finite, unit_factors
from dask_distmm.engines.programs.executor import Executor
from dask_distmm.engines.tridiagonal import DivideAndConquer, HostReduction, Tridiagonal, row_bounds
from dask_distmm.errors import MatrixError
from dask_distmm.planning.factor.plan import FactorPlan
from dask_distmm.programs.steps import Buffer, Call, Make, Store

# Matrices whose largest element is between 2^-16 and 2^16 are not scaled. No factor overflows.
_MODERATE, _MOST = 16, {"float32": 100, "float64": 1000}
# Columns of vectors that are looked at together.
_STRIP = 1024


class HostShares:
    """What an engine has for shared eigenvalues: the reduction, the way of rows of vectors; here over Dask's comms."""

    def __init__(self, plan: FactorPlan, rank: int, messages: Messages) -> None:
        self._plan, self._rank, self._messages = plan, rank, messages
        self._order = plan.problem.a_shape[0]
        self._bounds = row_bounds(self._order, plan.ranks)
        self._rows: NDArray[np.float64]

    def reduce(self, array: Any, check: Callable[[], None], progress: Callable[[float], None]) -> Tridiagonal:
        """Reduce the matrix whose block columns ranks have in `array`, which then has reflectors."""
        return HostReduction(self._plan.columns, self._rank, array, self._messages, check, progress).reduce()

    def memory(self) -> tuple[Any, Any]:
        """Return memory for a rank's rows of all eigenvectors of the tridiagonal matrix, and as much more."""
        shape = self._bounds[self._rank + 1] - self._bounds[self._rank], self._order
        self._rows, spare = (np.empty(shape, order="F") for _ in range(2))
        return self._rows, spare

    def deal(self, columns: NDArray[np.int64], target: Any) -> None:
        """Fill block columns of vectors: each rank gets its columns of all ranks' rows."""
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


class SharedEigh(FactorKernels):
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
        super().__init__(kernels, plan.problem)
        self._plan, self._rank, self._messages = plan, rank, messages
        self._check, self._progress = check, progress
        self.shares: Any = HostShares(plan, rank, messages)
        self._exponent, self._reduced = 0, Tridiagonal(*(np.zeros(0) for _ in range(3)))
        self._last = 0.0

    def tridiagonalize(self, a: Any) -> tuple[Any, ...]:
        """Reduce the matrix; return for each of this rank's panels T of its reflectors, ``I - V T V^H``."""
        self._last = time.perf_counter()
        self._scale(a)
        self._reduced = self.shares.reduce(a, self._check, self._progress)
        if not all(np.isfinite(x).all() for x in self._reduced):
            # The matrix had no such elements.
            raise MatrixError(f"the reduction of A, {self._plan.problem.a_shape}, has overflowed: scale A")
        found = []
        for panel in self._plan.panels if self._plan.sweeps else ():
            if self._plan.columns.owner(panel) == self._rank:
                start, stop, _ = self._plan.columns.place(panel)
                rows = a[start:, self._plan.columns.local(self._rank, panel, panel + 1)][:, : stop - start]
                found.append(triangular_factor(self.blas, rows, self._reduced.factors[start - 1 : stop - 1]))
        self._note("reduce", a)
        return tuple(found)

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
                # Elements above the diagonal are arbitrary.
                transposed = a.T
                transposed *= math.ldexp(1.0, -self._exponent)

    def _largest(self, a: Any) -> float:
        """Return the largest modulus of a real or imaginary part in this rank's block columns; NaN if there is one."""
        columns, xp, found = self._plan.columns, self.blas.xp, []
        for block in columns.owned(self._rank, 0, columns.first(1)):
            _, start, stop = columns.blocks[block]
            rows = a[start:, columns.local(self._rank, block, block + 1)]
            corner = self.blas.triangle(rows[: stop - start], lower=True, unit=False)
            parts = [x for x in (corner, rows[stop - start :]) if x.size]
            real = [y for x in parts for y in ((x.real, x.imag) if x.dtype.kind == "c" else (x,))]
            found += [xp.abs(x.T).max() for x in real]
        return float(self.blas.host(xp.stack(found).max())) if found else 0.0

    def diagonalize(self, target: Any, *, vectors: bool) -> Any:
        """Return the wanted eigenvalues, on the device; fill block columns of the tridiagonal matrix' eigenvectors."""
        problem, (d, e, _) = self._plan.problem, self._reduced
        first, last = problem.subset or (0, len(d) - 1)
        if vectors:
            single = np.finfo(problem.dtype).dtype == np.float32
            conquest = DivideAndConquer(
                self.blas,
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
            values = self.blas.merging.eigenvalues(d, e, first, last)
        else:
            values = np.zeros(last - first + 1)
        self._note("diagonalize", target if vectors else None)
        real = next(one.dtype for one in problem.outputs if one.name == "w")
        return self.blas.xp.asarray(np.ldexp(values, self._exponent).astype(real))

    def normalize_phases(self, vectors: Any) -> None:
        """Make the first one of the largest components of each of this rank's vectors real and positive."""
        for at in range(0, vectors.shape[1], _STRIP):
            strip = vectors[:, at : at + _STRIP]
            # The transpose is in the order in which CuPy's kernels are fastest.
            transposed = strip.T
            transposed *= unit_factors(self.blas, strip)[:, None]
        self._note("reflect", vectors)

    def _note(self, name: str, made: Any) -> None:
        """Note the seconds since the last note, when a matrix is complete."""
        if made is not None and made.size:
            self.blas.host(made[:1, :1])
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


# One rank's run of its program


# The share of the time that a reduction to a tridiagonal matrix takes, of the eigenvalues that ranks share.
_REDUCTION = 0.8


class Execution(Executor):
    """Runs the program of one rank, on its block columns.

    First the caller writes the rank's columns of the inputs into `held`; then `execute`; then
    `dask_distmm.engines.factor.job` has the results.
    """

    kernels: FactorKernels

    def __init__(
        self,
        plan: FactorPlan,
        rank: int,
        kernels: Kernels,
        exchange: RankExchange,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[float], None] = lambda share: None,
        array: Any = None,
    ) -> None:
        self.plan, self.rank, self.columns, self._steps = plan, rank, plan.columns, plan.steps(rank)
        made = FactorKernels(kernels, plan.problem)
        if plan.shared:
            messages = Messages(exchange, check)
            made = SharedEigh(plan, rank, kernels, messages, check, lambda share: progress(_REDUCTION * share))
        super().__init__(made, exchange, check, progress)
        shape = self.columns.rows, self.columns.local_cols(rank)
        self.array = kernels.empty(shape, np.dtype(plan.problem.dtype)) if array is None else array
        self.rows_later: dict[int, NDArray[np.int64]] = {}

    def held(self, matrix: int) -> Any:
        """Return this rank's columns of A (0) or of the second matrix (1), with the rows that this matrix has."""
        rows = self.columns.matrices[matrix].shape[0]
        first, stop = self.columns.first(matrix), self.columns.first(matrix + 1)
        return self.array[:rows, self.columns.local(self.rank, first, stop)]

    @property
    def pivots(self) -> dict[int, tuple[Any, Any]]:
        """For each panel of an LU factorization its pivots, from its first row, and its diagonal."""
        found = {}
        for panel in self.plan.panels:
            if (diagonal := self.arrays.get(f"diagonal.{panel}")) is not None:
                pivots = self.arrays.get(f"pivots.{panel}")
                found[panel] = (self.arrays[f"extra.{panel}"] if pivots is None else pivots), diagonal
        return found

    def execute(self) -> None:
        """Take all steps."""
        before = _REDUCTION if self.plan.shared else 0.0
        self.take(self._steps, before, 1 - before)
        self.kernels.complete()

    def _phase(self, call: Call) -> str:
        return "panel" if call.lane in ("ahead", "panel") else "update"

    def _make(self, step: Make) -> None:
        self.arrays[step.buffer.name] = self.array

    def _new(self, buffer: Buffer) -> Any:
        return self.kernels.empty(buffer.shape, self.array.dtype)

    def _store(self, step: Store) -> None:
        """Leave a result where `dask_distmm.engines.factor.job` finds it."""
