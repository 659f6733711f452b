"""How a rank enters the collective part of a run, through a gate, and how a run that fails ends there.

A rank that has entered a collective call can't leave it, and waits for ever for one that never comes. So rank 0
keeps a gate: each rank asks it to enter (a message of kind ``"enter"``) and waits for the answer, which rank 0
gives to all when all have asked. A run that ends before that closes the gate, and nobody goes in::

    rank 0     entered(0) ............ all here: open ---> collective
    rank 1     ask ---> entered(1)               answer -> collective
    rank 2         ask -------> entered(2)       answer -> collective

A process that is stuck inside a collective library exits: nothing else frees it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import numpy as np

from dask_distmm.comms.base import Comm
from dask_distmm.engines.base import Ended, log, settle
from dask_distmm.planning.placement import Placement

# The exit status of such a process; a nanny starts the worker again.
EXIT_STUCK = 70


def watchdog(seconds: float, what: str) -> threading.Timer:
    """Start and return the watchdog that kills this process unless it is cancelled in time."""

    def bite() -> None:
        log.critical("%s does not end: this worker's process exits", what)
        os._exit(EXIT_STUCK)

    dog = threading.Timer(min(seconds, threading.TIMEOUT_MAX), bite)
    dog.daemon = True
    dog.start()
    return dog


class CollectiveEntry:
    """One participant's way into the collective calls of a run, and out of them."""

    def __init__(self, plan: Placement, rank: int | None, comm: Comm, ended: Ended, share: float = 1.0) -> None:
        self._plan, self._rank, self._comm, self._ended, self._share = plan, rank, comm, ended, share
        # Of rank 0: says when all may go in, or why nobody may; the ranks that have not asked yet.
        self.opened: Future[None] = Future()
        self._missing = set(range(len(plan.ranks)))
        self.unique_id = b""
        self._committed = self._over = False
        self._watchdog: threading.Timer | None = None
        self._lock = threading.Lock()

    def enter(self, make_id: Callable[[], bytes]) -> None:
        """Wait until all ranks are here; from then on no rank leaves before the library returns.

        Rank 0 makes the id under which they make their communicator, which may be empty.
        """
        if len(self._plan.ranks) == 1:
            self._ended.check()
            self._committed = True
            return
        if self._rank == 0:
            self.unique_id = make_id()
            opened: Future[Any] = self.entered(0)
        else:
            request = np.array([[self._rank, 0, 0, 0, 0, 0]], np.int64)
            opened = self._comm.fetch(self._plan.ranks[0], "enter", request)
        wait_for([opened])
        answer = opened.result()
        if self._rank:
            self.unique_id = bytes(answer[0])
        self._committed = True
        if self._ended.error is not None:
            self.watch()

    def entered(self, rank: int) -> Future[None]:
        """Record on rank 0 that a rank has arrived; return the future of the permission to enter."""
        with self._lock:
            self._missing.discard(rank)
            complete = not self._missing
        if complete:
            settle(self.opened)
        return self.opened

    def close(self, error: BaseException) -> bool:
        """Close the gate unless all ranks have entered; return whether it is closed."""
        settle(self.opened, error=error)
        return self.opened.exception() is not None

    def answer(self) -> Sequence[np.ndarray]:
        """Return rank 0's answer to a rank that asked to enter."""
        return [np.frombuffer(self.unique_id, np.uint8)]

    def leave(self) -> None:
        """Cancel the watchdog: the library has returned, or was never entered."""
        with self._lock:
            self._over = True
            if self._watchdog is not None:
                self._watchdog.cancel()

    def abort(self, error: BaseException) -> None:
        """End with `error`: at once before the gate; else when the library returns, or else with the process."""
        self._ended.end(error)
        self.close(error)
        if self._committed:
            self.watch()

    def watch(self) -> None:
        """Kill the process if the library does not return within its own time and the grace time."""
        options = self._plan.problem.options
        estimate = self._plan.flops / (self._share * options.machine(self._plan.engine).rate("other"))
        with self._lock:
            if self._over or self._watchdog is not None:
                return
            what = f"a collective of which a rank is gone (run of {self._plan.problem.name}, {self._ended.error})"
            self._watchdog = watchdog(options.grace_timeout + estimate, what)
