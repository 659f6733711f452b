"""Other participants' memory, as one rank reads it: mapped matrices, and flags that say what is ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import cupy as cp
import cupyx
import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import PeerLostError
from dask_distmm.engines.gpu.operands import array_at
from dask_distmm.engines.peer.offers import FLAG_BYTES, FLAGS, Offers
from dask_distmm.engines.peer.state import PeerState
from dask_distmm.errors import EngineError
from dask_distmm.layout.rectangles import Span
from dask_distmm.planning import Placement

# Between two looks at a flag (seconds).
_LOOK = 2e-5
# How long it may take until the news that a worker is gone has come (seconds).
_NEWS = 2.0


class Remote:
    """The memory that all others offer, mapped when it is first needed."""

    def __init__(self, plan: Placement, offers: Offers, engine: PeerState, gone: Collection[int] = ()) -> None:
        self._plan, self._offers, self._engine = plan, offers, engine
        self.pulled_bytes = 0
        self._lost = gone
        self._seen = cupyx.empty_pinned(len(plan.ranks) + 1, np.int32)
        self._awake: set[int] = set()
        self._flags: dict[int, int] = {}
        self._views: dict[tuple[int, int, int], Any] = {}
        # Where all allocations are in this process, 0 if they are not mapped; those of each participant together.
        self._bases = [np.empty(0, np.int64)] * len(offers.told)
        for holder, told in enumerate(offers.told):
            if told is None:
                continue
            if told.process == engine.exporter.process:
                self._bases[holder] = told.numbers[:, 2].astype(np.int64)
                continue
            engine.mappings.begin(plan.group, told.process, told.alive)
            self._bases[holder] = engine.mappings.known(told.process, told.numbers[:, 1].tolist())
            for number in np.flatnonzero(self._bases[holder])[:1].tolist():
                self._wake(holder, int(self._bases[holder][number]), told.allocation(number).size)

    @property
    def offering(self) -> NDArray[np.bool_]:
        """Which participants let others map their memory."""
        return np.array([one is not None for one in self._offers.told])

    def spans(self, operand: int, holders: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where matrices of an operand are in this process: address, row stride and column stride of each."""
        places = self._offers.places[operand][holders, numbers]
        if (places[:, 0] < 0).any():
            at = int(np.argmax(places[:, 0] < 0))
            address = self._plan.participants[int(holders[at])].address
            raise EngineError(f"{address} offers no matrix {numbers[at]} of {operand}")
        found = places[:, 1:].copy()
        for holder in np.unique(holders).tolist():
            mine, bases = holders == holder, self._bases[holder]
            used = places[mine, 0]
            for number in np.unique(used[bases[used] == 0]).tolist():
                self._map(holder, number)
            found[mine, 0] += bases[used]
        return found

    def view(self, holder: int, operand: int, number: int, shape: tuple[int, int], dtype: np.dtype) -> Any:
        """Return a matrix of another participant as an array over its memory; parameters and errors as of `spans`."""
        key = holder, operand, number
        if key not in self._views:
            span = Span(*self.spans(operand, np.array([holder]), np.array([number]))[0].tolist())
            self._views[key] = array_at(span, shape, dtype, self)
        return self._views[key]

    def _map(self, holder: int, number: int) -> None:
        """Find out where an allocation of a participant is in this process."""
        told = self._offers.told[holder]
        assert told is not None
        allocation = told.allocation(number)
        try:
            mapped = self._engine.mappings.open(told.process, allocation)
        except EngineError as error:
            # Mapped memory stays readable when its process dies; other memory of that process can't be mapped any more.
            end = time.monotonic() + _NEWS
            while holder not in self._lost and time.monotonic() < end:
                time.sleep(_LOOK)
            if holder not in self._lost:
                raise
            raise PeerLostError(f"{self._plan.participants[holder].address} is gone: {error}") from error
        self._bases[holder][number] = mapped
        self._wake(holder, mapped, allocation.size)

    def _wake(self, holder: int, mapped: int, size: int) -> None:
        """Wake the link to a participant's GPU, once."""
        if holder not in self._awake:
            self._awake.add(holder)
            self._engine.wake(mapped, size)

    def ready(self, holder: int, flag: int, check: Callable[[], None] | None = None) -> bool:
        """Whether a participant has raised a flag.

        With `check`, which raises if the run has been ended, wait until it has, or is gone.
        """
        options = self._plan.problem.options
        most = options.transfer_timeout + self._plan.flops / options.machine(self._plan.engine).rate("other")
        end = time.monotonic() + most
        while True:
            gone = holder in self._lost  # before the look: it may have raised it with its last breath
            try:
                if self._look(holder, flag):
                    return True
            except PeerLostError:
                return False
            if gone or check is None:
                return False
            check()
            if time.monotonic() > end:
                raise EngineError(
                    f"worker {self._plan.participants[holder].address} has not finished its sums for {most:.0f} s, "
                    "longer than the whole product could take (config distmm.timeouts.transfer)"
                )
            time.sleep(_LOOK)

    def wait(self, holder: int, flag: int, check: Callable[[], None]) -> None:
        """Wait until a participant has raised a flag; `check` raises if the run has been ended."""
        while not self._look(holder, flag):
            check()
            time.sleep(_LOOK)

    def _look(self, holder: int, flag: int) -> bool:
        """Read a flag in another GPU's memory."""
        if holder not in self._flags:
            self._flags[holder] = int(self.spans(FLAGS, np.array([holder]), np.array([0]))[0, 0])
        stream, runtime, at = self._engine.looking, cp.cuda.runtime, self._flags[holder] + flag * FLAG_BYTES
        runtime.memcpyAsync(self._seen.ctypes.data, at, FLAG_BYTES, runtime.memcpyDefault, stream.ptr)
        stream.synchronize()
        return bool(self._seen[0])
