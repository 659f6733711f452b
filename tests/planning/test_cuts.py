from __future__ import annotations

import numpy as np
from conformance import make_problem
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.planning.cuts import cut, overlaps, reduce_cuts

chunkings = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0)


@given(chunkings, st.data())
def test_cut_covers_and_is_balanced(sizes, data):
    length = sum(sizes)
    parts = data.draw(st.integers(1, length))
    found = cut(length, parts, tuple(sizes))
    assert (found[0], found[-1], len(found)) == (0, length, parts + 1)
    widths = np.diff(found)
    assert widths.min() > 0
    assert widths.max() <= 1.05 * -(-length // parts)


def test_cut_prefers_edges_that_all_chunkings_share():
    assert cut(100, 2, (49, 51)) == (0, 49, 100)
    assert cut(100, 2, (49, 51), (50, 50)) == (0, 50, 100)
    assert cut(100, 2, (30, 70)) == (0, 50, 100)
    assert cut(90, 3, (30, 30, 30), (15,) * 6) == (0, 30, 60, 90)


@given(chunkings, st.data())
def test_overlaps_are_the_range(sizes, data):
    length = sum(sizes)
    cuts = tuple(np.cumsum([0, *sizes]).tolist())
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    found = overlaps(cuts, start, stop)
    assert [x for part, low, high in found for x in range(low, high)] == list(range(start, stop))
    for part, low, high in found:
        assert cuts[part] <= low < high <= cuts[part + 1]


def test_reduce_cuts_follow_chunks():
    wide = make_problem(((40,), (10,)), ((10,), (10, 10, 10)))
    assert reduce_cuts(wide, "reducescatter", 3) == ((0, 40), (0, 10, 20, 30))
    tall = make_problem(((10, 10, 10), (10,)), ((10,), (40,)))
    assert reduce_cuts(tall, "reducescatter", 3) == ((0, 10, 20, 30), (0, 40))
    one_row = make_problem(((1,), (10,)), ((10,), (40,)))
    assert reduce_cuts(one_row, "reducescatter", 4) == ((0, 1), (0, 10, 20, 30, 40))
