"""The first products of a rank, whose operands are on its own GPU: begun before the vote, or captured in a graph.

Long products are begun before the vote is counted, because they need no other rank and the GPU is idle.

They are on the same stream as all other products. A stream that waits until the run takes place (cuStreamWaitValue32)
would save the 0.1 ms that the host takes for a first launch, but CUDA waits for all streams when it loads a kernel for
the first time: on H200 that ended in a deadlock. Short products become a CUDA graph: the host launches a graph in 0.005
ms, while a call of the library takes 0.02 ms, and 0.1 ms after an idle moment.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import cupy as cp

from dask_distmm.engines.base import log
from dask_distmm.engines.gpu.gemm import Gemm
from dask_distmm.engines.gpu.operands import mark
from dask_distmm.engines.peer.trace import Trace

# Products that together take between so many seconds are begun before the vote. Shorter ones are kept to hide pulls.
# Longer ones would waste too much time if the run does not take place.
_LEAST_SECONDS, _MOST_SECONDS = 1e-3, 5e-3
# Products that together take less than so many seconds become a graph; behind longer ones the host has enough time.
_SHORT_SECONDS = 0.3e-3


class Captured:
    """Products as one CUDA graph; see `capture`."""

    def __init__(self, graph: Any, products: Sequence[Work]) -> None:
        # The products hold what the library has made of them.
        self._graph, self._products = graph, products
        self.flops: float = sum(gemm.flops for gemm in products)

    def run(self, stream: cp.cuda.Stream) -> None:
        """Put them on a stream."""
        self._graph.launch(stream)


# Work that can be put on a stream.
Work = Gemm | Captured


def capture(stream: cp.cuda.Stream, products: Sequence[Work]) -> Captured | None:
    """Return products as a graph; None if they can't be: most of all if the library has yet to load its kernels."""
    if not products or not all(isinstance(gemm, Gemm) and gemm.ran for gemm in products):
        return None
    try:
        stream.begin_capture()
        try:
            for gemm in products:
                gemm.run(stream)
        finally:
            graph = stream.end_capture()
        graph.upload(stream)
    except cp.cuda.runtime.CUDARuntimeError as error:
        log.info("products can't be captured: %s", error)
        return None
    return Captured(graph, products)


def shorten(stream: cp.cuda.Stream, products: Sequence[Work], rate: float) -> Sequence[Work]:
    """Return products that are put on a stream together as a graph, if they are short and can be."""
    if not 0 < sum(gemm.flops for gemm in products) < _SHORT_SECONDS * rate:
        return products
    captured = capture(stream, products)
    return products if captured is None else [captured]


def at_hand(products: Sequence[tuple[Sequence[Work], bool]], rate: float) -> tuple[int, bool]:
    """Return how many products can come first, and whether these are to be begun."""
    seconds, count = 0.0, 0
    for gemms, here in products:
        more = sum(gemm.flops for gemm in gemms) / rate
        if not here or seconds + more > _MOST_SECONDS:
            break
        seconds, count = seconds + more, count + 1
    return count, count > 0 and seconds >= _LEAST_SECONDS


class Ahead:
    """The first products of a run, under way."""

    def __init__(self, stream: cp.cuda.Stream, products: Sequence[Work]) -> None:
        self._start = self._end = mark(stream)
        try:
            for gemm in products:
                gemm.run(stream)
        finally:
            self._end = mark(stream)
            # However the run is lost: what is freed goes to users of the default stream.
            self._finalizer = weakref.finalize(self, cp.cuda.Stream.null.wait_event, self._end)
            self._finalizer.atexit = False
        self._flops, self._put = sum(gemm.flops for gemm in products), time.perf_counter()

    def give_up(self) -> None:
        """Have them over before anybody gets the memory of the run. Any thread; may be repeated."""
        self._finalizer()

    def over(self, trace: Trace, began: float) -> tuple[float, float]:
        """Return how many seconds they took, and how many of these before the run began; they are done."""
        self._finalizer.detach()
        trace.add("GEMM", 0, self._flops, self._start, self._end, self._put)
        seconds = float(cp.cuda.get_elapsed_time(self._start, self._end)) / 1e3
        return seconds, min(seconds, began - self._put)
