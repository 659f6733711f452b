"""cuBLASMp through its bindings: handles, descriptors, workspace, the calls.

A `Group` is what the ranks of a plan share and keep between runs: communicator, process grids, a registered
workspace, descriptors. To make or to free one of these is collective, so all ranks do it in the same order:
they see the same runs in the same order, and each decision rests only on these.
"""

from __future__ import annotations

import collections
import gc
import importlib.metadata
from typing import Any

import cupy as cp
import numpy as np
from nvmath.bindings import cublasMp

from dask_distmm.comms.nccl import LEAST_NCCL, NcclComm, nccl_version
from dask_distmm.engines.gpu.gemm import DATA_TYPES, OPS, PLAIN, FusedEpilog, GemmTypes, MatrixRef, alpha_beta
from dask_distmm.errors import EngineError
from dask_distmm.installing import install_command
from dask_distmm.layout import Layout, ProcessGrid
from dask_distmm.numeric.types import FP8
from dask_distmm.planning.cublasmp import Tiles

# The stream and the communicators that a process keeps between its runs


class CublasMpState:
    """A stream, and by number the groups of ranks that have a communicator."""

    def __init__(self) -> None:
        self._stream: cp.cuda.Stream | None = None
        self.groups: dict[int, Group] = {}

    @property
    def stream(self) -> cp.cuda.Stream:
        """The engine's own stream, on the process' current device."""
        if self._stream is None:
            self._stream = cp.cuda.Stream(non_blocking=True)
        return self._stream


# cuBLASMp through its bindings: handles, descriptors, workspace, the calls


_LEAST_CUBLASMP = 1000  # 0.10.0
_MOST_DESCRIPTORS = 32

_Attribute = cublasMp.MatmulDescriptorAttribute


def check_versions() -> dict[str, str]:
    """Return the versions that must agree between ranks."""
    mp, nccl = int(cublasMp.get_version()), nccl_version()
    found, least = ".".join(map(str, nccl)), ".".join(map(str, LEAST_NCCL))
    major = cp.cuda.runtime.runtimeGetVersion() // 1000
    if mp < _LEAST_CUBLASMP or nccl < LEAST_NCCL:
        raise EngineError(
            f"cuBLASMp {mp} and NCCL {found} were found; needed are cuBLASMp 0.10 (1000) and NCCL {least} or newer: "
            f"{install_command(f'cu{major}')}"
        )
    return {
        "cublasmp": str(mp),
        "nccl": found,
        "nvmath": importlib.metadata.version("nvmath-python"),
    }


class Group:
    """The communicator, grids, workspace and descriptors of a group of ranks. Every call is collective."""

    def __init__(
        self, nranks: int, rank: int, unique_id: bytes, names: tuple[str, ...], stream: cp.cuda.Stream
    ) -> None:
        self.comm = NcclComm(nranks, rank, unique_id, stream)
        self.names, self.stream = names, stream
        self._handle = cublasMp.create(stream.ptr)
        self._grids: dict[tuple[int, int, str], int] = {}
        self._calls: collections.OrderedDict[Any, _Multiply] = collections.OrderedDict()
        self._workspace, self._workspace_bytes = 0, 0
        self._plain: Any = None
        self._shared = self.comm.shares_memory
        self.one = cp.asarray(np.ones(1, np.float32))

    def agree(self, problem: str = "") -> None:
        """Go on if no rank has a problem; otherwise raise the same `EngineError` on all."""
        problems = self.comm.agree(problem)
        if problems:
            raise EngineError("; ".join(f"{self.names[rank]}: {text}" for rank, text in problems.items()))

    def multiply(
        self,
        tiles: Tiles,
        shape: tuple[int, int, int],
        types: GemmTypes,
        a: MatrixRef,
        b: MatrixRef,
        d: MatrixRef,
        *,
        native: FusedEpilog = PLAIN,
    ) -> None:
        """Put ``D = epilog(alpha A @ B)`` on the stream."""
        x, y = (b, a) if tiles.flipped else (a, b)
        key = (tiles, shape, types, x.ld, y.ld, d.ld, native._replace(bias=0))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Multiply(self, tiles, types, x.ld, y.ld, d.ld, native)
            if len(self._calls) > _MOST_DESCRIPTORS:
                self._calls.popitem(last=False)[1].close()
        self._calls.move_to_end(key)
        call.set_bias(native.bias)
        arguments = call.arguments(self._handle, x.pointer, y.pointer, d.pointer)
        if call.workspace is None:
            device_bytes, host_bytes = cublasMp.matmul_buffer_size(*arguments)
            # Uneven tiles may need more on some ranks; what follows is collective.
            call.workspace = self.comm.largest(device_bytes), host_bytes
        device_bytes, host_bytes = call.workspace
        workspace = self._reserve(device_bytes)
        host = np.empty(host_bytes, np.uint8)
        call.host = host
        cublasMp.matmul(*arguments, workspace, device_bytes, host.ctypes.data if host_bytes else 0, host_bytes)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that the library works in."""
        return self._workspace_bytes

    def grid(self, grid: ProcessGrid) -> int:
        """Return the library's handle of a process grid, made when it is first needed."""
        order = grid.order if min(grid.nprow, grid.npcol) > 1 else "col"
        key = (grid.nprow, grid.npcol, order)
        if key not in self._grids:
            self._drop_workspace()  # it is registered with all grids
            layout = cublasMp.GridLayout.COL_MAJOR if order == "col" else cublasMp.GridLayout.ROW_MAJOR
            self._grids[key] = cublasMp.grid_create(grid.nprow, grid.npcol, int(layout), self.comm.handle)
        return self._grids[key]

    def _reserve(self, size: int) -> int:
        """Return a workspace of at least `size` bytes: registered where ranks share memory, else plain."""
        if size <= self._workspace_bytes:
            return self._workspace
        self._drop_workspace()
        problem = ""
        try:
            # The collective allocation below must not fail only on one rank: try for it here first.
            self._plain = self.allocate(size)
        except (cp.cuda.memory.OutOfMemoryError, cp.cuda.runtime.CUDARuntimeError) as error:
            problem = f"no room for cuBLASMp's workspace of {size / 2**30:.2f} GiB: {error}"
        self.agree(problem)
        if self._plain is None:
            first, *others = self._grids.values()
            self._workspace = cublasMp.malloc(first, size)
            for grid in others:
                cublasMp.buffer_register(grid, self._workspace, size)
        else:
            self._workspace = self._plain.ptr
        self._workspace_bytes = size
        return self._workspace

    def allocate(self, size: int) -> Any:
        """Return plain memory where ranks share none; else only try whether there is so much."""
        if not self._shared:
            return cp.cuda.alloc(size)
        _try_to_allocate(size)
        return None

    def _drop_workspace(self) -> None:
        if not self._workspace_bytes:
            return
        self.stream.synchronize()
        if self._shared:
            first, *others = self._grids.values()
            for grid in reversed(others):
                cublasMp.buffer_deregister(grid, self._workspace)
            cublasMp.free(first, self._workspace)
        self._plain, self._workspace, self._workspace_bytes = None, 0, 0

    def trim(self, keep: int) -> None:
        """Free a workspace of more than `keep` bytes."""
        if self._workspace_bytes > keep:
            self._drop_workspace()

    def close(self) -> None:
        """Free everything, on all ranks."""
        self._drop_workspace()
        for call in self._calls.values():
            call.close()
        self._calls.clear()
        for grid in self._grids.values():
            cublasMp.grid_destroy(grid)
        self._grids.clear()
        cublasMp.destroy(self._handle)
        self.comm.close()


class _Multiply:
    """The descriptors of one kind of multiply."""

    def __init__(
        self, group: Group, tiles: Tiles, types: GemmTypes, ldx: int, ldy: int, ldz: int, native: FusedEpilog
    ) -> None:
        kinds = (types.b, types.a) if tiles.flipped else (types.a, types.b)
        first, second = (tiles.b, tiles.a) if tiles.flipped else (tiles.a, tiles.b)
        stored = first.stored, second.stored, tiles.d.stored
        self.workspace: tuple[int, int] | None = None
        self.host: np.ndarray | None = None
        op_x, op_y = tiles.ops
        x, y, _ = stored
        self._shape = (
            x.shape[0] if op_x == "N" else x.shape[1],
            y.shape[1] if op_y == "N" else y.shape[0],
            x.shape[1] if op_x == "N" else x.shape[0],
        )
        self._alpha, self._beta = alpha_beta(types.a, native.alpha)
        # All grids first: making one is collective and frees the workspace.
        grids = [group.grid(matrix.grid) for matrix in stored]
        self._matrices = [
            _matrix_descriptor(matrix, ld, kind, grid)
            for matrix, ld, kind, grid in zip(stored, (ldx, ldy, ldz), (*kinds, types.d), grids, strict=True)
        ]
        self._descriptor = cublasMp.matmul_descriptor_create(types.compute_type)
        self._set(_Attribute.TRANSA, OPS[op_x])
        self._set(_Attribute.TRANSB, OPS[op_y])
        if types.a in FP8:
            # The formula has the scales; the library demands some.
            for operand in "AB":
                mode, pointer = (getattr(_Attribute, f"{operand}_SCALE_{what}") for what in ("MODE", "POINTER"))
                self._set(mode, int(cublasMp.MatmulMatrixScale.SCALAR_FP32))
                self._set(pointer, int(group.one.data.ptr))
        epilog = "allreduce" if tiles.replicated else native.epilog
        if epilog:
            self._set(_Attribute.EPILOGUE, int(getattr(cublasMp.MatmulEpilogue, epilog.upper())))

    def arguments(self, handle: int, x: int, y: int, z: int) -> tuple[int, ...]:
        """Return the arguments that cublasMpMatmul and its buffer size have in common."""
        matrix_x, matrix_y, matrix_z = self._matrices
        alpha, beta = self._alpha.ctypes.data, self._beta.ctypes.data
        return (
            *(handle, self._descriptor, *self._shape, alpha),
            *(x, 1, 1, matrix_x, y, 1, 1, matrix_y, beta),
            *(0, 1, 1, matrix_z, z, 1, 1, matrix_z),
        )

    def set_bias(self, pointer: int) -> None:
        """Say where the bias of the next call is."""
        if pointer:
            self._set(_Attribute.BIAS_POINTER, pointer)

    def _set(self, attribute: Any, value: int) -> None:
        number = np.array([value], cublasMp.get_matmul_descriptor_attribute_dtype(int(attribute)))
        cublasMp.matmul_descriptor_set_attribute(self._descriptor, int(attribute), number.ctypes.data, number.nbytes)

    def close(self) -> None:
        for matrix in self._matrices:
            cublasMp.matrix_descriptor_destroy(matrix)
        cublasMp.matmul_descriptor_destroy(self._descriptor)


def _matrix_descriptor(matrix: Layout, ld: int, dtype: str, grid: int) -> int:
    return int(cublasMp.matrix_descriptor_create(*matrix.shape, *matrix.blocks, 0, 0, ld, DATA_TYPES[dtype], grid))


def _try_to_allocate(size: int) -> None:
    """Raise if the device has not so much memory left, outside of any pool."""
    if cp.cuda.runtime.memGetInfo()[0] < size:
        # As CuPy does for its own arrays before it raises an error.
        gc.collect()
        cp.get_default_memory_pool().free_all_blocks()
    pointer = cp.cuda.runtime.malloc(size)
    cp.cuda.runtime.free(pointer)
