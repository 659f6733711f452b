"""Redistribution between simulated ranks: what is packed, sent and unpacked puts every element where it belongs."""

from __future__ import annotations

import ctypes
import types

import numpy as np
import pytest
from conformance import random_chunks
from dask.array.core import slices_from_chunks
from hypothesis import given
from hypothesis import strategies as st
from matrices import segments_of

from dask_distmm.layout import Layout, Moves, ProcessGrid, redistribution
from dask_distmm.layout import rectangles as module
from dask_distmm.layout.rectangles import Shuffle, split, unit_of, work


def copy_element_by_element(table, itemsize):
    """Do the work of the kernels, with the numbers that they get."""
    straight, transposed = split(table, itemsize)
    if len(straight):
        unit = unit_of(straight, itemsize)
        rows, first = work(straight, itemsize, unit)
        assert len(first) == len(rows) + 1
        for which, (src, dst, width, height, src_stride, dst_stride, shift) in enumerate(rows.tolist()):
            across = -(-width // (1 << shift))
            seen = 0
            for block in range(int(first[which + 1] - first[which])):
                left, top = (block % across) << shift, (block // across) * (4096 >> shift)
                size = min(width - left, 1 << shift)
                for row in range(top, min(height, top + (4096 >> shift))):
                    at = left * unit
                    ctypes.memmove(dst + row * dst_stride + at, src + row * src_stride + at, size * unit)
                    seen += size
            assert seen == width * height
    for src, dst, inner, outer, src_inner, src_outer, dst_outer in transposed.tolist():
        for o in range(outer):
            for i in range(inner):
                ctypes.memmove(dst + o * dst_outer + i * itemsize, src + o * src_outer + i * src_inner, itemsize)


class Device(np.ndarray):
    """Has its address where CuPy's arrays have it."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.__array_interface__["data"][0])


@given(st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("alone_bytes", [1, 64, 10**9])
def test_every_element_arrives(alone_bytes, seed):
    rng = np.random.default_rng(seed)
    before, module.SINGLE_BYTES = module.SINGLE_BYTES, alone_bytes
    try:
        shape = tuple(rng.integers(1, 30, 2).tolist())
        nranks = int(rng.integers(1, 5))
        grids = [(p, nranks // p) for p in range(1, nranks + 1) if nranks % p == 0]
        grid = ProcessGrid(*grids[rng.integers(len(grids))])
        layout = Layout(shape, tuple(rng.integers(1, 12, 2).tolist()), grid)
        dtype = np.dtype(rng.choice(["u1", "f2", "f4", "f8", "c16"]))
        order = "CF"[rng.integers(2)]
        sizes = tuple(random_chunks(rng, n, 4) for n in shape)
        chunks = Layout.of_chunks(sizes)
        whole = rng.integers(0, 250, shape).astype(dtype)
        where = rng.integers(0, nranks, chunks.grid.size)
        participants = tuple(rng.permutation(nranks).tolist())
        ranks_of = {p: r for r, p in enumerate(participants)}
        arrays, tiles = {}, {}
        for index, place in enumerate(slices_from_chunks(sizes)):
            part = whole[place]
            padded = np.zeros((part.shape[0] + 3, part.shape[1] + 1), dtype, order="CF"[rng.integers(2)])
            padded[: part.shape[0], : part.shape[1]] = part
            view = padded[: part.shape[0], : part.shape[1]]
            arrays[index] = view.copy(order="CF"[rng.integers(2)]) if rng.integers(2) else view
        widest = [max(layout.local_shape(r)[axis] for r in range(nranks)) for axis in (0, 1)]
        for rank in range(nranks):
            tiles[rank] = np.zeros(widest if rng.integers(2) else layout.local_shape(rank), dtype, order=order)
        moves = Moves.of(redistribution(chunks, layout), [participants[w] for w in where], participants)
        shuffles = []

        def allocate(size):
            return np.zeros(size + 16, np.uint8).view(Device)

        for me in participants:
            mine = {n: a.view(Device) for n, a in arrays.items() if participants[where[n]] == me}
            target = {ranks_of[me]: tiles[ranks_of[me]].view(Device)}
            shuffles.append(Shuffle(moves, me, participants, mine, target, order, allocate))
        for one in shuffles:
            for table in one.packing:
                copy_element_by_element(table, dtype.itemsize)
        for rank, one in enumerate(shuffles):
            for peer in range(nranks):
                sent = [(pointer, size) for to, pointer, size in one.sends if to == peer]
                expected = [(pointer, size) for source, pointer, size in shuffles[peer].receives if source == rank]
                assert [size for _, size in sent] == [size for _, size in expected]
                for (source, size), (target, _) in zip(sent, expected, strict=True):
                    ctypes.memmove(target, source, size)
        for one in shuffles:
            for table in one.unpacking:
                copy_element_by_element(table, dtype.itemsize)
        for rank, tile in tiles.items():
            rows, cols = layout.local_shape(rank)
            expected = np.zeros((rows, cols), dtype)
            prow, pcol = layout.grid.coords(rank)
            for start_r, local_r, n_r in segments_of(layout.rows, prow):
                for start_c, local_c, n_c in segments_of(layout.cols, pcol):
                    part = whole[start_r : start_r + n_r, start_c : start_c + n_c]
                    expected[local_r : local_r + n_r, local_c : local_c + n_c] = part
            np.testing.assert_array_equal(tile[:rows, :cols], expected)
            assert not tile[rows:].any()
            assert not tile[:, cols:].any()
    finally:
        module.SINGLE_BYTES = before
