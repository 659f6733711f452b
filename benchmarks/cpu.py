"""The CPU benchmark: ``python -m benchmarks.cpu``."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report, suite
from benchmarks.harness.protocol import Contender
from benchmarks.revision import revision

PEERS = ("numpy", "pdgemm", "pdgemm-tuned", "dask", "distmm")
# What the others are compared with; the first is also the plot's 100 %.
REFERENCES = ("numpy", "dask", "pdgemm", "pdgemm-tuned")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    add = parser.add_argument
    add("--size", type=_positive, nargs="+", default=[2048, 4096], help="rows of the square factors")
    add("--repeat", type=_positive, default=5, help="timings that count, after one that does not")
    add("--workers", type=_positive, default=2, help="worker processes")
    add("--threads", type=_positive, default=1, help="threads of each worker")
    add("--chunks", type=_positive, nargs="+", default=[2, 4, 8], help="chunks per side")
    add("--dtype", choices=["float32", "float64"], default="float64")
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="what to measure")
    add("--seed", type=int, help="of the random inputs; drawn afresh if not given")
    add("--timeout", type=float, default=600.0, help="seconds that one product may take")
    add("--out", type=Path, help="JSON file to write")
    add("--plot", type=Path, help="image file to draw")
    options = parser.parse_args(arguments)
    if options.plot and REFERENCES[0] not in options.peers:
        parser.error(f"--plot shows shares of {REFERENCES[0]}, which is not among --peers")
    return options


def _positive(text: str) -> int:
    """Return a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def make_peers(options: argparse.Namespace, stack: contextlib.ExitStack) -> list[Contender]:
    """Return the peers asked for; the stack closes them."""
    # Imported here: spawned processes import this module again, and none of them needs the peers.
    from benchmarks.harness.cluster import DaskMatmul, Distmm
    from benchmarks.harness.numpy_process import NumpyProcess
    from benchmarks.peers.pdgemm import Pdgemm
    from benchmarks.session import ClusterSession

    lanes = options.workers * options.threads
    session = ClusterSession(options.workers, options.threads, options.timeout)
    stack.callback(session.close)
    made: dict[str, Contender] = {}
    for name in PEERS:
        if name not in options.peers:
            continue
        if name == "numpy":
            made[name] = NumpyProcess(lanes, session.suspended)
        elif name == "dask":
            made[name] = DaskMatmul(session, options.chunks)
        elif name == "distmm":
            made[name] = Distmm(session, options.chunks)
        else:
            made[name] = Pdgemm(lanes, tuned=name == "pdgemm-tuned", timeout=options.timeout, quiet=session.suspended)
        stack.callback(made[name].close)
    return list(made.values())


def progress(line: str) -> None:
    """Say how far it is; on standard error, as the table goes to standard output."""
    print(line, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the options ask for and return the report."""
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "plot")}
    settings["seed"] = secrets.randbits(32) if options.seed is None else options.seed
    with contextlib.ExitStack() as stack:
        return suite.measure(
            make_peers(options, stack),
            options.size,
            REFERENCES,
            dtype=options.dtype,
            repeat=options.repeat,
            seed=settings["seed"],
            progress=progress,
            benchmark="cpu",
            revision=revision(),
            settings=settings,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a peer failed or was wrong, 130 after Ctrl-C, which writes nothing, 0 otherwise."""
    options = parse(arguments)
    found = measure(options)
    print(report.figures_table(found))
    if found.pop("interrupted"):
        return 130
    for peer in found["peers"]:
        if peer["skipped"]:
            print(f"{peer['name']}: skipped, {peer['skipped']}")
    if options.out:
        report.write(found, options.out)
    if options.plot:
        report.plot(found, options.plot)
    return int(any(entry["failure"] for entry in found["results"]))


if __name__ == "__main__":
    sys.exit(main())
