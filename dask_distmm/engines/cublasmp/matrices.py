"""The tiles of A, B and D on one rank, and how chunks become tiles and tiles become chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.engines.base import ChunkKey
from dask_distmm.engines.cublasmp.exchange import DeviceShuffle, Exchange
from dask_distmm.engines.cublasmp.shuffle import Route
from dask_distmm.engines.gpu.finishing import BiasCut
from dask_distmm.engines.gpu.operands import usable
from dask_distmm.layout import ChunkGrid, Moves, redistribution
from dask_distmm.planning import Plan
from dask_distmm.planning.cublasmp.costs import tile_chunk
from dask_distmm.planning.cublasmp.epilogs import all_reduced
from dask_distmm.planning.cublasmp.tiles import Tile, Tiles
from dask_distmm.planning.placement import EVERYWHERE


@dataclasses.dataclass(frozen=True)
class OperandTile:
    """A or B on one rank."""

    # The tile, as a device array.
    target: Any
    # Fills it from the chunks of ranks.
    shuffle: DeviceShuffle
    # The rectangles that must be fetched from workers that are no ranks.
    outside: Moves


@dataclasses.dataclass(frozen=True)
class ResultTile:
    """D on one rank."""

    # The rank's chunks of D, by number.
    chunks: dict[int, Any]
    # The tile that the library writes.
    target: Any
    # Fills the chunks from tiles; None if the only chunk is the tile itself.
    deliver: Exchange | None


def make_operand(
    plan: Plan, me: int, name: str, tiles: Tiles, chunks: Mapping[ChunkKey, Any], dtype: np.dtype
) -> OperandTile:
    """Use a chunk as the tile of A or B in place, or allocate a tile and find the rectangles that fill it."""
    rank, tile = plan.ranks.index(me), tiles.a if name == "a" else tiles.b
    sizes, where = plan.problem.chunks_of(name), plan.where[name]
    assert where is not None
    arrays = {index: chunk for (op, index), chunk in chunks.items() if op == name}
    index = tile_chunk(tile, rank, sizes)
    # All ranks see the same plan, but only this rank sees the strides and the address of its chunk.
    target = None
    if index is not None and where[index] in (me, EVERYWHERE) and usable(arrays[index], tile.order):
        target = arrays[index]
    in_place = target is not None
    if target is None:
        make = cp.zeros if tile.zeroed else cp.empty
        target = make(tile.local(rank), dtype, order=tile.order)
    moves = Moves.of(redistribution(ChunkGrid(sizes), tile.layout), where, plan.ranks)
    # Chunks of workers that are no ranks come over Dask's comms.
    among, outside = moves.among(plan.ranks, me)
    extents = [tile.local(rank)[tile.order == "C"] for rank in range(len(plan.ranks))]
    route = Route(among, me, plan.ranks, tile.order, extents, skip_home=in_place)
    return OperandTile(target, DeviceShuffle(route, arrays, {rank: target}), outside)


def make_result(plan: Plan, me: int, tiles: Tiles, dtype: np.dtype) -> ResultTile:
    """Allocate the tile of D, and the chunks of D that are not the tile itself."""
    rank, tile, sizes = plan.ranks.index(me), tiles.d, plan.problem.out_chunks
    keeps_all = "d" in plan.kept and all_reduced(plan)
    if tiles.replicated:
        copies = redistribution(ChunkGrid(((plan.problem.m,), (plan.problem.n,))), ChunkGrid(sizes))
        # All of D is here: this rank keeps its own chunks, or all chunks.
        owner = np.full(len(plan.owners), me) if keeps_all else np.asarray(plan.ranks)[plan.owners]
        moves = Moves.of(copies, [me], owner)
        moves = moves.take(moves.dst_owner == me)
    else:
        copies = redistribution(tile.layout, ChunkGrid(sizes))
        moves = Moves.of(copies, plan.ranks, np.asarray(plan.ranks)[plan.owners])
    target = cp.empty(tile.local(rank), dtype, order=tile.order)
    owned = list(range(len(plan.owners))) if keeps_all else plan.owned(rank).tolist()
    index = None if tiles.replicated else tile_chunk(tile, rank, sizes)
    if index is not None and owned == [index]:
        return ResultTile({index: target}, target, None)
    rects = {i: plan.chunk_rect(i) for i in owned}
    chunks = {i: cp.empty((r[1] - r[0], r[3] - r[2]), dtype, order=tile.order) for i, r in rects.items()}
    widths = np.tile(sizes[1], len(sizes[0])) if tile.order == "C" else np.repeat(sizes[0], len(sizes[1]))
    source = {0 if tiles.replicated else rank: target}
    route = Route(moves, me, plan.ranks, tile.order, widths.tolist())
    return ResultTile(chunks, target, Exchange(DeviceShuffle(route, source, chunks)))


def cut_bias(tile: Tile, rank: int, nranks: int) -> BiasCut:
    """Return the cut of a bias for each row of the tile of D, or for each column if the tile is in C order."""
    axis, grid, ranks = (0 if tile.order == "F" else 1), tile.layout.grid, range(nranks)
    lengths = tuple(tile.layout.local_shape(r)[axis] for r in ranks)
    is_cut = (grid.nprow, grid.npcol)[axis] > 1
    sizes, parts = (lengths, list(ranks)) if is_cut else (lengths[:1], [0 for _ in ranks])
    return BiasCut(axis, sizes, parts, tile.local(rank)[axis])
