"""The engine for GPUs: one cuBLASMp multiply across dask-cuda workers, or cuBLAS where one GPU does.

One participant's side of one run::

    prepare()   tiles, D and buffers are allocated. An error here is a vote against the run
    execute()   chunks of workers that are not ranks are fetched
                the gate: all ranks go on, or none
                A's and B's tiles are made: one kernel at home and to pack, one exchange, one kernel to unpack
                the multiply
                D's chunks are made from the tiles in the same way

A chunk that is a rank's tile already is used as it is, and D's tile is the chunk where it is exactly one.

A `Group` is what the ranks of a plan share and keep between runs: communicator, process grids, a registered workspace,
descriptors. To make or to free one of these is collective, so all ranks do it in the same order: they see the same runs
in the same order, and each decision rests only on these.
"""

from __future__ import annotations

import collections
import gc
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from nvmath.bindings import cublasMp

from dask_distmm.comms.base import Boxes
from dask_distmm.comms.nccl import version_of
from dask_distmm.engines.base import (
    REPLICA,
    Job,
    ResultKey,
    Side,
    contiguous,
    is_of_d,
    wait_checked,
)
from dask_distmm.engines.entry import CollectiveEntry
from dask_distmm.engines.gpu.collective import CollectiveEngine, RankGroup
from dask_distmm.engines.gpu.copy_kernels import Exchange, device_bytes
from dask_distmm.engines.gpu.finishing import BiasCut, Finishing, NativeBias
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
from dask_distmm.engines.gpu.host import in_type, to_host
from dask_distmm.engines.gpu.operands import DeviceChunks, check_arrays, ld, mark, usable
from dask_distmm.layout import Layout, Moves, ProcessGrid, redistribution
from dask_distmm.layout.rectangles import Shuffle
from dask_distmm.numeric.types import FP8, carried, typed
from dask_distmm.planning import Plan
from dask_distmm.planning.cublasmp import CUBLASMP, Tiles, make_tiles, own_kernel, returned_type, tile_chunk
from dask_distmm.planning.cuts import shape_of
from dask_distmm.planning.placement import EVERYWHERE
from dask_distmm.planning.planner import SINGLE_BYTES

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


# The tiles of A, B and D on one rank, and how chunks become tiles and tiles become chunks


class Filled(NamedTuple):
    """Matrices of this rank that are filled from other matrices: tiles, chunks of D, parts of the formula's inputs."""

    # By number.
    arrays: Mapping[int, Any]
    # Fills them from what ranks have; None if they are there.
    shuffle: Shuffle | None
    # The rectangles that must be fetched from workers that are not ranks.
    outside: Moves | None = None


# One participant's side of one run on GPUs


# Seconds between two looks at an event.
_LOOK = 2e-5


class CublasMpJob(Job[Plan]):
    """One participant's side of one run; see the text of the module."""

    def __init__(self, side: Side[Plan], engine: CublasMpEngine) -> None:
        super().__init__(side)
        plan = self.plan
        self._tiles = make_tiles(plan)
        self._native = CUBLASMP.native_epilog(plan)
        # The engine applies its part of the formula to sums that are not rounded yet.
        self.sum_type = returned_type(plan)
        # The types that the library takes and returns.
        self.kinds = GemmTypes(*plan.problem.matrix_types, self.sum_type.name, plan.problem.compute)
        self._engine, self._ready, self._stream = engine, side.ready, engine.stream
        self._entry = CollectiveEntry(plan, self.rank, self.comm, self.ended)

    # Before the vote

    def prepare(self) -> None:
        """Allocate tiles, chunks of D and buffers, on the default stream, because its users will free them."""
        for event in self._ready:
            cp.cuda.Stream.null.wait_event(event)
        if self.rank is None:
            return
        problem = self.plan.problem
        if problem.fp8:
            check_fp8()
        self.kinds.compute_type  # noqa: B018 - the library must have it
        self._on_device = DeviceChunks(problem, self.chunks)
        self.chunks = self._on_device.arrays
        types = {"a": carried(self.kinds.a, "cupy"), "b": carried(self.kinds.b, "cupy")}
        self._filled = {name: self._operand(name, dtype) for name, dtype in types.items()}
        self._target, self._result = self._result_of_tile()
        self._finishing: Finishing | NativeBias | None = None
        if self._native is not None and "bias" in problem.formula.inputs:
            self._finishing = NativeBias(self.plan, self.me, self.rank, self.chunks, self._cut_of_bias())
        elif own_kernel(self.plan):
            self._finishing = Finishing(self.plan, self.me, self.rank, self.chunks, self._tiles.d.order)
        for x in self._finishing.inputs if self._finishing is not None else ():
            among, outside = x.moves.among(self.plan.ranks, self.me)
            self._filled[x.name] = Filled(x.parts, self._shuffle(among, x.arrays, x.parts, "C"), outside)
        self._replicas = Filled({}, None)
        if "d" in self.plan.kept and len(self.plan.ranks) > 1 and not CUBLASMP.all_reduced(self.plan):
            owned = self._finishing.d if isinstance(self._finishing, Finishing) else self._result.arrays
            own = {index: owned[index] for index in self.plan.owned(self.rank).tolist()}
            self._replicas = self._replicas_of(own)

        def exchange(*filled: Filled) -> Exchange:
            return Exchange(*(x.shuffle for x in filled if x.shuffle is not None))

        a, b, *inputs = self._filled.values()
        # Inputs of the formula apart: one may not be aligned well, and what one launch copies is all in the same units.
        self._gather = [exchange(a, b), *map(exchange, inputs)]
        self._deliver, self._replicate = exchange(self._result), exchange(self._replicas)
        self._allocated = cp.cuda.Event(disable_timing=True)
        self._allocated.record(cp.cuda.Stream.null)

    def _shuffle(
        self, moves: Moves, src: Mapping[int, Any], dst: Mapping[int, Any], order: str, **options: Any
    ) -> Shuffle:
        return Shuffle(moves, self.me, self.plan.ranks, src, dst, order, device_bytes, **options)

    def _operand(self, name: str, dtype: np.dtype) -> Filled:
        """Use a chunk as the tile of A or B in place, or allocate a tile and find the rectangles that fill it."""
        assert self.rank is not None
        plan, tile = self.plan, self._tiles.a if name == "a" else self._tiles.b
        sizes, where = plan.problem[name].chunks, plan.where[name]
        arrays = {index: chunk for (op, index), chunk in self.chunks.items() if op == name}
        index = tile_chunk(tile, self.rank, sizes)
        # All ranks see the same plan, but only this rank sees the strides and the address of its chunk.
        in_place = index is not None and where[index] in (self.me, EVERYWHERE) and usable(arrays[index], tile.order)
        if index is not None and in_place:
            target = arrays[index]
        else:
            target = (cp.zeros if tile.zeroed else cp.empty)(tile.local(self.rank), dtype, order=tile.order)
        moves = Moves.of(redistribution(Layout.of_chunks(sizes), tile.layout), where, plan.ranks)
        # Chunks of workers that are not ranks come over Dask's comms.
        among, outside = moves.among(plan.ranks, self.me)
        held = {self.rank: target}
        return Filled(held, self._shuffle(among, arrays, held, tile.order, skip_home=in_place), outside)

    def _result_of_tile(self) -> tuple[Any, Filled]:
        """Allocate the tile of D that the library writes, and the rank's chunks of D that are not the tile itself."""
        assert self.rank is not None
        plan, tiles, tile, sizes = self.plan, self._tiles, self._tiles.d, self.plan.problem.d.chunks
        owned = plan.owned(self.rank).tolist()
        if tiles.replicated:
            if "d" in plan.kept and CUBLASMP.all_reduced(plan):
                owned = list(range(len(plan.owners)))
            # All of D is here.
            whole = Layout.of_chunks(((plan.problem.m,), (plan.problem.n,)))
            moves = Moves.to_each(redistribution(whole, Layout.of_chunks(sizes)), [self.me], {self.me: owned})
        else:
            copies = redistribution(tile.layout, Layout.of_chunks(sizes))
            moves = Moves.of(copies, plan.ranks, np.asarray(plan.ranks)[plan.owners])
        target = cp.empty(tile.local(self.rank), self.sum_type, order=tile.order)
        index = None if tiles.replicated else tile_chunk(tile, self.rank, sizes)
        if index is not None and owned == [index]:
            return target, Filled({index: target}, None)
        rects = {i: plan.chunk_rect(i) for i in owned}
        chunks = {i: cp.empty(shape_of(r), self.sum_type, order=tile.order) for i, r in rects.items()}
        source = {0 if tiles.replicated else self.rank: target}
        return target, Filled(chunks, self._shuffle(moves, source, chunks, tile.order))

    def _replicas_of(self, own: Mapping[int, Any]) -> Filled:
        """Allocate the finished chunks of D that this rank lacks: they come from the ranks that own them."""
        plan, order = self.plan, self._tiles.d.order
        layout, dtype = Layout.of_chunks(plan.problem.d.chunks), carried(plan.problem.d.dtype, "cupy")
        every = range(layout.grid.size)
        chunks = {index: cp.empty(layout.local_shape(index), dtype, order=order) for index in every if index not in own}
        copies, owner = redistribution(layout, layout), np.asarray(plan.ranks)[plan.owners]
        moves = Moves.to_each(copies, owner, dict.fromkeys(plan.ranks, every))
        return Filled(chunks, self._shuffle(moves, own, chunks, order, skip_home=True, single=SINGLE_BYTES))

    def _cut_of_bias(self) -> BiasCut:
        """Return the cut of a bias for each row of the tile of D, or for each column if the tile is in C order."""
        assert self.rank is not None
        tile, ranks = self._tiles.d, range(len(self.plan.ranks))
        axis, grid = (0 if tile.order == "F" else 1), tile.layout.grid
        lengths = tuple(tile.layout.local_shape(r)[axis] for r in ranks)
        is_cut = (grid.nprow, grid.npcol)[axis] > 1
        sizes, parts = (lengths, list(ranks)) if is_cut else (lengths[:1], [0 for _ in ranks])
        return BiasCut(axis, sizes, parts, tile.local(self.rank)[axis])

    @property
    def received_bytes(self) -> int:
        """Bytes of matrices received from other participants, without those that cuBLASMp moves."""
        if self.rank is None:
            return 0
        return self.comm.received_bytes + sum(exchange.received_bytes for exchange in self._exchanges)

    @property
    def _exchanges(self) -> list[Exchange]:
        return [*self._gather, self._deliver, self._replicate]

    # The work

    def execute(self) -> dict[Any, Any]:
        """Multiply; return this rank's chunks of D and of auxiliary outputs."""
        if self.rank is None:
            return {}
        started = time.perf_counter()
        try:
            for number, (name, matrix) in enumerate(self._filled.items()):
                if matrix.outside is not None:
                    self._fetch_outside(number, self.plan.problem[name].dtype, matrix.outside, matrix.arrays)
            self._entry.enter(lambda: self._engine.new_id(self.plan.group))
            self.timings["gate"] = time.perf_counter() - started
            return self._work()
        finally:
            self._entry.leave()
            self.timings["total"] = time.perf_counter() - started

    def _work(self) -> dict[Any, Any]:
        assert self.rank is not None
        stream, plan = self._stream, self.plan
        group = self._group() if len(plan.ranks) > 1 else None
        marks = [mark(stream)]
        stream.wait_event(self._allocated)
        self._on_device.fill(stream)
        comm = group.comm if group is not None else None
        for exchange in self._gather:
            exchange.run(stream, comm)
        a, b, d = self._filled["a"].arrays[self.rank], self._filled["b"].arrays[self.rank], self._target
        for operand, tile in ((a, self._tiles.a), (b, self._tiles.b)):
            if tile.conjugated:
                with stream:
                    cp.conjugate(operand, out=operand)
        marks.append(mark(stream))
        tiles, types = self._tiles, self.kinds
        shape = (tiles.a.shape[0], tiles.b.shape[1], tiles.a.shape[1])
        memories = [MatrixRef(x.data.ptr, ld(x, tile.order)) for x, tile in ((a, tiles.a), (b, tiles.b), (d, tiles.d))]
        native = PLAIN
        if self._native is not None:
            bias = 0
            if isinstance(self._finishing, NativeBias):
                self._finishing.convert(stream)
                bias = int(self._finishing.vector.data.ptr)
            native = FusedEpilog(complex(*plan.problem.formula.alpha), self._native, bias)
        if group is None:
            Gemm(GemmShape(*shape, tiles.flipped, tiles.ops), types, *memories).run(stream)
        else:
            group.multiply(tiles, shape, types, *memories, native=native)
        marks.append(mark(stream))
        self.held_bytes = self._count() + (group.workspace_bytes if group is not None else 0)
        self._deliver.run(stream, comm)
        owned = plan.owned(self.rank).tolist()
        outputs = _named(self._result.arrays, owned)
        if isinstance(self._finishing, Finishing):
            outputs = self._finishing.apply(self._result.arrays, stream)
        marks.append(mark(stream))
        self._replicate.run(stream, comm)
        outputs |= _named(self._replicas.arrays, owned)
        marks.append(mark(stream))
        self._wait(marks[-1])
        parts = ("redistribute", "multiply", "deliver", "replicate")
        for name, first, last in zip(parts, marks[:-1], marks[1:], strict=True):
            self.timings[name] = cp.cuda.get_elapsed_time(first, last) / 1e3
        if group is not None:
            group.trim(plan.problem.options.keep_workspace_bytes)
            self.kept_bytes = group.workspace_bytes
        self.progress(1.0)
        if plan.problem.array == "numpy":
            return {
                key: typed(to_host(chunk, stream), plan.problem.d.dtype if is_of_d(key) else "")
                for key, chunk in outputs.items()
            }
        return outputs

    def _count(self) -> int:
        """Return the bytes of all device memory that this rank holds for the run."""
        arrays = [*self._on_device.all_arrays, self._target]
        arrays += [buffer for exchange in self._exchanges for buffer in exchange.buffers]
        arrays += [
            x for filled in (*self._filled.values(), self._result, self._replicas) for x in filled.arrays.values()
        ]
        arrays += self._finishing.arrays if self._finishing is not None else []
        return sum({int(x.data.ptr): int(x.nbytes) for x in arrays}.values())

    def _wait(self, event: cp.cuda.Event) -> None:
        """Wait without the GIL; an aborted run still gets its grace time."""
        while not event.done:
            time.sleep(_LOOK)
        self.ended.check()

    def _group(self) -> Group:
        """Return the ranks' group."""
        assert self.rank is not None
        arguments = self.plan, self.rank, self._entry.unique_id, self._stream
        return self._engine.group(self.plan.group, lambda: Group(*arguments))

    def _fetch_outside(self, number: int, type_name: str, moves: Moves, targets: Mapping[int, Any]) -> None:
        """Fetch the rectangles that workers hold which are not ranks, and copy them to their destinations."""
        for peer in np.unique(moves.src_owner).tolist():
            leg = moves.take(moves.src_owner == peer)
            boxes = np.empty((len(leg), 6), np.int64)
            boxes[:, 0], boxes[:, 1] = number, leg.src
            boxes[:, 2], boxes[:, 3] = leg.src_row, leg.src_row + leg.nrows
            boxes[:, 4], boxes[:, 5] = leg.src_col, leg.src_col + leg.ncols
            answer = self.comm.fetch(peer, "input", boxes)
            for i, data in enumerate(wait_checked(answer, self.ended.check)):
                r, c = int(leg.dst_row[i]), int(leg.dst_col[i])
                data = data.view(np.uint8) if type_name in FP8 else data  # noqa: PLW2901
                target, part = targets[int(leg.dst[i])], typed(cp.asarray(data), type_name)
                part = in_type(part, type_name, target.dtype)
                target[r : r + part.shape[0], c : c + part.shape[1]] = part
        if len(moves):
            # These copies are on the default stream; the run's stream waits for them.
            self._allocated.record(cp.cuda.Stream.null)

    # Messages between participants

    def available(self, kind: str, boxes: Boxes) -> Future[None]:
        """Return the future that says when `serve` can answer."""
        return self._entry.entered(int(boxes[0, 0])) if kind == "enter" else self._inputs

    def serve(self, kind: str, boxes: Boxes) -> list[Any]:
        """Return boxes of the chunks that are here, or the id under which the ranks make their communicator."""
        if kind == "enter":
            return list(self._entry.answer())
        answer = contiguous(super().serve(kind, boxes))
        cp.cuda.Stream.null.synchronize()
        return answer

    # The end

    def abort(self, error: BaseException) -> None:
        """End with `error`: at once before the gate; else when the library returns, or else with the process."""
        self._entry.abort(error)


def _named(chunks: Mapping[int, Any], owned: Collection[int]) -> dict[ResultKey, Any]:
    """Return chunks of D as `Job.execute` has them: those that this rank does not own are replicas."""
    return {("" if number in owned else REPLICA, number): array for number, array in chunks.items()}


class CublasMpEngine(CollectiveEngine):
    """Multiplies on GPUs with cuBLASMp, one GPU a worker process."""

    name, least = "cublasmp", {"cuBLASMp": (0, 10, 0)}

    def _libraries(self) -> Mapping[str, tuple[int, ...]]:
        return {"cuBLASMp": version_of(int(cublasMp.get_version()))}

    def job(self, side: Side[Any]) -> CublasMpJob:
        """Return a participant's job of a run."""
        check_arrays(self.name, side.chunks)
        return CublasMpJob(side, self)


ENGINE = CublasMpEngine()
