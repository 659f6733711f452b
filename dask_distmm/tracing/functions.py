"""Functions of the user's, called on the workers in a run: for each chunk of rows, or by one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from dask_distmm.errors import TracingError
from dask_distmm.numeric.epilogs import call_function
from dask_distmm.tracing.arrays import TracedArray, as_traced, kind_of, trace_of
from dask_distmm.tracing.form import Kind


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
    with trace.active():
        trace.add("callback", {"function": trace.function(_pickled(f))}, [as_traced(x) for x in arrays], [])


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
    with trace.active():
        operands = [as_traced(x) for x in arrays]
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
