"""D and the auxiliary outputs as Dask arrays: of a run, or of Dask's own operations where no run is possible."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.array.blockwise import blockwise
from dask.array.core import Array
from dask.array.utils import meta_from_array
from dask.highlevelgraph import HighLevelGraph

from dask_distmm.arrays.fallback import dask_matmul
from dask_distmm.arrays.kinds import reducible
from dask_distmm.arrays.quantize import widened
from dask_distmm.arrays.request import Request
from dask_distmm.comms.serializers import register_serializers
from dask_distmm.graph.build import DaskTasks, build_graph, build_output
from dask_distmm.numeric.epilogs import Formula, finish
from dask_distmm.numeric.types import FP8, carried, compute_dtype, dtype_from_name, stored, sum_dtype, typed
from dask_distmm.planning.computation import Computation, NamedMatrix
from dask_distmm.planning.waves import Scheme
from dask_distmm.runtime.chunks import array_kind, array_module
from dask_distmm.runtime.keys import output_name
from dask_distmm.typing import WithAux


def as_pair(output: WithAux | da.Array) -> WithAux:
    """Return D and the auxiliary outputs, also where there are none."""
    return output if isinstance(output, tuple) else (output, {})


def delivered(request: Request, d: Array, aux: dict[str, da.Array]) -> WithAux | da.Array:
    """Return D in the axes and chunks that were asked for, and the auxiliary outputs if there are any."""
    if request.formula.operand_sum:
        aux = {**aux, request.formula.operand_sum: operand_sum(request)}
    if request.dropped:
        d = d[(..., *(0 if axis in request.dropped else slice(None) for axis in (-2, -1)))]
    if request.out_chunks not in (None, d.chunks):
        d = d.rechunk(request.out_chunks, method="tasks")
    return (d, aux) if aux else d


def run_outputs(
    request: Request, scheme: Scheme | None = None, by_tasks: DaskTasks | None = None
) -> WithAux | da.Array:
    """Return D of a run of two matrices, and the auxiliary outputs if there are any.

    With a scheme it is a sequence of runs. With `by_tasks` parts of D may be left to Dask's own tasks.
    """
    problem, (a, b) = request.problem, request.lying
    graph = build_graph(problem, a, b, [array for _, array in request.extras], by_tasks, scheme)
    d = run_output(problem, problem.d, graph, request.prototype)
    aux: dict[str, da.Array] = {}
    for output in problem.outputs[1:]:
        parts = run_output(problem, output, build_output(problem, output.name, d), request.prototype)
        aux[output.name] = finished(request, output.name, parts)
    return delivered(request, d, aux)


def run_output(problem: Computation, output: NamedMatrix, graph: HighLevelGraph, prototype: Any) -> Array:
    """Return an output of a run as a lazy array, whose chunks are of the same kind as an array."""
    chunks = tuple(tuple(size if size >= 0 else np.nan for size in output.chunks[axis]) for axis in output.axes)
    meta = output_meta(prototype, carried(output.dtype, problem.array), len(output.axes))
    return Array(graph, output_name(problem.name, output.name), chunks, meta=meta)


def finished(request: Request, name: str, parts: da.Array) -> da.Array:
    """Return an auxiliary output from what was made of each chunk of D."""
    array = reducible(parts)
    if name == "result_amax":
        return array.max()
    if name != request.formula.sums:
        return array
    array = array.sum(axis=request.formula.sum_axis - 2, dtype=parts.dtype)
    return array if request.types.d in FP8 else array.astype(request.dtype)


def output_meta(meta: Any, dtype: np.dtype, ndim: int | None = None) -> Any:
    """Return the meta of an output, of that of an array whose chunks are of the same kind."""
    # NumPy warns when complex numbers become real, even if there are none.
    return meta_from_array(meta if dtype.kind == "c" else meta.real, ndim, dtype=dtype)


def operand_sum(request: Request) -> da.Array:
    """Return op(A) or op(B) summed over k, in the type of D."""
    array, axis = (request.a, -1) if request.formula.operand_sum == "bgrada" else (request.b, -2)
    dtype = compute_dtype(request.dtype, request.a.shape[-1])
    return reducible(array).astype(dtype).sum(axis=axis).astype(request.dtype)


# By plain tasks


def plain_tasks(
    request: Request,
    function: Callable[..., Any],
    chunks: tuple[tuple[int, ...], ...],
    operands: Sequence[tuple[da.Array, tuple[int, ...]]],
    dtypes: tuple[str, ...],
) -> WithAux | da.Array:
    """Return D in some chunks, and the auxiliary outputs: a task each, of parts of some arrays and of the formula's.

    `operands` come with the axes of D that theirs are; `dtypes` are the names of the types of D and of them.
    """
    formula, ndim, arguments = request.formula, len(chunks), list(itertools.chain(*operands))
    for _, array in request.extras:
        first = ndim - array.ndim
        arguments += [in_chunks(array, chunks[first:]), tuple(range(first, ndim))]
    dtype = carried(request.types.d, request.kind)
    meta = meta_from_array(request.prototype, ndim=ndim, dtype=dtype)
    done = blockwise(
        function,
        tuple(range(ndim)),
        *arguments,
        token="matmul-items",
        adjust_chunks=dict(enumerate(chunks)),
        align_arrays=False,
        concatenate=False,
        meta=meta,
        dtype=dtype,
        dtypes=(*dtypes, *(array.dtype.name for _, array in request.extras)),
        names=tuple(name for name, _ in request.extras),
        formula=formula,
    )
    aux: dict[str, da.Array] = {}
    for number, name in enumerate(formula.per_element, start=1):
        kind = formula.dtype_of(name, request.dtype)
        sizes = zip(chunks, (name != "result_amax",) * (ndim - 2) + formula.keeps(name), strict=True)
        parts = done.map_blocks(
            operator.itemgetter(number),
            dtype=kind,
            chunks=tuple(own if kept else (1,) * len(own) for own, kept in sizes),
            meta=output_meta(done._meta, kind),
        )
        aux[name] = finished(request, name, parts)
    return delivered(request, done.map_blocks(operator.itemgetter(0), dtype=dtype, meta=meta) if aux else done, aux)


def in_chunks(array: da.Array, chunks: Sequence[tuple[int, ...]]) -> da.Array:
    """Return an array in chunks of D, but along axes of length 1."""
    wanted = tuple(sizes if n != 1 else (1,) for n, sizes in zip(array.shape, chunks, strict=True))
    # A shuffle of Dask's can't take CuPy chunks, and makes all parts at once, which could not be used apart.
    return array if array.chunks == wanted else array.rechunk(wanted, method="tasks")


def finish_chunk(acc: Any, *extras: Any, dtypes: tuple[str, ...], names: tuple[str, ...], formula: Formula) -> Any:
    """Apply a formula to a chunk of a product; return D, with the auxiliary outputs if there are any."""
    register_serializers()
    xp, dtype, aux = array_module(acc), dtype_from_name(dtypes[0]), dict[str, Any]()
    inputs = {key: typed(x, name) for key, x, name in zip(names, extras, dtypes[2:], strict=True)}
    with np.errstate(all="ignore"):
        if not formula.trivial:
            acc, aux = finish(xp, formula, acc, {key: as_kind(xp, x) for key, x in inputs.items()})
        d = stored(xp, acc, dtypes[0], fp8_bytes=xp is not np)
    outputs = [aux[name].astype(formula.dtype_of(name, dtype), copy=False) for name in formula.per_element]
    return (d, *outputs) if outputs else d


def as_kind(xp: Any, x: Any) -> Any:
    """Return a chunk as one of CuPy's if others are."""
    return x if xp is np or array_kind(x) == "cupy" else xp.asarray(x)


def without_a_run(request: Request, *, possible: bool) -> WithAux | da.Array:
    """Return D, and the auxiliary outputs if there are any, of Dask's own product; `possible`: a run might be, too."""
    a, b, types = request.a, request.b, request.types
    if request.plain and request.empty and (possible or request.is_batch):
        chunks = "auto" if request.is_batch else request.chunks
        return delivered(request, da.zeros(request.shape, dtype=request.dtype, chunks=chunks), {})
    if request.plain:
        # The very function that Dask would have called.
        return delivered(request, dask_matmul(a, b).astype(request.dtype), {})
    dtype = sum_dtype(types.operand, request.dtype, max(1, a.shape[-1]))
    if types.usual:
        wide = dask_matmul(a, b).astype(dtype)
    else:
        wide = dask_matmul(widened(a, types.a, dtype), widened(b, types.b, dtype))
    return plain_tasks(request, finish_chunk, wide.chunks, [(wide, tuple(range(wide.ndim)))], (types.d, dtype.name))
