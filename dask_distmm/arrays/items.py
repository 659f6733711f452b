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

from dask_distmm.arrays import formula
from dask_distmm.comms.serializers import let_types_travel
from dask_distmm.engines.chunks import array_kind
from dask_distmm.numeric.conversions import decode, stored
from dask_distmm.numeric.epilogs import Finish, finish
from dask_distmm.numeric.types import FP8, Types, carried, dtype_from_name, operand_dtype, sum_dtype, typed
from dask_distmm.planning.many.batches import Sizes

__all__ = ["Product", "by_items", "by_runs", "item", "multiply", "shared"]


@dataclasses.dataclass(frozen=True)
class Product:
    """What is asked for: operands of at least two dimensions each, and the formula.

    Parameters
    ----------
    a, b
        Operands after op(), vectors as matrices.
    types
        Types of A, B and D.
    spec, extras
        The formula, and the arrays that it reads.
    dropped
        Which of the last two axes of D are there only because an operand was a vector.
    out_chunks
        As asked for, for D with all its axes; None for those of the way that is taken.
    """

    a: da.Array
    b: da.Array
    types: Types
    spec: Finish
    extras: Sequence[tuple[str, da.Array]]
    dropped: tuple[int, ...]
    out_chunks: Any

    @property
    def batch(self) -> Sizes:
        """Batch axes of D."""
        return np.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2])

    @property
    def shape(self) -> Sizes:
        """All axes of D."""
        return (*self.batch, self.a.shape[-2], self.b.shape[-1])

    @property
    def dtype(self) -> np.dtype:
        """Type of D."""
        return dtype_from_name(self.types.d)

    @property
    def kind(self) -> str:
        """What the chunks of D are."""
        return "cupy" if "cupy" in (array_kind(self.a._meta), array_kind(self.b._meta)) else "numpy"

    @property
    def empty(self) -> bool:
        """Whether nothing is to be multiplied."""
        return 0 in (*self.a.shape, *self.b.shape)


# Whole items, in plain tasks


def multiply(
    a: Any, b: Any, *extras: Any, dtypes: tuple[str, ...], names: tuple[str, ...], spec: Finish, several: bool
) -> Any:
    """Multiply chunks of whole items. Runs on a worker, as a plain task.

    Parameters
    ----------
    a, b
        NumPy or CuPy arrays (..., m, k) and (..., k, n); or these in lists of one.
    extras
        What the formula reads beside them, broadcast against D.
    dtypes
        Names of the types of D, of A and B, and of the extras.
    names
        Names of the extras.
    spec
        The formula.
    several
        Return a tuple of D and the auxiliary outputs, in the order of ``spec.per_element``.
    """
    arrays = []
    for chunk, name in zip((a, b, *extras), dtypes[1:], strict=True):
        while isinstance(chunk, list):
            (chunk,) = chunk  # noqa: PLW2901
        arrays.append(typed(chunk, name))
    xp: Any = np
    if any(array_kind(array) == "cupy" for array in arrays):
        xp = importlib.import_module("cupy")
        arrays = [array if array_kind(array) == "cupy" else xp.asarray(array) for array in arrays]
    let_types_travel()
    dtype = dtype_from_name(dtypes[0])
    operand = operand_dtype(*map(dtype_from_name, dtypes[1:3]))
    inner = sum_dtype(operand, dtype, max(1, arrays[0].shape[-1]))
    acc = xp.matmul(*(_wide(xp, array, name, inner) for array, name in zip(arrays[:2], dtypes[1:], strict=False)))
    aux: dict[str, Any] = {}
    with np.errstate(all="ignore"):
        if not spec.trivial:
            acc, aux = finish(xp, spec, acc, dict(zip(names, arrays[2:], strict=True)))
        d = stored(xp, acc, dtypes[0], fp8_bytes=xp is not np)
    if not several:
        return d
    return (d, *(aux[name].astype(spec.dtype_of(name, dtype), copy=False) for name in spec.per_element))


def _wide(xp: Any, array: Any, name: str, dtype: np.dtype) -> Any:
    """Return A or B in the type that is multiplied and summed in, which has all numbers of FP8."""
    if name in FP8 and array.dtype == np.uint8:
        return decode(xp, array, name, dtype)
    return array.astype(dtype, copy=False)


def by_items(product: Product, cut: tuple[Sizes, ...]) -> tuple[da.Array, dict[str, da.Array]]:
    """Return D and the auxiliary outputs, by tasks that multiply some items each."""
    a, b, spec, ndim = product.a, product.b, product.spec, len(product.shape)
    chunks = (*cut, (product.shape[-2],), (product.shape[-1],))
    # Labels of axes: those of D, and one for k.
    labels = tuple(range(ndim))
    arguments: list[Any] = []
    for name, array in (("a", a), ("b", b), *product.extras):
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
    held = carried(product.types.d, product.kind)
    meta = meta_from_array(b._meta if product.kind == array_kind(b._meta) else a._meta, ndim=ndim, dtype=held)
    several = bool(spec.per_element)
    made = da.blockwise(
        multiply,
        labels,
        *arguments,
        name=None,
        token="matmul-items",
        adjust_chunks=dict(enumerate(chunks)),
        align_arrays=False,
        concatenate=False,
        meta=meta,
        dtype=held,
        dtypes=(product.types.d, product.types.a, product.types.b, *(x.dtype.name for _, x in product.extras)),
        names=tuple(name for name, _ in product.extras),
        spec=spec,
        several=several,
    )
    aux: dict[str, da.Array] = {}
    if several:
        for number, name in enumerate(spec.per_element, start=1):
            aux[name] = _output(product, made, name, number)
        made = made.map_blocks(operator.itemgetter(0), dtype=held, meta=meta)
    if spec.operand_sum:
        aux[spec.operand_sum] = formula.operand_sum(spec, a, b, product.dtype)
    return made, aux


def _output(product: Product, made: da.Array, name: str, number: int) -> da.Array:
    """Return one auxiliary output of tasks that return tuples."""
    spec = product.spec
    dtype = spec.dtype_of(name, product.dtype)
    keeps = spec.keeps(name)
    chunks = [sizes if kept else (1,) * len(sizes) for sizes, kept in zip(made.chunks[-2:], keeps, strict=True)]
    batch = made.chunks[:-2] if name != "result_amax" else tuple((1,) * len(sizes) for sizes in made.chunks[:-2])
    array = made.map_blocks(
        operator.itemgetter(number),
        dtype=dtype,
        chunks=(*batch, *chunks),
        meta=formula.output_meta(made, dtype),
    )
    if name == "result_amax":
        return array.max()
    if name != spec.sums:
        return array
    array = array.squeeze(spec.sum_axis - 2)
    return array if product.types.d in FP8 else array.astype(product.dtype)


# Collective runs


def shared(product: Product) -> tuple[da.Array, da.Array] | None:
    """Return the two matrices whose product is the whole batch, if there are such.

    There are if all items share B (they lie below one another then) or A (beside one another), and the formula looks
    at each element of D for itself.
    """
    a, b, spec = product.a, product.b, product.spec
    if product.extras or spec.per_element or spec.operand_sum:
        return None
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    if math.prod(b.shape[:-2]) == 1:
        return a.reshape((-1, k)), b.reshape((k, n))
    if math.prod(a.shape[:-2]) == 1:
        return a.reshape((m, k)), da.moveaxis(b, -2, 0).reshape((k, -1))
    return None


def _unshared(product: Product, d: da.Array) -> da.Array:
    """Return the batch that such a product is."""
    m, n = product.shape[-2:]
    if math.prod(product.b.shape[:-2]) == 1:
        return d.reshape(product.shape)
    return da.moveaxis(d.reshape((m, *product.batch, n)), 0, -2)


def item(array: da.Array, index: Sizes, batch: Sizes) -> da.Array:
    """Return the matrix of one item of an operand, or of what the formula reads."""
    own = index[len(batch) - (array.ndim - 2) :]
    return array[tuple(0 if size == 1 else i for i, size in zip(own, array.shape[:-2], strict=True))]


def by_runs(product: Product, run: Callable[..., Any]) -> tuple[da.Array, dict[str, da.Array]]:
    """Return D and the auxiliary outputs, by collective runs: `run` is `matmul` with all but arrays of items."""
    spec, batch = product.spec, product.batch
    if (pair := shared(product)) is not None:
        return _unshared(product, run(*pair)), {}
    items: dict[Sizes, da.Array] = {}
    outputs: dict[str, dict[Sizes, da.Array]] = {}
    for index in itertools.product(*map(range, batch)):
        a, b = (item(x, index, batch) for x in (product.a, product.b))
        inputs = {name: item(array, index, batch) for name, array in product.extras if name not in spec.scales}
        found = run(a, b, inputs.pop("c", None), epilog_inputs=inputs)
        items[index], aux = found if isinstance(found, tuple) else (found, {})
        for name, array in aux.items():
            outputs.setdefault(name, {})[index] = array
    stacked = {name: _stack(arrays, batch) for name, arrays in outputs.items()}
    if spec.amax:
        stacked["result_amax"] = stacked["result_amax"].max()
    if spec.operand_sum:
        stacked[spec.operand_sum] = formula.operand_sum(spec, product.a, product.b, product.dtype)
    return _stack(items, batch), stacked


def _stack(arrays: Mapping[Sizes, da.Array], batch: Sizes, before: Sizes = ()) -> da.Array:
    """Return arrays as one, with the batch axes before their own."""
    if len(before) == len(batch):
        return arrays[before]
    return da.stack([_stack(arrays, batch, (*before, i)) for i in range(batch[len(before)])])
