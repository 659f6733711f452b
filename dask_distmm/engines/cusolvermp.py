"""The engine for factorizations on GPUs that can't read each other's memory: those of several hosts.

One participant's side of a factorization that all ranks compute together.

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

A `Group` is what the ranks of a plan share and keep between runs. To make, to use or to free it is collective: all
ranks do it in the same order, as they see the same runs in the same order. Matrices are column-major, in square blocks
on one row of ranks, so that each rank has all rows of its block columns: then the size of the blocks' rows has no
meaning for where elements lie, and the library wants it to be that of the columns.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from nvmath.bindings import cublas, cublasMp, cusolverMp

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import ResultKey, Side, wait_checked
from dask_distmm.engines.entry import CollectiveEntry
from dask_distmm.engines.gpu.collective import CollectiveEngine, RankGroup
from dask_distmm.engines.gpu.copy_kernels import Exchange, device_bytes
from dask_distmm.engines.gpu.gemm import DATA_TYPES, OPS
from dask_distmm.engines.gpu.operands import check_arrays
from dask_distmm.engines.gpu.program import GpuProgramJob
from dask_distmm.engines.programs.blas import Kernels, assign
from dask_distmm.engines.programs.factor import indefinite, singular
from dask_distmm.engines.programs.job import Part, put, triangle_of
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.engines.programs.spectral import not_finite, unit_factors
from dask_distmm.errors import EngineError, MatrixError
from dask_distmm.layout import Copy, Moves
from dask_distmm.layout.rectangles import Shuffle
from dask_distmm.planning.computation import NamedMatrix
from dask_distmm.planning.cusolvermp import CUSOLVERMP
from dask_distmm.planning.factor import FactorPlacement, algorithm_of, factored
from dask_distmm.programs.steps import Make

# cuSOLVERMp, and cuBLASMp's trsm, through their bindings: grids, descriptors, workspace, the calls


# cublasFillMode_t, cublasSideMode_t, cublasDiagType_t
LOWER, _UPPER, LEFT, _NON_UNIT, _UNIT = 0, 1, 0, 0, 1
_COMPUTE_TYPES = {
    **dict.fromkeys(("float32", "complex64"), int(cublas.ComputeType.COMPUTE_32F)),
    **dict.fromkeys(("float64", "complex128"), int(cublas.ComputeType.COMPUTE_64F)),
}


class Matrix(NamedTuple):
    """A matrix that is distributed over the ranks by block columns."""

    # Rows and columns of the whole matrix, and the columns of a block.
    shape: tuple[int, int]
    width: int
    # This rank's columns; memory of any size where it has none.
    local: Any
    # Distance of its columns, in elements.
    ld: int

    @property
    def pointer(self) -> int:
        """Where the rank's columns begin."""
        return int(self.local.data.ptr)


class Group(RankGroup):
    """The communicator and the grids of a group of ranks."""

    def __init__(self, plan: FactorPlacement, rank: int, unique_id: bytes, stream: cp.cuda.Stream, handle: int) -> None:
        super().__init__(plan, rank, unique_id, stream)
        self.handle, by_columns = handle, int(cusolverMp.GridMapping.COL_MAJOR)
        self.grid = int(cusolverMp.create_device_grid(handle, self.comm.handle, 1, len(plan.ranks), by_columns))
        self._blas: tuple[int, int] | None = None

    def refuse(self, problem: str) -> None:
        """Raise the same `MatrixError` on all ranks if one of them has found something in its columns."""
        if problems := self.comm.agree(problem):
            raise MatrixError(next(iter(problems.values())))

    def everywhere(self, values: Any, count: int) -> Any:
        """Return the vectors of all ranks, ``(ranks, count)``, on the host. Each has at most `count` elements."""
        comm, size = self.comm, count * values.itemsize
        found = cp.zeros((comm.nranks, count), values.dtype)
        found[comm.rank, : len(values)] = values
        others = [rank for rank in range(comm.nranks) if rank != comm.rank]
        comm.exchange(
            [(rank, int(found[comm.rank].data.ptr), size) for rank in others],
            [(rank, int(found[rank].data.ptr), size) for rank in others],
        )
        return found.get(stream=self.stream)

    @property
    def blas(self) -> tuple[int, int]:
        """The handle of cuBLASMp and its grid, made when they are first needed."""
        if self._blas is None:
            handle = int(cublasMp.create(self.stream.ptr))
            layout = int(cublasMp.GridLayout.COL_MAJOR)
            self._blas = handle, int(cublasMp.grid_create(1, self.comm.nranks, layout, self.comm.handle))
        return self._blas

    def call(self, name: str, sizes: Callable[[], tuple[int, int]], routine: Callable[..., Any]) -> None:
        """Call a routine on all ranks, with a workspace of the largest size that one of them asks for."""

        def asked() -> tuple[int, int]:
            try:
                device, host = sizes()
            except RuntimeError as error:
                raise RuntimeError(f"{name}: {error}") from error
            return max(1, int(device)), max(1, int(host))

        device, host = map(self.comm.largest, self.together(asked))
        memory = self.together(lambda: (cp.empty(device, np.uint8), np.empty(host, np.uint8)))

        def run() -> None:
            routine(int(memory[0].data.ptr), device, int(memory[1].ctypes.data), host)
            self.stream.synchronize()

        self.together(run)

    def close(self) -> None:
        """Free everything, on all ranks."""
        if self._blas is not None:
            handle, grid = self._blas
            cublasMp.grid_destroy(grid)
            cublasMp.destroy(handle)
        cusolverMp.destroy_grid(self.grid)
        super().close()


# What the ranks compute together, as calls of cuSOLVERMp and cuBLASMp


class LibraryKernels(ProgramKernels):
    """The kernel of a computation of all ranks. `group` must be set before it is called."""

    group: Group

    def __init__(self, blas: Kernels, plan: FactorPlacement, rank: int) -> None:
        super().__init__(blas)
        self.plan, self.rank, self.columns = plan, rank, plan.columns

    def by_library(self, array: Any) -> tuple[Any, ...]:
        """Call the library on this rank's block columns, side by side; return results without block columns."""
        self.array, problem = array, self.plan.task
        self._described: dict[tuple[tuple[int, int], int, int], int] = {}
        try:
            a, b = self._matrix(0), self._matrix(1) if len(self.columns.matrices) > 1 else None
            if problem.spectral:
                return (self._eigh(a, b),)
            if problem.kind == "solve_triangular":
                assert b is not None
                self._substitute(a, b)
                return ()
            routine = {"cholesky": self._potrf, "lu": self._getrf, "qr": self._geqrf}[factored(problem)]
            return routine(a, b) or ()
        finally:
            for descriptor in self._described.values():
                cusolverMp.destroy_matrix_desc(descriptor)

    def _matrix(self, number: int) -> Matrix:
        """Return A (0) or the second matrix (1); that has as many rows as the array where a solution needs them."""
        matrix = self.columns.matrices[number]
        first, stop = self.columns.first(number), self.columns.first(number + 1)
        local = self.array[:, self.columns.local(self.rank, first, stop)]
        rows = self.columns.rows if number else matrix.shape[0]
        return Matrix((rows, matrix.shape[1]), matrix.width, local if local.size else self.array, len(self.array))

    def _potrf(self, a: Matrix, b: Matrix | None) -> None:
        n = a.shape[1]
        info, failure = 0, None
        try:
            info = self._solver("potrf", LOWER, n, a)
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
            self._solver("potrs", LOWER, n, b.shape[1], a, b)

    def _getrf(self, a: Matrix, b: Matrix | None) -> tuple[Any, ...]:
        # One for each of the rank's columns.
        pivots = cp.zeros(self.columns.local_cols(self.rank) + a.width, np.int64)
        self._solver("getrf", *a.shape, a, int(pivots.data.ptr))
        diagonal = self._diagonal()
        found = self._by_panels(self._on_all(pivots), diagonal)
        if b is None:
            return found
        if not diagonal.all():
            raise MatrixError(singular(int(np.argmin(diagonal != 0)), rank=False))
        self._solver("getrs", OPS["N"], a.shape[0], b.shape[1], a, int(pivots.data.ptr), b)
        return found

    def _by_panels(self, pivots: Any, diagonal: Any) -> tuple[Any, ...]:
        """Return the pivots of each panel, counted from 0 and from its first row, and then the diagonals.

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
        places = [self.columns.place(panel) for panel in self.plan.panels]
        return (
            *((found[start:stop] - start).astype(np.int32) for start, stop in places),
            *(diagonal[start:stop] for start, stop in places),
        )

    def _geqrf(self, a: Matrix, b: Matrix | None) -> None:
        problem, (m, n), k = self.plan.task, a.shape, min(a.shape)
        # One for each of the rank's columns.
        tau = cp.zeros(self.columns.local_cols(self.rank) + a.width, problem.dtype)
        self._solver("geqrf", m, n, a, int(tau.data.ptr), for_size=(m, n, a))
        if b is None:
            return

        def reflect(op: str) -> None:
            target = b._replace(shape=(m, b.shape[1]))
            self._solver("ormqr", LEFT, OPS[op], m, b.shape[1], k, a, int(tau.data.ptr), target)

        if problem.kind == "qr":
            reflect("N")
            return
        self._check_r()
        if problem.by_adjoint:
            self._trsm(a, b, order=k, lower=False, op="C", unit=False)
            reflect("N")
        else:
            # ormqr has the transpose of real types, and the conjugate transpose of complex ones.
            reflect("C" if problem.dtype.startswith("complex") else "T")
            self._trsm(a, b, order=k, lower=False, op="N", unit=False)

    def _substitute(self, a: Matrix, b: Matrix) -> None:
        problem = self.plan.task
        if not problem.unit_diagonal and not (diagonal := self._diagonal()).all():
            raise MatrixError(singular(int(np.argmin(diagonal != 0)), rank=False))
        op, order = problem.substituted, a.shape[1]
        self._trsm(a, b, order=order, lower=problem.lower, op=op, unit=problem.unit_diagonal)

    def _eigh(self, a: Matrix, b: Matrix | None) -> Any:
        n, xp, finite = a.shape[1], self.xp, []
        for start, _, block in self._blocks(0):
            finite.append(xp.isfinite(xp.tril(block[start:])).all())
        good = all(bool(self.blas.host(one)) for one in finite)
        self.group.refuse("" if good else not_finite("a"))
        job = ctypes.create_string_buffer(b"N" if b is None else b"V")
        w = cp.zeros(n, np.zeros(0, self.plan.task.dtype).real.dtype)
        # Without vectors nothing is written to Q: A is there for a place.
        vectors = b or a
        if self._solver("syevd", ctypes.addressof(job), LOWER, n, a, int(w.data.ptr), vectors):
            raise MatrixError(f"eigh of A, {a.shape}: the iteration has not converged; scale A, or use a wider type")
        for _, _, vectors_here in self._blocks(1) if b is not None else ():
            vectors_here[...] *= unit_factors(self.blas, vectors_here)
        return w

    def _blocks(self, number: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the rank's blocks of a matrix that have columns: the first and the last + 1, and all of their rows."""
        rows, first = self.columns.matrices[number].shape[0], self.columns.first(number)
        for block in self.columns.owned(self.rank, first, first + self.columns.matrices[number].count):
            _, start, stop = self.columns.blocks[block]
            yield start, stop, self.array[:rows, self.columns.local(self.rank, block, block + 1)]

    def _diagonal(self) -> Any:
        """Return the diagonal of A as it is now, on the host of each rank."""
        order = min(self.columns.matrices[0].shape)
        parts = [self.blas.diagonal(block[start:]) for start, _, block in self._blocks(0) if start < order]
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

    def _check_r(self) -> None:
        """Raise if a diagonal element of R is no more than rounding of its column."""
        xp, order, a_shape = self.xp, min(self.columns.matrices[0].shape), self.plan.task.a_shape
        eps = max(a_shape) * np.finfo(self.array.dtype).eps
        found = []
        for start, stop, block in self._blocks(0):
            upper = xp.triu(block[: min(stop, order)], -start)[:, : max(0, order - start)]
            # The norm of R's column is that of A's: what is left of it is rounding if those before it span it.
            found.append(abs(self.blas.diagonal(upper[start:])) <= eps * self.xp.linalg.norm(upper, axis=0))
        small = self._on_all(xp.concatenate(found).astype(np.int32))
        if small.any():
            raise MatrixError(singular(int(np.argmax(small)), rank=True))

    # Calls of the libraries

    def _solver(self, name: str, *arguments: Any, for_size: Sequence[Any] | None = None) -> int:
        """Call a routine of cuSOLVERMp and return what it says: 0 if all is well, else a number above 0."""
        handle, kind, given = self.group.handle, DATA_TYPES[self.plan.task.dtype], self._given(arguments)
        asked = given if for_size is None else self._given(for_size)
        info = cp.zeros(1, np.int32)
        self.group.call(
            name,
            lambda: getattr(cusolverMp, f"{name}_buffer_size")(handle, *asked, kind),
            lambda *memory: getattr(cusolverMp, name)(handle, *given, kind, *memory, int(info.data.ptr)),
        )
        found = int(info.get(stream=self.group.stream)[0])
        if self.group.comm.largest(-found) > 0:
            raise EngineError(f"cuSOLVERMp's {name} refuses argument {-found}")
        return self.group.comm.largest(found)

    def _trsm(self, a: Matrix, b: Matrix, *, order: int, lower: bool, op: str, unit: bool) -> None:
        """Overwrite the first `order` rows of B with the solution of ``op(A) X = B``, A the triangle of that order."""
        (handle, grid), dtype = self.group.blas, self.plan.task.dtype
        kind, one = DATA_TYPES[dtype], np.ones(1, dtype)
        described = [
            int(cublasMp.matrix_descriptor_create(*x.shape, x.width, x.width, 0, 0, x.ld, kind, grid)) for x in (a, b)
        ]
        modes = LEFT, LOWER if lower else _UPPER, OPS[op], _UNIT if unit else _NON_UNIT
        places = a.pointer, 1, 1, described[0], b.pointer, 1, 1, described[1]
        given = *modes, order, b.shape[1], int(one.ctypes.data), *places, _COMPUTE_TYPES[dtype]
        try:
            self.group.call(
                "trsm",
                lambda: cublasMp.trsm_buffer_size(handle, *given),
                lambda *memory: cublasMp.trsm(handle, *given, *memory),
            )
        finally:
            for descriptor in described:
                cublasMp.matrix_descriptor_destroy(descriptor)

    def _given(self, arguments: Sequence[Any]) -> list[int]:
        found: list[int] = []
        for one in arguments:
            found += (one.pointer, 1, 1, self._descriptor(one)) if isinstance(one, Matrix) else (int(one),)
        return found

    def _descriptor(self, matrix: Matrix) -> int:
        key = matrix.shape, matrix.width, matrix.ld
        if key not in self._described:
            kind, blocks = DATA_TYPES[self.plan.task.dtype], (matrix.width, matrix.width)
            self._described[key] = int(
                cusolverMp.create_matrix_desc(self.group.grid, kind, *matrix.shape, *blocks, 0, 0, matrix.ld)
            )
        return self._described[key]


# One participant's side of a factorization that all ranks compute together


# Bytes that are on their way from one rank to another at a time, and again in the other direction.
_BATCH_BYTES = 2**28
# Seconds that work which was begun may take to end after an error, and between two looks whether it has.
_SETTLING, _LOOK = 5.0, 1e-3


class CusolverMpJob(GpuProgramJob):
    """One participant's side of one run; see the text of the module."""

    def __init__(self, side: Side[FactorPlacement], engine: CusolverMpEngine) -> None:
        super().__init__(side, engine)
        self._state, self._shared = engine, len(self.plan.ranks) > 1
        least = CUSOLVERMP.share(algorithm_of(self.plan.problem.task), len(self.plan.ranks))
        self._entry = CollectiveEntry(self.plan, self.rank, self.comm, self.ended, least)

    def _memory(self, shape: tuple[int, int]) -> Any:
        # Ranks without a column have memory, too: the library wants a pointer, and columns without gaps.
        self._allocated.append(cp.empty((shape[0], max(1, shape[1])), self.plan.problem.compute_type, order="F"))
        return self._allocated[0]

    def _program_kernels(self, rank: int) -> ProgramKernels:
        return LibraryKernels(self.blas, self.plan, rank) if self._shared else super()._program_kernels(rank)

    # The work

    def execute(self) -> dict[ResultKey, Any]:
        """Gather the operands, let the library compute, put the outputs together."""
        if self.rank is None:
            return {}
        try:
            if isinstance(self.kernels, LibraryKernels):
                with self._stream:
                    self._outside = self._fetched()
                    self._entry.enter(lambda: self._state.new_id(self.plan.group))
                    self.kernels.group = self._group = self._joined()
            return super().execute()
        finally:
            self._entry.leave()

    def _settle(self) -> None:
        """Let work end, also some that was begun before an error, which may never end: its memory is freed then."""
        end = time.monotonic() + _SETTLING
        while not self._stream.done and time.monotonic() < end:
            time.sleep(_LOOK)

    def _joined(self) -> Group:
        """Return the ranks' group."""
        assert self.rank is not None
        given = self.plan, self.rank, self._entry.unique_id, self._stream, self._state.handle
        return self._state.group(self.plan.group, lambda: Group(*given))

    def _fetched(self) -> dict[str, list[tuple[Part, Any]]]:
        """Return by operand the parts that workers have which are not ranks."""
        found: dict[str, list[tuple[Part, Any]]] = {}
        for step in self._steps:
            if isinstance(step, Make) and step.operand:
                for holder, parts in self._wanted(step.operand, self._at(step.buffer)).items():
                    if holder not in self.plan.ranks:
                        answer = wait_checked(self._fetch("input", holder, parts), self.ended.check)
                        found.setdefault(step.operand, []).extend(zip(parts, answer, strict=True))
        return found

    def _gather(self, name: str, target: Any) -> None:
        """Write this rank's block columns of an operand."""
        if not self._shared:
            super()._gather(name, target)
            return
        assert self.rank is not None
        plan, rank_of = self.plan, {index: rank for rank, index in enumerate(self.plan.ranks)}
        orientation = plan.problem.task.orientation(name)
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
        for part, array in self._outside.pop(name, ()):
            put(self.blas, part, cp.asarray(array, plan.problem.compute_type))

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
            self.pulled_bytes += exchange.received_bytes
        for array in dst.values():
            if conjugated and array.dtype.kind == "c":
                cp.conjugate(array, out=array)

    def _refuse(self, problem: str) -> None:
        """Raise on all ranks if there is a problem with the operands on one of them."""
        if self._shared and self.plan.problem.task.check_finite:
            self._group.refuse(problem)
        else:
            super()._refuse(problem)

    def _assemble(self, number: int, output: NamedMatrix) -> dict[ResultKey, Any]:
        """Return the chunks of an output that this rank puts together."""
        if not self._shared:
            return super()._assemble(number, output)
        assert self.rank is not None
        found: dict[ResultKey, Any] = self._group.together(lambda: self._blanks(output))
        described = self.plan.output(output.name)
        orientation, copies, dst = described.orientation, list[tuple[Copy, int, int]](), dict[int, Any]()
        for peer in range(len(self.plan.ranks)):
            for index, copy in self._taken_by(output, peer):
                copies.append((copy, copy.src, peer))
                if peer == self.rank:
                    dst[copy.dst] = found[output.name, index].T if orientation.transposed else found[output.name, index]
        self._exchange(copies, {self.rank: self._parts[output.name]}, dst, conjugated=orientation.conjugated)
        for copy, _, peer in copies:
            if peer == self.rank:
                place = dst[copy.dst][copy.dst_index]
                made = triangle_of(self.blas, described.form, place, copy.row, copy.col)
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


class CusolverMpEngine(CollectiveEngine):
    """Factorizes on GPUs with cuSOLVERMp, one GPU a worker process."""

    name, library, least = "cusolvermp", "cuSOLVERMp", (901, "0.9.1")

    @functools.cached_property
    def handle(self) -> int:
        """The library's handle. One process may have no more than one for its GPU."""
        return int(cusolverMp.create(int(cp.cuda.runtime.getDevice()), self.stream.ptr))

    @functools.cached_property
    def _kernels(self) -> Any:
        # cuSOLVER is loaded by those who use it.
        from dask_distmm.engines.gpu.lapack import SolverKernels

        return SolverKernels(self.stream)

    def solver(self) -> Any:
        """Return the kernels of one GPU (`SolverKernels`), on the engine's stream."""
        return self._kernels

    def _versions(self) -> tuple[int, Mapping[str, str]]:
        others = {"cublasmp": str(int(cublasMp.get_version())), "nvmath": importlib.metadata.version("nvmath-python")}
        return int(cusolverMp.get_version(self.handle)), others

    def job(self, side: Side[Any]) -> CusolverMpJob:
        """Return what does a participant's part of a run."""
        check_arrays(self.name, side.chunks)
        return CusolverMpJob(side, self)


ENGINE = CusolverMpEngine()
