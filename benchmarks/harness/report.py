"""The document that a benchmark writes, and its table and plot. Pure: measures nothing, knows no engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.protocol import Sample
from benchmarks.harness.runner import Measured

SCHEMA_VERSION = 1
NOTES = {
    "timing": "wall-clock seconds of the product alone; inputs are fresh and random each time, not timed",
    "order": "round robin over all cases within a round; round 0 warms up and does not count",
    "gflops": "2 N^3 / median seconds / 1e9",
    "ratios": (
        "median seconds of the reference / median seconds of the case: above 1 the case is faster. "
        "'name@best' is the reference at its fastest grid, 'name@GxG' at G by G chunks"
    ),
    "error": "largest error in the sampled rows against NumPy over n*eps*|row|*|column|; right at most 1",
}


def grid_label(grid: int | None) -> str:
    """Return how a chunk grid is written."""
    return "-" if grid is None else f"{grid}x{grid}"


def case_entry(measured: Measured) -> dict[str, Any]:
    """Return one case's entry of the document."""
    entry: dict[str, Any] = {
        "peer": measured.peer,
        "size": measured.case.size,
        "dtype": measured.case.dtype,
        "grid": measured.case.grid,
        "failure": measured.failure,
        "seconds": [sample.seconds for sample in measured.samples],
        "warmup_seconds": measured.warmup.seconds if measured.warmup else None,
        "warmup_details": measured.warmup.details if measured.warmup else None,
        "details": [sample.details for sample in measured.samples],
    }
    if measured.samples:
        middle = median(entry["seconds"])
        entry |= {
            "median": middle,
            "min": min(entry["seconds"]),
            "max": max(entry["seconds"]),
            "gflops": 2 * measured.case.size**3 / middle / 1e9,
            "error": max(sample.error for sample in measured.samples),
            "memory": memory_summary(measured.samples),
        }
    return entry


def memory_summary(samples: Iterable[Sample]) -> dict[str, Any] | None:
    """Return the largest growth of any worker in any round; None where no memory was measured."""
    readings = [reading for sample in samples for reading in sample.details.get("memory", {}).values() if reading]
    if not readings:
        return None
    ratios = [reading["ratio"] for reading in readings if reading["ratio"] is not None]
    return {
        "total_bytes_max": max(reading["total_bytes"] for reading in readings),
        "growth_bytes_max": max(reading["growth_bytes"] for reading in readings),
        "ratio_max": max(ratios, default=None),
        "ratio_median": median(ratios) if ratios else None,
    }


def add_ratios(results: list[dict[str, Any]], references: Sequence[str]) -> None:
    """Add to every measured entry its ratios to the references at the same size."""
    done = [entry for entry in results if "median" in entry]
    for entry in done:
        ratios: dict[str, float] = {}
        for name in references:
            others = [one for one in done if (one["peer"], one["size"]) == (name, entry["size"])]
            labelled = {
                name if one["grid"] is None else f"{name}@{grid_label(one['grid'])}": one["median"] for one in others
            }
            if any(one["grid"] is not None for one in others):
                labelled = {f"{name}@best": min(labelled.values()), **labelled}
            ratios |= {label: seconds / entry["median"] for label, seconds in labelled.items()}
        entry["ratios"] = ratios


def document(measured: Iterable[Measured], references: Sequence[str], **context: Any) -> dict[str, Any]:
    """Return the whole document; the first of the references is the one that plots compare with."""
    results = [case_entry(one) for one in measured]
    add_ratios(results, references)
    return {
        "schema_version": SCHEMA_VERSION,
        **context,
        "notes": NOTES,
        "references": list(references),
        "results": results,
    }


def write(report: dict[str, Any], path: Path) -> None:
    """Write the document; a NaN, which JSON has not, is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def figures_table(report: dict[str, Any]) -> str:
    """Return the document's figures as a text table."""
    results = report["results"]
    labels: dict[str, None] = {}
    for entry in results:
        labels |= dict.fromkeys(entry.get("ratios", {}))
    # Of a reference's grids the table shows the fastest and the finest; the document has them all.
    finest = {label.partition("@")[0]: label for label in labels if "@" in label}
    shown = [label for label in labels if "@" not in label or "@best" in label or label in finest.values()]
    rows = [["N", "peer", "chunks", "median s", "min", "max", "GFLOP/s"]]
    rows[0] += [f"x {label}" for label in shown] + ["peak MiB", "/projected"]
    for entry in results:
        row = [str(entry["size"]), entry["peer"], grid_label(entry["grid"])]
        if "median" in entry:
            row += [f"{entry[key]:.4f}" for key in ("median", "min", "max")] + [f"{entry['gflops']:.1f}"]
            row += [f"{entry['ratios'][label]:.2f}" if label in entry["ratios"] else "" for label in shown]
            memory = entry["memory"] or {}
            row.append(f"{memory['total_bytes_max'] / 2**20:.0f}" if memory else "")
            row.append(f"{memory['ratio_max']:.2f}" if memory.get("ratio_max") else "")
        if entry["failure"]:
            row = [*row[:3], *row[3:7], f"FAILED: {entry['failure']}"]
        rows.append(row)
    columns = max(len(row) for row in rows if "FAILED" not in row[-1])
    widths = [
        max(len(row[at]) for row in rows if at < len(row) and not row[at].startswith("FAILED")) for at in range(columns)
    ]
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[at]) if at in (1, 2) else cell.rjust(widths[at]) for at, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * len(lines[0]))
    if shown:
        lines.append("x NAME: how many times as fast as NAME. /projected: largest measured over projected.")
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw each peer's share of the first reference's speed, by size and by chunk grid."""
    from matplotlib.figure import Figure  # A run that draws nothing needs no matplotlib.

    name = report["references"][0]
    known = {label for entry in report["results"] for label in entry.get("ratios", {})}
    # A peer with chunks is compared with at its fastest.
    reference = name if name in known else f"{name}@best"
    done = [entry for entry in report["results"] if reference in entry.get("ratios", {})]
    if not done:
        raise ValueError(f"nothing to plot: no case was measured beside {name}")
    peers = list(dict.fromkeys(entry["peer"] for entry in done))
    sizes = sorted({entry["size"] for entry in done})
    grids = sorted({entry["grid"] for entry in done if entry["grid"] is not None})
    panels = [name for name, values in (("size", sizes), ("grid", grids)) if len(values) > 1] or ["size"]
    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        values = sizes if panel == "size" else grids
        for at, peer in enumerate(peers):
            points = [entry for entry in done if entry["peer"] == peer]
            if panel == "size":
                chosen = [_fastest(points, size) for size in sizes]
            else:
                # A peer without chunks is level over all grids.
                largest = [entry for entry in points if entry["size"] == sizes[-1]]
                chosen = [next((one for one in largest if one["grid"] in (grid, None)), None) for grid in grids]
            drawn = [(x, entry) for x, entry in enumerate(chosen) if entry is not None]
            _line(axes, drawn, reference, peer, f"C{at}", "osD^vP"[at % 6])
        axes.set_xticks(range(len(values)), [grid_label(value) if panel == "grid" else str(value) for value in values])
        axes.set_ylabel(f"Speed, % of {name}" + (" at its best" if name != reference else ""))
        axes.set_xlabel("Matrix size N (rows)" if panel == "size" else "Chunk grid (chunks per side)")
        axes.set_title("Each at its fastest chunk grid" if panel == "size" else f"By chunk grid, N = {sizes[-1]}")
        axes.set_xlim(-0.3, len(values) - 0.7)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    # One legend below all panels, where it hides no line.
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(peers))
    figure.savefig(path, dpi=130)


def _fastest(points: list[dict[str, Any]], size: int) -> dict[str, Any] | None:
    """Return the fastest entry of a size; None if there is none."""
    return min((one for one in points if one["size"] == size), key=lambda one: one["median"], default=None)


def _line(axes: Any, drawn: list[tuple[int, dict[str, Any]]], reference: str, *style: str) -> None:
    """Draw one peer's line; the bars span its fastest to its slowest round."""
    share = [100 * entry["ratios"][reference] for _, entry in drawn]
    # The quotients first: none is on the wrong side of 1, so no bar is negative by rounding, which matplotlib refuses.
    low = [y - y * (entry["median"] / entry["max"]) for y, (_, entry) in zip(share, drawn, strict=True)]
    high = [y * (entry["median"] / entry["min"]) - y for y, (_, entry) in zip(share, drawn, strict=True)]
    label, color, marker = style
    axes.errorbar([x for x, _ in drawn], share, [low, high], label=label, color=color, marker=marker, capsize=3)
