"""Panels and block columns of factorizations in the memory of other GPUs: what each rank offers, and pulls of it.

A rank offers one allocation each for its block columns, for what belongs to its panels beside these (pivots, T), and
for its parts of the outputs; and flags, one for each part of each panel, one for the end. It raises a flag on its own
stream, after the work that makes a panel. A rank that needs the panel reads the flag over NVLink until it is up, and
then has a copy engine pull the panel, while the GEMMs of the panel before run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Comm
from dask_distmm.engines.factor.exchange import PanelExchange
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.gpu.reduction import exchange_bytes
from dask_distmm.engines.peer.offers import BLOCKS, FLAG_BYTES
from dask_distmm.engines.peer.remote import Remote
from dask_distmm.engines.peer.state import PeerState
from dask_distmm.engines.tridiagonal.conquer import row_bounds
from dask_distmm.planning.factor.plan import PARTS, FactorPlacement
from dask_distmm.planning.factor.steps import Key

# Numbers of what a rank offers beside chunks of operands, under `BLOCKS`; its parts of outputs follow. Where ranks
# share eigenvalues, also the products of the reduction and its rows of eigenvectors.
COLUMNS, EXTRAS, EXCHANGE, ROWS, RESULTS = 0, 1, 2, 3, 4
# The number of the flag that says that these rows are complete, from that of the end on.
ROWS_COMPLETE = 1


def flag_of(plan: FactorPlacement, key: Key | None) -> int:
    """Return the number of the flag of a part of a panel; of the end for None."""
    count = plan.work.columns.count
    return 2 * count if key is None else PARTS.index(key.part) * count + key.panel


def flag_count(plan: FactorPlacement) -> int:
    """Return how many flags a rank has."""
    return flag_of(plan, None) + ROWS_COMPLETE + 1


def offered_by(plan: FactorPlacement, rank: int) -> NDArray[np.int64]:
    """Return rows, columns and bytes of an element of each matrix that a rank offers, in the order of their numbers."""
    work = plan.work
    panels = -(-(work.columns.count - rank) // len(plan.ranks))
    # Of Cholesky a number, of LU the pivots of a panel, of QR and of reflectors its T.
    factored, size = work.phases[0].operation.name if work.phases else "", plan.problem.dtype.itemsize
    triangle = size * work.width**2
    each = {"cholesky": 4, "lu": 4 * work.width, "qr": triangle, "reflect": triangle}.get(factored, 0)
    found = [(work.columns.rows, work.columns.local_cols(rank), size), (-(-each // 16) * 16, max(1, panels), 1)]
    order, vectors = plan.problem.task.a_shape[0], work.shared and plan.problem.task.vectors
    bounds = row_bounds(order, len(plan.ranks))
    found += [
        (exchange_bytes(order, size) if work.shared else 0, int(work.shared), 1),
        (bounds[rank + 1] - bounds[rank] if vectors else 0, order if vectors else 0, 8),
    ]
    for output in plan.problem.outputs:
        layout = work.output_layout(output.name)
        shape = (0, 0) if layout is None else layout.local_shape(rank)
        found.append((*shape, np.dtype(output.dtype).itemsize))
    return np.array(found, np.int64)


class _Asked(NamedTuple):
    """A panel that is to be pulled."""

    owner: int
    key: Key


class PulledPanels(PanelExchange):
    """The exchange of one rank's panels by pulls from other GPUs' memory."""

    def __init__(
        self,
        plan: FactorPlacement,
        comm: Comm,
        state: PeerState,
        streams: Sequence[cp.cuda.Stream],
        flags: Any,
        extras: Any,
    ) -> None:
        super().__init__(plan.ranks, comm)
        self._plan = plan
        self._flags, self._extras, self._streams = flags, extras, streams
        # After which pivots are there.
        self.made: dict[Key, Any] = {}
        self._pulling = state.pulls(1)[0]
        self.remote: Remote
        self.pulled_bytes = 0
        # Buffers that are free, with the events after which they may be filled; and those of panels that are here.
        self._free: list[tuple[Any, list[Any]]] = []
        self._used: dict[Key, list[Any]] = {}

    def publish(self, key: Key, arrays: Sequence[Any]) -> None:
        """Let others pull a panel after the work that is on the current stream now."""
        if key.part not in ("lower", "upper", "pivots"):
            super().publish(key, arrays)
            return
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
        return _Asked(owner, key) if key.part in ("lower", "upper") else super().ask(owner, key)

    def get(self, asked: Future[Sequence[Any]] | _Asked, check: Callable[[], None]) -> Sequence[Any]:
        """Pull a panel; the stream of the work waits for it, this thread only for its flag."""
        if not isinstance(asked, _Asked):
            return super().get(asked, check)
        plan, (owner, key) = self._plan, asked
        holder, work = plan.ranks[owner], plan.work
        self.remote.wait(holder, flag_of(plan, key), check)
        dtype = plan.problem.dtype
        shape = work.columns.rows, work.columns.local_cols(owner)
        columns = work.columns.local(owner, key.panel, key.panel + 1)
        source = self.remote.view(holder, BLOCKS, COLUMNS, shape, dtype)[:, columns]
        start, stop, order = work.columns.place(key.panel)
        source = source[start:] if key.part == "lower" else source[:stop]
        panel = self._pull(key, source)
        if key.part == "upper" or not self._extra_bytes:
            self._ready()
            return (panel,)
        width = min(stop, order) - start
        rows, count, _ = offered_by(plan, owner)[EXTRAS].tolist()
        extras = self.remote.view(holder, BLOCKS, EXTRAS, (rows, count), np.dtype(np.uint8))
        # LU's pivots, Cholesky's info or QR's T.
        size = {"lu": min(panel.shape), "cholesky": 1}.get(plan.work.phases[0].operation.name)
        kind = dtype if size is None else np.dtype(np.int32)
        taken = self._pull(key, self._slot(extras, key.panel, kind)[: size or width * width][:, None])
        self._ready()
        extra = taken[:, 0]
        return panel, (extra.reshape((width, width), order="F") if size is None else extra)

    @property
    def _extra_bytes(self) -> int:
        return len(self._extras)

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
        """Return a buffer of this many bytes, and the events after which it may be filled."""
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
