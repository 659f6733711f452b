"""What a participant says of its memory, so that others can read it: made, sent as plain types, checked. Pure.

An offer travels with the vote, and all offers with the message that starts the run. It lists allocations, and for each
chunk and each block of D where in which of them it lies. Whoever reads an offer checks that all of it lies inside the
allocation that it names, since nobody else does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_distmm.dtypes import carried
from dask_distmm.errors import ProtocolError
from dask_distmm.layout.rectangles import Span
from dask_distmm.plan import Plan
from dask_distmm.plan.pulls import blocks, lent
from dask_distmm.plan.reach import reaches

__all__ = ["BLOCKS", "FLAG_BYTES", "Allocation", "Offer", "Place", "read_offers"]

# What a block of D has in place of an operand's number.
BLOCKS = -1
# A flag for each rank (its part of the partial sums is done), and one for the rank's block of D.
FLAG_BYTES = 4
_HANDLE_BYTES = 64
_PROCESS_BYTES = 16
_MOST = 2**62


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


class Place(NamedTuple):
    """Where a matrix lies: number of the allocation, offset of its first element, strides, in bytes."""

    allocation: int
    offset: int
    row_stride: int
    col_stride: int


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
        Where matrices lie, by operand (or `BLOCKS`) and number.
    flags
        Where its flags are; None if it is no rank.
    """

    def __init__(self, process: bytes, alive: Iterable[int] = ()) -> None:
        self.process, self.alive = process, list(alive)
        self.allocations: list[Allocation] = []
        self.places: dict[tuple[int, int], Place] = {}
        self.flags: tuple[int, int] | None = None
        self._numbers: dict[int, int] = {}

    def add(self, operand: int, number: int, allocation: Allocation, span: Span) -> None:
        """Tell where a matrix lies."""
        at = self._number(allocation)
        self.places[operand, number] = Place(at, span.pointer - allocation.address, span.row_stride, span.col_stride)

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
        table = np.array([(*key, *place) for key, place in self.places.items()], np.int64).reshape(-1, 6)
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
    for index, wire in enumerate(wires):
        # Chunks of workers on other hosts come over Dask's comms.
        if wire is None or index == mine or not reaches(plan.participants[mine], plan.participants[index]):
            found.append(None)
            continue
        try:
            offer = _read(wire)
            _check(offer, plan, index, sums)
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
    for operand, number, *place in np.frombuffer(wire["places"], np.int64).reshape(-1, 6).tolist():
        offer.places[operand, number] = Place(*place)
    if wire["flags"] is not None:
        allocation, offset = map(_natural, wire["flags"])
        offer.flags = allocation, offset
    return offer


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"expected a natural number of 64 bits, found {str(value)[:40]}")
    return value


def _check(offer: Offer, plan: Plan, index: int, sums: int) -> None:
    """Raise ValueError if anything is missing, or does not lie inside of its allocation."""
    problem = plan.problem
    kinds = dict(zip("ab", problem.matrix_types, strict=True))
    read = lent(plan, index, problem.operands)
    for operand, name in enumerate(problem.operands):
        sizes = problem.chunks_of(name)
        size = carried(kinds.get(name, problem.dtype_of(name)), "cupy").itemsize
        for number in np.flatnonzero(plan.where[name] == index).tolist():
            i, j = divmod(number, len(sizes[1]))
            if (operand, number) in offer.places:
                _inside(offer, offer.places[operand, number], (sizes[0][i], sizes[1][j]), size)
            elif read[name][number]:
                raise ValueError(f"chunk {number} of {name.upper()} is not in it")
    if index in plan.ranks:
        rank = plan.ranks.index(index)
        for number, (r0, r1, c0, c1) in enumerate(blocks(plan, rank)):
            if (BLOCKS, number) in offer.places:
                _inside(offer, offer.places[BLOCKS, number], (r1 - r0, c1 - c0), sums)
        if offer.flags is None:
            raise ValueError("a rank without flags")
        _inside(offer, Place(*offer.flags, 0, FLAG_BYTES), (1, len(plan.ranks) + 1), FLAG_BYTES)


def _inside(offer: Offer, place: Place, shape: tuple[int, int], itemsize: int) -> None:
    if not 0 <= place.allocation < len(offer.allocations):
        raise ValueError(f"there is no allocation {place.allocation}")
    if max(map(abs, place)) > _MOST:
        raise ValueError("numbers out of range")
    ends = [(n - 1) * stride for n, stride in zip(shape, place[2:], strict=True)]
    low, high = (place.offset + sum(f(0, end) for end in ends) for f in (min, max))
    if low < 0 or high + itemsize > offer.allocations[place.allocation].size:
        raise ValueError(
            f"a matrix of {shape[0]} x {shape[1]} reaches from byte {low} to {high + itemsize} of an allocation of "
            f"{offer.allocations[place.allocation].size}"
        )
