"""Loops and branches, by JAX's names: traced in a function of `jit`, and computed at once anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dask_distmm.errors import TracingError
from dask_distmm.tracing.arrays import Trace, TracedArray, kind_of, trace_of
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


def nested(leaves: Sequence[Any], tree: Tree) -> Any:
    """Return what `flattened` has taken apart."""
    return _nested(iter(leaves), tree)


def _nested(leaves: Any, tree: Tree) -> Any:
    if tree is None:
        return next(leaves)
    kind, keys, trees = tree
    parts = [_nested(leaves, part) for part in trees]
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
        with trace.active(), trace.block() as block:
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
    with trace.active(), trace.block() as block:
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
        with trace.active(), trace.block() as block:
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
