"""Which part of a larger multiply a problem is."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Which chunks of a larger multiply's arrays are those of a problem."""

    # For each operand, and ``"d"``: its name, numbers of its rows and columns of chunks in the larger multiply, and
    # how many columns of chunks there are in that.
    numbers: tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...]
    # Name of the larger multiply.
    whole: str

    @property
    def ncols(self) -> int:
        """How many columns of chunks D has in the larger multiply."""
        return self.of("d")[2]

    def at(self, operand: str, index: int) -> tuple[int, int]:
        """Return row and column in the larger multiply of chunk `index` of an operand, or of ``"d"``."""
        rows, cols, _ = self.of(operand)
        i, j = divmod(index, len(cols))
        return rows[i], cols[j]

    def every(self, operand: str) -> NDArray[np.int64]:
        """Return the numbers in the larger multiply of all chunks of an operand, or of ``"d"``."""
        rows, cols, ncols = self.of(operand)
        return np.add.outer(np.asarray(rows, np.int64) * ncols, np.asarray(cols, np.int64)).ravel()

    def of(self, operand: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the numbers of an operand's rows and columns of chunks, and how many columns the whole one has."""
        return next((rows, cols, ncols) for name, rows, cols, ncols in self.numbers if name == operand)
