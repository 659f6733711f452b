"""Traced arrays: they know shapes and types only, and record what NumPy's functions and operators do to them."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import difflib
import functools
import json
import linecache
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from dask_distmm.errors import TracingError
from dask_distmm.numeric.sparse import dense
from dask_distmm.tracing.form import UNKNOWN, Block, Kind, Literal, Program, Ref, Statement, index_to_plain, letters_of

# The functions of the NumPy functions that traced arrays take.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
F = TypeVar("F", bound=Callable[..., Any])
_current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("trace", default=None)
# Functions of NumPy's of more than one result, or on parts of arrays that depend on their elements.
_SHAPED_BY_DATA = ("unique", "nonzero", "argwhere", "flatnonzero", "extract", "compress", "delete", "trim_zeros")


def trace_of(*values: Any) -> Trace | None:
    """Return the trace that values belong to, or else that of the function that is being traced in this thread."""
    return next((x.trace for x in values if isinstance(x, TracedArray)), _current.get())


class Trace:
    """The program of a function that is being traced: the statements so far, and the arrays that are its inputs."""

    def __init__(self) -> None:
        self.kinds: dict[int, Kind] = {}
        # The arrays of the inputs by the numbers of their values: Dask's, NumPy's, CuPy's.
        self.inputs: dict[int, Any] = {}
        self._known: dict[int, TracedArray] = {}
        self.blocks: list[_Open] = []
        self.lines: dict[str, int] = {}
        # Users' functions, pickled.
        self.functions: list[bytes] = []
        # Frames of this folder are the package's own.
        self._own = __file__.rpartition("tracing")[0]

    # Values

    def input(self, array: Any, kind: Kind) -> TracedArray:
        """Return an input of the program: the same one for the same array."""
        if id(array) not in self._known:
            array_value = self.value(kind)
            self.inputs[array_value.number] = array
            self.blocks[0].values.add(array_value.number)
            self._known[id(array)] = array_value
        return self._known[id(array)]

    def value(self, kind: Kind) -> TracedArray:
        """Return a new value."""
        number, kind = len(self.kinds), Kind(tuple(map(int, kind.shape)), kind.dtype)
        self.kinds[number] = kind
        return TracedArray(self, number, kind)

    def lift(self, x: Any) -> TracedArray | Literal:
        """Return what a statement may read, of anything that a user combines with a traced array."""
        if isinstance(x, TracedArray):
            if x.trace is not self or not any(x.number in block.values for block in self.blocks):
                raise TracingError(
                    "a traced array is used outside of the function, or of the body of the loop, in which it was made: "
                    "return it from there, as a part of the state"
                )
            return x
        if isinstance(x, np.generic):
            x = np.asarray(x)
        elif isinstance(x, _UnknownLength):
            need_rows()
        elif isinstance(x, bool | int | float | complex):
            return Literal(x)
        elif isinstance(x, list | tuple):
            x = _stacked(x) if any(isinstance(part, TracedArray) for part in x) else np.asarray(x)
            return self.lift(x) if isinstance(x, TracedArray) else self.input(x, kind_of(x))
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise TracingError(f"a {type(x).__name__} is combined with a traced array: expected an array or a number")
        return self.input(x, kind_of(x))

    # Statements

    def add(
        self,
        family: str,
        options: Mapping[str, Any],
        inputs: Sequence[Any],
        kinds: Sequence[Kind],
        blocks: Sequence[Block] = (),
    ) -> list[TracedArray]:
        """Record a statement; return the values that it makes. One that is there already is not recorded again."""
        refs = tuple(ref_of(self.lift(x)) for x in inputs)
        key = None if blocks else (family, json.dumps(options, sort_keys=True), refs)
        for block in self.blocks if key else ():
            if key in block.known:
                return block.known[key]
        values = [self.value(kind) for kind in kinds]
        numbers = tuple(value.number for value in values)
        top = self.blocks[-1]
        top.values.update(numbers)
        top.statements.append(Statement(family, dict(options), refs, numbers, tuple(blocks), self._line()))
        if key:
            top.known[key] = values
        return values

    def one(self, family: str, options: Mapping[str, Any], inputs: Sequence[Any], kind: Kind) -> TracedArray:
        """Record a statement that makes one value."""
        (value,) = self.add(family, options, inputs, [kind])
        return value

    def function(self, pickled: bytes) -> int:
        """Return the number of a user's function."""
        if pickled not in self.functions:
            self.functions.append(pickled)
        return self.functions.index(pickled)

    def _line(self) -> int:
        frame = sys._getframe(1)
        inside, algorithms = (self._own, _NUMPY, "<__array_function__"), self._own + "algorithms"
        while frame.f_back and (name := frame.f_code.co_filename).startswith(inside) and algorithms not in name:
            frame = frame.f_back
        name, number = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(name, number).strip()
        return self.lines.setdefault(f"{name}:{number}: {text}", len(self.lines))

    @contextlib.contextmanager
    def block(self) -> Iterator[_Open]:
        """Record statements into a block of their own, also those of functions of this module."""
        block, token = _Open(), _current.set(self)
        self.blocks.append(block)
        try:
            yield block
        finally:
            self.blocks.pop()
            _current.reset(token)

    def program(self, block: Block) -> Program:
        """Return the program of a block that is complete."""
        return Program(self.kinds, block, list(self.lines))


class _Open:
    """A block that is being recorded."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.known: dict[Any, list[TracedArray]] = {}
        self.values: set[int] = set()
        self.inputs: list[int] = []

    def begin(self, trace: Trace, kinds: Sequence[Kind]) -> list[TracedArray]:
        """Return new values for the block's inputs."""
        values = [trace.value(kind) for kind in kinds]
        self.inputs += [value.number for value in values]
        self.values.update(self.inputs)
        return values

    def end(self, trace: Trace, outputs: Sequence[Any]) -> Block:
        """Return the block."""
        return Block(self.inputs, self.statements, [ref_of(trace.lift(x)) for x in outputs])


_NUMPY = np.__file__.rpartition("__init__")[0]


def ref_of(x: TracedArray | Literal) -> Ref:
    """Return what a statement reads."""
    return x if isinstance(x, Literal) else x.number


def kind_of(x: Any, *, unknown: bool = False) -> Kind:
    """Return the shape and the type of an array, or of a number; the number of its rows may be `unknown`."""
    if isinstance(x, Literal):
        x = np.asarray(x.value)
    elif isinstance(x, TracedArray):
        return x.kind
    elif not hasattr(x, "dtype"):
        x = np.asarray(x)
    if x.dtype.kind not in "biufc":
        raise TracingError(f"an array of {x.dtype} in a traced function: expected numbers or bools")
    rows = (UNKNOWN,) if unknown and x.ndim and np.isnan(x.shape[0]) else ()
    return Kind((*rows, *map(_length, x.shape[len(rows) :])), x.dtype.name)


def _length(size: Any) -> int:
    return need_rows() if np.isnan(size) or size == UNKNOWN else int(size)


def need_rows(*_: Any) -> NoReturn:
    """Raise, as the number of rows is needed and not known."""
    raise TracingError(
        "an array has chunks of unknown sizes, and the number of its rows is needed here: call its "
        "compute_chunk_sizes() before it is passed to the function"
    )


class _UnknownLength(int):
    """A number of rows that is not known, with which nothing can be computed while a function is traced."""

    for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod"):
        vars()[f"__{_operator}__"] = vars()[f"__r{_operator}__"] = need_rows
    __neg__ = __float__ = __abs__ = need_rows


def _dtype(x: Any) -> Any:
    """Return the type of an operand as NumPy's promotion takes it."""
    if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
        return type(x)
    return np.dtype(x.dtype) if hasattr(x, "dtype") else np.asarray(x).dtype


@functools.lru_cache(4096)
def _result(name: str, types: tuple[Any, ...], options: str) -> np.dtype:
    """Return the type of an elementwise function's result."""
    samples = [kind(1) if isinstance(kind, type) else np.ones(1, kind) for kind in types]
    with np.errstate(all="ignore"):
        return np.asarray(elementwise(np, name, samples, json.loads(options))).dtype


def elementwise(xp: Any, name: str, inputs: Sequence[Any], options: Mapping[str, Any], out: Any = None) -> Any:
    """Compute an elementwise function by its name, for tracing and in a run."""
    if name == "astype":
        return xp.asarray(inputs[0]).astype(options["dtype"])
    if name == "where":
        return xp.where(*inputs)
    if name == "clip":
        low, high = (next(rest) if has else None for rest in [iter(inputs[1:])] for has in options["limits"])
        return xp.clip(inputs[0], low, high)
    if name in ("real", "imag", "nan_to_num", "round", "angle", "copy"):
        return getattr(xp, name)(inputs[0], **options)
    function = getattr(xp, name)
    return function(*inputs) if out is None else function(*inputs, out=out)


class TracedArray(NDArrayOperatorsMixin):
    """An array of a function that is being traced: shape and type, no elements."""

    __slots__ = ("kind", "number", "trace")
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, number: int, kind: Kind) -> None:
        self.trace, self.number, self.kind = trace, number, kind

    # What arrays tell

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of its axes."""
        shape = self.kind.shape
        return tuple(_UnknownLength(n) if n == UNKNOWN else n for n in shape) if UNKNOWN in shape else shape

    @property
    def dtype(self) -> np.dtype:
        """The type of its elements."""
        return np.dtype(self.kind.dtype)

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.size * self.dtype.itemsize

    @property
    def device(self) -> str:
        """Where it is: on the workers."""
        return "workers"

    def __repr__(self) -> str:
        return f"<traced array {self.dtype} {self.shape}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a traced array without axes")
        return need_rows() if self.shape[0] == UNKNOWN else self.shape[0]

    def __iter__(self) -> Iterator[TracedArray]:
        for index in range(len(self)):
            yield self[index]

    # What has no meaning before the elements are there

    def _refuse(self, what: str) -> NoReturn:
        raise TracingError(
            f"{what} of a traced array {self.dtype} {self.shape}: its elements are not known while the function is "
            "traced. For a branch use dask_distmm.cond or numpy.where, for a loop dask_distmm.while_loop or fori_loop"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._refuse("the elements")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TracingError(
            "a traced array can't be assigned to: write x = numpy.where(condition, value, x), or "
            "numpy.concatenate of its parts"
        )

    # NumPy's protocols

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return Namespace()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if options.get("out") is not None:
            raise TracingError(f"numpy.{ufunc.__name__}(out=) of a traced array: use what it returns")
        for name, value in options.items():
            if name not in ("dtype", "axis", "keepdims") and value not in (None, True, "same_kind", "K"):
                raise TracingError(f"numpy.{ufunc.__name__}({name}=) is not available in a traced function")
        if ufunc in _FUNCTIONS:
            return _FUNCTIONS[ufunc](*inputs, **{k: v for k, v in options.items() if v is not None})
        if method == "reduce":
            if ufunc in _REDUCTIONS:
                return _REDUCTIONS[ufunc](*inputs, **{"axis": 0} | options)
        elif method == "outer":
            a, b = inputs
            return ufunc(a[(..., *(None,) * np.ndim(b))], b)
        elif method == "__call__" and ufunc.signature is None and ufunc.nout == 1:
            result = mapped(ufunc.__name__, inputs)
            return result.astype(options["dtype"]) if options.get("dtype") is not None else result
        raise _unknown(f"{ufunc.__name__}.{method}" if method != "__call__" else ufunc.__name__)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function not in _FUNCTIONS:
            raise _unknown(function.__name__)
        try:
            return _FUNCTIONS[function](*args, **kwargs)
        except TypeError as error:
            if "argument" in str(error) and "numpy" not in str(error):
                raise TracingError(f"numpy.{function.__name__} of a traced array: {error}") from error
            raise

    # Indices, and what changes shapes

    def __getitem__(self, index: Any) -> TracedArray:
        return _indexed(self, index if isinstance(index, tuple) else (index,))

    @property
    def T(self) -> TracedArray:  # noqa: N802
        """The array with its axes in reverse order."""
        return transpose(self)

    @property
    def mT(self) -> TracedArray:  # noqa: N802
        """The array with its last two axes swapped."""
        return swapaxes(self, -1, -2)

    def transpose(self, *axes: Any) -> TracedArray:
        """Return the array with its axes in another order."""
        return transpose(self, axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes or None)

    def reshape(self, *shape: Any) -> TracedArray:
        """Return the array in another shape."""
        return reshape(self, shape[0] if len(shape) == 1 else shape)

    def astype(self, dtype: Any, copy: bool = True) -> TracedArray:
        """Return the array in another type."""
        dtype = np.dtype(dtype)
        return self if dtype == self.dtype else mapped("astype", (self,), dtype=dtype.name)

    def view(self, *_: Any) -> NoReturn:
        """Raise: a traced array has no memory."""
        raise TracingError("view() of a traced array, which has no memory: use astype()")

    def ravel(self) -> TracedArray:
        """Return the array with one axis."""
        return reshape(self, -1)

    flatten = ravel

    @property
    def flat(self) -> TracedArray:
        """The array with one axis."""
        return reshape(self, -1)

    @property
    def real(self) -> TracedArray:
        """The real part."""
        return mapped("real", (self,)) if self.dtype.kind == "c" else self

    @property
    def imag(self) -> TracedArray:
        """The imaginary part."""
        return mapped("imag", (self,))

    def conj(self) -> TracedArray:
        """Return the complex conjugate."""
        return mapped("conjugate", (self,)) if self.dtype.kind == "c" else self

    conjugate = conj

    def copy(self) -> TracedArray:
        """Return the array itself, which nobody changes."""
        return self

    def squeeze(self, axis: Any = None) -> TracedArray:
        """Return the array without axes of length 1."""
        return squeeze(self, axis)


for _name, _what in {
    "__bool__": "the truth value", "__float__": "float()", "__int__": "int()", "__complex__": "complex()",
    "__index__": "a Python index or count", "item": "item()",
}.items():  # fmt: skip
    setattr(TracedArray, _name, functools.partialmethod(TracedArray._refuse, _what))


class Namespace:
    """The array API's namespace of traced arrays: NumPy, whose functions take them but for these."""

    __array_api_version__ = np.__array_api_version__

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> TracedArray:
        """Return an array in another type."""
        return as_traced(x).astype(dtype)

    @staticmethod
    def asarray(x: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Any:
        """Return an array, which may be traced."""
        if not isinstance(x, TracedArray):
            return np.asarray(x, dtype)
        return x if dtype is None else x.astype(dtype)


def mapped(name: str, inputs: Sequence[Any], **options: Any) -> TracedArray:
    """Record an elementwise function."""
    trace = _trace_of(inputs)
    shapes = [x.kind.shape if isinstance(x, TracedArray) else tuple(map(_length, np.shape(x))) for x in inputs]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError as error:
        raise TracingError(f"{name} of arrays of shapes {', '.join(map(str, shapes))}, which do not fit") from error
    try:
        dtype = _result(name, tuple(map(_dtype, inputs)), json.dumps(options))
    except (TypeError, AttributeError) as error:
        raise TracingError(f"{name} of arrays of {', '.join(str(_dtype(x)) for x in inputs)}: {error}") from error
    return trace.one("map", {"f": name, **options}, inputs, Kind(shape, dtype.name))


def _trace_of(inputs: Sequence[Any]) -> Trace:
    if (trace := trace_of(*inputs)) is None:
        raise TracingError("no function is being traced")
    return trace


def _unknown(name: str) -> TracingError:
    names = {function.__name__ for function in _FUNCTIONS} | {
        x for x in dir(np) if isinstance(getattr(np, x), np.ufunc)
    }
    if name in _SHAPED_BY_DATA:
        hint = "the shape of its result depends on elements, which are not known while a function is traced"
    else:
        near = difflib.get_close_matches(name, sorted(names - {name}), 1)
        hint = f"the nearest one that there is: numpy.{near[0]}" if near else "it has no rule"
    return TracingError(
        f"numpy.{name} is not available in a traced function ({hint}); dask_distmm.map_rows calls any function for "
        "each chunk of rows"
    )


def implements(*functions: Any) -> Callable[[F], F]:
    """Make a function the meaning of some of NumPy's for traced arrays."""

    def register(own: F) -> F:
        _FUNCTIONS.update(dict.fromkeys(functions, own))
        return own

    return register


def as_traced(x: Any, trace: Trace | None = None) -> TracedArray:
    """Return anything as a traced array."""
    trace = trace or _trace_of([x])
    traced = trace.lift(x)
    if isinstance(traced, Literal):
        traced = trace.lift(np.asarray(traced.value))
        assert isinstance(traced, TracedArray)
    return traced


# Elementwise functions that are not ufuncs


@implements(np.where)
def where(condition: Any, x: Any = None, y: Any = None) -> TracedArray:
    """Choose between two arrays by elements."""
    if x is None or y is None:
        raise TracingError("numpy.where(condition) has a shape that depends on elements: pass x and y")
    return mapped("where", (condition, x, y))


@implements(np.clip)
def clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> TracedArray:
    """Limit elements."""
    limits = [a_min if min is None else min, a_max if max is None else max]
    return mapped("clip", (a, *(x for x in limits if x is not None)), limits=[x is not None for x in limits])


@implements(np.round, np.around)
def round_(a: Any, decimals: int = 0) -> TracedArray:
    """Round to some decimals."""
    return mapped("round", (a,), decimals=decimals)


@implements(np.nan_to_num)
def nan_to_num(x: Any, copy: bool = True, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> TracedArray:
    """Replace NaN and infinities."""
    return mapped("nan_to_num", (x,), nan=nan, posinf=posinf, neginf=neginf)


@implements(np.isclose)
def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> TracedArray:
    """Compare elements with tolerances."""
    near = np.less_equal(abs(a - b), atol + rtol * abs(b)) | np.equal(a, b)
    return near | (np.isnan(a) & np.isnan(b)) if equal_nan else near


_FUNCTIONS |= {
    np.allclose: lambda a, b, **how: np.all(isclose(a, b, **how)),
    np.real: lambda x: x.real,
    np.imag: lambda x: x.imag,
    np.angle: lambda x: mapped("angle", (x,)),
    np.copy: lambda x, **_: x,
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
    np.size: lambda x, axis=None: x.size if axis is None else x.shape[axis],
    np.iscomplexobj: lambda x: x.dtype.kind == "c",
    np.isrealobj: lambda x: x.dtype.kind != "c",
    np.result_type: lambda *x: np.result_type(*(v.dtype if isinstance(v, TracedArray) else v for v in x)),
    np.fix: lambda x: mapped("trunc", (x,)),
}


@implements(np.full_like)
def full_like(x: Any, fill_value: Any, dtype: Any = None, **_: Any) -> TracedArray:
    """Return one value in the shape of an array, and where that is."""
    kind = Kind(x.shape, np.dtype(x.dtype if dtype is None else dtype).name)
    return _trace_of([x]).one("fill", {"dtype": kind.dtype}, (x, fill_value), kind)


_FUNCTIONS |= {
    make: lambda x, dtype=None, value=value, **_: full_like(x, value, dtype)
    for make, value in ((np.zeros_like, 0), (np.empty_like, 0), (np.ones_like, 1))
}


# With ``like=`` arrays that do not depend on any are those of NumPy, and of CuPy where a function just computes.
_FUNCTIONS |= {make: make for make in (np.arange, np.eye, np.identity, np.zeros, np.ones, np.full, np.linspace)}


# Reductions


def _axes(axis: Any, ndim: int) -> list[int]:
    axes = range(ndim) if axis is None else (axis,) if isinstance(axis, int | np.integer) else axis
    for number in axes:
        if not -ndim <= number < ndim:
            raise TracingError(f"axis {number} of an array with {ndim} axes")
    return sorted({int(number) % ndim for number in axes})


def reduced(name: str, x: Any, axis: Any, keepdims: bool) -> TracedArray:
    """Record a reduction."""
    x = as_traced(x)
    if name.startswith("arg") and axis is None:
        x, axis = reshape(x, -1), 0
    axes = _axes(axis, x.ndim)
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes)
    if name in ("max", "min", "argmax", "argmin") and not math.prod(x.kind.shape[i] for i in axes):
        raise TracingError(f"{name} of an array of shape {x.shape}, which has no elements there")
    options = {"f": name, "axes": axes, "keepdims": bool(keepdims)}
    dtype = getattr(np, name)(np.ones((1,), x.dtype)).dtype
    return x.trace.one("reduce", options, (x,), Kind(shape, dtype.name))


def _adds(name: str) -> Callable[..., TracedArray]:
    return lambda a, axis=None, dtype=None, out=None, keepdims=False: reduced(
        name, a if dtype is None else as_traced(a).astype(dtype), axis, keepdims
    )


def _chooses(name: str) -> Callable[..., TracedArray]:
    return lambda a, axis=None, out=None, keepdims=False: reduced(name, a, axis, keepdims)


sum_, prod_ = map(_adds, ("sum", "prod"))
max_, min_, any_, all_ = map(_chooses, ("max", "min", "any", "all"))
_FUNCTIONS |= {
    np.sum: sum_, np.prod: prod_, np.max: max_, np.amax: max_, np.min: min_, np.amin: min_, np.any: any_, np.all: all_,
    np.argmax: _chooses("argmax"), np.argmin: _chooses("argmin"),
}  # fmt: skip


@implements(np.mean)
def mean(a: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> TracedArray:
    """Average elements."""
    a = as_traced(a)
    kind = np.dtype(dtype) if dtype is not None else a.dtype if a.dtype.kind in "fc" else np.dtype(np.float64)
    wide = np.dtype(np.float32) if kind == np.float16 else kind
    return (sum_(a.astype(wide), axis, keepdims=keepdims) / _count(a, axis)).astype(kind)


def _count(a: TracedArray, axis: Any) -> Any:
    """Return how many elements lie along some axes; rows whose number is not known are counted in the run."""
    axes, shape = _axes(axis, a.ndim), a.kind.shape
    count = math.prod(shape[i] for i in axes if shape[i] != UNKNOWN)
    rows = next((i for i in axes if shape[i] == UNKNOWN), None)
    if rows is None:
        return count
    column = a[tuple(slice(None) if i == rows else 0 for i in range(a.ndim))]
    return sum_(full_like(column, 1, np.float64)) * count


@implements(np.var)
def var(
    a: Any, axis: Any = None, dtype: Any = None, out: None = None, ddof: float = 0, keepdims: bool = False, **how: Any
) -> TracedArray:
    """Compute variances."""
    a, ddof = as_traced(a), how.get("correction", ddof)
    distance = a - mean(a, axis, dtype, keepdims=True)
    squares = np.square(distance) if distance.dtype.kind != "c" else np.square(distance.real) + np.square(distance.imag)
    count = _count(a, axis) - ddof
    count = np.maximum(count, 0) if isinstance(count, TracedArray) else max(count, 0)
    return (sum_(squares, axis, keepdims=keepdims) / count).astype(squares.dtype)


@implements(np.std)
def std(
    a: Any, axis: Any = None, dtype: Any = None, out: None = None, ddof: float = 0, keepdims: bool = False, **how: Any
) -> TracedArray:
    """Compute standard deviations."""
    return as_traced(np.sqrt(var(a, axis, dtype, out, ddof, keepdims, **how)))


@implements(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> TracedArray:
    """Count elements that are not zero."""
    return sum_(np.not_equal(a, 0), axis, keepdims=keepdims)


@implements(np.ptp)
def ptp(a: Any, axis: Any = None, out: None = None, keepdims: bool = False) -> TracedArray:
    """Return the distance of the largest and the least element."""
    return max_(a, axis, keepdims=keepdims) - min_(a, axis, keepdims=keepdims)


@implements(np.average)
def average(a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: bool = False) -> Any:
    """Average elements with weights."""
    if weights is None:
        return mean(a, axis, keepdims=keepdims)
    if np.ndim(weights) != np.ndim(a) and axis is not None:
        weights = reshape(weights, [-1 if i == axis % a.ndim else 1 for i in range(a.ndim)])
    total = sum_(full_like(a, 0) + weights, axis, keepdims=keepdims)
    return sum_(a * weights, axis, keepdims=keepdims) / total


_FUNCTIONS |= {
    np.nansum: lambda a, axis=None, keepdims=False: sum_(where(np.isnan(a), 0, a), axis, keepdims=keepdims),
    np.nanmean: lambda a, axis=None, keepdims=False: (
        sum_(where(np.isnan(a), 0, a), axis, keepdims=keepdims) / sum_(~np.isnan(a), axis, keepdims=keepdims)
    ),
}


_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    np.add: sum_, np.multiply: prod_, np.maximum: max_, np.minimum: min_, np.logical_and: all_, np.logical_or: any_,
}  # fmt: skip


def logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> TracedArray:
    """Return the logarithm of the sum of exponentials, as ``scipy.special.logsumexp`` does.

    Parameters
    ----------
    x : array
        Of floats.
    axis : int or tuple of int, optional
        Which axes are summed over; all by default.
    keepdims : bool
        Whether these have length 1 in the result.

    Returns
    -------
    array
        Without overflow, also where elements are large.

    Raises
    ------
    TracingError
        `x` does not have such an axis.

    See Also
    --------
    segment_sum, jit

    Examples
    --------
    >>> import numpy as np
    >>> from dask_distmm import logsumexp
    >>> float(logsumexp(np.array([1000.0, 1000.0])).round(3))
    1000.693
    """
    largest: Any = np.max(x, axis=axis, keepdims=True)
    top = np.where(np.isfinite(largest), largest, 0)
    result = np.log(np.sum(np.exp(x - top), axis=axis, keepdims=True)) + top
    return result if keepdims else result.squeeze(axis)


for _name in ["sum", "prod", "mean", "max", "min", "any", "all", "argmax", "argmin", "var", "std", "clip", "round"]:
    setattr(TracedArray, _name, _FUNCTIONS[getattr(np, _name)])


# Shapes


@implements(np.transpose, np.permute_dims)
def transpose(a: Any, axes: Any = None) -> TracedArray:
    """Reorder axes."""
    a = as_traced(a)
    order = list(range(a.ndim))[::-1] if axes is None else [int(i) % a.ndim for i in axes]
    if sorted(order) != list(range(a.ndim)):
        raise TracingError(f"axes {axes} of an array with {a.ndim} axes")
    if order == list(range(a.ndim)):
        return a
    return a.trace.one("transpose", {"axes": order}, (a,), Kind(tuple(a.shape[i] for i in order), a.kind.dtype))


@implements(np.swapaxes)
def swapaxes(a: Any, axis1: int, axis2: int) -> TracedArray:
    """Swap two axes."""
    order = list(range(a.ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return transpose(a, order)


@implements(np.moveaxis)
def moveaxis(a: Any, source: int, destination: int) -> TracedArray:
    """Move an axis."""
    order = [i for i in range(a.ndim) if i != source % a.ndim]
    order.insert(destination % a.ndim, source % a.ndim)
    return transpose(a, order)


_FUNCTIONS |= {np.matrix_transpose: lambda x: swapaxes(x, -1, -2), np.linalg.matrix_transpose: lambda x: x.mT}


@implements(np.reshape)
def reshape(a: Any, /, shape: Any = None, order: str = "C", *, copy: Any = None) -> TracedArray:
    """Change the shape."""
    a = as_traced(a)
    if order != "C":
        raise TracingError(f"reshape(order={order!r}) of a traced array: expected 'C'")
    shape = [int(n) for n in ((shape,) if isinstance(shape, int | np.integer) else shape)]
    rest = math.prod(n for n in shape if n != -1)
    if shape.count(-1) == 1:
        shape[shape.index(-1)] = a.size // rest if rest else 0
    if math.prod(shape) != a.size or min(shape, default=0) < 0:
        raise TracingError(f"an array of shape {a.shape} can't be reshaped to {tuple(shape)}")
    if tuple(shape) == a.shape:
        return a
    return a.trace.one("reshape", {"shape": shape}, (a,), Kind(tuple(shape), a.kind.dtype))


_FUNCTIONS[np.ravel] = lambda a, order="C": reshape(a, -1, order)


@implements(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> TracedArray:
    """Insert axes of length 1."""
    axes = [axis] if isinstance(axis, int) else list(axis)
    ndim = a.ndim + len(axes)
    kept = {i % ndim for i in axes}
    return as_traced(a)[tuple(None if i in kept else slice(None) for i in range(ndim))]


@implements(np.squeeze)
def squeeze(a: Any, axis: Any = None) -> TracedArray:
    """Drop axes of length 1."""
    axes = [i for i, n in enumerate(a.shape) if n == 1] if axis is None else _axes(axis, a.ndim)
    for i in axes:
        if a.shape[i] != 1:
            raise TracingError(f"axis {i} of an array of shape {a.shape} can't be squeezed: its length is not 1")
    return a[tuple(0 if i in axes else slice(None) for i in range(a.ndim))] if axes else a


@implements(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> TracedArray:
    """Repeat along axes of length 1."""
    array = as_traced(array)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if np.broadcast_shapes(array.shape, shape) != shape:
        raise TracingError(f"an array of shape {array.shape} can't be broadcast to {shape}")
    return array.trace.one("broadcast", {"shape": list(shape)}, (array,), Kind(shape, array.kind.dtype))


_FUNCTIONS |= {
    np.atleast_1d: lambda x: x if x.ndim else x[None],
    np.atleast_2d: lambda x: x if x.ndim > 1 else x[None] if x.ndim else x[None, None],
}


@implements(np.concatenate, np.concat)
def concat(arrays: Sequence[Any], axis: int | None = 0, out: None = None, *, dtype: Any = None) -> TracedArray:
    """Put arrays one behind the other."""
    parts = [as_traced(x) for x in arrays]
    if axis is None:
        parts, axis = [reshape(x, -1) for x in parts], 0
    first = parts[0]
    axis = _axes(axis, first.ndim)[0] if first.ndim else 0
    kind = np.dtype(dtype) if dtype is not None else np.result_type(*(x.dtype for x in parts))
    rest = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in parts}
    if len(rest) > 1 or not first.ndim:
        raise TracingError(f"arrays of shapes {', '.join(str(x.shape) for x in parts)} along axis {axis} do not fit")
    shape = (*first.shape[:axis], sum(x.shape[axis] for x in parts), *first.shape[axis + 1 :])
    return first.trace.one("concat", {"axis": axis}, [x.astype(kind) for x in parts], Kind(shape, kind.name))


@implements(np.stack)
def _stacked(arrays: Sequence[Any], axis: int = 0, **_: Any) -> TracedArray:
    parts = [as_traced(x) for x in arrays]
    at = axis % (parts[0].ndim + 1)
    return concat([expand_dims(x, at) for x in parts], at)


_FUNCTIONS |= {
    np.column_stack: lambda arrays: concat([x[:, None] if x.ndim == 1 else x for x in map(as_traced, arrays)], 1),
    np.hstack: lambda arrays: concat(arrays, 0 if np.ndim(arrays[0]) == 1 else 1),
    np.vstack: lambda arrays: concat([x[None] if x.ndim == 1 else x for x in map(as_traced, arrays)], 0),
}


def _indexed(x: TracedArray, index: tuple[Any, ...]) -> TracedArray:
    """Return a part of an array by a basic index, or rows by numbers."""
    count = sum(k is not None and k is not Ellipsis for k in index)
    if count > x.ndim:
        raise TracingError(f"{count} indices of an array with {x.ndim} axes")
    full = (slice(None),) * (x.ndim - count)
    at = next((i for i, k in enumerate(index) if k is Ellipsis), len(index))
    index = (*index[:at], *full, *index[at + 1 :])
    plain: list[Any] = []
    # The axis of the result of the basic index at which an array of numbers stands, and these.
    taken: list[tuple[int, Any]] = []
    for k in index:
        if isinstance(k, np.integer | int) and not isinstance(k, bool):
            plain.append(int(k))
        elif isinstance(k, slice):
            plain.append(slice(*(None if v is None else operator.index(v) for v in (k.start, k.stop, k.step))))
        elif k is None:
            plain.append(None)
        elif isinstance(k, bool) or getattr(k, "dtype", np.dtype(int)).kind == "b":
            raise TracingError(
                "an index of bools has a shape that depends on elements: use numpy.where, or sums with factors of 0"
            )
        else:
            taken.append((sum(not isinstance(p, int) for p in plain), k))
            plain.append(slice(None))
    for position, n in zip((p for p in plain if p is not None), x.shape, strict=True):
        if isinstance(position, int) and not -n <= position < n:
            raise TracingError(f"index {position} of an axis of length {n}")
    if any(p != slice(None) for p in plain):
        shape = np.broadcast_to(np.False_, x.shape)[tuple(plain)].shape
        x = x.trace.one("index", {"index": index_to_plain(plain)}, (x,), Kind(shape, x.kind.dtype))
    if len(taken) > 1:
        raise TracingError("an index with two arrays of numbers: use one after the other, or numpy.take_along_axis")
    return take(x, taken[0][1], taken[0][0]) if taken else x


@implements(np.take)
def take(a: Any, indices: Any, axis: int | None = None, **_: Any) -> TracedArray:
    """Return the parts of an array with some numbers along an axis."""
    a, indices = as_traced(a), as_traced(indices)
    if indices.dtype.kind not in "iu":
        raise TracingError(f"an index of {indices.dtype}: expected integers")
    if axis is None:
        a, axis = reshape(a, -1), 0
    axis = axis % a.ndim
    shape = (*a.shape[:axis], *indices.shape, *a.shape[axis + 1 :])
    return a.trace.one("take", {"axis": axis}, (a, indices), Kind(shape, a.kind.dtype))


@implements(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: int = -1) -> TracedArray:
    """Return for each row the elements with some numbers."""
    arr, axis = as_traced(arr), axis % arr.ndim
    numbers = expand_dims(np.arange(arr.shape[axis]).reshape([-1 if i == axis else 1 for i in range(arr.ndim)]), axis)
    chosen = np.equal(expand_dims(indices, axis + 1), numbers)
    return sum_(where(chosen, expand_dims(arr, axis), 0), axis + 1)


def segment_sum(data: Any, segment_ids: Any, num_segments: int) -> Any:
    """Add up the rows of an array that have the same label, as ``jax.ops.segment_sum`` does.

    Parameters
    ----------
    data : array, (m, ...)
        The rows to add up.
    segment_ids : array of int, (m,)
        The label of each row, from 0 to below `num_segments`; rows of other labels are left out.
    num_segments : int
        How many labels there are.

    Returns
    -------
    array, (num_segments, ...)
        The sums.

    Raises
    ------
    TracingError
        `segment_ids` are not integers, one for each row.

    See Also
    --------
    sum_rows, jit

    Examples
    --------
    >>> import numpy as np
    >>> from dask_distmm import segment_sum
    >>> segment_sum(np.array([1.0, 2.0, 4.0]), np.array([0, 1, 0]), 2)
    array([5., 2.])
    """
    if not any(isinstance(x, TracedArray) for x in (data, segment_ids)):
        return summed_by_label(data, segment_ids, num_segments)
    data, segment_ids = as_traced(data), as_traced(segment_ids)
    if segment_ids.shape != data.shape[:1] or segment_ids.dtype.kind not in "iu":
        raise TracingError(
            f"segment_ids is {segment_ids.dtype} {segment_ids.shape}; expected integers of shape {data.shape[:1]}"
        )
    kind = Kind((int(num_segments), *data.shape[1:]), np.sum(np.ones(1, data.dtype)).dtype.name)
    return data.trace.one("segment_sum", {"count": int(num_segments)}, (data, segment_ids), kind)


def summed_by_label(data: Any, labels: Any, count: int) -> Any:
    """Add rows up by their labels, of NumPy, CuPy, or SciPy's sparse rows; without rows, count the labels."""
    if type(data).__module__.startswith("cupy"):
        xp, flat = sys.modules["cupy"], data.reshape(len(data), -1)
        chosen = (labels == xp.arange(count)[:, None]).astype(flat.dtype if flat.dtype.kind in "fc" else np.float64)
        sums = (chosen @ flat).astype(np.sum(np.zeros(1, data.dtype)).dtype)
        return sums.reshape(count, *data.shape[1:])
    labels = labels.astype(np.int64, copy=False)
    # A negative number is large without its sign.
    if labels.view(np.uint64).max(initial=0) >= count:
        inside = (labels >= 0) & (labels < count)
        data, labels = None if data is None else data[inside], labels[inside]
    if data is None or (data.dtype == np.float64 and data.ndim == 1):
        return np.bincount(labels, data, count)
    size, dtype = len(labels), np.sum(np.zeros(1, data.dtype)).dtype
    # To check what is sparse takes as long as to add up a strip.
    ones = copy.copy((_ones_in_columns if size < 2**16 else _ones_in_columns.__wrapped__)(count, size, dtype))
    ones.indices = labels
    rows = data.reshape(size, -1) if data.ndim > 2 else data
    return dense(ones @ rows.astype(dtype, copy=False)).reshape(count, *data.shape[1:])


@functools.lru_cache(8)
def _ones_in_columns(count: int, size: int, dtype: Any) -> Any:
    """Return a sparse matrix with a one in each column, in the first row."""
    from scipy.sparse import csc_array

    return csc_array((np.ones(size, dtype), np.zeros(size, np.int64), np.arange(size + 1)), (count, size))


# Functions along an axis, or of matrices that all ranks have


def _along(name: str, *, default: int | None = -1, dtype: Any = None) -> Callable[..., Any]:
    def function(a: Any, axis: Any = default, **options: Any) -> TracedArray:
        a = as_traced(a)
        if axis is None:
            a, axis = reshape(a, -1), 0
        axis = _axes(axis, a.ndim)[0]
        options = {k: v for k, v in options.items() if v is not None and k not in ("out", "kind", "stable")}
        if name == "argsort":
            options["kind"] = "stable"  # as CuPy's is
        kind = dtype or getattr(np, name)(np.ones((1,), a.dtype), axis=0, **options).dtype
        shaped = Kind(a.shape, np.dtype(kind).name)
        return a.trace.one("along", {"f": name, "axis": axis, **options}, (a,), shaped)

    function.__name__ = name
    return function


_FUNCTIONS |= {
    np.cumsum: _along("cumsum", default=None),
    np.cumprod: _along("cumprod", default=None),
    np.sort: _along("sort"),
    np.argsort: _along("argsort", dtype=np.int64),
}


@implements(np.flip)
def flip(m: Any, axis: Any = None) -> TracedArray:
    """Reverse axes."""
    axes = _axes(axis, m.ndim)
    return as_traced(m)[tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(m.ndim))]


def whole(name: str, inputs: Sequence[Any], **options: Any) -> Any:
    """Record a function of NumPy's on arrays that all ranks have; shapes follow from a look at ones."""
    operands = [as_traced(x) for x in inputs]
    if any(UNKNOWN in x.kind.shape[-2:] for x in operands):
        need_rows()
    stack = operands[0].shape[:-2] if is_stackable(name, [x.shape for x in operands]) else ()
    samples = [_sample(Kind((*(1 for _ in stack), *x.shape[len(stack) :]), x.kind.dtype)) for x in operands]
    try:
        with np.errstate(all="ignore"):
            sample = function_of(np, name)(*samples, **options)
    except (ValueError, np.linalg.LinAlgError) as error:
        shapes = ", ".join(f"{x.dtype} {x.shape}" for x in operands)
        raise TracingError(f"numpy.{name} of arrays of {shapes}: {error}") from error
    several = isinstance(sample, tuple)
    results = [np.asarray(x) for x in (sample if several else (sample,))]
    # NumPy has complex eigenvalues only where it has found some.
    least = np.complex64 if name in ("linalg.eig", "linalg.eigvals") else np.bool_
    kinds = [Kind((*stack, *x.shape[len(stack) :]), np.result_type(x.dtype, least).name) for x in results]
    values = operands[0].trace.add("whole", {"f": name, "how": options}, operands, kinds)
    return type(sample)(*values) if several and hasattr(sample, "_fields") else tuple(values) if several else values[0]


def is_stackable(name: str, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a function of NumPy's is one of each matrix of stacks, which are all of the same shape."""
    stacks = {shape[:-2] for shape in shapes}
    return name.startswith("linalg.") and name != "linalg.tensorsolve" and len(stacks) == 1 and stacks != {()}


@functools.lru_cache(256)
def _sample(kind: Kind) -> Any:
    """Return an array of a kind on which functions of matrices do not fail."""
    sample = np.zeros(kind.shape, kind.dtype)
    if sample.ndim > 1:
        sample += np.eye(kind.shape[-2], kind.shape[-1], dtype=np.dtype(kind.dtype))
    return sample


def function_of(xp: Any, name: str) -> Callable[..., Any]:
    """Return a function of an array module by its name, which may have a point in it."""
    function: Callable[..., Any] = functools.reduce(getattr, name.split("."), xp)
    return function


def _matrices(name: str, count: int = 1) -> Callable[..., Any]:
    def function(*arguments: Any, **options: Any) -> Any:
        inputs, rest = arguments[:count], arguments[count:]
        if rest:
            raise TracingError(f"numpy.{name}: pass options by their names")
        return whole(name, inputs, **{k: v for k, v in options.items() if v is not None})

    function.__name__ = name
    return function


for _name in ("inv", "cholesky", "eigh", "eigvalsh", "eig", "eigvals", "svdvals", "det", "slogdet", "pinv",
              "matrix_rank", "cond"):  # fmt: skip
    _FUNCTIONS[getattr(np.linalg, _name)] = _matrices(f"linalg.{_name}")
for _name in ("solve", "tensorsolve"):
    _FUNCTIONS[getattr(np.linalg, _name)] = _matrices(f"linalg.{_name}", 2)


@implements(np.linalg.qr)
def qr(a: Any, mode: str = "reduced") -> Any:
    """Factorize: a matrix in the rows of ranks by tall-skinny QR, another one by LAPACK."""
    a = as_traced(a)
    if mode not in ("reduced", "r"):
        raise TracingError(f"qr(mode={mode!r}) in a traced function: expected 'reduced' or 'r'")
    if a.ndim != 2:
        return whole("linalg.qr", (a,), mode=mode)
    m, n = a.shape
    k = min(m, n)
    kind = a.kind.dtype if a.dtype.kind in "fc" else "float64"
    q, r = a.trace.add("qr", {}, (a.astype(kind),), [Kind((m, k), kind), Kind((k, n), kind)])
    return r if mode == "r" else _QR(q, r)


_QR: Any = type(np.linalg.qr(np.eye(1)))


@implements(np.linalg.svd)
def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    """Decompose: a matrix in the rows of ranks by R of its QR."""
    a = as_traced(a)
    if not compute_uv:
        return whole("linalg.svdvals", (a,)) if a.shape[-2] <= a.shape[-1] else whole("linalg.svdvals", (qr(a, "r"),))
    if a.ndim != 2 or a.shape[0] <= a.shape[1] or full_matrices:
        return whole("linalg.svd", (a,), full_matrices=full_matrices)
    q, r = qr(a)
    u, s, vh = whole("linalg.svd", (r,), full_matrices=False)
    return _SVD(np.matmul(q, u), s, vh)


_SVD: Any = type(np.linalg.svd(np.eye(1)))


@implements(np.linalg.lstsq)
def lstsq(a: Any, b: Any, rcond: float | None = None) -> Any:
    """Solve least squares by the SVD of R of [a b], as LAPACK's ``gelsd`` decides about ranks."""
    a, b = as_traced(a), as_traced(b)
    q, r = qr(a)
    return whole("linalg.lstsq", (r, np.matmul(q.T.conj(), b)), rcond=rcond)


@implements(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Compute norms of vectors and matrices."""
    x = as_traced(x)
    if axis is None and x.ndim == 2 and ord in (2, -2, "nuc"):
        s = svd(x, compute_uv=False)
        return s[0] if ord == 2 else s[-1] if ord == -2 else sum_(s)
    if ord is None or ord == "fro" or (ord == 2 and (axis is not None or x.ndim == 1)):
        squares = np.square(x) if x.dtype.kind != "c" else np.square(x.real) + np.square(x.imag)
        squares = squares if squares.dtype.kind == "f" else squares.astype(np.float64)
        return np.sqrt(sum_(squares, axis, keepdims=keepdims))
    size = abs(x)
    if x.ndim == 2 and axis is None and ord in (1, -1, np.inf, -np.inf):
        sums = sum_(size, 0 if abs(ord) == 1 else 1)
        return max_(sums) if ord > 0 else min_(sums)
    if ord in (np.inf, -np.inf):
        return (max_ if ord > 0 else min_)(size, axis, keepdims=keepdims)
    if ord == 0:
        return sum_(np.not_equal(x, 0).astype(size.dtype), axis, keepdims=keepdims)
    if ord == 1:
        return sum_(size, axis, keepdims=keepdims)
    if isinstance(ord, int | float):
        return sum_(size**ord, axis, keepdims=keepdims) ** (1.0 / ord)
    raise TracingError(f"norm(ord={ord!r}) in a traced function: expected a number, inf, -inf, 'fro' or 'nuc'")


_FUNCTIONS |= {
    np.linalg.vector_norm: lambda x, axis=None, keepdims=False, ord=2: norm(
        reshape(x, -1) if axis is None and not keepdims else x, ord, axis, keepdims
    ),
    np.linalg.matrix_norm: lambda x, ord="fro", keepdims=False: norm(
        x, ord, (-2, -1) if ord == "fro" else None, keepdims
    ),
    np.linalg.multi_dot: lambda arrays: functools.reduce(np.matmul, arrays),
    np.linalg.matrix_power: lambda a, n: functools.reduce(np.matmul, [a] * n),
}


@implements(np.diagonal, np.linalg.diagonal)
def diagonal(a: Any, offset: int = 0) -> TracedArray:
    """Return the diagonal of a square matrix."""
    if offset:
        return whole("diagonal", (a,), offset=offset)
    return sum_(a * np.eye(a.shape[0], a.shape[1], dtype=np.bool_), 1)[: min(a.shape)]


@implements(np.diag)
def diag(v: Any, k: int = 0) -> TracedArray:
    """Return a diagonal matrix, or the diagonal of a matrix."""
    v = as_traced(v)
    if v.ndim == 1 and k == 0:
        return where(np.eye(len(v), dtype=np.bool_), v[:, None], np.zeros((), v.dtype))
    return diagonal(v, k) if v.ndim == 2 else whole("diag", (v,), k=k)


@implements(np.trace, np.linalg.trace)
def trace(a: Any, offset: int = 0, **_: Any) -> TracedArray:
    """Add up the diagonal."""
    return sum_(diagonal(a, offset))


def _triangle(upper: bool) -> Callable[..., Any]:
    def function(m: Any, k: int = 0) -> TracedArray:
        rows, cols = m.shape[-2:]
        distance = np.arange(cols) - np.arange(rows)[:, None]
        return where(distance >= k if upper else distance <= k, m, np.zeros((), m.dtype))

    return function


_FUNCTIONS |= {np.triu: _triangle(True), np.tril: _triangle(False)}
_FUNCTIONS |= {np.kron: _matrices("kron", 2), np.searchsorted: _matrices("searchsorted", 2)}


@implements(np.roll)
def roll(a: Any, shift: int, axis: int | None = None) -> TracedArray:
    """Shift elements along an axis, round the end."""
    a = as_traced(a)
    if axis is None:
        return reshape(roll(reshape(a, -1), shift, 0), a.shape)
    n, at = a.shape[axis], (slice(None),) * (axis % a.ndim)
    shift = shift % n if n else 0
    return concat([a[(*at, slice(n - shift, None))], a[(*at, slice(0, n - shift))]], axis) if shift else a


@implements(np.diff)
def diff(a: Any, n: int = 1, axis: int = -1) -> TracedArray:
    """Return the differences of neighbours."""
    at = (slice(None),) * (axis % a.ndim)
    for _ in range(n):
        a = a[(*at, slice(1, None))] - a[(*at, slice(None, -1))]
    return as_traced(a)


# Products


def contracted(spec: str, a: Any, b: Any) -> TracedArray:
    """Record a contraction of two arrays, as einsum has it."""
    a, b = as_traced(a), as_traced(b)
    first, second, out = letters_of(spec)
    sizes: dict[str, int] = {}
    for letters, x in ((first, a), (second, b)):
        for letter, n in zip(letters, x.shape, strict=True):
            if sizes.setdefault(letter, n) != n:
                raise TracingError(f"a product of arrays of shapes {a.shape} and {b.shape}, which do not fit")
    dtype = np.result_type(a.dtype, b.dtype)
    kind = Kind(tuple(sizes[letter] for letter in out), dtype.name)
    return a.trace.one("contract", {"spec": spec}, (a, b), kind)


_BATCH, _FREE, _OTHER, _SUMMED = "abcdefgh", "i", "j", "k"


@implements(np.matmul)
def matmul(a: Any, b: Any, **_: Any) -> TracedArray:
    """Multiply matrices."""
    a, b = as_traced(a), as_traced(b)
    if not a.ndim or not b.ndim:
        raise TracingError("matmul of a number: use *")
    batch = max(0, a.ndim - 2, b.ndim - 2)
    if batch > 0 and a.ndim != b.ndim and min(a.ndim, b.ndim) > 1:
        a, b = (x[(None,) * (batch + 2 - x.ndim)] for x in (a, b))
    if batch > 0 and min(a.ndim, b.ndim) > 1 and a.shape[:-2] != b.shape[:-2]:
        shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (broadcast_to(x, (*shape, *x.shape[-2:])) for x in (a, b))
    first = "" if a.ndim == 1 else _BATCH[: a.ndim - 2] + _FREE
    second = "" if b.ndim == 1 else _BATCH[: b.ndim - 2]
    last = "" if b.ndim == 1 else _OTHER
    out = _BATCH[:batch] + (_FREE if first else "") + last
    return contracted(f"{first}{_SUMMED},{second}{_SUMMED}{last}->{out}", a, b)


@implements(np.dot)
def dot(a: Any, b: Any, out: None = None) -> Any:
    """Multiply matrices, vectors or numbers, as NumPy's ``dot`` does."""
    if not np.ndim(a) or not np.ndim(b):
        return np.multiply(a, b)
    return matmul(a, b) if np.ndim(b) < 3 else tensordot(a, b, ((np.ndim(a) - 1,), (np.ndim(b) - 2,)))


TracedArray.dot = dot  # type: ignore[attr-defined]


@implements(np.tensordot, np.linalg.tensordot)
def tensordot(a: Any, b: Any, axes: Any = 2) -> TracedArray:
    """Contract some axes of two arrays."""
    a, b = as_traced(a), as_traced(b)
    if isinstance(axes, int):
        axes = list(range(a.ndim - axes, a.ndim)), list(range(axes))
    left, right = ([x] if isinstance(x, int) else list(x) for x in axes)
    names = iter("abcdefghijklmnopqrstuvwxyz")
    first = [next(names) for _ in range(a.ndim)]
    second = [next(names) for _ in range(b.ndim)]
    for i, j in zip(left, right, strict=True):
        second[j] = first[i]
    out = [x for i, x in enumerate(first) if i not in {n % a.ndim for n in left}]
    out += [x for j, x in enumerate(second) if j not in {n % b.ndim for n in right}]
    return contracted(f"{''.join(first)},{''.join(second)}->{''.join(out)}", a, b)


_FUNCTIONS |= {
    np.vdot: lambda a, b: sum_(np.conjugate(reshape(a, -1)) * reshape(b, -1)),
    np.inner: lambda a, b: np.multiply(a, b) if not (np.ndim(a) and np.ndim(b)) else tensordot(a, b, ((-1,), (-1,))),
    np.outer: lambda a, b: reshape(a, -1)[:, None] * reshape(b, -1)[None],
    np.linalg.outer: lambda a, b: reshape(a, -1)[:, None] * reshape(b, -1)[None],
    np.linalg.matmul: matmul,
    np.vecdot: lambda a, b, axis=-1, **_: sum_(np.conjugate(a) * b, axis),
    np.linalg.vecdot: lambda a, b, axis=-1, **_: sum_(np.conjugate(a) * b, axis),
}
if hasattr(np, "matvec"):
    _FUNCTIONS |= {
        np.matvec: lambda a, x: matmul(a, as_traced(x)[..., None])[..., 0],
        np.vecmat: lambda x, a: matmul(np.conjugate(as_traced(x))[..., None, :], a)[..., 0, :],
    }


@implements(np.einsum)
def einsum(subscripts: Any, *operands: Any, **options: Any) -> TracedArray:
    """Contract arrays, as NumPy's ``einsum`` does, two at a time."""
    if not isinstance(subscripts, str):
        raise TracingError("einsum of lists of axes in a traced function: pass a string")
    text, arrays = subscripts.replace(" ", ""), [as_traced(x) for x in operands]
    if "." in text:
        raise TracingError("einsum with an ellipsis in a traced function: write the letters")
    left, arrow, out = text.partition("->")
    names = left.split(",")
    if not arrow:
        out = "".join(sorted(x for x in set(left) - {","} if left.count(x) == 1))
    if len(names) != len(arrays) or any(len(n) != x.ndim for n, x in zip(names, arrays, strict=False)):
        raise TracingError(f"einsum {subscripts!r} of arrays of shapes {', '.join(str(x.shape) for x in arrays)}")
    terms = [
        _alone(n, x, set(out).union(*names[:i], *names[i + 1 :]))
        for i, (n, x) in enumerate(zip(names, arrays, strict=True))
    ]
    if len(terms) > 2:
        samples = [np.broadcast_to(np.zeros(()), x.shape) for _, x in terms]
        path = np.einsum_path(",".join(n for n, _ in terms) + "->" + out, *samples, optimize="greedy")[0][1:]
    else:
        path = [tuple(range(len(terms)))]
    for pair in path:
        chosen = [terms.pop(i) for i in sorted(pair, reverse=True)][::-1]
        kept = set(out).union(*(n for n, _ in terms))
        while len(chosen) > 1:
            (n1, x1), (n2, x2), *chosen = chosen
            needed = kept.union(*(n for n, _ in chosen))
            target = out if not terms and not chosen else "".join(x for x in dict.fromkeys(n1 + n2) if x in needed)
            chosen.insert(0, (target, contracted(f"{n1},{n2}->{target}", x1, x2)))
        terms += chosen
    ((name, product),) = terms
    name, product = _alone(name, product, set(out))
    return transpose(product, [name.index(x) for x in out])


def _alone(name: str, x: TracedArray, needed: set[str]) -> tuple[str, TracedArray]:
    """Return an operand of which repeated letters are its diagonal, and those that nobody needs are summed over."""
    for letter in set(name):
        while name.count(letter) > 1:
            i, j = name.index(letter), name.rindex(letter)
            n = x.shape[i]
            eye = np.eye(n, dtype=np.bool_).reshape([n if k in (i, j) else 1 for k in range(x.ndim)])
            x, name = sum_(where(eye, x, 0), j), name[:j] + name[j + 1 :]
    axes = [i for i, letter in enumerate(name) if letter not in needed]
    if not axes:
        return name, x
    return "".join(letter for letter in name if letter in needed), sum_(x, tuple(axes), dtype=x.dtype)
