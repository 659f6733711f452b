"""Parts of matrices between the ranks of a group, by NCCL: packed, sent, unpacked, a batch at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import cupy as cp
import numpy as np

from dask_distmm.comms.nccl import NcclComm
from dask_distmm.engines.factor.copies import assign

# Bytes that are on their way from one rank to another at a time, and again in the other direction.
_BATCH_BYTES = 2**28


class Gift(NamedTuple):
    """A part of a matrix that another rank gets."""

    peer: int
    part: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Its rows and columns."""
        rows, cols = self.part.shape
        return rows, cols


class Receipt(NamedTuple):
    """A part of a matrix that comes from another rank, and what is done with it."""

    peer: int
    shape: tuple[int, int]
    put: Callable[[Any], None]


T = TypeVar("T", Gift, Receipt)


def trade(comm: NcclComm, gifts: Sequence[Gift], receipts: Sequence[Receipt], dtype: np.dtype) -> int:
    """Exchange parts of matrices of one type between all ranks; return the bytes that have come.

    What a rank gives to another one and what that one gets of it are in the same order, and of the same shapes. All
    ranks walk through the others at the same pace: in step s rank r gives to r + s and gets from r - s.
    """
    received = 0
    for step in range(1, comm.nranks):
        to, source = (comm.rank + step) % comm.nranks, (comm.rank - step) % comm.nranks
        sent = batches([one for one in gifts if one.peer == to], dtype.itemsize)
        come = batches([one for one in receipts if one.peer == source], dtype.itemsize)
        for give, get in itertools.zip_longest(sent, come, fillvalue=()):
            outgoing, incoming = (cp.empty(_elements(some), dtype) for some in (give, get))
            for gift, place in _places(give, outgoing):
                assign(place, gift.part)
            comm.exchange(
                [(to, int(outgoing.data.ptr), outgoing.nbytes)] * bool(give),
                [(source, int(incoming.data.ptr), incoming.nbytes)] * bool(get),
            )
            for receipt, place in _places(get, incoming):
                receipt.put(place)
            received += incoming.nbytes
    return received


def batches(parts: Sequence[T], itemsize: int, most: int = _BATCH_BYTES) -> Iterator[Sequence[T]]:
    """Cut a sequence of parts into batches of not much more than `most` bytes: sender and receiver alike."""
    batch: list[T] = []
    size = 0
    for one in parts:
        batch.append(one)
        size += math.prod(one.shape) * itemsize
        if size >= most:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _elements(parts: Sequence[Gift] | Sequence[Receipt]) -> int:
    return sum(math.prod(one.shape) for one in parts)


def _places(parts: Sequence[T], buffer: Any) -> Iterator[tuple[T, Any]]:
    """Yield each part with its place in a buffer, column-major."""
    at = 0
    for one in parts:
        size = math.prod(one.shape)
        yield one, buffer[at : at + size].reshape(one.shape, order="F")
        at += size
