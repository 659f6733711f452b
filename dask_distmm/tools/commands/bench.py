"""``dask distmm bench``: square products at common chunk grids, next to Dask's own matmul and NumPy."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dask

from dask_distmm.errors import DistMMError, PlanError
from dask_distmm.installing import install_command
from dask_distmm.planning import Demand
from dask_distmm.planning.engines import ENGINES
from dask_distmm.runtime.client import ask_roster
from dask_distmm.tools.bench import report, suite
from dask_distmm.tools.bench.cluster import DaskMatmul, Distmm, Session
from dask_distmm.tools.bench.numpy_process import NumpyProcess
from dask_distmm.tools.bench.protocol import Peer
from dask_distmm.tools.commands.writing import check_folder
from dask_distmm.tools.local import connected

CPU_SIZES, GPU_SIZES = (1024, 2048, 4096), (4096, 8192, 16384)


def check_plot(path: Path) -> None:
    """Make sure that a plot can be drawn, before minutes are spent on what it would show."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise DistMMError(
            f"--plot needs matplotlib, which can't be imported ({error}): {install_command('plot')}"
        ) from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise PlanError(f"--plot {path}: expected a name that ends in .png, .svg or .pdf")
    check_folder(f"--plot {path}", path.absolute().parent)


def run_bench(
    *,
    scheduler: str | None,
    workers: int | None,
    sizes: Sequence[int] | None,
    grids: Sequence[int],
    dtype: str,
    repeat: int,
    seconds: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measure; return the document, and under "interrupted" whether Ctrl-C has ended it early."""
    seed = secrets.randbits(32)
    # Workers that are stopped while NumPy has its turn send no heartbeats, and must not be given up for that.
    with (
        dask.config.set({"distributed.scheduler.worker-ttl": None, "distmm.minimum-flops": 0, "distmm.enabled": None}),
        connected(scheduler, workers, "bench") as client,
    ):
        roster = ask_roster(client, Demand("auto", "numpy", (dtype, dtype, dtype)))
        assert roster is not None, "the client is synchronous"
        gpus = ENGINES[roster.engines[0]].on_gpus
        sizes = sorted(sizes or (GPU_SIZES if gpus else CPU_SIZES))
        session = Session(client, array="cupy" if gpus else "numpy", here=scheduler is None)
        peers: list[Peer] = [DaskMatmul(session, grids), Distmm(session, grids)]
        # One process here is no measure of other machines, nor of GPUs.
        alone = scheduler is None and not gpus
        if alone:
            peers.insert(0, NumpyProcess(session.workers * session.threads, session.suspended))
        try:
            return suite.measure(
                peers,
                sizes,
                ["numpy", "dask"] if alone else ["dask"],
                dtype=dtype,
                repeat=repeat,
                seed=seed,
                progress=progress,
                seconds=seconds,
                benchmark="bench",
                engine=roster.engines[0],
                settings={
                    "sizes": sizes,
                    "chunks": list(grids),
                    "dtype": dtype,
                    "repeat": repeat,
                    "seed": seed,
                },
            )
        finally:
            for peer in peers:
                peer.close()


def figures_text(found: dict[str, Any]) -> str:
    """Return the document's figures as text."""
    last = found["peers"][-1]["details"]
    cluster = f"{last['workers']} workers of {last['threads_per_worker']} threads, engine {found['engine']}"
    return f"{found['settings']['dtype']} on {cluster}; inputs in memory\n\n{report.figures_table(found)}"


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the speeds."""
    report.plot(found, path)


def failures(found: dict[str, Any]) -> int:
    """Return how many cases failed or were wrong."""
    return sum(entry["failure"] is not None for entry in found["results"])
