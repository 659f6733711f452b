"""Dask's own functions, whatever is installed under their names later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.array
import dask.array.routines
from dask.array.rechunk import rechunk

dask_matmul: Callable[..., Any] = dask.array.routines.matmul
dask_rechunk: Callable[..., Any] = rechunk
