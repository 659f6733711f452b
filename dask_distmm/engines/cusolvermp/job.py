"""One participant's side of a factorization that all ranks compute together.

::

    prepare()   chunks are brought to the device, block columns are allocated
    execute()   chunks of workers that are not ranks are fetched over Dask's comms
                the gate: all ranks go on, or none
                block columns are made of the ranks' chunks, by NCCL
                the library's calls
                chunks of the outputs are made of all ranks' block columns, by NCCL

What can fail only on one rank, such as an allocation, is agreed on by all of them (`Group.together`). A rank that is
alone does as the other engines do: it takes the steps of a factorization on its own, and needs no library that several
share.

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
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import ResultKey, Side, wait_checked
from dask_distmm.engines.cusolvermp.library import LEFT, LOWER, CusolverMpState, Group, Matrix, Shared
from dask_distmm.engines.exchange import RankExchange
from dask_distmm.engines.factor.execution import Execution
from dask_distmm.engines.factor.job import triangle_of
from dask_distmm.engines.factor.kernels import Kernels, assign
from dask_distmm.engines.factor.operations import indefinite, singular
from dask_distmm.engines.factor.spectral import not_finite, unit_factors
from dask_distmm.engines.gpu.copy_kernels import Exchange, device_bytes
from dask_distmm.engines.gpu.entry import CollectiveEntry
from dask_distmm.engines.gpu.gemm import OPS
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.gpu.program import GpuFactorJob
from dask_distmm.errors import EngineError, MatrixError
from dask_distmm.layout import Copy, Moves
from dask_distmm.layout.rectangles import Shuffle
from dask_distmm.planning.computation import Output
from dask_distmm.planning.cusolvermp import CUSOLVERMP
from dask_distmm.planning.factor.plan import FactorPlacement, FactorPlan, factored
from dask_distmm.planning.factor.planner import algorithm_of

# What the ranks compute together, as calls of cuSOLVERMp and cuBLASMp


class SharedExecution(Execution):
    """One rank's part of a computation of all ranks. `group` must be set before `execute`."""

    def __init__(
        self,
        plan: FactorPlan,
        rank: int,
        kernels: Kernels,
        exchange: RankExchange,
        check: Callable[[], None],
        progress: Callable[[float], None],
        array: Any,
    ) -> None:
        super().__init__(plan, rank, kernels, exchange, check, progress, array)
        self.group: Group

    def execute(self) -> None:
        """Call the library."""
        self.take(self._steps, 0.0, 0.0)
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
        # If all numbers are NaN, none is the largest.
        found = np.where(wrong, rows, found)
        for panel in range(self.columns.matrices[0].count):
            start, stop, _ = self.columns.place(panel)
            if start < stop:
                self.arrays[f"pivots.{panel}"] = (found[start:stop] - start).astype(np.int32)
                self.arrays[f"diagonal.{panel}"] = diagonal[start:stop]

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
        self.arrays["result.w"] = w
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


# One participant's side of a factorization that all ranks compute together


# Bytes that are on their way from one rank to another at a time, and again in the other direction.
_BATCH_BYTES = 2**28
# Seconds that work which was begun may take to end after an error, and between two looks whether it has.
_SETTLING, _LOOK = 5.0, 1e-3


class CusolverMpJob(GpuFactorJob):
    """One participant's side of one run; see the text of the module."""

    def __init__(self, side: Side[FactorPlacement], engine: CusolverMpState) -> None:
        super().__init__(side, engine)
        self._state, self._shared = engine, len(self.plan.ranks) > 1
        least = CUSOLVERMP.share(algorithm_of(self.plan.problem.task), len(self.plan.ranks))
        self._entry = CollectiveEntry(self.plan, self.rank, self.comm, self.ended, least)
        self._received = 0

    @property
    def received_bytes(self) -> int:
        """Bytes of matrices that have arrived from other participants, but for what the library moves."""
        return self.comm.received_bytes + self._received

    def prepare(self) -> None:
        """Bring chunks to the device, and allocate this rank's block columns."""
        self._upload(self.plan.problem.dtype)
        if self.rank is None or not self._shared:
            super().prepare()
            return
        columns = self.plan.work.columns
        # Ranks without a column have memory, too: the library wants a pointer.
        shape = columns.rows, max(1, columns.local_cols(self.rank))
        array = cp.empty(shape, self.plan.problem.dtype, order="F")
        self._execution = SharedExecution(
            self.plan.work, self.rank, self.kernels, self.exchange, self.ended.check, self.progress, array
        )

    # The work

    def execute(self) -> dict[ResultKey, Any]:
        """Gather the operands, let the library compute, put the outputs together."""
        if self.rank is None:
            return {}
        self._stream.wait_event(record(cp.cuda.Stream.null))
        try:
            with self._stream:
                if self._shared:
                    self._outside = self._fetched()
                    self._entry.enter(has_group=self.plan.group in self._state.groups)
                    self._group = self._joined()
                made = self._given_back(super().execute())
            self._stream.synchronize()
        except BaseException:
            self._settle()
            raise
        finally:
            self._entry.leave()
        arrays = [self._execution.array, *self.chunks.values(), *made.values()]
        self.held_bytes = sum({int(x.data.ptr): int(x.nbytes) for x in arrays if hasattr(x.data, "ptr")}.values())
        return made

    def _settle(self) -> None:
        """Let work end that was begun before an error: what it is done in is freed then. It may never end."""
        end = time.monotonic() + _SETTLING
        while not self._stream.done and time.monotonic() < end:
            time.sleep(_LOOK)

    def _joined(self) -> Group:
        """Return the ranks' group; all have it, or all make it now."""
        groups, number = self._state.groups, self.plan.group
        if number not in groups:
            assert self.rank is not None
            groups[number] = Group(
                len(self.plan.ranks),
                self.rank,
                self._entry.unique_id,
                self.plan.workers,
                self._stream,
                self._state.handle,
            )
        assert isinstance(self._execution, SharedExecution)
        self._execution.group = groups[number]
        return groups[number]

    def _fetched(self) -> dict[str, list[tuple[Copy, Any]]]:
        """Return by operand the parts that workers have which are not ranks."""
        asked = {name: self._ask(name, self.plan.ranks)[1] for name in self.plan.problem.operands}
        return {
            name: [
                one
                for copies, answer in some
                for one in zip(copies, wait_checked(answer, self.ended.check), strict=True)
            ]
            for name, some in asked.items()
        }

    def _gather(self) -> None:
        """Write this rank's block columns of the operands."""
        if not self._shared:
            super()._gather()
            return
        assert self.rank is not None
        plan, rank_of = self.plan, {index: rank for rank, index in enumerate(self.plan.ranks)}
        for number, name in enumerate(plan.problem.operands):
            orientation, target = plan.problem.task.orientation(name), self._execution.held(number)
            copies: list[tuple[Copy, int, int]] = []
            src: dict[int, Any] = {}
            for peer in rank_of.values():
                for copy, (index, *_) in self._parts_of(name, peer):
                    holder = int(plan.where[name][index])
                    if holder in rank_of:
                        copies.append((copy, rank_of[holder], peer))
                    if holder == self.me:
                        chunk = self.chunks[name, index]
                        src[copy.src] = chunk.T if orientation.transposed else chunk
            self._exchange(copies, src, {self.rank: target}, conjugated=orientation.conjugated)
            for copy, _, peer in copies:
                if peer == self.rank:
                    self._note(name, copy)
            for copy, part in self._outside.pop(name):
                self._put(name, copy, cp.asarray(part, plan.problem.dtype))

    def _exchange(
        self, copies: Iterable[tuple[Copy, int, int]], src: dict[int, Any], dst: dict[int, Any], *, conjugated: bool
    ) -> None:
        """Carry out copies, each with the ranks of its source and of its destination, to column-major matrices."""
        assert self.rank is not None
        ranks, size = range(len(self.plan.ranks)), max((x.itemsize for x in (*src.values(), *dst.values())), default=1)
        moves = Moves(*np.array([(*copy[:8], *owners) for copy, *owners in copies], np.int64).reshape(-1, 10).T)
        for some in moves.rounds(len(ranks), _BATCH_BYTES // size):
            shuffle = Shuffle(some, self.rank, ranks, src, dst, "F", device_bytes, single=_BATCH_BYTES)
            exchange = Exchange(shuffle)
            exchange.run(self._stream, self._group.comm)
            self._received += exchange.received_bytes
        for array in dst.values():
            if conjugated and array.dtype.kind == "c":
                cp.conjugate(array, out=array)

    def _refuse(self, problem: str) -> None:
        """Raise on all ranks if there is a problem with the operands on one of them."""
        if self._shared and self.plan.problem.task.check_finite:
            self._group.refuse(problem)
        else:
            super()._refuse(problem)

    def _assemble(self, number: int, output: Output) -> dict[ResultKey, Any]:
        """Return the chunks of an output that this rank puts together."""
        if not self._shared or self.plan.work.output_layout(output.name) is None:
            return super()._assemble(number, output)
        assert self.rank is not None
        found: dict[ResultKey, Any] = self._group.together(lambda: self._blanks(output))
        described = self.plan.work.output(output.name)
        orientation, copies, dst = described.orientation, list[tuple[Copy, int, int]](), dict[int, Any]()
        for peer in range(len(self.plan.ranks)):
            for index, copy in self._taken(output, peer):
                copies.append((copy, copy.src, peer))
                if peer == self.rank:
                    dst[copy.dst] = found[output.name, index].T if orientation.transposed else found[output.name, index]
        self._exchange(copies, {self.rank: self._parts[output.name]}, dst, conjugated=orientation.conjugated)
        for copy, _, peer in copies:
            if peer == self.rank:
                place = dst[copy.dst][copy.dst_index]
                made = triangle_of(self.kernels, described.form, place, copy.row, copy.col)
                if made is not place:
                    assign(place, made)
        return found

    # Messages between participants

    def available(self, kind: str, boxes: Boxes) -> Future[Any]:
        """Return the future that says when `serve` can answer."""
        return self._entry.entered(int(boxes[0, 0])) if kind == "enter" else super().available(kind, boxes)

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> list[Any]:
        """Return boxes of the chunks that are here, or the id under which the ranks make their communicator."""
        return list(self._entry.answer()) if kind == "enter" else super().serve(kind, boxes, flat)

    # The end

    def abort(self, error: BaseException) -> None:
        """End with `error`: at once before the gate; else when the library returns, or else with the process."""
        self._entry.abort(error)
        super().abort(error)
