"""GPU libraries in this process' own memory: enough of CuPy, NCCL, cuBLASMp and cuBLAS to run the real GPU engine.

Ranks are threads, device memory is host memory, streams do everything at once. Kernels are read off their tables,
messages are copies, and a multiply puts the matrices together from all ranks' tiles by their descriptors, multiplies,
and takes the result apart. So what is tested is all of the engine but CUDA: addresses, strides, layouts, op(), padding,
messages, order of collective calls. Speed, types of the hardware and what hangs are for the tests on GPUs.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import itertools
import os
import pickle
import sys
import threading
import time
import types
from collections import Counter, defaultdict
from queue import Empty, Queue

import compiled
import ml_dtypes
import numpy as np
import shared
import solvers

_TIMEOUT = 120
# Modules that import the libraries, or those that do.
_ENGINES = ("cublasmp", "gpu", "nccl", "peer")
OVER_LIBRARIES = ("dask_distmm.comms.nccl", *(f"dask_distmm.engines.{name}" for name in _ENGINES))
_SIZES = {"unsigned char": 1, "unsigned short": 2, "unsigned int": 4, "unsigned long long": 8, "uint4": 16}
EPILOGUES = {"ALLREDUCE": 1, "RELU": 2, "GELU": 3, "BIAS": 4, "RELU_BIAS": 5, "GELU_BIAS": 6}
LT_EPILOGUES = {"RELU": 2, "GELU": 32, "BIAS": 4, "RELU_BIAS": 6, "GELU_BIAS": 36}
DATA_TYPES = {0: "f4", 1: "f8", 2: "f2", 4: "c8", 5: "c16", 14: ml_dtypes.bfloat16}
DATA_TYPES |= {28: ml_dtypes.float8_e4m3fn, 29: ml_dtypes.float8_e5m2}


class Pointer:
    def __init__(self, ptr):
        self.ptr = ptr


# Where arrays are allocated if processes share device memory (see `shared`).
_shared = None


class ndarray(np.ndarray):  # noqa: N801 - as CuPy's
    __module__ = "cupy"

    def __new__(cls, shape, dtype=float, memptr=None, strides=None, order="C"):
        if strides is None:
            return _shared.array(cls, shape, dtype, order, memptr.block)
        interface = {"data": (memptr.address, False), "shape": shape, "strides": strides, "version": 3}
        mapped = types.SimpleNamespace(__array_interface__={"typestr": np.dtype(dtype).str, **interface})
        # An interface has no name for the types of ml_dtypes.
        return np.asarray(mapped).view(cls).view(dtype)

    @property
    def data(self):
        return Pointer(self.__array_interface__["data"][0])

    def get(self, stream=None, order="C"):
        if stream is not None:
            stream.synchronize()
        return np.array(self.view(np.ndarray), copy=True, order="K")

    def set(self, values, stream=None):
        self[...] = values

    def copy(self, order="C"):
        # CuPy would copy it in a context on the other device.
        assert not (_shared and _shared.is_mapped(self.data.ptr)), "copy() of another process' memory"
        return super().copy(order)


ndarray.__module__ = "cupy"


def empty(shape, dtype=float, order="C"):
    # Poisoned: what nobody writes is found.
    if _shared is not None:
        return _shared.array(ndarray, shape, dtype, order)
    made = np.empty(shape, dtype, order=order)
    ctypes.memset(made.__array_interface__["data"][0], 0xFF, made.nbytes)
    return made.view(ndarray)


def zeros(shape, dtype=float, order="C"):
    if _shared is not None:
        made = empty(shape, dtype, order)
        made[...] = 0
        return made
    return np.zeros(shape, dtype, order=order).view(ndarray)


class Stream:
    ptr, done = 7, True

    def __init__(self, non_blocking=False, priority=0):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass


Stream.null = Stream()


class Event:
    done = True

    def __init__(self, disable_timing=False):
        pass

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


class RawKernel:
    """Does what the two kernels of the engine do, from the same arguments."""

    def __init__(self, code, name):
        self.name = name
        self.size = next(size for text, size in _SIZES.items() if f"typedef {text} T" in code)

    def __call__(self, grid, block, arguments):
        table, first, count = arguments
        rows = np.asarray(table).reshape(-1, 7)[:count].tolist()
        assert grid == (int(first[count]),)
        for row in rows:
            if self.name == "copy_straight":
                src, dst, inner, outer, src_outer, dst_outer, _ = row
                src_inner = self.size
            else:
                src, dst, inner, outer, src_inner, src_outer, dst_outer = row
            target = self._at(dst, (outer, inner), (dst_outer, self.size))
            target[...] = self._at(src, (outer, inner), (src_outer, src_inner))

    def _at(self, pointer, shape, strides):
        interface = {"data": (pointer, False), "shape": shape, "strides": strides, "typestr": f"|V{self.size}"}
        return np.asarray(types.SimpleNamespace(__array_interface__={"version": 3, **interface}))


def _scalar(pointer, dtype):
    """alpha, in the type that is summed in."""
    kind = np.dtype("f4") if dtype.itemsize <= 2 else dtype
    return np.frombuffer(ctypes.string_at(pointer, kind.itemsize), kind)[0]


def _epilog(attributes, x, matrix):
    """Apply the epilog of the library's tuned paths to a rank's rows and columns of the product."""
    name = next((name for name, value in EPILOGUES.items() if value == attributes.get("EPILOGUE")), "")
    assert not name or 1 in (matrix.grid.nprow, matrix.grid.npcol), "SUMMA has no epilogs"
    return _apply(name, attributes, x, matrix.dtype, matrix.local()[0])


def _activated(attributes, x, dtype, rows):
    """Apply the epilog of cuBLASLt."""
    name = next((name for name, value in LT_EPILOGUES.items() if value == attributes["EPILOGUE"]), "")
    assert name or attributes["EPILOGUE"] == 1
    return _apply(name, attributes, x, dtype, rows)


def _apply(name, attributes, x, dtype, rows):
    if name.endswith("BIAS"):
        bias = np.frombuffer(ctypes.string_at(attributes["BIAS_POINTER"], rows * dtype.itemsize), dtype)
        x = x + bias.astype(x.dtype)[:, None]
    if name.startswith("RELU"):
        return np.maximum(x, 0)
    if name.startswith("GELU"):
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x


def taken(queue):
    """Return what another rank puts into a queue; where none comes, the stacks of all say why."""
    try:
        return queue.get(timeout=_TIMEOUT)
    except Empty:
        faulthandler.dump_traceback()
        raise


class Hub:
    """Where the ranks of one communicator meet."""

    def __init__(self, nranks):
        self.nranks = nranks
        self.barrier = threading.Barrier(nranks, timeout=_TIMEOUT)
        self.boxes = {pair: Queue() for pair in itertools.product(range(nranks), repeat=2)}
        self.shared = {}

    def meet(self):
        self.barrier.wait()

    def send(self, rank, peer, data):
        self.boxes[rank, peer].put(data)

    def receive(self, peer, rank):
        return taken(self.boxes[peer, rank])

    def together(self, rank, value, work):
        """Let rank 0 do `work` with what all ranks have brought; return what it returned to all."""
        self.shared[rank] = value
        self.barrier.wait()
        if rank == 0:
            self.shared["result"] = work([self.shared[r] for r in range(self.nranks)])
        self.barrier.wait()
        result = self.shared["result"]
        self.barrier.wait()
        return result


class FileHub:
    """A hub of ranks in processes of their own: what they bring is in files of a folder."""

    def __init__(self, folder, unique_id, nranks):
        self.path, self.nranks, self.counts = os.path.join(folder, bytes(unique_id).strip().hex()), nranks, Counter()

    def _put(self, name, data):
        with open(f"{self.path}-{name}.part", "wb") as file:
            file.write(data)
        os.replace(f"{self.path}-{name}.part", f"{self.path}-{name}")

    def _take(self, name):
        end = time.monotonic() + _TIMEOUT
        while not os.path.exists(f"{self.path}-{name}"):
            assert time.monotonic() < end, f"nobody brings {name}"
            time.sleep(1e-3)
        with open(f"{self.path}-{name}", "rb") as file:
            return file.read()

    def _next(self, name):
        self.counts[name] += 1
        return f"{name}.{self.counts[name]}"

    def meet(self):
        self.together(self.rank, None, list)

    def send(self, rank, peer, data):
        self._put(self._next(f"{rank}-{peer}"), data)

    def receive(self, peer, rank):
        return self._take(self._next(f"{peer}-{rank}"))

    def together(self, rank, value, work):
        name = self._next("all")
        self._put(f"{name}-{rank}", pickle.dumps(value))
        return work([pickle.loads(self._take(f"{name}-{r}")) for r in range(self.nranks)])


class World:
    """All that is shared: hubs by unique id, handles, and a record of the library's calls."""

    def __init__(self):
        self.hubs, self.lock = {}, threading.Lock()
        # Where ranks in processes of their own meet.
        self.folder = None
        self.handles, self.numbers = {}, itertools.count(1)
        self.calls, self.epilogs, self.computed = [], [], []
        self.compute_capability = "90"
        self.devices, self.reached = ["0000:01:00.0"], []
        self.open = defaultdict(int)
        # Whether cuBLASLt knows how to multiply anything.
        self.has_algorithms = True

    def keep(self, kind, thing):
        with self.lock:
            number = next(self.numbers)
            self.handles[number] = thing
            self.open[kind] += 1
        return number

    def drop(self, kind, number):
        with self.lock:
            del self.handles[number]
            self.open[kind] -= 1


class PlainMemory:
    """An allocation past the pools."""

    def __init__(self, size):
        self.block = _shared.allocate(size, exportable=True, alone=True)


class UnownedMemory:
    """Memory that somebody else has allocated."""

    block = None

    def __init__(self, address, size, owner):
        self.address = address


class MemoryPointer:
    def __init__(self, mem, offset):
        self.block, self.address = mem.block, getattr(mem, "address", 0) + offset


class MemoryPool:
    """A pool that keeps nothing: each array has its own allocation."""

    def __init__(self, allocator):
        self.malloc = allocator

    def free_bytes(self):
        return 0

    def free_all_blocks(self):
        pass


def _lazy(memory):
    """Streams whose operations are done later, for each process its own."""
    together = defaultdict(list)

    class Bound(shared.Stream):
        def __init__(self, non_blocking=False, priority=0):
            super().__init__(together[memory.process])

    Bound.null = shared.Stream([], immediate=True)
    return Bound, shared.Event


def _copy_2d(dst, dst_pitch, src, src_pitch, width, height):
    assert dst_pitch >= width
    assert src_pitch >= width
    for row in range(height):
        ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)


def install(monkeypatch, shares_memory=True, memory=None):
    """Put the stand-ins in place of the libraries; return the `World`. The engine is imported afterwards.

    With a `shared.Memory` arrays lie there, and streams are lazy.
    """
    world = World()
    world.memory = memory
    monkeypatch.setattr(sys.modules[__name__], "_shared", memory)
    stream_type, event_type = (Stream, Event) if memory is None else _lazy(memory)
    local = threading.local()

    def module(name, **contents):
        made = types.ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    class OutOfMemoryError(Exception):
        pass

    class CUDARuntimeError(RuntimeError):
        pass

    runtime = types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: len(world.devices),
        memGetInfo=lambda: (2**36, 2**37),
        runtimeGetVersion=lambda: 13000,
        malloc=lambda size: 1,
        free=lambda pointer: None,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
        memcpyDefault=4,
        memcpyAsync=lambda dst, src, size, kind, stream: shared.on_stream(
            stream, lambda: ctypes.memmove(dst, src, size)
        ),
        memcpy2DAsync=lambda dst, dst_pitch, src, src_pitch, width, height, kind, stream: shared.on_stream(
            stream, lambda: _copy_2d(dst, dst_pitch, src, src_pitch, width, height)
        ),
        memsetAsync=lambda pointer, value, size, stream: shared.on_stream(
            stream, lambda: ctypes.memset(pointer, value, size)
        ),
        getDevice=lambda: 0,
        getDeviceProperties=lambda number: {"name": b"stand-in"},
        deviceGetPCIBusId=lambda number: world.devices[number],
        deviceCanAccessPeer=lambda mine, other: int(world.devices[other] in world.reached),
        **(memory.runtime(CUDARuntimeError) if memory is not None else {}),
    )
    cuda = types.SimpleNamespace(
        Stream=stream_type,
        Event=event_type,
        MemoryPool=MemoryPool,
        Memory=PlainMemory,
        MemoryPointer=MemoryPointer,
        UnownedMemory=UnownedMemory,
        runtime=runtime,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        get_elapsed_time=lambda first, last: 0.5,
        get_current_stream=lambda: shared.current_stream(stream_type.null),
        Device=lambda number=0: types.SimpleNamespace(
            compute_capability=world.compute_capability,
            use=lambda: memory is None or memory.make_current(),
            attributes={"MultiProcessorCount": 1},
        ),
        alloc=lambda size: Pointer(np.empty(size, np.uint8).__array_interface__["data"][0]),
    )
    module(
        "cupy",
        cuda=cuda,
        ndarray=ndarray,
        empty=empty,
        zeros=zeros,
        uint8=np.uint8,
        asarray=lambda x, dtype=None: np.array(x, dtype, copy=True, order="K").view(ndarray),
        array=lambda x, dtype=None, order="K": np.array(x, dtype, order=order).view(ndarray),
        RawKernel=RawKernel,
        RawModule=compiled.RawModule,
        fuse=lambda: lambda function: function,
        __getattr__=lambda name: getattr(np, name),
        get_default_memory_pool=lambda: types.SimpleNamespace(free_all_blocks=lambda: None),
    )
    module("cupyx", empty_pinned=lambda size, dtype: np.empty(size, dtype))

    # NCCL

    class UniqueId(bytes):
        from_bytes = staticmethod(bytes)

    class Communicator:
        device_api_support = shares_memory

        def __init__(self, nranks, rank, unique_id):
            with world.lock:
                apart = world.folder and FileHub(world.folder, unique_id, nranks)
                hub = apart or world.hubs.setdefault(unique_id, Hub(nranks))
            self.hub, self.rank, self.nranks = hub, rank, nranks
            if apart:
                hub.rank = rank
            self.n_lsa_teams = 1 if shares_memory else nranks
            self.ptr = world.keep("communicator", self)
            hub.meet()

        init = classmethod(lambda cls, nranks, rank, unique_id: cls(nranks, rank, unique_id))

        def destroy(self):
            self.hub.meet()
            world.drop("communicator", self.ptr)

    def get_unique_id():
        return UniqueId(f"id {os.getpid()} {next(world.numbers)}".encode().ljust(128))

    def group_start():
        local.sends, local.receives = [], []

    def group_end():
        # What ranks send is there when they meet; what they receive may come later.
        for stream in {s for *_, s in (*local.sends, *local.receives)}:
            shared.settle(stream)
        for pointer, size, peer, comm, _ in local.sends:
            comm.hub.send(comm.rank, peer, ctypes.string_at(pointer, size))
        for pointer, size, peer, comm, stream in local.receives:
            sent = comm.hub.receive(peer, comm.rank)
            assert len(sent) == size, f"{len(sent)} bytes were sent, {size} are expected"
            shared.on_stream(stream, functools.partial(ctypes.memmove, pointer, sent, size))

    def all_gather(src, dst, size, kind, handle, stream):
        shared.settle(stream)
        comm = world.handles[handle]
        values = ctypes.string_at(src, size)
        everything = comm.hub.together(comm.rank, values, b"".join)
        ctypes.memmove(dst, everything, len(everything))

    def broadcast(src, dst, size, kind, root, handle, stream):
        comm = world.handles[handle]
        values = ctypes.string_at(src, size) if comm.rank == root else b""
        sent = comm.hub.together(comm.rank, (root, size, values), list)
        assert {one[:2] for one in sent} == {(root, size)}, "ranks meet for different broadcasts"
        ctypes.memmove(dst, sent[root][2], size)

    nccl_bindings = types.SimpleNamespace(
        get_version=lambda: 23007,
        group_start=group_start,
        group_end=group_end,
        all_gather=all_gather,
        broadcast=broadcast,
        send=lambda p, n, kind, peer, c, s: local.sends.append((p, n, peer, world.handles[c], s)),
        recv=lambda p, n, kind, peer, c, s: local.receives.append((p, n, peer, world.handles[c], s)),
    )
    core = module("nccl.core", Communicator=Communicator, UniqueId=UniqueId, get_unique_id=get_unique_id, UINT8=1)
    bindings = module("nccl.bindings", nccl=nccl_bindings)
    module("nccl", core=core, bindings=bindings)

    # cuBLASMp and cuBLAS

    class Grid:
        def __init__(self, nprow, npcol, layout, comm):
            self.nprow, self.npcol, self.comm = nprow, npcol, comm
            self.by_columns = layout == 0
            assert nprow * npcol == comm.nranks
            comm.hub.meet()

        def coords(self, rank):
            return (rank % self.nprow, rank // self.nprow) if self.by_columns else divmod(rank, self.npcol)

    class Matrix:
        def __init__(self, m, n, mb, nb, rsrc, csrc, lld, kind, grid):
            self.shape, self.blocks, self.lld = (m, n), (mb, nb), lld
            self.grid, self.dtype = world.handles[grid], np.dtype(DATA_TYPES[kind])
            self.rank = self.grid.comm.rank
            assert lld >= max(1, self.local()[0]), "lld is too small"

        def local(self, rank=None):
            return tuple(map(len, self.places(self.rank if rank is None else rank)))

        def tile(self, pointer):
            """The rank's local matrix, as it lies in memory."""
            rows, cols = self.local()
            if not rows or not cols:
                return np.empty((rows, cols), self.dtype)
            size = ((cols - 1) * self.lld + rows) * self.dtype.itemsize
            memory = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), (size,))
            strides = (self.dtype.itemsize, self.lld * self.dtype.itemsize)
            return np.ndarray((rows, cols), self.dtype, memory, strides=strides)

        def places(self, rank):
            """Global indices of a rank's rows and columns."""
            prow, pcol = self.grid.coords(rank)
            return [
                np.flatnonzero(np.arange(size) // block % count == at)
                for size, block, count, at in zip(
                    self.shape, self.blocks, (self.grid.nprow, self.grid.npcol), (prow, pcol), strict=True
                )
            ]

    def matmul(
        handle, descriptor, m, n, k, alpha, a, ia, ja, da, b, ib, jb, db, beta, c, ic, jc, dc, d, i_d, jd, dd, *ws
    ):
        attributes = world.handles[descriptor]
        x, y, z = (world.handles[number] for number in (da, db, dd))
        comm = x.grid.comm
        brought = (x, x.tile(a), y, y.tile(b), z, z.tile(d), dict(attributes))

        def work(ranks):
            wide = np.clongdouble if x.dtype.kind == "c" else np.longdouble
            if x.dtype.itemsize <= 2:
                wide = np.float64
            if x.dtype.itemsize == 1:
                fp8_rules(attributes, ranks, (m, n, k), (a, b))
            wholes = []
            for at in (0, 2):
                whole = np.full(ranks[0][at].shape, np.nan, wide)
                for rank, things in enumerate(ranks):
                    whole[np.ix_(*things[at].places(rank))] = things[at + 1].astype(wide)
                wholes.append(whole)
            left, right = (
                (whole, whole.T, whole.conj().T)[attributes[name]]
                for whole, name in zip(wholes, ("TRANSA", "TRANSB"), strict=True)
            )
            assert left.shape == (m, k)
            assert right.shape == (k, n)
            with np.errstate(all="ignore"):
                product = _scalar(alpha, x.dtype) * (left @ right)
                if adds_rounded(attributes, ranks):
                    cut = np.arange(k) < k // 2
                    parts = [left[:, some] @ right[some] for some in (cut, ~cut)]
                    product = sum(part.astype(z.dtype).astype(wide) for part in parts) * _scalar(alpha, x.dtype)
            for rank, things in enumerate(ranks):
                if attributes.get("EPILOGUE") == EPILOGUES["ALLREDUCE"]:
                    assert (attributes["TRANSA"], attributes["TRANSB"]) == (1, 0), "all-reduce wants TN"
                    things[5][...] = product
                else:
                    rows, cols = things[4].places(rank)
                    part = _epilog(things[6], product[np.ix_(rows, cols)], things[4])
                    things[5][...] = part.astype(things[4].dtype)

        comm.hub.together(comm.rank, brought, work)
        world.calls.append((comm.rank, "matmul", m, n, k))
        world.epilogs.append(next((name for name, x in EPILOGUES.items() if x == attributes.get("EPILOGUE")), ""))
        world.computed.append(attributes["compute"])

    def adds_rounded(attributes, ranks):
        """Whether parts of k are added up in a 16-bit D: where matrices are not aligned, but for the reduce-scatter."""
        x, _, y, _, z, *_ = ranks[0]
        inner = (int(attributes["TRANSA"] == 0), int(attributes["TRANSB"] != 0))
        along = [(one.grid.nprow, one.grid.npcol)[axis] for one, axis in zip((x, y), inner, strict=True)]
        if z.dtype.itemsize != 2 or all(count == x.grid.comm.nranks for count in along):
            return False
        lengths = [length for one in (x, y, z) for length in (*one.shape, *one.blocks, one.lld)]
        return any(length * 2 % 16 for length in lengths)

    def fp8_rules(attributes, ranks, shape, pointers):
        """What cuBLASMp demands of FP8; the local multiply's extents as nvmath knows them for each path."""
        assert (attributes["TRANSA"], attributes["TRANSB"]) == (1, 0), "FP8 wants TN"
        assert attributes["compute"] == 68, "FP8 is summed in float32"
        for operand in "AB":
            assert attributes[f"{operand}_SCALE_MODE"] == 0
            assert ctypes.c_float.from_address(attributes[f"{operand}_SCALE_POINTER"]).value == 1.0
        x, _, y, _, z, *_ = ranks[0]
        assert {x.dtype.name, y.dtype.name} <= {"float8_e4m3fn", "float8_e5m2"}
        assert x.dtype.name != "float8_e5m2" or y.dtype.name != "float8_e5m2", "no GPU has E5M2 by E5M2"
        assert z.dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
        assert 1 in (x.grid.nprow, x.grid.npcol), "no FP8 in SUMMA"
        for things in ranks:
            for matrix in (things[0], things[2]):
                assert matrix.lld % 16 == 0
                assert not set(np.array(matrix.local()) % 16) - {0}
            assert not set(np.array(things[4].local()) % 16) - {0}
        assert not set(np.array(shape) % 16) - {0}
        assert all(pointer % 16 == 0 for pointer in pointers)

    def malloc(grid, size):
        comm = world.handles[grid].comm
        sizes = comm.hub.together(comm.rank, size, set)
        assert len(sizes) == 1, "ranks ask for different workspaces"
        return world.keep("workspace", size)

    def free(grid, pointer):
        world.handles[grid].comm.hub.meet()
        world.drop("workspace", pointer)

    def grid_destroy(grid):
        world.handles[grid].comm.hub.meet()
        world.drop("grid", grid)

    def set_attribute(descriptor, name, pointer, size):
        kind = {4: ctypes.c_uint32, 8: ctypes.c_uint64}[size]
        assert (size == 8) == name.endswith("POINTER")
        world.handles[descriptor][name] = int(kind.from_address(pointer).value)

    names = ["TRANSA", "TRANSB", "EPILOGUE", "BIAS_POINTER"]
    names += [f"{x}_SCALE_{what}" for x in "AB" for what in ("MODE", "POINTER")]

    class Name(str):
        def __int__(self):
            return names.index(self)

    mp = types.SimpleNamespace(
        MatmulDescriptorAttribute=types.SimpleNamespace(**{name: Name(name) for name in names}),
        MatmulMatrixScale=types.SimpleNamespace(SCALAR_FP32=0),
        MatmulEpilogue=types.SimpleNamespace(**EPILOGUES),
        GridLayout=types.SimpleNamespace(COL_MAJOR=0, ROW_MAJOR=1),
        get_version=lambda: 1000,
        create=lambda stream: world.keep("handle", "cublasMp"),
        destroy=lambda handle: world.drop("handle", handle),
        grid_create=lambda p, q, layout, comm: world.keep("grid", Grid(p, q, layout, world.handles[comm])),
        grid_destroy=grid_destroy,
        matrix_descriptor_create=lambda *args: world.keep("descriptor", Matrix(*args)),
        matrix_descriptor_destroy=lambda number: world.drop("descriptor", number),
        matmul_descriptor_create=lambda kind: world.keep("descriptor", {"compute": kind}),
        matmul_descriptor_destroy=lambda number: world.drop("descriptor", number),
        get_matmul_descriptor_attribute_dtype=lambda at: np.uint64 if names[at].endswith("POINTER") else np.uint32,
        matmul_descriptor_set_attribute=lambda d, at, p, n: set_attribute(d, names[at], p, n),
        matmul_buffer_size=lambda *args: (1000 + args[2] + 8 * world.handles[args[9]].rank, 16),
        matmul=matmul,
        malloc=malloc,
        free=free,
        buffer_register=lambda grid, pointer, size: world.keep("registration", 0),
        buffer_deregister=lambda grid, pointer: world.open.__setitem__("registration", world.open["registration"] - 1),
    )

    if memory is not None:
        module("cuda.bindings.driver", **memory.driver())
        module("cuda.bindings", driver=sys.modules["cuda.bindings.driver"])
        module("cuda", bindings=sys.modules["cuda.bindings"])

    def gemm(handle, *arguments):
        # Factors are read at once, matrices when the stream comes to it.
        alpha, kind, beta = arguments[5], arguments[7], arguments[12]
        scalars = [_scalar(pointer, np.dtype(DATA_TYPES[kind])) for pointer in (alpha, beta)]
        assert scalars[0] == 1
        shared.on_stream(getattr(local, "stream", 0), lambda: gemm_now(scalars[1], *arguments))

    def gemm_now(add, op_a, op_b, m, n, k, alpha, a, kind, lda, b, kind_b, ldb, beta, c, kind_c, ldc, compute, algo):
        dtype = np.dtype(DATA_TYPES[kind])

        def matrix(pointer, rows, cols, ld, dtype=dtype):
            size = ((cols - 1) * ld + rows) * dtype.itemsize
            memory = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), (size,))
            return np.ndarray((rows, cols), dtype, memory, strides=(dtype.itemsize, ld * dtype.itemsize))

        kind_of_c = np.dtype(DATA_TYPES[kind_c])
        x = matrix(a, m, k, lda) if op_a == 0 else matrix(a, k, m, lda).T
        y = matrix(b, k, n, ldb) if op_b == 0 else matrix(b, n, k, ldb).T
        x, y = (z.conj() if op == 2 else z for z, op in ((x, op_a), (y, op_b)))
        wide = np.complex128 if dtype.kind == "c" else np.float64
        z = matrix(c, m, n, ldc, kind_of_c)
        before = add * z.astype(wide) if add else 0
        with np.errstate(all="ignore"):
            z[...] = (x.astype(wide) @ y.astype(wide) + before).astype(kind_of_c)
        world.calls.append((0, "gemm", m, n, k))
        world.computed.append(compute)

    blas = types.SimpleNamespace(
        ComputeType=types.SimpleNamespace(COMPUTE_32F=68, COMPUTE_64F=70, COMPUTE_32F_FAST_TF32=77),
        create=lambda: 1,
        set_stream=lambda handle, stream: setattr(local, "stream", stream),
        gemm_ex_64=gemm,
    )

    # cuBLASLt. Objects that are kept for the next run are not counted.

    def keep(thing):
        with world.lock:
            number = next(world.numbers)
            world.handles[number] = thing
        return number

    def lt_attribute(descriptor, name, pointer, size):
        kind = {4: ctypes.c_int32, 8: ctypes.c_uint64}[size]
        assert (size == 8) == (lt_names[name] in ("BIAS_POINTER", "MAX_WORKSPACE_BYTES"))
        world.handles[descriptor][lt_names[name]] = int(kind.from_address(pointer).value)

    def lt_heuristic(handle, descriptor, in_a, in_b, in_c, in_d, preference, most, algorithms, count):
        assert in_c == in_d
        aligned = world.handles[preference]
        assert aligned["MAX_WORKSPACE_BYTES"] > 0
        narrow = np.dtype(DATA_TYPES[world.handles[in_d][0]]).itemsize <= 2
        assert aligned["REDUCTION_SCHEME_MASK"] == (2 if narrow else 3), "sums in a narrow type"
        found = {name: aligned[f"MIN_ALIGNMENT_{name}_BYTES"] for name in "ABCD"}
        ctypes.c_uint64.from_address(algorithms).value = keep(found)
        ctypes.c_int32.from_address(count).value = int(world.has_algorithms)

    def lt_matmul(handle, descriptor, alpha, a, in_a, b, in_b, beta, c, in_c, d, in_d, algo, space, size, stream):
        found = dict(world.handles[descriptor])
        aligned = world.handles[ctypes.c_uint64.from_address(algo).value]
        kind = np.dtype(DATA_TYPES[world.handles[in_a][0]])
        factor, add = (_scalar(pointer, kind) for pointer in (alpha, beta))
        for pointer, name in ((a, "A"), (b, "B"), (c, "C"), (d, "D")):
            assert pointer % aligned[name] == 0, "the algorithm was found for better alignment"
        described = [(pointer, world.handles[layout]) for pointer, layout in ((a, in_a), (b, in_b), (d, in_d))]
        shared.on_stream(stream, lambda: lt_matmul_now(found, described, factor, add))

    def lt_matmul_now(found, described, factor, add):
        matrices = []
        for pointer, (kind, rows, cols, ld) in described:
            dtype = np.dtype(DATA_TYPES[kind])
            memory = np.ctypeslib.as_array(
                ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), (((cols - 1) * ld + rows) * dtype.itemsize,)
            )
            matrices.append(np.ndarray((rows, cols), dtype, memory, strides=(dtype.itemsize, ld * dtype.itemsize)))
        x, y, z = matrices
        fp8 = x.dtype.itemsize == 1
        if fp8:
            assert (found["TRANSA"], found["TRANSB"]) == (1, 0), "FP8 wants TN"
            for pointer, (kind, rows, cols, ld) in described:
                assert pointer % 16 == 0
                assert ld * np.dtype(DATA_TYPES[kind]).itemsize % 16 == 0
                assert not {rows % 16, cols % 16} - {0}
            assert {x.dtype.itemsize, y.dtype.itemsize} == {1}
            assert x.dtype != ml_dtypes.float8_e5m2 or y.dtype != ml_dtypes.float8_e5m2
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        x, y = (
            (v, v.T, v.conj().T)[found[name]] for v, name in ((x.astype(wide), "TRANSA"), (y.astype(wide), "TRANSB"))
        )
        assert (*z.shape, x.shape[1]) == (x.shape[0], y.shape[1], y.shape[0])
        with np.errstate(all="ignore"):
            before = add * z.astype(wide) if add else 0
            value = factor * (x @ y) + before
            z[...] = _activated(found, value, z.dtype, len(z)).astype(z.dtype)
        world.calls.append((0, "lt" if fp8 else "gemm", *z.shape, len(y)))
        world.computed.append(found["compute"])
        world.epilogs.append(next((name for name, x in LT_EPILOGUES.items() if x == found["EPILOGUE"]), ""))

    lt_names = ["TRANSA", "TRANSB", "EPILOGUE", "BIAS_POINTER", "MAX_WORKSPACE_BYTES", "REDUCTION_SCHEME_MASK"]
    lt_names += [f"MIN_ALIGNMENT_{name}_BYTES" for name in "ABCD"]
    lt_attributes = {name: number for number, name in enumerate(lt_names)}

    class Heuristic:
        def __init__(self):
            self._held = np.zeros(12, np.uint64)
            self.ptr = self._held.ctypes.data

    def lt_kind(at):
        return np.uint64 if lt_names[at] in ("BIAS_POINTER", "MAX_WORKSPACE_BYTES") else np.int32

    lt = types.SimpleNamespace(
        MatmulDescAttribute=lt_attributes,
        MatmulPreferenceAttribute=lt_attributes,
        MatmulHeuristicResult=Heuristic,
        cuBLASLtError=RuntimeError,
        get_matmul_desc_attribute_dtype=lt_kind,
        get_matmul_preference_attribute_dtype=lt_kind,
        create=lambda: 1,
        matmul_desc_create=lambda compute, scale: keep({"compute": compute}),
        matmul_desc_destroy=lambda number: world.handles.pop(number),
        matmul_desc_set_attribute=lt_attribute,
        matmul_preference_create=lambda: keep({}),
        matmul_preference_destroy=lambda number: world.handles.pop(number),
        matmul_preference_set_attribute=lt_attribute,
        matmul_algo_get_heuristic=lt_heuristic,
        matrix_layout_create=lambda *args: keep(args),
        matrix_layout_destroy=lambda number: world.handles.pop(number),
        matmul=lt_matmul,
    )
    triangular, solver = solvers.bindings(world, Grid, Matrix)
    mp.__dict__.update(triangular)
    module("nvmath.bindings", cublas=blas, cublasLt=lt, cublasMp=mp, cusolverMp=solver)
    module("nvmath", bindings=sys.modules["nvmath.bindings"])
    for name in [name for name in sys.modules if name.startswith(OVER_LIBRARIES)]:
        monkeypatch.delitem(sys.modules, name)
    return world
