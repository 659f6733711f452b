"""`jit`: a user's function on Dask arrays as one run. It is traced, its inputs become operands, its results arrays."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from dask.array.core import Array, from_array
from dask.base import is_dask_collection, tokenize

from dask_distmm.arrays.kinds import as_array
from dask_distmm.arrays.linalg.factorize import made_of, native, program_arrays, rows_of, run_request
from dask_distmm.errors import PlanError, TracingError
from dask_distmm.planning.computation import NamedMatrix
from dask_distmm.planning.program import ProgramProblem
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.tracing.arrays import Trace, TracedArray, kind_of
from dask_distmm.tracing.control import Tree, flattened, nested
from dask_distmm.tracing.form import Kind, Program
from dask_distmm.tracing.lower import stored_shape
from dask_distmm.tracing.place import Axis, Placements

# NumPy arrays of up to this many bytes travel with the program, larger ones as chunks.
_SMALL = 2**20
# So many traces are kept for a function.
_KEPT = 32


class _Traced(NamedTuple):
    """What tracing a function for some kinds of arguments has given."""

    program: Program
    # For each input the number of the argument that it is, or the array that the function has taken from elsewhere.
    sources: list[Any]
    own: list[bool]
    outputs: list[Any]
    tree: Tree
    functions: list[bytes]


@overload
def jit(fun: Callable[..., Any], *, static_argnames: str | Iterable[str] = ()) -> Jitted: ...
@overload
def jit(fun: None = None, *, static_argnames: str | Iterable[str] = ()) -> Callable[[Callable[..., Any]], Jitted]: ...
def jit(fun: Callable[..., Any] | None = None, *, static_argnames: str | Iterable[str] = ()) -> Any:
    """Make a function on Dask arrays one run, whatever it is made of, as ``jax.jit`` does for arrays of JAX.

    The function is written with NumPy, and with `fori_loop`, `while_loop` and `cond` where it repeats or decides. When
    it is called with Dask arrays it is traced: called once with arrays that only know their shapes and types. What it
    returns are lazy Dask arrays, which one run makes. Called with NumPy or CuPy arrays it just computes.

    Arrays with as many rows as the largest Dask array stay in chunks of rows, where they are; all others come to all
    workers. `explain` shows where each value is, and what travels.

    Parameters
    ----------
    fun : function
        Of arrays, numbers, and nested tuples, lists and dicts of these. It must do the same each time.
    static_argnames : str or iterable of str
        Names of arguments that are not arrays, for example numbers of iterations: they are as they are while the
        function is traced, and each value of them is traced anew.

    Returns
    -------
    function
        With the same arguments. Its results are Dask arrays: those in rows in the chunks of rows of the largest
        operand, others in one chunk.

    Raises
    ------
    TracingError
        When it is called: the function needs elements of its arrays, or does what has no rule.

    See Also
    --------
    fori_loop, while_loop, cond, map_rows, explain

    Examples
    --------
    >>> import dask.array as da, dask_distmm, numpy as np
    >>> @dask_distmm.jit
    ... def normalized(x):
    ...     return x / np.sqrt((x * x).sum(axis=0))
    >>> float((normalized(da.ones((400, 3), chunks=(100, 3))) ** 2).sum().round(6))
    3.0
    """
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if fun is None:
        return functools.partial(jit, static_argnames=names)
    if not callable(fun):
        raise PlanError(f"jit takes a function, got a {type(fun).__name__}")
    return Jitted(fun, names)


class Jitted:
    """A function that `jit` has been given."""

    def __init__(self, fun: Callable[..., Any], static: tuple[str, ...]) -> None:
        functools.update_wrapper(self, fun)
        self.name: str = getattr(fun, "__name__", type(fun).__name__)
        self._fun, self._static, self._signature = fun, static, inspect.signature(fun)
        self._traces: collections.OrderedDict[Any, _Traced] = collections.OrderedDict()
        names = self._signature.parameters
        if not any(x.kind is x.VAR_KEYWORD for x in names.values()) and (unknown := set(static) - set(names)):
            raise PlanError(f"static_argnames has {min(unknown)!r}; the function has {', '.join(names)}")

    def __reduce__(self) -> Any:
        with contextlib.suppress(AttributeError, KeyError):
            if operator.attrgetter(self._fun.__qualname__)(sys.modules[self._fun.__module__]) is self:
                return self._fun.__qualname__
        return Jitted, (self._fun, self._static)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or trace it and return lazy arrays."""
        leaves, tree = self.bound(args, kwargs)
        if not any(map(_is_lazy, leaves)):
            return self._fun(*args, **kwargs)
        return _compiled(self.name, *self.traced(leaves, tree)).results()

    def bound(self, args: Any, kwargs: Any) -> tuple[list[Any], Tree]:
        """Return the leaves of the arguments, and how they are nested; Dask arrays of other kinds as Dask's own."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name in self._static:
            if name in bound.arguments:
                bound.arguments[name] = _Static(bound.arguments[name])
        leaves, tree = flattened((list(bound.args), bound.kwargs))
        return [as_array(x) if _is_lazy(x) else x for x in leaves], tree

    def traced(self, leaves: list[Any], tree: Tree) -> tuple[_Traced, list[Any]]:
        """Return the trace for arguments of these kinds, and the arguments."""
        key: Any = (tree, tuple(map(_key, leaves)))
        try:
            found = self._traces.get(key)
        except TypeError:  # one that has no hash
            key, found = None, None
        if found is None:
            found = self._trace(leaves, tree)
            if key is not None:
                self._traces[key] = found
                while len(self._traces) > _KEPT:
                    self._traces.popitem(last=False)
        return found, leaves

    def _trace(self, leaves: list[Any], tree: Tree) -> _Traced:
        trace, arguments = Trace(), list[Any]()
        with trace.active(), trace.block() as block:
            for leaf in leaves:
                arguments.append(trace.input(leaf, kind_of(leaf)) if _is_array(leaf) else getattr(leaf, "value", leaf))
            # An array that is passed twice is one input.
            numbers = {x.number: i for i, x in reversed([*enumerate(arguments)]) if isinstance(x, TracedArray)}
            given, named = nested(arguments, tree)
            made, result_tree = flattened(self._fun(*given, **named))
            outputs = [trace.lift(x) if isinstance(x, TracedArray) else x for x in made]
            inner = block.end(trace, [x for x in outputs if isinstance(x, TracedArray)])
        inner.inputs = list(trace.inputs)
        sources = [numbers.get(n, array) for n, array in trace.inputs.items()]
        own = [number in numbers for number in trace.inputs]
        # The trace is kept for other arguments, and these are not: workers may hold them as long as somebody has them.
        trace.inputs.clear()
        return _Traced(trace.program(inner), sources, own, outputs, result_tree, trace.functions)


@dataclasses.dataclass(frozen=True)
class _Static:
    """An argument that is as it is while a function is traced."""

    value: Any


def _is_lazy(x: Any) -> bool:
    return is_dask_collection(x) and hasattr(x, "dtype") and hasattr(x, "chunks")


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, TracedArray)


def _key(leaf: Any) -> Any:
    """Return what a trace depends on, of an argument."""
    if _is_array(leaf):
        return _is_lazy(leaf), array_kind(leaf) if not _is_lazy(leaf) else "", leaf.shape, str(leaf.dtype)
    return type(leaf), leaf


class _Compiled(NamedTuple):
    """A traced function with its operands: a problem, and what its results are."""

    problem: ProgramProblem
    arrays: list[Array]
    traced: _Traced
    # For each output that is computed, by its number: its name, kind and axis.
    outputs: dict[int, tuple[str, Kind, Axis]]
    leader: Array

    def results(self) -> Any:
        """Return the results as lazy arrays."""
        problem, made = made_of(self.problem, self.arrays)
        found = dict(zip(self.outputs, program_arrays(problem, self.arrays, made), strict=True))
        rows = self.leader.chunks[0]
        leaves = []
        for x in self.traced.outputs:
            if not isinstance(x, TracedArray):
                leaves.append(x)
                continue
            _, kind, axis = self.outputs[x.number]
            leaves.append(_shaped(found[x.number], kind, axis, rows))
        return nested(leaves, self.traced.tree)


def compiled(function: Jitted, args: Any, kwargs: Any) -> _Compiled:
    """Return a function with its arguments as a problem."""
    return _compiled(function.name, *function.traced(*function.bound(args, kwargs)))


def _compiled(name: str, traced: _Traced, leaves: list[Any]) -> _Compiled:
    """Give the inputs of a trace to ranks: rows where they are, what is small with the program."""
    inputs = [leaves[x] if own else x for x, own in zip(traced.sources, traced.own, strict=True)]
    lazy = [x for x in inputs if isinstance(x, Array) and x.ndim]
    if not lazy:
        raise TracingError(f"{name} reads no Dask array that has axes: call it with NumPy arrays")
    leader = max(lazy, key=lambda x: x.nbytes)
    m = len(leader)
    a = rows_of(_matrix(leader, rows=True))
    operands, axes, sources, constants = {"a": a}, list[Axis](), list[str | int](), list(traced.functions)
    whole = []
    for x in inputs:
        in_rows = x.ndim > 0 and x.shape[0] == m
        if not isinstance(x, Array) and x.nbytes <= _SMALL:
            sources.append(len(constants))
            axes.append(None)
            constants.append(np.ascontiguousarray(x.get() if hasattr(x, "get") else x).tobytes())
            continue
        axes.append(0 if in_rows else None)
        if x is leader:
            sources.append("a")
            continue
        source = f"b{len(operands)}"
        sources.append(source)
        lazy_x = x if isinstance(x, Array) else from_array(x, chunks=-1)
        operands[source] = _matrix(lazy_x, rows=in_rows)
        if in_rows:
            operands[source] = operands[source].rechunk((a.chunks[0], -1))
        else:
            whole.append(source)
    program = dataclasses.replace(traced.program, axes=tuple(axes), rows=m)
    placed = Placements(program)
    outputs: dict[int, tuple[str, Kind, Axis]] = {}
    for x in traced.outputs:
        if isinstance(x, TracedArray) and x.number not in outputs:
            outputs[x.number] = f"r{len(outputs)}", x.kind, placed.axes[x.number]
    options = {
        "program": program.to_text(),
        "sources": tuple(sources),
        "names": tuple(outputs[x][0] for x in program.block.outputs if isinstance(x, int)),
        "whole": tuple(whole),
        "types": {one: x.dtype.name for one, x in operands.items()},
        "finite": False,
    }
    wanted = tuple(_wanted(label, kind, axis, a.chunks[0]) for label, kind, axis in outputs.values())
    arrays = native(operands)
    request = run_request(ProgramProblem.kind, dict(zip(operands, arrays, strict=True)), {}, wanted)
    kinds = [x.dtype for x in operands.values() if x.dtype.kind in "fc"]
    dtype = np.result_type(np.float32, *kinds) if kinds else np.dtype(np.float64)
    token = tokenize(repr(([x.name for x in arrays], name, options, constants, request)))
    problem = ProgramProblem(
        name=f"{name.strip('<>_')}-{token}",
        builder="traced",
        options_of_builder=options,
        dtype=dtype.name,
        constants=tuple(constants),
        **request,
    )
    return _Compiled(problem, arrays, traced, outputs, leader)


def _matrix(x: Array, *, rows: bool) -> Array:
    """Return an operand as a matrix: its first axis are rows, or it is in one chunk."""
    if not rows:
        x = x.rechunk(-1)
    if x.ndim == 2:
        return x
    if x.ndim < 2:
        return x[:, None] if rows else x.reshape(1, -1)
    return x.reshape((len(x), -1) if rows else (1, -1))


def _wanted(name: str, kind: Kind, axis: Axis, rows: tuple[int, ...]) -> NamedMatrix:
    first, last = stored_shape(kind, axis)
    ndim = len(kind.shape)
    if axis is not None:
        return NamedMatrix(name, (rows, (last,)), kind.dtype, (0,) if ndim == 1 else (0, 1))
    return NamedMatrix(name, ((first,), (last,)), kind.dtype, (0, 1) if ndim == 2 else (1,))


def _shaped(x: Array, kind: Kind, axis: Axis, rows: tuple[int, ...]) -> Array:
    """Return an output, which is a matrix or a row of one, in its own shape."""
    ndim = len(kind.shape)
    if axis is None and ndim in (1, 2):
        return x
    if axis is None:
        return x.reshape(kind.shape) if ndim else x[0]
    if ndim > 2:
        rest = (*kind.shape[:axis], *kind.shape[axis + 1 :])
        x = x.map_blocks(_unfolded, rest, dtype=x.dtype, chunks=(rows, *((n,) for n in rest)), new_axis=range(2, ndim))
    return np.moveaxis(x, 0, axis) if axis else x


def _unfolded(block: Any, rest: Sequence[int]) -> Any:
    return block.reshape(len(block), *rest)
