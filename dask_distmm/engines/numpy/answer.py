"""Matrices that a peer has been asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import wait_checked
from dask_distmm.errors import EngineError


class Answer:
    """Matrices on their way."""

    def __init__(self, future: Future[Sequence[NDArray[Any]]], shapes: list[tuple[int, int]], flat: bool) -> None:
        self._future, self._shapes, self._flat = future, shapes, flat

    def wait(self, check: Callable[[], None]) -> list[NDArray[Any]]:
        """Return them once they are here; `check` raises if the run has been aborted."""
        arrived = list(wait_checked(self._future, check))
        if self._flat and len(arrived) == 1 < len(self._shapes):
            ends = np.cumsum([rows * cols for rows, cols in self._shapes])
            arrived = [x.reshape(shape) for x, shape in zip(np.split(arrived[0], ends[:-1]), self._shapes, strict=True)]
        found = [x.shape for x in arrived]
        if found != self._shapes:
            raise EngineError(f"a peer sent matrices of shapes {found}, expected {self._shapes}")
        return arrived
