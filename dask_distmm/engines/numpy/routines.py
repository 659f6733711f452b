"""SciPy's BLAS and LAPACK by address, so that they work in place on parts of matrices.

``scipy.linalg.blas`` and ``scipy.linalg.lapack`` copy a matrix whose columns do not follow each other at once, as the
columns of a part do not. SciPy documents how to reach its libraries from outside: ``scipy.linalg.cython_blas`` and
``cython_lapack`` hold each routine's address in a capsule whose name is the routine's C signature. A call through
ctypes releases the GIL, so Dask's event loop goes on meanwhile. These two are loaded without the rest of
``scipy.linalg``, which would take 5 MiB and 30 ms of each worker.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

from numpy.typing import NDArray

from dask_distmm.errors import EngineError

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
    found = re.fullmatch(r"void \((.*)\)", signature.decode())
    if not found or "int *" not in (kinds := found[1].split(", ")):
        return None
    types: dict[str, Any] = {"char *": ctypes.c_char_p, "int *": ctypes.POINTER(ctypes.c_int)}
    prototype = ctypes.CFUNCTYPE(None, *(types.get(kind, ctypes.c_void_p) for kind in kinds))
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
