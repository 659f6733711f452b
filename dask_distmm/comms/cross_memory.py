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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import ProtocolError
from dask_distmm.numeric.types import dtype_from_name

# Less than this is sent with the answer (bytes in all, and in each stretch of memory: the system looks up its pages).
_LEAST_BYTES, _LEAST_STRETCH = 2**16, 2**9
# The system reads this many stretches in a call (IOV_MAX).
_STRETCHES = 1024
# One thread copies 4 to 6 GB/s, and two twice as much: parts of this many bytes are read by at most this many threads,
# which leave most cores to others.
_PART_BYTES, _MOST_READERS, _CORES_A_READER = 2**24, 4, 4
# Dense arrays of up to this many bytes each are read together, by one call.
_SMALL_BYTES = 2**20
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
    libc.process_vm_readv.restype = ctypes.c_ssize_t
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
    if not is_near(borrower) or sum(array.nbytes for array in arrays) < _LEAST_BYTES:
        return None
    described = [_describe_array(array) for array in arrays]
    if any(one is None for one in described):
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
    try:
        # Small dense arrays come in one call with the proof.
        found = np.empty(len(proof), np.uint8)
        targets: list[NDArray[Any] | None] = [_dense(*one) for one in described]
        pieces = [(found, address), *((x, one[0]) for x, one in zip(targets, described, strict=True) if x is not None)]
        if not _read_pieces(process, pieces):
            _read(process, found, np.array([[address, found.nbytes]], np.uint64))
            targets = [None] * len(described)
        if found.tobytes() != proof:
            raise PermissionError(errno.EPERM, f"process {process} is not the one that lends")
        return [_read_array(process, *one) if x is None else x for x, one in zip(targets, described, strict=True)]
    except OSError as error:
        _refused |= error.errno in (errno.EPERM, errno.ENOSYS)
        raise


def _dense(_: int, shape: Sequence[int], dtype: str, order: Any, step: int) -> NDArray[Any] | None:
    """Return memory for a lent array that one stretch of few bytes fills, or None."""
    out = np.empty(shape, dtype_from_name(dtype), order=order)
    line = out.itemsize * (shape[-1] if order == "C" else shape[0])
    return out if out.nbytes <= _SMALL_BYTES and step in (0, line) else None


def _read_pieces(process: int, pieces: Sequence[tuple[NDArray[Any], int]]) -> bool:
    """Fill arrays from addresses of another process by one call; return False if that has not read all of them."""
    local: list[int] = []
    remote: list[int] = []
    wanted = 0
    for target, start in pieces:
        size = target.nbytes
        local += target.__array_interface__["data"][0], size
        remote += start, size
        wanted += size
    stretches = ctypes.c_uint64 * len(local)
    to, of = stretches(*local), stretches(*remote)
    return _readv(process, (ctypes.addressof(to), len(pieces)), (ctypes.addressof(of), len(pieces))) == wanted


def _readv(process: int, local: tuple[int, int], remote: tuple[int, int]) -> int:
    """Fill stretches of memory from those of another process; return how many bytes were read, or -1.

    Both are given as the address and the number of pairs of an address and bytes.
    """
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    lists = pointer(local[0]), count(local[1]), pointer(remote[0]), count(remote[1])
    return int(_libc().process_vm_readv(process, *lists, count(0)))


def _read_array(process: int, address: int, shape: Sequence[int], dtype: str, order: Any, step: int) -> NDArray[Any]:
    out = np.empty(shape, dtype_from_name(dtype), order=order)
    lines, size = (out.shape if order == "C" else out.T.shape)[0] if out.ndim == 2 else 1, out.nbytes
    if not size:
        return out
    if step in (0, size // lines):
        lines, step = 1, 0
    stretches = np.empty((lines, 2), np.uint64)
    stretches[:, 0] = address + np.arange(lines) * step
    stretches[:, 1] = size // lines
    _read(process, out.reshape(-1, order="A").view(np.uint8), stretches)
    return out


def _read(process: int, target: NDArray[np.uint8], stretches: NDArray[np.uint64]) -> None:
    """Fill a vector from stretches of another process' memory, ``(address, bytes)`` each; large ones in threads."""
    readers = _readers() if target.nbytes >= 2 * _PART_BYTES else None
    if readers is None:
        _read_part(process, target, stretches)
        return
    parts = list(_parts(stretches.astype(np.int64), _PART_BYTES))
    for future in [readers.submit(_read_part, process, target[at : at + size], some) for at, size, some in parts]:
        future.result()


@functools.cache
def _readers() -> ThreadPoolExecutor | None:
    """Return threads that read parts at the same time; None where this process has few cores."""
    threads = min(_MOST_READERS, len(os.sched_getaffinity(0)) // _CORES_A_READER)
    return ThreadPoolExecutor(threads, thread_name_prefix="distmm-borrow") if threads > 1 else None


def _parts(stretches: NDArray[np.int64], size: int) -> Iterator[tuple[int, int, NDArray[np.uint64]]]:
    """Yield parts of up to about a size: where each begins in the target, its bytes, and its stretches."""
    counts = -(-stretches[:, 1] // size)
    which = np.repeat(np.arange(len(stretches)), counts)
    begin = size * (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts))
    lengths = np.minimum(size, stretches[which, 1] - begin)
    ends = np.cumsum(lengths)
    pieces = np.stack([stretches[which, 0] + begin, lengths], 1).astype(np.uint64)
    cuts = [*np.flatnonzero(np.diff((ends - lengths) // size)).tolist(), len(pieces) - 1]
    for first, last in itertools.pairwise([-1, *cuts]):
        at = int(ends[first + 1] - lengths[first + 1])
        yield at, int(ends[last]) - at, pieces[first + 1 : last + 1]


def _read_part(process: int, target: NDArray[np.uint8], stretches: NDArray[np.uint64]) -> None:
    """Fill a vector from stretches of another process' memory."""
    at = 0
    for first in range(0, len(stretches), _STRETCHES):
        some = stretches[first : first + _STRETCHES].copy()
        while len(some):
            wanted = int(some[:, 1].sum())
            local = np.array([[target.ctypes.data + at, wanted]], np.uint64)
            done = _readv(process, (local.ctypes.data, 1), (some.ctypes.data, len(some)))
            if done <= 0:
                number = ctypes.get_errno() if done else errno.EFAULT
                raise OSError(number, f"process {process} can't be read: {os.strerror(number)}")
            at += done
            # The system stops after 2 GiB; go on in the stretch that it has begun.
            ends = np.cumsum(some[:, 1])
            whole = int(np.searchsorted(ends, done, "right"))
            begun = done - int(ends[whole - 1] if whole else 0)
            some = some[whole:]
            if begun:
                some[0] += np.array([begun, 0], np.uint64)
                some[0, 1] -= np.uint64(begun)


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
    """Have all reads and writes before this done before those after it, on any processor."""
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
        for one in described or [(0, [0], "", "C", 0)]:
            assert one is not None
            address, shape, dtype, order, step = one
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
        while (found := take(wanted, None)) is None:
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
        if found[0][2] < 0:
            return None
        try:
            return borrow((*self._loan, [_described(*one[3:]) for one in found if one[-2].strip(b"\0")]))
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
