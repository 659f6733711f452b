"""What the ranks compute together, as calls of cuSOLVERMp and cuBLASMp.

==================  ==================================================================================================
cholesky            potrf
lu, det, slogdet    getrf; its pivots are told to all ranks
solve, inv          getrf and getrs, or potrf and potrs; inv with an identity for right-hand sides
qr                  geqrf, and ormqr of an identity for Q
lstsq, pinv         geqrf, ormqr and trsm; with fewer equations than unknowns of A^H: geqrf, trsm and ormqr
solve_triangular    trsm
eigh, eigvalsh      syevd
==================  ==================================================================================================

The library has getrs without transposes, ormqr from the left, syevd of a lower triangle: the plan turns the matrices
that way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.engines.cusolvermp.library import LEFT, LOWER, Group, Matrix, Shared
from dask_distmm.engines.factor.exchange import PanelExchange
from dask_distmm.engines.factor.execution import Execution, indefinite, singular
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.factor.spectral import not_finite, unit_factors
from dask_distmm.engines.gpu.gemm import OPS
from dask_distmm.errors import EngineError, MatrixError
from dask_distmm.planning.factor import FactorPlan
from dask_distmm.planning.factor.phases import factored


class SharedExecution(Execution):
    """One rank's part of a computation of all ranks. `group` must be set before `execute`."""

    def __init__(
        self,
        plan: FactorPlan,
        rank: int,
        kernels: Kernels,
        exchange: PanelExchange,
        check: Callable[[], None],
        progress: Callable[[float], None],
        array: Any,
    ) -> None:
        super().__init__(plan, rank, kernels, exchange, check, progress, array)
        self.group: Group

    def execute(self) -> None:
        """Call the library."""
        self._complete_second()
        problem = self.plan.problem
        with Shared(self.group, problem.dtype) as shared:
            a, b = self._matrix(0), self._matrix(1) if len(self.columns.matrices) > 1 else None
            if problem.spectral:
                self._eigh(shared, a, b)
            elif problem.kind == "solve_triangular":
                assert b is not None
                self._substitute(shared, a, b)
            else:
                {"cholesky": self._cholesky, "lu": self._lu, "qr": self._qr}[factored(problem)](shared, a, b)
        self._progress(1.0)

    def _matrix(self, number: int) -> Matrix:
        """Return A (0) or the second matrix (1); that has as many rows as the array where a solution needs them."""
        matrix = self.columns.matrices[number]
        first, stop = self.columns.first(number), self.columns.first(number + 1)
        local = self.array[:, self.columns.local(self.rank, first, stop)]
        rows = self.columns.rows if number else matrix.shape[0]
        return Matrix((rows, matrix.shape[1]), matrix.width, local if local.size else self.array, len(self.array))

    def _cholesky(self, shared: Shared, a: Matrix, b: Matrix | None) -> None:
        n = a.shape[1]
        info, failure = 0, None
        try:
            info = shared.solver("potrf", LOWER, n, a)
        except EngineError as error:
            # Of a matrix that is not positive definite the library says INTERNAL_ERROR (0.9.1), on all ranks.
            failure = error
        diagonal = self._diagonal().real
        wrong = diagonal <= 0 if failure is None else ~(diagonal > 0)
        if info or wrong.any():
            raise MatrixError(indefinite(info or 1 + int(np.argmax(wrong)))) from failure
        if failure is not None:
            raise failure
        if b is not None:
            shared.solver("potrs", LOWER, n, b.shape[1], a, b)

    def _lu(self, shared: Shared, a: Matrix, b: Matrix | None) -> None:
        # One for each of the rank's columns.
        pivots = cp.zeros(self.columns.local_cols(self.rank) + a.width, np.int64)
        shared.solver("getrf", *a.shape, a, int(pivots.data.ptr))
        diagonal = self._diagonal()
        self._note_pivots(self._on_all(pivots), diagonal)
        if b is None:
            return
        if not diagonal.all():
            raise MatrixError(singular(int(np.argmin(diagonal != 0)), rank=False))
        shared.solver("getrs", OPS["N"], a.shape[0], b.shape[1], a, int(pivots.data.ptr), b)

    def _note_pivots(self, pivots: Any, diagonal: Any) -> None:
        """Keep the pivots as `Execution` has them: for each panel, counted from 0 and from its first row.

        The library counts rows of the whole matrix from 1, as ScaLAPACK does.
        """
        found, rows = pivots - 1, np.arange(len(pivots))
        wrong = (found < rows) | (found >= self.columns.matrices[0].shape[0])
        if wrong.any() and np.isfinite(diagonal).all():
            at = int(np.argmax(wrong))
            raise EngineError(
                f"cuSOLVERMp's getrf has swapped row {at} with row {int(found[at])}, counted from 0: expected one of "
                f"{at} to {self.columns.matrices[0].shape[0] - 1}; use another engine, or method='local'"
            )
        # Among numbers that are NaN there is no largest one.
        found = np.where(wrong, rows, found)
        for panel in range(self.columns.matrices[0].count):
            start, stop, _ = self.columns.place(panel)
            if start < stop:
                self.pivots[panel] = (found[start:stop] - start).astype(np.int32), diagonal[start:stop]

    def _qr(self, shared: Shared, a: Matrix, b: Matrix | None) -> None:
        problem, (m, n), k = self.plan.problem, a.shape, min(a.shape)
        # One for each of the rank's columns.
        tau = cp.zeros(self.columns.local_cols(self.rank) + a.width, problem.dtype)
        shared.solver("geqrf", m, n, a, int(tau.data.ptr), for_size=(m, n, a))
        if b is None:
            return

        def reflect(op: str) -> None:
            target = b._replace(shape=(m, b.shape[1]))
            shared.solver("ormqr", LEFT, OPS[op], m, b.shape[1], k, a, int(tau.data.ptr), target)

        if problem.kind == "qr":
            reflect("N")
            return
        self._check_rank()
        if problem.by_adjoint:
            shared.trsm(a, b, order=k, lower=False, op="C", unit=False)
            reflect("N")
        else:
            # ormqr has the transpose of real types, and the conjugate transpose of complex ones.
            reflect("C" if problem.dtype.startswith("complex") else "T")
            shared.trsm(a, b, order=k, lower=False, op="N", unit=False)

    def _substitute(self, shared: Shared, a: Matrix, b: Matrix) -> None:
        problem = self.plan.problem
        if not problem.unit_diagonal and not (diagonal := self._diagonal()).all():
            raise MatrixError(singular(int(np.argmin(diagonal != 0)), rank=False))
        op, order = problem.substituted, a.shape[1]
        shared.trsm(a, b, order=order, lower=problem.lower, op=op, unit=problem.unit_diagonal)

    def _eigh(self, shared: Shared, a: Matrix, b: Matrix | None) -> None:
        n, xp, finite = a.shape[1], self.kernels.xp, []
        for start, _, block in self._blocks(0):
            finite.append(xp.isfinite(xp.tril(block[start:])).all())
        good = all(bool(self.kernels.host(one)) for one in finite)
        self.group.refuse("" if good else not_finite("a"))
        job = ctypes.create_string_buffer(b"N" if b is None else b"V")
        w = cp.zeros(n, np.zeros(0, self.plan.problem.dtype).real.dtype)
        # Without vectors nothing is written to Q: A is there for a place.
        vectors = b or a
        if shared.solver("syevd", ctypes.addressof(job), LOWER, n, a, int(w.data.ptr), vectors):
            raise MatrixError(f"eigh of A, {a.shape}: the iteration has not converged; scale A, or use a wider type")
        self.decomposed = {"w": w}
        for _, _, vectors_here in self._blocks(1) if b is not None else ():
            vectors_here[...] *= unit_factors(self.kernels, vectors_here)

    def _blocks(self, number: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the rank's blocks of a matrix that have columns: the first and the last + 1, and all of their rows."""
        rows, first = self.columns.matrices[number].shape[0], self.columns.first(number)
        for block in self.columns.owned(self.rank, first, first + self.columns.matrices[number].count):
            _, start, stop = self.columns.blocks[block]
            yield start, stop, self.array[:rows, self.columns.local(self.rank, block, block + 1)]

    def _diagonal(self) -> Any:
        """Return the diagonal of A as it is now, on the host of each rank."""
        order = min(self.columns.matrices[0].shape)
        parts = [self.kernels.diagonal(block[start:]) for start, _, block in self._blocks(0) if start < order]
        return self._on_all(cp.concatenate(parts) if parts else cp.zeros(0, self.array.dtype))

    def _on_all(self, values: Any) -> Any:
        """Return a vector of which each rank has the elements for its columns of A, up to the order of A, on all."""
        columns, order = self.columns, min(self.columns.matrices[0].shape)
        count = columns.matrices[0].count
        places = [
            np.concatenate([np.arange(*columns.blocks[block][1:]) for block in columns.owned(rank, 0, count)])
            for rank in range(columns.ranks)
        ]
        places = [found[found < order] for found in places]
        most = max(map(len, places))
        found = self.group.everywhere(values[: len(places[self.rank])], most)
        whole = np.zeros(order, found.dtype)
        for rank, there in enumerate(places):
            whole[there] = found[rank, : len(there)]
        return whole

    def _check_rank(self) -> None:
        """Raise if a diagonal element of R is no more than rounding of its column."""
        xp, order, a_shape = self.kernels.xp, min(self.columns.matrices[0].shape), self.plan.problem.a_shape
        eps = max(a_shape) * np.finfo(self.array.dtype).eps
        found = []
        for start, stop, block in self._blocks(0):
            upper = xp.triu(block[: min(stop, order)], -start)[:, : max(0, order - start)]
            # The norm of R's column is that of A's: what is left of it is rounding if those before it span it.
            found.append(abs(self.kernels.diagonal(upper[start:])) <= eps * self.kernels.xp.linalg.norm(upper, axis=0))
        small = self._on_all(xp.concatenate(found).astype(np.int32))
        if small.any():
            raise MatrixError(singular(int(np.argmax(small)), rank=True))
