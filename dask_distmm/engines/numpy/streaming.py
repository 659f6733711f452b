"""Products of chunks that a rank makes itself, each multiplied as soon as it is there, while the next ones are made."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from numpy.typing import NDArray

from dask_distmm.engines.base import ChunkKey
from dask_distmm.engines.numpy.answer import Answer
from dask_distmm.engines.numpy.sums import Block, Sums, chunk_part, pack_blocks, placed_block
from dask_distmm.engines.panels import ChunkBlock, pairs
from dask_distmm.engines.sources import ChunkLoader, SourceChunk
from dask_distmm.planning import Plan
from dask_distmm.planning.footprint import made_ahead


class Streamed:
    """One rank's chunks that it makes itself, and those of the other operand, which are in memory somewhere."""

    def __init__(
        self,
        plan: Plan,
        me: int,
        chunks: Mapping[ChunkKey, Any],
        ask: Callable[[int, list[ChunkBlock]], Answer],
        check: Callable[[], None],
    ) -> None:
        self._plan, self._chunks, self._ask, self._check = plan, chunks, ask, check
        self._steps = pairs(plan, plan.ranks.index(me))
        self._threads = plan.participants[me].nthreads
        self._waited = 0.0

    def multiply(self, sums: Sums, progress: Callable[[float], None]) -> float:
        """Add all products to the sums, and tell the share that is done; return the seconds of waiting for chunks."""
        uses = [self._source(piece) for own, others in self._steps for piece in (own, *others)]
        loads = ChunkLoader([chunk for chunk in uses if chunk is not None], self._threads, made_ahead(self._threads))
        try:
            resident = self._resident({piece for _, others in self._steps for piece in others})
            for number, (own, others) in enumerate(self._steps):
                outer = self._block(own, loads, resident)
                for piece in others:
                    blocks = [outer], [self._block(piece, loads, resident)]
                    a, b = blocks if own.operand == 0 else blocks[::-1]
                    sums.add(a, b, (0, 0), self._check)
                progress((number + 1) / len(self._steps))
        finally:
            loads.close()
        sums.complete()
        return self._waited

    def _block(self, piece: ChunkBlock, loads: ChunkLoader, resident: Mapping[ChunkBlock, Block]) -> Block:
        """Return a part of a chunk with its place, once the chunk is there."""
        chunk = self._source(piece)
        if chunk is None:
            return resident[piece]
        started = time.perf_counter()
        data = loads.take(chunk, self._check)
        self._waited += time.perf_counter() - started
        return self._packed(piece, data[piece.r0 : piece.r0 + piece.rows, piece.c0 : piece.c0 + piece.cols])

    def _source(self, piece: ChunkBlock) -> SourceChunk | None:
        found = self._chunks.get(("ab"[piece.operand], piece.chunk))
        return found if isinstance(found, SourceChunk) else None

    def _resident(self, pieces: Collection[ChunkBlock]) -> dict[ChunkBlock, Block]:
        """Return those of some pieces that are in memory, here or on other workers."""
        found: dict[ChunkBlock, NDArray[Any]] = {}
        remote: dict[int, list[ChunkBlock]] = collections.defaultdict(list)
        for piece in pieces:
            if ("ab"[piece.operand], piece.chunk) not in self._chunks:
                remote[int(self._plan.where["ab"[piece.operand]][piece.chunk])].append(piece)
            elif self._source(piece) is None:
                found[piece] = chunk_part(self._chunks, piece)
        for asked, answer in [(asked, self._ask(peer, asked)) for peer, asked in remote.items()]:
            found |= zip(asked, answer.wait(self._check), strict=True)
        return {piece: self._packed(piece, data) for piece, data in found.items()}

    def _packed(self, piece: ChunkBlock, data: NDArray[Any]) -> Block:
        """Return numbers with their place, copied to the type that is computed in where they have another one."""
        packing, problem = self._plan.packing, self._plan.problem
        block = placed_block(piece, data)
        if (packing.a, packing.b)[piece.operand]:
            return pack_blocks([block], problem, conjugated=problem.conjugated[piece.operand])
        return block
