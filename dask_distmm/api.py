"""``matmul`` and ``explain``, which users call. Each parses its arguments once, and hands the request on."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Never, TypeVar, Unpack, cast, overload

import dask.array as da

from dask_distmm.arrays.jit import Jitted
from dask_distmm.arrays.kinds import any_kind
from dask_distmm.arrays.linalg.factorize import explain_result
from dask_distmm.arrays.product import NotCollective, explain_product, multiply
from dask_distmm.arrays.request import HINTS, UnknownChunksError, parse, takes
from dask_distmm.errors import PlanError
from dask_distmm.planning import Explanation
from dask_distmm.tracing.control import flattened
from dask_distmm.typing import (
    AllOptions,
    AnyEpilog,
    ArrayLike,
    AuxEpilog,
    Batch,
    Chunks,
    ComputeType,
    Distribution,
    DType,
    Engine,
    EpilogFunction,
    MatmulOptions,
    Method,
    NoOther,
    NoSuchOption,
    OneArgumentFewer,
    Op,
    TwoOperands,
    WithAux,
)

__all__ = ["explain", "matmul"]

F = TypeVar("F", bound=Callable[..., Any])


# Type checkers take the first that fits. The last two are for wrong calls: mypy says what is wrong with a call that
# resembles one of these, and prints all of them where none does.
@overload
def matmul(
    a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, *,
    epilog: AuxEpilog, result_amax: bool = False, **options: Unpack[MatmulOptions],
) -> WithAux: ...  # fmt: skip


@overload
def matmul(
    a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, *, result_amax: Literal[True],
    epilog: AnyEpilog | EpilogFunction | NoOther | None = None, **options: Unpack[MatmulOptions],
) -> WithAux: ...  # fmt: skip


@overload
def matmul(
    a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, *, result_amax: bool,
    epilog: AnyEpilog | EpilogFunction | NoOther | None = None, **options: Unpack[MatmulOptions],
) -> da.Array | WithAux: ...  # fmt: skip


@overload
def matmul(
    a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, *, result_amax: Literal[False] = False,
    epilog: AnyEpilog | EpilogFunction | NoOther | None = None, **options: Unpack[MatmulOptions],
) -> da.Array: ...  # fmt: skip


@overload
def matmul(
    a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, *more: OneArgumentFewer[Never],
    alpha: complex | NoOther = 1.0, beta: complex | NoOther | None = None, op_a: Op | NoOther = "N",
    op_b: Op | NoOther = "N", epilog: AnyEpilog | EpilogFunction | NoOther | None = None,
    epilog_inputs: Mapping[str, ArrayLike] | NoOther | None = None, bias_axis: Literal[-1, 0] | NoOther = -1,
    result_amax: bool | NoOther = False, a_type: DType | NoOther | None = None, b_type: DType | NoOther | None = None,
    result_type: DType | NoOther | None = None, quantization_scales: Mapping[str, Any] | NoOther | None = None,
    compute_type: ComputeType | NoOther | None = None, method: Method | NoOther | None = None,
    engine: Engine | NoOther | None = None, out_chunks: Chunks | NoOther | None = None,
    workers: Sequence[str] | int | NoOther | None = None,
    distributions: Sequence[Distribution | None] | NoOther | None = None,
    logger: logging.Logger | NoOther | None = None, batch: Batch | NoOther | None = None,
    gathered: Literal["a", "b"] | NoOther | None = None,
    **wrong: NoSuchOption[Never],
) -> da.Array: ...  # fmt: skip


@overload
def matmul(a: TwoOperands[Never], **options: Any) -> da.Array: ...


@any_kind  # type: ignore[misc]  # No value fits what overloads take besides.
@takes(AllOptions, HINTS)
def matmul(a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, **options: Unpack[AllOptions]) -> da.Array | WithAux:
    """Compute ``D = F(alpha * op(A) @ op(B) + beta * C)`` as one collective run on the cluster. Lazy.

    Parameters
    ----------
    a, b : dask.array.Array or array_like
        op(A) is (m, k) and op(B) (k, n), or either is a batch of matrices, with more axes before these; see `batch`.
        Without anything else asked for 1-D operands are taken as NumPy's matmul does. Types that no engine
        multiplies (object, masked), and programs without a cluster go to Dask's own function, unless the call asks for
        what only a run can do. Sparse chunks are multiplied by tasks.
    c : dask.array.Array or array_like, optional
        Broadcasts against D, with its batch axes. Needs `beta`; with ``beta=0`` it is not read.
    alpha, beta : number
        Factors; complex ones with complex operands only.
    op_a, op_b : {"N", "T", "C"}
        As stored, transposed, conjugate transposed, without a copy. A lazy ``a.T`` or ``a.conj()`` is seen through.
    epilog : str, Epilog or callable, optional
        F and the outputs beside D; see `dask_distmm.Epilog`. ``"allreduce"`` keeps all of D on every worker besides:
        nothing of it has to move for later multiplies. A function is called as ``f(x, **epilog_inputs)`` with parts of
        ``x = alpha * op(A) @ op(B) + beta * C`` (in the type that is summed in) and of its inputs, and returns the
        part of D. It works element by element, with operators and NumPy's functions of arrays (CuPy's arrays
        answer to these too); on GPUs it becomes one kernel where CuPy can fuse it.
    epilog_inputs : mapping, optional
        The epilog's inputs by name; those of a function broadcast against D. ``"bias"``: (n,) or (1, n), one value
        per column, or (m, 1), one per row. ``"relu_aux"``, ``"gelu_aux"``: the output of the forward pass, (m, n).
        For batches the same with batch axes before these, which those of a function and a bias may leave out.
    bias_axis : {-1, 0}
        Along which axis of D ``drelu_bgrad`` and ``dgelu_bgrad`` keep their length.
    result_amax : bool
        Return the largest absolute value of D too, as ``"result_amax"``, 0-d. Of an FP8 D: before it is scaled.
    a_type, b_type : str or dtype, optional
        The type that an operand of uint8 holds: ``"float8_e4m3"`` or ``"float8_e5m2"``. CuPy has no such types.
    result_type : str or dtype, optional
        Of D. FP8 operands: A's type (the default), the other FP8 type, ``"float16"``, ``"bfloat16"`` or
        ``"float32"``; float16 and bfloat16 operands: ``"float32"``; int8 and uint8: ``"int32"``. CuPy chunks of an
        FP8 D are uint8.
    quantization_scales : mapping, optional
        For FP8 only, and needed there: ``"a"``, ``"b"``, ``"d"`` for an FP8 D, and ``"c"`` for a C that is quantized
        too: numbers, or 0-d arrays, which stay lazy if they are Dask's. A matrix stands for its numbers times its
        scale; D is stored as ``saturate(scale_d * F(...))``. See
        https://dask-distmm.readthedocs.io/en/latest/precision.html.
    compute_type : str, optional
        ``"fp32"``, ``"tf32"`` or ``"bf16x9"`` for float32 and complex64, ``"fp64"`` or ``"fp64_emulated"`` for
        float64 and complex128. By default the config ``distmm.compute-type`` where it fits, else true float32 and
        float64.
    method : str, optional
        ``"local"``, ``"allgather"``, ``"reducescatter"``, ``"allreduce"``, ``"summa"``, or ``"auto"`` (the
        default, from the config ``distmm.method``): the fastest by the cost model, see `explain`.
    engine : str, optional
        ``"peer"`` (GPUs of one host), ``"cublasmp"`` (GPUs), ``"numpy"``, or ``"auto"`` (the default, from the config
        ``distmm.engine``): on GPUs the faster one by the cost model, peer where all can read each other's memory.
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
        faster by the cost model, see `explain`. `method`, `engine`, `workers`, `distributions` and `compute_type`
        need collective runs.
    gathered : {"a", "b"}, optional
        The operand that all workers keep whole after the run, besides its chunks: nothing of it has to move for later
        multiplies, as long as any of its chunks is on the cluster. See `replicate`. For matrices, not of FP8.

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
        does not fit, `workers` are not in the cluster, or no method has the `distributions`. Something was asked for
        that only a run can do (`method`, `engine`, `workers`, `distributions`, a `compute_type`,
        ``batch="collective"``, with a cluster also ``epilog="allreduce"`` and `gathered`), and there can't be a run.
        Also a ValueError.
    ProjectedMemoryError
        A worker would have to hold more than it may. Also a MemoryError.

    See Also
    --------
    explain, enable, Matmul, matmul_grouped, linalg.multi_dot

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
    result: da.Array | WithAux = multiply(parse(a, b, c, **options))
    return result


def _or_of_function(explain: F) -> F:
    """Let `explain` take a function of `jit`, too, with what that takes."""

    @functools.wraps(explain)
    def either(*args: Any, **options: Any) -> Explanation:
        if args and isinstance(args[0], Jitted):
            return explain_result(tuple(flattened(args[0](*args[1:], **options))[0]))
        explanation: Explanation = explain(*args, **options)
        return explanation

    return cast(F, either)


@overload
def explain(a: Callable[..., Any], /, *args: Any, **options: Any) -> Explanation: ...


@overload
def explain(
    a: ArrayLike, b: ArrayLike | None = None, c: ArrayLike | None = None, **options: Unpack[AllOptions]
) -> Explanation: ...


@_or_of_function
@any_kind
@takes(AllOptions, HINTS)
def explain(a: Any, b: ArrayLike | None = None, c: ArrayLike | None = None, **options: Any) -> Explanation:
    """Return the plan for ``matmul(a, b, ...)`` on the cluster as it is now, without computing anything.

    The first line says what ``A @ B`` does under `enable`. Without `b` it is the plan of a lazy result: of the runs
    that it comes from. Of a function of `jit`, called as ``explain(function, *arguments)``, it shows each statement
    with its line, where its value is, and what travels.

    Parameters
    ----------
    a, b, c, alpha, beta, op_a, op_b, epilog, epilog_inputs, bias_axis, result_amax
    a_type, b_type, result_type, quantization_scales, compute_type
    method, engine, out_chunks, workers, distributions, batch, gathered, logger
        As for `matmul`; `logger` is told nothing. `a` alone is a result, as `linalg.explain` takes it. Without a
        cluster ``workers=4`` plans for four imagined ones, with one thread each and no memory limit.

    Returns
    -------
    Plan, WavePlan, BatchPlan, NotCollective or ChainPlan
        For matrices: method, grid, block sizes, bytes, memory and time, with all that the method was chosen against.
        For products that do not fit into memory: the waves. For batches: the way, and the estimates of both. Or the
        reason why Dask's own function would run, unknown chunk sizes among others (`matmul` refuses those). A plan has
        in `left` why ``@`` under `enable` would not take it: empty if it would, None for what ``@`` can't be asked for.
        For a result: its run, or all of them.

    Raises
    ------
    PlanError, ProjectedMemoryError
        As `matmul`. Without `b`: there are options, or `a` has been computed or persisted.

    See Also
    --------
    matmul, explain_grouped, linalg.explain

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_distmm import explain
    >>> x = da.ones((100_000, 500), chunks=(10_000, 500))
    >>> plan = explain(x.T, x, workers=4)
    >>> plan.method, plan.bytes_moved
    ('reducescatter', 7500000)
    >>> explain(x, x.astype(object).T).method
    'dask'
    """
    if b is None:
        if c is not None or options:
            option = "c" if c is not None else next(iter(options))
            raise PlanError(f"b is missing, and {option}= is for products: pass b, too")
        return explain_result(a)
    try:
        request = parse(a, b, c, **options)
    except UnknownChunksError as error:
        return NotCollective(str(error))
    return explain_product(request)
