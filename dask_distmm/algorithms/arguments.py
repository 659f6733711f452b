"""What the arguments of algorithms must be: checked before anything is traced or moves."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from dask_distmm.errors import PlanError, unknown_name
from dask_distmm.tracing.arrays import kind_of
from dask_distmm.tracing.control import while_loop


def matrix(X: Any, name: str = "X", kinds: str = "f") -> Any:
    """Return a matrix of floats, or of other kinds of numbers."""
    X = X if hasattr(X, "dtype") and hasattr(X, "ndim") else np.asarray(X)
    if X.ndim != 2:
        raise PlanError(f"{name} must be 2-D, got {X.ndim}-D")
    if X.dtype.kind not in "biu" + kinds:
        raise PlanError(f"{name} must have {'real ' * ('c' not in kinds)}numbers, got {X.dtype}")
    kind_of(X)  # whose shape must be known
    return X if X.dtype.kind in kinds else X.astype(np.float64)


def shaped(x: Any, name: str, *shape: int) -> Any:
    """Return an array that has a shape."""
    x = x if hasattr(x, "dtype") and hasattr(x, "ndim") else np.asarray(x)
    if kind_of(x).shape != shape:
        raise PlanError(f"{name} must have the shape {shape}, got {x.shape}")
    return x


def counts(least: int = 1, most: float = np.inf, **values: Any) -> None:
    """Check integers."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or not least <= value:
            raise PlanError(f"{name} must be an integer of at least {least}, got {value!r}")
        if value > most:
            raise PlanError(f"{name} must be at most {most}, got {value}")


def numbers(*, positive: bool = False, **values: Any) -> None:
    """Check real numbers, which are not negative."""
    for name, value in values.items():
        if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool) or not value >= 0:
            raise PlanError(f"{name} must be a number that is not negative, got {value!r}")
        if positive and not value:
            raise PlanError(f"{name} must be positive, got {value!r}")


def chosen(name: str, value: Any, choices: Collection[str]) -> None:
    """Check the name of a variant."""
    if not isinstance(value, str) or value not in choices:
        raise PlanError(unknown_name(name, value, choices))


def until(turn: Any, state: tuple[Any, ...], max_iter: int) -> tuple[Any, ...]:
    """Repeat ``(*state, done) = turn(i, *state)`` until that is so; return the last state, and the number of turns."""
    *last, _, n_iter = while_loop(
        lambda s: np.logical_and(np.logical_not(s[-2]), s[-1] < max_iter),
        lambda s: (*turn(s[-1], *s[:-2]), s[-1] + 1),
        (*state, False, 0),
    )
    return (*last, n_iter)
