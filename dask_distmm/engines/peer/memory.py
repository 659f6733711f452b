"""Device memory of one process that others of its host read: handles, mappings, and what is said about them.

Beside these a process keeps its streams between runs. `Remote` is the memory of others as one rank reads it in a run:
mapped matrices, and flags that say what is ready.

CUDA exports whole allocations (cudaIpcGetMemHandle), while arrays lie somewhere inside one, most of all in a memory
pool. So an array is told as the handle of its allocation, an offset and strides. An allocation is known by the process
that has it and by its buffer id, which no later allocation of that process gets, even at the same address.

A mapping stays for later runs, until the exporter no longer lists the allocation as alive, or has left.

UCX, where workers talk over it, maps allocations out of which it is asked to send, for as long as they exist; and the
driver lets only one of a process' libraries map an allocation (https://github.com/openucx/ucx/issues/3192). Neither can
know what the other one has. So with UCX others get copies, in memory that is never sent.
"""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import cupy as cp
import cupyx
import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from dask_distmm.comms.base import PeerLostError
from dask_distmm.engines.base import log
from dask_distmm.engines.gpu.copy_kernels import CopyBatch, Rectangle, make_copies, table_of
from dask_distmm.engines.gpu.operands import FIRST, array_at, device_memory
from dask_distmm.engines.peer.offers import FLAG_BYTES, FLAGS, Allocation, Places, Told, offer_of, read_place
from dask_distmm.errors import EngineError
from dask_distmm.layout.rectangles import Span, Table, span_of
from dask_distmm.planning import Placement
from dask_distmm.planning.cuts import padded

# Memory that this process lets others map, and memory of others that is mapped here


# Allocations of one exporter that stay mapped between runs; the least recently used leave.
_MOST_MAPPED = 1024
# Of the device's memory, the share of what is free and kept for the next run, and of what stays mapped between runs,
# which its owner can't give back to the device: this many times smaller, each.
_SHARE = 8
# The driver's blocks; about how many bytes of copies of chunks are one allocation, and multiples of which each begins.
_BLOCK_BYTES, _TOGETHER, _ALIGNED = 2**21, 2**28, 256
_Attribute = driver.CUpointer_attribute


class Exporter:
    """The device memory that this process lets others map."""

    def __init__(self) -> None:
        self.process, self.own_memory_only = os.urandom(16), False
        self._told: dict[int, Allocation] = {}
        # Straight from cudaMalloc, whatever CuPy's own allocator is; what is freed stays here for the next run.
        self._pool = cp.cuda.MemoryPool(_allocate)
        # Those of the last run, whose tables kernels read.
        self._copies: list[CopyBatch] = []

    def begin(self, address: str, most: int) -> None:
        """Begin a run on the worker of this address; free what is kept beyond `most` bytes or a share of the device."""
        self.own_memory_only = maps_for_itself(address)
        if self._pool.free_bytes() > min(most, device_memory() // _SHARE):
            self.free()

    def free(self) -> None:
        """Free what is kept for the next run."""
        self._pool.free_all_blocks()

    def find(self, pointer: int) -> Allocation | None:
        """Return the allocation that an address is in; None if CUDA can't export it."""
        # The driver answers only threads that have a context, and those that took pooled memory alone have none yet.
        cp.cuda.Device().use()
        error, base, size = driver.cuMemGetAddressRange(pointer)
        if int(error):
            return None
        address, buffer_id = int(base), self._buffer_id(int(base))
        allocation = self._told.get(address)
        if allocation is not None and allocation.buffer_id == buffer_id:
            return allocation
        if not _attribute(_Attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer):
            return None
        if buffer_id is None:
            return allocation
        try:
            handle = bytes(cp.cuda.runtime.ipcGetMemHandle(address))
        except cp.cuda.runtime.CUDARuntimeError as failure:
            log.info("device memory at %#x can't be exported: %s", address, failure)
            return None
        self._told[address] = Allocation(handle, int(size), buffer_id, address)
        return self._told[address]

    def alive(self) -> list[int]:
        """Return the buffer ids of all allocations that were told and are still there."""
        cp.cuda.Device().use()
        self._told = {
            address: place for address, place in self._told.items() if self._buffer_id(address) == place.buffer_id
        }
        return [allocation.buffer_id for allocation in self._told.values()]

    def offer(self, matrices: Iterable[tuple[int, int, Any]]) -> dict[str, Any]:
        """Return the offer of matrices that can be exported, each with its operand and its number."""
        places = []
        for operand, number, array in matrices:
            allocation = self.find(array.data.ptr)
            assert allocation is not None
            places.append((operand, number, allocation, span_of(array)))
        return offer_of(self.process, self.alive(), places)

    def _buffer_id(self, address: int) -> int | None:
        return _attribute(_Attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, address)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, order: str = "C") -> Any:
        """Return a new array that can be exported: from CuPy's allocator, or past it where that will not do."""
        if not self.own_memory_only:
            array = cp.empty(shape, dtype, order=order)
            if not array.size or self.find(array.data.ptr) is not None:
                return array
        return self.own(shape, dtype, order)

    def own(self, shape: tuple[int, ...], dtype: np.dtype, order: str = "C") -> Any:
        """Return a new array that can be exported, in memory that is kept for the next run: others map it once."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return cp.ndarray(shape, dtype, memptr=self._pool.malloc(max(1, size)), order=order)

    def together(self, matrices: Sequence[tuple[tuple[int, int], np.dtype, str]]) -> list[Any]:
        """Return new matrices, of some shapes, types and orders, in one allocation that can be exported."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in matrices]
        *starts, size = itertools.accumulate((padded(nbytes, _ALIGNED) for nbytes in sizes), initial=0)
        memory = self.empty((size,), np.dtype(np.uint8))
        return [
            memory[start : start + nbytes].view(dtype).reshape(shape, order=order)
            for start, nbytes, (shape, dtype, order) in zip(starts, sizes, matrices, strict=True)
        ]

    def exportable(self, arrays: Sequence[Any], stream: cp.cuda.Stream) -> list[Any]:
        """Return matrices in memory that can be exported: themselves, or copies that are made on a stream."""
        kept = {id(x): x for x in arrays}
        copied = [x for x in kept.values() if x.size and (self.own_memory_only or self.find(x.data.ptr) is None)]
        # An allocation for several: to make, to tell and to map one takes as long as to copy some megabytes.
        ends = itertools.accumulate(padded(int(x.nbytes), _ALIGNED) for x in copied)
        # By the bytes of an element the copies to each allocation.
        tables = collections.defaultdict[int, list[Table]](list)
        for _, group in itertools.groupby(zip(copied, ends, strict=True), lambda pair: pair[1] // _TOGETHER):
            some = [array for array, _ in group]
            orders = ("C" if array.strides[0] >= array.strides[1] else "F" for array in some)
            copies = self.together([(x.shape, x.dtype, order) for x, order in zip(some, orders, strict=True)])
            rectangles = collections.defaultdict[int, list[Rectangle]](list)
            for array, copy in zip(some, copies, strict=True):
                kept[id(array)] = copy
                rectangles[array.itemsize].append(Rectangle(span_of(array), span_of(copy), *array.shape))
            for itemsize, every in rectangles.items():
                tables[itemsize].append(table_of(every, itemsize))
        batches = (make_copies(some, itemsize, here=[len(x) > 1 for x in some]) for itemsize, some in tables.items())
        self._copies = [*itertools.chain(*batches)]
        for batch in self._copies:
            batch.run(stream)
        return [kept[id(x)] for x in arrays]


def _allocate(size: int) -> Any:
    """Return memory for a pool. The driver cuts smaller allocations, anybody's, out of blocks that it maps as one.

    CuPy's own pool keeps what is freed, and knows nothing of this one: it has to give that back where none is left.
    """
    size = padded(size, _BLOCK_BYTES)
    try:
        return cp.cuda.MemoryPointer(cp.cuda.Memory(size), 0)
    except cp.cuda.runtime.CUDARuntimeError:
        cp.get_default_memory_pool().free_all_blocks()
    return cp.cuda.MemoryPointer(cp.cuda.Memory(size), 0)


@functools.cache
def maps_for_itself(address: str) -> bool:
    """Whether Dask's comms map device memory too, on a worker of this address: UCX does, where it may use CUDA IPC."""
    if not address.startswith("ucx"):
        return False
    try:
        transports = importlib.import_module("ucxx").get_config()["TLS"].lower()
    except (ImportError, KeyError):
        return True
    names = transports.lstrip("^").split(",")
    if transports.startswith("^"):
        return not {"cuda", "cuda_ipc"} & set(names)
    return bool({"all", "cuda", "cuda_ipc"} & set(names))


def _attribute(name: Any, pointer: int) -> int | None:
    error, value = driver.cuPointerGetAttribute(name, pointer)
    return None if int(error) else int(value)


class Mappings:
    """Other processes' allocations, as this process sees them. Used only by the engine's thread."""

    def __init__(self) -> None:
        self._mapped: dict[bytes, collections.OrderedDict[int, int]] = {}
        self._sizes: dict[int, int] = {}
        self._groups: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        """Return how many allocations are mapped."""
        return sum(map(len, self._mapped.values()))

    def open(self, process: bytes, allocation: Allocation) -> int:
        """Return the address of another process' allocation here, mapped when it is first needed."""
        mapped = self._mapped.setdefault(process, collections.OrderedDict())
        if allocation.buffer_id not in mapped:
            try:
                address = mapped[allocation.buffer_id] = int(cp.cuda.runtime.ipcOpenMemHandle(allocation.handle))
                self._sizes[address] = allocation.size
            except cp.cuda.runtime.CUDARuntimeError as error:
                raise EngineError(
                    f"memory of another GPU can't be mapped ({error}): the processes must share a host, its IPC "
                    "namespace and all GPUs. Use engine='cublasmp' (config distmm.engine)"
                ) from error
        mapped.move_to_end(allocation.buffer_id)
        return mapped[allocation.buffer_id]

    def known(self, process: bytes, buffer_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the addresses of another process' allocations here, 0 for those that are not mapped yet."""
        mapped = self._mapped.setdefault(process, collections.OrderedDict())
        for buffer_id in mapped.keys() & set(buffer_ids):
            mapped.move_to_end(buffer_id)
        return np.array([mapped.get(buffer_id, 0) for buffer_id in buffer_ids], np.int64)

    def begin(self, group: int, process: bytes, alive: Iterable[int]) -> None:
        """Note that a run of a group reads a process' memory; close what that process no longer has."""
        mapped, kept = self._mapped.setdefault(process, collections.OrderedDict()), set(alive)
        for buffer_id in [number for number in mapped if number not in kept]:
            self._close(mapped.pop(buffer_id))
        self._groups.setdefault(process, set()).add(group)

    def trim(self) -> None:
        """Close what is too much, when no run uses any of it: too many of a process, or too large a share of memory."""
        for mapped in self._mapped.values():
            while len(mapped) > _MOST_MAPPED or (mapped and self._bytes(mapped) > device_memory() // _SHARE):
                self._close(mapped.popitem(last=False)[1])

    def _bytes(self, mapped: Mapping[int, int]) -> int:
        return sum(self._sizes[address] for address in mapped.values())

    def _close(self, address: int) -> None:
        del self._sizes[address]
        close_quietly(address)

    def release(self, group: int) -> None:
        """Close what no other group reads."""
        for process, groups in list(self._groups.items()):
            groups.discard(group)
            if not groups:
                del self._groups[process]
                for address in self._mapped.pop(process, {}).values():
                    self._close(address)


def close_quietly(pointer: int) -> None:
    """Unmap; that it fails where the exporter is gone is of no consequence."""
    try:
        cp.cuda.runtime.ipcCloseMemHandle(pointer)
    except cp.cuda.runtime.CUDARuntimeError as error:
        log.info("a mapping of another process' memory can't be closed: %s", error)


# The streams and mappings that a process keeps between its runs


# Streams that pull at the same time: from each other GPU of a host of 8.
_MOST_PULLING = 7
# Bytes of the read that wakes a link.
_WAKING_BYTES = 2**16
# Between two looks at a flag (seconds).
_LOOK = 2e-5
# How long it may take until the news that a worker is gone has come (seconds).
_NEWS = 2.0


class PeerState:
    """Streams, memory that others have mapped, and others' memory that is mapped here."""

    def __init__(self) -> None:
        self.exporter = Exporter()
        self.mappings = Mappings()
        self._pulling: list[cp.cuda.Stream] = []
        self._making: list[cp.cuda.Stream] = []
        self._solver: Any = None
        # The target of reads that only wake a link.
        self._read: Any = None

    @functools.cached_property
    def stream(self) -> cp.cuda.Stream:
        """The stream of GEMMs."""
        return cp.cuda.Stream(non_blocking=True)

    @functools.cached_property
    def looking(self) -> cp.cuda.Stream:
        """The stream of reads of flags, and of reads that wake links."""
        return cp.cuda.Stream(non_blocking=True)

    @functools.cached_property
    def coming(self) -> cp.cuda.Stream:
        """The stream of pulls of panels: kernels that wait for flags do not wait for those of updates to begin."""
        return cp.cuda.Stream(non_blocking=True, priority=FIRST)

    @functools.cached_property
    def sums(self) -> cp.cuda.Stream:
        """The stream of pulls of others' sums: they wait for products, and pulls of panels must not wait with them."""
        return cp.cuda.Stream(non_blocking=True)

    @functools.cached_property
    def downloads(self) -> cp.cuda.Stream:
        """The stream of copies to host memory."""
        return cp.cuda.Stream(non_blocking=True)

    def pulls(self, count: int) -> list[cp.cuda.Stream]:
        """Return the streams that pull A, B and the inputs of the formula: one for each other GPU, up to a limit."""
        wanted = min(max(1, count), _MOST_PULLING)
        self._pulling += [cp.cuda.Stream(non_blocking=True) for _ in range(wanted - len(self._pulling))]
        return self._pulling[:wanted]

    def making(self, threads: int) -> list[cp.cuda.Stream]:
        """Return the streams of threads that make chunks, which wait for the default stream: see `loads`."""
        self._making += [cp.cuda.Stream() for _ in range(threads - len(self._making))]
        return self._making[:threads]

    def solver(self) -> Any:
        """Return the kernels of factorizations (`SolverKernels`), on the stream of GEMMs."""
        if self._solver is None:
            # cuSOLVER is loaded by those who use it.
            from dask_distmm.engines.gpu.lapack import SolverKernels

            self._solver = SolverKernels(self.stream)
        return self._solver

    def wake(self, pointer: int, size: int) -> None:
        """Read a little of mapped memory: after an idle moment the first pull takes up to 0.2 ms more (H200)."""
        if self._read is None:
            self._read = cp.empty(_WAKING_BYTES, np.uint8)
        arguments = self._read.data.ptr, pointer, min(size, _WAKING_BYTES), cp.cuda.runtime.memcpyDefault
        cp.cuda.runtime.memcpyAsync(*arguments, self.looking.ptr)


# Others' memory, as one rank reads it


class Remote:
    """The memory that all others offer, mapped when it is first needed."""

    def __init__(
        self,
        plan: Placement,
        offers: tuple[Sequence[Told | None], Places],
        engine: PeerState,
        gone: Collection[int] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        # `check` raises if the run has been ended, by which memory may be gone.
        (self._told, self._places), self._plan, self._engine = offers, plan, engine
        self._lost, self._check = gone, check
        self._seen = cupyx.empty_pinned(len(plan.ranks) + 1, np.int32)
        self._awake: set[int] = set()
        self._flags: dict[int, int] = {}
        self._views: dict[tuple[int, int, int], Any] = {}
        # Where all allocations are in this process, 0 if they are not mapped; those of each participant together.
        self._bases = [np.empty(0, np.int64)] * len(self._told)
        for holder, offer in enumerate(self._told):
            if offer is None:
                continue
            if offer.process == engine.exporter.process:
                self._bases[holder] = offer.numbers[:, 2].astype(np.int64)
                continue
            engine.mappings.begin(plan.group, offer.process, offer.alive)
            self._bases[holder] = engine.mappings.known(offer.process, offer.numbers[:, 1].tolist())
            for number in np.flatnonzero(self._bases[holder])[:1].tolist():
                self._wake(holder, int(self._bases[holder][number]), offer.allocation(number).size)

    @property
    def offering(self) -> NDArray[np.bool_]:
        """Which participants let others map their memory."""
        return np.array([offer is not None for offer in self._told])

    def spans(self, operand: int, holders: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where matrices of an operand are in this process: address, row stride and column stride of each."""
        places = self._places[operand][holders, numbers]
        if (places[:, 0] < 0).any():
            at = int(np.argmax(places[:, 0] < 0))
            address = self._plan.participants[int(holders[at])].address
            raise EngineError(f"{address} offers no matrix {numbers[at]} of {operand}")
        located = places[:, 1:].copy()
        for holder in np.unique(holders).tolist():
            mine, bases = holders == holder, self._bases[holder]
            used = places[mine, 0]
            for number in np.unique(used[bases[used] == 0]).tolist():
                self._map(holder, number)
            located[mine, 0] += bases[used]
        return located

    def view(self, holder: int, operand: int, number: int, shape: tuple[int, int], dtype: np.dtype) -> Any:
        """Return a matrix of another participant as an array over its memory; parameters and errors as of `spans`."""
        key = holder, operand, number
        if key not in self._views:
            span = Span(*self.spans(operand, np.array([holder]), np.array([number]))[0].tolist())
            self._views[key] = array_at(span, shape, dtype, self)
        return self._views[key]

    def has(self, holder: int, operand: int, number: int) -> bool:
        """Whether a participant offers a matrix of an operand."""
        return bool(self._places[operand][holder, number, 0] >= 0)

    def at(self, holder: int, place: NDArray[Any], shape: tuple[int, int], dtype: np.dtype) -> Any:
        """Return the column-major matrix that a message of a participant says the place of."""
        allocation, offset = read_place(place, math.prod(shape) * dtype.itemsize)
        span = Span(self._mapped(holder, allocation) + offset, dtype.itemsize, shape[0] * dtype.itemsize)
        return array_at(span, shape, dtype, self)

    def _mapped(self, holder: int, allocation: Allocation) -> int:
        """Return where an allocation of a participant is in this process."""
        offer = self._told[holder]
        assert offer is not None
        if offer.process == self._engine.exporter.process:
            return allocation.address

        try:
            return self._engine.mappings.open(offer.process, allocation)
        except EngineError as error:
            # Mapped memory stays readable when its process dies; other memory of that process can't be mapped any more.
            end = time.monotonic() + _NEWS
            while holder not in self._lost and time.monotonic() < end:
                self._check()
                time.sleep(_LOOK)
            if holder not in self._lost:
                raise
            raise PeerLostError(f"{self._plan.participants[holder].address} is gone: {error}") from error

    def _map(self, holder: int, number: int) -> None:
        """Map an allocation that a participant offers."""
        offer = self._told[holder]
        assert offer is not None
        allocation = offer.allocation(number)
        self._bases[holder][number] = mapped = self._mapped(holder, allocation)
        self._wake(holder, mapped, allocation.size)

    def _wake(self, holder: int, mapped: int, size: int) -> None:
        """Wake the link to a participant's GPU, once."""
        if holder not in self._awake:
            self._awake.add(holder)
            self._engine.wake(mapped, size)

    def wait(self, holder: int, flag: int, check: Callable[[], None], most: float = math.inf) -> None:
        """Wait until a participant has raised a flag; `check` raises if the run has been ended.

        PeerLostError if it is gone and has not raised it, EngineError after `most` seconds.
        """
        address, end = self._plan.participants[holder].address, time.monotonic() + most
        while True:
            gone = holder in self._lost  # before the look: it may have raised it with its last breath
            if self._look(holder, flag):
                return
            if gone:
                raise PeerLostError(f"{address} is gone")
            check()
            if time.monotonic() > end:
                raise EngineError(
                    f"worker {address} has not finished its sums for {most:.0f} s, longer than the whole product could "
                    "take (config distmm.timeouts.transfer)"
                )
            time.sleep(_LOOK)

    def flag(self, holder: int, flag: int) -> int:
        """Return the address of a flag in another GPU's memory."""
        if holder not in self._flags:
            self._flags[holder] = int(self.spans(FLAGS, np.array([holder]), np.array([0]))[0, 0])
        return self._flags[holder] + flag * FLAG_BYTES

    def _look(self, holder: int, flag: int) -> bool:
        """Read a flag in another GPU's memory."""
        stream, runtime, at = self._engine.looking, cp.cuda.runtime, self.flag(holder, flag)
        runtime.memcpyAsync(self._seen.ctypes.data, at, FLAG_BYTES, runtime.memcpyDefault, stream.ptr)
        stream.synchronize()
        return bool(self._seen[0])
