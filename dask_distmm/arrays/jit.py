"""`jit`: a user's function on Dask arrays as one run. It is traced, its inputs become operands, its results arrays."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from dask.array.core import Array, from_array
from dask.array.routines import atleast_2d
from dask.base import is_dask_collection

from dask_distmm.arrays.kinds import as_array, rechunked
from dask_distmm.arrays.linalg.factorize import cut_as, lazy_problem, made_of, program_arrays, rows_of
from dask_distmm.arrays.linalg.public import RunOptions
from dask_distmm.errors import PlanError, TracingError
from dask_distmm.planning.computation import NamedMatrix
from dask_distmm.planning.program import ProgramProblem
from dask_distmm.runtime.chunks import array_kind
from dask_distmm.tracing.arrays import Trace, TracedArray, kind_of, need_rows
from dask_distmm.tracing.control import Tree, flattened, nested
from dask_distmm.tracing.form import Kind, Literal, Program, pieces
from dask_distmm.tracing.lower import stored_shape
from dask_distmm.tracing.place import Axis, Placements

T = TypeVar("T")
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
def jit(
    fun: Callable[..., T], *, static_argnames: str | Iterable[str] = (), keep_every: int | None = None
) -> Jitted[T]: ...
@overload
def jit(
    fun: None = None, *, static_argnames: str | Iterable[str] = (), keep_every: int | None = None
) -> Callable[[Callable[..., T]], Jitted[T]]: ...
def jit(fun: Any = None, *, static_argnames: str | Iterable[str] = (), keep_every: int | None = None) -> Any:
    """Make a function on Dask arrays one run, whatever it is made of, as ``jax.jit`` does for arrays of JAX.

    The function is written with NumPy, and with `fori_loop`, `while_loop` and `cond` where it repeats or decides. When
    it is called with Dask arrays it is traced: called once with arrays that only know their shapes and types. What it
    returns are lazy Dask arrays, which one run makes. Called with NumPy or CuPy arrays it just computes.

    Arrays with as many rows as the largest Dask array stay in chunks of rows, where they are, but for chunks that move
    once for a long loop, so that no worker has many more rows than others; all other arrays come to all workers.
    `explain` shows where each value is, and what travels.

    Parameters
    ----------
    fun : function
        Of arrays, numbers, and nested tuples, lists and dicts of these. It must do the same each time.
    static_argnames : str or iterable of str
        Names of arguments that are not arrays, for example numbers of iterations: they are as they are while the
        function is traced, and each value of them is traced anew.
    keep_every : int, optional
        After this many turns of the outermost `fori_loop` a run ends, and the next one begins with its state, of which
        workers keep two copies meanwhile: if a worker is killed, the loop continues from there, not from its start. By
        default the whole function is one run. It matters where the function is called with Dask arrays, not where it is
        a part of another one.

    Returns
    -------
    function
        With the same arguments. Its results are Dask arrays: those in rows in the chunks of rows of the largest
        operand, others in one chunk.

    Raises
    ------
    PlanError
        A name is not an argument of the function, or `keep_every` is not a positive integer.
    TracingError
        When it is called: the function needs elements of its arrays, does what has no rule, or has no loop whose state
        could be kept.

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
        return functools.partial(jit, static_argnames=names, keep_every=keep_every)
    if not callable(fun):
        raise PlanError(f"jit takes a function, got a {type(fun).__name__}")
    if keep_every is not None and not (type(keep_every) is int and keep_every > 0):
        raise PlanError(f"keep_every must be a positive integer, got {keep_every!r}")
    return Jitted(fun, names, keep_every)


class Jitted(Generic[T]):
    """A function that `jit` has been given."""

    def __init__(self, fun: Callable[..., T], static: tuple[str, ...], keep_every: int | None = None) -> None:
        functools.update_wrapper(self, fun)
        self.keep_every = keep_every
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
        return Jitted, (self._fun, self._static, self.keep_every)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Call the function, or trace it and return lazy arrays."""
        leaves, tree = self.bound(args, kwargs)
        return self.compiled(leaves, tree).results() if any(map(_is_lazy, leaves)) else self._fun(*args, **kwargs)

    def run(self, how: RunOptions, *args: Any) -> T:
        """Trace the function for a run with some options; rows are those of the first array. Return lazy arrays."""
        return self.compiled(*self.bound(args, {}), how).results()  # type: ignore[no-any-return]

    def bound(self, args: Any, kwargs: Any) -> tuple[list[Any], Tree]:
        """Return the leaves of the arguments, and how they are nested; Dask arrays of other kinds as Dask's own."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name in self._static:
            if name in bound.arguments:
                bound.arguments[name] = Literal(bound.arguments[name])
        leaves, tree = flattened((list(bound.args), bound.kwargs))
        return [as_array(x) if _is_lazy(x) else x for x in leaves], tree

    def compiled(self, leaves: list[Any], tree: Tree, how: RunOptions | None = None) -> _Compiled:
        """Give the inputs of a trace to ranks: rows where they are, what is small with the program.

        Of a program in pieces it is the last one, whose operands come from the others.
        """
        name, keep_every, traced = self.name, self.keep_every, self.traced(leaves, tree)
        program = traced.program
        inputs = [leaves[x] if own else x for x, own in zip(traced.sources, traced.own, strict=True)]
        values: dict[int, Any] = dict(zip(program.block.inputs, inputs, strict=True))
        lazy = [x for x in inputs if isinstance(x, Array) and x.ndim]
        if not lazy:
            raise TracingError(f"{name} reads no Dask array that has axes: call it with NumPy arrays")
        leader = lazy[0] if how is not None else max(lazy, key=lambda x: (np.isnan(x.shape[0]), _kind(x).nbytes))
        if keep_every and not any("count" in statement.options for statement in program.block.statements):
            raise TracingError(
                f"keep_every={keep_every}: {name} has no fori_loop of a known number of turns outside of other loops "
                "and branches. In place of a while_loop write fori_loop(0, most, ...) with dask_distmm.cond, or leave "
                "keep_every= out"
            )
        parts, returned = pieces(program, keep_every) if keep_every else [program], (traced.outputs, traced.tree)
        for part in parts[:-1]:
            compiled = _piece(name, part, values, leader, traced.functions, returned, inner=True)
            values |= {x: (matrix, compiled.outputs[x][2]) for x, matrix in compiled.matrices().items()}
        return _piece(name, parts[-1], values, leader, traced.functions, returned, how=how)

    def traced(self, leaves: list[Any], tree: Tree) -> _Traced:
        """Return the trace for arguments of these kinds."""
        key: Any = (tree, tuple(map(_key, leaves)))
        try:
            trace = self._traces.get(key)
        except TypeError:  # one that has no hash
            key, trace = None, None
        if trace is None:
            trace = self._trace(leaves, tree)
            if key is not None:
                self._traces[key] = trace
                while len(self._traces) > _KEPT:
                    self._traces.popitem(last=False)
        return trace

    def _trace(self, leaves: list[Any], tree: Tree) -> _Traced:
        trace, arguments = Trace(), list[Any]()
        with trace.block() as block:
            for leaf in leaves:
                arguments.append(trace.input(leaf, _kind(leaf)) if _is_array(leaf) else getattr(leaf, "value", leaf))
            # An array that is passed twice is one input.
            numbers = {x.number: i for i, x in reversed([*enumerate(arguments)]) if isinstance(x, TracedArray)}
            positional, named = nested(arguments, tree)
            returned, result_tree = flattened(self._fun(*positional, **named))
            outputs = [trace.lift(x) if isinstance(x, TracedArray) else x for x in returned]
            inner = block.end(trace, [x for x in outputs if isinstance(x, TracedArray)])
        inner.inputs = list(trace.inputs)
        sources = [numbers.get(n, array) for n, array in trace.inputs.items()]
        own = [number in numbers for number in trace.inputs]
        # The trace is kept for other arguments, and these are not: workers may hold them as long as somebody has them.
        trace.inputs.clear()
        return _Traced(trace.program(inner), sources, own, outputs, result_tree, trace.functions)


def _is_lazy(x: Any) -> bool:
    return is_dask_collection(x) and hasattr(x, "dtype") and hasattr(x, "chunks")


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, TracedArray)


def _kind(x: Any) -> Kind:
    return kind_of(x, unknown=_is_lazy(x))


def _key(leaf: Any) -> Any:
    """Return what a trace depends on, of an argument."""
    if _is_array(leaf):
        return _is_lazy(leaf), array_kind(leaf) if not _is_lazy(leaf) else "", _kind(leaf), str(leaf.dtype)
    return type(leaf), leaf


class _Compiled(NamedTuple):
    """A program with its operands: a problem, and what its results are."""

    problem: ProgramProblem
    arrays: list[Array]
    # For each output its name, kind and axis, by its number.
    outputs: dict[int, tuple[str, Kind, Axis]]
    leader: Array
    # What the function returns, and how that is nested.
    returned: tuple[list[Any], Tree]

    def matrices(self) -> dict[int, Array]:
        """Return the outputs as lazy matrices by their numbers."""
        problem, computed = made_of(self.problem, self.arrays)
        return dict(zip(self.outputs, program_arrays(problem, self.arrays, computed), strict=True))

    def results(self) -> Any:
        """Return the results as lazy arrays."""
        matrices, (leaves, tree) = self.matrices(), self.returned
        rows = self.leader.chunks[0]
        shaped = [
            _shaped(matrices[x.number], *self.outputs[x.number][1:], rows) if isinstance(x, TracedArray) else x
            for x in leaves
        ]
        return nested(shaped, tree)


def _piece(
    name: str,
    program: Program,
    values: Mapping[int, Any],
    leader: Array,
    functions: Sequence[bytes],
    returned: tuple[list[Any], Tree],
    *,
    inner: bool = False,
    how: RunOptions | None = None,
) -> _Compiled:
    """Return a program, or a piece of one, with its operands; outputs of inner ones are matrices.

    The results of earlier pieces are matrices, too, each with its axis of rows.
    """
    m, a = _kind(leader).shape[0], rows_of(_matrix(leader, rows=True))
    operands, axes, sources, constants = {"a": a}, list[Axis](), list[str | int](), list(functions)
    whole, kept = [], []
    # The state of a loop that this piece continues.
    state = program.block.statements[0].inputs if program.block.statements else ()
    for number in program.block.inputs:
        x, is_made = values[number], isinstance(values[number], tuple)
        if not isinstance(x, Array | tuple) and x.nbytes <= _SMALL:
            sources.append(len(constants))
            axes.append(None)
            constants.append(np.ascontiguousarray(x.get() if hasattr(x, "get") else x).tobytes())
            continue
        axes.append(x[1] if is_made else 0 if _kind(x).shape[:1] == (m,) else None)
        if x is leader:
            sources.append("a")
            continue
        source = f"b{len(operands)}"
        sources.append(source)
        if is_made:
            operands[source] = x[0]
            kept += [source] * (number in state)
        else:
            matrix = _matrix(x if isinstance(x, Array) else from_array(x, chunks=-1), rows=axes[-1] == 0)
            operands[source] = matrix if axes[-1] is None else _beside(matrix, a)
        if axes[-1] is None:
            whole.append(source)
    program = dataclasses.replace(program, axes=tuple(axes), rows=m)
    placed = Placements(program)
    outputs: dict[int, tuple[str, Kind, Axis]] = {}
    for ref in program.block.outputs:
        if isinstance(ref, int) and ref not in outputs:
            outputs[ref] = f"r{len(outputs)}", program.kinds[ref], placed.axes[ref]
    options = {
        "program": program.to_text(),
        "sources": tuple(sources),
        "names": tuple(outputs[x][0] for x in program.block.outputs if isinstance(x, int)),
        "whole": tuple(whole),
        "types": {key: x.dtype.name for key, x in operands.items()},
        "finite": False,
    }
    rows = tuple(-1 if np.isnan(size) else int(size) for size in a.chunks[0])
    wanted = tuple(_wanted(*output, rows, inner=inner) for output in outputs.values())
    kinds = [x.dtype for x in operands.values() if x.dtype.kind in "fc"]
    dtype = np.result_type(np.float32, *kinds) if kinds else np.dtype(np.float64)
    facts = {"builder": "traced", "options_of_builder": options, "dtype": dtype.name, "kept": tuple(kept)}
    named = name, options, constants
    problem, arrays = lazy_problem(
        ProgramProblem, name.strip("<>_"), operands, how or {}, wanted, named, constants=tuple(constants), **facts
    )
    return _Compiled(problem, arrays, outputs, leader, returned)


def _matrix(x: Array, *, rows: bool) -> Array:
    """Return an operand as a matrix: its first axis are rows, or it is in one chunk."""
    if not rows:
        x = rechunked(x, -1)
    if x.ndim == 2:
        return x
    if x.ndim < 2:
        return x[:, None] if rows else atleast_2d(x)
    if np.isnan(x.shape[0]):
        need_rows()
    return x.reshape((len(x), -1) if rows else (1, -1))


def _beside(x: Array, a: Array) -> Array:
    """Return an operand in the chunks of rows of another one."""
    if np.isnan(a.shape[0]) and x.numblocks[0] != a.numblocks[0]:
        raise TracingError(
            f"two arrays of unknown sizes have {a.numblocks[0]} and {x.numblocks[0]} chunks of rows; expected as many: "
            "call their compute_chunk_sizes() before"
        )
    return cut_as(a, x)


def _wanted(name: str, kind: Kind, axis: Axis, rows: tuple[int, ...], *, inner: bool = False) -> NamedMatrix:
    (first, last), ndim = stored_shape(kind, axis), 2 if inner else len(kind.shape)
    if axis is not None:
        return NamedMatrix(name, (rows, (last,)), kind.dtype, (0,) if ndim == 1 else (0, 1))
    return NamedMatrix(name, ((first,), (last,)), kind.dtype, {0: (), 2: (0, 1)}.get(ndim, (1,)))


def _shaped(x: Array, kind: Kind, axis: Axis, rows: tuple[int, ...]) -> Array:
    """Return an output, which is a matrix or a row of one, in its own shape."""
    ndim = len(kind.shape)
    if axis is None:
        return x.reshape(kind.shape) if ndim > 2 else x
    if ndim > 2:
        rest = (*kind.shape[:axis], *kind.shape[axis + 1 :])
        x = x.map_blocks(_unfolded, rest, dtype=x.dtype, chunks=(rows, *((n,) for n in rest)), new_axis=range(2, ndim))
    return np.moveaxis(x, 0, axis) if axis else x


def _unfolded(block: Any, rest: Sequence[int]) -> Any:
    return block.reshape(len(block), *rest)
