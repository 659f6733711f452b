"""NumPy's functions that are matrix products, or factorizations, on Dask arrays: lazily, and as NumPy means them.

NumPy asks ``Array.__array_function__``. That calls Dask's function of the same name, which may mean something else
(``cholesky``), or computes the arrays, gathers them in this process and has NumPy multiply them here. While
`dask_distmm.enable` is in force these functions come before both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import dask.array
import dask.array.routines
import numpy as np
from dask.array.chunk_types import is_valid_chunk_type
from numpy.lib.array_utils import normalize_axis_tuple

from dask_distmm.arrays.fallback import added_in_64_bits
from dask_distmm.arrays.kinds import any_kind, kind_of
from dask_distmm.arrays.linalg import routed
from dask_distmm.arrays.linalg.array_api import chain, power
from dask_distmm.errors import PlanError
from dask_distmm.runtime.chunks import array_kind


def _left_to_numpy(*given: Any) -> bool:
    """Whether Dask's products of arrays have another type than NumPy's, or may lack what NumPy has."""
    arrays = [dask.array.asanyarray(x) for x in given]
    dtype = np.result_type(*(x.dtype for x in arrays))
    plain = all(array_kind(x._meta) in ("numpy", "cupy") for x in arrays)
    return not plain or dtype.kind in "mMOSU" or added_in_64_bits(dtype)


def _multi_dot(arrays: Sequence[Any], *, out: Any = None) -> Any:
    found = [dask.array.asanyarray(x) for x in arrays]
    if out is not None or len(found) < 2 or _left_to_numpy(*found):
        return NotImplemented
    if any(x.ndim != 2 for x in found[1:-1]) or not {found[0].ndim, found[-1].ndim} <= {1, 2}:
        return NotImplemented
    return chain(found, dask.array.routines.matmul)


def _matrix_power(a: Any, n: Any) -> Any:
    if a.ndim < 2 or not isinstance(n, int | np.integer) or _left_to_numpy(a):
        return NotImplemented  # other types, or an error that NumPy has to raise
    return power(a, int(n), dask.array.routines.matmul)


def _matmul(x1: Any, x2: Any, /) -> Any:
    return NotImplemented if _left_to_numpy(x1, x2) else dask.array.routines.matmul(x1, x2)


def contracted_axes(ndims: tuple[int, int], axes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of two operands that ``tensordot(axes=)`` names, from 0; wrong ones are a ValueError."""
    if isinstance(axes, Iterable):
        left, right = axes
    else:
        left, right = range(ndims[0] - axes, ndims[0]), range(axes)
    found = normalize_axis_tuple(_axes(left), ndims[0]), normalize_axis_tuple(_axes(right), ndims[1])
    if len(found[0]) != len(found[1]):
        raise ValueError(f"axes={axes!r} names {len(found[0])} and {len(found[1])} axes: expected as many of both")
    return found


def _axes(axes: Any) -> Any:
    return axes if isinstance(axes, Integral) else tuple(axes)


def _tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
    (left, right), shapes = contracted_axes((np.ndim(x1), np.ndim(x2)), axes), (np.shape(x1), np.shape(x2))
    # Dask's function takes a length of 1 for any length.
    if _left_to_numpy(x1, x2) or [shapes[0][i] for i in left] != [shapes[1][i] for i in right]:
        return NotImplemented
    return dask.array.routines.tensordot(x1, x2, axes=(left, right))


def _inner(a: Any, b: Any, /) -> Any:
    return NotImplemented if 0 in (np.ndim(a), np.ndim(b)) else _tensordot(a, b, axes=(-1, -1))


_OURS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.linalg.multi_dot: _multi_dot,
    np.linalg.matrix_power: _matrix_power,
    np.linalg.matmul: _matmul,
    np.linalg.tensordot: _tensordot,
    np.inner: _inner,
    **routed.NUMPYS,
}


def numpys_first(before: Callable[..., Any], wanted: Callable[[], bool]) -> Callable[..., Any]:
    """Return an ``Array.__array_function__`` that has these functions while `wanted` says so, and is `before` else."""

    @functools.wraps(before)
    def answer(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        ours = _OURS.get(func)
        if ours is not None and kind_of(self):
            ours = any_kind(ours)
        if ours is not None and wanted() and all(issubclass(type(self), x) or is_valid_chunk_type(x) for x in types):
            try:
                result = ours(*args, **kwargs)
            except PlanError:
                raise  # of the configuration
            except (TypeError, ValueError):
                # NumPy's function says what is wrong with the arguments, and takes some that Dask's refuses.
                result = NotImplemented
            if result is not NotImplemented:
                return result
        return before(self, func, types, args, kwargs)

    return answer
