"""Process grids: numbering, and the choice of a shape."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm.layout import ProcessGrid

few = settings(deadline=None, max_examples=100)
orders = st.sampled_from(["row", "col"])


@few
@given(st.integers(1, 6), st.integers(1, 6), orders)
def test_ranks_and_coordinates(nprow: int, npcol: int, order: Literal["row", "col"]) -> None:
    """The maps are inverse, count in the order that NumPy calls C or F, and swap in the transpose."""
    grid = ProcessGrid(nprow, npcol, order)
    table = np.arange(grid.size).reshape(nprow, npcol, order="C" if order == "row" else "F")
    for rank in range(grid.size):
        prow, pcol = grid.coords(rank)
        assert table[prow, pcol] == rank == grid.rank(prow, pcol)
        assert grid.transpose().coords(rank) == (pcol, prow)
    assert (grid.ranks(np.arange(nprow)[:, None], np.arange(npcol)) == table).all()
    assert grid.transpose().transpose() == grid


def test_refuses() -> None:
    """Impossible grids, ranks and coordinates raise."""
    with pytest.raises(ValueError, match="npcol is 0"):
        ProcessGrid(1, 0)
    with pytest.raises(ValueError, match="order is 'C'"):
        ProcessGrid(1, 1, "C")  # type: ignore[arg-type]
    grid = ProcessGrid(2, 3)
    for rank in (-1, 6):
        with pytest.raises(IndexError, match="rank is"):
            grid.coords(rank)
    for prow, pcol in ((2, 0), (0, 3), (-1, 0), (0, -1)):
        with pytest.raises(IndexError, match="coordinates"):
            grid.rank(prow, pcol)


@few
@given(st.integers(1, 400))
def test_factorizations(nprocs: int) -> None:
    """All of them, each once, by rising number of rows."""
    expected = [(p, q) for p in range(1, nprocs + 1) for q in [nprocs // p] if p * q == nprocs]
    assert ProcessGrid.factorizations(nprocs) == expected


def brute_force(nprocs: int, m: int, n: int) -> tuple[int, int] | None:
    """Search all grids for the least volume; then the squarest; then the tallest."""
    fits = [(p, q) for p in range(1, m + 1) for q in range(1, n + 1) if p * q == nprocs]
    if not fits:
        return None
    least = min(Fraction(m, p) + Fraction(n, q) for p, q in fits)
    fits = [(p, q) for p, q in fits if Fraction(m, p) + Fraction(n, q) == least]
    square = min(abs(p - q) for p, q in fits)
    return max((p, q) for p, q in fits if abs(p - q) == square)


@few
@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 40), orders)
def test_best(nprocs: int, m: int, n: int, order: Literal["row", "col"]) -> None:
    """The choice agrees with brute force; where nothing fits the message names what does."""
    expected = brute_force(nprocs, m, n)
    if expected is not None:
        assert ProcessGrid.best(nprocs, m, n, order) == ProcessGrid(*expected, order)
        return
    possible = [size for size in range(1, nprocs) if brute_force(size, m, n)]
    advice = f"use {possible[-1]} processes" if possible else "empty product"
    with pytest.raises(ValueError, match=advice):
        ProcessGrid.best(nprocs, m, n, order)


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
    ],
)
def test_best_examples(nprocs: int, m: int, n: int, shape: tuple[int, int]) -> None:
    """Cases worked out by hand."""
    grid = ProcessGrid.best(nprocs, m, n)
    assert (grid.nprow, grid.npcol) == shape


def test_best_compares_exactly() -> None:
    """Volumes that floats cannot tell apart are told apart."""
    m, n = 2**60 + 1, 2**60
    grid = ProcessGrid.best(2, m, n)
    assert (grid.nprow, grid.npcol) == (2, 1)
    grid = ProcessGrid.best(2, n, m)
    assert (grid.nprow, grid.npcol) == (1, 2)
