"""ScaLAPACK's index arithmetic and its two-dimensional layout."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm.layout import BlockCyclicLayout, ProcessGrid, numroc

few = settings(deadline=None, max_examples=100)


def deal(n: int, nb: int, isrcproc: int, nprocs: int) -> list[list[int]]:
    """Deal blocks of indices out in turn: the indices that each process holds, in local order."""
    hands: list[list[int]] = [[] for _ in range(nprocs)]
    indices, proc = list(range(n)), isrcproc
    while indices:
        hands[proc] += indices[:nb]
        indices = indices[nb:]
        proc = proc + 1 if proc + 1 < nprocs else 0
    return hands


def test_users_guide_example() -> None:
    """The ScaLAPACK Users' Guide, section 2.3 and figure 4.6: 9 x 9 in 2 x 2 blocks on 2 x 3 processes."""
    layout = BlockCyclicLayout((9, 9), (2, 2), ProcessGrid(2, 3))
    assert [numroc(9, 2, prow, 0, 2) for prow in range(2)] == [5, 4]
    assert [numroc(9, 2, pcol, 0, 3) for pcol in range(3)] == [4, 3, 2]
    assert [layout.local_shape(rank) for rank in range(6)] == [(5, 4), (5, 3), (5, 2), (4, 4), (4, 3), (4, 2)]
    # Process (0, 0) holds rows 1 2 5 6 9 and columns 1 2 7 8, as the guide counts.
    assert [i + 1 for i in range(9) if layout.owner(i, 0) == 0] == [1, 2, 5, 6, 9]
    assert [j + 1 for j in range(9) if layout.owner(0, j) == 0] == [1, 2, 7, 8]


@pytest.mark.parametrize(
    ("n", "nb", "iproc", "isrcproc", "nprocs", "expected"),
    [
        (0, 4, 0, 0, 3, 0),
        (1, 64, 0, 0, 4, 1),
        (1, 64, 1, 0, 4, 0),
        (1000, 64, 0, 0, 4, 256),  # 15 whole blocks and one of 40: four each, the last one short
        (1000, 64, 3, 0, 4, 232),
        (1000, 64, 3, 1, 4, 256),
        (1000, 64, 0, 1, 4, 232),
        (100, 100, 1, 1, 2, 100),
        (100, 1000, 0, 1, 2, 0),
    ],
)
def test_numroc_values(n: int, nb: int, iproc: int, isrcproc: int, nprocs: int, expected: int) -> None:
    """Cases worked out by hand."""
    assert numroc(n, nb, iproc, isrcproc, nprocs) == expected


@few
@given(
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from(["row", "col"]),
    st.data(),
)
def test_layout_is_dealing_twice(
    shape: tuple[int, int],
    blocks: tuple[int, int],
    procs: tuple[int, int],
    order: Literal["row", "col"],
    data: st.DataObject,
) -> None:
    """Every rank's shape and every element's owner agree with dealing out rows and columns."""
    source = data.draw(st.tuples(st.integers(0, procs[0] - 1), st.integers(0, procs[1] - 1)))
    grid = ProcessGrid(*procs, order)
    layout = BlockCyclicLayout(shape, blocks, grid, source)
    row_hands = deal(shape[0], blocks[0], source[0], procs[0])
    col_hands = deal(shape[1], blocks[1], source[1], procs[1])
    assert layout.nparts == procs[0] * procs[1]
    for rank in range(layout.nparts):
        prow, pcol = layout.coords(rank)
        assert layout.part(np.array([prow]), np.array([pcol])).tolist() == [rank]
        assert layout.local_shape(rank) == (len(row_hands[prow]), len(col_hands[pcol]))
        assert layout.local_shape(rank) == (layout.rows.local_sizes[prow], layout.cols.local_sizes[pcol])
        assert all(layout.owner(i, j) == rank for i in row_hands[prow] for j in col_hands[pcol])


def test_refuses() -> None:
    """Numbers out of range raise, and say which one."""
    grid = ProcessGrid(2, 3)
    with pytest.raises(ValueError, match=r"shape\[1\] is -1"):
        BlockCyclicLayout((4, -1), (2, 2), grid)
    with pytest.raises(ValueError, match=r"blocks\[0\] is 0"):
        BlockCyclicLayout((4, 4), (0, 2), grid)
    with pytest.raises(ValueError, match="expected two numbers"):
        BlockCyclicLayout((4, 4, 4), (2, 2), grid)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="source is"):
        BlockCyclicLayout((4, 4), (2, 2), grid, (0, 3))
    with pytest.raises(TypeError, match="integer"):
        BlockCyclicLayout((4, 4.0), (2, 2), grid)  # type: ignore[arg-type]
    layout = BlockCyclicLayout((4, 4), (2, 2), grid)
    with pytest.raises(IndexError, match="rank is 6"):
        layout.local_shape(6)
    with pytest.raises(IndexError, match="element is"):
        layout.owner(4, 0)
    for arguments in ((-1, 1, 0, 0, 1), (1, 0, 0, 0, 1), (1, 1, 1, 0, 1), (1, 1, 0, 1, 1), (1, 1, 0, 0, 0)):
        with pytest.raises(ValueError, match="expected"):
            numroc(*arguments)


def test_is_a_value() -> None:
    """Equal parameters are equal layouts, also as keys, and NumPy's integers are integers."""
    layout = BlockCyclicLayout((4, 5), (2, 2), ProcessGrid(2, 2))
    same = BlockCyclicLayout((np.int64(4), np.int64(5)), (2, 2), ProcessGrid(2, 2))  # type: ignore[arg-type]
    assert layout == same
    assert hash(layout) == hash(same)
    assert type(same.shape[0]) is int
