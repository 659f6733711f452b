"""A benchmark from its peers to its document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.harness import environment, report, runner
from benchmarks.harness.protocol import Contender


def measure(
    peers: Sequence[Contender],
    sizes: Sequence[int],
    references: Sequence[str],
    *,
    dtype: str,
    repeat: int,
    seed: int,
    progress: Callable[[str], None],
    seconds: float = float("inf"),
    **context: Any,
) -> dict[str, Any]:
    """Measure all peers that run here, and return the document of it, also of what there is after Ctrl-C."""
    began, load = datetime.now(UTC), environment.load_average()
    reasons = {peer.name: peer.unavailable() for peer in peers}
    for name, reason in reasons.items():
        if reason:
            progress(f"{name} skipped: {reason}")
    measured: list[runner.Measured] = []
    interrupted = False
    try:
        runner.measure_all(
            [peer for peer in peers if not reasons[peer.name]],
            sizes,
            dtype=dtype,
            repeat=repeat,
            seed=seed,
            progress=progress,
            seconds=seconds,
            into=measured,
        )
    except KeyboardInterrupt:
        measured = [one for one in measured if one.samples]
        if not measured:
            raise
        interrupted = True
    described = [
        {"name": peer.name, "skipped": reasons[peer.name], "details": None if reasons[peer.name] else peer.describe()}
        for peer in peers
    ]
    return report.document(
        measured,
        references,
        date=began.isoformat(timespec="seconds"),
        duration_seconds=(datetime.now(UTC) - began).total_seconds(),
        hardware={
            **environment.hardware(),
            "load_average_before": load,
            "load_average_after": environment.load_average(),
        },
        software={
            **environment.software("numpy", "dask", "distributed", "dask_distmm"),
            "blas": environment.blas_pools(),
        },
        peers=described,
        interrupted=interrupted,
        **context,
    )
