"""Random numbers for functions of `dask_distmm.jit`, by keys, as those of ``jax.random``.

The same key gives the same numbers, for any number of workers and any chunks, and outside of a run, too. An array is
drawn in blocks of rows, each by a generator of its own (Philox, Salmon and others 2011) whose key is the user's with
the number of the block. So a rank draws its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dask_distmm.errors import TracingError
from dask_distmm.tracing.arrays import as_traced, trace_of
from dask_distmm.tracing.form import Kind

__all__ = ["fold_in", "key", "normal", "randint", "split", "uniform"]

# Elements of a block, about.
_BLOCK = 4096
_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def key(seed: int) -> Any:
    """Return the key of a seed.

    Parameters
    ----------
    seed : int
        Any integer.

    Returns
    -------
    array of uint64, (1,)
        What the other functions take.

    Raises
    ------
    TypeError
        `seed` is not a number.

    See Also
    --------
    split, fold_in

    Examples
    --------
    >>> from dask_distmm import random
    >>> random.uniform(random.key(0), (2,)).shape
    (2,)
    """
    return _mixed(np.array([int(seed) % 2**64], np.uint64))


def _mixed(x: Any) -> Any:
    """Return numbers that look as if they had nothing to do with others (splitmix64; Steele, Lea, Flood 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def fold_in(key: Any, data: Any) -> Any:
    """Return another key, of a key and a number, for example that of a turn.

    Parameters
    ----------
    key : array of uint64, (1,)
        A key.
    data : int
        Any integer, which may be traced.

    Returns
    -------
    array of uint64, (1,)
        The new key.

    Raises
    ------
    TypeError
        `data` is not a number.

    See Also
    --------
    key, split

    Examples
    --------
    >>> from dask_distmm import random
    >>> keys = [random.fold_in(random.key(0), turn) for turn in range(2)]
    >>> bool(keys[0] == keys[1])
    False
    """
    number = data.astype(np.uint64) if hasattr(data, "astype") else np.uint64(int(data) % 2**64)
    return _mixed(key ^ _mixed(np.zeros(1, np.uint64) + number))


def split(key: Any, num: int = 2) -> list[Any]:
    """Return several new keys of one.

    Parameters
    ----------
    key : array of uint64, (1,)
        A key.
    num : int
        How many.

    Returns
    -------
    list of array of uint64, (1,)
        The new keys.

    Raises
    ------
    TypeError
        `num` is not an integer.

    See Also
    --------
    key, fold_in

    Examples
    --------
    >>> from dask_distmm import random
    >>> first, second = random.split(random.key(0))
    """
    return [fold_in(key, ~number) for number in range(num)]


def uniform(key: Any, shape: Sequence[int] = (), dtype: Any = float, minval: float = 0.0, maxval: float = 1.0) -> Any:
    """Draw numbers from `minval` to below `maxval`.

    Parameters
    ----------
    key : array of uint64, (1,)
        A key.
    shape : sequence of int
        The shape; where the first axis has as many elements as the operands have rows, each worker draws its own.
    dtype : float64 or float32
        The type.
    minval, maxval : float
        The range.

    Returns
    -------
    array
        The numbers.

    Raises
    ------
    TracingError
        The type is another one.

    See Also
    --------
    normal, randint, key

    Examples
    --------
    >>> from dask_distmm import random
    >>> bool(random.uniform(random.key(1), (5,)).max() < 1)
    True
    """
    numbers = _drawn("random", key, shape, dtype)
    return numbers if (minval, maxval) == (0.0, 1.0) else numbers * (maxval - minval) + minval


def normal(key: Any, shape: Sequence[int] = (), dtype: Any = float) -> Any:
    """Draw normally distributed numbers.

    Parameters
    ----------
    key : array of uint64, (1,)
        A key.
    shape : sequence of int
        The shape, as of `uniform`.
    dtype : float64 or float32
        The type.

    Returns
    -------
    array
        The numbers, of mean 0 and variance 1.

    Raises
    ------
    TracingError
        The type is another one.

    See Also
    --------
    uniform, randint, key

    Examples
    --------
    >>> from dask_distmm import random
    >>> random.normal(random.key(1), (2, 3)).shape
    (2, 3)
    """
    return _drawn("standard_normal", key, shape, dtype)


def randint(key: Any, shape: Sequence[int], minval: int, maxval: int) -> Any:
    """Draw integers from `minval` to below `maxval`.

    Parameters
    ----------
    key : array of uint64, (1,)
        A key.
    shape : sequence of int
        The shape, as of `uniform`.
    minval, maxval : int
        The range.

    Returns
    -------
    array of int64
        The numbers.

    Raises
    ------
    TypeError
        `shape` does not consist of integers.

    See Also
    --------
    uniform, normal, key

    Examples
    --------
    >>> from dask_distmm import random
    >>> bool((random.randint(random.key(1), (9,), 0, 3) < 3).all())
    True
    """
    numbers = np.floor(_drawn("random", key, shape, float) * (maxval - minval))
    return numbers.astype(np.int64) + minval


def _drawn(name: str, key: Any, shape: Sequence[int], dtype: Any) -> Any:
    shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(map(int, shape))
    dtype = np.dtype(dtype)
    if dtype.name not in ("float32", "float64"):
        raise TracingError(f"random numbers of {dtype}: expected float32 or float64")
    trace = trace_of(key)
    if trace is None:
        return drawn(key, name, shape, dtype.name, 0, shape[0] if shape else 1)
    options = {"f": name, "shape": list(shape), "dtype": dtype.name}
    return trace.one("random", options, (as_traced(key, trace),), Kind(shape, dtype.name))


def drawn(key: Any, name: str, shape: Sequence[int], dtype: str, first: int, rows: int) -> Any:
    """Return some rows of an array of random numbers, of NumPy."""
    rest = tuple(shape[1:])
    step = max(1, _BLOCK // max(1, int(np.prod(rest, dtype=np.int64))))
    numbers = np.empty((rows, *rest), dtype)
    number = int(np.asarray(key).ravel()[0])
    for block in range(first // step, -(-(first + rows) // step)):
        generator = np.random.Generator(np.random.Philox(key=[number, block]))
        draw: Callable[..., Any] = getattr(generator, name)
        start = block * step
        low, high = max(start, first), min(start + step, first + rows)
        numbers[low - first : high - first] = draw((high - start, *rest), dtype)[low - start :]
    return numbers if shape else numbers[0]
