"""What a participant says of its memory, so that others can read it: made, sent as plain types, checked. Pure.

An offer travels with the vote, and all offers with the message that starts the run. It lists allocations, and for each
chunk and each block of D where in which of them it lies. Whoever reads an offer checks that all of it lies inside the
allocation that it names, since nobody else does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.dtypes import carried
from dask_distmm.errors import ProtocolError
from dask_distmm.layout.rectangles import Span
from dask_distmm.plan import Plan
from dask_distmm.plan.pulls import blocks, lent
from dask_distmm.plan.reach import reaches

__all__ = ["BLOCKS", "FLAG_BYTES", "Allocation", "Offer", "read_offers"]

# What a block of D has in place of an operand's number.
BLOCKS = -1
# A flag for each rank (its part of the partial sums is done), and one for the rank's block of D.
FLAG_BYTES = 4
_HANDLE_BYTES = 64
_PROCESS_BYTES = 16
# The sum of three such numbers is not beyond 64 bits.
_MOST = 2**61
# What is told of a matrix: number of the allocation, offset of its first element, strides, in bytes.
_TOLD = 4


class Allocation(NamedTuple):
    """A device allocation as other processes know it.

    Parameters
    ----------
    handle
        What CUDA opens it by.
    size
        In bytes.
    buffer_id
        Which no other allocation of the process ever has.
    address
        Where it lies in the process that has it.
    """

    handle: bytes
    size: int
    buffer_id: int
    address: int


class Offer:
    """What one participant offers.

    Parameters
    ----------
    process
        Which process it is.
    alive
        Buffer ids of all its allocations that others may have mapped.

    Attributes
    ----------
    allocations
        Those that are used now.
    places
        Of one that was read, by operand (or `BLOCKS`): a row for each matrix, with the number of the allocation (-1 if
        it is not offered), the offset of its first element there, and its strides, in bytes.
    flags
        Where its flags are; None if it is no rank.
    """

    def __init__(self, process: bytes, alive: Iterable[int] = ()) -> None:
        self.process, self.alive = process, list(alive)
        self.allocations: list[Allocation] = []
        self.places: dict[int, NDArray[np.int64]] = {}
        self.flags: tuple[int, int] | None = None
        self._numbers: dict[int, int] = {}
        self._rows: list[tuple[int, ...]] = []

    def add(self, operand: int, number: int, allocation: Allocation, span: Span) -> None:
        """Tell where a matrix lies."""
        at = self._number(allocation)
        offset = span.pointer - allocation.address
        self._rows.append((operand, number, at, offset, span.row_stride, span.col_stride))

    def add_flags(self, allocation: Allocation, pointer: int) -> None:
        """Tell where the flags are."""
        self.flags = self._number(allocation), pointer - allocation.address

    def _number(self, allocation: Allocation) -> int:
        if allocation.buffer_id not in self._numbers:
            self._numbers[allocation.buffer_id] = len(self.allocations)
            self.allocations.append(allocation)
        return self._numbers[allocation.buffer_id]

    def to_wire(self) -> dict[str, Any]:
        """As plain types."""
        table = np.array(self._rows, np.int64).reshape(-1, 2 + _TOLD)
        return {
            "process": self.process,
            "alive": self.alive,
            "allocations": [list(one) for one in self.allocations],
            "places": table.tobytes(),
            "flags": None if self.flags is None else list(self.flags),
        }


def read_offers(wires: Sequence[Any], plan: Plan, mine: int, sums: int) -> list[Offer | None]:
    """Return what all participants offer, from plain types.

    Parameters
    ----------
    wires
        For each participant what `Offer.to_wire` gave, or None.
    plan
        Of the run: which participant has what, and of what shape.
    mine
        This participant. Its own offer is not read, nor those of participants that it can't reach.
    sums
        Bytes of an element of what ranks sum into.

    Raises
    ------
    ProtocolError
        Something is missing, of the wrong type, or outside of its allocation.
    """
    if len(wires) != len(plan.participants):
        raise ProtocolError(f"{len(wires)} offers for {len(plan.participants)} participants")
    found: list[Offer | None] = []
    read, extents = lent(plan, plan.problem.operands), _extents(plan)
    for index, wire in enumerate(wires):
        # Chunks of workers on other hosts come over Dask's comms.
        if wire is None or index == mine or not reaches(plan.participants[mine], plan.participants[index]):
            found.append(None)
            continue
        try:
            offer = _read(wire)
            _check(offer, wire["places"], plan, index, sums, read, extents)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            address = plan.participants[index].address
            raise ProtocolError(f"malformed offer of {address}: {type(error).__name__}: {error}") from error
        found.append(offer)
    return found


def _read(wire: Mapping[str, Any]) -> Offer:
    process = wire["process"]
    if not isinstance(process, bytes) or len(process) != _PROCESS_BYTES:
        raise ValueError(f"process is not {_PROCESS_BYTES} bytes")
    offer = Offer(process, map(_natural, wire["alive"]))
    for handle, size, buffer_id, address in wire["allocations"]:
        if not isinstance(handle, bytes) or len(handle) != _HANDLE_BYTES:
            raise ValueError(f"a handle is not {_HANDLE_BYTES} bytes")
        offer.allocations.append(Allocation(handle, _natural(size), _natural(buffer_id), _natural(address)))
    if wire["flags"] is not None:
        allocation, offset = map(_natural, wire["flags"])
        offer.flags = allocation, offset
    return offer


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"expected a natural number of 64 bits, found {str(value)[:40]}")
    return value


# Rows, columns, and bytes of an element, of matrices.
_Extents = NDArray[np.int64]


def _extents(plan: Plan) -> dict[str, _Extents]:
    """Return those of all chunks, by operand."""
    problem, found = plan.problem, {}
    kinds = dict(zip("ab", problem.matrix_types, strict=True))
    for name in problem.operands:
        rows, cols = (np.asarray(axis, np.int64) for axis in problem.chunks_of(name))
        size = carried(kinds.get(name, problem.dtype_of(name)), "cupy").itemsize
        sizes = np.full(len(rows) * len(cols), size, np.int64)
        found[name] = np.stack([np.repeat(rows, len(cols)), np.tile(cols, len(rows)), sizes], 1)
    return found


def _check(
    offer: Offer,
    places: bytes,
    plan: Plan,
    index: int,
    sums: int,
    read: Mapping[str, NDArray[np.bool_]],
    extents: Mapping[str, _Extents],
) -> None:
    """Put down where matrices lie; raise ValueError if any is missing, or does not lie inside of its allocation."""
    table = np.frombuffer(places, np.int64).reshape(-1, 2 + _TOLD)
    every: list[tuple[NDArray[np.int64], _Extents]] = []
    for operand, name in enumerate(plan.problem.operands):
        found = _places(offer, table, operand, len(extents[name]))
        absent = np.flatnonzero(read[name][index] & (found[:, 0] < 0))
        if len(absent):
            raise ValueError(f"chunk {absent[0]} of {name.upper()} is not in it")
        every.append((found, extents[name]))
    if index in plan.ranks:
        rects = np.array(blocks(plan, plan.ranks.index(index)), np.int64).reshape(-1, 4)
        sizes = np.full(len(rects), sums)
        shapes = np.stack([rects[:, 1] - rects[:, 0], rects[:, 3] - rects[:, 2], sizes], 1)
        every.append((_places(offer, table, BLOCKS, len(rects)), shapes))
        if offer.flags is None:
            raise ValueError("a rank without flags")
        flags = np.array([(*offer.flags, 0, FLAG_BYTES)], np.int64)
        every.append((flags, np.array([(1, len(plan.ranks) + 1, FLAG_BYTES)], np.int64)))
    _inside(offer, *(np.concatenate(columns) for columns in zip(*every, strict=True)))


def _places(offer: Offer, table: NDArray[np.int64], operand: int, count: int) -> NDArray[np.int64]:
    """Put down where the matrices of an operand lie."""
    told = table[table[:, 0] == operand]
    offer.places[operand] = np.full((count, _TOLD), -1, np.int64)
    if len(told) and not 0 <= told[:, 1].min() <= told[:, 1].max() < count:
        raise ValueError(f"numbers out of range: operand {operand} has {count} matrices")
    offer.places[operand][told[:, 1]] = told[:, 2:]
    if len(told) and told[:, 2].min() < 0:
        raise ValueError(f"there is no allocation {told[:, 2].min()}")
    return offer.places[operand]


def _inside(offer: Offer, places: NDArray[np.int64], extents: _Extents) -> None:
    """Raise ValueError if any matrix that is offered is not inside of its allocation."""
    there = places[:, 0] >= 0
    (number, offset, down, across), (rows, cols, itemsize) = places[there].T, extents[there].T
    if len(number) and number.max() >= len(offer.allocations):
        raise ValueError(f"there is no allocation {number.max()}")
    ends = [(count - 1.0) * stride for count, stride in ((rows, down), (cols, across))]
    if any((np.abs(numbers) > _MOST).any() for numbers in (offset.astype(float), *ends)):
        raise ValueError("numbers out of range")
    far = [(count - 1) * stride for count, stride in ((rows, down), (cols, across))]
    low, high = (offset + f(0, far[0]) + f(0, far[1]) for f in (np.minimum, np.maximum))
    sizes = np.array([one.size for one in offer.allocations], np.uint64)[number]
    beyond = np.maximum(high + itemsize, 0).astype(np.uint64) > sizes
    for at in np.flatnonzero((low < 0) | beyond):
        raise ValueError(
            f"a matrix of {rows[at]} x {cols[at]} reaches from byte {low[at]} to {high[at] + itemsize[at]} of an "
            f"allocation of {sizes[at]}"
        )
