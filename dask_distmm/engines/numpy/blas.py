"""``gemm(a, b, c)``: c += a @ b, in place, on matrices as they lie in memory.

NumPy's ``matmul`` can't add to its output; a sum over panels of k would read and write every result once
more for each panel. BLAS can. SciPy documents how to reach its BLAS from outside:
``scipy.linalg.cython_blas.__pyx_capi__`` holds each routine's address in a capsule whose name is the
routine's C signature. A call through ctypes releases the GIL, so Dask's event loop goes on meanwhile.

Where B is A's own memory turned around, as in ``X.T @ X``, half of the operations are left out: the tiles on the
diagonal of the product are `syrk` or `herk`, and each of the others is added to its mirror image, too.

A row-major matrix is the column-major one of its transpose, so ``C += A B`` in rows is ``C' += B' A'`` in
columns, and every matrix whose rows or columns are contiguous is used without a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import scipy.linalg.cython_blas
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

__all__ = ["blas_threads", "gemm"]

_PREFIX = {"f": "s", "d": "d", "F": "c", "D": "z"}
# Rows of a tile of a symmetric product, which is held besides: 8 MiB in float64.
_TILE = 1024
# Products of fewer rows, or a shorter k, are not worth the mirroring.
_SYMMETRIC = 64


def gemm(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], conjugated: tuple[bool, bool] = (False, False)) -> None:
    """Compute ``c += a @ b`` in place.

    Parameters
    ----------
    a, b, c
        Matrices (m, k), (k, n) and (m, n) of one type. float32, float64, complex64 and complex128 go to
        BLAS, other types to ``numpy.matmul`` (for bool, ``+`` is "or").
    conjugated
        Whether the conjugates of `a` and `b` are meant. BLAS conjugates what it also transposes: without a copy if the
        memory order of the operand is the other one than that of `c`.
    """
    routine = _routine(c.dtype.char)
    if 0 in (*a.shape, *b.shape):
        return
    if routine is None or a.dtype != c.dtype or b.dtype != c.dtype or max(*a.shape, *b.shape) >= 2**31:
        a, b = (np.conjugate(x) if conj else x for x, conj in zip((a, b), conjugated, strict=True))
        np.add(c, np.matmul(a, b), out=c)
        return
    if _symmetric(a, b, conjugated):
        _add_symmetric(a, conjugated, c)
        return
    if not _column_major(c):
        a, b, c, conjugated = b.T, a.T, c.T, conjugated[::-1]
        if not _column_major(c):
            raise ValueError(f"c has strides {c.T.strides}: neither its rows nor its columns are contiguous")
    a, transa = _operand(a, conjugated[0])
    b, transb = _operand(b, conjugated[1])
    m, n, k = (ctypes.c_int(size) for size in (*c.shape, a.shape[1]))
    lda, ldb = _leading(a if transa == b"N" else a.T), _leading(b if transb == b"N" else b.T)
    one, ref = np.ones(1, c.dtype), ctypes.byref
    routine(
        transa, transb, ref(m), ref(n), ref(k), one.ctypes.data, a.ctypes.data, ref(lda),
        b.ctypes.data, ref(ldb), one.ctypes.data, c.ctypes.data, ref(_leading(c)),
    )  # fmt: skip


def _symmetric(a: NDArray[Any], b: NDArray[Any], conjugated: tuple[bool, bool]) -> bool:
    """Whether ``a @ b`` is symmetric, or Hermitian where complex, because both are the same numbers in memory."""
    return (
        min(a.shape) >= _SYMMETRIC
        and a.ctypes.data == b.ctypes.data
        and a.shape == b.shape[::-1]
        and a.strides == b.strides[::-1]
        and (a.dtype.kind == "f" or conjugated[0] != conjugated[1])
        and (_column_major(a) or _column_major(a.T))
    )


def _add_symmetric(x: NDArray[Any], conjugated: tuple[bool, bool], c: NDArray[Any]) -> None:
    """Compute ``c += x @ x.T``, of complex matrices with one of the two conjugated, by tiles of one triangle."""
    buffer = np.empty((min(_TILE, len(x)),) * 2, c.dtype)
    for r0 in range(0, len(x), _TILE):
        for c0 in range(0, r0 + 1, _TILE):
            rows, cols = x[r0 : r0 + _TILE], x[c0 : c0 + _TILE]
            tile = buffer.ravel()[: len(rows) * len(cols)].reshape(len(rows), len(cols), order="F")
            tile.fill(0)
            if r0 > c0:
                gemm(rows, cols.T, tile, conjugated)
            else:
                tile = _triangle(rows, conjugated, tile)
            c[r0 : r0 + _TILE, c0 : c0 + _TILE] += tile
            c[c0 : c0 + _TILE, r0 : r0 + _TILE] += tile.T.conj()


def _triangle(x: NDArray[Any], conjugated: tuple[bool, bool], out: NDArray[Any]) -> NDArray[Any]:
    """Return T with ``T + T^H`` the product of `x` with itself, a triangle; `out` is zero and column-major."""
    columns = _column_major(x)
    routine = _routine(out.dtype.char, "herk" if out.dtype.kind == "c" else "syrk")
    assert routine is not None
    trans = b"N" if columns else b"C" if out.dtype.kind == "c" else b"T"
    n, k = (ctypes.c_int(size) for size in x.shape)
    one, ref = np.ones(1, out.real.dtype), ctypes.byref
    lda = _leading(x if columns else x.T)
    routine(
        b"L", trans, ref(n), ref(k), one.ctypes.data, x.ctypes.data, ref(lda), one.ctypes.data, out.ctypes.data,
        ref(_leading(out)),
    )  # fmt: skip
    # Once in T, and once in its mirror image.
    out.reshape(-1, order="F")[:: len(out) + 1] *= 0.5
    # BLAS makes x @ x^H of columns, and conj(x) @ x^T of rows: each is the conjugate of the other.
    return out if columns == conjugated[1] or out.dtype.kind == "f" else out.conj()


def _column_major(x: NDArray[Any]) -> bool:
    """Whether the columns of `x` are contiguous and do not overlap."""
    rows, cols = x.shape
    step, lead = x.strides
    size = x.itemsize
    return (rows <= 1 or step == size) and (cols <= 1 or (lead % size == 0 and lead >= rows * size))


def _operand(x: NDArray[Any], conjugated: bool) -> tuple[NDArray[Any], bytes]:
    """Return `x`, copied only if it must be, and how BLAS has to read it."""
    if conjugated and _column_major(x.T):
        return x, b"C"
    if conjugated:
        x = np.conjugate(x)
    if _column_major(x):
        return x, b"N"
    return (x if _column_major(x.T) else np.ascontiguousarray(x)), b"T"


def _leading(x: NDArray[Any]) -> ctypes.c_int:
    """Return the leading dimension of a column-major matrix."""
    return ctypes.c_int(max(1, x.shape[0], x.strides[1] // x.itemsize if x.shape[1] > 1 else 0))


_threads_lock = threading.Lock()
_threads_users: list[Any] = []


@functools.cache
def _libraries() -> ThreadpoolController:
    """Return the BLAS libraries of this process. Finding them takes milliseconds; ours are there since the imports."""
    return ThreadpoolController()


@contextlib.contextmanager
def blas_threads(number: int) -> Iterator[None]:
    """Let BLAS use `number` threads of this process (nannies start workers with one).

    The setting belongs to the process: the first to enter sets it, the last to leave puts back what was.
    """
    with _threads_lock:
        limits = _threads_users[0] if _threads_users else _libraries().limit(limits=number, user_api="blas")
        _threads_users.append(limits)
    try:
        yield
    finally:
        with _threads_lock:
            limits = _threads_users.pop()
            if not _threads_users:
                limits.restore_original_limits()


@functools.cache
def _routine(char: str, name: str = "gemm") -> Callable[..., None] | None:
    """Return SciPy's BLAS routine for a type, or None if there is none with 32-bit integer arguments."""
    if char not in _PREFIX:
        return None
    capsules: Mapping[str, Any] = scipy.linalg.cython_blas.__pyx_capi__
    capsule = capsules[f"{_PREFIX[char]}{name}"]
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    signature = api.PyCapsule_GetName(capsule)
    if not re.match(rb"void \(char \*, char \*, int \*, int \*, ", signature):
        return None
    text, integer, data = ctypes.c_char_p, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p
    kinds: list[Any] = (
        [text, text, integer, integer, integer, data, data, integer, data, integer, data, data, integer]
        if name == "gemm"
        else [text, text, integer, integer, data, data, integer, data, data, integer]
    )
    return ctypes.CFUNCTYPE(None, *kinds)(api.PyCapsule_GetPointer(capsule, signature))
