"""The protocol of a measured engine, and the check of its result. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[Any]
# Within such a context the other engines' standing processes leave the machine alone.
Quiet = Callable[[], AbstractContextManager[None]]
SAMPLED_ROWS = 8


@dataclass(frozen=True)
class Case:
    """One product to compute: a square one, at one way of cutting it."""

    size: int
    dtype: str
    grid: int | None = None


@dataclass(frozen=True)
class Sample:
    """One timing of one case."""

    seconds: float
    error: float
    details: dict[str, Any] = field(default_factory=dict)


class Contender:
    """An engine that multiplies matrices; those that are measured are subclasses."""

    name = ""

    def unavailable(self) -> str | None:
        """Return why the engine cannot be measured here; None if it can."""
        return None

    def grids(self) -> Sequence[int | None]:
        """Return the chunk grids to measure it at, ``[None]`` if it has none."""
        return [None]

    def measure(self, case: Case, seed: int, *, warmup: bool) -> Sample:
        """Multiply fresh random matrices once; a warm-up is not counted and may be used for tuning."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the engine's set-up for a reader of the report, as JSON values."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back all that the engine holds."""


def uniform_matrix(n: int, dtype: str, seed: int | Sequence[int]) -> Matrix:
    """Return a square matrix, uniform in [-0.5, 0.5): of zero mean, so that a lost term shows."""
    generator = np.random.default_rng(seed)
    matrix: Matrix = np.empty((n, n), dtype=dtype)
    # A row at a time keeps the peak at one matrix.
    for row in matrix:
        row[:] = generator.random(n, dtype=matrix.dtype.type) - 0.5
    return matrix


def sample_rows(n: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the sorted indices of the rows that are checked."""
    chosen = np.random.default_rng([seed, 2]).choice(n, size=min(n, SAMPLED_ROWS), replace=False)
    return np.sort(chosen)


def scaled_error(a_rows: Matrix, b: Matrix, c_rows: Matrix) -> float:
    """Return the largest error of some rows of a product, as a share of the error that rounding can cause.

    The share is of ``n * eps * |row of A| * |column of B|``, which bounds the rounding error of any order
    of summation to first order; NaN (never at most 1) where the product holds one.
    """
    if not c_rows.size:
        return 0.0
    exact = a_rows.astype(np.float64, copy=False) @ b.astype(np.float64, copy=False)
    norms = np.linalg.norm(a_rows, axis=1)[:, None] * np.linalg.norm(b, axis=0)[None, :]
    bound = b.shape[0] * np.finfo(c_rows.dtype).eps * norms
    return float(np.max(np.abs(c_rows - exact) / bound))
