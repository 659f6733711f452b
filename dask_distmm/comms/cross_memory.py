"""Arrays in the memory of other processes of this host, by Linux's cross memory attach (``process_vm_readv``).

The process that has the arrays lends them: it tells where they lie, and keeps them as they are until the end of the
run. The other one borrows: it copies them into memory of its own. So a matrix is copied once, where a socket copies it
twice and takes both event loops. Both processes must be of one user, one host and one PID namespace; where the system
forbids such reads, as containers may, `process_name` is empty from the first attempt on.

A loan comes with the answer to a request. Or the lender notes it on a `Board`, and borrowers wait until it is there:
then nobody sends anything, and a thread that waits is woken by the system (a futex), not by an event loop.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import platform
import secrets
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import ProtocolError
from dask_distmm.numeric.types import dtype_from_name

# Less than this is sent with the answer (bytes in all, and in each stretch of memory: the system looks up its pages).
LEAST_BYTES, _LEAST_STRETCH = 2**16, 2**9
# The system reads this many stretches in a call (IOV_MAX).
_STRETCHES = 1024
# One thread copies 4 to 6 GB/s, and two twice as much: parts of this many bytes are read by at most this many threads,
# which leave most cores to others.
_PART_BYTES, _MOST_READERS, _CORES_A_READER = 2**24, 4, 4
# prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY): if Yama lets only ancestors read, this lets all processes of the user.
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)

# By its address and value another process can tell that it reads this one, and not a later one of the same number.
_PROOF = np.frombuffer(secrets.token_bytes(16), np.uint8)

# A loan as plain types: number of the process, address of its proof, the proof; and for each array its address, shape,
# type, memory order and the bytes from one row (C) or column (F) to the next.
Loan = Sequence[Any]

_refused = False


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, number = ctypes.c_void_p, ctypes.c_ulong
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = ctypes.c_int, pointer, number, pointer, number, number
    return libc


def process_name() -> str:
    """Return a name of this process for those that it may be able to read: its host and PID namespace, and its number.

    Empty where a process can't read another one's memory at all.
    """
    home = _home()
    return f"{home} {os.getpid()}" if home and not _refused else ""


@functools.cache
def _home() -> str:
    if sys.platform != "linux":
        return ""
    try:
        _libc()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except (OSError, AttributeError):
        return ""


def is_near(borrower: str) -> bool:
    """Return whether another process, by its `process_name`, may be able to read this one."""
    home, _, process = borrower.rpartition(" ")
    return bool(home) and home == _home() and process != str(os.getpid())


def lend(arrays: Sequence[Any], borrower: str) -> Loan | None:
    """Return where arrays lie, or None if they had better be sent."""
    if not is_near(borrower) or sum(array.nbytes for array in arrays) < LEAST_BYTES:
        return None
    described = [_describe_array(array) for array in arrays]
    if any(x is None for x in described):
        return None
    _admit()
    return os.getpid(), _PROOF.ctypes.data, _PROOF.tobytes(), described


@functools.cache
def _admit() -> None:
    """Let other processes of this user read this one; an error means that nothing is in their way."""
    _libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


@functools.cache
def _name(dtype: np.dtype) -> str:
    return dtype.name


def _describe_array(array: NDArray[Any]) -> tuple[int, list[int], str, str, int] | None:
    """Return one array of a loan; None if its memory is in stretches that are too short."""
    if not isinstance(array, np.ndarray) or array.ndim > 2:
        return None
    for order, view in (("C", array), ("F", array.T)):
        if view.flags.c_contiguous:
            step = view.strides[0] if array.ndim == 2 and len(view) > 1 else 0
        elif array.ndim == 2 and view.strides[1] == array.itemsize and view.strides[0] > 0:
            step = view.strides[0]
            if view.shape[1] * array.itemsize < _LEAST_STRETCH:
                return None
        else:
            continue
        return array.__array_interface__["data"][0], list(array.shape), _name(array.dtype), order, step
    return None


def borrow(loan: Loan) -> list[NDArray[Any]]:
    """Return copies of lent arrays, in the memory order that they have there."""
    global _refused
    process, address, proof, described = loan
    copied = np.empty(len(proof), np.uint8)
    arrays: list[NDArray[Any]] = []
    # Small arrays come in one call with the proof.
    dense, strided = [(_address(copied), address, len(proof))], []
    for start, shape, dtype, order, step in described:
        arrays.append(out := np.empty(shape, dtype_from_name(dtype), order=order))
        lines = (shape[0 if order == "C" else -1] if len(shape) == 2 else 1) or 1
        line = out.nbytes // lines
        if step in (0, line):
            dense.append((_address(out), start, out.nbytes))
        else:
            first = np.array([_address(out), start, line])
            strided.append(first + np.arange(lines)[:, None] * np.array([line, step, 0]))
    table = np.concatenate([np.array(dense), *strided]) if strided else np.array(dense)
    readers = _readers() if sum(x.nbytes for x in arrays) >= 2 * _PART_BYTES else None
    try:
        if readers is None:
            _read_part(process, table)
        else:
            parts = [readers.submit(_read_part, process, some) for some in _parts(table, _PART_BYTES)]
            wait(parts)  # nobody writes to memory that an error has freed
            for part in parts:
                part.result()
        if copied.tobytes() != proof:
            raise PermissionError(errno.EPERM, f"process {process} is not the one that lends")
    except OSError as error:
        _refused |= error.errno in (errno.EPERM, errno.ENOSYS)
        raise
    return arrays


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


@functools.cache
def _readers() -> ThreadPoolExecutor | None:
    """Return threads that read parts at the same time; None where this process has few cores."""
    threads = min(_MOST_READERS, len(os.sched_getaffinity(0)) // _CORES_A_READER)
    return ThreadPoolExecutor(threads, thread_name_prefix="distmm-borrow") if threads > 1 else None


def _parts(table: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Cut a table of reads, as for `_read_part`, into parts of up to about a size."""
    counts = -(-table[:, 2] // size)
    pieces = table.repeat(counts, 0)
    begin = size * (np.arange(len(pieces)) - (np.cumsum(counts) - counts).repeat(counts))
    pieces[:, :2] += begin[:, None]
    pieces[:, 2] = np.minimum(size, pieces[:, 2] - begin)
    starts = np.cumsum(pieces[:, 2]) - pieces[:, 2]
    return np.split(pieces, np.flatnonzero(np.diff(starts // size)) + 1)


def _read_part(process: int, table: NDArray[np.int64]) -> None:
    """Fill memory from another process' memory: address here, address there, and bytes of each stretch."""
    for first in range(0, len(table), _STRETCHES):
        some = table[first : first + _STRETCHES]
        while len(some):
            # The system has lists of addresses and bytes.
            here, there, ends = some[:, ::2].copy(), some[:, 1:].copy(), some[:, 2].cumsum()
            done = _libc().process_vm_readv(process, _address(here), len(here), _address(there), len(there), 0)
            if done == ends[-1]:
                break
            if done <= 0:
                error = ctypes.get_errno() if done else errno.EFAULT
                raise OSError(error, f"process {process} can't be read: {os.strerror(error)}")
            # The system stops after 2 GiB; go on in the stretch that it has begun.
            whole = int(ends.searchsorted(done, "right"))
            begun = done - int(ends[whole - 1] if whole else 0)
            some = some[whole:]
            if begun:
                some = np.concatenate([some[:1] + np.array([begun, begun, -begun]), some[1:]])


# Boards: loans that nobody asks for


# A record is one array of a loan: the loan's key (a text of up to 16 bytes, a number), how many arrays of it follow,
# or -1 where borrowers must ask for them; address, axes, rows, columns, step, type, memory order. It has no type where
# a loan has no array.
_KEY_BYTES = 16
_RECORD = struct.Struct(f"<{_KEY_BYTES}s q q Q 4q 23s c")
# A board begins with a proof and the number of records so far. It has room for the last 4096, and for loans of up to 64
# arrays.
_COUNT, _COUNT_AT, _FIRST = struct.Struct("<Q"), len(_PROOF), 64
_RECORDS, _MOST_ARRAYS = 4096, 64
_BOARD_BYTES = _FIRST + _RECORDS * _RECORD.size
# System calls of futexes. Of other processors the numbers are not known here: they have no boards.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 2**31 - 1
# A borrower looks so often before it sleeps (some 30 us, as long as it takes to be woken), and sleeps no longer than
# this before it looks whether its run was ended.
_LOOKS, _SLEEP_NS = 100, 200_000_000
_FENCE = threading.Lock()


def _fence() -> None:
    """Order memory accesses: all before this are visible before any after it, on any processor."""
    for _ in range(2):
        with _FENCE:
            pass


class Board:
    """What a process lends to others of its host during a run: a log in memory that they map, and can't write to."""

    def __init__(self) -> None:
        self._file = os.memfd_create("distmm-board")
        self._close_file = weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, _BOARD_BYTES)
        self._memory = mmap.mmap(self._file, _BOARD_BYTES)
        self._memory[:_COUNT_AT] = _PROOF.tobytes()
        self._counter = ctypes.addressof(ctypes.c_char.from_buffer(self._memory, _COUNT_AT))
        self._count = 0
        _admit()

    def close(self) -> None:
        """Free it; who has mapped it keeps what is there."""
        self._memory.close()
        self._close_file()

    @staticmethod
    def possible() -> bool:
        """Whether this process can have one."""
        return bool(_FUTEX and hasattr(os, "memfd_create") and process_name())

    def offer(self) -> list[Any]:
        """Return where it is, in plain types."""
        return [_home(), os.getpid(), self._file, _PROOF.ctypes.data, _PROOF.tobytes()]

    def lend(self, key: tuple[str, int], arrays: Sequence[Any]) -> None:
        """Lend arrays, which stay as they are until all who need them have them; those that can't be read are noted."""
        described = [_describe_array(x) if type(x) is np.ndarray else None for x in arrays]
        name, number, left = key[0].encode(), key[1], max(0, len(arrays) - 1)
        if len(name) > _KEY_BYTES:
            raise ProtocolError(f"{key[0]!r} has {len(name)} bytes: expected a kind of at most {_KEY_BYTES} bytes")
        if None in described or len(arrays) > _MOST_ARRAYS:
            described, left = [], -1
        for entry in described or [(0, [0], "", "C", 0)]:
            assert entry is not None
            address, shape, dtype, order, step = entry
            at, axes = _FIRST + self._count % _RECORDS * _RECORD.size, len(shape)
            rows, cols = (*shape, 0, 0)[:2]
            record = name, number, left, address, axes, rows, cols, step, dtype.encode(), order.encode()
            _RECORD.pack_into(self._memory, at, *record)
            self._count, left = self._count + 1, left - 1
        _fence()
        _COUNT.pack_into(self._memory, _COUNT_AT, self._count)
        _libc().syscall(_FUTEX, ctypes.c_void_p(self._counter), _FUTEX_WAKE, _ALL, None, None, 0)


class BoardReader:
    """Another process' board. OSError where this process can't read it."""

    def __init__(self, offer: Sequence[Any]) -> None:
        home, self._process, number, address, proof = offer
        if not Board.possible() or home != _home():
            raise PermissionError(errno.EPERM, "it is on another host, or of another user")
        # If the board was closed, the number may be that of any file, a pipe too.
        file = os.open(f"/proc/{self._process}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            if os.fstat(file).st_size != _BOARD_BYTES or os.pread(file, _COUNT_AT, 0) != proof:
                raise PermissionError(errno.EPERM, f"process {self._process} is not the one that lends")
            self._memory = mmap.mmap(file, _BOARD_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._loan = self._process, address, proof
        self._counter = np.frombuffer(self._memory, np.uint8).ctypes.data + _COUNT_AT
        # Records read so far; loans that are there and were not borrowed yet, by key; whether some were not read.
        self._seen, self._missed = 0, False
        self._lent: dict[tuple[bytes, int], list[tuple[Any, ...]]] = {}

    def close(self) -> None:
        """Free it."""
        self._memory.close()

    def borrow(self, key: tuple[str, int], check: Callable[[], None], *, again: bool = False) -> list[Any] | None:
        """Return copies of what is lent under a key, once it is; None if it has to be asked for.

        `check` raises if the run is over. `again`: it may be borrowed another time.
        """
        wanted, looks = (key[0].encode(), key[1]), 0
        take = self._lent.get if again else self._lent.pop
        while (slots := take(wanted, None)) is None:
            (count,) = _COUNT.unpack_from(self._memory, _COUNT_AT)
            if count > self._seen:
                self._read(count)
            elif self._missed:
                return None
            elif looks < _LOOKS:
                looks += 1
            else:
                check()
                self._sleep(count)
        if slots[0][2] < 0:
            return None
        try:
            return borrow((*self._loan, [_described(*x[3:]) for x in slots if x[-2].strip(b"\0")]))
        except OSError:
            self._missed = True
            return None

    def _read(self, count: int) -> None:
        """Read the records up to a number of them; those that were overwritten meanwhile are missed."""
        _fence()
        places = range(self._seen, count) if count - self._seen <= _RECORDS - _MOST_ARRAYS else ()
        records = [_RECORD.unpack_from(self._memory, _FIRST + x % _RECORDS * _RECORD.size) for x in places]
        _fence()
        (later,) = _COUNT.unpack_from(self._memory, _COUNT_AT)
        if not places or later - self._seen > _RECORDS - _MOST_ARRAYS:
            self._missed, records = True, []
        self._seen = count
        for record in records:
            self._lent.setdefault((record[0].rstrip(b"\0"), record[1]), []).append(record)
        for key in [*itertools.islice(self._lent, max(0, len(self._lent) - _RECORDS))]:
            del self._lent[key]
            self._missed = True

    def _sleep(self, count: int) -> None:
        """Sleep until there are more records, or for some time."""
        until = (ctypes.c_long * 2)(0, _SLEEP_NS)
        counter, low = ctypes.c_void_p(self._counter), ctypes.c_uint(count % 2**32)
        _libc().syscall(_FUTEX, counter, _FUTEX_WAIT, low, until, None, 0)


def _described(
    address: int, axes: int, rows: int, cols: int, step: int, dtype: bytes, order: bytes
) -> tuple[int, list[int], str, str, int]:
    """Return what a record says of an array as `_describe_array` does."""
    return address, [rows, cols][:axes], dtype.rstrip(b"\0").decode(), order.decode(), step
