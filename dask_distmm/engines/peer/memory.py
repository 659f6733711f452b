"""Device memory of one process that others of its host read: handles, mappings, and what is said about them.

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
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cupy as cp
import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from dask_distmm.engines.base import log
from dask_distmm.engines.peer.offers import Allocation, Offer
from dask_distmm.errors import EngineError
from dask_distmm.layout.rectangles import span_of

# Allocations of one exporter that stay mapped between runs; the least recently used leave.
_MOST_MAPPED = 1024
# Of the device's memory, the share of what is free and kept for the next run, and of what stays mapped between runs,
# which its owner can't give back to the device: this many times smaller, each.
_SHARE = 8
# The driver's blocks.
_BLOCK_BYTES = 2**21
_Attribute = driver.CUpointer_attribute


class Exporter:
    """The device memory that this process lets others map."""

    def __init__(self) -> None:
        self.process, self.own_memory_only = os.urandom(16), False
        self._told: dict[int, Allocation] = {}
        # Straight from cudaMalloc, whatever CuPy's own allocator is; what is freed stays here for the next run.
        self._pool = cp.cuda.MemoryPool(_allocate)

    def begin(self, address: str, most: int) -> None:
        """Begin a run on the worker of this address; free what is kept beyond `most` bytes or a share of the device."""
        self.own_memory_only = maps_for_itself(address)
        if self._pool.free_bytes() > min(most, _device_bytes() // _SHARE):
            self.free()

    def free(self) -> None:
        """Free what is kept for the next run."""
        self._pool.free_all_blocks()

    def find(self, pointer: int) -> Allocation | None:
        """Return the allocation that an address is in; None if CUDA can't export it."""
        capable = _attribute(_Attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer)
        if not capable:
            return None
        error, base, size = driver.cuMemGetAddressRange(pointer)
        if int(error):
            return None
        address, buffer_id = int(base), self._buffer_id(int(base))
        known = self._told.get(address)
        if buffer_id is None or (known is not None and known.buffer_id == buffer_id):
            return known
        try:
            handle = bytes(cp.cuda.runtime.ipcGetMemHandle(address))
        except cp.cuda.runtime.CUDARuntimeError as failure:
            log.info("device memory at %#x can't be exported: %s", address, failure)
            return None
        self._told[address] = Allocation(handle, int(size), buffer_id, address)
        return self._told[address]

    def alive(self) -> list[int]:
        """Return the buffer ids of all allocations that were told and are still there."""
        self._told = {
            address: told for address, told in self._told.items() if self._buffer_id(address) == told.buffer_id
        }
        return [told.buffer_id for told in self._told.values()]

    def tell(self, offer: Offer, operand: int, number: int, array: Any) -> None:
        """Tell in an offer where a matrix is stored, which can be exported."""
        allocation = self.find(array.data.ptr)
        assert allocation is not None
        offer.add(operand, number, allocation, span_of(array))

    def _buffer_id(self, address: int) -> int | None:
        return _attribute(_Attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, address)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, order: str = "C") -> Any:
        """Return a new array that can be exported: from CuPy's allocator, or past it where that will not do."""
        if not self.own_memory_only:
            made = cp.empty(shape, dtype, order=order)
            if not made.size or self.find(made.data.ptr) is not None:
                return made
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return cp.ndarray(shape, dtype, memptr=self._pool.malloc(max(1, size)), order=order)

    def exportable(self, array: Any, stream: cp.cuda.Stream) -> Any:
        """Return a matrix in memory that can be exported: itself, or a copy that is made on a stream."""
        if not array.size or (not self.own_memory_only and self.find(array.data.ptr) is not None):
            return array
        copy = self.empty(array.shape, array.dtype, "C" if array.strides[0] >= array.strides[1] else "F")
        with stream:
            copy[...] = array
        return copy


def _allocate(size: int) -> Any:
    """Return memory for a pool. The driver cuts smaller allocations, anybody's, out of blocks that it maps as one.

    CuPy's own pool keeps what is freed, and knows nothing of this one: it has to give that back where none is left.
    """
    size = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
    try:
        return cp.cuda.MemoryPointer(cp.cuda.Memory(size), 0)
    except cp.cuda.runtime.CUDARuntimeError:
        cp.get_default_memory_pool().free_all_blocks()
    return cp.cuda.MemoryPointer(cp.cuda.Memory(size), 0)


@functools.cache
def _device_bytes() -> int:
    """Return the bytes of the device."""
    return int(cp.cuda.runtime.memGetInfo()[1])


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
    # The driver answers only threads that have a context, and those that took pooled memory alone have none yet.
    cp.cuda.Device().use()
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
            while len(mapped) > _MOST_MAPPED or (mapped and self._bytes(mapped) > _device_bytes() // _SHARE):
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
