"""The document that the GPU benchmark writes, and its table and plot. Pure: measures nothing, knows no engine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.cases import CLUSTER, STRONG, Case

SCHEMA_VERSION = 1
BOUND = "cublas"
NOTES = {
    "inputs": "standard normal, made on the GPUs, fresh in each case (distmm, dask: in each repetition)",
    "ms": "median of the repetitions after one that does not count; of each repetition the slowest rank's time",
    "tflops": "2 m n k / GPUs / median seconds / 1e12: of one GPU",
    "bound": (
        "cublas: each GPU multiplies its part of m (rows), n (columns) or k (depth) alone, all at the same time; "
        "the fastest of the three is what 'share' refers to"
    ),
    "wall": (
        "distmm, dask: wall-clock seconds from the persist of the product until all its chunks are in memory; "
        "jax: of one call until its result is ready; the others: between two CUDA events, after an all-reduce, with "
        "what Python does before the first kernel"
    ),
    "run": "distmm: the longest run on any worker, from its start to the result's chunks, and what was multiplied "
    "before the start, as the scheduler logs it",
    "multiply": "distmm: of that the library's multiply alone, between two CUDA events: what nvmath and torch are",
    "error": (
        "distmm, dask: largest error in some rows over 16 eps sum |a||b| (and half an ulp of 16-bit types); "
        "others: relative error of D v against A (B v) in the 2-norm"
    ),
    "used_bytes": (
        "largest of all GPUs, taken by anybody: 'before' with empty pools and no arrays, 'after' the first multiply, "
        "with its arrays and all that CuPy's pools had to take for it"
    ),
    "not_run": "jax without the Gram product: its all-reduce might use NVLink multicast",
}
# Of a peer's details, what the table shows.
_SHOWN = ("method", "grid")

_PATH = re.compile(r"(?<![\w/:.])(?:~|\.{1,2})?(?:/[\w.+@-]+){2,}")
_ADDRESS = re.compile(r"\b\w+://[\w.\[\]:-]+")


def clean(value: Any) -> Any:
    """Return a value without paths and addresses of the machine in any of its texts."""
    if isinstance(value, str):
        return _PATH.sub(lambda found: ".../" + found.group().rpartition("/")[2], _ADDRESS.sub("worker", value))
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def rows(case: Case, gpus: int, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the document for one case: one, or three where an engine's own times are known."""
    gpus = case.workers or gpus
    base = {
        "dtype": case.dtype,
        "case": case.shape.name,
        "m": case.shape.m,
        "n": case.shape.n,
        "k": case.shape.k,
        "gpus": gpus,
        "peer": case.peer,
        "variant": case.label,
    }
    if answer.get("failure"):
        return [{**base, "kind": "wall", "failure": clean(str(answer["failure"]))}]
    lists = {"wall": answer["seconds"], "run": answer.get("run_seconds")}
    timings = answer.get("timings") or {}
    lists["multiply"] = timings.get("multiply")
    found = []
    for kind, seconds in lists.items():
        if not seconds:
            continue
        middle = median(seconds)
        entry = {
            **base,
            "kind": kind,
            "failure": None,
            "ms": 1e3 * middle,
            "tflops": case.flops / gpus / middle / 1e12,
            "seconds": list(seconds),
        }
        if kind == "wall":
            entry["details"] = {key: clean(item) for key, item in answer.items() if key not in ("seconds", "failure")}
        elif kind == "run":
            entry["parts_ms"] = {name: 1e3 * median(values) for name, values in timings.items() if values}
        found.append(entry)
    return found


def add_shares(results: Sequence[dict[str, Any]]) -> None:
    """Add to every measured entry its share of the bound of the same product, where that was measured."""
    bounds: dict[tuple[str, str, int], float] = {}
    for entry in results:
        if entry["peer"] == BOUND and entry["kind"] == "wall" and entry["failure"] is None:
            key = entry["dtype"], entry["case"], entry["gpus"]
            bounds[key] = max(bounds.get(key, 0.0), entry["tflops"])
    for entry in results:
        bound = bounds.get((entry["dtype"], entry["case"], entry["gpus"]))
        if entry["failure"] is None:
            entry["share"] = entry["tflops"] / bound if bound else None


def fastest(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str, str], dict[int, Mapping[str, Any]]]:
    """Return the fastest entries by number of GPUs, by type, "strong" or "weak" scaling, peer and kind of time."""
    best: dict[tuple[str, str, str, str], dict[int, Mapping[str, Any]]] = {}
    for entry in results:
        if entry["failure"] is None and entry["kind"] != "run":
            scaled = "strong" if entry["case"] == STRONG.name else "weak"
            found = best.setdefault((entry["dtype"], scaled, entry["peer"], entry["kind"]), {})
            if entry["tflops"] > found.get(entry["gpus"], {"tflops": 0.0})["tflops"]:
                found[entry["gpus"]] = entry
    return best


def scaling(results: Sequence[Mapping[str, Any]]) -> str:
    """Return what each peer makes of several numbers of GPUs, at its fastest, as a text table.

    A cell is TFLOP/s of one GPU, its share of what cuBLAS does on one GPU alone, and of the bound on as many GPUs. Weak
    scaling has a problem of its own for each number, and cuBLAS alone the one for 1.
    """
    best = fastest(results)
    counts = sorted({count for found in best.values() for count in found})
    lines = [f"{'':<40}" + "".join(f"{f'{count} GPUs':>22}" for count in counts)]
    for (dtype, scaled, peer, kind), found in sorted(best.items(), key=lambda item: item[0][:2]):
        alone = best.get((dtype, scaled, BOUND, "wall"), {}).get(1, {}).get("tflops")
        cells = []
        for count in counts:
            rate, share = (found[count]["tflops"], found[count].get("share")) if count in found else (0.0, None)
            shares = ["-" if x is None else f"{100 * x:.1f}%" for x in (rate / alone if alone else None, share)]
            cells.append(" ".join([f"{rate:.1f}", *(f"{text:>6}" for text in shares)]) if rate else "")
        lines.append(f"{dtype:<9}{scaled:<7}{f'{peer} ({kind})':<24}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def verdict(results: Sequence[Mapping[str, Any]]) -> str:
    """Return, of a sweep, how `auto` compares with the best engine and method of each product, by the run's time.

    And how the engine and method that it takes do if they are asked for: what is left is chance.
    """
    groups: dict[tuple[str, ...], dict[str, float]] = {}
    taken: dict[tuple[str, ...], str] = {}
    for entry in results:
        if entry["failure"] is not None or "GPUs" not in entry["variant"].rpartition(", ")[2]:
            continue
        chunks, *method, count = entry["variant"].split(", ")
        product, details = (entry["dtype"], entry["case"], chunks, count), entry.get("details", {})
        if entry["kind"] == "run":
            name = "auto" if entry["peer"] == "distmm" else " ".join([entry["peer"], *method])
            groups.setdefault(product, {})[name] = entry["ms"]
        elif entry["peer"] == "distmm" and "engine" in details:
            taken[product] = f"{details['engine']} {details['method']}"
    lines, worst, same = [], [], []
    for key, found in groups.items():
        others = {name: ms for name, ms in found.items() if name != "auto"}
        if "auto" not in found or not others:
            continue
        best = min(others, key=lambda name: others[name])
        ratio = found["auto"] / others[best]
        worst.append(ratio)
        text = f"{', '.join(key):<60} auto {found['auto']:.2f} ms, best {others[best]:.2f} ms ({best}), {ratio:.3f}"
        if (way := taken.get(key, "")) in others:
            same.append(others[way] / others[best])
            text += f"; it takes {way}, {same[-1]:.3f} if asked for"
        lines.append(text)
    if not worst:
        return ""
    for what, ratios in (("", worst), ("what it takes, if asked for, ", same)):
        if ratios:
            within = sum(ratio <= 1.05 for ratio in ratios)
            text = f"{what}within 5 %: {within} of {len(ratios)}; the worst takes {max(ratios):.3f} of the best"
            lines.append(text)
    return "\n".join(lines)


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write the document; whoever reads it meanwhile sees the last one or this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    os.replace(partial, path)


def line(entry: Mapping[str, Any]) -> str:
    """Return one figure as a line."""
    cells = _cells(entry)
    name = f"{cells[0]:<9}{cells[1]:<19}{cells[2]:<7}{cells[3]:<28}{cells[4]:<9}"
    if entry["failure"]:
        return f"{name}FAILED: {entry['failure']}"
    return f"{name}{cells[5]:>10} ms{cells[6]:>8} TFLOP/s{cells[7]:>7}  {cells[8]}".rstrip()


def _cells(entry: Mapping[str, Any]) -> list[str]:
    name = [entry["dtype"], entry["case"], entry["peer"], entry["variant"], entry["kind"]]
    if entry["failure"]:
        return [*name, "", "", "", f"FAILED: {entry['failure']}"]
    share = entry.get("share")
    details = entry.get("details", {})
    notes = [f"{key} {details[key]}" for key in _SHOWN if details.get(key)]
    notes += [f"{key} {value:.2f}" for key, value in entry.get("parts_ms", {}).items()]
    if entry["peer"] in CLUSTER and details.get("error", 0) > 1:
        notes.append(f"error {details['error']:.3g} times that of one rounded sum")
    if "first_seconds" in details:
        notes.append(f"first of the cluster {1e3 * details['first_seconds']:.0f} ms")
    return [
        *name,
        f"{entry['ms']:.3f}",
        f"{entry['tflops']:.1f}",
        "" if share is None else f"{100 * share:.1f}%",
        ", ".join(notes),
    ]


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """Return all figures as a text table."""
    heads = ["type", "case", "peer", "variant", "time", "ms", "TFLOP/s/GPU", "of bound", ""]
    cells = [heads, *map(_cells, results)]
    # The last column is not aligned.
    widths = [max(len(row[at]) for row in cells) for at in range(len(heads) - 1)]
    lines = []
    for row in cells:
        aligned = [
            text.rjust(width) if 5 <= at <= 7 else text.ljust(width)
            for at, (text, width) in enumerate(zip(row[:-1], widths, strict=True))
        ]
        lines.append("  ".join([*aligned, row[-1]]).rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths)))
    return "\n".join(lines)


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Draw each peer's share of the bound by N, at its fastest variant, with one panel a type."""
    from matplotlib.figure import Figure  # A run that draws nothing needs no matplotlib.

    done = [e for e in document["results"] if e.get("share") and e["peer"] != BOUND and e["m"] == e["n"] == e["k"]]
    if not done:
        raise ValueError(f"nothing to plot: no square product was measured beside {BOUND}")
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in done))
    lines = list(dict.fromkeys((entry["peer"], entry["kind"]) for entry in done if entry["kind"] != "run"))
    peers = list(dict.fromkeys(peer for peer, _ in lines))
    figure = Figure(figsize=(4.6 * len(dtypes) + 0.6, 4.6), layout="constrained")
    panels = figure.subplots(1, len(dtypes), squeeze=False, sharey=True)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        here = [entry for entry in done if entry["dtype"] == dtype]
        sizes = sorted({entry["n"] for entry in here})
        for peer, kind in lines:
            best: dict[int, float] = {}
            for entry in here:
                if (entry["peer"], entry["kind"]) == (peer, kind):
                    best[entry["n"]] = max(best.get(entry["n"], 0.0), 100 * entry["share"])
            at = peers.index(peer)
            axes.plot(
                [sizes.index(size) for size in sorted(best)],
                [best[size] for size in sorted(best)],
                label=peer if kind == "wall" else f"{peer} ({kind})",
                color=f"C{at}",
                marker="osD^vP"[at % 6],
                linestyle="-" if kind == "wall" else "--",
            )
        axes.axhline(100, color="0.6", linewidth=0.8)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_title(dtype)
        axes.set_xlabel("Matrix size N (rows)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("Speed, % of cuBLAS alone on each GPU")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.suptitle(str(document.get("title", "")))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2 * len(dtypes), 4))
    figure.savefig(path, dpi=130)
