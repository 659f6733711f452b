"""The gate before a collective library: all ranks go through, or none does. Pure.

A rank that has entered a collective call can't leave it, and waits for ever for one that never comes. So rank 0
keeps a gate: each rank asks it to enter (a message of kind ``"enter"``) and waits for the answer, which rank 0
gives to all when all have asked. A run that ends before that closes the gate, and nobody goes in::

    rank 0     entered(0) ............ all here: open ---> collective
    rank 1     ask ---> entered(1)               answer -> collective
    rank 2         ask -------> entered(2)       answer -> collective
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError


class Gate:
    """Rank 0's side."""

    def __init__(self, nranks: int) -> None:
        self.opened: Future[None] = Future()
        self._missing = set(range(nranks))
        self._lock = threading.Lock()

    def entered(self, rank: int) -> Future[None]:
        """Note that a rank has asked; return the future that tells when, or why not, it may go on."""
        with self._lock:
            self._missing.discard(rank)
            complete = not self._missing
        if complete:
            self._decide(None)
        return self.opened

    def close(self, error: BaseException) -> bool:
        """Let nobody in, unless all are in already; return whether the gate is closed."""
        self._decide(error)
        return self.opened.exception() is not None

    def _decide(self, error: BaseException | None) -> None:
        try:
            if error is None:
                self.opened.set_result(None)
            else:
                self.opened.set_exception(error)
        except InvalidStateError:
            pass  # decided already
