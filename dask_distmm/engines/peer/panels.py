"""Panels and block columns of factorizations in the memory of other GPUs: what each rank offers, and pulls of it.

A rank offers one allocation each for its block columns, for what belongs to its panels beside these (pivots, T), and
for its parts of the outputs; and flags, one for each part of each panel, one for the end. It raises a flag on its own
stream, after the work that makes a panel. Whoever needs the panel reads the flag over NVLink until it is up, and then
has a copy engine pull the panel, while the GEMMs of the panel before run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import cupy as cp
import cupyx
import numpy as np

from dask_distmm.engines.base import Comm
from dask_distmm.engines.factor.job import PanelExchange
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.peer.offers import BLOCKS, FLAG_BYTES, Told, read_told
from dask_distmm.engines.peer.state import PeerState
from dask_distmm.errors import EngineError, ProtocolError
from dask_distmm.planning.factor import Key
from dask_distmm.planning.factor.placement import PARTS, FactorPlacement

__all__ = ["COLUMNS", "EXTRAS", "RESULTS", "Neighbours", "PulledPanels", "flag_of"]

# Numbers of what a rank offers beside chunks of operands, under `BLOCKS`; its parts of outputs follow.
COLUMNS, EXTRAS, RESULTS = 0, 1, 2
# Between two looks at a flag (seconds).
_LOOK = 1e-5


def flag_of(plan: FactorPlacement, key: Key | None) -> int:
    """Return the number of the flag of a part of a panel; of the end for None."""
    count = plan.work.columns.count
    return 2 * count if key is None else PARTS.index(key.part) * count + key.panel


class _Matrix(NamedTuple):
    """The place of a matrix in another process: allocation, offset, and strides in bytes."""

    allocation: int
    offset: int
    row_stride: int
    col_stride: int


class Neighbours:
    """The memory that other participants offer, mapped when it is first needed.

    Parameters
    ----------
    plan, me
        The plan of the run, and the number of this participant.
    wires
        The offers of all participants, as `Offer.to_wire` made them.
    state
        The engine's mappings and streams.

    Raises
    ------
    ProtocolError
        An offer is malformed.
    """

    def __init__(self, plan: FactorPlacement, me: int, wires: Sequence[Any], state: PeerState) -> None:
        self._plan, self._state = plan, state
        self._told: dict[int, Told] = {}
        self._places: dict[tuple[int, int, int], _Matrix] = {}
        self._bases: dict[tuple[int, int], int] = {}
        self._seen = cupyx.empty_pinned(1, np.int32)
        for holder, wire in enumerate(wires):
            if wire is None or holder == me:
                continue
            try:
                told = self._told[holder] = read_told(wire)
                rows = np.frombuffer(wire["places"], np.int64).reshape(-1, 6).tolist()
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                address = plan.participants[holder].address
                raise ProtocolError(f"malformed offer of {address}: {type(error).__name__}: {error}") from error
            for operand, number, *place in rows:
                self._places[holder, operand, number] = _Matrix(*place)
            state.mappings.begin(plan.group, told.process, told.alive)

    def offers(self, holder: int) -> bool:
        """Whether a participant lets this one read its memory."""
        return holder in self._told

    def view(self, holder: int, operand: int, number: int, shape: tuple[int, int], dtype: np.dtype) -> Any:
        """Return a matrix of another participant as an array over its memory.

        Raises
        ------
        ProtocolError
            It is not offered, or reaches beyond its allocation.
        """
        place = self._places.get((holder, operand, number))
        address = self._plan.participants[holder].address
        if place is None or not 0 <= place.allocation < len(self._told[holder].numbers):
            raise ProtocolError(f"{address} offers no matrix {number} of {operand}")
        steps = place.row_stride, place.col_stride
        last = place.offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + dtype.itemsize
        size = int(self._told[holder].numbers[place.allocation, 0])
        if min(*steps, place.offset) < 0 or last > size:
            raise ProtocolError(f"malformed offer of {address}: {shape} from {place.offset} in {size} bytes")
        base = self._base(holder, place.allocation)
        memory = cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(base, size, self), place.offset)
        return cp.ndarray(shape, dtype, memory, strides=steps)

    def _base(self, holder: int, allocation: int) -> int:
        """Return where an allocation of another participant is in this process."""
        told = self._told[holder]
        if (holder, allocation) not in self._bases:
            mine = told.process == self._state.exporter.process
            found = told.allocation(allocation)
            mapped = found.address if mine else self._state.mappings.open(told.process, found)
            self._bases[holder, allocation] = mapped
            self._state.wake(mapped, found.size)
        return self._bases[holder, allocation]

    def wait(self, holder: int, flag: int, check: Callable[[], None]) -> None:
        """Wait until another participant has raised a flag; `check` raises if the run is over."""
        told = self._told.get(holder)
        if told is None or told.flags is None:
            raise EngineError(f"{self._plan.participants[holder].address} is a rank and offers no memory")
        allocation, offset = told.flags
        at = self._base(holder, allocation) + offset + flag * FLAG_BYTES
        stream, runtime = self._state.looking, cp.cuda.runtime
        while True:
            runtime.memcpyAsync(self._seen.ctypes.data, at, FLAG_BYTES, runtime.memcpyDefault, stream.ptr)
            stream.synchronize()
            if self._seen[0]:
                return
            check()
            time.sleep(_LOOK)


class _Asked(NamedTuple):
    """A panel that is to be pulled."""

    owner: int
    key: Key


class PulledPanels(PanelExchange):
    """The exchange of one rank's panels by pulls from other GPUs' memory.

    Parameters
    ----------
    plan, comm
        The plan of the run, and Dask's comms, for pivots on the host.
    state
        The engine's streams.
    streams
        The streams of the work.
    flags
        This rank's flags.
    extras
        This rank's memory for what belongs to its panels: for each of its panels one column.
    """

    def __init__(
        self,
        plan: FactorPlacement,
        comm: Comm,
        state: PeerState,
        streams: Sequence[cp.cuda.Stream],
        flags: Any,
        extras: Any,
    ) -> None:
        super().__init__(plan, comm)
        self._flags, self._extras, self._streams = flags, extras, streams
        # After which pivots are there.
        self.made: dict[Key, Any] = {}
        self._pulling = state.pulls(1)[0]
        self.neighbours: Neighbours
        self.pulled_bytes = 0
        # Buffers that are free, with the events after which they may be filled; and those of panels that are here.
        self._free: list[tuple[Any, list[Any]]] = []
        self._used: dict[Key, list[Any]] = {}

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Let others pull a panel after the work that is on the current stream now."""
        current = cp.cuda.get_current_stream()
        if key.part == "pivots":
            self.made[key] = record(current)
            super().publish(key, arrays)
            return
        if len(arrays) > 1:
            extra = arrays[1].ravel(order="F")
            slot = self._slot(self._extras, key.panel, extra.dtype)
            slot[: extra.size] = extra
        pointer = self._flags.data.ptr + flag_of(self._plan, key) * FLAG_BYTES
        cp.cuda.runtime.memsetAsync(pointer, 1, FLAG_BYTES, current.ptr)

    def _slot(self, extras: Any, panel: int, dtype: np.dtype) -> Any:
        """Return the memory that belongs to a panel, in a rank's extras."""
        column: Any = extras[:, panel // len(self._plan.ranks)]
        return column.view(dtype)

    def ask(self, owner: int, key: Key) -> Any:
        """Note what is to be pulled: it begins as soon as `get` finds the flag up."""
        return super().ask(owner, key) if key.part == "pivots" else _Asked(owner, key)

    def get(self, asked: Future[Sequence[Any]] | _Asked, check: Callable[[], None]) -> Sequence[Any]:
        """Pull a panel; the stream of the work waits for it, this thread only for its flag."""
        if not isinstance(asked, _Asked):
            return super().get(asked, check)
        plan, (owner, key) = self._plan, asked
        holder, work = plan.ranks[owner], plan.work
        self.neighbours.wait(holder, flag_of(plan, key), check)
        dtype = plan.problem.dtype
        shape = work.columns.rows, work.columns.local_cols(owner)
        columns = work.columns.local(owner, key.panel, key.panel + 1)
        source = self.neighbours.view(holder, BLOCKS, COLUMNS, shape, dtype)[:, columns]
        start, stop, order = work.columns.place(key.panel)
        source = source[start:] if key.part == "lower" else source[:stop]
        panel = self._pull(key, source)
        if key.part == "upper" or not self._extra_bytes:
            self._ready()
            return (panel,)
        width = min(stop, order) - start
        count = -(-(work.columns.count - owner) // len(plan.ranks))
        extras = self.neighbours.view(holder, BLOCKS, EXTRAS, (self._extra_bytes, count), np.dtype(np.uint8))
        kind = np.dtype(np.int32) if self._pivots else dtype
        taken = self._pull(key, self._slot(extras, key.panel, kind)[: self._elements(panel, width)][:, None])
        self._ready()
        extra = taken[:, 0]
        return panel, (extra if self._pivots else extra.reshape((width, width), order="F"))

    @property
    def _extra_bytes(self) -> int:
        return len(self._extras)

    @property
    def _pivots(self) -> bool:
        return self._plan.work.phases[0].operation.name == "lu"

    def _elements(self, panel: Any, width: int) -> int:
        """Return how many numbers belong to a panel: LU's pivots, QR's T."""
        return min(panel.shape) if self._pivots else width * width

    def _pull(self, key: Key, source: Any) -> Any:
        """Have a copy engine copy a matrix, column by column, into a buffer."""
        size = source.size * source.itemsize
        buffer, events = self._take(size)
        target = buffer[:size].view(source.dtype).reshape(source.shape, order="F")
        self._used.setdefault(key, []).append(buffer)
        for event in events:
            self._pulling.wait_event(event)
        if size:
            rows = len(source) * source.itemsize
            cp.cuda.runtime.memcpy2DAsync(
                target.data.ptr, rows, source.data.ptr, source.strides[1] if source.shape[1] > 1 else rows, rows,
                source.shape[1], cp.cuda.runtime.memcpyDeviceToDevice, self._pulling.ptr,
            )  # fmt: skip
        self.pulled_bytes += size
        return target

    def _take(self, size: int) -> tuple[Any, list[Any]]:
        """Return a buffer of so many bytes, and the events after which it may be filled."""
        for at, (buffer, events) in enumerate(self._free):
            if size <= len(buffer) <= max(2 * size, 2**20):
                del self._free[at]
                return buffer, events
        # Straight from the pool of the default stream, on which nothing else runs: its memory is free now.
        with cp.cuda.Stream.null:
            return cp.empty(max(1, size), np.uint8), []

    def _ready(self) -> None:
        """Let the work wait for the pulls so far."""
        event = record(self._pulling)
        for stream in self._streams:
            stream.wait_event(event)

    def drop(self, key: Key) -> None:
        """Let a panel's buffers be filled again after the work that is on the stream now."""
        events = [record(stream) for stream in self._streams]
        self._free += [(buffer, events) for buffer in self._used.pop(key, ())]
