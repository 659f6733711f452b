"""Functions of the user's, called on the workers in a run: for each chunk of rows, or by one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from dask_distmm.errors import TracingError
from dask_distmm.tracing.arrays import Trace, TracedArray, as_traced, current_trace
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
    """Have one worker call a function, for what it does, as ``jax.debug.callback``.

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
    trace = _trace(arrays)
    if trace is None:
        f(*arrays)
        return
    with trace.active():
        trace.add("callback", {"function": trace.function(cloudpickle.dumps(f))}, [as_traced(x) for x in arrays], [])


def _trace(arrays: tuple[Any, ...]) -> Trace | None:
    return next((x.trace for x in arrays if isinstance(x, TracedArray)), current_trace())


def _called(f: Callable[..., Any], arrays: tuple[Any, ...], meta: Any, name: str) -> Any:
    trace = _trace(arrays)
    if trace is None:
        return f(*arrays)
    if not arrays or not np.ndim(arrays[0]):
        raise TracingError(f"{name} of what has no rows: the first array must have axes")
    with trace.active():
        given = [as_traced(x) for x in arrays]
    m = given[0].shape[0]
    rows = [i for i, x in enumerate(given) if x.shape[:1] == (m,)]
    if meta is None:
        samples = [np.ones((1, *x.shape[1:]) if i in rows else x.shape, x.dtype) for i, x in enumerate(given)]
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
    found = [np.asarray(x) if not hasattr(x, "dtype") else x for x in (meta if several else (meta,))]
    first = (m,) if name == "map_rows" else ()
    kinds = [Kind((*first, *x.shape[len(first) :]), x.dtype.name) for x in found]
    options = {"rows": rows, "sums": name == "sum_rows", "function": trace.function(cloudpickle.dumps(f)), "name": name}
    made = trace.add("call", options, given, kinds)
    return tuple(made) if several else made[0]
