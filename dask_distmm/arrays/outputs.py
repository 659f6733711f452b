"""D and the auxiliary outputs as Dask arrays: of a run, or of Dask's own operations where no run is possible.

The chunks of the array underneath are multiplied, transposed without a copy, and BLAS conjugates while it multiplies.
So ``A.conj().T @ B`` makes no conjugated copy of A, and needs no task for it.

Nothing of a graph is interpreted. Dask gives an array a name that follows from what it is made of: if ``x`` depends on
only one array, and the transpose of that array would have the name of ``x``, then ``x`` is its transpose. What was cut
otherwise can't be seen in this way: while `enable` is in force the names of arrays that are rechunked are noted. A run
takes any chunks, so nothing has to be cut for it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.array.core import Array
from dask.array.utils import meta_from_array
from dask.highlevelgraph import HighLevelGraph
from distributed import Future

from dask_distmm.arrays.fallback import dask_matmul, dask_rechunk
from dask_distmm.arrays.kinds import reducible
from dask_distmm.arrays.quantize import widened
from dask_distmm.comms.serializers import register_serializers
from dask_distmm.errors import PlanError
from dask_distmm.graph.build import DaskTasks, build_graph, build_output
from dask_distmm.graph.waves import build_wave_output, build_waves
from dask_distmm.numeric.epilogs import Formula, elementwise, reductions, scaled
from dask_distmm.numeric.types import FP8, Types, carried, compute_dtype, dtype_from_name, stored, sum_dtype
from dask_distmm.planning import Chunks, Problem
from dask_distmm.planning.waves import Scheme
from dask_distmm.runtime.chunks import array_kind, array_module
from dask_distmm.runtime.keys import output_name

# Operands as they lie: the array under a lazy ``A.T``, ``A.conj()`` or ``A.rechunk(...)``


# Arrays beside A and B by name, each of two dimensions, or more for a batch.
Extras = Sequence[tuple[str, da.Array]]


class Source(NamedTuple):
    """What a view is made of, by name."""

    name: str
    # Its chunks, where they do not follow from those of the view.
    chunks: Chunks | None = None
    transposed: bool = False
    conjugated: bool = False


# By the names of views; the latest ones.
_sources: collections.OrderedDict[str, Source] = collections.OrderedDict()
_NOTED = 10_000


class MatrixView(NamedTuple):
    """A matrix as the transpose, the conjugate, or both, of another one."""

    # The other one, (m, n).
    array: da.Array
    # Whether the matrix is its transpose, (n, m).
    transposed: bool
    # Whether it is its conjugate; never for real types.
    conjugated: bool


def apply_op(name: str, array: da.Array, op: str) -> da.Array:
    """Return op(array): lazily, so that `view_of` sees through it."""
    if op not in ("N", "T", "C"):
        raise PlanError(f"op_{name}={op!r}; expected 'N', 'T' or 'C'")
    if op == "N":
        return array
    if array.ndim < 2:
        raise PlanError(f"op_{name}={op!r}: {name.upper()} has one dimension, matrices have two; leave op_{name} out")
    transposed = array.T if array.ndim == 2 else array.swapaxes(-1, -2)
    return transposed.conj() if op == "C" and array.dtype.kind == "c" else transposed


def rechunk(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Cut an array as Dask does, and note of what it is made."""
    if not isinstance(x, Array):
        return NotImplemented
    found = dask_rechunk(x, *args, **kwargs)
    if x.ndim == 2 and found.name != x.name:
        _note(found.name, Source(x.name, x.chunks))
    return found


def _note(name: str, source: Source) -> Source:
    _sources[name] = source
    while len(_sources) > _NOTED:
        _sources.popitem(last=False)
    return source


def under(x: da.Array, name: str, chunks: Chunks) -> da.Array:
    """Return the array of that name and these chunks, which is under a matrix."""
    return x if x.name == name else Array(x.dask, name, chunks, meta=x._meta)


def operands_under(a: da.Array, b: da.Array, problem: Problem) -> list[da.Array]:
    """Return the arrays whose chunks are multiplied: those that `view_of` has found under A and B."""
    chunks = problem.a_chunks, problem.b_chunks
    found = zip((a, b), problem.arrays, chunks, problem.transposed, strict=True)
    return [under(x, name, sizes[::-1] if transposed else sizes) for x, name, sizes, transposed in found]


def is_lazy(x: da.Array) -> bool:
    """Whether an array's chunks are still to be made, as far as its graph tells: they are neither futures nor data."""
    layer = x.dask.layers.get(x.name)
    if layer is None or not layer.is_materialized():
        return True
    first = next(iter(layer.values()), None)
    return not isinstance(first, Future) and not hasattr(first, "shape")


def view_of(x: da.Array) -> MatrixView:
    """Return the array of which a matrix is a view; the matrix itself if that can't be seen."""
    transposed = conjugated = False
    # The array may have been computed meanwhile.
    while (source := _sources.get(x.name) or _source_of(x)) is not None and source.name in x.dask.layers:
        x = under(x, source.name, source.chunks or (x.chunks[::-1] if source.transposed else x.chunks))
        transposed, conjugated = transposed != source.transposed, conjugated != source.conjugated
    return MatrixView(x, transposed, conjugated and x.dtype.kind == "c")


def _source_of(x: da.Array) -> Source | None:
    """Return what a matrix is the transpose or the conjugate of; None if it is neither."""
    needs = x.dask.dependencies.get(x.name, ()) if x.name.startswith(("transpose-", "conjugate-")) else ()
    if len(needs) != 1:
        return None
    name = next(iter(needs))
    if under(x, name, x.chunks[::-1]).T.name == x.name:
        return _note(x.name, Source(name, transposed=True))
    if under(x, name, x.chunks).conj().name == x.name:
        return _note(x.name, Source(name, conjugated=True))
    return None


# D and the auxiliary outputs as Dask arrays: of a run, or of Dask's own operations where no run is possible


def run_outputs(
    problem: Problem,
    a: da.Array,
    b: da.Array,
    extras: Sequence[da.Array],
    scheme: Scheme | None = None,
    waves: HighLevelGraph | None = None,
    by_tasks: DaskTasks | None = None,
) -> tuple[da.Array, dict[str, da.Array]] | da.Array:
    """Return D of a run, and the auxiliary outputs if there are any.

    A and B are those of `problem_of_request`. With a scheme it is a sequence of runs; `waves` has these, and others, if
    they are in a graph already. With `by_tasks` parts of D may be left to Dask's own tasks.
    """
    prototype = b._meta if array_kind(b._meta) == "cupy" else a._meta
    meta = meta_from_array(prototype, ndim=2, dtype=carried(problem.dtype, problem.array))
    operands = as_they_lie(problem, a, b, extras)
    if scheme is None:
        graph = build_graph(problem, operands["a"], operands["b"], extras, by_tasks)
    else:
        graph = build_wave_output(waves or build_waves([(problem, scheme, operands)]), problem, scheme, "", by_tasks)
    d = Array(graph, problem.name, problem.out_chunks, meta=meta)
    return d if problem.formula.plain else _outputs(problem, d, a, b, scheme)


def as_they_lie(problem: Problem, a: da.Array, b: da.Array, extras: Sequence[da.Array]) -> dict[str, da.Array]:
    """Return the operands of a run by name; of A and B the arrays whose chunks are multiplied, transposed or not."""
    return dict(zip(problem.operands, [*operands_under(a, b, problem), *extras], strict=False))


def _outputs(
    problem: Problem, d: da.Array, a: da.Array, b: da.Array, scheme: Scheme | None
) -> tuple[da.Array, dict[str, da.Array]] | da.Array:
    """Return D and the auxiliary outputs of a run by name; D alone if there are none."""
    formula = problem.formula
    found: dict[str, da.Array] = {}
    for name in formula.per_element:
        dtype = formula.dtype_of(name, problem.result_type)
        chunks = tuple(
            sizes if kept else (1,) * len(sizes)
            for sizes, kept in zip(problem.out_chunks, formula.keeps(name), strict=True)
        )
        meta = output_meta(d, dtype)
        graph = build_output(problem, name, d) if scheme is None else build_wave_output(d.dask, problem, scheme, name)
        array = reducible(Array(graph, output_name(problem.name, name), chunks, meta=meta))
        if name == formula.sums:
            array = array.sum(axis=formula.sum_axis, dtype=dtype).astype(problem.result_type)
        found[name] = array.max() if name == "result_amax" else array
    if formula.operand_sum:
        found[formula.operand_sum] = operand_sum(formula, a, b, problem.result_type)
    return (d, found) if found else d


def output_meta(d: da.Array, dtype: np.dtype) -> Any:
    """Return the meta of an auxiliary output in chunks like those of D."""
    # NumPy warns when complex numbers become real, even if there are none.
    return meta_from_array(d._meta if dtype.kind == "c" else d._meta.real, dtype=dtype)


def _mapped(formula: Formula, x: da.Array, extras: Extras) -> da.Array:
    """Apply a user's function chunk by chunk, as a run does."""
    names = [name for name, _ in extras]

    def apply(part: Any, *inputs: Any) -> Any:
        return elementwise(np, formula, part, dict(zip(names, inputs, strict=True)))[0]

    return da.core.elemwise(apply, x, *(array for _, array in extras), dtype=x.dtype)


def operand_sum(formula: Formula, a: da.Array, b: da.Array, dtype: np.dtype) -> da.Array:
    """Return op(A) or op(B) summed over k, in the type of D."""
    array, axis = (a, -1) if formula.operand_sum == "bgrada" else (b, -2)
    return reducible(array).astype(compute_dtype(dtype, a.shape[-1])).sum(axis=axis).astype(dtype)


def without_a_run(
    a: da.Array, b: da.Array, formula: Formula, extras: Extras, types: Types
) -> tuple[da.Array, dict[str, da.Array]] | da.Array:
    """Return D and the auxiliary outputs, made by Dask's own operations where no run is possible."""
    dtype = dtype_from_name(types.d)
    inner = sum_dtype(types.operand, dtype, max(1, a.shape[-1]))
    if types.usual:
        wide = dask_matmul(a, b).astype(inner)
    else:
        wide = dask_matmul(widened(a, types.a, inner), widened(b, types.b, inner))
    if formula.function:
        d, *saved = [_mapped(formula, wide, extras)]
    else:
        d, *saved = elementwise(da, formula, wide, dict(extras))
    aux = dict(zip([formula.saved], saved, strict=False)) | reductions(da, dataclasses.replace(formula, amax=False), d)
    found = {
        name: array.astype(dtype if name == formula.sums and types.d not in FP8 else formula.dtype_of(name, dtype))
        for name, array in aux.items()
    }
    if formula.sums:
        found[formula.sums] = found[formula.sums].squeeze(formula.sum_axis - 2)
    if formula.amax:
        found["result_amax"] = abs(d).max() if d.size else da.zeros((), dtype=abs(d).dtype)
    d = scaled(formula, d, dict(extras))
    kind = array_kind(d._meta)
    meta = meta_from_array(d._meta, dtype=carried(types.d, kind))
    d = da.map_blocks(_in_stored_type, d, to=types.d, dtype=meta.dtype, meta=meta)
    if formula.operand_sum:
        found[formula.operand_sum] = operand_sum(formula, a, b, dtype)
    return (d, found) if found else d


def _in_stored_type(x: Any, to: str) -> Any:
    register_serializers()
    xp = array_module(x)
    return stored(xp, x, to, fp8_bytes=xp is not np)
