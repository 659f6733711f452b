"""The results that a rank holds after its program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from dask_distmm.engines.factor.copies import assign
from dask_distmm.engines.factor.execution import Execution
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.layout.redistribute import Copy
from dask_distmm.planning.factor import FactorPlan, TaskOutput

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
        # So many swaps, one after the other, take longer on a GPU than to pick all rows at once.
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
        return execution.decomposed[output.name]
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
