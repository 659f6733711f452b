"""How the participants of one run ask each other for matrices, over any transport."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Boxes", "Comm"]

Boxes = NDArray[np.int64]  # (count, 6): operand (0 A, 1 B), chunk, row start, row stop, column start, column stop


class Comm(Protocol):
    """Gets matrices from other participants of one run.

    Attributes
    ----------
    received_bytes
        Bytes of the matrices that have arrived so far.
    """

    received_bytes: int

    def fetch(self, peer: int, kind: str, boxes: Boxes, flat: bool) -> Future[Sequence[NDArray[Any]]]:
        """Ask participant `peer` for boxes of its matrices, without waiting.

        Parameters
        ----------
        peer
            Number of the participant.
        kind
            ``"input"``: of the chunks that are there; ``"partial"``: of its sum over its part of k; ``"final"``: of D.
            ``"replica"``: whole chunks of D, A or B (0, 1, 2 in the first column), by their numbers in the second one
            (`dask_distmm.runtime.replicas`).
        boxes
            Which parts; for ``"partial"`` and ``"final"`` the first two columns are 0 and the rest is in
            coordinates of D. ``"enter"``: none; the first box holds the number of the rank that asks to enter a
            collective (see `gate`).
        flat
            All boxes may come in one vector, one after the other in C order, for the sake of many small ones.

        Returns
        -------
        Future
            Of the matrices, or of a list of one vector. Fails if the peer is gone or the run is over.
        """
        ...
