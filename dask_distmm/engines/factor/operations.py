"""How a panel is factorized, and how it changes block columns: in terms of `Kernels`, the same on all devices.

Everything works in place, on all rows of columns of a rank's array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.factor.tall import gram_reflectors
from dask_distmm.planning.factor import DiagonalBlock, Operation

__all__ = ["Factored", "apply", "factor_panel", "update_lower"]

_FORWARD = Operation("substitute", lower=True)


class Factored(NamedTuple):
    """A panel that has been factorized.

    Parameters
    ----------
    extras
        What others need beside the panel itself: the pivots (LU), T (QR) or nothing.
    info
        Of Cholesky, a vector of one integer: 0, or the order of the leading minor of the diagonal block that is not
        positive. None for others.
    """

    extras: tuple[Any, ...]
    info: Any = None


def factor_panel(kernels: Kernels, operation: Operation, place: DiagonalBlock, panel: Any) -> Factored:
    """Factorize a panel in place, from its diagonal block on.

    Parameters
    ----------
    panel
        All rows of its columns.

    """
    start, stop, _ = place
    size, below = stop - start, panel[start:]
    if operation.name == "cholesky":
        info = kernels.potrf(below[:size])
        kernels.trsm(below[:size], below[size:], right=True, lower=True, op="C", unit=False)
        return Factored((), info)
    if operation.name == "lu":
        return Factored((kernels.getrf(below),))
    # cuSOLVER's geqrf of a panel takes longer than its update (1 H200, 32768 x 512: 12 and 10 ms). On CPUs LAPACK's
    # recursive geqrt3 is quicker than the Gram matrix (4096 x 256, float64, one thread: 34 and 62 ms).
    t = gram_reflectors(kernels, below[:, :size]) if kernels.asynchronous else None
    if t is None:
        t = kernels.geqrt(below[:, :size])
    _reflect(kernels, below[:, :size], t, below[:, size:], "C")
    return Factored((t,))


def apply(kernels: Kernels, operation: Operation, place: DiagonalBlock, panel: Sequence[Any], columns: Any) -> None:
    """Apply a panel to columns.

    Parameters
    ----------
    panel
        The arrays that its owner publishes: rows of the panel, and what `factor_panel` returned.
    columns
        All rows of these columns.
    """
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
    """Apply a panel of a Cholesky factorization to block columns of A, in the lower triangle alone.

    Parameters
    ----------
    columns
        All rows of the block columns, which lie side by side.
    blocks
        For each block column, its first column of A and its last + 1.
    """
    rows, at = panel[0], 0
    for first, stop in blocks:
        block, size = columns[:, at : at + stop - first], stop - first
        at += size
        # The rows of the panel begin with its diagonal block.
        beside, below = rows[first - place.start : stop - place.start], rows[stop - place.start :]
        if kernels.asynchronous:
            # One call for the whole block column, and some operations too many in its diagonal block.
            kernels.gemm(rows[first - place.start :], beside, block[first:], "N", "C", alpha=-1, beta=1)
            continue
        kernels.herk(beside, block[first:stop])
        kernels.gemm(below, beside, block[stop:], "N", "C", alpha=-1, beta=1)


def _reflect(kernels: Kernels, panel: Any, t: Any, columns: Any, op: str) -> None:
    """Multiply columns by ``I - V T V^H`` (``op="N"``), or by its conjugate transpose (``"C"``)."""
    size, width = t.shape[0], columns.shape[1]
    if not size or not width:
        return
    # V has ones on its diagonal and zeros above it; R is there in the panel.
    top, rest = kernels.triangle(panel[:size], lower=True, unit=True), panel[size:]
    first = kernels.empty((size, width), columns.dtype)
    kernels.gemm(top, columns[:size], first, "C", alpha=1, beta=0)
    kernels.gemm(rest, columns[size:], first, "C", alpha=1, beta=1)
    second = kernels.empty((size, width), columns.dtype)
    kernels.gemm(t, first, second, op, alpha=1, beta=0)
    kernels.gemm(top, second, columns[:size], alpha=-1, beta=1)
    kernels.gemm(rest, second, columns[size:], alpha=-1, beta=1)


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
