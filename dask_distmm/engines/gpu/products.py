"""Products on one GPU: kernels, the memory in which they work, and the formula as one fused kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import ChunkKey, Side, log
from dask_distmm.engines.gpu.host import to_host
from dask_distmm.engines.gpu.operands import DeviceChunks, mark, record, usable
from dask_distmm.engines.gpu.program import DeviceMemory
from dask_distmm.engines.sources import SourceChunk
from dask_distmm.numeric.epilogs import Formula, elementwise, reductions, scalars, scaled
from dask_distmm.numeric.types import FP8, carried, decode, stored, typed
from dask_distmm.planning import ENGINES, Problem
from dask_distmm.planning.placement import REPLICA
from dask_distmm.programs.steps import Buffer


class ProductKernels:
    """The kernels of products, as `programs.steps` names them: calls are queued on one stream."""

    asynchronous, xp, reported = True, cp, 0.0

    def __init__(self, problem: Problem, stream: cp.cuda.Stream, order: Callable[[str], str]) -> None:
        # `order` says the memory order of buffers for a purpose.
        self.problem, self.streams, self._order = problem, (stream,), order
        # Events on the stream, and the phases that begin with them.
        self._marks: list[tuple[str, cp.cuda.Event]] = []

    def mark(self, phase: str) -> cp.cuda.Event:
        """Begin a phase, or with an empty name end the last one; return the event."""
        self._marks.append((phase, mark(self.streams[0])))
        return self._marks[-1][1]

    @property
    def timings(self) -> dict[str, float]:
        """The seconds of all phases, once they are over."""
        pairs = itertools.pairwise(self._marks)
        return {name: cp.cuda.get_elapsed_time(first, last) / 1e3 for (name, first), (_, last) in pairs if name}

    def working(self, threads: int) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    def complete(self) -> None:
        """Do nothing: no check is deferred."""

    def usable(self, operand: int, chunk: Any) -> bool:
        """Whether the library can use a chunk of A (0) or B (1) as a tile."""
        return usable(chunk, self._order(("tile-a", "tile-b")[operand]))

    def new(self, buffer: Buffer, *, zero: bool) -> Any:
        """Return a new matrix."""
        dtype, order = carried(buffer.dtype, "cupy"), self._order(buffer.role)
        return (cp.zeros if zero else cp.empty)(buffer.shape, dtype, order=order)

    def copy(self, source: Any, target: Any) -> None:
        """Copy a matrix, in the type of the target."""
        with self.streams[0]:
            target[...] = source

    def conjugate(self, a: Any) -> None:
        """Conjugate a matrix in place."""
        with self.streams[0]:
            cp.conjugate(a, out=a)

    def finish(self, *arrays: Any, reads: int, names: Sequence[str], formula: Formula) -> None:
        """Apply the formula to a chunk of sums."""
        problem = self.problem
        with self.streams[0]:
            inputs = {name: decoded(x, problem[name].dtype) for name, x in zip(names, arrays, strict=False)}
            results = {output.name: x for output, x in zip(problem.outputs, arrays[reads + 1 :], strict=True)}
            apply_formula(problem, arrays[reads], inputs, results)


class ProductMemory(DeviceMemory):
    """The memory of a GPU, in which a product is computed: all of it is allocated before the vote."""

    def __init__(self, side: Side[Any], kernels: ProductKernels, downloads: cp.cuda.Stream) -> None:
        super().__init__(side, kernels)
        # Chunks that are on their way to the device, until `fill`.
        self._coming: DeviceChunks | None = None
        # Whether other ranks read chunks of workers that are not ranks where they are.
        self._uploads = side.me in side.plan.ranks or ENGINES[side.plan.engine].reads_peers
        # Copies results to the host, in a thread and on a stream of its own.
        self._downloads, self._thread = downloads, None
        if side.plan.problem.array == "numpy" and side.me in side.plan.ranks:
            # A thread begins with the first GPU that the process sees.
            use = cp.cuda.Device().use
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="distmm-download", initializer=use)

    def upload(self, chunks: dict[ChunkKey, Any]) -> dict[ChunkKey, Any]:
        """Allocate chunks on the device, in the types in which they are multiplied; `fill` copies them."""
        for event in self._ready:
            cp.cuda.Stream.null.wait_event(event)
        stays, plan = ("a", "b") if self._plan.from_host else (), self._plan
        some = {key: x for key, x in chunks.items() if key[0] not in stays and not isinstance(x, SourceChunk)}
        self._coming = DeviceChunks(plan.problem, some if self._uploads else {})
        self.note(*self._coming.all_arrays)
        return chunks | self._coming.arrays

    def fill(self) -> None:
        """Copy chunks to the device, after what was allocated."""
        if self._coming is not None:
            self._stream.wait_event(record(cp.cuda.Stream.null))
            self._coming.fill(self._stream)
            self._coming = None

    def complete(self) -> None:
        """Do nothing: `fill` is called when its chunks are needed."""

    def arrived(self, chunk: Any) -> Any:
        """Return what was made of a chunk, with the event after which it may be read."""
        return chunk

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Fill chunks that were not needed before."""
        self.fill()
        try:
            yield
        finally:
            if self._thread is not None:
                self._thread.shutdown(cancel_futures=True)
                self._downloads.synchronize()

    def stored(self, array: Any, *, tall: bool) -> Any:
        """Begin to copy a chunk to the host, if it is to be there."""
        return array if self._thread is None else self._thread.submit(self._copied, array, record(self._stream))

    def _copied(self, chunk: Any, complete: cp.cuda.Event) -> NDArray[Any]:
        self._downloads.wait_event(complete)
        return to_host(chunk, self._downloads)

    def delivered(self, chunk: Any, output: str = "") -> Any:
        """Return a chunk of an output as Dask gets it."""
        type_name = self._plan.problem.d.dtype if output in ("", REPLICA) else ""
        return chunk if self._thread is None else typed(chunk.result(), type_name)


def decoded(array: Any, type_name: str) -> Any:
    """Return an input of the formula in the type for computing: FP8 as float32."""
    return decode(cp, array, type_name, np.dtype(np.float32)) if type_name in FP8 else array


def apply_formula(problem: Problem, acc: Any, inputs: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """Apply the formula to a chunk of sums, on the current stream; targets are D, under no name, and other outputs."""
    formula, d = problem.formula, targets[""]
    if not acc.size:
        for name in formula.per_element:
            targets[name][...] = 0
        return
    # The scale of D, and what FP8 and integers need, come after the kernel.
    last = d.dtype.kind in "iu" or formula.scale_d != 1 or "scale_d" in formula.scales
    target = cp.empty(acc.shape, acc.dtype) if last else d
    saved = [targets[formula.saved]] if formula.saved else []
    kernel = _formula_kernel(formula, tuple(inputs))
    kernel(acc, list(inputs.values()), [target, *saved], scalars(formula, acc.dtype))
    reduced = reductions(cp, formula, target.astype(acc.dtype, copy=False))
    if last:
        d[...] = stored(cp, scaled(formula, target, inputs), problem.d.dtype, fp8_bytes=True)
    for name, values in reduced.items():
        targets[name][...] = values


def _formula_kernel(formula: Formula, names: tuple[str, ...]) -> Kernel:
    """Return the kernel of a formula, made once for all factors: these are its arguments."""
    alpha = (1.0, 0.0) if complex(*formula.alpha) == 1 else (2.0, 0.0)
    beta = (0.0, 0.0) if complex(*formula.beta) == 0 else (1.0, 0.0)
    return _made(dataclasses.replace(formula, alpha=alpha, beta=beta, scale_d=1.0), names)


@functools.lru_cache(maxsize=64)
def _made(formula: Formula, names: tuple[str, ...]) -> Kernel:
    return Kernel(formula, names)


class Kernel:
    """The formula as one kernel, fused by CuPy; where CuPy can't, as one kernel for each operation."""

    def __init__(self, formula: Formula, names: tuple[str, ...]) -> None:
        def apply(xp: Any, arrays: Sequence[Any], factors: tuple[Any, Any]) -> Iterator[Any]:
            return iter(elementwise(xp, formula, arrays[0], dict(zip(names, arrays[1:], strict=True)), factors))

        def traced(alpha: Any, beta: Any, *arguments: Any) -> None:
            arrays, outputs = arguments[: 1 + len(names)], arguments[1 + len(names) :]
            traced_results = apply(np, [_Traced(x) for x in arrays], (_Traced(alpha), _Traced(beta)))
            for target, values in zip(outputs, traced_results, strict=True):
                target[...] = values.value

        self._apply, self._fused, self.is_fused = apply, cp.fuse()(traced), True

    def __call__(self, acc: Any, inputs: list[Any], outputs: list[Any], factors: tuple[Any, Any]) -> None:
        """Fill `outputs`: D, and what is saved."""
        if self.is_fused:
            # CuPy does not fuse bfloat16: its values are read and written in the type of the sums.
            values = [x.astype(acc.dtype) if x.dtype.kind == "V" else x for x in inputs]
            targets = [cp.empty(x.shape, acc.dtype) if x.dtype.kind == "V" else x for x in outputs]
            try:
                self._fused(*factors, acc, *values, *targets)
                for output, target in zip(outputs, targets, strict=True):
                    if output is not target:
                        output[...] = target
                return
            except Exception as error:  # whatever a function of the user's meets while it is traced
                log.info("not fused to one kernel: %s: %s", type(error).__name__, error)
                self.is_fused = False
        for output, result in zip(outputs, self._apply(cp, [acc, *inputs], factors), strict=True):
            output[...] = result


class _Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """A stand-in for an array while CuPy traces a formula: NumPy's functions of it become CuPy's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def dtype(self) -> np.dtype:
        dtype: np.dtype = np.dtype(self.value.dtype)
        return dtype

    def astype(self, dtype: Any, copy: bool = True) -> _Traced:
        return self if dtype == self.dtype else _Traced(self.value.astype(dtype))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        return _Traced(getattr(cp, ufunc.__name__)(*map(_bare, inputs)))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        bare = {name: _bare(value) for name, value in kwargs.items()}
        return _Traced(getattr(cp, function.__name__)(*map(_bare, args), **bare))


def _bare(x: Any) -> Any:
    return x.value if isinstance(x, _Traced) else x
