"""The request of a user, parsed and checked once; and the Problem that it makes.

The formula ``D = F(alpha * op(A) @ op(B) + beta * C)`` as a user gives it: checked, with the arrays it reads.

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
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, cast

import dask.array as da
import numpy as np
from dask.array.core import Array, normalize_chunks
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from distributed import Future
from distributed.protocol.pickle import dumps

from dask_distmm.arrays.fallback import dask_rechunk, has_unknown_chunks
from dask_distmm.arrays.kinds import as_array, how_to_cut
from dask_distmm.arrays.quantize import as_operands, with_scales
from dask_distmm.config import Options, read_options, setting
from dask_distmm.engines.base import log
from dask_distmm.errors import PlanError, check_options, page, unknown_name
from dask_distmm.numeric.epilogs import PLAIN, Epilog, Formula
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.numeric.types import Types, dtype_from_name, resolve_types, sum_dtype, supported
from dask_distmm.planning import ENGINES, METHODS, Chunks, NamedMatrix, Problem
from dask_distmm.planning.problem import FREE, Distribution, Distributions
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.typing import AllOptions

# The defaults of the options, and the signatures of the functions that take them


P = ParamSpec("P")
T = TypeVar("T")

# In the order in which signatures show them.
_NAMES = (
    "alpha beta op_a op_b epilog epilog_inputs bias_axis result_amax a_type b_type result_type quantization_scales "
    "compute_type method engine out_chunks workers distributions logger batch gathered"
)
_NOT_NONE = {"alpha": 1.0, "op_a": "N", "op_b": "N", "bias_axis": -1, "result_amax": False}
DEFAULTS = cast(AllOptions, {name: _NOT_NONE.get(name) for name in _NAMES.split()})


# Names that similar functions have, and how the same is written here.
HINTS = {
    "bias": "pass epilog='bias' and epilog_inputs={'bias': ...}",
    "relu_aux": "pass epilog_inputs={'relu_aux': ...}",
    "gelu_aux": "pass epilog_inputs={'gelu_aux': ...}",
    "scales": "pass quantization_scales={'a': ..., 'b': ...}",
    "transa": "pass op_a='T'",
    "transb": "pass op_b='T'",
    "dtype": "pass result_type=..., or convert the operands by astype",
    "out_dtype": "pass result_type=...",
    "chunks": "pass out_chunks=...",
    "out": "results can't be written into an existing array: a result is a new lazy array",
    "axes": "for contractions over other axes enable() takes da.tensordot and da.einsum",
}


def takes(
    options: type | None, hints: Mapping[str, str] | None = None, positional: str = ""
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function with ``**options``: its signature lists each option, and an unknown name is refused."""
    annotations = {} if options is None else options.__annotations__

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        shown = inspect.signature(function)
        own = [p for p in shown.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        listed = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=text)
            for name, value in {**DEFAULTS, "factor_dtype": None, "overwrite_a": False, "check_finite": True}.items()
            if (text := str(getattr(annotations.get(name), "__forward_arg__", "")).replace(" | NoOther", ""))
        ]
        names = [p.name for p in (*own, *listed)]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if positional and len(args) > len(own):
                raise TypeError(f"{function.__name__}() takes 1 argument without a name, got {len(args)}: {positional}")
            check_options(function.__qualname__, kwargs, names, hints or {})
            return function(*args, **kwargs)

        cast(Any, checked).__signature__ = shown.replace(parameters=[*own, *listed])
        return checked

    return decorate


# Operands as they lie: the array under a lazy ``A.T``, ``A.conj()`` or ``A.rechunk(...)``


# Arrays beside A and B by name, each of two dimensions, or more for a batch.
Extras = Sequence[tuple[str, da.Array]]


# What a view is made of: its name; its chunks, where they do not follow from those of the view; whether the view is its
# transpose, and its conjugate.
ViewBase = tuple[str, Chunks | None, bool, bool]

# By the names of views; the latest ones.
_bases: collections.OrderedDict[str, ViewBase] = collections.OrderedDict()
_NOTED = 10_000


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


def rechunk(
    x: Any,
    chunks: Any = "auto",
    threshold: int | None = None,
    block_size_limit: int | None = None,
    balance: bool = False,
    method: str | None = None,
) -> Any:
    """Cut an array as Dask does, and note of what it is made."""
    if not isinstance(x, Array):
        return NotImplemented
    array = dask_rechunk(x, chunks, threshold, block_size_limit, balance, method or how_to_cut(x))
    if x.ndim == 2 and array.name != x.name:
        _note(array.name, (x.name, x.chunks, False, False))
    return array


def _note(name: str, base: ViewBase) -> ViewBase:
    _bases[name] = base
    while len(_bases) > _NOTED:
        _bases.popitem(last=False)
    return base


def under(x: da.Array, name: str, chunks: Chunks) -> da.Array:
    """Return the array of that name and these chunks, which is under a matrix."""
    return x if x.name == name else Array(x.dask, name, chunks, meta=x._meta)


def is_lazy(x: da.Array) -> bool:
    """Whether an array's chunks are still to be made, as far as its graph tells: they are neither futures nor data."""
    layer = x.dask.layers.get(x.name)
    if layer is None or not layer.is_materialized():
        return True
    first = next(iter(layer.values()), None)
    return not isinstance(first, Future) and not hasattr(first, "shape")


def view_of(x: da.Array) -> tuple[da.Array, bool, bool]:
    """Return the array of which a matrix is a view, and whether it is its transpose, and its conjugate.

    The matrix itself if that can't be seen. Of real types no matrix is a conjugate.
    """
    transposed = conjugated = False
    # The array may have been computed meanwhile.
    while (base := _bases.get(x.name) or _base_of(x)) is not None and base[0] in x.dask.layers:
        name, chunks, turned, conj = base
        x = under(x, name, chunks or (x.chunks[::-1] if turned else x.chunks))
        transposed, conjugated = transposed != turned, conjugated != conj
    return x, transposed, conjugated and x.dtype.kind == "c"


def without_axes(x: da.Array) -> tuple[da.Array, tuple[int, ...]]:
    """Return the array of which a matrix is a view with axes of extent 1, and the axes that it has of the matrix."""
    is_view = x.name.startswith("getitem-") and not sparse_package(x._meta)
    needs = x.dask.dependencies.get(x.name, ()) if is_view else ()
    for axes in [(0,), (1,), ()] if len(needs) == 1 else []:
        if all(x.shape[axis] == 1 for axis in {0, 1} - {*axes}):
            parts = (
                {name: part[name] for name in part if name != x.name} for part in (x.dask.layers, x.dask.dependencies)
            )
            chunks = tuple(x.chunks[axis] for axis in axes)
            source = Array(HighLevelGraph(*parts), next(iter(needs)), chunks, meta=meta_from_array(x._meta, len(axes)))
            if source[tuple(slice(None) if axis in axes else None for axis in (0, 1))].name == x.name:
                return source, axes
    return x, (0, 1)


def _base_of(x: da.Array) -> ViewBase | None:
    """Return what a matrix is the transpose or the conjugate of; None if it is neither."""
    needs = x.dask.dependencies.get(x.name, ()) if x.name.startswith(("transpose-", "conjugate-")) else ()
    if len(needs) != 1:
        return None
    name = next(iter(needs))
    if under(x, name, x.chunks[::-1]).T.name == x.name:
        return _note(x.name, (name, None, True, False))
    if under(x, name, x.chunks).conj().name == x.name:
        return _note(x.name, (name, None, False, True))
    return None


# The formula ``D = F(alpha * op(A) @ op(B) + beta * C)`` as a user gives it: checked, with the arrays it reads


_TAKEN = {"a", "b", "c", "partial", "scale_a", "scale_b", "scale_c", "scale_d"}


def _checked(arguments: Mapping[str, Any], c: Any, dtype: np.dtype) -> Formula:
    """Return the formula that a user asks for as plain values; `dtype` is the type of A @ B."""
    beta, epilog, factors = arguments["beta"], arguments["epilog"], []
    if beta is None and c is not None:
        raise PlanError("c was given without beta; pass beta=1 to add C")
    if c is None and beta is not None and beta != 0:
        raise PlanError(f"beta={beta!r} needs c; pass C too, or leave beta out")
    for name, value in (("alpha", arguments["alpha"]), ("beta", 0.0 if beta is None else beta)):
        try:
            number = complex(value)
        except (TypeError, ValueError):
            raise PlanError(f"{name}={value!r}; expected a number") from None
        if number.imag and dtype.kind != "c":
            raise PlanError(f"{name}={value!r} is complex; A @ B is {dtype}: convert one of them to a complex type")
        factors.append((number.real, number.imag))
    if epilog is not None and not isinstance(epilog, str) and not callable(epilog):
        raise PlanError(f"epilog={epilog!r}; expected a name, an Epilog or a function")
    pickled, names = (dumps(epilog), tuple(arguments["epilog_inputs"] or {})) if callable(epilog) else (b"", ())
    amax = bool(arguments["result_amax"])
    return Formula(factors[0], factors[1], epilog_name(epilog), arguments["bias_axis"], amax, pickled, names)


def epilog_name(epilog: str | Callable[..., Any] | None) -> str:
    """Return the name of an epilog; empty for none, and for a function."""
    return "" if epilog is None or callable(epilog) else str(getattr(epilog, "value", epilog)).lower()


def _parse_formula(
    a: da.Array, b: da.Array, c: Any, arguments: Mapping[str, Any], types: Types
) -> tuple[Formula, list[tuple[str, da.Array]]]:
    """Return the formula, and the arrays that it reads beside A and B, each 2-D (or more, for a batch)."""
    inputs, scales, dtype = arguments["epilog_inputs"] or {}, arguments["quantization_scales"], types.operand
    formula = _checked(arguments, c, dtype)
    if formula.replicated and (a.ndim, b.ndim) != (2, 2):
        raise PlanError(f"epilog 'allreduce' is for products of matrices, got {a.ndim} and {b.ndim} dimensions")
    if formula.plain and not inputs and not types.fp8 and not scales:
        return formula, []
    if a.ndim < 2 or b.ndim < 2:
        raise PlanError(f"alpha, C, epilogs and scales need matrices, got {a.ndim} and {b.ndim} dimensions")
    _check_fitting(formula, inputs, types)
    with_c = c is not None and complex(*formula.beta) != 0
    extras = [("c", _broadcastable("c", c, a, b, dtype))] if with_c else []
    fitting = [(key, _broadcastable(key, inputs[key], a, b, dtype)) for key in formula.inputs]
    if callable(epilog := arguments["epilog"]):
        _call_on_zeros(epilog, sum_dtype(types.operand, dtype, 1), dtype, fitting)
    formula, factors_too = with_scales(types, formula, scales, c is not None)
    return formula, extras + fitting + [(key, array) for key, array in factors_too if key != "scale_c" or with_c]


def _check_fitting(formula: Formula, inputs: Mapping[str, Any], types: Types) -> None:
    """Refuse a formula that is not defined for the types, and inputs that are missing or too many."""
    dtype, name = types.operand, formula.epilog
    floating = dtype.kind in "fc" or dtype.name == "bfloat16" or types.fp8
    if not floating:
        raise PlanError(
            f"alpha, C and epilogs need floating-point matrices; A @ B is {dtype}: convert them, as by "
            "astype('float64')"
        )
    if dtype.kind == "c" and (formula.activation or formula.gradient):
        raise PlanError(f"epilog {name!r} is not defined for complex numbers; A @ B is {dtype}")
    if set(inputs) != set(formula.inputs):
        raise PlanError(_wrong_inputs(formula, inputs))
    if types.fp8 and formula.operand_sum:
        raise PlanError(f"epilog {name!r} is not there for FP8: sum what dequantize returns")
    if not _TAKEN.isdisjoint(inputs) or not all(str(key).isidentifier() for key in inputs):
        raise PlanError(f"inputs must have names of their own, not a, b, c or partial, got {sorted(map(str, inputs))}")


def _wrong_inputs(formula: Formula, inputs: Mapping[str, Any]) -> str:
    """Say which inputs an epilog needs, and which it was given."""
    name, passed, needed = formula.epilog, sorted(map(str, inputs)), list(formula.inputs)
    if not name and not formula.function:
        fitting = [epilog.value for epilog in Epilog if set(Formula(epilog=epilog.value).inputs) == set(inputs)]
        extra = f"epilog_inputs has {', '.join(map(repr, passed))}, and no epilog reads it"
        if not fitting:
            return f"{extra}: pass epilog=..., which names its inputs ({page('epilogs')}), or leave epilog_inputs out"
        fitting_names = ", ".join(map(repr, fitting[:3])) + ", ..." * (len(fitting) > 3)
        return f"{extra}: pass epilog= too, one of {fitting_names}"
    example = ", ".join(f"{key!r}: ..." for key in needed)
    advice = f"pass epilog_inputs={{{example}}}" if needed else "leave epilog_inputs out"
    return f"epilog {name!r} needs the inputs {needed}, got {passed}; {advice}"


def _call_on_zeros(function: Callable[..., Any], inner: np.dtype, dtype: np.dtype, inputs: Extras) -> None:
    """Call a function on small arrays of zeros, so that its mistakes are found before anything moves."""
    shape = (*(1,) * max((array.ndim - 2 for _, array in inputs), default=0), 2, 3)
    small = {
        name: np.zeros(
            [1 if n == 1 else size for n, size in zip(array.shape, shape[-array.ndim :], strict=True)], array.dtype
        )
        for name, array in inputs
    }
    rule = f"epilog {getattr(function, '__name__', function)!r} must return an array like its first argument"
    try:
        with np.errstate(all="ignore"):
            out = np.asanyarray(function(np.zeros(shape, inner), **small))
    except Exception as error:
        raise PlanError(f"{rule}; on zeros of the shape {shape} it raised {type(error).__name__}: {error}") from error
    if np.shape(out) != shape or (out.dtype.kind == "c" and dtype.kind != "c"):
        raise PlanError(f"{rule}; for {inner} of the shape {shape} it returned {out.dtype} of {np.shape(out)}")


def _broadcastable(name: str, value: Any, a: da.Array, b: da.Array, dtype: np.dtype) -> da.Array:
    """Return an input as a matrix, or a batch of them, that broadcasts against D."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    array, shape = as_array(value), (*batch, a.shape[-2], b.shape[-1])
    if array.ndim < 2:
        array = array.reshape((1, -1)) if array.ndim else array.reshape((1, 1))
    whole = name in ("relu_aux", "gelu_aux")
    good = array.ndim == len(shape) or (array.ndim < len(shape) and not whole)
    good = good and all(
        n == size or (n == 1 and not whole) for n, size in zip(array.shape[::-1], shape[::-1], strict=False)
    )
    if not good:
        expected = f"{shape}" if whole else f"one that broadcasts to {shape}, as ({shape[-1]},) or ({shape[-2]}, 1) do"
        raise PlanError(f"{name} has the shape {np.shape(value)}; expected {expected}")
    if array.dtype.kind == "c" and dtype.kind != "c":
        raise PlanError(f"{name} is {array.dtype}; A @ B is {dtype}: convert one of them")
    return array


def why_not_input(array: da.Array) -> str | None:
    """Return why an input can't take part in a run, or None if it can."""
    if array_kind(array._meta) not in ("numpy", "cupy") or not supported(array.dtype):
        return f"no engine takes {array_kind(array._meta)} arrays of {array.dtype}"
    if has_unknown_chunks(array):
        return "its chunk sizes are unknown"
    return None


def unfit(extras: Extras) -> str | None:
    """Return why some input can't take part in a run, with its name, or None if all can."""
    return next((f"{name}: {reason}" for name, array in extras if (reason := why_not_input(array))), None)


# The request of a user, parsed and checked once; and the Problem that it makes


# The text of plain values says all, and is made in a tenth of the time in which they are walked. That of the
# options would be most of it.
@functools.lru_cache(maxsize=16)
def _token(options: Options) -> str:
    return str(tokenize(repr(options)))


# Of a product that says nothing of types: they are hashable, and few.
_usual_types = functools.lru_cache(maxsize=256)(resolve_types)

# What a Problem has under the same names.
_HANDED_ON = ("method", "engine", "workers", "distributions", "formula", "grid", "gathered")
# The ways to multiply a batch.
_BATCH = ("auto", "items", "collective")


class UnknownChunksError(PlanError):
    """Chunk sizes are unknown, as after selecting rows by a mask."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A product as a user asks for it, checked."""

    # Operands after op(), of at least two dimensions each: vectors as matrices of one row, and of one column.
    a: da.Array
    b: da.Array
    # Types of A, B and D.
    types: Types
    # The formula, and the arrays that it reads beside A and B.
    formula: Formula = PLAIN
    extras: Sequence[tuple[str, da.Array]] = ()
    # As `matmul` takes them.
    method: str = "auto"
    engine: str = "auto"
    workers: tuple[str, ...] | int | None = None
    distributions: Distributions = FREE
    # As asked for; None where the configuration decides.
    compute_type: str | None = None
    # As asked for, for all axes of D but `dropped`, normalized; None for those that the operands give.
    out_chunks: Any = None
    # How a batch is to be multiplied: ``"auto"``, ``"items"`` or ``"collective"``.
    batch: str = "auto"
    # Which of the last two axes of D are there only because an operand was a vector: -2, -1.
    dropped: tuple[int, ...] = ()
    # Is told what is multiplied and how.
    logger: logging.Logger = log
    # The options of the call itself, and not of the configuration, that only collective runs can meet, as text.
    named: tuple[str, ...] = ()
    # The operand that all workers are to keep, ``"a"`` or ``"b"``; empty for none.
    gathered: str = ""
    # Name of D, where it does not follow from all else; and the only p x q x s that may be taken.
    name: str = ""
    grid: tuple[int, int, int] | None = None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Batch axes of D."""
        shape: tuple[int, ...] = np.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2])
        return shape

    @property
    def shape(self) -> tuple[int, ...]:
        """All axes of D, also those that are dropped."""
        return (*self.batch_shape, self.a.shape[-2], self.b.shape[-1])

    @property
    def is_batch(self) -> bool:
        """Whether an operand has more than two dimensions."""
        return bool(max(self.a.ndim, self.b.ndim) > 2)

    @property
    def chunks(self) -> Any:
        """Chunks of D, as asked for or as the operands of a product of matrices have them."""
        return (self.a.chunks[0], self.b.chunks[1]) if self.out_chunks is None else self.out_chunks

    @property
    def dtype(self) -> np.dtype:
        """Type of D."""
        return dtype_from_name(self.types.d)

    @property
    def prototype(self) -> Any:
        """The meta of an operand whose chunks are of the kind that D's are."""
        return (self.b if array_kind(self.b._meta) == "cupy" else self.a)._meta

    @property
    def kind(self) -> str:
        """The kind of D's chunks: ``"numpy"`` or ``"cupy"``."""
        return "cupy" if array_kind(self.prototype) == "cupy" else "numpy"

    @property
    def empty(self) -> bool:
        """Whether nothing is to be multiplied."""
        return 0 in (*self.a.shape, *self.b.shape)

    @property
    def plain(self) -> bool:
        """Whether NumPy's matmul does the same: no formula, and the usual types."""
        return self.formula.plain and self.types.usual

    @property
    def demands(self) -> list[str]:
        """The options that only collective runs can meet, as text; for plain tasks only those of the call itself."""
        choice = _named(method=self.method, engine=self.engine, workers=self.workers, distributions=self.distributions)
        return [*(self.named if self.batch == "items" else choice), *_named(compute_type=self.compute_type)]

    @functools.cached_property
    def views(self) -> tuple[tuple[da.Array, bool, bool], ...]:
        """What A and B are views of: see `view_of`."""
        return view_of(self.a), view_of(self.b)

    @functools.cached_property
    def problem(self) -> Problem:
        """The Problem of multiplying two matrices."""
        a, b, types, formula, options = self.a, self.b, self.types, self.formula, read_options()
        matrices = []
        for name, dtype, view in zip("ab", types[:2], self.views, strict=True):
            lying, transposed, conjugated = view
            chunks = lying.chunks[::-1] if transposed else lying.chunks
            matrices.append(NamedMatrix(name, chunks, dtype, (0, 1), lying.name, transposed, conjugated))
        matrices += [NamedMatrix(name, array.chunks, array.dtype.name) for name, array in self.extras]
        # D's name follows from all of this.
        names = (a.name, b.name, *(array.name for _, array in self.extras))
        seen = [(x.chunks, x.transposed, x.conjugated) for x in matrices[:2]]
        choices = self.chunks, self.method, self.engine, self.workers, self.distributions, self.gathered
        return Problem(
            name=self.name or f"matmul-{tokenize(repr((names, seen, types, _token(options), formula, *choices)))}",
            matrices=tuple(matrices),
            wanted=(NamedMatrix("", self.chunks, types.d),),
            options=options,
            array=self.kind,
            same=a.name == b.name and types.a == types.b,
            compute=types.compute,
            **{name: getattr(self, name) for name in _HANDED_ON},
        )

    @property
    def lying(self) -> tuple[da.Array, da.Array]:
        """The arrays whose chunks are multiplied, transposed or not."""
        (a, *_), (b, *_) = self.views
        return a, b

    @functools.cached_property
    def lazy(self) -> tuple[bool, bool]:
        """Whether the chunks of A and of B are still to be made."""
        a, b = map(is_lazy, self.lying)
        return a, b


def parse(a: Any, b: Any, c: Any = None, **options: Unpack[AllOptions]) -> Request:
    """Return the request of a user, checked."""
    arguments: dict[str, Any] = {**DEFAULTS, **options}
    a, b = as_operands(a, b)
    batch = check_batch(arguments["batch"], is_batch=max(a.ndim, b.ndim) > 2)
    distributions = check_distributions(arguments["distributions"])
    method, engine = check_names(arguments["method"], arguments["engine"])
    a, b = apply_op("a", a, arguments["op_a"]), apply_op("b", b, arguments["op_b"])
    check_shapes(a, b)
    wanted = arguments["a_type"], arguments["b_type"], arguments["result_type"], arguments["compute_type"]
    resolve = _usual_types if wanted == (None,) * 4 else resolve_types
    types = resolve(a.dtype, b.dtype, *wanted, setting("compute-type"))
    formula, extras = _parse_formula(a, b, c, arguments, types)
    gathered = check_gathered(arguments["gathered"], (a, b), types)
    dropped = tuple(axis for axis, x in ((-2, a), (-1, b)) if x.ndim == 1)
    # Vectors as matrices of one row, and of one column.
    a, b = (a[None, :] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    named = _named(
        **{name: arguments[name] for name in ("method", "engine", "workers", "distributions")},
        compute_type=arguments["compute_type"] if types.compute else None,
        batch=batch if batch == "collective" else None,
        epilog="allreduce" if formula.replicated else None,
        gathered=arguments["gathered"],
    )
    out_chunks, workers = arguments["out_chunks"], check_workers(arguments["workers"])
    request = Request(
        a, b, types, formula, extras, method, engine, workers, distributions, arguments["compute_type"], out_chunks,
        batch, dropped, arguments["logger"] or log, named, gathered,
    )  # fmt: skip
    if dropped and not request.is_batch and (out_chunks is not None or any(distributions)):
        raise PlanError(
            "out_chunks and distributions are for matrices, and an operand has one dimension: leave them out, or pass "
            "the vector as a matrix, v[:, None]"
        )
    if out_chunks is None:
        return request
    shape = tuple(size for axis, size in enumerate(request.shape, -len(request.shape)) if axis not in dropped)
    return dataclasses.replace(request, out_chunks=_normalized(out_chunks, shape, types.operand))


def _named(**options: Any) -> tuple[str, ...]:
    """Return the options of a call that are given and leave no choice, as text."""
    stated = {name: value for name, value in options.items() if value is not None and value != "auto"}
    stated = {name: value for name, value in stated.items() if name != "distributions" or any(value)}
    return tuple(f"{name}={value!r}" for name, value in stated.items())


def check_batch(batch: str | None, *, is_batch: bool) -> str:
    """Return how a batch is to be multiplied; refuse a name that is unknown, or that is given for matrices."""
    batch = "auto" if batch is None else batch
    if not is_batch and batch != "auto":
        raise PlanError(
            f"batch={batch!r}: the operands are matrices, there is one product; method='local' multiplies on one worker"
        )
    if batch not in _BATCH:
        raise PlanError(unknown_name("batch", batch, _BATCH))
    return batch


def check_gathered(gathered: str | None, operands: tuple[da.Array, da.Array], types: Types) -> str:
    """Return `gathered` as a Problem has it; refuse it where no later multiply could use what is kept."""
    if gathered is None:
        return ""
    if gathered not in ("a", "b"):
        raise PlanError(unknown_name("gathered", gathered, ("a", "b")))
    if any(x.ndim != 2 for x in operands) or types.fp8:
        kind_of = "FP8" if types.fp8 else f"{operands[0].ndim} and {operands[1].ndim} dimensions"
        raise PlanError(f"gathered={gathered!r} is for products of matrices, of other types than FP8, got {kind_of}")
    return gathered


def check_workers(workers: Sequence[str] | int | None) -> tuple[str, ...] | int | None:
    """Return `workers` as a Problem has them."""
    if isinstance(workers, bool) or (isinstance(workers, int) and workers < 1):
        raise PlanError(f"workers={workers!r}: workers must be a list of addresses, or a number of at least 1")
    if workers is None or isinstance(workers, int):
        return workers
    workers = (workers,) if isinstance(workers, str) else tuple(dict.fromkeys(workers))
    if not workers or not all(isinstance(address, str) for address in workers):
        raise PlanError(f"workers={workers!r}: expected addresses of workers, as in client.nthreads()")
    return workers


def check_distributions(distributions: Sequence[Distribution | None] | None) -> Distributions:
    """Return `distributions` as a Problem has them."""
    stated = () if distributions is None else tuple(distributions) if isinstance(distributions, list | tuple) else None
    if stated is None or len(stated) > 3 or not all(x is None or isinstance(x, Distribution) for x in stated):
        raise PlanError(
            f"distributions={distributions!r}: expected up to three of Slab, BlockCyclic or None, for A, B, D"
        )
    a, b, d = (*stated, None, None, None)[:3]
    return a, b, d


# Engines that have another name since; the first version without the old one.
_RENAMED = {"cusolvermp": ("nccl", "0.3")}


def check_names(method: str | None, engine: str | None, kind: str = "product") -> tuple[str, str]:
    """Return method and engine, from the configuration where they are None; refuse those that can't do it.

    An engine of the configuration that is for computations of another kind leaves the choice of one for this kind.
    """
    chosen_names = []
    for name, value, choices in (("method", method, METHODS), ("engine", engine, ENGINES)):
        what, chosen = (f"config distmm.{name}", setting(name)) if value is None else (name, value)
        if name == "engine" and chosen in _RENAMED:
            renamed, last = _RENAMED[chosen]
            text = f"{what}={chosen!r} is {renamed!r} now; {last} will not know {chosen!r}"
            warnings.warn(text, FutureWarning, stacklevel=2)
            chosen = renamed
        if chosen not in ("auto", *choices):
            raise PlanError(unknown_name(what, chosen, ("auto", *choices)))
        chosen_names.append(chosen)
    method, engine = chosen_names
    if engine != "auto" and kind not in ENGINES[engine].computes:
        if what == "engine":
            able = ", ".join(repr(name) for name, choice in ENGINES.items() if kind in choice.computes)
            raise PlanError(f"engine={engine!r} is not for a {kind}; expected 'auto' or one of {able}")
        engine = "auto"
    return method, engine


def check_shapes(a: da.Array, b: da.Array) -> None:
    """Refuse types that are not numbers, scalars, unknown chunk sizes, and axes that do not match."""
    for name, array in (("first", a), ("second", b)):
        if array.dtype.kind in "MmSUT" or array.dtype.type is np.void:
            raise PlanError(
                f"the {name} operand has the type {array.dtype}; expected numbers: convert it, as by "
                "astype('float64'), or leave out what is none"
            )
        if array.ndim == 0:
            raise PlanError(f"matmul does not take scalars, and the {name} operand is one; use a * b")
        if has_unknown_chunks(array):
            raise UnknownChunksError(
                f"the {name} operand has unknown chunk sizes {array.chunks}; call its compute_chunk_sizes() first"
            )
    if a.shape[-1] != (b.shape[-2] if b.ndim > 1 else b.shape[0]):
        raise PlanError(
            f"shapes {a.shape} and {b.shape} don't match: the last axis of the first and "
            f"{'the last but one' if b.ndim > 1 else 'the only'} axis of the second must be equal; transpose one, as "
            "A.T and op_a='T' do, if that is meant"
        )
    try:
        np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise PlanError(
            f"shapes {a.shape} and {b.shape} don't match: their batch axes {a.shape[:-2]} and {b.shape[:-2]} "
            "must be equal, or 1 where they differ"
        ) from None


def _normalized(out_chunks: Any, shape: tuple[int, ...], dtype: np.dtype) -> tuple[tuple[int, ...], ...]:
    """Return `out_chunks` as the chunk sizes along each axis of D."""
    reason = "they do not add up to it"
    try:
        chunks: tuple[tuple[int, ...], ...] = normalize_chunks(out_chunks, shape, dtype=dtype)
        if all(min(sizes) >= 0 and sum(sizes) == n for sizes, n in zip(chunks, shape, strict=True)):
            return chunks
    except (ValueError, TypeError, ArithmeticError, NotImplementedError) as error:
        reason = "there is a size of 0" if isinstance(error, ArithmeticError) else str(error)
    raise PlanError(
        f"out_chunks={out_chunks!r} does not fit the result's shape {shape} ({reason}); expected sizes of at least 1, "
        "as 1000, (1000, 500) or ((600, 400), (500, 500))"
    )
