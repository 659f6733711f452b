"""How a panel is factorized, and how it changes block columns: in terms of `Kernels`, the same on all devices.

Everything works in place, on all rows of columns of a rank's array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dask_distmm.engines.factor.copies import assign
from dask_distmm.engines.factor.gram import gram_reflectors
from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.planning.factor.steps import DiagonalBlock, Operation

_FORWARD = Operation("substitute", lower=True)
# One GEMM of several block columns has a higher rate than one of each (1 H200, float64, 16384 rows, a panel of 512
# columns: of 512, 1024 and 4096 columns 37, 41 and 46 TFLOP/s). It computes elements above the diagonal, too: at most
# this share of the others.
_BESIDE = 1 / 12
# Rows that one GEMM adds up at a time. One block of a GEMM that adds up 32768 rows takes 1 ms, and the small kernels of
# a panel wait for it one by one (1 H200, a QR panel of 32768 x 512: alone 7 ms, beside that 31, beside parts 19; the
# parts take 6 % more).
_DEPTH, _WIDE = 4096, 2048
# Operations, for each column of a panel, of an update that takes no longer than what the other ranks wait for
# meanwhile: the next panel, alone, and its way to them (1 H200, 512 columns: 1.3, 2.7 and 4.5 ms).
_SHORT = {"cholesky": 1.3e8, "lu": 2.7e8, "qr": 4.5e8}


class Factored(NamedTuple):
    """A panel that has been factorized."""

    # What others need beside the panel itself: the pivots (LU), T (QR), or `info` where calls are asynchronous and
    # the panel goes to others before it is read (Cholesky).
    extras: tuple[Any, ...]
    # Of Cholesky, a vector of one integer: 0, or the order of the leading minor of the diagonal block that is not
    # positive. None for others.
    info: Any = None


def factor_panel(kernels: Kernels, operation: Operation, place: DiagonalBlock, panel: Any) -> Factored:
    """Factorize a panel in place, from its diagonal block on."""
    start, stop, _ = place
    size, below = stop - start, panel[start:]
    if operation.name == "cholesky":
        info = kernels.potrf(below[:size])
        kernels.trsm(below[:size], below[size:], right=True, lower=True, op="C", unit=False)
        return Factored((info,) if kernels.asynchronous else (), info)
    if operation.name == "lu":
        return Factored((kernels.getrf(below),))
    # cuSOLVER's geqrf of a panel takes longer than its update (1 H200, 32768 x 512: 12 and 10 ms). On CPUs LAPACK's
    # recursive geqrt3 is faster than the Gram matrix (4096 x 256, float64, one thread: 34 and 62 ms).
    t = gram_reflectors(kernels, below[:, :size]) if kernels.asynchronous else None
    if t is None:
        t = kernels.geqrt(below[:, :size])
    _reflect(kernels, below[:, :size], t, below[:, size:], "C")
    return Factored((t,))


def apply(kernels: Kernels, operation: Operation, place: DiagonalBlock, panel: Sequence[Any], columns: Any) -> None:
    """Apply a panel to columns."""
    start, stop, order = place
    size = stop - start
    rows = panel[0][:, :size]
    if operation.name == "lu":
        kernels.laswp(columns[start:], panel[1])
        kernels.trsm(rows[:size], columns[start:stop], right=False, lower=True, op="N", unit=True)
        kernels.gemm(rows[size:], columns[start:stop], columns[stop:], alpha=-1, beta=1)
    elif operation.name in ("qr", "reflect"):
        _reflect(kernels, rows, panel[1], columns[start:], "C" if operation.name == "qr" else "N")
    else:
        # The right-hand sides of a Cholesky factorization go forward with it.
        forward = _FORWARD if operation.name == "cholesky" else operation
        _substitute(kernels, forward, place, rows, columns[:order])


def update_lower(
    kernels: Kernels, place: DiagonalBlock, panel: Sequence[Any], columns: Any, blocks: Sequence[tuple[int, int]]
) -> None:
    """Apply a panel of a Cholesky factorization to block columns of A, only in the lower triangle."""
    rows, at = panel[0], 0
    if not blocks:
        return
    if kernels.asynchronous:
        # Calls cost time, too: one for several block columns, and some operations too many around the diagonal.
        beside = _rows_of(kernels, rows, place.start, blocks)
        for group in _grouped(blocks, place.start + len(rows)):
            first, width = group[0][0], sum(stop - start for start, stop in group)
            block, own = columns[first:, at : at + width], beside[at : at + width]
            kernels.gemm(rows[first - place.start :], own, block, "N", "C", alpha=-1, beta=1)
            at += width
        return
    for first, stop in blocks:
        block, size = columns[:, at : at + stop - first], stop - first
        at += size
        # The rows of the panel begin with its diagonal block.
        beside, below = rows[first - place.start : stop - place.start], rows[stop - place.start :]
        kernels.herk(beside, block[first:stop])
        kernels.gemm(below, beside, block[stop:], "N", "C", alpha=-1, beta=1)


def _grouped(blocks: Sequence[tuple[int, int]], end: int) -> list[list[tuple[int, int]]]:
    """Return block columns of a lower triangle in groups: rows from the first one's diagonal block to `end`."""
    found: list[list[tuple[int, int]]] = []
    for block in blocks:
        group = [*found[-1], block] if found else [block]
        above = sum((first - group[0][0]) * (stop - first) for first, stop in group)
        if found and above <= _BESIDE * sum((end - first) * (stop - first) for first, stop in group):
            found[-1].append(block)
        else:
            found.append([block])
    return found


def _rows_of(kernels: Kernels, rows: Any, start: int, blocks: Sequence[tuple[int, int]]) -> Any:
    """Return those rows of a panel that are the columns of some blocks, one below the other."""
    (first, stop), count, depth = blocks[0], len(blocks), rows.shape[1]
    if count == 1:
        return rows[first - start : stop - start]
    width, distance = stop - first, blocks[1][0] - first
    found = kernels.empty((sum(stop - first for first, stop in blocks), depth), rows.dtype)
    whole = count if blocks[-1][1] - blocks[-1][0] == width else count - 1
    strided = kernels.xp.lib.stride_tricks.as_strided
    # Columns first, so that the elements that lie side by side are copied together.
    to, by = found.strides, rows.strides
    given = strided(rows[first - start :].T, (depth, whole, width), (by[1], distance * by[0], by[0]))
    strided(found.T, (depth, whole, width), (to[1], width * to[0], to[0]))[...] = given
    if whole < count:
        assign(found[whole * width :], rows[blocks[-1][0] - start : blocks[-1][1] - start])
    return found


def is_short(name: str, rows: int, columns: int) -> bool:
    """Whether an update by a panel takes no longer than the panel after it, alone.

    Then a device gains nothing from doing both at once, as others wait for the panel, which takes twice as long so.
    """
    each = {"cholesky": 1, "lu": 2, "qr": 4}[name]
    return each * rows * columns < _SHORT[name]


def _reflect(kernels: Kernels, panel: Any, t: Any, columns: Any, op: str) -> None:
    """Multiply columns by ``I - V T V^H`` (``op="N"``), or by its conjugate transpose (``"C"``)."""
    size, width = t.shape[0], columns.shape[1]
    if not size or not width:
        return
    # V has ones on its diagonal and zeros above it; R is there in the panel.
    top, rest = kernels.triangle(panel[:size], lower=True, unit=True), panel[size:]
    first = kernels.empty((size, width), columns.dtype)
    kernels.gemm(top, columns[:size], first, "C", alpha=1, beta=0)
    below = columns[size:]
    depth = _DEPTH if kernels.asynchronous and width >= _WIDE else max(1, len(rest))
    for at in range(0, len(rest), depth):
        kernels.gemm(rest[at : at + depth], below[at : at + depth], first, "C", alpha=1, beta=1)
    second = kernels.empty((size, width), columns.dtype)
    kernels.gemm(t, first, second, op, alpha=1, beta=0)
    kernels.gemm(top, second, columns[:size], alpha=-1, beta=1)
    kernels.gemm(rest, second, below, alpha=-1, beta=1)


def _substitute(kernels: Kernels, operation: Operation, place: DiagonalBlock, rows: Any, columns: Any) -> None:
    """Solve for the unknowns of a panel: one block row of ``op(A) X = B``, in place.

    With A itself the solution is then taken out of the equations that are left. Of its transpose the panel is a block
    row: the solutions that are there are taken out of it first.
    """
    start, stop, order = place
    lower, op, unit = operation.lower, operation.op, operation.unit
    if lower:
        block, others, left = rows[: stop - start], rows[stop - start : order - start], columns[stop:order]
    else:
        block, others, left = rows[start:], rows[:start], columns[:start]
    here = columns[start:stop]
    if op != "N":
        kernels.gemm(others, left, here, op, alpha=-1, beta=1)
    kernels.trsm(block, here, right=False, lower=lower, op=op, unit=unit)
    if op == "N":
        kernels.gemm(others, here, left, alpha=-1, beta=1)
