"""The inputs of the formula beside the product, gathered for one chunk of D at a time."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import ChunkKey
from dask_distmm.engines.panels import ChunkBlock, chunk_blocks_of
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning import Plan


class _AskedInput(NamedTuple):
    """One input on its way: where it goes, which pieces are here, which come from others."""

    name: str
    data: NDArray[Any]
    here: list[ChunkBlock]
    answers: list[tuple[list[ChunkBlock], Any]]


class Inputs:
    """The problem's extras, as one rank needs them."""

    def __init__(
        self,
        plan: Plan,
        me: int,
        chunks: Mapping[ChunkKey, NDArray[Any]],
        ask: Callable[[int, list[ChunkBlock]], Any],
        check: Callable[[], None],
    ) -> None:
        self._plan, self._me, self._chunks, self._ask, self._check = plan, me, chunks, ask, check

    def ask(self, index: int, without: Collection[str] = ()) -> list[_AskedInput]:
        """Ask for the parts that chunk number `index` of D needs, but of some inputs, without waiting."""
        problem, found = self._plan.problem, []
        r0, r1, c0, c1 = self._plan.chunk_rect(index)
        for number, name in enumerate(problem.operands[2:], start=2):
            if name in without:
                continue
            sizes, where = problem.chunks_of(name), self._plan.where[name]
            assert where is not None
            # An axis of length 1 is broadcast.
            top, bottom = (r0, r1) if sum(sizes[0]) == problem.m else (0, 1)
            left, right = (c0, c1) if sum(sizes[1]) == problem.n else (0, 1)
            data = np.empty((bottom - top, right - left), dtype_from_name(problem.dtype_of(name)))
            here: list[ChunkBlock] = []
            away: dict[int, list[ChunkBlock]] = collections.defaultdict(list)
            for piece in chunk_blocks_of(sizes, number, (top, bottom, left, right)):
                peer = int(where[piece.chunk])
                (here if peer == self._me else away[peer]).append(piece)
            found.append(
                _AskedInput(name, data, here, [(pieces, self._ask(peer, pieces)) for peer, pieces in away.items()])
            )
        return found

    def wait(self, asked: list[_AskedInput]) -> dict[str, NDArray[Any]]:
        """Return the inputs by name once they are here."""
        for one in asked:
            for piece in one.here:
                chunk = self._chunks[one.name, piece.chunk]
                _put_piece(one.data, piece, chunk[piece.r0 : piece.r0 + piece.rows, piece.c0 : piece.c0 + piece.cols])
            for pieces, answer in one.answers:
                for piece, arrived in zip(pieces, answer.wait(self._check), strict=True):
                    _put_piece(one.data, piece, arrived)
        return {one.name: one.data for one in asked}


def _put_piece(data: NDArray[Any], piece: ChunkBlock, values: NDArray[Any]) -> None:
    data[piece.row : piece.row + piece.rows, piece.col : piece.col + piece.cols] = values
