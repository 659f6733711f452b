"""The steps of one rank's schedule, issued on streams: loads, GEMMs, and the sums of other ranks.

The host issues each step when the one `PANELS` before it is done, and checks in between whether the run has been ended.
No kernel waits for another rank.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp

from dask_distmm.engines.gpu.finishing import NativeBias
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.peer.ahead import Ahead, Captured, Work, at_hand, capture, shorten
from dask_distmm.engines.peer.downloads import Downloads
from dask_distmm.engines.peer.loads import Loads
from dask_distmm.engines.peer.products import Gemms
from dask_distmm.engines.peer.readable import Sources
from dask_distmm.engines.peer.result import Result
from dask_distmm.engines.peer.schedule import Product, ScheduleStep
from dask_distmm.engines.peer.trace import Trace
from dask_distmm.planning.peer.block_schedule import PANELS


class Multiplication:
    """All steps of one rank."""

    def __init__(
        self,
        steps: Sequence[ScheduleStep],
        loads: Loads,
        gemms: Gemms,
        result: Result,
        sources: Sources,
        stream: cp.cuda.Stream,
        trace: Trace,
    ) -> None:
        self.steps, self.loads, self.rank = steps, loads, result.rank
        self._result, self._sources, self._stream, self._trace = result, sources, stream, trace
        self._gemms: list[list[Sequence[Work]]] = [[gemms.of(product) for product in step.products] for step in steps]
        self.early: Ahead | None = None
        self.first: Captured | None = None

    def begin_early(self, rate: float, *, possible: bool) -> None:
        """Begin the first products whose operands are on this GPU, or capture them in a CUDA graph."""
        every = [
            (product, gemms, at)
            for step, gemms in zip(self.steps, self._gemms, strict=True)
            for at, product in enumerate(step.products)
        ]
        count, long = at_hand([(gemms[at], possible and self._is_here(product)) for product, gemms, at in every], rate)
        products = [gemm for _, gemms, at in every[:count] for gemm in gemms[at]]
        self.early = Ahead(self._stream, products) if long else None
        self.first = None if long else capture(self._stream, products)
        done = count if self.early or self.first else 0
        for number, (_, gemms, at) in enumerate(every):
            gemms[at] = [] if number < done else shorten(self._stream, gemms[at], rate)

    def _is_here(self, product: Product) -> bool:
        return all(load.number in self.loads.before_vote for load in product.loaded)

    def find_loads(self) -> None:
        """Find all copies from other GPUs; the first step's are urgent if the GPU has no GEMM that began early."""
        waiting = self.steps[: not (self.early or self.first)]
        self.loads.find({load.number for step in waiting for load in step.loads})

    def run(
        self, bias: NativeBias | None, progress: Callable[[float], None], downloads: Downloads | None = None
    ) -> None:
        """Issue all steps, and add the sums of other ranks as they get ready."""
        over: collections.deque[Any] = collections.deque()
        mine, done, result, ended = False, list[int](), self._result, self._sources.ended
        if bias is not None:
            self._sources.gather(bias, self._stream)
            bias.convert(self._stream)
        if self.first is not None:
            with self._trace.step("GEMM", 0, self.first.flops, self._stream):
                self.first.run(self._stream)
        self.loads.begin()
        for number, step in enumerate(self.steps):
            if len(over) >= PANELS:
                # Others' sums are added to this rank's part of D once that is complete: while the GPU has other work.
                if mine and result.coming:
                    result.add_ready(block=False)
                ended.wait(over.popleft())
                progress((number + 1 - PANELS) / len(self.steps))
            ended.check()
            self._issue(number, step)
            over.append(record(self._stream))
            self.loads.note_use(step, over[-1])
            if downloads is not None:
                downloads.begin(number, over[-1])
            done += step.done
            # Of a triangle nothing is complete before all of it is.
            if result.triangle is None or step is self.steps[-1]:
                result.mirror()
                for rank in done:
                    result.raise_flag(rank)
                mine, done = mine or self.rank in done, []
            while self.loads.issue_next(number):
                pass
        while result.coming:
            result.add_ready(block=True)
        if len(result.plan.ranks) > 1:
            result.raise_flag(len(result.plan.ranks))

    def _issue(self, number: int, step: ScheduleStep) -> None:
        """Issue the products of a step, each as soon as its own loads are issued.

        The host takes about as long to issue the loads of a step as GPUs take for one of them.
        """
        for product, gemms in zip(step.products, self._gemms[number], strict=True):
            self.loads.issue_for(product)
            with self._trace.step("GEMM", number, sum(x.flops for x in gemms), self._stream):
                self._multiply(product, gemms)
            self.loads.issue_next(number - 1)

    def _multiply(self, product: Product, gemms: Sequence[Work]) -> None:
        """Put a product on the stream, where it waits for its operands."""
        self.loads.wait_for(product, self._stream)
        for gemm in gemms:
            gemm.run(self._stream)
