"""How a batch is computed: plain tasks of whole items, or collective runs that are put together.

::

    A[0..3]  B[0..3] -> np.matmul -> D[0..3]        items: the batch axes are cut, items are whole
    A[4..7]  B[4..7] -> np.matmul -> D[4..7]

    A[0]  B[0] -> barrier -> D[0]      collective: a run for each item, stacked;
    A[1]  B[1] -> barrier -> D[1]      one run for all if they share A or B
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array

from dask_distmm.arrays.outputs import operand_sum, output_meta
from dask_distmm.arrays.request import Request
from dask_distmm.comms.serializers import register_serializers
from dask_distmm.numeric.epilogs import Formula, finish
from dask_distmm.numeric.types import FP8, carried, decode, dtype_from_name, operand_dtype, stored, sum_dtype, typed
from dask_distmm.planning.many import Sizes
from dask_distmm.runtime.chunks import array_kind

# Whole items, in plain tasks


def multiply_items(
    a: Any, b: Any, *extras: Any, dtypes: tuple[str, ...], names: tuple[str, ...], formula: Formula, several: bool
) -> Any:
    """Multiply chunks of whole items. Runs on a worker, as a plain task."""
    arrays = []
    for chunk, name in zip((a, b, *extras), dtypes[1:], strict=True):
        while isinstance(chunk, list):
            (chunk,) = chunk  # noqa: PLW2901
        arrays.append(typed(chunk, name))
    xp: Any = np
    if any(array_kind(array) == "cupy" for array in arrays):
        xp = importlib.import_module("cupy")
        arrays = [array if array_kind(array) == "cupy" else xp.asarray(array) for array in arrays]
    register_serializers()
    dtype = dtype_from_name(dtypes[0])
    operand = operand_dtype(*map(dtype_from_name, dtypes[1:3]))
    inner = sum_dtype(operand, dtype, max(1, arrays[0].shape[-1]))
    acc = xp.matmul(
        *(_in_compute_type(xp, array, name, inner) for array, name in zip(arrays[:2], dtypes[1:], strict=False))
    )
    aux: dict[str, Any] = {}
    with np.errstate(all="ignore"):
        if not formula.trivial:
            acc, aux = finish(xp, formula, acc, dict(zip(names, arrays[2:], strict=True)))
        d = stored(xp, acc, dtypes[0], fp8_bytes=xp is not np)
    if not several:
        return d
    return (d, *(aux[name].astype(formula.dtype_of(name, dtype), copy=False) for name in formula.per_element))


def _in_compute_type(xp: Any, array: Any, name: str, dtype: np.dtype) -> Any:
    """Return A or B in the type that is multiplied and summed in, which has all numbers of FP8."""
    if name in FP8 and array.dtype == np.uint8:
        return decode(xp, array, name, dtype)
    return array.astype(dtype, copy=False)


def by_items(request: Request, cut: tuple[Sizes, ...]) -> tuple[da.Array, dict[str, da.Array]]:
    """Return D and the auxiliary outputs, by tasks that multiply some items each."""
    a, b, formula, ndim = request.a, request.b, request.formula, len(request.shape)
    chunks = (*cut, (request.shape[-2],), (request.shape[-1],))
    # Labels of axes: those of D, and one for k.
    labels = tuple(range(ndim))
    arguments: list[Any] = []
    for name, array in (("a", a), ("b", b), *request.extras):
        wanted = {
            axis: sizes if array.shape[axis] != 1 else (1,)
            for axis, sizes in zip(range(-array.ndim, -2), chunks[ndim - array.ndim :], strict=False)
        }
        # All at once they could not be used apart, and a shuffle of Dask's can't take CuPy chunks.
        whole = array.rechunk(
            {axis % array.ndim: sizes for axis, sizes in wanted.items()} | {array.ndim - 2: -1, array.ndim - 1: -1},
            method="tasks",
        )
        own = labels[ndim - array.ndim :]
        arguments += [whole, {"a": (*own[:-1], ndim), "b": (*own[:-2], ndim, ndim - 1)}.get(name, own)]
    held = carried(request.types.d, request.kind)
    meta = meta_from_array(b._meta if request.kind == array_kind(b._meta) else a._meta, ndim=ndim, dtype=held)
    several = bool(formula.per_element)
    made = da.blockwise(
        multiply_items,
        labels,
        *arguments,
        name=None,
        token="matmul-items",
        adjust_chunks=dict(enumerate(chunks)),
        align_arrays=False,
        concatenate=False,
        meta=meta,
        dtype=held,
        dtypes=(request.types.d, request.types.a, request.types.b, *(x.dtype.name for _, x in request.extras)),
        names=tuple(name for name, _ in request.extras),
        formula=formula,
        several=several,
    )
    aux: dict[str, da.Array] = {}
    if several:
        for number, name in enumerate(formula.per_element, start=1):
            aux[name] = _output(request, made, name, number)
        made = made.map_blocks(operator.itemgetter(0), dtype=held, meta=meta)
    if formula.operand_sum:
        aux[formula.operand_sum] = operand_sum(formula, a, b, request.dtype)
    return made, aux


def _output(request: Request, made: da.Array, name: str, number: int) -> da.Array:
    """Return one auxiliary output of tasks that return tuples."""
    formula = request.formula
    dtype = formula.dtype_of(name, request.dtype)
    keeps = formula.keeps(name)
    chunks = [sizes if kept else (1,) * len(sizes) for sizes, kept in zip(made.chunks[-2:], keeps, strict=True)]
    batch = made.chunks[:-2] if name != "result_amax" else tuple((1,) * len(sizes) for sizes in made.chunks[:-2])
    array = made.map_blocks(
        operator.itemgetter(number),
        dtype=dtype,
        chunks=(*batch, *chunks),
        meta=output_meta(made, dtype),
    )
    if name == "result_amax":
        return array.max()
    if name != formula.sums:
        return array
    array = array.squeeze(formula.sum_axis - 2)
    return array if request.types.d in FP8 else array.astype(request.dtype)


# Collective runs


def as_one_product(request: Request) -> Request | None:
    """Return the product of two matrices that is the whole batch, if there is one.

    There is one if all items share B (they lie below one another then) or A (beside one another), and the formula looks
    at each element of D for itself.
    """
    a, b, formula = request.a, request.b, request.formula
    if request.extras or formula.per_element or formula.operand_sum:
        return None
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    if math.prod(b.shape[:-2]) == 1:
        return _of_matrices(request, a.reshape((-1, k)), b.reshape((k, n)))
    if math.prod(a.shape[:-2]) == 1:
        return _of_matrices(request, a.reshape((m, k)), da.moveaxis(b, -2, 0).reshape((k, -1)))
    return None


def _of_matrices(request: Request, a: da.Array, b: da.Array, extras: Sequence[tuple[str, da.Array]] = ()) -> Request:
    """Return the same request for two matrices."""
    return dataclasses.replace(request, a=a, b=b, extras=extras, out_chunks=None, dropped=(), batch="auto")


def _unshared(request: Request, d: da.Array) -> da.Array:
    """Return D of the batch from D of the product that `as_one_product` has returned."""
    m, n = request.shape[-2:]
    if math.prod(request.b.shape[:-2]) == 1:
        return d.reshape(request.shape)
    return da.moveaxis(d.reshape((m, *request.batch_shape, n)), 0, -2)


def item_of(request: Request, index: Sizes) -> Request:
    """Return the product of one item of a batch."""

    def item(array: da.Array) -> da.Array:
        own = index[len(index) - (array.ndim - 2) :]
        return array[tuple(0 if size == 1 else i for i, size in zip(own, array.shape[:-2], strict=True))]

    extras = [(name, item(array)) for name, array in request.extras]
    return _of_matrices(request, item(request.a), item(request.b), extras)


def by_runs(request: Request, run: Callable[[list[Request]], list[Any]]) -> tuple[da.Array, dict[str, da.Array]]:
    """Return D and the auxiliary outputs, by collective runs: `run` returns the products of pairs of matrices."""
    formula, batch = request.formula, request.batch_shape
    if (one := as_one_product(request)) is not None:
        return _unshared(request, run([one])[0]), {}
    items: dict[Sizes, da.Array] = {}
    outputs: dict[str, dict[Sizes, da.Array]] = {}
    places = list(itertools.product(*map(range, batch)))
    for index, found in zip(places, run([item_of(request, index) for index in places]), strict=True):
        items[index], aux = found if isinstance(found, tuple) else (found, {})
        for name, array in aux.items():
            outputs.setdefault(name, {})[index] = array
    stacked = {name: _stack(arrays, batch) for name, arrays in outputs.items()}
    if formula.amax:
        stacked["result_amax"] = stacked["result_amax"].max()
    if formula.operand_sum:
        stacked[formula.operand_sum] = operand_sum(formula, request.a, request.b, request.dtype)
    return _stack(items, batch), stacked


def _stack(arrays: Mapping[Sizes, da.Array], batch: Sizes, before: Sizes = ()) -> da.Array:
    """Return arrays as one, with the batch axes before their own."""
    if len(before) == len(batch):
        return arrays[before]
    return da.stack([_stack(arrays, batch, (*before, i)) for i in range(batch[len(before)])])
