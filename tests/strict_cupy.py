"""A stand-in for CuPy whose arrays refuse what CuPy's refuse: to become NumPy's silently, or to meet them."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import numpy as np
import scipy.linalg
from numpy.lib.mixins import NDArrayOperatorsMixin

# Functions that make arrays of anything where `like` is an array of CuPy.
_MAKING = ("arange", "array", "asanyarray", "asarray", "empty", "eye", "full", "identity", "ones", "zeros")
# Of NumPy's array functions these are not in CuPy.
_MISSING = ("block", "insert", "linalg.multi_dot", "linalg.matrix_transpose")


class ndarray(NDArrayOperatorsMixin):  # noqa: N801 - as CuPy's
    """An array in the memory of a device that is not there."""

    __module__ = "cupy"
    __array_priority__ = 100
    device = types.SimpleNamespace(id=0)

    def __init__(self, held: Any) -> None:
        self._held = np.asarray(held)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return wrapped(getattr(ufunc, method)(*map(held, inputs), **{key: held(x) for key, x in kwargs.items()}))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func.__name__ in _MAKING:
            return wrapped(func(*(x._held if isinstance(x, ndarray) else x for x in args), **kwargs))
        if func.__name__ == "split":
            return wrapped(func(*on_host(args), **kwargs))
        if f"{func.__module__}.{func.__name__}".removeprefix("numpy.") in _MISSING:
            return NotImplemented
        return wrapped(func(*held(args), **held(kwargs)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._held, name)
        if not callable(found):
            return wrapped(found)
        return lambda *args, **kwargs: wrapped(found(*held(args), **held(kwargs)))

    def __getitem__(self, index: Any) -> Any:
        # CuPy has arrays where NumPy has scalars, and takes NumPy's arrays of indices.
        return wrapped(np.asarray(self._held[on_host(index)]))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._held[on_host(index)] = held(value)

    def __len__(self) -> int:
        return len(self._held)

    def __bool__(self) -> bool:
        return bool(self._held)

    def __int__(self) -> int:
        return int(self._held)

    def __float__(self) -> float:
        return float(self._held)

    def __complex__(self) -> complex:
        return complex(self._held)

    def __index__(self) -> int:
        return self._held.__index__()

    def __dask_tokenize__(self) -> Any:
        return "cupy", self._held

    def __reduce__(self) -> Any:
        return ndarray, (self._held,)

    def item(self) -> Any:
        return self.get().item()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        return self._held.copy()

    def tolist(self) -> Any:
        return self._held.tolist()


def on_host(x: Any) -> Any:
    """Return NumPy's array of one of ours, NumPy's own as they are."""
    if type(x) in (tuple, list):
        return type(x)(map(on_host, x))
    return x._held if isinstance(x, ndarray) else x


def held(x: Any) -> Any:
    """Return NumPy's array of one of ours; a TypeError of NumPy's own, which CuPy does not take."""
    if isinstance(x, ndarray):
        return x._held
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}")
    if isinstance(x, dict):
        return {key: held(value) for key, value in x.items()}
    return type(x)(map(held, x)) if type(x) in (tuple, list) else x


def wrapped(x: Any) -> Any:
    if isinstance(x, np.ndarray | np.generic) and not isinstance(x, np.dtype):
        return ndarray(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(wrapped, x))
    if type(x) is tuple and not all(isinstance(one, int) for one in x):
        return tuple(map(wrapped, x))
    return [wrapped(one) for one in x] if type(x) is list else x


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        found = getattr(sys.modules["numpy"], name)
        if not callable(found) or isinstance(found, type):
            return found
        if name in _MAKING:
            return lambda *args, **kwargs: wrapped(found(*map(on_host, args), **kwargs))
        return lambda *args, **kwargs: wrapped(found(*held(args), **held(kwargs)))


def modules() -> dict[str, Any]:
    """Return the stand-ins for the modules, by their names."""
    cupy: Any = _Module("cupy")
    cupy.ndarray, cupy.asnumpy = ndarray, lambda x, **kwargs: x.get() if isinstance(x, ndarray) else np.asarray(x)
    linalg: Any = types.ModuleType("cupyx.scipy.linalg")
    linalg.solve_triangular = lambda a, b, **kwargs: wrapped(scipy.linalg.solve_triangular(held(a), held(b), **kwargs))
    scipy_of = types.SimpleNamespace(linalg=linalg)
    return {
        "cupy": cupy,
        "cupyx": types.SimpleNamespace(scipy=scipy_of, errstate=lambda **options: contextlib.nullcontext()),
        "cupyx.cusolver": types.SimpleNamespace(check_availability=lambda name: name == "geev"),
        "cupyx.scipy": scipy_of,
        "cupyx.scipy.linalg": linalg,
    }


class Kernels:
    """The kernels of the CPU, for arrays of the stand-in."""

    def __init__(self, kernels: Any) -> None:
        self._kernels, self.xp = kernels, sys.modules["cupy"]

    def product(self, a: Any, b: Any, out: Any = None, *, beta: float = 0) -> Any:
        """Multiply, as the BLAS of GPUs does."""
        found = wrapped(held(a) @ held(b))
        if out is not None:
            out[...] = found + beta * out if beta else found
        return found if out is None else out

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*on_host(args), **{key: on_host(x) for key, x in kwargs.items()})
            return result if name in ("host", "dots") else wrapped(result)

        return call
