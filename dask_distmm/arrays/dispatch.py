"""``enable``, ``disable``, ``enabled``: route Dask's own ``@``, matmul, dot, tensordot and linear algebra here.

Dask has no hook for this. All its ways to multiply end in three functions, each reachable under several names:

========================================  ==================================
``@``, ``np.matmul``                      ``dask.array.routines.matmul``
``da.matmul``                             ``dask.array.matmul``
``Array.dot``, ``da.dot``, ``da.vdot``    ``dask.array.routines.tensordot``
``da.tensordot``, ``np.tensordot``        ``dask.array.tensordot``
``da.einsum``, ``np.einsum``, xarray      ``dask.array.einsum``
========================================  ==================================

While enabled, these names hold functions of ours, which pass all other calls on unchanged; so do those of the functions
of ``dask.array.linalg`` in `dask_distmm.arrays.linalg.routed`, in which most of NumPy's of the same names end. Others
of ``np.linalg``, which Dask lacks or which mean something else there, are in `dask_distmm.arrays.numpy_functions`.
Arrays of other kinds, which have names of their own, are in `dask_distmm.arrays.kinds`. ``rechunk`` does what it did,
and is noted for products (`dask_distmm.arrays.outputs`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from string import ascii_letters
from typing import Any

import dask.array
import numpy as np
from dask.array.core import Array

from dask_distmm.arrays.contraction import contract, einsum, parsed
from dask_distmm.arrays.fallback import why_leave
from dask_distmm.arrays.kinds import COMPAT_LINALG, any_kind, as_array, kinds, ndim_of, owners, planning
from dask_distmm.arrays.linalg import routed
from dask_distmm.arrays.numpy_functions import contracted_axes, numpys_first
from dask_distmm.arrays.outputs import rechunk
from dask_distmm.arrays.product import multiply
from dask_distmm.arrays.request import parse
from dask_distmm.arrays.sparse import is_sparse, multiply_sparse
from dask_distmm.config import enabled_setting, minimum_flops, raises_beyond_memory
from dask_distmm.engines.base import log
from dask_distmm.errors import MissingEngineError, ProjectedMemoryError

_lock = threading.RLock()
_switched_on = False
_contexts = 0
_replaced: dict[tuple[Any, str], Any] = {}


def enable() -> None:
    """Route Dask's matrix products here until `disable`. Doing it again changes nothing.

    Those of the package dask-array too, if it has been imported; so import it before, or do this again.

    Raises
    ------
    PlanError
        The config ``distmm.enabled`` has another value than true, false or null.
    """
    global _switched_on
    enabled_setting()
    with _lock:
        _switched_on = True
        _replace_functions()


def disable() -> None:
    """Undo `enable`: Dask's names hold exactly what they held before.

    Inside ``with enabled():`` of any thread routing continues until the last such block ends.
    """
    global _switched_on
    with _lock:
        _switched_on = False
        _uninstall_if_unused()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Route Dask's matrix products here inside a ``with`` block."""
    global _contexts
    with _lock:
        _contexts += 1
        _replace_functions()
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            _uninstall_if_unused()


def is_enabled() -> bool:
    """Whether Dask's matrix products are routed here now."""
    return (_switched_on or _contexts > 0) and enabled_setting() is not False


def _replace_functions() -> None:
    ways: dict[str, Callable[..., Any]] = {"matmul": _matmul, "tensordot": _tensordot, "einsum": _einsum}
    ways |= {"__matmul__": _matmul, "__rmatmul__": _reflected_matmul}
    places = owners()
    for owner in places:
        _replace(owner, {name: ours for name, ours in ways.items() if isinstance(owner, type) == name.startswith("__")})
    package = sys.modules.get("dask_array")
    if package is not None:
        _replace(package.linalg, routed.DASKS)
    if not planning():
        _replace(dask.array.linalg, routed.DASKS)
        _replace(dask.array, routed.STATISTICS)
        for owner in (dask.array, sys.modules["dask.array.rechunk"]):
            _replace(owner, {"rechunk": rechunk})
        for owner in places:
            if owner.__name__.endswith(COMPAT_LINALG):
                _replace(owner, routed.ARRAY_API, adds=True)
    for kind in {Array, getattr(package, "Array", Array)}:
        _replace(kind, {"__array_function__": numpys_first}, lambda make, before: make(before, is_enabled))


def _replace(
    owner: Any, ways: Mapping[str, Callable[..., Any]], around: Callable[..., Any] | None = None, *, adds: bool = False
) -> None:
    """Put functions of ours in place of those that a module or a class has under these names.

    With `adds` those that a module lacks come before NumPy's.
    """
    for name, ours in ways.items():
        before = getattr(owner, name, None)
        if (owner, name) not in _replaced and (before is not None or adds):
            _replaced[owner, name] = before
            replacement: Any = (around or _passing_on)(ours, before or getattr(np.linalg, name))
            replacement._distmm = True
            setattr(owner, name, replacement)


def _uninstall_if_unused() -> None:
    if _switched_on or _contexts:
        return
    for (module, name), before in _replaced.items():
        # Where somebody has put a function of their own over ours, theirs stays; ours passes on.
        if not getattr(getattr(module, name), "_distmm", False):
            continue
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)
    _replaced.clear()


def _passing_on(ours: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that tries ours, and calls Dask's where ours answers NotImplemented."""
    adapted = any_kind(ours)

    @functools.wraps(before)
    def routed(*args: Any, **kwargs: Any) -> Any:
        if is_enabled() and len(kinds(args)) < 2:
            result = adapted(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return before(*args, **kwargs)

    return routed


def _matmul(*args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    return _product(*args)


def _reflected_matmul(b: Any, a: Any) -> Any:
    return _product(a, b)


def _tensordot(lhs: Any, rhs: Any, axes: Any = 2) -> Any:
    """Take a contraction that is a product; pass no negative axes on, which Dask gets wrong."""
    ndims = ndim_of(lhs), ndim_of(rhs)
    try:
        left, right = found = contracted_axes(ndims, axes)
    except (TypeError, ValueError):
        return NotImplemented  # Dask's own function has the error to raise
    a, b = as_array(lhs), as_array(rhs)
    result = NotImplemented
    # Else Dask's function returns another type than ours does.
    if np.promote_types(a.dtype, b.dtype) == np.result_type(a.dtype, b.dtype):
        first, rest = ascii_letters[: ndims[0]], iter(ascii_letters[ndims[0] :])
        second = "".join(first[left[right.index(i)]] if i in right else next(rest) for i in range(ndims[1]))
        out = "".join(x for x in first + second if (x in first) != (x in second))
        result = contract(a, first, b, second, out, _product)
    if result is NotImplemented and isinstance(axes, Iterable) and any(np.min(x, initial=0) < 0 for x in axes):
        return dask.array.routines.tensordot(a, b, axes=found)
    return result


def _einsum(*args: Any, **kwargs: Any) -> Any:
    """Take contractions that are products, of two operands or of more, one after the other."""
    # How Dask would go about it says nothing of ours.
    asked = None if set(kwargs) - {"optimize", "split_every"} else parsed(args)
    return NotImplemented if asked is None else einsum(*asked, _product)


def _product(a: Any, b: Any) -> Any:
    """Multiply here, or answer NotImplemented."""
    if 0 in (ndim_of(a), ndim_of(b)):
        return NotImplemented
    a, b = as_array(a), as_array(b)
    # Planned arrays have no product that this could be left to.
    if planning():
        return multiply(parse(a, b))
    if is_sparse(a) or is_sparse(b):
        return multiply_sparse(a, b) if max(a.ndim, b.ndim) < 3 else NotImplemented
    if why_leave(a, b, minimum_flops()) is not None:
        return NotImplemented
    raises = raises_beyond_memory()
    try:
        return multiply(parse(a, b), enabled=True)
    except MissingEngineError:
        return NotImplemented  # no worker can: CuPy chunks on a cluster without the GPU engine
    except ProjectedMemoryError as error:
        if raises:
            raise
        log.warning("left to Dask's own tasks: %s", error)
        return NotImplemented
