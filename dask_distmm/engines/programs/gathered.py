"""One participant's side of a factorization: operands are gathered, the program runs, outputs are put together.

::

    prepare()   the rank's block columns are allocated
    execute()   parts of the operands' chunks are fetched from their holders and written into the block columns
                the program's steps; panels are fetched from their owners (`RankExchange`)
                the rank's chunks of the outputs are put together from all ranks' block columns

Ranks exchange matrices by `Comm.fetch`, as for products: ``"input"``, parts of panels and ``"final"``.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.base import ResultKey, Side, wait_checked
from dask_distmm.engines.exchange import Messages, RankExchange
from dask_distmm.engines.programs.blas import Kernels, assign, put
from dask_distmm.engines.programs.executor import Executor
from dask_distmm.engines.programs.factor import FactorKernels
from dask_distmm.engines.programs.job import ProgramJob
from dask_distmm.engines.programs.spectral import not_finite
from dask_distmm.engines.tridiagonal import SharedEigh
from dask_distmm.errors import MatrixError
from dask_distmm.layout.redistribute import Copy
from dask_distmm.planning.computation import Output
from dask_distmm.planning.factor.plan import FactorPlacement, FactorPlan
from dask_distmm.planning.factor.problem import TaskOutput
from dask_distmm.programs.steps import Buffer, Call, Make, Store

# One rank's run of its program


# The share of the time that a reduction to a tridiagonal matrix takes, of the eigenvalues that ranks share.
_REDUCTION = 0.8


class Execution(Executor):
    """Runs the program of one rank, on its block columns.

    First the caller writes the rank's columns of the inputs into `held`; then `execute`; then
    `dask_distmm.engines.programs.gathered` has the results.
    """

    kernels: FactorKernels

    def __init__(
        self,
        plan: FactorPlan,
        rank: int,
        kernels: Kernels,
        exchange: RankExchange,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[float], None] = lambda share: None,
        array: Any = None,
    ) -> None:
        self.plan, self.rank, self.columns, self._steps = plan, rank, plan.columns, plan.steps(rank)
        made = FactorKernels(kernels, plan.problem)
        if plan.shared:
            messages = Messages(exchange, check)
            made = SharedEigh(plan, rank, kernels, messages, check, lambda share: progress(_REDUCTION * share))
        super().__init__(made, exchange, check, progress)
        shape = self.columns.rows, self.columns.local_cols(rank)
        self.array = kernels.empty(shape, np.dtype(plan.problem.dtype)) if array is None else array
        self.rows_later: dict[int, NDArray[np.int64]] = {}

    def held(self, matrix: int) -> Any:
        """Return this rank's columns of A (0) or of the second matrix (1), with the rows that this matrix has."""
        rows = self.columns.matrices[matrix].shape[0]
        first, stop = self.columns.first(matrix), self.columns.first(matrix + 1)
        return self.array[:rows, self.columns.local(self.rank, first, stop)]

    @property
    def pivots(self) -> dict[int, tuple[Any, Any]]:
        """For each panel of an LU factorization its pivots, from its first row, and its diagonal."""
        found = {}
        for panel in self.plan.panels:
            if (diagonal := self.arrays.get(f"diagonal.{panel}")) is not None:
                pivots = self.arrays.get(f"pivots.{panel}")
                found[panel] = (self.arrays[f"extra.{panel}"] if pivots is None else pivots), diagonal
        return found

    def execute(self) -> None:
        """Take all steps."""
        before = _REDUCTION if self.plan.shared else 0.0
        self.take(self._steps, before, 1 - before)
        self.kernels.complete()

    def _phase(self, call: Call) -> str:
        return "panel" if call.lane in ("ahead", "panel") else "update"

    def _make(self, step: Make) -> None:
        self.arrays[step.buffer.name] = self.array

    def _new(self, buffer: Buffer) -> Any:
        return self.kernels.empty(buffer.shape, self.array.dtype)

    def _store(self, step: Store) -> None:
        """Leave a result where `dask_distmm.engines.programs.gathered` finds it."""


# The results that a rank holds after its program


# Forms with zeros in the other triangle.
TRIANGLES = ("lower", "unit lower", "upper")


def block_columns(execution: Execution, name: str, out: Any = None) -> Any:
    """Return a rank's part of a result: its block columns side by side, as `FactorPlan.output_layout` has them.

    They are written to `out`, if it is given.
    """
    layout = execution.plan.output_layout(name)
    assert layout is not None
    output = execution.plan.output(name)
    part = out
    if part is None:
        part = execution.kernels.empty(layout.local_shape(execution.rank), np.dtype(output.dtype))
    at, first = 0, execution.columns.first(output.matrix or 0)
    for number in execution.columns.owned(execution.rank, first, first + -(-layout.shape[1] // layout.blocks[1])):
        block = block_column(execution, output, number)
        assign(part[:, at : at + block.shape[1]], block)
        at += block.shape[1]
    return part


def needs_copy(output: TaskOutput, plan: FactorPlan) -> bool:
    """Whether a rank's part of a result is not in its block columns as it is, but for the other triangle.

    Rows of L are swapped by the panels that come after, unless a library has done so; residuals are norms of columns.
    """
    swapped = plan.problem.kind == "lu" and output.form != "upper" and not plan.collective
    return output.form == "residuals" or swapped


def output_part(execution: Execution, name: str, out: Any = None) -> Any:
    """Return a rank's part of a result; its other triangle, if it has one, may hold anything (`triangle_of`)."""
    output, layout = execution.plan.output(name), execution.plan.output_layout(name)
    assert layout is not None
    if needs_copy(output, execution.plan):
        return block_columns(execution, name, out)
    rows, cols = layout.local_shape(execution.rank)
    # A solution may have more rows than the right-hand sides.
    first = execution.columns.first(output.matrix or 0)
    begin = execution.columns.local(execution.rank, first, execution.columns.count).start
    return execution.array[:rows, begin : begin + cols]


def inside(form: str, copies: Iterable[Copy]) -> Iterator[Copy]:
    """Yield the parts of copies that are not wholly outside of a triangle: rows on the diagonal, and the others."""
    for copy in copies:
        first, end = copy.row, copy.row + copy.nrows
        on, off = (min(max(first, column), end) for column in (copy.col, copy.col + copy.ncols))
        kept = {"lower": ((on, off), (off, end)), "upper": ((first, on), (on, off)), "full": ((first, end),)}
        for row, stop in kept[form.removeprefix("unit ") if form in TRIANGLES else "full"]:
            if row < stop:
                skip = row - first
                yield copy._replace(src_row=copy.src_row + skip, dst_row=copy.dst_row + skip, row=row, nrows=stop - row)


def triangle_of(kernels: Kernels, form: str, part: Any, row: int, col: int) -> Any:
    """Return a part of a result with zeros, or ones, in place of what is not in its triangle."""
    rows, cols = part.shape
    lower, xp = form != "upper", kernels.xp
    if form not in TRIANGLES:
        return part
    if (row >= col + cols) if lower else (col >= row + rows):
        return part
    if form == "unit lower":
        return xp.tril(part, row - col - 1) + xp.eye(rows, cols, row - col, dtype=part.dtype)
    return xp.tril(part, row - col) if lower else xp.triu(part, row - col)


def block_column(execution: Execution, output: TaskOutput, number: int) -> Any:
    """Return one block column of a result."""
    kernels, columns = execution.kernels, execution.columns
    _, start, stop = columns.blocks[number]
    rows, cols = output.held
    held = execution.array[:, columns.local(execution.rank, number, number + 1)][:, : cols - start]
    if output.form == "residuals":
        order = execution.plan.problem.a_shape[1]
        return kernels.xp.linalg.norm(held[order : execution.plan.problem.a_shape[0]], axis=0)[None] ** 2
    if output.matrix == 1:
        return held[:rows]
    swapped = execution.plan.problem.kind == "lu" and output.form != "upper"
    block, diagonal = kernels.empty((rows, held.shape[1]), held.dtype), held[start:stop]
    if output.form == "full":
        assign(block[:stop], held[:stop])
    else:
        lower = output.form != "upper"
        assign(block[start:stop], kernels.triangle(diagonal, lower=lower, unit=output.form == "unit lower"))
        if lower:
            assign(block[:start], 0)
        else:
            assign(block[:start], held[:start])
            assign(block[stop:], 0)
            return block
    assign(block[stop:], _rows_at_last(execution, stop, held[stop:rows]) if swapped else held[stop:rows])
    return block


def _rows_at_last(execution: Execution, stop: int, below: Any) -> Any:
    """Return the rows of L below a panel in the order into which the panels after it have swapped theirs."""
    if stop >= execution.columns.place(0).order:
        return below
    if execution.kernels.asynchronous:
        # One swap after the other would take longer on a GPU than picking all rows at once.
        xp = execution.kernels.xp
        return xp.take(below.T, xp.asarray(_rows_later(execution)[stop]), axis=1).T
    found = execution.kernels.empty(below.shape, below.dtype)
    assign(found, below)
    execution.kernels.laswp(found, _pivots(execution)[stop:] - np.int32(stop))
    return found


def _rows_later(execution: Execution) -> dict[int, NDArray[np.int64]]:
    """Return, for the end of each panel of this rank, the order of the rows below it after all later swaps."""
    if not execution.rows_later:
        columns, pivots, then = execution.columns, _pivots(execution), dict[int, NDArray[np.int64]]()
        # Row i is row `rows[i]` of the matrix as it was, which has come to row `places[rows[i]]`. LAPACK swaps numbers.
        rows, places = np.arange(columns.rows, dtype=np.float64), np.empty(columns.rows, np.int64)
        for panel in sorted(execution.pivots):
            start, stop, _ = columns.place(panel)
            if stop > start:
                swapped = scipy.linalg.lapack.dlaswp(rows[start:, None], pivots[start:stop] - start, overwrite_a=True)
                rows[start:] = swapped[:, 0]
            if columns.owner(panel) == execution.rank:
                places[rows.astype(np.int64)] = np.arange(columns.rows)
                then[stop] = places.copy()
        last = rows.astype(np.int64)
        execution.rows_later = {stop: found[last[stop:]] - stop for stop, found in then.items()}
    return execution.rows_later


def whole(execution: Execution, output: TaskOutput) -> Any:
    """Return a result that has no block columns: pivots, a permutation, a determinant, a spectral decomposition.

    The rank is one of `FactorPlan.holders`.
    """
    if output.form == "spectral":
        return execution.arrays[f"result.{output.name}"]
    pivots = _pivots(execution)
    if output.form == "pivots":
        return pivots
    if output.form == "permutation":
        rows = np.arange(output.shape[0], dtype=np.float64)[:, None]
        return np.argsort((scipy.linalg.lapack.dlaswp(rows, pivots) if len(pivots) else rows)[:, 0]).astype(np.int64)
    panels = execution.pivots
    diagonal = np.concatenate(
        [execution.kernels.host(panels[panel][1]) for panel in sorted(panels)] or [np.ones(0, output.dtype)]
    )
    size = abs(diagonal)
    with np.errstate(all="ignore"):
        if output.form == "logdet":
            return np.asarray(np.log(size).sum(dtype=output.dtype))
        if (size == 0).any():
            return np.zeros((), output.dtype)
        odd = np.count_nonzero(pivots != np.arange(len(pivots))) % 2
        factors = diagonal if output.form == "det" else diagonal / size
        return np.asarray(np.prod(factors, dtype=output.dtype) * (-1 if odd else 1), output.dtype)


def _pivots(execution: Execution) -> NDArray[np.int32]:
    """Return all pivots, from 0."""
    panels = execution.pivots
    host = execution.kernels.host
    found = [host(panels[panel][0]) + np.int32(execution.columns.place(panel).start) for panel in sorted(panels)]
    return np.concatenate(found or [np.zeros(0, np.int32)])


# One participant's side of a factorization: operands are gathered, the program runs, outputs are put together


class FactorJob(ProgramJob[FactorPlacement]):
    """One participant's side of one run. See the module's text."""

    def __init__(self, side: Side[FactorPlacement], kernels: Kernels) -> None:
        super().__init__(side)
        self.kernels = kernels
        self._parts: dict[str, NDArray[Any]] = {}
        # Parts of the operands that are to be finite, where they are, and their sums.
        self._sums: list[tuple[str, Copy, Any, Any]] = []
        self._final: Future[None] = Future()
        self._execution: Execution

    def prepare(self) -> None:
        """Allocate this rank's block columns."""
        super().prepare()
        if self.rank is not None:
            self._execution = Execution(
                self.plan.work, self.rank, self.kernels, self.exchange, self.ended.check, self.progress
            )

    def execute(self) -> dict[ResultKey, Any]:
        """Gather the operands, run the program, put the outputs together."""
        if self.rank is None:
            return {}
        with self.kernels.working(self.plan.participants[self.me].nthreads), self.exchange:
            marks = [time.perf_counter()]
            self._gather()
            self._mark(marks)
            self._refuse(self._unfit())
            self.on_gathered()
            self._execution.execute()
            self._mark(marks)
            self._complete_parts()
            made: dict[ResultKey, Any] = {}
            for number, output in enumerate(self.plan.problem.outputs):
                made |= self._assemble(number, output)
            self._mark(marks)
            for name, first, last in zip(("gather", "factor", "deliver"), marks[:-1], marks[1:], strict=True):
                self.timings[name] = last - first
            self.timings |= self._execution.kernels.timings
            queued = self.kernels.asynchronous
            self.timings |= {"compute": self.timings["factor"]} if queued else self._execution.timings
            return made

    def _mark(self, marks: list[float]) -> None:
        """Note the time when all work so far is done."""
        marks.append(time.perf_counter())

    def _put(self, name: str, copy: Copy, part: Any) -> None:
        """Write a part of an operand to its place."""
        task = self.plan.problem.task
        orientation, target = task.orientation(name), self._execution.held(self.plan.problem.operands.index(name))
        put(target, copy, part, orientation.transposed, orientation.conjugated)
        self._note(name, copy)

    def _note(self, name: str, copy: Copy) -> None:
        """Add up a part of an operand that is in its place, if it is to be finite: so is its sum then, or too large."""
        place = self._execution.held(self.plan.problem.operands.index(name))[copy.dst_index]
        if self.plan.problem.task.check_finite and place.dtype.kind in "fc":
            with np.errstate(all="ignore"):
                # CuPy has one block of threads for the sum of all, and one for each column.
                self._sums.append((name, copy, place, place.sum(axis=0).sum()))

    def _unfit(self) -> str:
        """Return what is wrong with the elements of the operands that were read, or nothing."""
        xp, task = self.kernels.xp, self.plan.problem.task
        sums, self._sums = self._sums, []
        good = self.kernels.host(xp.isfinite(xp.stack([total for *_, total in sums]))) if sums else ()
        for (name, copy, place, _), fine in zip(sums, good, strict=True):
            if not fine:
                # The sum may have overflowed, and the other triangle may hold anything.
                below = xp.arange(copy.row, copy.row + copy.nrows)[:, None] - xp.arange(copy.col, copy.col + copy.ncols)
                unit = int(name == "a" and task.unit_diagonal)
                read = {"lower": below >= unit, "upper": -below >= unit}.get(task.read(name), True)
                if self.kernels.host((~xp.isfinite(place) & read).any()):
                    return not_finite(name)
        return ""

    def _refuse(self, problem: str) -> None:
        """Raise if there is a problem with the operands."""
        if problem:
            raise MatrixError(problem)

    def _complete_parts(self) -> None:
        """Complete this rank's parts of the outputs, and let others have them."""
        for output in self.plan.problem.outputs:
            if self.plan.work.output_layout(output.name) is not None:
                self._parts[output.name] = output_part(self._execution, output.name)
        if not self._final.done():
            self._final.set_result(None)

    def _gather(self) -> None:
        """Write this rank's block columns of the operands."""
        for name in self.plan.problem.operands:
            here, asked = self._ask(name)
            for copy, part in here:
                self.ended.check()
                self._put(name, copy, part)
            for copies, answer in asked:
                for copy, part in zip(copies, wait_checked(answer, self.ended.check), strict=True):
                    self._put(name, copy, self.kernels.xp.asarray(part))

    def _ask(
        self, name: str, exchanging: Collection[int] = ()
    ) -> tuple[list[tuple[Copy, Any]], list[tuple[list[Copy], Future[Sequence[Any]]]]]:
        """Return the parts of an operand that are here, and those that others are asked for but do not exchange."""
        assert self.rank is not None
        here: list[tuple[Copy, Any]] = []
        remote: dict[int, list[tuple[Copy, tuple[int, ...]]]] = collections.defaultdict(list)
        number = self.plan.problem.operands.index(name)
        for copy, (index, r0, r1, c0, c1) in self._parts_of(name, self.rank):
            holder = int(self.plan.where[name][index])
            if holder in exchanging:
                continue
            if (chunk := self._chunk(holder, name, index)) is None:
                remote[holder].append((copy, (number, index, r0, r1, c0, c1)))
            else:
                here.append((copy, chunk[r0:r1, c0:c1]))
        asked = []
        for holder, some in remote.items():
            boxes = np.array([box for _, box in some], np.int64)
            asked.append(([copy for copy, _ in some], self.comm.fetch(holder, "input", boxes, False)))
        return here, asked

    def _parts_of(self, name: str, rank: int) -> Iterator[tuple[Copy, tuple[int, int, int, int, int]]]:
        """Yield the parts of an operand that a rank reads: each as a copy, and as a box of a chunk."""
        task, counts = self.plan.problem.task, self.plan.problem.chunk_counts(name)
        for copy in inside(task.read(name), self.plan.gathered(name).for_dst(rank)):
            yield copy, box_of(copy, counts, transposed=task.orientation(name).transposed)

    def _chunk(self, holder: int, name: str, index: int) -> Any:
        """Return a chunk of an operand whose memory this process can read, or None: it has to be fetched."""
        return self.chunks[name, index] if holder == self.me else None

    def _taken_whole(self, output: Output) -> dict[ResultKey, Any]:
        """Return this rank's chunks of an output that has no block columns: ranks that have it have all of it."""
        assert self.rank is not None
        if not (owned := self.plan.owned(output.name, self.rank)):
            return {}
        array = whole(self._execution, self.plan.work.output(output.name)).reshape(tuple(map(sum, output.chunks)))
        rows, cols = (np.cumsum([0, *sizes]) for sizes in output.chunks)
        places = {index: divmod(index, len(output.chunks[1])) for index in owned}
        found: dict[ResultKey, Any] = {}
        for index, (i, j) in places.items():
            part = self.kernels.xp.asarray(array[rows[i] : rows[i + 1], cols[j] : cols[j + 1]])
            order: Literal["C", "F"] = "F" if part.strides[0] < part.strides[-1] else "C"
            found[output.name, index] = self._blank(part.shape, np.dtype(output.dtype), order, "full")
            assign(found[output.name, index], part)
        return found

    def _assemble(self, number: int, output: Output) -> dict[ResultKey, Any]:
        """Return the chunks of an output that this rank puts together."""
        assert self.rank is not None
        if self.plan.work.output_layout(output.name) is None:
            return self._taken_whole(output)
        found = self._blanks(output)
        given: dict[int, list[tuple[int, Copy]]] = collections.defaultdict(list)
        for index, copy in self._taken(output, self.rank):
            given[copy.src].append((index, copy))
        # Not all ranks begin with the same one.
        peers = sorted(given, key=lambda one: (one - (self.rank or 0)) % len(self.plan.ranks))
        asked = [self._ask_part(number, peer, [copy for _, copy in given[peer]]) for peer in peers]
        for peer, answer in zip(peers, asked, strict=True):
            for (index, copy), part in zip(given[peer], answer(), strict=True):
                self._store(output, found[output.name, index], copy, part)
        return found

    def _blanks(self, output: Output) -> dict[ResultKey, Any]:
        """Return new chunks for those of an output that this rank puts together."""
        assert self.rank is not None
        described, (rows, cols) = self.plan.work.output(output.name), output.chunks
        order: Literal["C", "F"] = "C" if described.orientation.transposed else "F"
        places = {index: divmod(index, len(cols)) for index in self.plan.owned(output.name, self.rank)}
        return {
            (output.name, index): self._blank((rows[i], cols[j]), np.dtype(output.dtype), order, described.form)
            for index, (i, j) in places.items()
        }

    def _taken(self, output: Output, rank: int) -> Iterator[tuple[int, Copy]]:
        """Yield the parts of all ranks' block columns that the chunks of an output take on a rank, chunk by chunk."""
        described, (rows, cols) = self.plan.work.output(output.name), output.chunks
        copies = self.plan.delivered(output.name)
        assert copies is not None
        for index in self.plan.owned(output.name, rank):
            i, j = divmod(index, len(cols))
            held = j * len(rows) + i if described.orientation.transposed else index
            yield from ((index, copy) for copy in inside(described.form, copies.for_dst(held)))

    def _store(self, output: Output, chunk: Any, copy: Copy, part: Any) -> None:
        """Write a part of a rank's block columns of an output to its place in a chunk."""
        described = self.plan.work.output(output.name)
        made = triangle_of(self.kernels, described.form, part, copy.row, copy.col)
        put(chunk.T if described.orientation.transposed else chunk, copy, made, False, described.orientation.conjugated)

    def _blank(self, shape: tuple[int, int], dtype: np.dtype, order: Literal["C", "F"], form: str) -> Any:
        """Return a new chunk of an output, with zeros where no rank has a part of it."""
        # Zeros, as the system gives them, are free of charge until they are written to.
        return np.zeros(shape, dtype, order)

    def _ask_part(self, number: int, peer: int, copies: Sequence[Copy]) -> Callable[[], Sequence[Any]]:
        """Ask a rank for what some copies take of its part of an output; return the function that waits for it."""
        rects = [(c.src_row, c.src_row + c.nrows, c.src_col, c.src_col + c.ncols) for c in copies]
        boxes = np.array([(number, peer, *rect) for rect in rects], np.int64)
        if peer == self.rank:
            return lambda: self._boxes(boxes)
        answer = self.comm.fetch(self.plan.ranks[peer], "final", boxes, False)
        return lambda: wait_checked(answer, self.ended.check)

    # For peers

    def available(self, kind: str, boxes: Boxes) -> Future[Any]:
        """Return the future that says when `serve` can answer."""
        return self._final if kind == "final" else super().available(kind, boxes)

    def serve(self, kind: str, boxes: Boxes, flat: bool) -> list[Any]:
        """Return boxes of the chunks that are here, a panel, or boxes of this rank's part of an output."""
        if kind != "final":
            return super().serve(kind, boxes, flat)
        self.ended.check()
        return self._boxes(boxes)

    def _boxes(self, boxes: Boxes) -> list[Any]:
        outputs = self.plan.problem.outputs
        return [self._parts[outputs[m].name][r0:r1, c0:c1] for m, _, r0, r1, c0, c1 in boxes.tolist()]

    # The end

    def abort(self, error: BaseException) -> None:
        """End everything with `error`."""
        super().abort(error)
        if not self._final.done():
            self._final.set_exception(error)


def box_of(copy: Copy, counts: tuple[int, int], *, transposed: bool) -> tuple[int, int, int, int, int]:
    """Return the number of a chunk and a part of it, as it is, for a copy of the form that ranks hold."""
    rows = copy.src_row, copy.src_row + copy.nrows
    cols = copy.src_col, copy.src_col + copy.ncols
    if not transposed:
        return copy.src, *rows, *cols
    j, i = divmod(copy.src, counts[0])
    return i * counts[1] + j, *cols, *rows
