"""The signature of an operand: another operand of the same one can take its place."""

from __future__ import annotations

import dataclasses

import dask.array as da
import numpy as np

from dask_distmm.errors import PlanError
from dask_distmm.runtime.chunks import array_kind

__all__ = ["Signature"]


@dataclasses.dataclass(frozen=True)
class Signature:
    """Shape, type, chunk sizes and kind of chunks (``"numpy"`` or ``"cupy"``) for which an operand was prepared."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[tuple[int, ...], ...]
    array: str

    @classmethod
    def of(cls, array: da.Array) -> Signature:
        """Return the signature of an array."""
        return cls(array.shape, array.dtype, array.chunks, array_kind(array._meta))

    def check(self, name: str, array: da.Array) -> None:
        """Raise `PlanError` if an array differs; `name` is its name in the message."""
        other = Signature.of(array)
        for field in ("shape", "dtype", "chunks", "array"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                raise PlanError(
                    f"{name} has the {field} {theirs}; this Matmul was made for {mine}. Make another one for it"
                    + (f", or rechunk it to {mine}" if field == "chunks" else "")
                )
