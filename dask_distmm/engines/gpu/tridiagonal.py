"""Reduction of a Hermitian matrix to a tridiagonal one on GPUs that read each other's memory: launches of its kernels.

Of a column all GPUs compute the reflector v for themselves. Each multiplies its own block columns of the lower triangle
by v, reads every element once, and leaves its part of the product where the others read it; a word beside it says so.
The last block of the kernel waits for the words of the others (`tridiagonal.cu`). So a column takes three launches, and
the host is never asked. The launches of a panel are one CUDA graph, which serves all panels: launched one by one they
take 0.016 ms more for each column (two H200, N = 16384: 2.64 s in place of 2.38 s). The host puts panels on the stream
two ahead, and looks then whether something is wrong.

Divide and conquer has kernels for what it takes beside products (`merging.cu`).
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cupy as cp
import cupyx
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.base import log
from dask_distmm.engines.gpu.host import kernel
from dask_distmm.engines.gpu.operands import record
from dask_distmm.engines.programs.blas import Kernels, assign
from dask_distmm.engines.tridiagonal import TINY, Tridiagonal, panel_width
from dask_distmm.errors import EngineError, PlanError
from dask_distmm.programs.factor import Columns

# As tridiagonal.cu has them.
_NARROW, _ROWS, _THREADS, _COLS, _WARPS, _MOST_TILES, _HEADER = 64, 512, 128, 8, 8, 1024, 256
_LATE, _DIFFERENT = 2, 3
# Blocks of the kernels on vectors, at most. The same on all ranks: sums must have the same order.
_BLOCKS = 256
# Blocks of the products for each multiprocessor, as tridiagonal.cu has them: all run at the same time.
_RESIDENT, _RESIDENT_COMPLEX128 = 5, 4
# Panels whose launches are on the stream.
_AHEAD = 2
# The legacy default stream and that of each thread are below.
_DEFAULT_STREAMS = 2
# Seconds between two looks at an event.
_LOOK = 2e-5


class Peers(NamedTuple):
    """The memory of all ranks, as one of them sees it."""

    # Where the memory of `exchange_bytes` of each rank is; zeros in its first bytes.
    addresses: Sequence[int]
    # Returns some columns of another rank's block columns, in its memory: the rank, and the columns as it has them.
    pull: Callable[[int, slice], Any]


def exchange_bytes(order: int, itemsize: int) -> int:
    """Return the bytes that others read of a rank: products of two columns, and words."""
    return _HEADER + 2 * _part_bytes(order, itemsize)


def _part_bytes(order: int, itemsize: int) -> int:
    product = -(-order * itemsize // 16) * 16 + 8 * _BLOCKS
    return -(-product // 256) * 256


class DeviceReduction:
    """One rank's part of a reduction; all its memory is allocated when it is made."""

    def __init__(self, columns: Columns, rank: int, dtype: np.dtype, names: Sequence[str], limit: float) -> None:
        self._columns, self._rank, self._dtype, self._names, self._limit = columns, rank, dtype, names, limit
        self._order, self._width = columns.matrices[0].shape[0], columns.matrices[0].width
        self._narrow, self._tiles = panel_width(self._width), -(-self._order // _ROWS)
        if self._width % _COLS or self._tiles > _MOST_TILES:
            raise PlanError(
                f"eigenvalues of a matrix of order {self._order} in blocks of {self._width} columns: expected an order "
                f"up to {_ROWS * _MOST_TILES} and blocks of a multiple of {_COLS} columns; pass method='local'"
            )
        processors = int(cp.cuda.Device().attributes["MultiProcessorCount"])
        resident = _RESIDENT_COMPLEX128 if dtype.name == "complex128" else _RESIDENT
        self._grid, count = resident * processors, len(columns.held(0, rank))
        self._units = self._work()
        self._memory = {
            "reflectors": cp.empty((self._order, 3 * self._narrow), dtype, order="F"),
            "x": cp.empty(self._order, dtype),
            "panel": cp.empty((self._order, self._narrow), dtype, order="F"),
            "row_pieces": cp.empty((self._grid + self._tiles) * _ROWS, dtype),
            "col_pieces": cp.empty(max(1, self._tiles * count), dtype),
            "units": cp.asarray(self._units),
            "norms": cp.empty(_BLOCKS, np.float64),
            "dot_pieces": cp.empty(_BLOCKS * 2 * _NARROW, dtype),
            "dots": cp.empty(2 * _NARROW, dtype),
            "scalars": cp.empty(8, np.float64),
            "d": cp.empty(self._order, np.float64),
            "e": cp.empty(self._order, np.float64),
            "factors": cp.empty(self._order, dtype),
            "status": cp.zeros(2, np.int32),
            "place": cp.zeros(2, np.int32),
        }
        # The host says in the first word that the run is over; kernels say in the second one what is wrong.
        self._words: NDArray[np.uint32] = cupyx.empty_pinned(2, np.uint32)
        self._words[...] = 0
        self._sequence = 0
        # The launches of a panel, once they have been captured; None if they can't be.
        self._graph: Any = None
        self._captures = True

    @property
    def arrays(self) -> list[Any]:
        """All device memory that it holds."""
        return list(self._memory.values())

    def abort(self) -> None:
        """Let kernels that wait for other ranks end; any thread."""
        self._words[0] = 1

    def _work(self) -> NDArray[np.int32]:
        """Return for each panel the number of the first unit of each tile of rows, and of all units."""
        starts = np.arange(0, self._order, self._narrow)[:, None]
        ends = np.minimum(np.arange(1, self._tiles + 1) * _ROWS, self._order)
        count = np.maximum(0, self._before(ends) - self._before(starts))
        # Tiles above the panel have no rows that are left.
        count[ends <= starts] = 0
        starts_of_tiles = np.zeros((len(starts), self._tiles + 1), np.int32)
        np.cumsum(-(-count // _COLS), axis=1, out=starts_of_tiles[:, 1:])
        return starts_of_tiles

    def _before(self, column: Any) -> Any:
        """Return how many columns before a global one this rank has."""
        turn = self._width * self._columns.ranks
        rest = np.clip(column % turn - self._rank * self._width, 0, self._width)
        return column // turn * self._width + rest

    def reduce(
        self,
        array: Any,
        kernels: Kernels,
        peers: Peers,
        check: Callable[[], None],
        progress: Callable[[float], None],
    ) -> Tridiagonal:
        """Reduce the matrix on the current stream."""
        parameters, stream = self._parameters(array, peers), cp.cuda.get_current_stream()
        events: collections.deque[Any] = collections.deque()
        for start in range(0, self._order, self._narrow):
            if len(events) == _AHEAD:
                self._wait(events.popleft(), check)
            self._panel(start, array, peers, parameters)
            self._update(start, array, kernels)
            events.append(record(stream))
            progress(1 - (1 - min(1.0, (start + self._narrow) / self._order)) ** 3)
        for event in events:
            self._wait(event, check)
        d, e, factors = (self._memory[name].get() for name in ("d", "e", "factors"))
        return Tridiagonal(d, e[: self._order - 1], factors[: self._order - 1])

    def _parameters(self, array: Any, peers: Peers) -> Any:
        """Return the structure that all kernels read, on the device."""
        pointers = {name: int(x.data.ptr) for name, x in self._memory.items()}
        ranks, size = self._columns.ranks, self._dtype.itemsize
        self._memory["peers"] = cp.asarray(np.array(peers.addresses, np.int64))
        distance = array.strides[1] // size if array.shape[1] > 1 else max(1, len(array))
        fields = [
            *(int(array.data.ptr), distance, self._order, self._rank, ranks, self._width, self._narrow),
            *(pointers[name] for name in ("reflectors", "x", "panel", "row_pieces", "col_pieces")),
            *(len(self._columns.held(0, self._rank)), pointers["units"], self._tiles),
            *(pointers[name] for name in ("norms", "dot_pieces", "dots", "scalars", "d", "e", "factors")),
            *(int(self._memory["peers"].data.ptr), _part_bytes(self._order, size)),
            *(pointers["status"], self._words.ctypes.data, round(self._limit * 1e9)),
        ]
        tiny = np.array([TINY[np.finfo(self._dtype).dtype.name]]).view(np.int64)
        return cp.asarray(np.concatenate([np.array(fields, np.int64), tiny]))

    def _kernel(self, name: str) -> Any:
        return kernel("tridiagonal", name, self._dtype)

    def _next(self) -> np.uint32:
        """Return the next number of the word by which ranks meet."""
        self._sequence += 1
        return np.uint32(self._sequence)

    def _panel(self, start: int, array: Any, peers: Peers, parameters: Any) -> None:
        """Put the launches of a panel on the stream."""
        order, stop = self._order, min(start + self._narrow, self._order)
        block = start // self._width
        owner = self._columns.owner(block)
        place = self._columns.local(owner, block, block + 1).start + start - block * self._width
        columns = slice(place, place + stop - start)
        if self._columns.ranks > 1:
            # The owner has updated the panel; all others have pulled the one before.
            self._kernel("meet_ranks")((1,), (32,), (parameters, self._next()))
        source = array[:, columns] if owner == self._rank else peers.pull(owner, columns)
        assign(self._memory["panel"][start:, : stop - start], source[start:order])
        self._kernel("next_panel")((1,), (1,), (self._memory["place"], np.int32(start), np.int32(self._sequence)))
        if stop < order:
            self._whole_panel(parameters, first=not start)
            self._sequence += stop - start
        else:
            self._eliminate(parameters, stop - start, stop - start - 1)
            self._sequence += stop - start - 1
        if owner == self._rank and (reflectors := min(stop, order - 1) - start):
            # Ranks have met since they read the panel, if it has a reflector. Later those of a whole block column are
            # one panel.
            columns = slice(place, place + reflectors)
            assign(array[block * self._width : start, columns], 0)
            assign(array[start:order, columns], self._memory["reflectors"][start:, :reflectors])

    def _whole_panel(self, parameters: Any, *, first: bool) -> None:
        """Put the launches of a panel on the stream behind which there are others, as a graph if that can be."""
        stream = cp.cuda.get_current_stream()
        # The first one is launched plainly, so that all kernels are loaded. The default stream can't be captured.
        if self._graph is None and self._captures and not first and stream.ptr > _DEFAULT_STREAMS:
            try:
                stream.begin_capture()
                try:
                    self._eliminate(parameters, self._narrow, self._narrow)
                finally:
                    graph = stream.end_capture()
                graph.upload(stream)
                self._graph = graph
            except cp.cuda.runtime.CUDARuntimeError as error:
                log.info("the launches of a panel can't be captured: %s", error)
                self._captures = False
        if self._graph is None:
            self._eliminate(parameters, self._narrow, self._narrow)
        else:
            self._graph.launch(stream)

    def _eliminate(self, parameters: Any, columns: int, eliminated: int) -> None:
        """Launch the kernels of a panel of this many columns, this many of which have something below the diagonal.

        All panels have the same numbers of blocks, whatever rows are left, and on all ranks: sums have the same order.
        """
        finish_and_begin, multiply, collect = map(self._kernel, ("finish_and_begin", "multiply", "collect"))
        block_shape, none, true, place = (32, _WARPS), np.int32(0), np.int32(1), self._memory["place"]
        blocks, grid = min(_BLOCKS, -(-self._order // 32)), self._grid
        pieces = np.int32(blocks)
        for i in range(columns):
            number = np.int32(i)
            finish_and_begin((blocks,), block_shape, (parameters, place, number, true if i else none, true, pieces))
            if i < eliminated:
                multiply((grid,), (_THREADS,), (parameters, place, number, pieces))
                collected = parameters, place, number, np.int32(grid), pieces, pieces
                collect((blocks + -(-2 * i // 16),), block_shape, collected)
        if eliminated == columns:
            finish_and_begin((blocks,), block_shape, (parameters, place, np.int32(columns), true, none, pieces))

    def _update(self, start: int, array: Any, kernels: Kernels) -> None:
        """Update the lower triangle of this rank's columns behind a panel: ``A - [V W] [W V]^H``."""
        stop, narrow, reflectors = start + self._narrow, self._narrow, self._memory["reflectors"]
        columns = self._columns
        if stop >= self._order:
            return
        for block in columns.owned(self._rank, stop // self._width, columns.first(1)):
            _, first, last = columns.blocks[block]
            begin, place = max(first, stop), columns.local(self._rank, block, block + 1)
            target = array[begin : self._order, place.start + begin - first : place.stop]
            left, right = reflectors[begin:, : 2 * narrow], reflectors[begin:last, narrow:]
            kernels.gemm(left, right, target, "N", "C", alpha=-1, beta=1)

    def _wait(self, event: Any, check: Callable[[], None]) -> None:
        """Wait for a CUDA event; raise if the run is over, or a kernel has found something wrong."""
        while not event.done:
            check()
            time.sleep(_LOOK)
        check()
        if error := int(self._words[1]):
            if error == _DIFFERENT:
                raise EngineError(
                    "ranks have computed different reflectors from the same numbers: their GPUs are of different "
                    "kinds; pass method='local', or workers with GPUs of one kind"
                )
            name = self._names[error // 16] if error % 16 == _LATE else "this one"
            raise EngineError(
                f"worker {name} has not multiplied its part for {self._limit:.0f} s (config distmm.timeouts.transfer)"
                if error % 16 == _LATE
                else "the reduction was ended from outside"
            )


# The arithmetic of divide and conquer on GPUs, beside products: as `dask_distmm.engines.numpy.lapack` has it


_MERGED_THREADS = 256
# Warps find one root each; this few are in a block that a small equation has many blocks.
_ROOT_THREADS = 128
# Bisection waits for one division after the other: threads are spread over the whole GPU.
_VALUE_THREADS = 32

Vector = NDArray[np.float64]


class DeviceMerging:
    """The kernels of divide and conquer for CuPy arrays; they run on the current stream."""

    def secular(self, poles: Vector, weights: Vector, rho: float) -> DeviceSecular:
        """Solve the secular equation."""
        return DeviceSecular(poles, weights, rho)

    def rotate(self, z: Any, pairs: NDArray[np.int64], factors: Vector) -> None:
        """Rotate pairs of columns."""
        if len(z):
            arguments = z, _ld(z), np.int64(len(z)), cp.asarray(pairs), cp.asarray(factors), np.int32(len(pairs))
            kernel("merging", "rotate_columns")((-(-len(z) // _MERGED_THREADS),), (_MERGED_THREADS,), arguments)

    def take(self, source: Any, columns: NDArray[np.int64], target: Any) -> None:
        """Copy some columns."""
        if target.size:
            blocks = -(-len(target) // _MERGED_THREADS)
            arguments = source, _ld(source), cp.asarray(columns), target, _ld(target), np.int64(len(target))
            function = kernel("tridiagonal", "take_columns", target.dtype)
            function((blocks * len(columns),), (_MERGED_THREADS,), (*arguments, np.int64(blocks)))

    def add_sizes(self, a: Any, sums: Any) -> None:
        """Add up moduli."""
        a = cp.asarray(a)
        if a.size:
            numbers = a.data.ptr, *(x // a.itemsize for x in a.strides), *a.shape, sums.data.ptr
            function = kernel("refining", "add_sizes", a.dtype)
            function((-(-len(a) // 32),), (32, 8), tuple(map(np.int64, numbers)))

    def tridiagonal_values(self, d: Vector, e: Vector, first: int, last: int) -> Vector:
        """Return eigenvalues by bisection."""
        count = last - first + 1
        values = cp.empty(count, np.float64)
        sizes = (np.int32(size) for size in (len(d), first, count))
        limits = map(np.float64, _bounds(d, e))
        # An array of no elements has no address.
        squares = cp.asarray(np.append(e * e, 0.0))
        kernel("merging", "bisected_values")(
            (-(-count // _VALUE_THREADS),), (_VALUE_THREADS,), (cp.asarray(d), squares, *sizes, *limits, values)
        )
        ascending: Vector = np.sort(values.get())
        return ascending


def _bounds(d: Vector, e: Vector) -> tuple[float, float, float, float]:
    """Return bounds of all eigenvalues of diagonal d, (n,) and not empty, and e beside it; least pivot; tolerance."""
    beside, unit = np.abs(e), 2.0**-52
    radius = np.concatenate([beside, [0.0]]) + np.concatenate([[0.0], beside])
    low, high = float((d - radius).min()), float((d + radius).max())
    size = max(abs(low), abs(high), float(np.finfo(float).tiny))
    pivot = float(np.finfo(float).tiny) * max(1.0, float((e * e).max(initial=0.0)))
    wider = 2 * size * unit * len(d) + 2 * pivot
    return low - wider, high + wider, pivot, unit * size / 2


class DeviceSecular:
    """`dask_distmm.engines.numpy.lapack.Secular` on a GPU."""

    def __init__(self, poles: Vector, weights: Vector, rho: float) -> None:
        count, inverse = len(poles), 1.0 / rho
        self._poles, z = cp.asarray(poles), cp.asarray(weights)
        self._origins, self._shifts = cp.empty(count, np.int64), cp.empty(count, np.float64)
        self._fitted = cp.empty(count, np.float64)
        blocks = (-(-count * 32 // _ROOT_THREADS),)
        limits = np.float64(inverse), np.float64((weights * weights).sum() / inverse)
        arguments = self._poles, z, np.int32(count), *limits, self._origins, self._shifts
        kernel("merging", "secular_roots")(blocks, (_ROOT_THREADS,), arguments)
        fitted = self._poles, z, np.int32(count), self._origins, self._shifts, self._fitted
        kernel("merging", "fitted_weights")(blocks, (_ROOT_THREADS,), fitted)
        self.values: Vector = poles[self._origins.get()] + self._shifts.get()

    def vectors(self, rows: NDArray[np.int64], which: NDArray[np.int64], out: Any) -> None:
        """Write some eigenvectors, whose numbers follow each other, to the columns of `out`."""
        if len(which):
            arguments = self._poles, self._fitted, np.int32(len(rows)), self._origins, self._shifts
            places = cp.asarray(rows), np.int32(which[0]), out, _ld(out)
            kernel("merging", "secular_vectors")((len(which),), (_MERGED_THREADS,), (*arguments, *places))


def _ld(x: Any) -> np.int64:
    """Return the distance of the columns of a column-major matrix, in elements."""
    rows, cols = x.shape
    if rows > 1 and x.size and x.strides[0] != x.itemsize:
        raise ValueError(f"a matrix of shape {x.shape} has strides {x.strides}: its columns are not contiguous")
    return np.int64(x.strides[1] // x.itemsize if cols > 1 and x.size else max(1, rows))
