"""Chunks of D to host memory, each as soon as it is complete, while others are still multiplied."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import ResultKey
from dask_distmm.engines.gpu.host import to_host
from dask_distmm.engines.peer.result import Result
from dask_distmm.numeric.types import typed
from dask_distmm.planning.plan import Rect


class Downloads:
    """The copies of a rank's chunks of D to host memory, in a thread and on a stream of their own."""

    def __init__(self, result: Result, steps: Sequence[Sequence[Rect]], stream: cp.cuda.Stream) -> None:
        self._type, self._stream = result.plan.problem.dtype, stream
        # A thread begins with the first GPU that the process sees.
        use = cp.cuda.Device().use
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distmm-download", initializer=use)
        self._begun: dict[int, Future[NDArray[Any]]] = {}
        # By the number of a step the chunks that no later step multiplies into.
        self._after: dict[int, list[tuple[int, Any]]] = collections.defaultdict(list)
        rects = np.array([rect for step in steps for rect in step], np.int64).reshape(-1, 4)
        numbers = np.repeat(np.arange(len(steps)), [len(step) for step in steps])
        for index, (top, bottom, left, right), chunk in result.complete_in_place():
            r0, r1, c0, c1 = rects.T
            touching = (r0 < bottom) & (r1 > top) & (c0 < right) & (c1 > left)
            self._after[int(numbers[touching].max())].append((index, chunk))

    def begin(self, step: int, over: cp.cuda.Event) -> None:
        """Begin the copies of the chunks that are complete after a step, when an event is done."""
        for index, chunk in self._after.get(step, ()):
            self._begun[index] = self._thread.submit(self._copy, chunk, over)

    def _copy(self, chunk: Any, over: cp.cuda.Event | None) -> NDArray[Any]:
        if over is not None:
            self._stream.wait_event(over)
        return to_host(chunk, self._stream)

    def all(self, outputs: Mapping[ResultKey, Any]) -> dict[ResultKey, NDArray[Any]]:
        """Return all outputs in host memory; those that are still on the GPU are complete."""
        copies: dict[ResultKey, Future[NDArray[Any]]] = {}
        for key, chunk in outputs.items():
            begun = self._begun.get(key[1]) if not key[0] else None
            copies[key] = begun or self._thread.submit(self._copy, chunk, None)
        return {key: typed(copy.result(), "" if key[0] else self._type) for key, copy in copies.items()}

    def close(self) -> None:
        """End the thread; copies that have not begun are dropped."""
        self._thread.shutdown(cancel_futures=True)
        self._stream.synchronize()
