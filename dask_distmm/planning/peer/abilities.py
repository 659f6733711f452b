"""The abilities of the engine `peer`."""

from __future__ import annotations

from dask.utils import format_bytes

from dask_distmm.numeric.types import takes_on_gpus
from dask_distmm.planning.engines import Abilities
from dask_distmm.planning.peer.access import out_of_reach
from dask_distmm.planning.peer.block_schedule import block_schedules, extent_multiple, independent, native
from dask_distmm.planning.peer.costs import estimate, project
from dask_distmm.planning.peer.streams import streams
from dask_distmm.planning.plan import Plan

# Shares of the rate of a product on one GPU: H200, float64, N = 32768.
_ALONE = {"cholesky": 0.75, "lu": 0.55, "qr": 0.72}
# Panels of 512 columns: two H200, float64, N = 16384 and 32768.
_PANEL_SECONDS = {"cholesky": 1.8e-3, "lu": 3.5e-3, "qr": 6e-3}
# What a column takes in the reduction to a tridiagonal matrix, beside its reads: two H200, float64, N = 16384, 32768.
_COLUMN_SECONDS = 4e-5


def _shares_eigh_from(dtype: str, workers: int) -> int | None:
    """Return from which order on eigenvalues are there sooner than by cuSOLVER on one GPU.

    H200, seconds: two GPUs, float64, N = 8192 0.58 and 0.55, 12288 1.07 and 1.48; float32, 12288 1.02 and 1.08. One,
    N = 16384, float64 2.6 and 3.2; float32 2.3 and 2.1.
    """
    if workers > 1:
        return 12288
    return 16384 if dtype == "float64" else None


def _buffer_line(plan: Plan) -> list[str]:
    """Return the line that tells the stationary and the streamed operand of the rank with the largest buffers."""
    if any(plan.problem.by_ranks):
        most = max(streams(plan), key=lambda one: one.bytes)
        made = " and ".join("AB"[operand] for operand in most.made)
        size, buffers = (format_bytes(n) for n in (most.held_bytes + most.making_bytes, most.buffer_bytes))
        return [f"  makes     chunks of {made}, up to {most.ahead} ahead, {size} at a time; buffers of {buffers}"]
    schedule = max(block_schedules(plan), key=lambda one: one.buffer_bytes)
    names = ("A", "B")[:: -1 if schedule.stationary else 1]
    what = ("rows", "columns")[:: 1 if schedule.stationary else -1]
    parts, depth = len(schedule.parts) - 1, len(schedule.depth) - 1
    cut = f" in {parts} x {depth} parts" if parts * depth > 1 else ""
    lies = " as it is" if schedule.lies[schedule.stationary] and not schedule.stationary_bytes else ""
    padded = "; padded to multiples of 16, which GEMMs are fast with" if extent_multiple(plan.problem) > 1 else ""
    read = "; A and B from host memory" if plan.from_host else ""
    return [
        f"  pulls     {names[0]} held{cut}{lies}, {names[1]} in panels of up to {schedule.width} {what[0]}; "
        f"buffers of {format_bytes(schedule.buffer_bytes)}{padded}{read}"
    ]


PEER = Abilities(
    "peer",
    "dask_distmm.engines.peer.engine",
    takes_on_gpus,
    frozenset(["product", "factorization", "program"]),
    (128, 512),
    decomposes=lambda task: task.shareable,
    panel_seconds=_PANEL_SECONDS,
    share=lambda way, ranks: _ALONE.get(way, 0.0) if ranks == 1 else 0.0,
    shares_eigh_from=_shares_eigh_from,
    column_seconds=_COLUMN_SECONDS,
    on_gpus=True,
    reads_peers=True,
    keeps=True,
    minds_order=True,
    makes=True,
    reads_host=True,
    library="cuBLASLt",
    unfit=out_of_reach,
    project=project,
    estimate=estimate,
    native_epilog=lambda plan: native(plan, block_schedules(plan)),
    independent=independent,
    describe=_buffer_line,
)
