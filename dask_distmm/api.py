"""``matmul`` and ``explain``: check, plan as far as the cluster is known, hand over to the graph."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import dask.array as da
import numpy as np
from dask.utils import format_time

from dask_distmm.arrays import dispatch as operator
from dask_distmm.arrays import formula
from dask_distmm.arrays.kinds import any_kind, check_planned, ndim_of, planning
from dask_distmm.arrays.quantize import operands
from dask_distmm.arrays.request import check_distributions, check_names, check_shapes, make_problem, result_chunks
from dask_distmm.arrays.views import under
from dask_distmm.config import setting
from dask_distmm.engines.base import ENGINES, log
from dask_distmm.engines.chunks import array_kind
from dask_distmm.errors import NoWorkersError, PlanError, ProjectedMemoryError
from dask_distmm.numeric.types import FP8, Types, resolve_types, supported, takes
from dask_distmm.planning import BatchPlan, Plan, Problem, Worker
from dask_distmm.planning.distribution import Distribution
from dask_distmm.runtime.client import Snapshot, current_client, recent_snapshot, snapshot
from dask_distmm.show.html import reason_html

__all__ = ["NotCollective", "explain", "matmul"]


class NotCollective:
    """What `explain` returns where Dask's own function would run. False in a condition.

    Parameters
    ----------
    reason
        Why.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Dask's own matmul would run: {self.reason}"

    def _repr_html_(self) -> str:
        return reason_html(self.reason)


@any_kind
def matmul(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: complex = 1.0,
    beta: complex | None = None,
    op_a: str = "N",
    op_b: str = "N",
    epilog: str | Callable[..., Any] | None = None,
    epilog_inputs: Mapping[str, Any] | None = None,
    bias_axis: int = -1,
    result_amax: bool = False,
    a_type: Any = None,
    b_type: Any = None,
    result_type: Any = None,
    quantization_scales: Mapping[str, Any] | None = None,
    compute_type: str | None = None,
    method: str | None = None,
    engine: str | None = None,
    out_chunks: Any = None,
    workers: Sequence[str] | int | None = None,
    distributions: Sequence[Distribution | None] | None = None,
    logger: logging.Logger | None = None,
    batch: str | None = None,
) -> Any:
    """Compute ``D = F(alpha * op(A) @ op(B) + beta * C)`` as one collective run on the cluster. Lazy.

    Parameters
    ----------
    a, b : dask.array.Array or array_like
        op(A) is (m, k) and op(B) (k, n), or either is a batch of such, with more axes before these; see `batch`.
        Without anything else asked for 1-D operands are taken as NumPy's matmul does. Types that no engine
        multiplies (object, sparse, masked), and programs without a cluster go to Dask's own function.
    c : dask.array.Array or array_like, optional
        Broadcasts against D, with its batch axes. Needs `beta`; with ``beta=0`` it is not read.
    alpha, beta : number
        Factors; complex ones with complex operands only.
    op_a, op_b : {"N", "T", "C"}
        As stored, transposed, conjugate transposed, without a copy. A lazy ``a.T`` or ``a.conj()`` is seen through.
    epilog : str, Epilog or callable, optional
        F and what is kept beside D; see `dask_distmm.numeric.epilogs`. ``"allreduce"`` keeps all of D on every worker besides:
        nothing of it has to move for later multiplies. A function is called as ``f(x, **epilog_inputs)`` with parts of
        ``x = alpha * op(A) @ op(B) + beta * C`` (in the type that is summed in) and of its inputs, and returns the
        part of D. It works element by element, with operators and NumPy's functions of arrays (CuPy's arrays
        answer to these too); on GPUs it becomes one kernel where CuPy can fuse it.
    epilog_inputs : mapping, optional
        The epilog's inputs by name; those of a function broadcast against D. ``"bias"``: (n,) or (1, n), a value a
        column, or (m, 1), a value a row. ``"relu_aux"``, ``"gelu_aux"``: what the forward pass has returned, (m, n).
        For batches the same with batch axes before these, which those of a function and a bias may leave out.
    bias_axis : {-1, 0}
        Along which axis of D ``drelu_bgrad`` and ``dgelu_bgrad`` keep their length.
    result_amax : bool
        Return the largest absolute value of D too, as ``"result_amax"``, 0-d. Of an FP8 D: before it is scaled.
    a_type, b_type : str or dtype, optional
        What an operand of uint8 holds: ``"float8_e4m3"`` or ``"float8_e5m2"``. CuPy has no such types.
    result_type : str or dtype, optional
        Of D. FP8 operands: A's type (the default), the other FP8 type, ``"float16"``, ``"bfloat16"`` or
        ``"float32"``; float16 and bfloat16 operands: ``"float32"``; int8 and uint8: ``"int32"``. CuPy chunks of an
        FP8 D are uint8.
    quantization_scales : mapping, optional
        For FP8 only, and needed there: ``"a"``, ``"b"``, ``"d"`` for an FP8 D, and ``"c"`` for a C that is quantized
        too: numbers, or 0-d arrays, which stay lazy if they are Dask's. A matrix stands for its numbers times its
        scale; D is stored as ``saturate(scale_d * F(...))``. See docs/precision.md.
    compute_type : str, optional
        ``"fp32"``, ``"tf32"`` or ``"bf16x9"`` for float32 and complex64, ``"fp64"`` or ``"fp64_emulated"`` for
        float64 and complex128. By default the config ``distmm.compute-type`` where it fits, else true float32 and
        float64.
    method : str, optional
        ``"local"``, ``"allgather"``, ``"reducescatter"``, ``"allreduce"``, ``"summa"``, or ``"auto"`` (the
        default, from the config ``distmm.method``): the quickest by the cost model, see `explain`.
    engine : str, optional
        ``"peer"`` (GPUs of one host), ``"cublasmp"`` (GPUs), ``"numpy"``, or ``"auto"`` (the default, from the config
        ``distmm.engine``): on GPUs the quicker one by the cost model, peer where all can read each other's memory.
    out_chunks : optional
        Chunks of the result, in any form that Dask takes; ``(op(A).chunks[0], op(B).chunks[1])`` by default.
    workers : sequence of str or int, optional
        Addresses of the workers that may multiply, or how many; all by default.
    distributions : sequence of Slab, BlockCyclic or None, optional
        How A, B and D are to lie on the workers while they are multiplied; None leaves it to the planner. Narrows the
        choice of the method. See `dask_distmm.distribute`.
    logger : logging.Logger, optional
        Is told what is multiplied and how, in place of the logger ``"dask_distmm"`` of this process.
    batch : str, optional
        How operands of more than two dimensions are multiplied (batch axes are broadcast as NumPy's matmul does):
        ``"items"``, whole items in plain tasks; ``"collective"``, collective runs; ``"auto"``, the default, the
        quicker by the cost model, see `explain`. `method`, `engine`, `workers`, `distributions` and `compute_type`
        need collective runs.

    Returns
    -------
    dask.array.Array
        (m, n), after batch axes if there are any, with NumPy's dtype for the product of the two, or `result_type`.
        With an epilog that has auxiliary outputs, or `result_amax`: a pair of it and a dict of these arrays by name.
        All of them come from one run.

    Raises
    ------
    PlanError
        Shapes do not match, a scalar was given, chunk sizes are unknown, a name is unknown, an input is missing or
        does not fit, `workers` are not in the cluster, or no method has the `distributions`. Also a ValueError.
    ProjectedMemoryError
        A worker would have to hold more than it may. Also a MemoryError.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import matmul
    >>> x = da.ones((1000, 500), chunks=(250, 500))
    >>> matmul(x.T, x).chunks
    ((500,), (500,))
    >>> d, aux = matmul(x, x, op_a="T", epilog="relu_aux")
    >>> aux["relu_aux"].dtype
    dtype('bool')
    """
    if ndim_of(a) > 2 or ndim_of(b) > 2:
        from dask_distmm.arrays import batched

        check_planned("batches need more of Dask than it has there")
        return batched.matmul(
            a, b, c, alpha=alpha, beta=beta, op_a=op_a, op_b=op_b, epilog=epilog, epilog_inputs=epilog_inputs,
            bias_axis=bias_axis, result_amax=result_amax, a_type=a_type, b_type=b_type, result_type=result_type,
            quantization_scales=quantization_scales, compute_type=compute_type, method=method, engine=engine,
            out_chunks=out_chunks, workers=workers, distributions=distributions, logger=logger, batch=batch,
        )  # fmt: skip
    _check_batch(batch)
    method, engine = check_names(method, engine)
    asked = check_distributions(distributions)
    a, b = operands(a, b)
    a, b = (formula.apply_op(name, x, op) for name, x, op in (("a", a, op_a), ("b", b, op_b)))
    check_shapes(a, b)
    types = resolve_types(a.dtype, b.dtype, a_type, b_type, result_type, compute_type, setting("compute-type"))
    spec, extras = formula.parse(
        a, b, c, alpha, beta, epilog, epilog_inputs or {}, bias_axis, result_amax, types, quantization_scales
    )
    reason = why_not(a, b, types, cluster=not planning()) or formula.unfit(extras)
    collective = check_planned(reason) is None
    if spec.plain and types.usual:
        if not collective:
            return operator.dask_matmul(a, b)
        if a.ndim == 1 or b.ndim == 1:
            if out_chunks is not None or any(asked):
                raise PlanError("out_chunks and distributions can be given for 2-D operands only")
            result = matmul(*_matrices(a, b), method=method, engine=engine, workers=workers, logger=logger)
            return _without_axes(result, a, b)
        if 0 in (*a.shape, *b.shape):
            chunks = result_chunks(a, b, out_chunks)
            return da.zeros((a.shape[0], b.shape[1]), chunks=chunks, dtype=np.result_type(a.dtype, b.dtype))
    if not collective or 0 in (*a.shape, *b.shape):
        return formula.without_a_run(a, b, spec, extras, types)
    problem = make_problem(a, b, method, engine, out_chunks, workers, spec, extras, types, asked)
    _plan_now(problem, logger or log)
    return formula.result(problem, a, b, [array for _, array in extras])


@any_kind
def explain(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: complex = 1.0,
    beta: complex | None = None,
    op_a: str = "N",
    op_b: str = "N",
    epilog: str | Callable[..., Any] | None = None,
    epilog_inputs: Mapping[str, Any] | None = None,
    bias_axis: int = -1,
    result_amax: bool = False,
    a_type: Any = None,
    b_type: Any = None,
    result_type: Any = None,
    quantization_scales: Mapping[str, Any] | None = None,
    compute_type: str | None = None,
    method: str | None = None,
    engine: str | None = None,
    out_chunks: Any = None,
    workers: Sequence[str] | int | None = None,
    distributions: Sequence[Distribution | None] | None = None,
    batch: str | None = None,
) -> Plan | BatchPlan | NotCollective:
    """Return the plan for ``matmul(a, b, ...)`` on the cluster as it is now, without computing anything.

    Parameters
    ----------
    a, b, c, alpha, beta, op_a, op_b, epilog, epilog_inputs, bias_axis, result_amax
        As for `matmul`.
    a_type, b_type, result_type, quantization_scales, compute_type
        As for `matmul`.
    method, engine, out_chunks, workers, distributions, batch
        As for `matmul`. Without a cluster ``workers=4`` plans for four imagined ones, with one thread each and
        no memory limit.

    Returns
    -------
    Plan, BatchPlan or NotCollective
        For matrices: method, grid, block sizes, bytes, memory and time, with all that the method was chosen against.
        For batches: the way, and the estimates of both. Or the reason why Dask's own function would run.

    Raises
    ------
    PlanError, ProjectedMemoryError
        As `matmul`.
    """
    if ndim_of(a) > 2 or ndim_of(b) > 2:
        from dask_distmm.arrays import batched

        return batched.explain(
            a, b, c, alpha=alpha, beta=beta, op_a=op_a, op_b=op_b, epilog=epilog, epilog_inputs=epilog_inputs,
            bias_axis=bias_axis, result_amax=result_amax, a_type=a_type, b_type=b_type, result_type=result_type,
            quantization_scales=quantization_scales, compute_type=compute_type, method=method, engine=engine,
            out_chunks=out_chunks, workers=workers, distributions=distributions, logger=None, batch=batch,
        )  # fmt: skip
    _check_batch(batch)
    method, engine = check_names(method, engine)
    a, b = operands(a, b)
    a, b = (formula.apply_op(name, x, op) for name, x, op in (("a", a, op_a), ("b", b, op_b)))
    check_shapes(a, b)
    types = resolve_types(a.dtype, b.dtype, a_type, b_type, result_type, compute_type, setting("compute-type"))
    spec, extras = formula.parse(
        a, b, c, alpha, beta, epilog, epilog_inputs or {}, bias_axis, result_amax, types, quantization_scales
    )
    client = current_client()
    imagined = client is None and isinstance(workers, int)
    reason = why_not(a, b, types, cluster=not imagined) or formula.unfit(extras)
    if reason is not None:
        return NotCollective(reason)
    a, b = _matrices(a, b)
    if 0 in (*a.shape, *b.shape):
        return NotCollective("the product is empty or all zeros, nothing is multiplied")
    asked = check_distributions(distributions)
    problem = make_problem(a, b, method, engine, out_chunks, workers, spec, extras, types, asked)
    if imagined:
        assert isinstance(workers, int)
        imaginary = [Worker(f"worker-{i}") for i in range(workers)]
        known: Snapshot | None = Snapshot(imaginary, [], [None, None], [problem.engine_alone], [])
    else:
        assert client is not None
        known = snapshot(client, problem, [*map(under, (a, b), problem.arrays, problem.turned)])
    if known is None:
        return NotCollective("an asynchronous client can't be asked here; call explain from a synchronous one")
    return known.plan(problem, reordered=True)


def product(a: da.Array, b: da.Array) -> da.Array | str:
    """Return ``a @ b`` under `enable`, or why it is left to Dask's own function.

    Parameters
    ----------
    a, b
        Operands as `why_leave` lets them pass, of at most two dimensions.

    Raises
    ------
    ProjectedMemoryError
        It does not fit, and the config ``distmm.memory.exceeded`` says to raise.
    """
    exceeded = setting("memory.exceeded")
    if exceeded not in ("dask", "raise"):
        raise PlanError(f"config distmm.memory.exceeded is {exceeded!r}; expected 'dask' or 'raise'")
    row, col = _matrices(a, b)
    if 0 in (*row.shape, *col.shape):
        return cast(da.Array, matmul(a, b))
    problem = make_problem(row, col, *check_names(None, None), None, None)
    try:
        made = _plan_now(problem, log)
    except ProjectedMemoryError as error:
        if exceeded == "raise":
            raise
        log.warning("left to Dask's own tasks: %s", error)
        return str(error)
    if made is not None and not made.worth_it:
        assert made.by_tasks is not None
        seconds = format_time(made.by_tasks.seconds), format_time(made.expected)
        return "its own tasks are expected to take {}, a run {}".format(*seconds)
    return _without_axes(formula.result(problem, row, col, []), a, b)


def _plan_now(problem: Problem, logger: logging.Logger) -> Plan | None:
    """Return the plan as the cluster is now, and log it; None where nobody can be asked, or there is no worker yet."""
    client = current_client()
    try:
        known = recent_snapshot(client, problem) if client is not None else None
    except NoWorkersError:
        return None  # There may be some when it is computed.
    if known is None:
        return None
    made = known.plan(problem)
    logger.info("%s, lazy\n%r", problem.name, made)
    return made


def _matrices(a: da.Array, b: da.Array) -> tuple[da.Array, da.Array]:
    """Return the operands with vectors as matrices of one row, and of one column."""
    return (a[None, :] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)


def _without_axes(d: da.Array, a: da.Array, b: da.Array) -> da.Array:
    """Return D without the axes that `_matrices` has given the operands."""
    return d[0 if a.ndim == 1 else slice(None), 0 if b.ndim == 1 else slice(None)]


def why_not(a: da.Array, b: da.Array, types: Types | None = None, *, cluster: bool = True, most: int = 2) -> str | None:
    """Return why a product can't run here and goes to Dask's own function, or None if it can."""
    if max(a.ndim, b.ndim) > most:
        return f"the operands have {a.ndim} and {b.ndim} dimensions; a run is of matrices; for batches there is matmul"
    kinds = {name: array_kind(array._meta) for name, array in (("A", a), ("B", b))}
    for name, kind in kinds.items():
        if kind not in ("numpy", "cupy"):
            return (
                f"the chunks of {name} are {kind}; engines take numpy.ndarray and cupy.ndarray: convert by map_blocks"
            )
    kind = "cupy" if "cupy" in kinds.values() else "numpy"
    dtypes = [a.dtype.name, b.dtype.name] if types is None else list(types[:3])
    if types is None and set(dtypes) & set(FP8):
        return "FP8 needs scales; call dask_distmm.matmul(..., quantization_scales=...)"
    if not all(supported(array.dtype) for array in (a, b)) or not any(takes(name, kind, dtypes) for name in ENGINES):
        names = " and ".join(dict.fromkeys(dtypes))
        return f"no engine multiplies {kind} arrays of the types {names}; convert them, as by astype('float64')"
    if cluster and current_client() is None:
        return "there is no cluster; create a distributed.Client"
    return None


def why_leave(a: da.Array, b: da.Array, minimum_flops: float | None) -> str | None:
    """Return why ``a @ b`` under `enable` is left to Dask's own function, or None if it is taken."""
    reason = why_not(a, b, most=max(a.ndim, b.ndim))
    if reason is not None:
        return reason
    if any(np.isnan(size) for size in itertools.chain(*a.chunks, *b.chunks)):
        return "the chunk sizes are unknown; call compute_chunk_sizes()"
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        return "the shapes don't match"
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        return "the shapes don't match"
    m, n = (a.shape[-2] if a.ndim > 1 else 1), (b.shape[-1] if b.ndim > 1 else 1)
    flops = 2.0 * math.prod(batch) * m * n * a.shape[-1]
    if minimum_flops is not None and flops < minimum_flops:
        return f"{flops:.3g} flops are too little work to pay (config distmm.minimum-flops: {minimum_flops:.3g})"
    return None


def _check_batch(batch: str | None) -> None:
    if batch not in (None, "auto"):
        raise PlanError(
            f"batch={batch!r}: the operands are matrices, there is one product; method='local' multiplies on one worker"
        )
