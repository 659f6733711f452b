"""What one participant's side of a factorization on a GPU is, however its ranks get at each other's matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import cupy as cp
import numpy as np

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import Side, contiguous
from dask_distmm.engines.factor.copies import assign
from dask_distmm.engines.factor.job import TRIANGLES, FactorJob
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.gpu.operands import record
from dask_distmm.planning.factor.plan import FactorPlacement


class SolverState(Protocol):
    """What an engine keeps between factorizations."""

    @property
    def stream(self) -> cp.cuda.Stream:
        """The stream of the work."""
        ...

    def solver(self) -> Kernels:
        """Return the kernels, on that stream."""
        ...


class GpuFactorJob(FactorJob):
    """One participant's side of a factorization on a GPU: chunks are there, and results are made there."""

    def __init__(self, side: Side[FactorPlacement], state: SolverState) -> None:
        super().__init__(side, state.solver())
        self._ready, self._stream = side.ready, state.stream

    def _upload(self) -> None:
        """Bring the chunks to the device, in the type that is computed in."""
        for event in self._ready:
            cp.cuda.Stream.null.wait_event(event)
        self.chunks = {key: cp.asarray(chunk, self.plan.problem.dtype) for key, chunk in self.chunks.items()}

    def _mark(self, marks: list[float]) -> None:
        self._stream.synchronize()
        super()._mark(marks)

    def _blank(self, shape: tuple[int, int], dtype: np.dtype, order: Literal["C", "F"], form: str) -> Any:
        """Return a new chunk of an output, with zeros where no rank has a part of it."""
        with cp.cuda.Stream.null:  # the stream of those who will use it and free it
            try:
                chunk = cp.empty(shape, dtype, order=order)
            except cp.cuda.memory.OutOfMemoryError:
                self._make_room()
                chunk = cp.empty(shape, dtype, order=order)
        # Whoever has freed this memory may still have kernels on that stream that use it.
        self._stream.wait_event(record(cp.cuda.Stream.null))
        if form in TRIANGLES:
            assign(chunk, 0)
        return chunk

    def _make_room(self) -> None:
        """Free what the engine keeps for its next run, if memory is short."""

    def _given_back(self, made: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return chunks of outputs as the user has given those of the operands: CuPy's, or NumPy's."""
        if self.plan.problem.array == "numpy":
            return {key: chunk.get(stream=self._stream) for key, chunk in made.items()}
        return dict(made)

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> list[Any]:
        """Return boxes of the chunks that are here, for peers that ask over Dask's comms."""
        found = contiguous(super().serve(kind, boxes, flat))
        cp.cuda.Stream.null.synchronize()
        return found
