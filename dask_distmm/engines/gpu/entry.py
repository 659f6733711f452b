"""How a rank enters the collective part of a run, and how a run that fails ends there. See `gate`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import numpy as np

from dask_distmm.comms.base import Comm
from dask_distmm.comms.nccl import make_unique_id
from dask_distmm.engines.base import Ended
from dask_distmm.engines.gpu.gate import Gate
from dask_distmm.engines.watchdog import Watchdog
from dask_distmm.planning.placement import Placement


class CollectiveEntry:
    """One participant's way into the collective calls of a run, and out of them."""

    def __init__(self, plan: Placement, rank: int | None, comm: Comm, ended: Ended, share: float = 1.0) -> None:
        self._plan, self._rank, self._comm, self._ended, self._share = plan, rank, comm, ended, share
        self._gate = Gate(len(plan.ranks))
        self.unique_id = b""
        self._committed = self._over = False
        self._watchdog: Watchdog | None = None
        self._lock = threading.Lock()

    def enter(self, *, has_group: bool) -> None:
        """Wait until all ranks are here; from then on no rank leaves before the library returns."""
        if len(self._plan.ranks) == 1:
            self._ended.check()
            self._committed = True
            return
        if self._rank == 0:
            self.unique_id = b"" if has_group else make_unique_id()
            opened: Future[Any] = self._gate.entered(0)
        else:
            request = np.array([[self._rank, 0, 0, 0, 0, 0]], np.int64)
            opened = self._comm.fetch(self._plan.ranks[0], "enter", request, False)
        wait_for([opened])
        answer = opened.result()
        if self._rank:
            self.unique_id = bytes(answer[0])
        self._committed = True
        if self._ended.error is not None:
            self._watch()

    def entered(self, rank: int) -> Future[None]:
        """Note on rank 0 that another rank is here; return the future that says when it may go on."""
        return self._gate.entered(rank)

    def answer(self) -> Sequence[np.ndarray]:
        """Return rank 0's answer to a rank that asked to enter."""
        return [np.frombuffer(self.unique_id, np.uint8)]

    def leave(self) -> None:
        """Note that the library has returned, or was never entered: the process is not ended any more."""
        with self._lock:
            self._over = True
            if self._watchdog is not None:
                self._watchdog.call_off()

    def abort(self, error: BaseException) -> None:
        """End with `error`: at once before the gate; else when the library returns, or else with the process."""
        self._ended.end(error)
        self._gate.close(error)
        if self._committed:
            self._watch()

    def _watch(self) -> None:
        """End the process if the library does not return within its own time and the grace time."""
        options = self._plan.problem.options
        estimate = self._plan.flops / (self._share * options.machine(self._plan.engine).rate("other"))
        with self._lock:
            if self._over or self._watchdog is not None:
                return
            what = f"a collective of which a rank is gone (run of {self._plan.problem.name}, {self._ended.error})"
            self._watchdog = Watchdog(options.grace_timeout + estimate, what)
            self._watchdog.start()
