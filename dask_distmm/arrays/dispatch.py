"""``enable``, ``disable``, ``enabled``: route Dask's own ``@``, matmul, dot, tensordot and linear algebra here.

Dask has no hook for this. All its ways to multiply end in three functions, each reachable under several names:

========================================  ==================================
``@``, ``np.matmul``                      ``dask.array.routines.matmul``
``da.matmul``                             ``dask.array.matmul``
``Array.dot``, ``da.dot``, ``da.vdot``    ``dask.array.routines.tensordot``
``da.tensordot``, ``np.tensordot``        ``dask.array.tensordot``
``da.einsum``, ``np.einsum``, xarray      ``dask.array.einsum``
========================================  ==================================

While enabled, these names hold functions of ours, which pass all other calls on unchanged; so do those of the
functions of ``dask.array.linalg`` in `dask_distmm.arrays.linalg.routed`, in which most of NumPy's of the same names
end. Others of ``np.linalg``, which Dask lacks or which mean something else there, go by ``Array.__array_function__``.
Arrays of other kinds, which have names of their own, are in `dask_distmm.arrays.kinds`. ``rechunk`` does what it did,
and is noted for products (`dask_distmm.arrays.request`).

Contractions of arrays of any number of dimensions are products of matrices, each of whose axes stands for several. The
kept axes of a chunk of A become its rows and the summed ones its columns; of B's the other way around. Elements of
such an axis are in the order of the chunks, and within a chunk in its own: a product takes any order of what it sums
over, as long as A and B have the same, and the chunks of D are taken apart again. So no chunk is cut, and each rank's
part is a GEMM of reshaped chunks.

``Array.__array_function__``, which NumPy asks, calls Dask's function of the same name, which may mean something else
(``cholesky``), or computes the arrays, gathers them in this process and has NumPy multiply them here. While
`dask_distmm.enable` is in force functions of ours come before both: lazy, and as NumPy means them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from string import ascii_letters
from typing import Any

import dask
import dask.array
import dask.array as da
import dask.array.routines
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array._shuffle import _calculate_new_chunksizes
from dask.array.chunk_types import is_valid_chunk_type
from dask.array.core import Array, unify_chunks
from dask.array.einsumfuncs import einsum as dask_einsum
from dask.array.einsumfuncs import parse_einsum_input
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from numpy.lib.array_utils import normalize_axis_tuple

from dask_distmm.arrays.choice import why_leave
from dask_distmm.arrays.fallback import (
    added_in_64_bits,
    dask_tensordot,
    is_sparse,
    multiply_sparse,
    note_left,
    note_taken,
    or_dask,
    sparse_in_einsum,
    stock_matmul,
    takes_sparse,
    why_not,
)
from dask_distmm.arrays.kinds import COMPAT_LINALG, any_kind, as_array, kind_of, kinds, ndim_of, owners, planning
from dask_distmm.arrays.linalg import routed
from dask_distmm.arrays.linalg.array_api import chain, power
from dask_distmm.arrays.product import multiply
from dask_distmm.arrays.request import check_shapes, parse, rechunk
from dask_distmm.config import dask_costs, enabled_setting, minimum_flops, raises_beyond_memory, regions_wanted
from dask_distmm.errors import PlanError
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.runtime.client import announce, announce_all, current_client

# Contractions


# Products of numbers that ``einsum`` of several operands makes in a second, on all cores; measured are 5e7 to 2.5e8 on
# one. Seconds that a task takes beside its work in a scheduler of threads.
_LOOPS, _THREADS_TASK = 1e9, 1e-4

Sizes = tuple[int, ...]
Product = Callable[[Array, Array], Any]


def contract(a: Array, left: str, b: Array, right: str, out: str, product: Product) -> Any:
    """Return the contraction of two arrays whose axes have letters; NotImplemented if it is not a product."""
    batch, rows, cols, summed = _roles(a, left, b, right, out)
    if not summed or not (rows or cols) or np.isnan([*a.shape, *b.shape]).any():
        return NotImplemented
    sizes = dict(zip(left + right, a.chunks + b.chunks, strict=True))
    if batch or len(summed) > 1:
        sizes, unified = unify_chunks(a, left, b, right, warn=False)
        # A product takes chunks that do not fit each other; of axes that become one they have to.
        a, b = unified if len(summed) > 1 else (a, b)
    # An axis of length 1 stands in for none; vectors do without.
    down = [rows] if batch or rows else []
    along = [cols] if batch or cols else []
    if planning() and (batch or max(map(len, (rows, cols, summed))) > 1):
        return NotImplemented
    first, second, third = [*batch, *down, summed], [*batch, summed, *along], [*batch, *down, *along]
    # Each chunk that is reshaped is a task.
    tasks = sum(_count(sizes, *groups) for groups in (first, second, third) if max(map(len, groups)) > 1)
    if minimum_flops() is None and 2 * tasks > _count(sizes, *batch, *down, summed, *along):
        return NotImplemented
    result = product(_merged(a, left, first), _merged(b, right, second))
    if result is NotImplemented:
        return NotImplemented
    return _merged(_apart(result, third, sizes), "".join([*batch, *rows, *cols]), list(out))


def einsum(spec: str, arrays: Sequence[Array], product: Product, whole: Callable[[], Any]) -> Any:
    """Return a contraction of arrays, two at a time in the cheapest order; other pairs are left to Dask.

    Of two operands that is NotImplemented, and so are unknown sizes. Where pairs take more tasks than they save, or
    larger chunks, it is what `whole` returns, Dask's own.
    """
    if np.isnan([*itertools.chain(*(x.shape for x in arrays))]).any():
        return NotImplemented
    terms, out = spec.split("->")
    operands, loops = arrays, 0
    arrays = _cut(terms.split(","), out, arrays)
    left = list(zip(terms.split(","), arrays, strict=True))
    largest = max(math.prod(map(max, x.chunks)) for x in arrays)
    path: list[tuple[int, ...]] = [(0, 1)]
    if len(left) > 2:
        shapes = [np.broadcast_to(x.dtype.type(0), x.shape) for x in arrays]
        path = np.einsum_path(spec, *shapes, optimize="optimal" if len(left) < 6 else "greedy")[0][1:]
    for pair in path:
        taken = [left.pop(i) for i in sorted(pair, reverse=True)][::-1]
        needed = {*out, *itertools.chain(*(letters for letters, _ in left))}
        union = dict.fromkeys("".join(term for term, _ in taken))
        letters = "".join(x for x in union if x in needed) if left else out
        paired = NotImplemented
        if len(taken) == 2:
            (first, a), (second, b) = taken
            paired = contract(a, first, b, second, letters, product)
            if paired is NotImplemented:
                paired = _by_tensordot(a, first, b, second, letters)
        if paired is NotImplemented:
            if len(arrays) == 2:
                return NotImplemented
            paired = _chunk_by_chunk(taken, letters, largest)
            if paired is NotImplemented:
                return whole()
            loops += _loops(*taken)
        left.append((letters, paired))
    if len(arrays) > 2 and not planning() and minimum_flops() is None:
        own = whole()
        more = sum(_tasks(x, operands) * sign for x, sign in ((left[0][1], 1), (own, -1)))
        each = _THREADS_TASK if current_client() is None else dask_costs().task
        if more * each > (_loops(*zip(terms.split(","), operands, strict=True)) - loops) / _LOOPS:
            return own
    # Those between may have been cut, as they may be larger.
    sizes, _ = unify_chunks(*itertools.chain(*zip(arrays, terms.split(","), strict=True)), warn=False)
    return left[0][1].rechunk(tuple(sizes[letter] for letter in out))


def _loops(*operands: tuple[str, Array]) -> int:
    """Return how often NumPy's ``einsum`` multiplies, which loops over all axes."""
    return math.prod(
        {letter: size for letters, x in operands for letter, size in zip(letters, x.shape, strict=True)}.values()
    )


def _tasks(x: Array, operands: Sequence[Array]) -> int:
    """Return the number of tasks of an array that are not those of operands."""
    layers = {name for operand in operands for name in operand.dask.layers}
    return sum(len(layer) for name, layer in x.dask.layers.items() if name not in layers)


def _cut(terms: Sequence[str], out: str, arrays: Sequence[Array]) -> Sequence[Array]:
    """Return operands in chunks of which those of the result are as Dask's: hardly larger than the largest of them."""
    largest, kept = max(1, *(math.prod(map(max, x.chunks)) for x in arrays)), dict.fromkeys(out, 1)
    for letters, x in zip(terms, arrays, strict=True):
        kept |= {c: max(kept[c], *sizes) for c, sizes in zip(letters, x.chunks, strict=True) if c in kept}
    growth = math.prod(kept.values()) / (largest * dask.config.get("array.chunk-size-tolerance"))
    if not (out and growth > 1):
        return arrays
    cut = []
    for letters, x in zip(terms, arrays, strict=True):
        axes = {i for i, c in enumerate(letters) if c in kept}
        most = math.prod(map(max, x.chunks)) / growth ** (len(axes) / len(out))
        cut.append(x.rechunk(tuple(_calculate_new_chunksizes(x.chunks, list(x.chunks), axes, most))))
    return cut


def _chunk_by_chunk(operands: Sequence[tuple[str, Array]], out: str, largest: int) -> Any:
    """Return a part of a contraction by Dask's tasks; NotImplemented if its chunks exceed the `largest` of all."""
    terms, arrays = zip(*operands, strict=True)
    spec = ",".join(terms) + "->" + out
    sizes, cut = unify_chunks(*itertools.chain(*zip(arrays, terms, strict=True)), warn=False)
    if math.prod(max(sizes[letter]) for letter in out) > largest * dask.config.get("array.chunk-size-tolerance"):
        return NotImplemented
    summed = "".join(letter for letter in sizes if letter not in out)
    pairs, dtype = itertools.chain(*zip(cut, terms, strict=True)), np.result_type(*(x.dtype for x in cut))
    singles = dict.fromkeys(summed, 1)
    result = da.blockwise(_einsum_of_chunks, out + summed, *pairs, adjust_chunks=singles, dtype=dtype, spec=spec)
    return result.sum(axis=tuple(range(len(out), result.ndim))) if summed else result


def _einsum_of_chunks(*chunks: Any, spec: str) -> Any:
    terms, out = spec.split("->")
    return np.einsum(spec, *chunks)[(..., *(None for letter in {*terms} - {*out, ","}))]


def _by_tensordot(a: Array, left: str, b: Array, right: str, out: str) -> Any:
    """Return a contraction of Dask's tasks that call BLAS: chunk by chunk ``einsum`` is much slower."""
    batch, _, _, summed = _roles(a, left, b, right, out)
    plain = all(array_kind(x._meta) in ("numpy", "cupy") for x in (a, b))
    if not summed or batch or planning() or not plain or np.result_type(a, b).kind not in "fc":
        return NotImplemented
    _, (a, b) = unify_chunks(a, left, b, right, warn=False)
    product = dask_tensordot(a, b, axes=([left.index(x) for x in summed], [right.index(x) for x in summed]))
    return _merged(product, "".join(x for x in left + right if x not in summed), list(out))


def _roles(a: Array, left: str, b: Array, right: str, out: str) -> tuple[str, str, str, str]:
    """Return the axes that are kept of both, of A alone, of B alone, and that are summed over.

    None is summed over where the sum is of another kind, or Dask's own function has an error to raise.
    """
    batch, rows, cols = ("".join(x for x in out if (x in left, x in right) == of) for of in ((1, 1), (1, 0), (0, 1)))
    summed = "".join(x for x in left if x in right and x not in out)
    once = all(len(set(letters)) == len(letters) for letters in (left, right, out))
    # Dask's own function takes a length of 1 for any.
    fit = all(a.shape[left.index(x)] == b.shape[right.index(x)] for x in batch + summed)
    return batch, rows, cols, summed if once and fit and {*left, *right} == {*out, *summed} else ""


def parsed(args: Sequence[Any]) -> tuple[str, list[Array]] | None:
    """Return what ``einsum`` is asked for, without an ellipsis, and its arrays; None if Dask's own has it to refuse."""
    try:
        terms, out, arrays = parse_einsum_input(args)
    except (TypeError, ValueError):
        return None
    spec = re.sub(r"\s", "", f"{terms}->{out}")
    ndims_of = [x.ndim if isinstance(x, Array) else -1 for x in arrays]
    named = [len(term) for term in spec.split("->")[0].split(",")]
    return (spec, list(arrays)) if len(ndims_of) > 1 and ndims_of == named else None


def _merged(x: Array, letters: str, groups: Sequence[str]) -> Array:
    """Return an array with an axis for each group of axes."""
    order = [letters.index(letter) for letter in itertools.chain(*groups)]
    if all(len(group) == 1 for group in groups):
        # Of a matrix a run sees through it.
        return x if order == sorted(order) else x.T if x.ndim == 2 else x.transpose(order)
    return _reshaped(x, order, _merged_chunks(groups, dict(zip(letters, x.chunks, strict=True))))


def _apart(x: Array, groups: Sequence[str], sizes: Mapping[str, Sizes]) -> Array:
    """Return an array whose axes are those of all groups, of one that has an axis for each."""
    merged = _merged_chunks(groups, sizes)
    x = x if x.chunks == merged else x.rechunk(merged)
    if all(len(group) == 1 for group in groups):
        return x
    return _reshaped(x, list(range(x.ndim)), tuple(sizes[letter] for letter in itertools.chain(*groups)))


def _count(sizes: Mapping[str, Sizes], *groups: str) -> int:
    return math.prod(len(sizes[letter]) for letter in itertools.chain(*groups))


def _merged_chunks(groups: Sequence[str], sizes: Mapping[str, Sizes]) -> tuple[Sizes, ...]:
    return tuple(tuple(map(math.prod, itertools.product(*(sizes[letter] for letter in group)))) for group in groups)


def _reshaped(x: Array, order: Sequence[int], chunks: tuple[Sizes, ...]) -> Array:
    """Return an array whose chunks, in C order, are those of one with its axes in another order, reshaped."""
    name = f"reshaped-{tokenize(x.name, order, chunks)}"
    places = itertools.product(*(range(x.numblocks[axis]) for axis in order))
    keys = itertools.product([name], *(range(len(sizes)) for sizes in chunks))
    graph = {
        key: Task(key, _reshape, TaskRef((x.name, *(place[order.index(i)] for i in range(x.ndim)))), order, shape)
        for key, place, shape in zip(keys, places, itertools.product(*chunks), strict=True)
    }
    layered = HighLevelGraph.from_collections(name, graph, dependencies=[x])
    return da.Array(layered, name, chunks, meta=meta_from_array(x._meta, ndim=len(chunks)), dtype=x.dtype)


def _reshape(chunk: Any, order: Sequence[int], shape: Sizes) -> Any:
    return chunk.transpose(order).reshape(shape)


# NumPy's functions


def _left_to_numpy(*operands: Any) -> bool:
    """Whether Dask's products of arrays have another type than NumPy's, or may lack what NumPy has."""
    arrays = [dask.array.asanyarray(x) for x in operands]
    dtype = np.result_type(*(x.dtype for x in arrays))
    plain = all(array_kind(x._meta) in ("numpy", "cupy") for x in arrays)
    return not plain or dtype.kind in "mMOSU" or added_in_64_bits(dtype)


def _multi_dot(arrays: Sequence[Any], *, out: Any = None) -> Any:
    operands = [dask.array.asanyarray(x) for x in arrays]
    if out is not None or len(operands) < 2 or _left_to_numpy(*operands):
        return NotImplemented
    if any(x.ndim != 2 for x in operands[1:-1]) or not {operands[0].ndim, operands[-1].ndim} <= {1, 2}:
        return NotImplemented
    return chain(operands, dask.array.routines.matmul)


def _matrix_power(a: Any, n: Any) -> Any:
    if a.ndim < 2 or not isinstance(n, int | np.integer) or _left_to_numpy(a):
        return NotImplemented  # other types, or an error that NumPy has to raise
    # The inverse may not fit into memory.
    product = dask.array.routines.matmul
    return routed.take(lambda: power(a, int(n), product), a, stock="partial", narrow=True)


def _numpy_matmul(x1: Any, x2: Any, /) -> Any:
    return NotImplemented if _left_to_numpy(x1, x2) else dask.array.routines.matmul(x1, x2)


def contracted_axes(ndims: tuple[int, int], axes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of two operands that ``tensordot(axes=)`` names, from 0; wrong ones are a ValueError."""
    if isinstance(axes, Iterable):
        left, right = axes
    else:
        left, right = range(ndims[0] - axes, ndims[0]), range(axes)
    pairs = normalize_axis_tuple(left, ndims[0]), normalize_axis_tuple(right, ndims[1])
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError(f"axes={axes!r} names {len(pairs[0])} and {len(pairs[1])} axes: expected as many of both")
    return pairs


def _numpy_tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
    (left, right), shapes = contracted_axes((np.ndim(x1), np.ndim(x2)), axes), (np.shape(x1), np.shape(x2))
    # Dask's function takes a length of 1 for any length.
    if _left_to_numpy(x1, x2) or [shapes[0][i] for i in left] != [shapes[1][i] for i in right]:
        return NotImplemented
    return dask.array.routines.tensordot(x1, x2, axes=(left, right))


def _inner(a: Any, b: Any, /) -> Any:
    return NotImplemented if 0 in (np.ndim(a), np.ndim(b)) else _numpy_tensordot(a, b, axes=(-1, -1))


_OURS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.linalg.multi_dot: _multi_dot,
    np.linalg.matrix_power: _matrix_power,
    np.linalg.matmul: _numpy_matmul,
    np.linalg.tensordot: _numpy_tensordot,
    np.inner: _inner,
    **routed.NUMPYS,
}


def _numpys_first(functions: Mapping[Any, Callable[..., Any]], before: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``Array.__array_function__`` that has these functions, and is `before` for all others."""

    @functools.wraps(before)
    def answer(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        ours = functions.get(func) if is_enabled() else None
        if ours is not None and kind_of(self):
            ours = any_kind(ours)
        if ours is not None and all(issubclass(type(self), x) or is_valid_chunk_type(x) for x in types):
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


# ``enable``, ``disable``, ``enabled``: route Dask's own ``@``, matmul, dot, tensordot and linear algebra here


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

    See Also
    --------
    disable, enabled, is_enabled, explain, matmul

    Examples
    --------
    >>> import dask.array as da
    >>> import dask_distmm
    >>> dask_distmm.enable()
    >>> x = da.ones((400, 300), chunks=100)
    >>> float((x.T @ x).sum().compute())  # with a cluster one run, where that pays
    36000000.0
    >>> dask_distmm.disable()
    """
    enabled_setting()
    _switch(on=True)


def disable() -> None:
    """Undo `enable`: Dask's names hold exactly what they held before.

    Inside ``with enabled():`` of any thread routing continues until the last such block ends.

    See Also
    --------
    enable, enabled, is_enabled

    Examples
    --------
    >>> import dask_distmm
    >>> dask_distmm.disable()
    >>> dask_distmm.is_enabled()
    False
    """
    _switch(on=False)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Route Dask's matrix products here inside a ``with`` block.

    Yields
    ------
    None
        Products that are written inside come here, also if they are computed afterwards.

    See Also
    --------
    enable, disable, is_enabled

    Examples
    --------
    >>> import dask.array as da
    >>> import dask_distmm
    >>> x = da.ones((400, 300), chunks=100)
    >>> with dask_distmm.enabled():
    ...     gram = x.T @ x
    >>> float(gram[0, 0].compute())
    400.0
    >>> dask_distmm.is_enabled()
    False
    """
    _switch(contexts=1)
    try:
        yield
    finally:
        _switch(contexts=-1)


def is_enabled() -> bool:
    """Return whether Dask's matrix products are routed here now.

    Returns
    -------
    bool
        Whether the last `enable` was not undone, or some thread is inside ``with enabled():``.

    See Also
    --------
    enable, disable, enabled

    Examples
    --------
    >>> import dask_distmm
    >>> with dask_distmm.enabled():
    ...     dask_distmm.is_enabled()
    True
    """
    return (_switched_on or _contexts > 0) and enabled_setting() is not False


def _switch(*, on: bool | None = None, contexts: int = 0) -> None:
    """Note what a call changes, and have our functions in place or not."""
    global _switched_on, _contexts
    with _lock:
        _switched_on, _contexts = _switched_on if on is None else on, _contexts + contexts
        (_replace_functions if _switched_on or _contexts else _put_back)()
        if not (_switched_on or _contexts):
            announce_all(False)


def _replace_functions() -> None:
    ways: dict[str, Callable[..., Any]] = {"matmul": _matmul, "tensordot": _tensordot, "einsum": _einsum}
    ways |= {"__matmul__": _matmul, "__rmatmul__": lambda b, a: _product(a, b)}
    places = owners()
    for owner in places:
        _replace(owner, {name: ours for name, ours in ways.items() if isinstance(owner, type) == name.startswith("__")})
    package = sys.modules.get("dask_array")
    if package is not None:
        _replace(package.linalg, routed.DASKS)
    if "xarray" in sys.modules:
        _replace(sys.modules["xarray"], routed.XARRAY)
    if not planning():
        _replace(dask.array.linalg, routed.DASKS)
        _replace(dask.array, routed.STATISTICS)
        for owner in (dask.array, sys.modules["dask.array.rechunk"]):
            _replace(owner, {"rechunk": rechunk})
        for owner in places:
            if owner.__name__.endswith(COMPAT_LINALG):
                _replace(owner, routed.ARRAY_API, adds=True)
    for kind in {Array, getattr(package, "Array", Array)}:
        _replace(kind, {"__array_function__": _OURS}, _numpys_first)


def _replace(
    owner: Any, ways: Mapping[str, Any], around: Callable[..., Any] | None = None, *, adds: bool = False
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


def _put_back() -> None:
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
            announce(current_client(), regions_wanted())
            if result is not NotImplemented:
                return result
        return before(*args, **kwargs)

    return routed


def _matmul(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs or len(args) != 2 else _product(*args)


def _tensordot(lhs: Any, rhs: Any, axes: Any = 2) -> Any:
    """Take a contraction that is a product; pass no negative axes on, which Dask gets wrong."""
    ndims = ndim_of(lhs), ndim_of(rhs)
    try:
        left, right = pair = contracted_axes(ndims, axes)
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
        if result is NotImplemented:
            _check_lengths((first, second), (a, b), lambda: dask_tensordot(a, b, axes=pair))
    if result is NotImplemented and isinstance(axes, Iterable) and any(np.min(x, initial=0) < 0 for x in axes):
        return dask_tensordot(a, b, axes=pair)
    return result


def _einsum(*args: Any, **kwargs: Any) -> Any:
    """Take contractions that are products, of two operands or of more, one after the other."""
    # How Dask would go about it says nothing of ours.
    form = None if set(kwargs) - {"optimize", "split_every"} else parsed(args)
    if form is None or sparse_in_einsum(*form[1]):
        return NotImplemented
    spec, arrays = form
    _check_lengths(spec.split("->")[0].split(","), arrays, lambda: dask_einsum(spec, *arrays))
    return einsum(spec, arrays, _product, lambda: dask_einsum(*args, **kwargs))


def _check_lengths(terms: Sequence[str], arrays: Sequence[Array], own: Callable[[], Any]) -> None:
    """Refuse axes of one letter that have several lengths, where Dask's own function refuses them, too."""
    seen: dict[str, tuple[int, int]] = {}
    for at, (letters, x) in enumerate(zip(terms, arrays, strict=True)):
        for axis, letter in enumerate(letters):
            before, place = seen.setdefault(letter, (at, axis))
            if x.shape[axis] != arrays[before].shape[place] and not np.isnan([*x.shape, *arrays[before].shape]).any():
                error = PlanError(
                    f"shapes {arrays[before].shape} and {x.shape} don't match: axis {place} of operand {before} and "
                    f"axis {axis} of operand {at} must be equal"
                )
                _refuse(error, own)
                return


def _refuse(error: PlanError, own: Callable[[], Any]) -> None:
    """Raise an error in place of that of Dask's own function, which says more of chunks; none if it has a result."""
    try:
        if not planning():
            own()
            return
    except ValueError:
        pass
    raise error from None


def _chunks_of_stack(a: Array, b: Array) -> tuple[tuple[int, ...], ...]:
    """Return the chunks that Dask's product of stacks of matrices has."""
    # Axes by their place in the result; of vectors there is only that which is summed.
    batch = tuple(range(-max(a.ndim, b.ndim), -2))
    left = (*batch[len(batch) + 2 - a.ndim :], -2, "k") if a.ndim > 1 else ("k",)
    right = (*batch[len(batch) + 2 - b.ndim :], "k", -1) if b.ndim > 1 else ("k",)
    sizes, _ = unify_chunks(a, left, b, right, warn=False)
    return tuple(sizes[axis] for axis in (*batch, -2, -1) if axis in sizes)


def _product(a: Any, b: Any) -> Any:
    """Multiply here, or answer NotImplemented."""
    if 0 in (ndim_of(a), ndim_of(b)):
        return NotImplemented
    a, b = as_array(a), as_array(b)
    # Planned arrays have no product that this could be left to.
    if planning():
        return multiply(parse(a, b))
    if (is_sparse(a) or is_sparse(b)) and takes_sparse(a, b):
        note_taken()
        return multiply_sparse(a, b)
    try:
        check_shapes(a, b)
    except PlanError as error:
        # Dask takes some types and sizes that are not for runs, and a length of 1 for any.
        _refuse(error, lambda: stock_matmul(a, b))
        return NotImplemented
    if is_sparse(a) or is_sparse(b):
        return NotImplemented
    what, flops = f"{a.shape} @ {b.shape} of {a.dtype}", 2.0 * a.size * (b.shape[-1] if b.ndim > 1 else 1)
    if (why := why_not(a, b, most=max(a.ndim, b.ndim))) is not None:
        note_left(what, flops, why)
        return NotImplemented

    def make() -> Any:
        request = parse(a, b)
        if request.is_batch:
            request = dataclasses.replace(request, out_chunks=_chunks_of_stack(a, b))
        if not (why := why_leave(request)):
            return multiply(request, enabled=True)
        note_left(what, flops, why)
        return NotImplemented

    return or_dask(make, raises=raises_beyond_memory())
