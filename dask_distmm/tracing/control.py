"""Loops, branches and calls of users' functions: traced in a function of `jit`, and computed at once anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from dask_distmm.errors import TracingError
from dask_distmm.numeric.epilogs import call_function
from dask_distmm.tracing.arrays import Trace, TracedArray, as_traced, kind_of, trace_of
from dask_distmm.tracing.form import Block, Kind, Literal

# The structure of a state: a container's type with the keys and structures of its parts; None for an array.
Tree = tuple[Any, tuple[Any, ...], tuple["Tree", ...]] | None


def flattened(state: Any) -> tuple[list[Any], Tree]:
    """Return the arrays of nested tuples, lists and dicts, and how these are nested."""
    if isinstance(state, dict):
        keys, parts = tuple(state), list(state.values())
    elif isinstance(state, tuple | list):
        keys, parts = (), list(state)
    else:
        return [state], None
    flat = [flattened(part) for part in parts]
    return [x for leaves, _ in flat for x in leaves], (type(state), keys, tuple(tree for _, tree in flat))


def nested(leaves: Iterable[Any], tree: Tree) -> Any:
    """Return what `flattened` has taken apart."""
    leaves = iter(leaves)
    if tree is None:
        return next(leaves)
    kind, keys, trees = tree
    parts = [nested(leaves, part) for part in trees]
    if issubclass(kind, dict):
        return dict(zip(keys, parts, strict=True))
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any) -> Any:
    """Repeat ``state = body_fun(i, state)`` for i from `lower` to below `upper`, as ``jax.lax.fori_loop`` does.

    In a function of `jit` the loop is inside of the run; anywhere else it is computed at once.

    Parameters
    ----------
    lower, upper : int
        The range of i.
    body_fun : function
        Called with i and the state; returns the next state, of the same shapes and types.
    init_val : array, number, or nested tuples, lists and dicts of these
        The first state.

    Returns
    -------
    Like `init_val`
        The last state.

    Raises
    ------
    TracingError
        The body returns another structure, another shape or another type.

    See Also
    --------
    while_loop, cond, jit

    Examples
    --------
    >>> import dask_distmm
    >>> dask_distmm.fori_loop(0, 10, lambda i, total: total + i, 0)
    45
    """
    trace = trace_of(*flattened((lower, upper, init_val))[0])
    if trace is None:
        state = init_val
        for i in range(int(lower), int(upper)):
            state = body_fun(i, state)
        return state
    if isinstance(lower, TracedArray) or isinstance(upper, TracedArray):
        _, ending = while_loop(
            lambda both: both[0] < upper,
            lambda both: (both[0] + 1, body_fun(both[0], both[1])),
            (np.add(lower, np.zeros((), np.int64)), init_val),
        )
        return ending
    count = max(0, int(upper) - int(lower))
    number = Kind((), "int64")

    def body(i: TracedArray, state: Any) -> Any:
        return body_fun(i + int(lower) if lower else i, state)

    return _loop(trace, "fori_loop", init_val, body, [number], {"count": count})


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """Repeat ``state = body_fun(state)`` while ``cond_fun(state)`` is true, as ``jax.lax.while_loop`` does.

    In a function of `jit` the loop is inside of the run, and all workers decide alike; anywhere else it is computed at
    once.

    Parameters
    ----------
    cond_fun : function
        Called with the state; returns a bool without axes.
    body_fun : function
        Called with the state; returns the next one, of the same shapes and types.
    init_val : array, number, or nested tuples, lists and dicts of these
        The first state.

    Returns
    -------
    Like `init_val`
        The first state for which the condition is false.

    Raises
    ------
    TracingError
        The body returns another structure, shape or type, or the condition is not a bool.

    See Also
    --------
    fori_loop, cond, jit

    Examples
    --------
    >>> import dask_distmm
    >>> dask_distmm.while_loop(lambda x: x < 100, lambda x: 2 * x, 1)
    128
    """
    trace = trace_of(*flattened(init_val)[0])
    if trace is None:
        state = init_val
        while cond_fun(state):
            state = body_fun(state)
        return state
    return _loop(trace, "while_loop", init_val, body_fun, [], {}, cond_fun)


def _loop(
    trace: Trace,
    name: str,
    init: Any,
    body_fun: Callable[..., Any],
    numbers: Sequence[Kind],
    options: dict[str, Any],
    cond_fun: Callable[[Any], Any] | None = None,
) -> Any:
    leaves, tree = flattened(init)
    values = [trace.lift(x) for x in leaves]
    kinds = [kind_of(x) for x in values]
    body, names = None, [f"state {i}" for i in range(len(kinds))]
    # Numbers of Python take the type that the body gives them.
    for last in (False, True):
        body, ends = _body(trace, body_fun, numbers, kinds, tree, name)
        types = [
            np.result_type(old.value, np.dtype(new.dtype)).name if isinstance(old, Literal) else kind.dtype
            for old, kind, new in zip(values, kinds, ends, strict=True)
        ]
        widened = [Kind(kind.shape, dtype) for kind, dtype in zip(kinds, types, strict=True)]
        if last or widened == kinds:
            break
        kinds = widened
    for label, old, new in zip(names, kinds, ends, strict=True):
        if old != new:
            raise TracingError(
                f"{name}: the body makes {label}, {old.dtype} {old.shape}, an array of {new.dtype} {new.shape}; "
                "expected the same shape and type: convert it by astype(), or begin with another state"
            )
    assert body is not None
    blocks = [body]
    if cond_fun is not None:
        with trace.block() as block:
            flag = cond_fun(nested(block.begin(trace, kinds), tree))
            blocks.insert(0, block.end(trace, [_flag(name, flag)]))
    inputs = [
        TracedArray.astype(trace.lift(np.asarray(x.value)), kind.dtype) if isinstance(x, Literal) else x  # type: ignore[arg-type]
        for x, kind in zip(values, kinds, strict=True)
    ]
    return nested(trace.add("loop", options, inputs, kinds, blocks), tree)


def _body(
    trace: Trace, body_fun: Callable[..., Any], numbers: Sequence[Kind], kinds: Sequence[Kind], tree: Tree, name: str
) -> tuple[Block, list[Kind]]:
    with trace.block() as block:
        values = block.begin(trace, [*numbers, *kinds])
        state = nested(values[len(numbers) :], tree)
        leaves, after = flattened(body_fun(*values[: len(numbers)], state))
        if after != tree:
            raise TracingError(f"{name}: the body returns {_shown(after)}; expected {_shown(tree)}, as the first state")
        outputs = [_as_value(trace, x, kind) for x, kind in zip(leaves, kinds, strict=True)]
        return block.end(trace, outputs), [x.kind for x in outputs]


def _as_value(trace: Trace, x: Any, kind: Kind) -> TracedArray:
    """Return what a body has made of a part of the state; a number in the type of that."""
    value = trace.lift(x)
    if isinstance(value, Literal):
        dtype = np.result_type(np.dtype(kind.dtype), type(value.value))
        value = trace.lift(np.full(kind.shape if not kind.shape else (), value.value, dtype))
    assert isinstance(value, TracedArray)
    return value


def _shown(tree: Tree) -> str:
    if tree is None:
        return "an array"
    kind, keys, parts = tree
    return f"a {kind.__name__} of {len(parts)}" + (f" ({', '.join(map(str, keys))})" if keys else "")


def _flag(name: str, flag: Any) -> Any:
    kind = kind_of(flag)
    if kind.shape or kind.dtype != "bool":
        raise TracingError(
            f"{name}: the condition is an array of {kind.dtype} {kind.shape}; expected a bool without axes: use all() "
            "or any()"
        )
    return flag


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any) -> Any:
    """Return ``true_fun(*operands)`` if `pred` is true, else ``false_fun(*operands)``, as ``jax.lax.cond`` does.

    In a function of `jit` all workers decide alike in the run; anywhere else it is computed at once.

    Parameters
    ----------
    pred : bool
        The condition, without axes.
    true_fun, false_fun : function
        Both return the same structure, shapes and types.
    *operands : array or nested tuples, lists and dicts of arrays
        What they are called with.

    Returns
    -------
    What the functions return
        The result of one of them.

    Raises
    ------
    TracingError
        The functions return different structures, shapes or types, or the condition is not a bool.

    See Also
    --------
    fori_loop, while_loop, jit

    Examples
    --------
    >>> import dask_distmm
    >>> dask_distmm.cond(2 > 1, lambda x: x + 1, lambda x: x - 1, 5)
    6
    """
    trace = trace_of(*flattened((pred, operands))[0])
    if trace is None or not isinstance(pred, TracedArray):
        return (true_fun if pred else false_fun)(*operands)
    _flag("cond", pred)
    blocks, kinds, trees = [], [], []
    for function in (true_fun, false_fun):
        with trace.block() as block:
            leaves, tree = flattened(function(*operands))
            values = [_as_value(trace, x, Kind((), "bool")) for x in leaves]
            blocks.append(block.end(trace, values))
        kinds.append([x.kind for x in values])
        trees.append(tree)
    if kinds[0] != kinds[1] or trees[0] != trees[1]:
        shown = " and ".join(
            f"{_shown(t)}: " + ", ".join(f"{k.dtype} {k.shape}" for k in ks) for t, ks in zip(trees, kinds, strict=True)
        )
        raise TracingError(f"cond: the functions return {shown}; expected the same structures, shapes and types")
    return nested(trace.add("cond", {}, [pred], kinds[0], blocks), trees[0])


# Functions of the user's, called on the workers in a run: for each chunk of rows, or by one of them
def map_rows(f: Callable[..., Any], *arrays: Any, meta: Any = None) -> Any:
    """Call any function for each chunk of rows.

    In a function of `jit` workers call it, with NumPy or CuPy arrays as the chunks of the operands are, which must not
    be changed; anywhere else it is called once.

    Parameters
    ----------
    f : function
        Called with some rows of each array that has as many rows as the first one, and with all of the others. It
        returns an array of as many rows, or a tuple of these.
    *arrays : array
        The first one has axes.
    meta : array or tuple of array, optional
        What `f` returns, of any number of rows: says shapes and types. By default `f` is called with one row of ones
        while the function is traced.

    Returns
    -------
    array, (m, ...), or tuple of array
        The rows that `f` has returned.

    Raises
    ------
    TracingError
        `f` fails for ones, or returns other rows.

    See Also
    --------
    sum_rows, callback, jit

    Examples
    --------
    >>> import dask.array as da, dask_distmm
    >>> from scipy.special import expit
    >>> squashed = dask_distmm.jit(lambda x: dask_distmm.map_rows(expit, x))
    >>> squashed(da.zeros((4, 1), chunks=2)).compute()[0]
    array([0.5])
    """
    return _called(f, arrays, meta, "map_rows")


def sum_rows(f: Callable[..., Any], *arrays: Any, meta: Any = None) -> Any:
    """Call any function for each chunk of rows, and add up what it returns.

    Parameters
    ----------
    f : function
        Called as `map_rows` calls it. It returns an array, or a tuple of arrays, of the same shapes for any rows; also
        for none.
    *arrays : array
        The first one has axes.
    meta : array or tuple of array, optional
        What `f` returns: says shapes and types. By default `f` is called with one row of ones.

    Returns
    -------
    array or tuple of array
        The sums, in the types that `f` returns.

    Raises
    ------
    TracingError
        `f` fails for ones.

    See Also
    --------
    map_rows, segment_sum, jit

    Examples
    --------
    >>> import dask.array as da, dask_distmm, numpy as np
    >>> bins = dask_distmm.jit(lambda x: dask_distmm.sum_rows(lambda rows: np.bincount(rows, minlength=3), x))
    >>> bins(da.from_array([0, 2, 2, 1], chunks=2)).compute()
    array([1, 1, 2])
    """
    return _called(f, arrays, meta, "sum_rows")


def callback(f: Callable[..., Any], *arrays: Any) -> None:
    """Call a function on one worker, for what it does, as ``jax.debug.callback``.

    Parameters
    ----------
    f : function
        Called with arrays of NumPy. An error that it raises ends the run, and arrives as it is. Numbers get to the
        client by ``distributed.get_worker().log_event(topic, message)`` and ``client.get_events(topic)``.
    *arrays : array
        What it is called with; what is in rows comes to all workers before.

    Raises
    ------
    TracingError
        An array belongs to another function.

    See Also
    --------
    map_rows, jit

    Examples
    --------
    >>> import dask_distmm
    >>> dask_distmm.callback(print, 3)
    3
    """
    trace = trace_of(*arrays)
    if trace is None:
        f(*arrays)
        return
    trace.add("callback", {"function": trace.function(_pickled(f))}, [as_traced(x, trace) for x in arrays], [])


def put_column(x: Any, j: Any, column: Any) -> Any:
    """Return a matrix of which one column is replaced; in its memory where nobody else needs that."""
    trace = trace_of(x, j, column)
    if trace is not None:
        return trace.one("put", {}, (x, column, j), kind_of(x))
    x = x.copy()
    x[:, int(j)] = column
    return x


def decided(f: Callable[..., Any], *arrays: Any, meta: tuple[Any, ...]) -> Any:
    """Call a function of what all ranks have on one rank, for all of them; `meta`: arrays like its results."""
    trace = trace_of(*arrays)
    if trace is None:
        return f(*arrays)
    options = {"rows": [], "sums": True, "function": trace.function(cloudpickle.dumps(f)), "name": "decided"}
    return tuple(trace.add("call", options, arrays, [kind_of(x) for x in meta]))


class UserFunction(NamedTuple):
    """A user's function as it was when it was given, pickled, and as what it was given."""

    pickled: bytes
    role: str

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        return call_function(self.pickled, self.role, *args)


def _pickled(f: Any) -> bytes:
    return f.pickled if isinstance(f, UserFunction) else cloudpickle.dumps(f)


def replicated(x: Any) -> Any:
    """Return what is in rows on all ranks: it comes with the sums that are ready by then."""
    return x.trace.one("gather", {}, (x,), x.kind) if isinstance(x, TracedArray) else x


def product(a: Any, x: Any, like: Any) -> Any:
    """Return A X of a matrix, or of a function that is called with all of X and a slice of the rows of `like`."""
    if not isinstance(a, UserFunction):
        return a @ x
    columns = x[:, None] if x.ndim == 1 else x
    kind = Kind((len(like), columns.shape[1]), np.result_type(x.dtype, like.dtype).name)
    return _of_slices(a, (columns,), [], kind, x.ndim)


def adjoint_product(a: Any, u: Any, n: int) -> Any:
    """Return A^H u, of n rows, of a matrix, or of a function that is called with rows of u and their slice."""
    if not isinstance(a, UserFunction):
        return (u.conj() @ a).conj()
    return _of_slices(a, (u[:, None],), [0], Kind((n, 1), u.kind.dtype), 1)


def _of_slices(f: UserFunction, arrays: tuple[Any, ...], rows: list[int], kind: Kind, ndim: int) -> Any:
    trace = arrays[0].trace
    options = {"rows": rows, "sums": bool(rows), "function": trace.function(f.pickled), "name": f.role, "slices": True}
    product = trace.one("call", options, arrays, kind)
    return product[:, 0] if ndim == 1 else product


def _called(f: Callable[..., Any], arrays: tuple[Any, ...], meta: Any, name: str) -> Any:
    trace = trace_of(*arrays)
    if trace is None:
        return f(*arrays)
    if not arrays or not np.ndim(arrays[0]):
        raise TracingError(f"{name} of what has no rows: the first array must have axes")
    operands = [as_traced(x, trace) for x in arrays]
    m = operands[0].shape[0]
    rows = [i for i, x in enumerate(operands) if x.shape[:1] == (m,)]
    if meta is None:
        samples = [np.ones((1, *x.shape[1:]) if i in rows else x.shape, x.dtype) for i, x in enumerate(operands)]
        try:
            meta = f(*samples)
        except Exception as error:
            raise TracingError(
                f"{name}: {getattr(f, '__name__', f)} fails for one row of ones, by which its result is found out: "
                f"{type(error).__name__}: {error}. Pass meta="
            ) from error
        sizes = {np.shape(x)[:1] for x in (meta if isinstance(meta, tuple) else (meta,))}
        if name == "map_rows" and sizes != {(1,)}:
            raise TracingError(
                f"map_rows: {getattr(f, '__name__', f)} returns {sizes.pop()} rows for one row; expected 1"
            )
    several = isinstance(meta, tuple)
    results = [np.asarray(x) if not hasattr(x, "dtype") else x for x in (meta if several else (meta,))]
    first = (m,) if name == "map_rows" else ()
    kinds = [Kind((*first, *x.shape[len(first) :]), x.dtype.name) for x in results]
    options = {"rows": rows, "sums": name == "sum_rows", "function": trace.function(_pickled(f)), "name": name}
    values = trace.add("call", options, operands, kinds)
    return tuple(values) if several else values[0]
