"""Arrays in the memory of other processes of this host, by Linux's cross memory attach (``process_vm_readv``).

The process that has the arrays lends them: it tells where they lie, and keeps them as they are until the end of the
run. The other one borrows: it copies them into memory of its own. So a matrix is copied once, where a socket copies it
twice and takes both event loops. Both processes must be of one user, one host and one PID namespace; where the system
forbids such reads, as containers may, `process_name` is empty from the first attempt on.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.numeric.types import dtype_from_name

# Less than this is sent with the answer (bytes in all, and in each stretch of memory: the system looks up its pages).
_LEAST_BYTES, _LEAST_STRETCH = 2**16, 2**9
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
        return array.ctypes.data, list(array.shape), array.dtype.name, order, step
    return None


def borrow(loan: Loan) -> list[NDArray[Any]]:
    """Return copies of lent arrays, in the memory order that they have there."""
    global _refused
    process, address, proof, described = loan
    try:
        found = np.empty(len(proof), np.uint8)
        _read(process, found, np.array([[address, found.nbytes]], np.uint64))
        if found.tobytes() != proof:
            raise PermissionError(errno.EPERM, f"process {process} is not the one that lends")
        return [_read_array(process, *one) for one in described]
    except OSError as error:
        _refused |= error.errno in (errno.EPERM, errno.ENOSYS)
        raise


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
            done = _libc().process_vm_readv(
                process,
                ctypes.c_void_p(local.ctypes.data),
                ctypes.c_ulong(1),
                ctypes.c_void_p(some.ctypes.data),
                ctypes.c_ulong(len(some)),
                ctypes.c_ulong(0),
            )
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
