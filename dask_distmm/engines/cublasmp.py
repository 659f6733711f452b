"""The engine for GPUs: one cuBLASMp multiply across dask-cuda workers, or cuBLAS where one GPU does.

One participant's side of one run, which is a `ProgramJob` that takes the steps of `planning.cublasmp`::

    prepare()   tiles, D and buffers are allocated. An error here is a vote against the run
    execute()   chunks of workers that are not ranks are fetched
                the gate: all ranks go on, or none
                A's and B's tiles are filled: one kernel at home and to pack, one exchange, one kernel to unpack
                the multiply
                D's chunks are filled from the tiles in the same way

A chunk that is a rank's tile already is used as it is, and D's tile is the chunk where it is exactly one.

A `Group` is what the ranks of a plan share and keep between runs: communicator, process grids, a registered workspace,
descriptors. To make or to free one of these is collective, so all ranks do it in the same order: they see the same runs
in the same order, and each decision rests only on these.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import time
from collections.abc import Mapping
from typing import Any

import cupy as cp
import numpy as np
from nvmath.bindings import cublasMp

from dask_distmm.comms.nccl import version_of
from dask_distmm.engines.base import Side, wait_checked
from dask_distmm.engines.gpu.collective import CollectiveEngine, GroupTransport, RankGroup
from dask_distmm.engines.gpu.copy_kernels import Exchange, device_bytes
from dask_distmm.engines.gpu.gemm import (
    DATA_TYPES,
    OPS,
    PLAIN,
    FusedEpilog,
    Gemm,
    GemmShape,
    GemmTypes,
    MatrixRef,
    alpha_beta,
    check_fp8,
)
from dask_distmm.engines.gpu.host import in_type
from dask_distmm.engines.gpu.operands import check_arrays, ld
from dask_distmm.engines.gpu.products import ProductKernels, ProductMemory
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.layout import Moves, ProcessGrid
from dask_distmm.layout.rectangles import Shuffle
from dask_distmm.numeric.types import FP8, typed
from dask_distmm.planning import Plan
from dask_distmm.planning.cublasmp import CUBLASMP, Tiles, make_tiles, memory_order, moves_of, returned_type
from dask_distmm.planning.planner import SINGLE_BYTES
from dask_distmm.programs.steps import Call

# cuBLASMp through its bindings: handles, descriptors, workspace, the calls


_MOST_DESCRIPTORS = 32

_Attribute = cublasMp.MatmulDescriptorAttribute


class Group(RankGroup):
    """The communicator, grids, workspace and descriptors of a group of ranks."""

    def __init__(self, plan: Plan, rank: int, unique_id: bytes, stream: cp.cuda.Stream) -> None:
        super().__init__(plan, rank, unique_id, stream)
        self._handle = cublasMp.create(stream.ptr)
        self._grids: dict[tuple[int, int, str], int] = {}
        self._calls: collections.OrderedDict[Any, _Multiply] = collections.OrderedDict()
        self._workspace = 0
        self._plain: Any = None
        self._shared = self.comm.shares_memory
        self.one = cp.asarray(np.ones(1, np.float32))

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

    def grid(self, grid: ProcessGrid) -> int:
        """Return the library's handle of a process grid, created on first use."""
        order = grid.order if min(grid.nprow, grid.npcol) > 1 else "col"
        key = (grid.nprow, grid.npcol, order)
        if key not in self._grids:
            self._drop_workspace()  # it is registered with all grids
            layout = cublasMp.GridLayout.COL_MAJOR if order == "col" else cublasMp.GridLayout.ROW_MAJOR
            self._grids[key] = cublasMp.grid_create(grid.nprow, grid.npcol, int(layout), self.comm.handle)
        return self._grids[key]

    def _reserve(self, size: int) -> int:
        """Return a workspace of at least `size` bytes: registered where ranks share memory, else plain."""
        if size <= self.workspace_bytes:
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
            first, *rest = self._grids.values()
            self._workspace = cublasMp.malloc(first, size)
            for grid in rest:
                cublasMp.buffer_register(grid, self._workspace, size)
        else:
            self._workspace = self._plain.ptr
        self.workspace_bytes = size
        return self._workspace

    def allocate(self, size: int) -> Any:
        """Allocate plain memory if ranks share none; otherwise only test that this much is free."""
        if not self._shared:
            return cp.cuda.alloc(size)
        _try_to_allocate(size)
        return None

    def _drop_workspace(self) -> None:
        if not self.workspace_bytes:
            return
        self.stream.synchronize()
        if self._shared:
            first, *rest = self._grids.values()
            for grid in reversed(rest):
                cublasMp.buffer_deregister(grid, self._workspace)
            cublasMp.free(first, self._workspace)
        self._plain, self._workspace, self.workspace_bytes = None, 0, 0

    def trim(self, keep: int) -> None:
        """Free a workspace of more than `keep` bytes."""
        if self.workspace_bytes > keep:
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
        super().close()


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
            int(cublasMp.matrix_descriptor_create(*matrix.shape, *matrix.blocks, 0, 0, ld, DATA_TYPES[kind], grid))
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
        """Set the address of the bias of the next call."""
        if pointer:
            self._set(_Attribute.BIAS_POINTER, pointer)

    def _set(self, attribute: Any, value: int) -> None:
        number = np.array([value], cublasMp.get_matmul_descriptor_attribute_dtype(int(attribute)))
        cublasMp.matmul_descriptor_set_attribute(self._descriptor, int(attribute), number.ctypes.data, number.nbytes)

    def close(self) -> None:
        for matrix in self._matrices:
            cublasMp.matrix_descriptor_destroy(matrix)
        cublasMp.matmul_descriptor_destroy(self._descriptor)


def _try_to_allocate(size: int) -> None:
    """Raise if this much memory can't be allocated on the device, outside of any pool."""
    if cp.cuda.runtime.memGetInfo()[0] < size:
        # As CuPy does for its own arrays before it raises an error.
        gc.collect()
        cp.get_default_memory_pool().free_all_blocks()
    pointer = cp.cuda.runtime.malloc(size)
    cp.cuda.runtime.free(pointer)


# One participant's side of one run on GPUs


class TileTransport(GroupTransport):
    """The transport of tiles by NCCL, and the library's multiply: all ranks meet in both."""

    def __init__(self, engine: CublasMpEngine, job: ProgramJob) -> None:
        super().__init__(engine, job)
        self._plan: Plan = job.plan
        self._me, self._tiles, self._native = job.me, make_tiles(job.plan), CUBLASMP.native_epilog(job.plan)
        (a, b), self._stream = job.plan.problem.matrix_types, engine.stream
        # The types that the library takes and returns.
        self._kinds = GemmTypes(a, b, returned_type(job.plan).name, job.plan.problem.compute)
        # By what is copied to what; and what workers have that are not ranks: operand, rectangles, destinations.
        self._exchanges: dict[Any, Exchange] = {}
        self._outside: list[tuple[str, Moves, Mapping[int, Any]]] = []
        self._mark, self._ended = job.kernels.mark, job.ended

    def offer(self, job: ProgramJob) -> None:
        """Allocate the buffers of all redistributions. Nothing is offered: no rank reads another one's memory."""
        if self._plan.problem.fp8:
            check_fp8()
        self._kinds.compute_type  # noqa: B018 - the library must have it
        for step in job.steps:
            if isinstance(step, Call) and step.kernel == "redistribute":
                copies = step.options["copies"]
                self._exchanges[copies] = Exchange(*(self._shuffle(job, step, *kinds) for kinds in copies))

    def _shuffle(self, job: ProgramJob, call: Call, source: str, target: str) -> Shuffle:
        assert job.rank is not None
        reads, plan = call.options["reads"], self._plan
        src = {x.number: job.at(x) for x in call.arguments[:reads] if x.role == source}
        dst = {x.number: job.at(x) for x in call.arguments[reads:] if x.role == target}
        # Chunks of workers that are not ranks come over Dask's comms.
        moves, outside = moves_of(plan, job.rank, source, target).among(plan.ranks, self._me)
        if len(outside):
            self._outside.append((source.removeprefix("of-"), outside, dst))
        single = SINGLE_BYTES if source == target else None
        order = memory_order(plan, target)
        return Shuffle(moves, self._me, plan.ranks, src, dst, order, device_bytes, single=single)

    def begin(self, job: ProgramJob) -> None:
        """Fetch what workers have that are not ranks, and enter what is collective."""
        began = time.perf_counter()
        for operand in self._outside:
            self._fill(*operand)
        self.enter(job, Group)
        # From now on no rank leaves before the others.
        job.ended.collective = True
        job.timings["gate"] = time.perf_counter() - began
        self._mark("redistribute")

    def _fill(self, name: str, moves: Moves, targets: Mapping[int, Any]) -> None:
        type_name, number = self._plan.problem[name].dtype, self._plan.problem.operands.index(name)
        for peer in np.unique(moves.src_owner).tolist():
            leg = moves.take(moves.src_owner == peer)
            edges = leg.src_row, leg.src_row + leg.nrows, leg.src_col, leg.src_col + leg.ncols
            boxes = np.column_stack([np.full(len(leg), number), leg.src, *edges])
            answer = wait_checked(self._comm.fetch(peer, "input", boxes), self._check)
            places = zip(leg.dst.tolist(), leg.dst_row.tolist(), leg.dst_col.tolist(), answer, strict=True)
            for index, row, col, data in places:
                with self._stream:
                    target, part = targets[index], cp.asarray(data.view(np.uint8) if type_name in FP8 else data)
                    part = in_type(typed(part, type_name), type_name, target.dtype)
                    target[row : row + part.shape[0], col : col + part.shape[1]] = part

    # The steps in which all ranks meet

    def redistribute(self, *arrays: Any, reads: int, copies: tuple[tuple[str, str], ...]) -> None:
        """Copy what all ranks have to what they are to have."""
        if len({*copies[0]}) == 1:
            self._mark("replicate")
        exchange = self._exchanges[copies]
        exchange.run(self._stream, None if self.group is None else self.group.comm)
        self.pulled_bytes += exchange.received_bytes

    def multiply_tiles(self, *arrays: Any, reads: int, flops: float) -> None:
        """Multiply: each rank has a tile of A, of B and of D, and its part of a bias that the library adds."""
        *bias, a, b, d = arrays
        tiles, types = self._tiles, self._kinds
        shape = (tiles.a.shape[0], tiles.b.shape[1], tiles.a.shape[1])
        memories = [MatrixRef(x.data.ptr, ld(x, tile.order)) for x, tile in ((a, tiles.a), (b, tiles.b), (d, tiles.d))]
        native = PLAIN
        if self._native is not None:
            alpha = complex(*self._plan.problem.formula.alpha)
            native = FusedEpilog(alpha, self._native, int(bias[0].data.ptr) if bias else 0)
        self._mark("multiply")
        if self.group is None:
            Gemm(GemmShape(*shape, tiles.flipped, tiles.ops), types, *memories).run(self._stream)
        else:
            self.group.multiply(tiles, shape, types, *memories, native=native)
        self._mark("deliver")

    # The end

    def complete(self) -> None:
        """Wait for what is queued."""
        self._ended.wait(self._mark(""))

    def look(self, job: ProgramJob) -> None:
        """Raise if the run was aborted meanwhile; note the memory that was held."""
        job.ended.collective = False
        self._check()
        job.memory.note(*itertools.chain(*(exchange.buffers for exchange in self._exchanges.values())))
        if self.group is not None:
            job.held_bytes += self.group.workspace_bytes
            self.group.trim(self._plan.problem.options.keep_workspace_bytes)
            job.kept_bytes = self.group.workspace_bytes


class CublasMpEngine(CollectiveEngine):
    """Multiplies on GPUs with cuBLASMp, one GPU a worker process."""

    name, least = "cublasmp", {"cuBLASMp": (0, 10, 0)}

    def _libraries(self) -> Mapping[str, tuple[int, ...]]:
        return {"cuBLASMp": version_of(int(cublasMp.get_version()))}

    def job(self, side: Side[Any]) -> ProgramJob:
        """Return a participant's job of a run."""
        check_arrays(self.name, side.chunks)
        kernels = ProductKernels(side.plan.problem, self.stream, functools.partial(memory_order, side.plan))
        transport = functools.partial(TileTransport, self) if side.me in side.plan.ranks else None
        return ProgramJob(side, kernels, ProductMemory(side, kernels, self.downloads), transport)


ENGINE = CublasMpEngine()
