"""Redistribution, carried out on real tiles, and its bookkeeping."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dask_distmm import layout
from dask_distmm.layout import Copy, Layout, ProcessGrid, redistribution

few = settings(deadline=None, max_examples=60)
POISON = -7
GUARD = 2
lengths = st.sampled_from([0, 1]) | st.integers(2, 14)


@st.composite
def chunk_grids(draw: st.DrawFn, shape: tuple[int, int]) -> Layout:
    """Draw uneven chunks, zero-length ones among them."""
    edges = [[0, *sorted(draw(st.lists(st.integers(0, n), max_size=4))), n] for n in shape]
    rows, cols = (tuple(b - a for a, b in pairwise(edge)) for edge in edges)
    return Layout.of_chunks((rows, cols))


@st.composite
def block_cyclics(draw: st.DrawFn, shape: tuple[int, int]) -> Layout:
    """Draw blocks, a grid, its order, and where the first block is."""
    grid = ProcessGrid(draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from(["row", "col"])))
    blocks = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    source = draw(st.integers(0, grid.nprow - 1)), draw(st.integers(0, grid.npcol - 1))
    return Layout(shape, blocks, grid, source)


Pair = tuple[Layout, Layout]


def layouts(kind: str, shape: tuple[int, int]) -> st.SearchStrategy[Layout]:
    """Draw layouts of a kind."""
    return chunk_grids(shape) if kind == "chunk" else block_cyclics(shape)


@st.composite
def pairs(draw: st.DrawFn, kinds: tuple[str, str] | None = None) -> Pair:
    """Draw two layouts of one matrix, of the kinds given or of any."""
    shape = draw(lengths), draw(lengths)
    src, dst = kinds or draw(st.tuples(*[st.sampled_from(["chunk", "cyclic"])] * 2))
    return draw(layouts(src, shape)), draw(layouts(dst, shape))


def dealt(length: int, block: int, nprocs: int, source: int) -> list[list[int]]:
    """Deal the indices of one dimension out, a block to each process in turn."""
    hands: list[list[int]] = [[] for _ in range(nprocs)]
    for number, first in enumerate(range(0, length, block)):
        hands[(source + number) % nprocs] += range(first, min(first + block, length))
    return hands


def is_chunks(layout: Layout) -> bool:
    """Whether it was made of chunks."""
    return isinstance(layout.blocks[0], tuple)


def held(layout: Layout) -> list[tuple[list[int], list[int]]]:
    """Return which rows and columns each part holds, from the definition and not from the axes."""
    if is_chunks(layout):
        rows, cols = ([list(range(a, b)) for a, b in pairwise(accumulate(sizes, initial=0))] for sizes in layout.blocks)
        return list(product(rows, cols))
    grid, (m, n), (mb, nb) = layout.grid, layout.shape, layout.blocks
    rows = dealt(m, mb, grid.nprow, layout.source[0])
    cols = dealt(n, nb, grid.npcol, layout.source[1])
    if grid.order == "row":
        return list(product(rows, cols))
    return [(r, c) for c in cols for r in rows]


def guarded(rows: list[int], cols: list[int], matrix: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Make a tile inside a poisoned frame, poisoned itself or with a part of the matrix."""
    tile = np.full((len(rows) + 2 * GUARD, len(cols) + 2 * GUARD), POISON, dtype=np.int64)
    if matrix is not None:
        tile[GUARD:-GUARD, GUARD:-GUARD] = matrix[np.ix_(rows, cols)]
    return tile


def rectangle(tile: NDArray[np.int64], index: tuple[slice, slice]) -> NDArray[np.int64]:
    """Return a rectangle of a tile; one that leaves the tile falls onto the frame."""
    rows, cols = (slice(s.start + GUARD, s.stop + GUARD) for s in index)
    return tile[rows, cols]


def check_moves(pair: Pair) -> None:
    """Carry the copies out on poisoned tiles and compare with tiles cut from the whole matrix."""
    src, dst = pair
    m, n = src.shape
    matrix = np.arange(m * n, dtype=np.int64).reshape(m, n)
    src_held, dst_held = held(src), held(dst)
    assert [src.local_shape(p) for p in range(src.grid.size)] == [(len(r), len(c)) for r, c in src_held]
    assert [dst.local_shape(p) for p in range(dst.grid.size)] == [(len(r), len(c)) for r, c in dst_held]
    src_tiles = [guarded(rows, cols, matrix) for rows, cols in src_held]
    dst_tiles = [guarded(rows, cols) for rows, cols in dst_held]
    for copy in redistribution(src, dst):
        source = rectangle(src_tiles[copy.src], copy.src_index)
        target = rectangle(dst_tiles[copy.dst], copy.dst_index)
        assert source.shape == target.shape == (copy.nrows, copy.ncols)
        assert (target == POISON).all()  # nothing is written twice
        assert (source != POISON).all()
        assert source[0, 0] == matrix[copy.row, copy.col]
        if is_chunks(src) or is_chunks(dst):
            whole = matrix[copy.row : copy.row + copy.nrows, copy.col : copy.col + copy.ncols]
            assert (source == whole).all()
        target[...] = source
    for tile, (rows, cols) in zip(dst_tiles, dst_held, strict=True):
        # With the frame: outside the tile nothing was written.
        assert (tile == guarded(rows, cols, matrix)).all()


@few
@given(pairs(("chunk", "cyclic")))
def test_moves_chunks_to_cyclic(pair: Pair) -> None:
    """Every element arrives once, from chunks to block-cyclic."""
    check_moves(pair)


@few
@given(pairs(("cyclic", "chunk")))
def test_moves_cyclic_to_chunks(pair: Pair) -> None:
    """Every element arrives once, from block-cyclic to chunks."""
    check_moves(pair)


@few
@given(pairs(("cyclic", "cyclic")))
def test_moves_cyclic_to_cyclic(pair: Pair) -> None:
    """Every element arrives once, between block-cyclic layouts."""
    check_moves(pair)


@few
@given(pairs(("chunk", "chunk")))
def test_moves_chunks_to_chunks(pair: Pair) -> None:
    """Every element arrives once, between chunkings."""
    check_moves(pair)


def joins(a: Copy, b: Copy) -> bool:
    """Say whether `b` lies just below or just right of `a`, in both local matrices."""
    if (a.src, a.dst) != (b.src, b.dst):
        return False
    steps = {(b.src_row - a.src_row, b.src_col - a.src_col), (b.dst_row - a.dst_row, b.dst_col - a.dst_col)}
    return (steps == {(a.nrows, 0)} and a.ncols == b.ncols) or (steps == {(0, a.ncols)} and a.nrows == b.nrows)


@few
@given(pairs())
def test_is_minimal(pair: Pair) -> None:
    """No two copies of the list could be one."""
    by_parts: dict[tuple[int, int], list[Copy]] = {}
    for copy in redistribution(*pair):
        assert copy.nrows > 0
        assert copy.ncols > 0
        by_parts.setdefault((copy.src, copy.dst), []).append(copy)
    assert not any(joins(a, b) for copies in by_parts.values() for a, b in product(copies, repeat=2))


@few
@given(pairs(), st.data())
def test_bookkeeping(pair: Pair, data: st.DataObject) -> None:
    """Length, elements, filters and traffic agree with the list itself."""
    src, dst = pair
    copies = redistribution(src, dst)
    listed = list(copies)
    assert len(copies) == len(listed) == len(set(listed))
    assert listed == sorted(listed, key=lambda copy: (copy.row, copy.col))
    assert sum(c.nrows * c.ncols for c in listed) == math.prod(src.shape)
    for part in range(dst.grid.size):
        assert list(copies.for_dst(part)) == [c for c in listed if c.dst == part]

    traffic = np.zeros((src.grid.size, dst.grid.size), dtype=np.int64)
    for c in listed:
        traffic[c.src, c.dst] += c.nrows * c.ncols
    assert copies.traffic().dtype == np.int64
    assert np.array_equal(copies.traffic(), traffic)

    owner = data.draw(st.lists(st.integers(0, 3), min_size=src.grid.size, max_size=src.grid.size))
    by_owner = np.zeros((5, dst.grid.size), dtype=np.int64)
    for part, worker in enumerate(owner):
        by_owner[worker] += traffic[part]
    assert np.array_equal(copies.traffic(owner, nowners=5), by_owner)
    assert np.array_equal(copies.traffic(owner), by_owner[: max(owner) + 1])


@pytest.mark.parametrize("batch", [1, 7, 50])
def test_traffic_in_batches(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many products are handled at once does not show in the result."""
    src = Layout.of_chunks(((3, 0, 4, 5, 1), (2, 6, 3)))
    copies = redistribution(src, Layout(src.shape, (2, 3), ProcessGrid(2, 2)))
    expected = copies.traffic()
    monkeypatch.setattr(layout, "_TRAFFIC_BATCH", batch)
    assert np.array_equal(copies.traffic(), expected)


@few
@given(pairs())
def test_to_itself_is_one_copy_per_part(pair: Pair) -> None:
    """A layout copied to itself is each part that holds anything, whole."""
    layout, _ = pair
    copies = list(redistribution(layout, layout))
    assert all(c.src == c.dst and (c.nrows, c.ncols) == layout.local_shape(c.src) for c in copies)
    assert len(copies) == sum(math.prod(layout.local_shape(p)) > 0 for p in range(layout.grid.size))


def test_plain_copy() -> None:
    """Copies hold Python ints, as slices and messages want."""
    src, dst = Layout.of_chunks(((2, 2), (3,))), Layout((4, 3), (3, 3), ProcessGrid(2, 1))
    assert list(redistribution(src, dst)) == [
        Copy(0, 0, 0, 0, 0, 0, 2, 3, 0, 0),
        Copy(1, 0, 0, 0, 2, 0, 1, 3, 2, 0),
        Copy(1, 1, 1, 0, 0, 0, 1, 3, 3, 0),
    ]
    assert all(type(number) is int for copy in redistribution(src, dst) for number in copy)


def test_refuses() -> None:
    """Mistakes of the caller raise, and say what was found."""
    layout = Layout.of_chunks(((2, 2), (3,)))
    with pytest.raises(ValueError, match=r"shapes \(4, 3\) and \(4, 4\)"):
        redistribution(layout, Layout.of_chunks(((4,), (4,))))
    copies = redistribution(layout, layout)
    with pytest.raises(IndexError, match="part is 2"):
        copies.for_dst(2)
    with pytest.raises(IndexError, match="part is -1"):
        copies.for_dst(-1)


@pytest.mark.parametrize("numblocks", [(100_000, 1), (400, 250)])
def test_a_hundred_thousand_chunks(numblocks: tuple[int, int]) -> None:
    """Storage goes by the axes, traffic by workers, and a filter sees its own copies alone."""
    nrows, ncols = numblocks
    src = Layout.of_chunks(((10,) * nrows, (10,) * ncols))
    dst = Layout(src.shape, (64, 64), ProcessGrid(4, 4))
    copies = redistribution(src, dst)
    assert len(copies.rows) <= nrows + len(dst.rows.part)
    assert len(copies.cols) <= ncols + len(dst.cols.part)
    workers = np.arange(src.grid.size) % 24
    traffic = copies.traffic(workers)
    assert traffic.shape == (24, 16)
    assert traffic.sum(axis=0).tolist() == [math.prod(dst.local_shape(rank)) for rank in range(16)]
    assert traffic.sum(axis=1).tolist() == (np.bincount(workers) * 100).tolist()
    assert sum(c.nrows * c.ncols for c in copies.for_dst(15)) == math.prod(dst.local_shape(15))
