"""One-dimensional layouts: construction, normal form, and the minimal copies between two of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import segments_of

from dask_distmm.layout import Axis, AxisCopies, intersect

few = settings(deadline=None, max_examples=100)


@st.composite
def axes(draw: st.DrawFn, length: int) -> Axis:
    """Draw chunks (zero-length ones too) and block-cyclic layouts."""
    if draw(st.booleans()):
        nprocs = draw(st.integers(1, 5))
        return Axis.block_cyclic(length, draw(st.integers(1, length + 2)), nprocs, draw(st.integers(0, nprocs - 1)))
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=8)))
    return Axis.from_chunks(np.diff([0, *cuts, length]).tolist())


@st.composite
def axis_pairs(draw: st.DrawFn) -> tuple[Axis, Axis]:
    """Draw two axes of one length."""
    length = draw(st.sampled_from([0, 1]) | st.integers(2, 40))
    return draw(axes(length)), draw(axes(length))


def dealt(length: int, block: int, nprocs: int, source: int) -> list[tuple[int, int]]:
    """Deal blocks out in turn, element by element: the definition of block-cyclic."""
    held = [0] * nprocs
    places = []
    proc = source
    for index in range(length):
        if index and index % block == 0:
            proc = 0 if proc == nprocs - 1 else proc + 1
        places.append((proc, held[proc]))
        held[proc] += 1
    return places


def places_of(axis: Axis) -> list[tuple[int, int]]:
    """Return (part, local index) of each element, read from the segments one by one."""
    bounds, part, offset = axis.bounds.tolist(), axis.part.tolist(), axis.offset.tolist()
    return [(part[s], offset[s] + i) for s in range(len(part)) for i in range(bounds[s + 1] - bounds[s])]


def axis_copies(copies: AxisCopies) -> list[tuple[int, ...]]:
    """Return copies as tuples (src_part, src_offset, dst_part, dst_offset, start, size)."""
    columns = (
        copies.src_part, copies.src_offset, copies.dst_part, copies.dst_offset, copies.start, copies.size
    )  # fmt: skip
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_chunks() -> None:
    """Each chunk is a part; an empty one has no segment."""
    axis = Axis.from_chunks((0, 3, 0, 2, 0))
    assert axis.bounds.tolist() == [0, 3, 5]
    assert axis.part.tolist() == [1, 3]
    assert axis.offset.tolist() == [0, 0]
    assert axis.local_sizes == [0, 3, 0, 2, 0]
    assert (axis.length, axis.nparts) == (5, 5)


@pytest.mark.parametrize("axis", [Axis.from_chunks((0, 0)), Axis.block_cyclic(0, 3, 2)])
def test_length_zero(axis: Axis) -> None:
    """Nothing is in bounds [0] and no segment."""
    assert axis.bounds.tolist() == [0]
    assert axis.part.size == axis.offset.size == axis.length == 0
    assert not any(axis.local_sizes)
    assert len(intersect(axis, axis)) == 0


@few
@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5), st.data())
def test_block_cyclic_is_dealing(length: int, block: int, nprocs: int, data: st.DataObject) -> None:
    """The closed form agrees with dealing out in turn."""
    source = data.draw(st.integers(0, nprocs - 1))
    axis = Axis.block_cyclic(length, block, nprocs, source)
    expected = dealt(length, block, nprocs, source)
    assert places_of(axis) == expected
    part, local = axis.locate(np.arange(length))
    assert list(zip(part.tolist(), local.tolist(), strict=True)) == expected
    assert axis.local_sizes == [sum(p == q for q, _ in expected) for p in range(nprocs)]


@few
@given(axis_pairs())
def test_axis_is_normal_and_complete(pair: tuple[Axis, Axis]) -> None:
    """Neighbouring segments differ in place; each local index is used once; the views agree."""
    axis, _ = pair
    places = places_of(axis)
    wanted = [(p, i) for p, size in enumerate(axis.local_sizes) for i in range(size)]
    assert sorted(places) == wanted
    for cut in axis.bounds[1:-1].tolist():
        (part, local), (next_part, next_local) = places[cut - 1], places[cut]
        assert (next_part, next_local) != (part, local + 1)
    listed = {}
    for p in range(axis.nparts):
        segments = segments_of(axis, p)
        assert segments == sorted(segments, key=lambda segment: segment[1])
        listed.update({g + i: (p, at + i) for g, at, size in segments for i in range(size)})
    assert [listed[i] for i in range(axis.length)] == places


def test_one_process_is_one_segment() -> None:
    """Blocks that stay together are one segment."""
    for length in (0, 10):
        axis, same = Axis.block_cyclic(length, 3, 1), Axis.from_chunks((length,))
        assert places_of(axis) == places_of(same)
        assert axis.part.size == same.part.size == (length > 0)


def test_intersect_example() -> None:
    """The picture in the module's docstring."""
    copies = intersect(Axis.from_chunks((4, 3, 3)), Axis.block_cyclic(10, 3, 2))
    assert axis_copies(copies) == [
        (0, 0, 0, 0, 0, 3),
        (0, 3, 1, 0, 3, 1),
        (1, 0, 1, 1, 4, 2),
        (1, 2, 0, 3, 6, 1),
        (2, 0, 0, 4, 7, 2),
        (2, 2, 1, 3, 9, 1),
    ]


@few
@given(axis_pairs())
def test_intersect_moves_each_element_once(pair: tuple[Axis, Axis]) -> None:
    """Each element goes from its place to its place, exactly once; copies are ordered by `start`."""
    a, b = pair
    moves = [
        ((sp, so + i), (dp, do + i)) for sp, so, dp, do, _, size in axis_copies(intersect(a, b)) for i in range(size)
    ]
    assert sorted(moves) == sorted(zip(places_of(a), places_of(b), strict=True))
    start = intersect(a, b).start
    assert np.all(np.diff(start) > 0)
    assert [c[:2] for c in axis_copies(intersect(a, b))] == [places_of(a)[i] for i in start.tolist()]


@few
@given(axis_pairs())
def test_intersect_is_minimal(pair: tuple[Axis, Axis]) -> None:
    """No copy begins where another one ends on both sides."""
    copies = intersect(*pair)
    assert (copies.size > 0).all()
    begins = {copy[:4] for copy in axis_copies(copies)}
    ends = {(sp, so + size, dp, do + size) for sp, so, dp, do, _, size in axis_copies(copies)}
    assert not begins & ends
    assert len(copies) <= len(pair[0].part) + len(pair[1].part)


def test_same_layout_is_one_copy_per_part() -> None:
    """Blocks apart in the global order are one copy if they are neighbours on both sides."""
    a, moved = Axis.block_cyclic(1000, 3, 4), Axis.block_cyclic(1000, 3, 4, source=1)
    assert intersect(a, a).size.tolist() == a.local_sizes
    assert len(intersect(a, moved)) == 4


@few
@given(axis_pairs())
def test_copies_by_part(pair: tuple[Axis, Axis]) -> None:
    """The lookups and the sums by pair agree with a scan."""
    copies = intersect(*pair)
    tuples = axis_copies(copies)
    for part in range(pair[1].nparts):
        assert copies.of_dst(part).tolist() == [i for i, c in enumerate(tuples) if c[2] == part]
    sums: dict[tuple[int, int], int] = {}
    for sp, _, dp, _, _, size in tuples:
        sums[sp, dp] = sums.get((sp, dp), 0) + size
    src, dst, elements = copies.pairs
    assert dict(zip(zip(src.tolist(), dst.tolist(), strict=True), elements.tolist(), strict=True)) == sums
    assert len(elements) == len(sums)


def test_many_segments() -> None:
    """A hundred thousand segments stay a handful of arrays."""
    n = 100_000
    a, b = Axis.block_cyclic(10 * n, 10, 7), Axis.from_chunks((25,) * (4 * n // 10))
    assert len(a.part) == n
    copies = intersect(a, b)
    # Every tenth index is a cut, and every 25th: of 50 elements these are 0, 10, 20, 25, 30, 40.
    assert len(copies) == 10 * n // 50 * 6
    assert copies.size.sum() == 10 * n
