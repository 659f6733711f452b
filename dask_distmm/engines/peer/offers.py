"""Offers: how a participant describes its memory so that others can read it, as plain types that are checked. Pure.

An offer travels with the vote, and all offers with the message that starts the run. It lists allocations, and for each
chunk and each block of D the allocation and the place in it. The reader of an offer checks that each matrix is inside
the allocation that the offer names, because no other part does. `Expected` prepares that check before the vote, because
the GPUs wait between the start of a run and its first pull.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_distmm.errors import ProtocolError
from dask_distmm.layout.rectangles import Span
from dask_distmm.numeric.types import carried
from dask_distmm.planning import Placement, Plan
from dask_distmm.planning.schedule import blocks

# The numbers, in place of an operand's, of what ranks offer beside chunks: blocks of D, or block columns; and a row of
# flags. A product has one for each rank (its part of the partial sums is done), and one for the rank's block of D.
BLOCKS, FLAGS = -2, -1
FLAG_BYTES = 4
_HANDLE_BYTES = 64
_PROCESS_BYTES = 16
# The sum of three such numbers is not beyond 64 bits.
_MOST = 2**61
# Numbers that describe the place of a matrix: allocation, offset of its first element, both strides (bytes).
_TOLD = 4


class Allocation(NamedTuple):
    """A device allocation as other processes know it."""

    # What CUDA opens it by.
    handle: bytes
    # In bytes.
    size: int
    # Which no other allocation of the process ever has.
    buffer_id: int
    # Where it is in the process that has it.
    address: int


def offer_of(
    process: bytes, alive: Iterable[int], matrices: Iterable[tuple[int, int, Allocation, Span]]
) -> dict[str, Any]:
    """Return the offer of a process, as plain types: its matrices, each with operand, number, allocation and place.

    `alive` are the buffer ids of all allocations that were told and are still there.
    """
    allocations, numbers, rows = list[Allocation](), dict[int, int](), []
    for operand, number, allocation, span in matrices:
        if allocation.buffer_id not in numbers:
            numbers[allocation.buffer_id] = len(allocations)
            allocations.append(allocation)
        place = numbers[allocation.buffer_id], span.pointer - allocation.address
        rows.append((operand, number, *place, span.row_stride, span.col_stride))
    return {
        "process": process,
        "alive": np.array([*alive], np.uint64).tobytes(),
        "handles": b"".join(x.handle for x in allocations),
        "allocations": np.array([x[1:] for x in allocations], np.uint64).tobytes(),
        "places": np.array(rows, np.int64).reshape(-1, 2 + _TOLD).tobytes(),
    }


class Told(NamedTuple):
    """The offer of a participant, as another one has read it; see `offer_of`."""

    # As told.
    process: bytes
    alive: list[int]
    # Of all its allocations that are used, one after the other.
    handles: bytes
    # Size, buffer id and address of each.
    numbers: NDArray[np.uint64]

    def allocation(self, number: int) -> Allocation:
        """Return one of its allocations."""
        at = number * _HANDLE_BYTES
        return Allocation(self.handles[at : at + _HANDLE_BYTES], *self.numbers[number].tolist())


# Where matrices lie, by operand (or `BLOCKS`, `FLAGS`): (participants, matrices, 4), with the number of the allocation
# (-1 if it is not offered), the offset of the first element there, and the strides, in bytes.
Places = dict[int, NDArray[np.int64]]


class Expected:
    """The matrices that others must offer in a run, and the check of their offers."""

    def __init__(
        self,
        plan: Placement,
        mine: int,
        read: Mapping[str, NDArray[np.bool_]],
        sizes: Mapping[str, int],
        blocks: Sequence[NDArray[np.int64]],
        flags: int,
    ) -> None:
        problem, count = plan.problem, len(plan.participants)
        self._addresses = [worker.address for worker in plan.participants]
        # Of this participant's own memory what came from others is read as that of others.
        same = plan.islands == plan.islands[mine]
        self._read = [near and (index != mine or plan.meets) for index, near in enumerate(same.tolist())]
        self._is_rank = [flags > 0 and index in plan.ranks for index in range(count)]
        self._needed = {name: read[name] & np.array(self._read)[:, None] for name in problem.operands}
        # Rows, columns and bytes of an element of all chunks of all operands, and of all blocks; for each operand and
        # participant where its own begin, and how many there are. The last operands are the blocks and the flags.
        extents: list[NDArray[np.int64]] = []
        self._first = np.zeros((len(problem.operands) - BLOCKS, count), np.int64)
        self._count = np.zeros_like(self._first)
        at = 0
        for operand, name in enumerate(problem.operands):
            rows, cols = (np.asarray(axis, np.int64) for axis in problem[name].chunks)
            extents.append(extents_of(np.repeat(rows, len(cols)), np.tile(cols, len(rows)), sizes[name]))
            self._first[operand], self._count[operand] = at, len(extents[-1])
            at += len(extents[-1])
        of_flags = extents_of(np.ones(1, np.int64), np.array([flags]), FLAG_BYTES)
        for index, own in zip(plan.ranks, blocks, strict=True):
            for operand, some in ((BLOCKS, own), (FLAGS, of_flags)):
                extents.append(some)
                self._first[operand, index], self._count[operand, index] = at, len(some)
                at += len(some)
        self._extents = np.concatenate(extents)

    @classmethod
    def of_product(cls, plan: Plan, mine: int, sums: int, read: Mapping[str, NDArray[np.bool_]]) -> Expected:
        """Return what is expected in the run of a product: the ranks' blocks of D, whose elements have `sums` bytes.

        `read` are the chunks that others read, as `peer_reads` returns them.
        """
        problem = plan.problem
        kinds = dict(zip("ab", problem.matrix_types, strict=True))
        sizes = {name: carried(kinds.get(name, problem[name].dtype), "cupy").itemsize for name in problem.operands}
        rects = [np.array(blocks(plan, rank), np.int64).reshape(-1, 4) for rank in range(len(plan.ranks))]
        extents = [extents_of(x[:, 1] - x[:, 0], x[:, 3] - x[:, 2], sums) for x in rects]
        return cls(plan, mine, read, sizes, extents, len(plan.ranks) + 1)

    def read(self, wires: Sequence[Any]) -> tuple[list[Told | None], Places]:
        """Return what all participants offer, from what `offer_of` gave for each, or None; and where matrices lie.

        None is for this participant, for those out of reach, and for those that offer nothing.
        """
        if len(wires) != len(self._read):
            raise ProtocolError(f"{len(wires)} offers for {len(self._read)} participants")
        offers: list[Told | None] = []
        tables = [np.empty((0, 2 + _TOLD), np.int64)]
        owners: list[int] = []
        for index, wire in enumerate(wires):
            # From others out of reach matrices come otherwise.
            offer = None
            if wire is not None and self._read[index]:
                try:
                    offer = read_told(wire)
                    tables.append(np.frombuffer(wire["places"], np.int64).reshape(-1, 2 + _TOLD))
                except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                    raise self._malformed(index, f"{type(error).__name__}: {error}") from error
                owners.append(index)
            offers.append(offer)
        participant = np.repeat(np.array(owners, np.int64), [len(table) for table in tables[1:]])
        return offers, self._places(offers, participant, np.concatenate(tables))

    def _malformed(self, index: int, what: str) -> ProtocolError:
        return ProtocolError(f"malformed offer of {self._addresses[index]}: {what}")

    def _places(
        self, offers: Sequence[Told | None], participant: NDArray[np.int64], table: NDArray[np.int64]
    ) -> Places:
        """Check the tables of participants' offers; return by operand the place of each matrix."""
        operand, number = table[:, 0], table[:, 1]
        rows = len(self._count)
        valid = (operand >= BLOCKS) & (operand < rows + BLOCKS) & (number >= 0)
        valid &= number < self._count[np.where(valid, operand, 0), participant]
        if not valid.all():
            at = int(np.argmin(valid))
            raise self._malformed(int(participant[at]), f"matrix {number[at]} of operand {operand[at]} does not exist")
        self._check(offers, participant, table[:, 2:], self._extents[self._first[operand, participant] + number])
        places: Places = {}
        for key in range(BLOCKS, rows + BLOCKS):
            mine = operand == key
            dense = np.full((len(offers), int(self._count[key].max()), _TOLD), -1, np.int64)
            dense[participant[mine], number[mine]] = table[mine, 2:]
            places[key] = dense
        for index, offer in enumerate(offers):
            if offer is not None and self._is_rank[index] and places[FLAGS][index, 0, 0] < 0:
                raise self._malformed(index, "a rank without flags")
        for row, (name, needed) in enumerate(self._needed.items()):
            for index, missing in np.argwhere(needed & (places[row][..., 0] < 0)).tolist():
                if offers[index] is not None:
                    raise self._malformed(index, f"chunk {missing} of {name.upper()} is not in it")
        return places

    def _check(
        self,
        offers: Sequence[Told | None],
        owners: NDArray[np.int64],
        where: NDArray[np.int64],
        extents: NDArray[np.int64],
    ) -> None:
        """Raise if any matrix is not inside of its owner's allocation."""
        counts = np.array([len(offer.numbers) if offer else 0 for offer in offers])
        bases = np.concatenate([[0], np.cumsum(counts)])
        sizes = np.concatenate([np.empty(0, np.uint64), *(offer.numbers[:, 0] for offer in offers if offer)])
        (allocation, offset, down, across), (rows, cols, itemsize) = where.T, extents.T
        strange = (allocation < 0) | (allocation >= counts[owners])
        ends = [(count - 1.0) * stride for count, stride in ((rows, down), (cols, across))]
        large = np.zeros(len(where), bool)
        for numbers in (offset.astype(float), *ends):
            large |= np.abs(numbers) > _MOST
        if (strange | large).any():
            at = int(np.argmax(strange | large))
            what = f"allocation {allocation[at]} does not exist" if strange[at] else "numbers out of range"
            raise self._malformed(int(owners[at]), what)
        far = [(count - 1) * stride for count, stride in ((rows, down), (cols, across))]
        low, high = (offset + f(0, far[0]) + f(0, far[1]) for f in (np.minimum, np.maximum))
        size = sizes[bases[owners] + allocation]
        outside = (low < 0) | (np.maximum(high + itemsize, 0).astype(np.uint64) > size)
        if outside.any():
            at = int(np.argmax(outside))
            raise self._malformed(
                int(owners[at]),
                f"a matrix of {rows[at]} x {cols[at]} reaches from byte {low[at]} to {high[at] + itemsize[at]} of an "
                f"allocation of {size[at]}",
            )


def extents_of(rows: NDArray[np.int64], cols: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return rows, columns and bytes of an element of some matrices, a row for each."""
    return np.stack([rows, cols, np.full(len(rows), size, np.int64)], 1)


# A matrix in a message: the allocation that it is in, and its address there.
_PLACE = struct.Struct(f"{_HANDLE_BYTES}s4Q")


def place_of(allocation: Allocation, pointer: int) -> NDArray[np.uint8]:
    """Return a message in place of a matrix at an address of this process."""
    return np.frombuffer(_PLACE.pack(*allocation, pointer), np.uint8)


def read_place(message: NDArray[Any], size: int) -> tuple[Allocation, int]:
    """Return the allocation that a matrix of `size` bytes is in, and its offset there, from what `place_of` gave."""
    if message.dtype != np.uint8 or message.size != _PLACE.size:
        raise ProtocolError(
            f"{message.size} elements of {message.dtype} in a message: expected a place of {_PLACE.size} bytes"
        )
    *fields, pointer = _PLACE.unpack(message.tobytes())
    allocation = Allocation(*fields)
    offset = pointer - allocation.address
    if not 0 <= offset <= allocation.size - size:
        raise ProtocolError(f"{size} bytes at byte {offset} of an allocation of {allocation.size}")
    return allocation, offset


def read_told(wire: Mapping[str, Any]) -> Told:
    """Return an offer as plain types tell it. ValueError, KeyError or TypeError where it is malformed."""
    process = wire["process"]
    if not isinstance(process, bytes) or len(process) != _PROCESS_BYTES:
        raise ValueError(f"process is not {_PROCESS_BYTES} bytes")
    handles, numbers = wire["handles"], np.frombuffer(wire["allocations"], np.uint64).reshape(-1, 3)
    if not isinstance(handles, bytes) or len(handles) != _HANDLE_BYTES * len(numbers):
        raise ValueError(f"handles are not {_HANDLE_BYTES} bytes for each of {len(numbers)} allocations")
    return Told(process, np.frombuffer(wire["alive"], np.uint64).tolist(), handles, numbers)
