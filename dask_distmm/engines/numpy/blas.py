"""``gemm(a, b, c)``: c += a @ b, in place, on matrices as they lie in memory.

NumPy's ``matmul`` can't add to its output; a sum over panels of k would read and write every result once
more for each panel. BLAS can, and `routines` reaches it.

Where B is A's own memory, transposed, as in ``X.T @ X``, half of the operations are left out: `add_lower` adds to the
lower triangle of a sum of such products, and `mirror` completes the sum.

A row-major matrix is the column-major one of its transpose, so ``C += A B`` in rows is ``C' += B' A'`` in
columns, and every matrix whose rows or columns are contiguous is used without a copy.

``scipy.linalg.blas`` and ``scipy.linalg.lapack`` copy a matrix whose columns do not follow each other at once, as the
columns of a part do not. SciPy documents how to reach its libraries from outside: ``scipy.linalg.cython_blas`` and
``cython_lapack`` hold each routine's address in a capsule whose name is the routine's C signature. A call through
ctypes releases the GIL, so Dask's event loop continues meanwhile. These two are loaded without the rest of
``scipy.linalg``, which would take 5 MiB and 30 ms of each worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from dask_distmm.errors import EngineError

# SciPy's BLAS and LAPACK by address, so that they work in place on parts of matrices


_PREFIX = {"f": "s", "d": "d", "F": "c", "D": "z"}


@functools.cache
def _capsules(name: str) -> dict[str, Any]:
    """Return the capsules of all routines of one of SciPy's two modules."""
    full = f"scipy.linalg.{name}"
    if full in sys.modules:
        return dict(sys.modules[full].__pyx_capi__)
    package = importlib.util.find_spec("scipy.linalg")
    spec = PathFinder.find_spec(full, package.submodule_search_locations) if package is not None else None
    if spec is None or spec.loader is None:
        raise EngineError(f"{full} can't be found; install SciPy again")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # An import by somebody else is to find it new, and to make it an attribute of its package.
    sys.modules.pop(full, None)
    return dict(module.__pyx_capi__)


@functools.cache
def routine(char: str, name: str) -> Callable[..., None] | None:
    """Return a routine of BLAS or LAPACK for a type, or None if there is none with 32-bit integer arguments."""
    if char not in _PREFIX:
        return None
    full = f"{_PREFIX[char]}{name}"
    capsule = _capsules("cython_blas").get(full) or _capsules("cython_lapack").get(full)
    if capsule is None:
        return None
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    signature = api.PyCapsule_GetName(capsule)
    match = re.fullmatch(r"void \((.*)\)", signature.decode())
    if not match or "int *" not in (kinds := match[1].split(", ")):
        return None
    types = (ctypes.c_char_p if kind == "char *" else ctypes.c_void_p for kind in kinds)
    prototype = ctypes.CFUNCTYPE(None, *types)
    return prototype(api.PyCapsule_GetPointer(capsule, signature))


def column_major(x: NDArray[Any]) -> bool:
    """Whether the columns of `x` are contiguous and do not overlap."""
    rows, cols = x.shape
    step, lead = x.strides
    size = x.itemsize
    return (rows <= 1 or step == size) and (cols <= 1 or (lead % size == 0 and lead >= rows * size))


def ld_of(x: NDArray[Any]) -> ctypes.c_int:
    """Return the leading dimension of a column-major matrix."""
    return ctypes.c_int(max(1, x.shape[0], x.strides[1] // x.itemsize if x.shape[1] > 1 else 0))


# ``gemm(a, b, c)``: c += a @ b, in place, on matrices as they lie in memory


# Tiles of a matrix and its transpose that a core's cache has room for.
_MIRRORED = 256


def gemm(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], conjugated: tuple[bool, bool] = (False, False)) -> None:
    """Compute ``c += a @ b`` in place."""
    call = routine(c.dtype.char, "gemm")
    if 0 in (*a.shape, *b.shape):
        return
    if call is None or a.dtype != c.dtype or b.dtype != c.dtype or max(*a.shape, *b.shape) >= 2**31:
        a, b = (np.conjugate(x) if conj else x for x, conj in zip((a, b), conjugated, strict=True))
        np.add(c, np.matmul(a, b), out=c)
        return
    if not column_major(c):
        a, b, c, conjugated = b.T, a.T, c.T, conjugated[::-1]
        if not column_major(c):
            raise ValueError(f"c has strides {c.T.strides}: neither its rows nor its columns are contiguous")
    a, transa = _operand(a, conjugated[0])
    b, transb = _operand(b, conjugated[1])
    m, n, k = (ctypes.c_int(size) for size in (*c.shape, a.shape[1]))
    lda, ldb = ld_of(a if transa == b"N" else a.T), ld_of(b if transb == b"N" else b.T)
    unit, ref = np.ones(1, c.dtype), ctypes.byref
    call(
        transa, transb, ref(m), ref(n), ref(k), unit.ctypes.data, a.ctypes.data, ref(lda),
        b.ctypes.data, ref(ldb), unit.ctypes.data, c.ctypes.data, ref(ld_of(c)),
    )  # fmt: skip


def add_lower(x: NDArray[Any], c: NDArray[Any], conjugated: tuple[bool, bool] = (False, False)) -> bool:
    """Add ``x @ x.T``, of complex matrices with one of the two conjugated, to the lower triangle of `c`, if it can.

    Returns whether it has.
    """
    is_complex = c.dtype.kind == "c"
    call = routine(c.dtype.char, "herk" if is_complex else "syrk")
    columns, lower = column_major(x), column_major(c)
    fits = x.dtype == c.dtype and c.dtype.kind in "fc" and max(x.shape) < 2**31
    # BLAS makes x @ x^H of columns, and conj(x) @ x^T of rows; in rows the lower triangle is the upper one of the
    # transpose, which is the conjugate.
    fits &= not is_complex or (columns == conjugated[1]) == lower
    if call is None or not fits or not (columns or column_major(x.T)) or not (lower or column_major(c.T)):
        return False
    n, k = (ctypes.c_int(size) for size in x.shape)
    unit, ref = np.ones(1, c.real.dtype), ctypes.byref
    trans = b"N" if columns else b"C" if is_complex else b"T"
    call(
        b"L" if lower else b"U", trans, ref(n), ref(k), unit.ctypes.data, x.ctypes.data,
        ref(ld_of(x if columns else x.T)), unit.ctypes.data, c.ctypes.data, ref(ld_of(c if lower else c.T)),
    )  # fmt: skip
    return True


def mirror(c: NDArray[Any]) -> None:
    """Copy the lower triangle of a square matrix over its upper one, conjugated."""
    for r0 in range(0, len(c), _MIRRORED):
        rows = slice(r0, r0 + _MIRRORED)
        reflect(c[rows, :r0], c[:r0, rows])
        tile = c[rows, rows]
        reflect(np.tril(tile, -1), upper := np.empty_like(tile))
        tile[...] = np.tril(tile) + upper


def reflect(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Copy the conjugate of the transpose of a matrix to another one, by tiles that stay in the caches."""
    for r0 in range(0, source.shape[0], _MIRRORED):
        for c0 in range(0, source.shape[1], _MIRRORED):
            tile = source[r0 : r0 + _MIRRORED, c0 : c0 + _MIRRORED].T
            target[c0 : c0 + _MIRRORED, r0 : r0 + _MIRRORED] = tile.conj() if tile.dtype.kind == "c" else tile


def _operand(x: NDArray[Any], conjugated: bool) -> tuple[NDArray[Any], bytes]:
    """Return `x`, copied only if it must be, and how BLAS has to read it."""
    if conjugated and column_major(x.T):
        return x, b"C"
    if conjugated:
        x = np.conjugate(x)
    if column_major(x):
        return x, b"N"
    return (x if column_major(x.T) else np.ascontiguousarray(x)), b"T"


_threads_lock = threading.Lock()
_threads_users: list[Any] = []


@functools.cache
def _libraries() -> ThreadpoolController:
    """Return the BLAS libraries of this process, ours among them. Finding them takes milliseconds."""
    routine("d", "gemm")
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
