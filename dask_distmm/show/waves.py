"""Products in waves as text."""

from __future__ import annotations

from dask.utils import format_bytes, format_time

from dask_distmm.planning.waves import WavePlan
from dask_distmm.show.text import WHAT

_HOW = {
    "sums": "D stays in memory and grows, A and B are loaded along k",
    "rows": "B stays in memory, rows of A are loaded, chunks of D leave",
    "cols": "A stays in memory, columns of B are loaded, chunks of D leave",
    "blocks": "block by block of D, A and B are loaded along k for each",
    "host": "block by block of D, A and B are read from host memory for each",
}


def waves_text(made: WavePlan) -> str:
    """Return the text of a product in waves that `explain` prints."""
    problem, scheme = made.problem, made.scheme
    lines = [
        f"Plan: {len(scheme.waves)} waves, since the operands do not fit into memory together",
        f"  A         {problem.m} x {problem.k} {problem.a_dtype}",
        f"  B         {problem.k} x {problem.n} {problem.b_dtype}",
        f"  D         {problem.m} x {problem.n} {problem.dtype}",
        f"  scheme    {scheme.name}: {_HOW[scheme.name]}",
        f"  a wave    {scheme.method}: {WHAT[scheme.method]}",
        *(["  chunks    made by the ranks that multiply them, each a little ahead"] if scheme.by_ranks else []),
        f"  work      {problem.flops:.3g} flops, {format_bytes(scheme.read_bytes)} loaded",
        f"  memory    up to {format_bytes(scheme.peak_bytes)} a worker, of {format_bytes(scheme.budget_bytes)} without "
        "spilling",
        f"  time      {format_time(scheme.seconds)} estimated: {format_time(scheme.read_seconds)} loading beside "
        f"{format_time(scheme.run_seconds)} multiplying; bound by {scheme.binding}",
    ]
    return "\n".join(lines)
