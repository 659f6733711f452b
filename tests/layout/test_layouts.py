"""Layouts of a matrix: Dask's chunks, ScaLAPACK's blocks; grids, and the choice of one."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import numpy as np
import pytest
from dask.array.core import slices_from_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm.layout import Layout, ProcessGrid

few = settings(deadline=None, max_examples=100)
sizes = st.lists(st.integers(0, 5), min_size=1, max_size=5).map(tuple)
orders = st.sampled_from(["row", "col"])


def deal(n: int, nb: int, isrcproc: int, nprocs: int) -> list[list[int]]:
    """Deal blocks of indices out in turn: the indices that each process holds, in local order."""
    hands: list[list[int]] = [[] for _ in range(nprocs)]
    indices, proc = list(range(n)), isrcproc
    while indices:
        hands[proc] += indices[:nb]
        indices = indices[nb:]
        proc = proc + 1 if proc + 1 < nprocs else 0
    return hands


@few
@given(sizes, sizes)
def test_chunks_tile_the_matrix(rows: tuple[int, ...], cols: tuple[int, ...]) -> None:
    """Chunks, numbered in C order, cover each element once, where the axes say."""
    layout = Layout.of_chunks((rows, cols))
    assert layout.shape == (sum(rows), sum(cols))
    covered = np.full(layout.shape, -1)
    for part, place in enumerate(slices_from_chunks((rows, cols))):
        assert layout.grid.coords(part) == divmod(part, len(cols))
        assert covered[place].shape == layout.local_shape(part)
        assert (covered[place] == -1).all()
        covered[place] = part
    assert layout.grid.size == len(rows) * len(cols)
    i, _ = layout.rows.locate(np.arange(layout.shape[0]))
    j, _ = layout.cols.locate(np.arange(layout.shape[1]))
    assert (layout.grid.ranks(i[:, None], j) == covered).all()


def test_chunks_are_a_value() -> None:
    """NumPy's integers make the same layout as ints."""
    layout, same = (Layout.of_chunks(x) for x in (((1, 2), (3,)), ((np.int64(1), 2), (np.int64(3),))))  # type: ignore[arg-type]
    assert layout == same
    assert hash(layout) == hash(same)


def test_users_guide_example() -> None:
    """The ScaLAPACK Users' Guide, section 2.3 and figure 4.6: 9 x 9 in 2 x 2 blocks on 2 x 3 processes."""
    layout = Layout((9, 9), (2, 2), ProcessGrid(2, 3))
    assert (layout.rows.local_sizes, layout.cols.local_sizes) == ([5, 4], [4, 3, 2])
    assert [layout.local_shape(rank) for rank in range(6)] == [(5, 4), (5, 3), (5, 2), (4, 4), (4, 3), (4, 2)]
    # Process (0, 0) holds rows 1 2 5 6 9 and columns 1 2 7 8, as the guide counts.
    assert [i + 1 for i in range(9) if layout.owner(i, 0) == 0] == [1, 2, 5, 6, 9]
    assert [j + 1 for j in range(9) if layout.owner(0, j) == 0] == [1, 2, 7, 8]


@few
@given(
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    orders,
    st.data(),
)
def test_blocks_are_dealt_twice(
    shape: tuple[int, int],
    blocks: tuple[int, int],
    procs: tuple[int, int],
    order: Literal["row", "col"],
    data: st.DataObject,
) -> None:
    """Every rank's shape, every element's owner and the blocks as chunks agree with dealing out rows and columns."""
    source = data.draw(st.tuples(st.integers(0, procs[0] - 1), st.integers(0, procs[1] - 1)))
    layout = Layout(shape, blocks, ProcessGrid(*procs, order), source)
    row_hands = deal(shape[0], blocks[0], source[0], procs[0])
    col_hands = deal(shape[1], blocks[1], source[1], procs[1])
    chunks, owners = layout.as_chunks()
    assert tuple(map(sum, chunks)) == shape
    assert not any(0 in part for part in chunks)
    chunked = Layout.of_chunks(chunks)
    for rank in range(layout.grid.size):
        prow, pcol = layout.grid.coords(rank)
        assert layout.local_shape(rank) == (len(row_hands[prow]), len(col_hands[pcol]))
        for i, j in ((i, j) for i in row_hands[prow] for j in col_hands[pcol]):
            assert layout.owner(i, j) == rank == owners[chunked.owner(i, j)]


@few
@given(st.integers(1, 6), st.integers(1, 6), orders)
def test_ranks_and_coordinates(nprow: int, npcol: int, order: Literal["row", "col"]) -> None:
    """The maps are inverse, count in the order that NumPy calls C or F, and swap in the transpose."""
    grid = ProcessGrid(nprow, npcol, order)
    table = np.arange(grid.size).reshape(nprow, npcol, order="C" if order == "row" else "F")
    for rank in range(grid.size):
        prow, pcol = grid.coords(rank)
        assert table[prow, pcol] == rank
        assert grid.transpose().coords(rank) == (pcol, prow)
    assert (grid.ranks(np.arange(nprow)[:, None], np.arange(npcol)) == table).all()
    assert grid.transpose().transpose() == grid
    for rank in (-1, grid.size):
        with pytest.raises(IndexError, match="part is"):
            grid.coords(rank)


def brute_force(nprocs: int, m: int, n: int) -> ProcessGrid | None:
    """Search all grids for the least volume; then the squarest; then the tallest."""
    fits = [(p, q) for p in range(1, m + 1) for q in range(1, n + 1) if p * q == nprocs]
    if not fits:
        return None
    least = min(Fraction(m, p) + Fraction(n, q) for p, q in fits)
    fits = [(p, q) for p, q in fits if Fraction(m, p) + Fraction(n, q) == least]
    square = min(abs(p - q) for p, q in fits)
    return ProcessGrid(*max((p, q) for p, q in fits if abs(p - q) == square))


@few
@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 40))
def test_best(nprocs: int, m: int, n: int) -> None:
    """The choice agrees with brute force."""
    assert ProcessGrid.best(nprocs, m, n) == brute_force(nprocs, m, n)


@pytest.mark.parametrize(
    ("nprocs", "m", "n", "shape"),
    [
        (6, 600, 600, (3, 2)),  # 2 x 3 costs the same and is as square: more rows win
        (16, 1000, 1000, (4, 4)),
        (16, 100_000, 10, (16, 1)),
        (16, 10, 100_000, (1, 16)),
        (4, 400, 100, (4, 1)),  # 400/4 + 100/1 = 200 beats 400/2 + 100/2 = 250
        (8, 800, 400, (4, 2)),
        (4, 2, 2, (2, 2)),
        (3, 1, 9, (1, 3)),
        # Volumes that floats cannot tell apart are told apart.
        (2, 2**60 + 1, 2**60, (2, 1)),
        (2, 2**60, 2**60 + 1, (1, 2)),
    ],
)
def test_best_examples(nprocs: int, m: int, n: int, shape: tuple[int, int]) -> None:
    """Cases worked out by hand."""
    assert ProcessGrid.best(nprocs, m, n) == ProcessGrid(*shape)
