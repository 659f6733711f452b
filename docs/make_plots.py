"""Draw the plots of ``performance.md`` from the recorded benchmarks, ``benchmarks/results/*.json``.

``python docs/make_plots.py`` writes ``docs/pictures/performance-*.svg``; ``--png FOLDER`` writes PNGs there instead, to
look at. Nothing is measured here, and every number comes from a file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
SHOWN = (
    "batches", "cpu-1024", "cpu-8192", "epilogs-cpu", "gpu-2-direct", "gpu-4-dask", "gpu-4-peer", "gpu-4-peer-32-64",
    "narrow-gpu-4", "stateful-cpu", "stateful-gpu-4",
)  # fmt: skip

# Okabe and Ito's colours; ours is blue in every plot, stock Dask orange, a bound grey.
OURS, DASK, BOUND = "#0072B2", "#E69F00", "#999999"
COLORS = {
    "cublas": BOUND, "distmm": OURS, "cublasmp": "#56B4E9", "torch": "#009E73", "nvmath": "#CC79A7", "jax": "#D55E00",
}  # fmt: skip
NAMES = {
    "cublas": "cuBLAS alone: the bound",
    "distmm": "dask_distmm",
    "cublasmp": 'dask_distmm, engine="cublasmp"',
    "torch": "torch symm_mem",
    "nvmath": "nvmath",
    "jax": "jax.jit, sharded",
}


def digest() -> str:
    """Return what tells whether plots were drawn from the results as they are. It is stored in every plot."""
    found = hashlib.sha256()
    for name in SHOWN:
        found.update((RESULTS / f"{name}.json").read_bytes())
    return found.hexdigest()[:16]


def load(name: str) -> dict[str, Any]:
    """Return a recorded benchmark, one of `SHOWN`."""
    if name not in SHOWN:
        raise ValueError(f"{name} is not in SHOWN, so that nobody would notice if it changed")
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def measured(results: Iterable[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the results that have all of some values, and did not fail."""
    return [
        one
        for one in results
        if not one.get("failure") and all(one.get(name) == value for name, value in wanted.items())
    ]


def fastest(results: Iterable[dict[str, Any]], **wanted: Any) -> float | None:
    """Return the largest TFLOP/s among some results; None where there is none."""
    return max((one["tflops"] for one in measured(results, **wanted)), default=None)


def tidy(ax: Axes, **settings: Any) -> None:
    """Take the frame off, and set labels."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.title.set_size(10)
    ax.set(**settings)


def cpu() -> Figure:
    """Draw the seconds of one product on CPUs, by peer and chunks."""
    names = {"numpy": "NumPy, two threads", "distmm": "dask_distmm", "dask": "stock Dask", "pdgemm": "ScaLAPACK pdgemm"}
    found = sorted(measured(load("cpu-8192")["results"]), key=lambda one: one["median"])
    grids = [f", {one['grid']} x {one['grid']} chunks" if one["grid"] else "" for one in found]
    labels = [names[one["peer"]] + grid for one, grid in zip(found, grids, strict=True)]
    median = np.array([one["median"] for one in found])
    spread = np.array([[one["median"] - one["min"], one["max"] - one["median"]] for one in found]).T
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    ax = figure.subplots()
    color = [{"distmm": OURS, "dask": DASK}.get(one["peer"], BOUND) for one in found]
    ax.barh(labels, median, xerr=spread, color=color, error_kw={"lw": 1, "capsize": 2})
    for row, (value, end) in enumerate(zip(median, spread[1], strict=True)):
        ax.text(value + end + 0.3, row, f"{value:.1f}", va="center", size=9)
    ax.invert_yaxis()
    tidy(ax, xlabel="seconds, median of five with fastest and slowest", title="8192 x 8192, float64, two cores")
    return figure


def chunks() -> Figure:
    """Draw the time of a product by its chunks, on CPUs and on two GPUs: the picture of the first page."""
    small = {(one["peer"], one["grid"]): 1000 * one["median"] for one in measured(load("cpu-1024")["results"])}
    large = {
        (one["peer"], int(one["variant"][0])): one["ms"]
        for one in measured(load("gpu-2-direct")["results"], case="N=8192", dtype="float32", kind="wall")
        if "x" in one["variant"]
    }
    panels = [
        ("CPU: two cores, 1024 x 1024, float64", (2, 4, 8, 16), small),
        ("GPU: two H200 over UCX, 8192 x 8192, float32", (2, 4, 8), large),
    ]
    figure = Figure(figsize=(8.5, 3), layout="constrained")
    for ax, (title, grids, found) in zip(figure.subplots(1, 2), panels, strict=True):
        for peer, label, color, style in (("dask", "stock Dask", DASK, "s-"), ("distmm", "dask_distmm", OURS, "o-")):
            times = [found[peer, grid] for grid in grids]
            ax.plot(times, style, color=color, label=label)
            for place, value in enumerate(times):
                above = 7 if peer == "dask" else -14
                ax.annotate(f"{value:,.0f}", (place, value), (0, above), textcoords="offset points", ha="center")
        names = [f"{grid} x {grid}" for grid in grids]
        tidy(ax, title=title, xticks=range(len(grids)), xticklabels=names, xlabel="chunks of A and B")
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.margins(x=0.1, y=0.2)
        ax.minorticks_off()
    figure.axes[0].set_ylabel("milliseconds")
    figure.axes[0].legend(frameon=False, fontsize=9)
    return figure


def gpu_multiply() -> Figure:
    """Draw the speed of the multiply alone on four GPUs, next to others."""
    panels = [("gpu-4-peer", "bfloat16"), ("gpu-4-peer-32-64", "float32"), ("gpu-4-peer-32-64", "float64")]
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    for ax, (file, dtype) in zip(figure.subplots(1, 3), panels, strict=True):
        results = load(file)["results"]
        sizes = sorted({one["n"] for one in measured(results, dtype=dtype) if one["case"].startswith("N=")})
        peers = [peer for peer in NAMES if measured(results, dtype=dtype, peer=peer)]
        width = 0.85 / len(peers)
        for number, peer in enumerate(peers):
            kind = "multiply" if peer in ("distmm", "cublasmp") else "wall"
            speeds = [fastest(results, dtype=dtype, peer=peer, kind=kind, case=f"N={size}") for size in sizes]
            heights = [np.nan if speed is None else speed for speed in speeds]
            places = np.arange(len(sizes)) + width * (number - (len(peers) - 1) / 2)
            ax.bar(places, heights, 0.94 * width, color=COLORS[peer], label=NAMES[peer])
        tidy(ax, title=dtype, xlabel="N", xticks=range(len(sizes)), xticklabels=sizes)
    figure.axes[0].set_ylabel("TFLOP/s a GPU")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def gpu_end_to_end() -> Figure:
    """Draw the time around the multiply on four GPUs, by chunks."""
    results = load("gpu-4-dask")["results"]
    grids = ["1 chunk a GPU", "2x2", "4x4", "8x8", "16x16"]
    lines = [
        ("distmm", "wall", "dask_distmm, end to end", OURS, "o-"),
        ("distmm", "run", "its run alone", OURS, "o:"),
        ("dask", "wall", "stock Dask", DASK, "s-"),
    ]
    figure = Figure(figsize=(8.5, 3.2), layout="constrained")
    for ax, size in zip(figure.subplots(1, 2), (16384, 32768), strict=True):
        for peer, kind, label, color, style in lines:
            found = {one["variant"]: one["ms"] for one in measured(results, peer=peer, kind=kind, case=f"N={size}")}
            ax.plot([found.get(grid, np.nan) for grid in grids], style, color=color, label=label, ms=4)
        bound = min(one["ms"] for one in measured(results, peer="cublas", case=f"N={size}"))
        ax.axhline(bound, color=BOUND, lw=1, ls="--", label="cuBLAS alone: the bound")
        labels = ["one\na GPU", "2 x 2", "4 x 4", "8 x 8", "16 x 16"]
        tidy(ax, title=f"N = {size}, float64", xticks=range(5), xticklabels=labels, xlabel="chunks of A and B")
        ax.set_yscale("log")
        ticks = [tick for tick in (50, 100, 200, 500, 1000, 2000, 4000) if tick > bound]
        ax.set_yticks(ticks, map(str, ticks))
        ax.minorticks_off()
    figure.axes[0].set_ylabel("milliseconds")
    figure.axes[0].legend(frameon=False, fontsize=9)
    return figure


def narrow() -> Figure:
    """Draw the speed of the library's call for each compute type on four GPUs."""
    names = {
        "float64": "float64",
        "float64, emulated": 'float64, "fp64_emulated"',
        "float32": "float32",
        "float32, bf16x9": 'float32, "bf16x9"',
        "float32, tf32": 'float32, "tf32"',
        "bfloat16": "bfloat16",
        "float8_e4m3": "FP8 (E4M3)",
    }
    found = {one["way"]: one for one in load("narrow-gpu-4")["results"] if one["n"] == 16384}
    speeds = [2 * 16384**3 / found[way]["median"]["multiply"] / 4 / 1e12 for way in names]
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    ax = figure.subplots()
    bars = ax.barh(list(names.values()), speeds, color=OURS)
    ax.bar_label(bars, [f"{speed:.0f}" for speed in speeds], padding=3, size=9)
    ax.invert_yaxis()
    tidy(ax, title="The library's call, N = 16384, four H200", xlabel="TFLOP/s a GPU")
    return figure


def ratios() -> Figure:
    """Draw how many times as fast epilogs, `Matmul` and batches are, next to what they replace."""
    epilogs = [
        (f"{one['epilog']}, N = {one['n']}, {one['chunks']} x {one['chunks']} chunks", one["separate_over_fused"])
        for one in load("epilogs-cpu")["results"]
    ]
    stateful = [
        (f"N = {one['size']}, {where}", one["stateless"]["median"] / one["execute"]["median"])
        for name, where in (("stateful-cpu", "CPUs"), ("stateful-gpu-4", "four GPUs"))
        for one in load(name)["results"]
    ]
    batches = [(one["case"], one["ratio_seconds"]) for one in load("batches")["results"]]
    panels: list[tuple[str, Sequence[tuple[str, float]]]] = [
        ("An epilog in the run, against Dask's operations after the run", epilogs),
        ("execute() of a Matmul, against matmul", stateful),
        ("Batches and groups, against stock Dask", batches),
    ]
    figure = Figure(figsize=(8, 6), layout="constrained")
    heights = [len(rows) + 1 for _, rows in panels]
    axes = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    for ax, (title, rows) in zip(axes, panels, strict=True):
        values = np.array([value for _, value in rows])
        ax.barh([name for name, _ in rows], values - 1, left=1, color=np.where(values >= 1, OURS, DASK))
        for row, value in enumerate(values):
            ax.text(max(1, value) + 0.03, row, f"{value:.2f}", va="center", size=8)
        ax.axvline(1, color="#222222", lw=0.8)
        ax.tick_params(axis="y", labelsize=8)
        ax.invert_yaxis()
        tidy(ax, xlim=(0.7, 3.3))
        ax.set_title(title, size=10, loc="left")
    axes[-1].set_xlabel("times as fast (medians)")
    return figure


PLOTS = {
    "performance-chunks": chunks,
    "performance-cpu": cpu,
    "performance-gpu-multiply": gpu_multiply,
    "performance-gpu-end-to-end": gpu_end_to_end,
    "performance-narrow": narrow,
    "performance-ratios": ratios,
}


def draw(folder: Path, suffix: str = "svg") -> list[Path]:
    """Write all plots to a folder; return their paths."""
    style = {"font.size": 9, "svg.hashsalt": "dask_distmm", "svg.fonttype": "none"}
    paths = []
    for name, plot in PLOTS.items():
        with mpl.rc_context(style):
            path = folder / f"{name}.{suffix}"
            metadata = {"Date": None, "Creator": None, "Source": f"results {digest()}"} if suffix == "svg" else None
            plot().savefig(path, dpi=110, metadata=metadata)
        paths.append(path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, help="write PNGs into this folder instead")
    asked = parser.parse_args()
    if asked.png:
        asked.png.mkdir(parents=True, exist_ok=True)
    for made in draw(asked.png or HERE / "pictures", "png" if asked.png else "svg"):
        print(made)
