"""A process that is stuck inside a collective library exits: nothing else frees it."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from dask_distmm.engines.base import log

# The exit status of such a process; a nanny starts the worker again.
EXIT_STUCK = 70


class Watchdog:
    """Ends this process unless it is called off in time. Also a context manager."""

    def __init__(self, seconds: float, what: str) -> None:
        self._what = what
        self._called_off = threading.Event()
        self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._bite)
        self._timer.daemon = True

    def start(self) -> None:
        """Begin to wait."""
        self._timer.start()

    def call_off(self) -> None:
        """Let the process live."""
        self._called_off.set()
        self._timer.cancel()

    def _bite(self) -> None:
        if self._called_off.is_set():
            return
        log.critical("%s does not end: this worker's process exits", self._what)
        os._exit(EXIT_STUCK)

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.call_off()
