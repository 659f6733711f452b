"""D and the auxiliary outputs as Dask arrays: of a run, or of Dask's own operations where no run is possible."""

from __future__ import annotations

import dataclasses
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import Array
from dask.array.utils import meta_from_array
from dask.highlevelgraph import HighLevelGraph

from dask_distmm.arrays.fallback import dask_matmul
from dask_distmm.arrays.kinds import reducible
from dask_distmm.arrays.quantize import widened
from dask_distmm.arrays.request import Extras, Request
from dask_distmm.comms.serializers import register_serializers
from dask_distmm.graph.build import DaskTasks, build_graph, build_output
from dask_distmm.graph.waves import build_wave_output, build_waves
from dask_distmm.numeric.epilogs import Formula, elementwise, reductions, scaled
from dask_distmm.numeric.types import FP8, carried, compute_dtype, dtype_from_name, stored, sum_dtype
from dask_distmm.planning.waves import Scheme
from dask_distmm.runtime.chunks import array_kind, array_module
from dask_distmm.runtime.keys import output_name
from dask_distmm.typing import WithAux


def as_pair(found: WithAux | da.Array) -> WithAux:
    """Return D and the auxiliary outputs, also where there are none."""
    return found if isinstance(found, tuple) else (found, {})


def run_outputs(
    request: Request,
    scheme: Scheme | None = None,
    waves: HighLevelGraph | None = None,
    by_tasks: DaskTasks | None = None,
) -> WithAux | da.Array:
    """Return D of a run of two matrices, and the auxiliary outputs if there are any.

    With a scheme it is a sequence of runs; `waves` has these, and others, if they are in a graph already. With
    `by_tasks` parts of D may be left to Dask's own tasks.
    """
    problem, formula, (a, b, *extras) = request.problem, request.formula, request.lying.values()
    meta = meta_from_array(request.prototype, ndim=2, dtype=carried(problem.dtype, problem.array))
    if scheme is None:
        graph = build_graph(problem, a, b, extras, by_tasks)
    else:
        waves = waves or build_waves([(problem, scheme, request.lying)])
        graph = build_wave_output(waves, problem, scheme, "", by_tasks)
    d = Array(graph, problem.name, problem.out_chunks, meta=meta)
    found: dict[str, da.Array] = {}
    for name in formula.per_element:
        output = problem.output(name)
        meta = output_meta(d, dtype_from_name(output.dtype))
        graph = build_output(problem, name, d) if scheme is None else build_wave_output(d.dask, problem, scheme, name)
        found[name] = finished(request, name, Array(graph, output_name(problem.name, name), output.chunks, meta=meta))
    if formula.operand_sum:
        found[formula.operand_sum] = operand_sum(request)
    return (d, found) if found else d


def finished(request: Request, name: str, parts: da.Array) -> da.Array:
    """Return an auxiliary output from what was made of each chunk of D."""
    array = reducible(parts)
    if name == "result_amax":
        return array.max()
    if name != request.formula.sums:
        return array
    array = array.sum(axis=request.formula.sum_axis - 2, dtype=parts.dtype)
    return array if request.types.d in FP8 else array.astype(request.dtype)


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


def operand_sum(request: Request) -> da.Array:
    """Return op(A) or op(B) summed over k, in the type of D."""
    array, axis = (request.a, -1) if request.formula.operand_sum == "bgrada" else (request.b, -2)
    dtype = compute_dtype(request.dtype, request.a.shape[-1])
    return reducible(array).astype(dtype).sum(axis=axis).astype(request.dtype)


def without_a_run(request: Request) -> WithAux | da.Array:
    """Return D and the auxiliary outputs, made by Dask's own operations where no run is possible."""
    a, b, formula, extras, types = request.a, request.b, request.formula, request.extras, request.types
    dtype = request.dtype
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
        found[formula.operand_sum] = operand_sum(request)
    return (d, found) if found else d


def _in_stored_type(x: Any, to: str) -> Any:
    register_serializers()
    xp = array_module(x)
    return stored(xp, x, to, fp8_bytes=xp is not np)
