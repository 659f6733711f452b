"""Draw the plots, and write the tables of times, from the recorded benchmarks, ``benchmarks/results/*.json``.

``python docs/make_plots.py`` writes ``docs/pictures/performance-*.svg`` and the tables of the pages `PAGES`; ``--png
FOLDER`` only writes the plots there as PNGs, to look at. Nothing is measured here, and every number comes from a file.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
SHOWN = (
    "batches", "compressed-cpu", "cpu-1024", "cpu-8192", "eigh-gpu-2", "enabled-cpu", "epilogs-cpu", "gpu-2-direct",
    "gpu-4-dask", "gpu-4-peer", "gpu-4-peer-32-64", "lazy-operands-cpu", "linalg-cpu", "linalg-gpu-1-float64",
    "linalg-gpu-2-float64", "linalg-gpu-2-qr", "narrow-gpu-4", "overhead-cpu", "scaling-gpu-4", "spectral-gpu-2",
    "stateful-cpu", "stateful-gpu-4", "streams-2", "svd-gpu-2", "waves-cpu",
)  # fmt: skip
# Of these only tables are made, which tests compare with pages.
LISTED = ("choices-cpu", "projects-cpu")
PAGES = (
    HERE / "performance.md",
    HERE / "index.md",
    HERE.parent / "README.md",
    HERE / "which-function.md",
    HERE / "projects.md",
)
# What a program computes, and the seconds of each way to do it; None where that is not measured or fails.
Times = dict[str, dict[str, float | None]]

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
    """Return a recorded benchmark, one of `SHOWN` and `LISTED`."""
    if name not in (*SHOWN, *LISTED):
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


def result(name: str, **wanted: Any) -> dict[str, Any]:
    """Return the only result of a file that has all of some values."""
    (found,) = measured(load(name)["results"], **wanted)
    return found


def small() -> Times:
    """Return the times of small products by their chunks, on CPUs."""
    found = {(one["peer"], one["grid"]): one["median"] for one in measured(load("cpu-1024")["results"])}
    return {
        f"{grid} x {grid} chunks": {"stock Dask": found["dask", grid], "dask_distmm": found["distmm", grid]}
        for grid in (2, 4, 8, 16)
    }


def tiny() -> Times:
    """Return the times of products so small that they are those of Dask's own work."""
    found = {name: one for name, one in load("overhead-cpu")["seconds"].items() if "chunk" in name}
    return {
        name: {"stock Dask": statistics.median(one["dask"]), "dask_distmm": statistics.median(one["distmm"])}
        for name, one in found.items()
    }


def two_gpus() -> Times:
    """Return the times of products on two GPUs, by size and chunks."""
    found: Times = {}
    for size, dtype in ((8192, "float32"), (16384, "float64")):
        for chunks in ("1 chunk a GPU", "2x2", "4x4", "8x8"):
            times = {
                (one["peer"], one["kind"]): one["ms"] / 1000
                for one in measured(load("gpu-2-direct")["results"], case=f"N={size}", dtype=dtype, variant=chunks)
            }
            found[f"{dtype}, N = {size}, {chunks.replace('x', ' x ')}"] = {
                "stock Dask": times.get(("dask", "wall")),
                "dask_distmm": times["distmm", "wall"],
                "of it the run": times["distmm", "run"],
            }
    return found


def lazy() -> Times:
    """Return the times of products of operands that are not computed yet, and of parts of them."""
    found: Times = {}
    for name, one in load("lazy-operands-cpu")["programs"].items():
        if not name.startswith("small"):
            without, routed = (statistics.median(one[way]) for way in ("without", "with"))
            found[name] = {"stock Dask": without, "dask_distmm": routed}
    return found


def waves() -> Times:
    """Return the times of products that are larger than the memory of two CPU workers."""
    found: Times = {}
    for name, one in load("waves-cpu")["cases"].items():
        case, _, way = name.rpartition(": ")
        if "alone" not in case:
            seconds = one["seconds"] if one["outcome"] == "done" else None
            found.setdefault(case, {})[{"waves": "dask_distmm", "dask": "stock Dask"}.get(way, way)] = seconds
    return {name: {way: one.get(way) for way in ("stock Dask", "cubed", "dask_distmm")} for name, one in found.items()}


_KINDS = {"cholesky": "Cholesky", "lu": "LU", "solve": "solve", "qr": "QR, only R", "gram": "gram"}


def linalg_cpu() -> Times:
    """Return the times of factorizations on CPUs."""
    names = _KINDS | {"tall": "QR of 16 N x N / 16"}
    found = {
        f"{names[one['kind']]}, N = {one['size']}": {
            "SciPy, two threads": one["scipy"], "stock Dask": one["dask"], "dask_distmm": one["wall"],
        }
        for one in measured(load("linalg-cpu")["results"])
    }  # fmt: skip
    one = result("compressed-cpu")
    ways = {"SciPy, two threads": None, "stock Dask": one["dask"], "dask_distmm": one["wall"]}
    return found | {"SVD, leading 10 of 1,000,000 x 1000": ways}


def linalg_gpu() -> Times:
    """Return the times of factorizations on GPUs."""
    found: Times = {}
    for kind, name in _KINDS.items():
        one = result("linalg-gpu-1-float64", size=32768, kind=kind)
        file = "linalg-gpu-2-qr" if kind == "qr" else "linalg-gpu-2-float64"
        two = measured(load(file)["results"], size=32768, kind=kind)
        found[f"{name}, N = 32768"] = {
            "cuSOLVER, one GPU": one["one_gpu"],
            "dask_distmm, one GPU": one["wall"],
            "dask_distmm, two GPUs": two[0]["wall"] if two else None,
        }
    for name, file, kind in (("eigh", "eigh-gpu-2", "eigh"), ("svd", "svd-gpu-2", "svd")):
        alone = result("spectral-gpu-2", size=16384, kind=kind)["one_gpu"]["seconds"]
        shared = result(file, size=16384, kind=kind)["wall"]
        found[f"{name}, N = 16384"] = {
            "cuSOLVER, one GPU": alone, "dask_distmm, one GPU": None, "dask_distmm, two GPUs": shared,
        }  # fmt: skip
    return found


def scaling() -> Times:
    """Return the times of programs and products on one, two and four GPUs."""
    found: Times = {}
    counts = {1: "one GPU", 2: "two GPUs", 4: "four GPUs"}
    for one in load("scaling-gpu-4")["results"]:
        tall = one["size"] > 100_000
        size = f"{one['size'] // one['gpus']:,} x 512 a GPU" if tall else f"N = {one['size']}"
        name = {"cholesky": "Cholesky", "lu": "LU", "qr": "QR, only R"}.get(one["name"], one["name"])
        found.setdefault(f"{name}, {size}", dict.fromkeys(counts.values()))[counts[one["gpus"]]] = one["wall"]
    return found


def short() -> Times:
    """Return the times of the first page."""
    large = {(one["peer"], one["grid"]): one["median"] for one in measured(load("cpu-8192")["results"])}
    stream = result("streams-2")
    rows = {
        "two cores: N = 1024, 2 x 2 chunks": small()["2 x 2 chunks"],
        "two cores: N = 1024, 16 x 16 chunks": small()["16 x 16 chunks"],
        "two cores: N = 8192, 4 x 4 chunks": {"stock Dask": large["dask", 4], "dask_distmm": large["distmm", 4]},
        "two H200: float32, N = 8192, 2 x 2 chunks": two_gpus()["float32, N = 8192, 2 x 2"],
        "two H200: float32, N = 8192, 8 x 8 chunks": two_gpus()["float32, N = 8192, 8 x 8"],
        "two workers of 500 MiB: Gram matrix of 20 GB": waves()["Gram, generated"],
        "two workers of 500 MiB: 2.9 GB times 2.9 GB": waves()["square, to Zarr"],
        "two H200: Gram matrix of 200 GB": {"stock Dask": stream["dask"], "dask_distmm": stream["distmm"]},
        "two cores: solve, N = 4096": linalg_cpu()["solve, N = 4096"],
        "two cores: QR, N = 4096": linalg_cpu()["QR, only R, N = 4096"],
    }
    return {name: {way: one[way] for way in ("stock Dask", "dask_distmm")} for name, one in rows.items()}


def choices(question: str) -> Times:
    """Return the times of functions that answer the same question."""
    found = load("choices-cpu")["seconds"][question]
    ways = "dask_distmm", "one process"
    return {
        name: {way: statistics.median(one[way]) if way in one else None for way in ways} for name, one in found.items()
    }


def projects() -> Times:
    """Return the times of projects, each of three people."""
    people = "stock Dask", "dask_distmm", "one process"
    return {
        SIZES[name]: {one: statistics.median(taken[one]) if one in taken else None for one in people}
        for name, taken in load("projects-cpu")["seconds"].items()
    }


def plain(seconds: float | None) -> str:
    """Return a time in two or three digits."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{1000 * seconds:.{0 if seconds > 0.0095 else 1}f} ms"
    return f"{seconds:.{1 if seconds < 20 else 0}f} s"


def table(times: Times) -> str:
    """Return times as a table of a page."""
    ways = list(next(iter(times.values())))
    lines = [f"| | {' | '.join(ways)} |", f"|---|{'---:|' * len(ways)}"]
    lines += [f"| {name} | {' | '.join(plain(one[way]) for way in ways)} |" for name, one in times.items()]
    return "\n".join(lines) + "\n"


def dots(make: Callable[[], Times]) -> Figure:
    """Draw a table: a row of dots for each of its rows, on a logarithmic axis."""
    times = make()
    ways = list(next(iter(times.values())))
    others = iter((BOUND, "#56B4E9"))
    known = {"stock Dask": DASK, "dask_distmm": OURS, "dask_distmm, two GPUs": OURS, "four GPUs": OURS}
    figure = Figure(figsize=(8.5, 0.9 + 0.21 * len(times)), layout="constrained")
    ax = figure.subplots()
    rows = np.arange(len(times))
    values = np.array([[np.nan if one[way] is None else one[way] for way in ways] for one in times.values()], float)
    ax.hlines(rows, np.nanmin(values, axis=1), np.nanmax(values, axis=1), color="#DDDDDD", lw=3, zorder=1)
    for way, seconds in zip(ways, values.T, strict=True):
        ax.scatter(seconds, rows, s=36, color=known.get(way) or next(others), label=way, zorder=2)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms")
    ax.minorticks_off()
    ax.grid(axis="x", color="#EEEEEE")
    ax.set_axisbelow(True)
    ax.invert_yaxis()
    tidy(ax, yticks=rows, yticklabels=list(times))
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(ways), frameon=False, fontsize=9)
    return figure


def ratios_enabled() -> dict[str, float]:
    """Return by program how many times as fast it is under `enable`, the slowest first."""
    found = {
        name: statistics.median(x for x, _ in one["without"]) / statistics.median(x for x, _ in one["with"])
        for name, one in load("enabled-cpu")["programs"].items()
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def enabled_table() -> str:
    """Return how many programs are faster and slower under `enable`."""
    found = list(ratios_enabled().values())
    faster, slower = sum(x > 1.05 for x in found), sum(x < 0.95 for x in found)
    cells = len(found), faster, len(found) - faster - slower, slower, f"{found[0]:.2f} x", f"{found[-1]:.1f} x"
    heads = "programs", "faster by more than 5 %", "within 5 %", "slower by more than 5 %", "slowest", "fastest"
    rows = " | ".join(heads), "|".join(["---:"] * len(heads)), " | ".join(map(str, cells))
    return "".join(f"| {row} |\n" for row in rows)


def enabled() -> Figure:
    """Draw how many times as fast each program is under `enable`."""
    found = np.array(list(ratios_enabled().values()))
    figure = Figure(figsize=(8.5, 2.6), layout="constrained")
    ax = figure.subplots()
    ax.bar(range(len(found)), found - 1, bottom=1, color=np.where(found >= 1, OURS, DASK), width=0.8)
    ax.axhline(1, color="#222222", lw=0.8)
    ax.set_yscale("log")
    ax.set_yticks([0.9, 1, 2, 5, 10, 20], ["0.9", "1", "2", "5", "10", "20"])
    ax.minorticks_off()
    tidy(ax, xticks=[], xlabel=f"{len(found)} programs, in order", ylabel="times as fast as stock Dask")
    return figure


TIMES: Mapping[str, Callable[[], Times]] = {
    "short": short, "small": small, "tiny": tiny, "lazy": lazy, "waves": waves, "two-gpus": two_gpus,
    "scaling": scaling,
    "linalg-cpu": linalg_cpu, "linalg-gpu": linalg_gpu,
}  # fmt: skip
# Of these there are no plots.
QUESTIONS = {
    f"choices-{name}": name for name in ("equations", "least-squares", "components", "eigenvalues", "products")
}

SIZES = {
    "pca": "10 components of 200,000 x 200",
    "ridge": "ridge regression of 100,000 x 50, 5 folds, 10 penalties",
    "gaussian_process": "a Gaussian process of 3,000 points, with its likelihood",
    "nmf": "non-negative factors of 40,000 x 200, 10 parts, 50 turns",
    "kmeans": "10 clusters of 200,000 x 20, 20 turns",
    "powers": "30 products of 4,000 x 4,000 by a vector, one after the other",
    "network": "50 steps of a network of two layers, 50,000 x 64",
    "fields": "xarray: dot, cov, polyfit of 2,000 times, 600 and 60 places",
    "solves": "banded equations of 500,000, and sparse ones of 90,000",
    "eigenvalues": "all eigenvalues of 1,500 x 1,500",
}


def written(text: str) -> str:
    """Return a page with its tables as the results have them."""

    def replaced(match: re.Match[str]) -> str:
        name = match[2]
        makers = {**TIMES, "projects": projects, **{x: functools.partial(choices, y) for x, y in QUESTIONS.items()}}
        times = makers[name]() if name in makers else None
        found = enabled_table() if times is None else table(times)
        return f"{match[1]}\n{found}\n{match[3]}"

    return re.sub(
        r"(<!-- times of (\S+), made by make_plots.py -->\n).*?(<!-- end of times -->\n)", replaced, text, flags=re.S
    )


PLOTS: Mapping[str, Callable[[], Figure]] = {
    "performance-chunks": chunks,
    "performance-cpu": cpu,
    "performance-gpu-multiply": gpu_multiply,
    "performance-gpu-end-to-end": gpu_end_to_end,
    "performance-narrow": narrow,
    "performance-ratios": ratios,
    "performance-enabled": enabled,
    **{f"performance-{name}": functools.partial(dots, make) for name, make in TIMES.items() if name != "short"},
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
    for page in () if asked.png else PAGES:
        page.write_text(written(page.read_text()))
