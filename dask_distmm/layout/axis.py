"""One dimension, cut into segments that are stored in several places.

An `Axis` says, for every index of ``range(length)``, which *part* holds it (a process coordinate, or a chunk
number) and at which *local* index in that part.  It stores that per segment, not per index: a segment is a
run of indices which lie one after the other in one part.

Two axes over the same range intersect where the cuts of both are taken together.  Here ten elements in
chunks of 4, 3 and 3 are distributed in blocks of 3 to 2 processes::

    global index    0  1  2  3  4  5  6  7  8  9

    chunk          |0  0  0  0 |1  1  1 |2  2  2 |    source
    local index    |0  1  2  3 |0  1  2 |0  1  2 |

    process        |0  0  0 |1  1  1 |0  0  0 |1 |    destination
    local index    |0  1  2 |0  1  2 |3  4  5 |3 |

    copies         |A  A  A |B |C  C |D |E  E |F |    cut where either one is cut

Inside a piece neither side jumps, so each piece is one copy: A is chunk 0 from 0 to process 0 at 0, size 3.

Pieces far apart can still be one copy.  From blocks of 1 over 2 processes to the same layout, the cuts leave
one piece per element, yet process 0 holds elements 0, 2, 4 next to one another before and after.
`intersect` joins such pieces, so its answer is minimal: a layout copied to itself is one copy per part.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

Index = NDArray[np.int64]


def check_int(name: str, value: SupportsIndex, least: int) -> int:
    """Return `value` as an int; TypeError unless it is an integer type, ValueError if below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an integer: convert it with int()") from None
    if number < least:
        raise ValueError(f"{name} is {number}, expected at least {least}: pass a larger one")
    return number


def int64_array(name: str, values: ArrayLike) -> Index:
    """Return a one-dimensional int64 copy of `values`; ValueError for other dimensions or types."""
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} has shape {given.shape} and dtype {given.dtype}, expected a one-dimensional array of "
            "integers: convert it with numpy.asarray(..., dtype=numpy.int64)"
        )
    return np.array(given, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """A cut of ``range(length)`` into consecutive segments, each stored contiguously in one part.

    Construction normalises: neighbouring segments which are also neighbours in the same part become one, so
    equal layouts have equal arrays.  The arrays are read-only; axes compare and hash by value.
    """

    # Global indices where segments begin, and at the end the length; strictly increasing from 0. An axis of length 0
    # has ``bounds == [0]`` and no segment.
    bounds: Index
    # The part which holds each segment, in ``range(nparts)``.
    part: Index
    # Local index in that part at which each segment begins.
    offset: Index
    # Number of parts; parts without any element are allowed.
    nparts: int
    local_sizes: Index = field(init=False)

    def __post_init__(self) -> None:
        """Check, normalise and freeze the arrays."""
        bounds = int64_array("bounds", self.bounds)
        part = int64_array("part", self.part)
        offset = int64_array("offset", self.offset)
        nparts = check_int("nparts", self.nparts, 0)
        sizes = np.diff(bounds)
        if not bounds.size or bounds[0] != 0 or np.any(sizes <= 0):
            raise ValueError(
                f"bounds are {bounds}, expected strictly increasing ones from 0: "
                "use Axis.from_chunks if there are empty pieces"
            )
        if not sizes.size == part.size == offset.size:
            raise ValueError(
                f"there are {sizes.size} segments, {part.size} parts and {offset.size} offsets, "
                "expected as many of each: pass one part and one offset per segment"
            )
        if part.size and not (part.min() >= 0 and part.max() < nparts):
            raise ValueError(
                f"parts reach from {part.min()} to {part.max()}, expected them in range({nparts}): "
                "raise nparts or correct part"
            )
        _check_tiling(part, offset, sizes)

        same_place = (part[1:] == part[:-1]) & (offset[1:] == offset[:-1] + sizes[:-1])
        keep = np.ones(len(part), dtype=bool)
        keep[1:] = ~same_place
        local_sizes = np.zeros(nparts, dtype=np.int64)
        np.add.at(local_sizes, part, sizes)
        bounds = np.append(bounds[:-1][keep], bounds[-1])
        names = ("bounds", "part", "offset", "local_sizes")
        for name, array in zip(names, (bounds, part[keep], offset[keep], local_sizes), strict=True):
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "nparts", nparts)

    @classmethod
    def from_chunks(cls, chunks: Sequence[int]) -> Axis:
        """Make the axis whose parts are consecutive chunks."""
        sizes = int64_array("chunks", chunks)
        if np.any(sizes < 0):
            raise ValueError(f"chunks has the size {sizes.min()}, expected 0 or more: correct the sizes")
        filled = np.flatnonzero(sizes)
        bounds = np.concatenate([[0], np.cumsum(sizes[filled])])
        return cls(bounds, filled, np.zeros_like(filled), len(sizes))

    @classmethod
    def block_cyclic(cls, length: int, block: int, nprocs: int, source: int = 0) -> Axis:
        """Make the axis whose blocks are distributed round-robin over processes."""
        length = check_int("length", length, 0)
        block = check_int("block", block, 1)
        nprocs = check_int("nprocs", nprocs, 1)
        if check_int("source", source, 0) >= nprocs:
            raise ValueError(f"source is {source}, expected it in range({nprocs}): pass an existing process")
        number = np.arange(-(-length // block), dtype=np.int64)
        bounds = np.append(number * block, length)
        return cls(bounds, (number + source) % nprocs, number // nprocs * block, nprocs)

    @property
    def length(self) -> int:
        """Number of elements."""
        return int(self.bounds[-1])

    def locate(self, index: ArrayLike) -> tuple[Index, Index]:
        """Find where elements are stored."""
        at = np.asarray(index, dtype=np.int64)
        if at.size and not (at.min() >= 0 and at.max() < self.length):
            raise IndexError(
                f"indices reach from {at.min()} to {at.max()}, expected them in range({self.length}): "
                "pass global indices of this axis"
            )
        segment = np.searchsorted(self.bounds, at, side="right") - 1
        return self.part[segment], self.offset[segment] + at - self.bounds[segment]

    def local_to_global(self, part: int) -> list[tuple[int, int, int]]:
        """List the segments of a part in local order."""
        if not 0 <= part < self.nparts:
            raise IndexError(f"part is {part}, expected it in range({self.nparts}): pass an existing part")
        mine = np.flatnonzero(self.part == part)
        mine = mine[np.argsort(self.offset[mine])]
        sizes = self.bounds[mine + 1] - self.bounds[mine]
        return list(zip(self.bounds[mine].tolist(), self.offset[mine].tolist(), sizes.tolist(), strict=True))

    def _key(self) -> tuple[int, bytes, bytes, bytes]:
        return self.nparts, self.bounds.tobytes(), self.part.tobytes(), self.offset.tobytes()

    def __eq__(self, other: object) -> bool:
        """Compare by value."""
        return self._key() == other._key() if isinstance(other, Axis) else NotImplemented

    def __hash__(self) -> int:
        """Hash by value."""
        return hash(self._key())


def _check_tiling(part: Index, offset: Index, sizes: Index) -> None:
    """Raise ValueError unless the segments of each part cover its local indices from 0, each once."""
    order = np.lexsort((offset, part))
    part, offset, ends = part[order], offset[order], (offset + sizes)[order]
    continues = part[1:] == part[:-1]
    expected = np.zeros(len(part), dtype=np.int64)
    expected[1:] = np.where(continues, ends[:-1], 0)
    wrong = np.flatnonzero(offset != expected)
    if wrong.size:
        at = wrong[0]
        raise ValueError(
            f"part {part[at]} has a segment at offset {offset[at]}, expected {expected[at]}: "
            "the segments of a part must follow one another without a gap or an overlap"
        )


@dataclass(frozen=True, eq=False)
class AxisCopies:
    """The copies which turn one axis into another, in the order of their first global index.

    Copy ``i`` takes ``size[i]`` elements from local index ``src_offset[i]`` of part ``src_part[i]`` to local
    index ``dst_offset[i]`` of part ``dst_part[i]``.  All arrays are int64 of shape (ncopies,).

    `start` is the global index of a copy's first element.  Where either side has one segment per part, as
    chunks do, the copy is ``range(start, start + size)``; between two block-cyclic axes it may hold
    several blocks, which are neighbours in both parts and not in the global order.
    """

    src_part: Index
    src_offset: Index
    dst_part: Index
    dst_offset: Index
    start: Index
    size: Index

    def __len__(self) -> int:
        """Return the number of copies."""
        return len(self.size)

    def of_dst(self, part: int) -> Index:
        """Return which copies reach a part of the destination: their positions, increasing."""
        parts, order = self._by_dst
        first, last = np.searchsorted(parts, [part, part + 1])
        return order[first:last]

    def pairs(self) -> tuple[Index, Index, Index]:
        """Sum the copies up by pairs of parts."""
        ndst = int(self.dst_part.max(initial=0)) + 1
        key, which = np.unique(self.src_part * ndst + self.dst_part, return_inverse=True)
        elements = np.zeros(len(key), dtype=np.int64)
        np.add.at(elements, which, self.size)
        return key // ndst, key % ndst, elements

    # Asked once per part, so a scan of all copies each time would be quadratic: sort once, then bisect.
    @cached_property
    def _by_dst(self) -> tuple[Index, Index]:
        order = np.argsort(self.dst_part, kind="stable")
        return self.dst_part[order], order


def intersect(a: Axis, b: Axis) -> AxisCopies:
    """Find the fewest copies which move every element from where `a` has it to where `b` wants it."""
    if a.length != b.length:
        raise ValueError(
            f"the axes have lengths {a.length} and {b.length}, expected equal ones: "
            "intersect two layouts of the same dimension"
        )
    cuts = np.union1d(a.bounds, b.bounds)
    start, size = cuts[:-1], np.diff(cuts)
    src_part, src_offset = a.locate(start)
    dst_part, dst_offset = b.locate(start)

    # Join pieces which are neighbours locally on both sides.  Sorted so, those that can join are adjacent.
    order = np.lexsort((src_offset, dst_part, src_part))
    jump = np.ones(len(order), dtype=bool)
    before, after = order[:-1], order[1:]
    jump[1:] = (
        (src_part[before] != src_part[after])
        | (dst_part[before] != dst_part[after])
        | (src_offset[before] + size[before] != src_offset[after])
        | (dst_offset[before] + size[before] != dst_offset[after])
    )
    heads = np.flatnonzero(jump)
    joined = np.diff(np.append(0, np.cumsum(size[order]))[np.append(heads, len(order))])
    first = order[heads]
    by_start = np.argsort(start[first])
    first = first[by_start]
    src_part, src_offset, dst_part, dst_offset = (
        array[first] for array in (src_part, src_offset, dst_part, dst_offset)
    )
    return AxisCopies(src_part, src_offset, dst_part, dst_offset, start[first], joined[by_start])
