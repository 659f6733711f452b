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
from dask_distmm.engines.peer.result import Result
from dask_distmm.layout.rectangles import span_of
from dask_distmm.planning import Plan


def make_offer(
    plan: Plan,
    me: int,
    chunks: Mapping[ChunkKey, Any],
    result: Result | None,
    exporter: Exporter,
    stream: cp.cuda.Stream,
    read: Mapping[str, NDArray[np.bool_]],
) -> tuple[Offer, list[Any]]:
    """Return the offer of all memory that others read; chunks in memory that can't be exported are copied once."""
    offer = Offer(exporter.process)
    offered = dict[int, Any]()
    for number, name in enumerate(plan.problem.operands):
        for index in np.flatnonzero(read[name][me]).tolist():
            array = chunks[name, index]
            if id(array) not in offered:  # A and B may be the same
                offered[id(array)] = exporter.exportable(array, stream)
            add(offer, exporter, number, index, offered[id(array)])
    if result is not None:
        for number, array in result.shared():
            if array.size:
                add(offer, exporter, BLOCKS, number, array)
        add_flags(offer, exporter, result.flags)
        cp.cuda.runtime.memsetAsync(result.flags.data.ptr, 0, result.flags.nbytes, stream.ptr)
    offer.alive = exporter.alive()
    return offer, list(offered.values())


def add(offer: Offer, exporter: Exporter, operand: int, number: int, array: Any) -> None:
    """Tell in an offer where a matrix is stored, which can be exported."""
    allocation = exporter.find(array.data.ptr)
    assert allocation is not None
    offer.add(operand, number, allocation, span_of(array))


def add_flags(offer: Offer, exporter: Exporter, flags: Any) -> None:
    """Tell in an offer where flags lie, which can be exported."""
    allocation = exporter.find(flags.data.ptr)
    assert allocation is not None
    offer.add_flags(allocation, int(flags.data.ptr))
