"""Device memory that other processes can map, and streams that run when they like, for the stand-ins in `devices`.

Memory is a file for each allocation of the device (an *arena*, out of which arrays are cut as a memory pool does). A
handle is the file's name; who opens it gets a mapping of its own, at another address, so that an address of the
exporter is of no use. Freed memory is poisoned, and used again once no array is left in its arena. Processes are real
ones, or threads that say which process they stand for.

Operations on a stream are queued, and done at some later time in any order that streams and events allow: a wait that
is missing shows as a wrong result.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import mmap
import os
import random
import threading
import time
import weakref

import compiled
import numpy as np

_ARENA_BYTES = 2**25
_ALIGNED = 512
_ATTRIBUTES = {"CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE": 10, "CU_POINTER_ATTRIBUTE_BUFFER_ID": 7}


class Arena:
    """One allocation of the device."""

    def __init__(self, folder, owner, number, size, exportable):
        self.owner, self.size, self.buffer_id, self.exportable = owner, size, number, exportable
        self.name = f"{owner}-{number}"
        with open(os.path.join(folder, self.name), "wb") as file:
            file.truncate(size)
        self.mapping, self.address = open_mapping(folder, self.name)
        self.used, self.blocks, self.freed = 0, 0, False


def open_mapping(folder, name):
    """Map a file; return the mapping and its address."""
    with open(os.path.join(folder, name), "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    return mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class Block:
    """The memory of one array; poisoned when no array is left. A block that is all of an arena frees it then."""

    def __init__(self, lock, arena, address, size, alone=False):
        self.arena = arena
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (size,), "typestr": "|u1"}
        weakref.finalize(self, _free, lock, arena, address, size, alone)


def _free(lock, arena, address, size, alone):
    ctypes.memset(address, 0xFF, size)
    with lock:
        arena.blocks -= 1
        if alone:
            arena.freed = True
        elif not arena.blocks:
            arena.used = 0


class Memory:
    """All device memory that this (real) process knows: its own and what it has mapped."""

    def __init__(self, folder):
        self.folder, self.local, self.lock = str(folder), threading.local(), threading.RLock()
        self.arenas, self.mapped, self.numbers = [], {}, itertools.count(1)
        # Processes whose arrays can't be exported.
        self.not_exportable = set()
        self.most_mapped, self.closed = 0, []

    @property
    def process(self):
        return getattr(self.local, "process", f"process{os.getpid()}")

    @contextlib.contextmanager
    def as_process(self, name):
        before = self.process
        self.local.process = name
        try:
            yield
        finally:
            self.local.process = before

    def allocate(self, size, *, exportable=None, alone=False):
        """Return a block of memory, out of the pool or an allocation of its own."""
        size = max(1, size)
        process = self.process
        exportable = process not in self.not_exportable if exportable is None else exportable
        with self.lock:
            mine = (one for one in self.arenas if one.owner == process and one.exportable == exportable)
            arena = None if alone else next((one for one in mine if one.size - one.used >= size), None)
            if arena is None:
                least = 0 if alone else _ARENA_BYTES
                arena = Arena(self.folder, process, next(self.numbers), max(size, least), exportable)
                self.arenas.append(arena)
            address = arena.address + arena.used
            arena.used = min(arena.size, arena.used + -(-size // _ALIGNED) * _ALIGNED)
            arena.blocks += 1
        return Block(self.lock, arena, address, size, alone)

    def array(self, kind, shape, dtype, order="C", block=None):
        """Return a poisoned array of this process' memory."""
        dtype = np.dtype(dtype)
        shape = (shape,) if np.isscalar(shape) else tuple(shape)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = np.asarray(block or self.allocate(size))[:size]
        raw[...] = 0xFF
        return raw.view(dtype).reshape(shape, order=order).view(kind)

    @property
    def pooled(self):
        """Names of allocations that are cut into several arrays."""
        return {arena.name for arena in self.arenas if arena.size == _ARENA_BYTES}

    def make_current(self):
        """Give this thread a context, which the driver asks for, and the runtime does not."""
        self.local.current = True

    def owner_of(self, pointer):
        with self.lock:
            for arena in self.arenas:
                if arena.address <= pointer < arena.address + arena.size and not arena.freed:
                    return arena
        return None

    def is_mapped(self, pointer):
        with self.lock:
            return any(address <= pointer < address + len(one[0]) for address, one in self.mapped.items())

    def drop(self, process):
        """Free all memory of a process as if it had ended: what others have mapped stays."""
        with self.lock:
            for arena in [arena for arena in self.arenas if arena.owner == process]:
                os.unlink(os.path.join(self.folder, arena.name))
                self.arenas.remove(arena)

    def driver(self):
        """Stand in for cuda.bindings.driver."""

        class CUpointer_attribute:  # noqa: N801 - as NVIDIA's
            pass

        for name, value in _ATTRIBUTES.items():
            setattr(CUpointer_attribute, name, value)

        def get_attribute(attribute, pointer):
            if not getattr(self.local, "current", False):
                return 201, None
            arena = self.owner_of(pointer)
            if arena is None or arena.owner != self.process:
                return 1, None
            return 0, {10: int(arena.exportable), 7: arena.buffer_id}[attribute]

        def address_range(pointer):
            if not getattr(self.local, "current", False):
                return 201, 0, 0
            arena = self.owner_of(pointer)
            return (0, arena.address, arena.size) if arena is not None else (1, 0, 0)

        return {
            "CUpointer_attribute": CUpointer_attribute,
            "cuPointerGetAttribute": get_attribute,
            "cuMemGetAddressRange": address_range,
        }

    def runtime(self, error):
        """Return what is needed of CuPy's runtime."""

        def get_handle(pointer):
            arena = self.owner_of(pointer)
            if arena is None or arena.address != pointer or not arena.exportable:
                raise error("cudaErrorInvalidValue: invalid argument")
            return arena.name.encode().ljust(64, b"\0")

        def open_handle(handle, flags=1):
            name = handle.rstrip(b"\0").decode()
            if name.rpartition("-")[0] == self.process:
                raise error("cudaErrorDeviceUninitialized: a handle of the same process")
            try:
                mapping, address = open_mapping(self.folder, name)
            except OSError:
                raise error("cudaErrorInvalidResourceHandle: invalid resource handle") from None
            with self.lock:
                self.mapped[address] = mapping, self.process, name
                self.most_mapped = max(self.most_mapped, len(self.mapped))
            return address

        def close_handle(pointer):
            with self.lock:
                if pointer not in self.mapped:
                    raise error("cudaErrorInvalidValue: not mapped")
                mapping = self.mapped.pop(pointer)[0]
            self.closed.append(mapping)

        return {"ipcGetMemHandle": get_handle, "ipcOpenMemHandle": open_handle, "ipcCloseMemHandle": close_handle}


# Streams


_streams = weakref.WeakValueDictionary()
_current = threading.local()
# Threads of one process may wait for one stream.
_order = threading.RLock()


class Mark:
    """What an event has recorded last."""

    def __init__(self):
        self.done = False


class Event:
    def __init__(self, disable_timing=False):
        self.mark, self.stream = Mark(), None
        self.mark.done = True

    def record(self, stream=None):
        self.mark, self.stream = Mark(), stream
        if isinstance(stream, Stream) and not stream.immediate:
            stream.queue.append(("record", self.mark))
        else:
            self.mark.done = True

    @property
    def done(self):
        if not self.mark.done:
            self.stream.some()
        return self.mark.done

    def synchronize(self):
        while not self.mark.done:
            self.stream.some()


class Stream:
    """A queue of operations; `Streams` that belong together are done in some order."""

    _pointers = itertools.count(1000)

    def __init__(self, together, immediate=False):
        self.together, self.immediate, self.queue = together, immediate, collections.deque()
        self.captured = None
        self.ptr = next(Stream._pointers)
        together.append(self)
        _streams[self.ptr] = self

    def wait_event(self, event):
        if not event.mark.done:
            if self.immediate:
                # A run that is given up: what others do on the default stream comes after it.
                event.synchronize()
                return
            self.queue.append(("wait", event.mark))

    def begin_capture(self):
        assert self.captured is None
        self.captured = []

    def end_capture(self):
        graph, self.captured = Graph(self.captured), None
        return graph

    def add(self, operation):
        if self.captured is not None:
            self.captured.append(operation)
        elif self.immediate:
            operation()
        else:
            self.queue.append(("do", operation))

    def step(self):
        """Do the first operation; return whether that was possible."""
        if not self.queue:
            return False
        kind, what = self.queue[0]
        if kind == "wait" and not what.done:
            return False
        self.queue.popleft()
        if kind == "record":
            what.done = True
        elif kind == "do":
            what()
        return True

    def some(self):
        """Do some operations, in some order."""
        with _order:
            self._some()

    def _some(self):
        for _ in range(random.randint(1, 4)):
            streams = [stream for stream in self.together if stream.queue]
            random.shuffle(streams)
            if streams and not any(stream.step() for stream in streams):
                # Others may raise a word in memory.
                if not any(isinstance(stream.queue[0][1], compiled.Words) for stream in streams):
                    raise AssertionError("streams wait for each other for ever")
                time.sleep(1e-4)

    @property
    def done(self):
        """Whether all operations are done; some of them are now."""
        self.some()
        return not self.queue

    def synchronize(self):
        self.some()
        while self.queue:
            self.some()

    def use(self):
        _current.stream = self
        return self

    def __enter__(self):
        # What arrays do is done at once: after all that is queued here.
        self.synchronize()
        _stack().append(self)
        return self.use()

    def __exit__(self, *args):
        # As CuPy's: what `use` has set is forgotten.
        _stack().pop()
        _current.stream = _stack()[-1] if _stack() else None


def _stack():
    if not hasattr(_current, "stack"):
        _current.stack = []
    return _current.stack


def current_stream(default):
    """Return the current stream of this thread."""
    return getattr(_current, "stream", None) or default


class Graph:
    """The work that was put on a stream while that was captured."""

    def __init__(self, operations):
        self.operations = operations

    def upload(self, stream):
        pass

    def launch(self, stream):
        for operation in self.operations:
            if isinstance(operation, compiled.AtOnce):
                operation()
            else:
                stream.add(operation)


def settle(pointer):
    """Do all operations of a stream."""
    if (stream := _streams.get(pointer)) is not None:
        stream.synchronize()


def on_stream(pointer, operation):
    """Do something when a stream does it."""
    stream = _streams.get(pointer)
    if stream is None:
        operation()
    else:
        stream.add(operation)
