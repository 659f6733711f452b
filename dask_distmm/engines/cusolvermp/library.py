"""cuSOLVERMp, and cuBLASMp's trsm, through their bindings: grids, descriptors, workspace, the calls.

A `Group` is what the ranks of a plan share and keep between runs. To make, to use or to free it is collective: all
ranks do it in the same order, as they see the same runs in the same order. Matrices are column-major, in square blocks
on one row of ranks, so that each rank has all rows of its block columns: then the size of the blocks' rows has no
meaning for where elements lie, and the library wants it to be that of the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from nvmath.bindings import cublas, cublasMp, cusolverMp

from dask_distmm.comms.nccl import LEAST_NCCL, NcclComm, nccl_version
from dask_distmm.engines.gpu.gemm import DATA_TYPES, OPS
from dask_distmm.errors import EngineError, MatrixError
from dask_distmm.installing import install_command

# What a process keeps between its runs: a stream, the library's handle, and the communicators


class CusolverMpState:
    """A stream, the handle of cuSOLVERMp, and by number the groups of ranks that have a communicator."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self._stream: cp.cuda.Stream | None = None
        self._handle = 0
        self._solver: Any = None

    @property
    def stream(self) -> cp.cuda.Stream:
        """The engine's own stream, on the process' current device."""
        if self._stream is None:
            self._stream = cp.cuda.Stream(non_blocking=True)
        return self._stream

    @property
    def handle(self) -> int:
        """The library's handle. One process may have no more than one for its GPU."""
        if not self._handle:
            self._handle = int(cusolverMp.create(int(cp.cuda.runtime.getDevice()), self.stream.ptr))
        return self._handle

    def solver(self) -> Any:
        """Return the kernels of one GPU (`SolverKernels`), on the engine's stream."""
        if self._solver is None:
            # cuSOLVER is loaded by those who use it.
            from dask_distmm.engines.gpu.lapack import SolverKernels

            self._solver = SolverKernels(self.stream)
        return self._solver


# cuSOLVERMp, and cuBLASMp's trsm, through their bindings: grids, descriptors, workspace, the calls


_LEAST = 901  # 0.9.1
# cublasFillMode_t, cublasSideMode_t, cublasDiagType_t
LOWER, _UPPER, LEFT, _NON_UNIT, _UNIT = 0, 1, 0, 0, 1
_COMPUTE_TYPES = {
    **dict.fromkeys(("float32", "complex64"), int(cublas.ComputeType.COMPUTE_32F)),
    **dict.fromkeys(("float64", "complex128"), int(cublas.ComputeType.COMPUTE_64F)),
}


def check_versions(handle: int) -> dict[str, str]:
    """Return the versions that must agree between ranks."""
    version, nccl = int(cusolverMp.get_version(handle)), nccl_version()
    found, least = ".".join(map(str, nccl)), ".".join(map(str, LEAST_NCCL))
    major = cp.cuda.runtime.runtimeGetVersion() // 1000
    if version < _LEAST or nccl < LEAST_NCCL:
        raise EngineError(
            f"cuSOLVERMp {version} and NCCL {found} were found; needed are cuSOLVERMp 0.9.1 ({_LEAST}) and NCCL "
            f"{least} or newer: {install_command(f'cu{major}')}"
        )
    return {"cusolvermp": str(version), "cublasmp": str(int(cublasMp.get_version())), "nccl": found}


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


class Group:
    """The communicator and the grids of a group of ranks."""

    def __init__(
        self, nranks: int, rank: int, unique_id: bytes, names: tuple[str, ...], stream: cp.cuda.Stream, handle: int
    ) -> None:
        self.comm = NcclComm(nranks, rank, unique_id, stream)
        self.names, self.stream, self.handle = names, stream, handle
        by_columns = int(cusolverMp.GridMapping.COL_MAJOR)
        self.grid = int(cusolverMp.create_device_grid(handle, self.comm.handle, 1, nranks, by_columns))
        self._blas: tuple[int, int] | None = None

    def together(self, work: Callable[[], Any]) -> Any:
        """Do something without the others; raise the same `EngineError` on all ranks if it fails on one."""
        problem, found = "", None
        try:
            found = work()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problems := self.comm.agree(problem):
            raise EngineError("; ".join(f"{self.names[rank]}: {text}" for rank, text in problems.items()))
        return found

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
        self.comm.close()


class Shared:
    """Routines on matrices of one type, which all ranks of a group call. A context manager, which frees descriptors."""

    def __init__(self, group: Group, dtype: str) -> None:
        self._group, self._dtype, self._kind = group, dtype, DATA_TYPES[dtype]
        self._described: dict[tuple[tuple[int, int], int, int], int] = {}
        self._one = np.ones(1, dtype)

    def solver(self, name: str, *arguments: Any, for_size: Sequence[Any] | None = None) -> int:
        """Call a routine of cuSOLVERMp and return what it says: 0 if all is well, else a number above 0."""
        handle, given = self._group.handle, self._given(arguments)
        asked = given if for_size is None else self._given(for_size)
        info = cp.zeros(1, np.int32)
        self._group.call(
            name,
            lambda: getattr(cusolverMp, f"{name}_buffer_size")(handle, *asked, self._kind),
            lambda *memory: getattr(cusolverMp, name)(handle, *given, self._kind, *memory, int(info.data.ptr)),
        )
        found = int(info.get(stream=self._group.stream)[0])
        if self._group.comm.largest(-found) > 0:
            raise EngineError(f"cuSOLVERMp's {name} refuses argument {-found}")
        return self._group.comm.largest(found)

    def trsm(self, a: Matrix, b: Matrix, *, order: int, lower: bool, op: str, unit: bool) -> None:
        """Overwrite the first `order` rows of B with the solution of ``op(A) X = B``, A the triangle of that order."""
        handle, grid = self._group.blas
        described = [
            int(cublasMp.matrix_descriptor_create(*x.shape, x.width, x.width, 0, 0, x.ld, self._kind, grid))
            for x in (a, b)
        ]
        modes = LEFT, LOWER if lower else _UPPER, OPS[op], _UNIT if unit else _NON_UNIT
        places = a.pointer, 1, 1, described[0], b.pointer, 1, 1, described[1]
        given = *modes, order, b.shape[1], int(self._one.ctypes.data), *places, _COMPUTE_TYPES[self._dtype]
        try:
            self._group.call(
                "trsm",
                lambda: cublasMp.trsm_buffer_size(handle, *given),
                lambda *memory: cublasMp.trsm(handle, *given, *memory),
            )
        finally:
            for one in described:
                cublasMp.matrix_descriptor_destroy(one)

    def _given(self, arguments: Sequence[Any]) -> list[int]:
        found: list[int] = []
        for one in arguments:
            found += (one.pointer, 1, 1, self._descriptor(one)) if isinstance(one, Matrix) else (int(one),)
        return found

    def _descriptor(self, matrix: Matrix) -> int:
        key = matrix.shape, matrix.width, matrix.ld
        if key not in self._described:
            self._described[key] = int(
                cusolverMp.create_matrix_desc(
                    self._group.grid, self._kind, *matrix.shape, matrix.width, matrix.width, 0, 0, matrix.ld
                )
            )
        return self._described[key]

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._described.values():
            cusolverMp.destroy_matrix_desc(descriptor)
        self._described.clear()
