"""Random chunks and matrices of any supported type, and Problems of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.config import read_options
from dask_distmm.numeric.types import dtype_from_name, operand_dtype
from dask_distmm.planning import Chunks, Problem


def random_chunks(rng: np.random.Generator, length: int, most: int) -> tuple[int, ...]:
    """Cut a length into up to `most` uneven chunks."""
    cuts = np.unique(rng.integers(0, length + 1, size=int(rng.integers(0, most))))
    return tuple(int(x) for x in np.diff([0, *cuts[(cuts > 0) & (cuts < length)], length]))


def random_matrix(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype, order: str) -> NDArray[Any]:
    """Return a random matrix of any supported type, in C or F order."""
    data: NDArray[Any]
    if dtype.kind == "b":
        data = rng.random(shape) < 0.1
    elif dtype.kind in "iu":
        info = np.iinfo(dtype)
        data = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    elif dtype.kind == "c":
        data = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    else:
        data = rng.standard_normal(shape)
    return np.asarray(data.astype(dtype), order=order)  # type: ignore[call-overload, no-any-return]


def make_problem(
    a_chunks: Chunks, b_chunks: Chunks, dtype: str = "float64", *, b_dtype: str | None = None, **changes: Any
) -> Problem:
    """Return a Problem with the configuration's options; `changes` overrides fields."""
    b_dtype = b_dtype or dtype
    fields: dict[str, Any] = {
        "name": "test",
        "a_chunks": a_chunks,
        "b_chunks": b_chunks,
        "out_chunks": (a_chunks[0], b_chunks[1]),
        "a_dtype": dtype,
        "b_dtype": b_dtype,
        "dtype": operand_dtype(dtype_from_name(dtype), dtype_from_name(b_dtype)).name,
        "method": "auto",
        "engine": "auto",
        "workers": None,
        "same": False,
        "options": read_options(),
    }
    return Problem(**(fields | changes))
