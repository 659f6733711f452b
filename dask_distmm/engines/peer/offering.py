"""The offer of one participant: chunks that others read, its blocks of D, its flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import ChunkKey
from dask_distmm.engines.peer.memory import Exporter
from dask_distmm.engines.peer.offers import BLOCKS, Offer
from dask_distmm.engines.peer.pulls import span_of
from dask_distmm.engines.peer.result import Result
from dask_distmm.planning import Plan

__all__ = ["make_offer"]


def make_offer(
    plan: Plan,
    me: int,
    chunks: Mapping[ChunkKey, Any],
    result: Result | None,
    exporter: Exporter,
    stream: cp.cuda.Stream,
    read: Mapping[str, NDArray[np.bool_]],
) -> tuple[Offer, list[Any]]:
    """Return the offer of all memory that others read; chunks in memory that can't be exported are copied once.

    Parameters
    ----------
    plan, me
        The plan of the run, and this participant.
    chunks
        The chunks that are here, on the device.
    result
        Its block of D; None if it is no rank.
    exporter
        Of this process.
    stream
        The stream of the copies, and of the memset of the flags.
    read
        The chunks that others read, as `peer_reads` returns them.

    Returns
    -------
    offer
        It holds once the work that is on the stream now is done.
    kept
        Device memory that must stay until the run is over.
    """
    offer = Offer(exporter.process)
    copies = dict[int, Any]()
    for number, name in enumerate(plan.problem.operands):
        for index in np.flatnonzero(read[name][me]).tolist():
            offered = array = chunks[name, index]
            allocation = None if exporter.own_memory_only else exporter.find(array.data.ptr)
            if allocation is None:
                if id(array) not in copies:  # A and B may be the same
                    order = "C" if array.strides[0] >= array.strides[1] else "F"
                    copies[id(array)] = exporter.empty(array.shape, array.dtype, order)
                    with stream:
                        copies[id(array)][...] = array
                offered = copies[id(array)]
                allocation = exporter.find(offered.data.ptr)
            assert allocation is not None
            offer.add(number, index, allocation, span_of(offered))
    if result is not None:
        for number, array in result.shared():
            if array.size:
                allocation = exporter.find(array.data.ptr)
                assert allocation is not None
                offer.add(BLOCKS, number, allocation, span_of(array))
        pointer = int(result.flags.data.ptr)
        allocation = exporter.find(pointer)
        assert allocation is not None
        offer.add_flags(allocation, pointer)
        cp.cuda.runtime.memsetAsync(pointer, 0, result.flags.nbytes, stream.ptr)
    offer.alive = exporter.alive()
    return offer, list(copies.values())
