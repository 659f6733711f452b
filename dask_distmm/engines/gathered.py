"""The operand that a run keeps: put together again from the pieces that a rank fetches in order to multiply. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import GATHERED, ResultKey
from dask_distmm.engines.panels import ChunkBlock
from dask_distmm.planning import Plan


class GatheredChunks:
    """Chunks of `Problem.gathered` on one rank. Nothing, if the plan keeps no operand."""

    def __init__(self, plan: Plan) -> None:
        self._problem, self._kept = plan.problem, plan.kept
        self._chunks: dict[int, NDArray[Any]] = {}
        self._missing: dict[int, int] = {}

    def add(self, piece: ChunkBlock, data: NDArray[Any]) -> None:
        """Take a piece that has arrived; no two pieces of a rank have an element in common."""
        operand = self._problem.operands[piece.operand]
        if operand not in self._kept:
            return
        rows, cols = self._problem.chunks_of(operand)
        i, j = divmod(piece.chunk, len(cols))
        shape = rows[i], cols[j]
        if data.shape == shape:
            self._chunks[piece.chunk], self._missing[piece.chunk] = data, 0
            return
        if piece.chunk not in self._chunks:
            self._chunks[piece.chunk], self._missing[piece.chunk] = np.empty(shape, data.dtype), rows[i] * cols[j]
        self._chunks[piece.chunk][piece.r0 : piece.r0 + piece.rows, piece.c0 : piece.c0 + piece.cols] = data
        self._missing[piece.chunk] -= data.size

    def complete(self) -> dict[ResultKey, NDArray[Any]]:
        """Return the chunks of which all elements have arrived."""
        return {(GATHERED, number): chunk for number, chunk in self._chunks.items() if not self._missing[number]}
