"""Messages of each rank to all others, from GPU to GPU: the host only queues them.

A rank has memory that all others have mapped: a word, and two places. It writes what others get to one of these, adds
one to its word, waits for theirs to come as far, and reads their places. When it writes to that place again, two
messages later, all have read it: they have raised their words for the message between, which they do after that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import cupy as cp
import numpy as np

from dask_distmm.engines.gpu.host import kernel
from dask_distmm.engines.gpu.operands import array_at
from dask_distmm.layout.rectangles import Span
from dask_distmm.programs.steps import ALIGNED, Key

# Bytes of the word, beside which is nothing.
_WORD_BYTES = 256


class Window:
    """A rank's memory for small messages, which all ranks read and write."""

    def __init__(self, messages: dict[Key, int], exporter: Any, over: Any) -> None:
        self.keys, self.size = messages.keys(), max(messages.values())
        self.memory = exporter.own((1, self.nbytes), np.dtype(np.uint8))
        self.memory[:, :_WORD_BYTES] = 0
        # Where the host says that the run is over.
        self._over = over
        # Where the memory of each rank is, here; and those of the others, on the device.
        self.addresses: Sequence[int] = ()
        self._others: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of a rank."""
        return _WORD_BYTES + 2 * self.size

    def begin(self, addresses: Sequence[int], rank: int) -> None:
        """Store the addresses at which ranks' windows are mapped here."""
        self.addresses, self._rank = addresses, rank
        self._others = cp.asarray(np.array([x for peer, x in enumerate(addresses) if peer != rank], np.int64))

    def write(self, number: int, arrays: Sequence[Any]) -> None:
        """Queue the write of arrays to the window, and the wait for those of all ranks."""
        for place, array in zip(self.read(self._rank, number, arrays), arrays, strict=True):
            place[...] = array
        own = self.addresses[self._rank]
        word = array_at(Span(own, 4, 4), (1, 1), np.dtype(np.uint32), self)
        word += np.uint32(1)
        arguments = np.int64(own), self._others, np.int64(self._over.ctypes.data)
        kernel("system", "wait_for_words")((1,), (len(self._others),), arguments)

    def read(self, owner: int, number: int, like: Sequence[Any]) -> Iterator[Any]:
        """Yield the parts of a message, in the order of rows, where their owner has them."""
        at = self.addresses[owner] + _WORD_BYTES + number % 2 * self.size
        for part in like:
            (rows, cols), dtype = part.shape, np.dtype(part.dtype)
            if rows and cols:
                yield array_at(Span(at, cols * dtype.itemsize, dtype.itemsize), (rows, cols), dtype, self)
            else:
                yield cp.empty((rows, cols), dtype)
            at += -(-math.prod(part.shape) * dtype.itemsize // ALIGNED) * ALIGNED
