"""Strong and weak scaling, of documents that ``python -m benchmarks.gpu --scaling`` has written.

python -m benchmarks.gpu.scaling FILE [FILE ...] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.cases import STRONG

_SHOWN = ("distmm", "cublas", "torch", "jax")


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw TFLOP/s of one GPU over the number of GPUs, each peer at its fastest."""
    from matplotlib.figure import Figure  # A run that draws nothing needs no matplotlib.

    dtypes = sorted({entry["dtype"] for entry in results})
    figure = Figure(figsize=(9.2, 3.9 * len(dtypes) + 0.6), layout="constrained")
    panels = figure.subplots(len(dtypes), 2, squeeze=False)
    counts = sorted({entry["gpus"] for entry in results})
    best = report.fastest(results)
    for (dtype, scaled), axes in zip(itertools.product(dtypes, ("strong", "weak")), panels.flat, strict=True):
        for peer in (name for name in _SHOWN if any(entry["peer"] == name for entry in results)):
            found = best.get((dtype, scaled, peer, "multiply" if peer == "distmm" else "wall"), {})
            at = _SHOWN.index(peer)
            label = {"cublas": "cuBLAS, nothing moved", "distmm": "dask_distmm (multiply)"}.get(peer, peer)
            places = [counts.index(count) for count in sorted(found)]
            rates = [found[count]["tflops"] for count in sorted(found)]
            axes.plot(places, rates, label=label, color=f"C{at}", marker="osD^"[at])
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_title(f"{dtype}, " + (STRONG.name if scaled == "strong" else "10⁹ elements an operand per GPU"))
        axes.set_xlabel("GPUs")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.set_ylabel("TFLOP/s a GPU" if scaled == "strong" else "")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.scaling", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--plot", type=Path, help="draw it too")
    options = parser.parse_args(arguments)
    results = [entry for path in options.files for entry in json.loads(path.read_text())["results"]]
    print(report.scaling(results))
    print("\n" + report.verdict(results))
    if options.plot:
        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
