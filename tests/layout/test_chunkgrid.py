"""Dask's chunks as a layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm.layout import Axis, ChunkGrid

few = settings(deadline=None, max_examples=100)
sizes = st.lists(st.integers(0, 5), min_size=1, max_size=5).map(tuple)


@few
@given(sizes, sizes)
def test_chunks_tile_the_matrix(rows: tuple[int, ...], cols: tuple[int, ...]) -> None:
    """Chunks, numbered in C order, cover each element once, where the axes say."""
    grid = ChunkGrid((rows, cols))
    assert grid.shape == (sum(rows), sum(cols))
    assert grid.numblocks == (len(rows), len(cols))
    assert (grid.rows, grid.cols) == (Axis.from_chunks(rows), Axis.from_chunks(cols))
    covered = np.full(grid.shape, -1)
    for part, (i, j) in enumerate(np.ndindex(grid.numblocks)):
        assert grid.coords(part) == (i, j)
        assert grid.part(np.array([i]), np.array([j])).tolist() == [part]
        view = covered[grid.slices(i, j)]
        assert view.shape == grid.chunk_shape(i, j) == grid.local_shape(part) == (rows[i], cols[j])
        assert (view == -1).all()
        view[...] = part
    assert grid.nparts == len(rows) * len(cols)
    i, _ = grid.rows.locate(np.arange(grid.shape[0]))
    j, _ = grid.cols.locate(np.arange(grid.shape[1]))
    assert (grid.part(i[:, None], j) == covered).all()


def test_refuses() -> None:
    """What are not a matrix's chunks raises, and says what to do."""
    with pytest.raises(ValueError, match="3 dimensions"):
        ChunkGrid(((1,), (1,), (1,)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no chunks of columns"):
        ChunkGrid(((1,), ()))
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        ChunkGrid(((float("nan"),), (1,)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows is -1"):
        ChunkGrid(((3, -1), (1,)))
    with pytest.raises(TypeError, match="integer"):
        ChunkGrid(((3, 1.0), (1,)))  # type: ignore[arg-type]
    grid = ChunkGrid(((1, 2), (3,)))
    for i, j in ((2, 0), (0, 1), (-1, 0)):
        with pytest.raises(IndexError, match="chunk is"):
            grid.slices(i, j)
        with pytest.raises(IndexError, match="chunk is"):
            grid.chunk_shape(i, j)
    with pytest.raises(IndexError, match="chunk is 2"):
        grid.coords(2)


def test_is_a_value() -> None:
    """Lists and NumPy's integers make the same layout as tuples of ints."""
    grid = ChunkGrid(((1, 2), (3,)))
    same = ChunkGrid([np.array([1, 2]).tolist(), [np.int64(3)]])  # type: ignore[arg-type]
    assert grid == same
    assert hash(grid) == hash(same)
