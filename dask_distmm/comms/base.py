"""How the participants of one run ask each other for matrices, over any transport."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Boxes = NDArray[np.int64]  # (count, 6): operand (0 A, 1 B), chunk, row start, row stop, column start, column stop


class PeerLostError(ConnectionError):
    """Another participant can't be reached, or does not know the run: no other error counts as a lost worker."""


class Comm(Protocol):
    """Gets matrices from other participants of one run."""

    received_bytes: int

    def fetch(self, peer: int, kind: str, boxes: Boxes) -> Future[Sequence[NDArray[Any]]]:
        """Ask participant `peer` for boxes of its matrices, without waiting."""
