"""Products that are begun before the vote is counted: a rank needs nobody for what it has, and the GPU has time.

They are on the run's stream as any others. Holding them back until the run takes place (cuStreamWaitValue32) would save
the host's 0.1 ms of a first launch, but CUDA waits for all streams when it loads a kernel for the first time: on H200
that ended in a deadlock.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import cupy as cp

from dask_distmm.engines.device.gemm import Gemm
from dask_distmm.engines.device.operands import mark
from dask_distmm.engines.peer.trace import Trace

__all__ = ["Ahead"]


class Ahead:
    """The first products of a run, under way.

    Parameters
    ----------
    stream
        Where they are put.
    products
        What is multiplied.
    """

    def __init__(self, stream: cp.cuda.Stream, products: Sequence[Gemm]) -> None:
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
