"""What an operand must be like to take the place of another one."""

from __future__ import annotations

import dataclasses

import dask.array as da
import numpy as np

from dask_distmm.errors import PlanError
from dask_distmm.runtime.chunks import array_kind

__all__ = ["Like"]


@dataclasses.dataclass(frozen=True)
class Like:
    """What an operand must be for the preparation to fit it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[tuple[int, ...], ...]
    array: str

    @classmethod
    def of(cls, array: da.Array) -> Like:
        """Return what an array is like."""
        return cls(array.shape, array.dtype, array.chunks, array_kind(array._meta))

    def check(self, name: str, array: da.Array) -> None:
        """Raise `PlanError` if an array differs; `name` is what to call it."""
        other = Like.of(array)
        for what in ("shape", "dtype", "chunks", "array"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise PlanError(
                    f"{name} has the {what} {theirs}; this Matmul was made for {mine}. Make another one for it"
                    + (f", or rechunk it to {mine}" if what == "chunks" else "")
                )
