"""Measure all that pages show of CPUs, and draw it: ``python -m benchmarks [NAME ...] [--results FOLDER]``.

An hour on two idle cores; names of results choose some of them. Each command also stands in ``benchmarks/README.md``.
With another folder than ``benchmarks/results`` nothing is drawn.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# By the names of results: the module that measures them, and its options before the file.
COMMANDS = {
    "cpu-1024": "cpu --size 1024 --repeat 7 --peers numpy dask distmm --chunks 2 4 8 16 --out",
    "cpu-8192": "cpu --size 8192 --repeat 5 --out",
    "overhead-cpu": "overhead --json",
    "enabled-cpu": "enabled --json",
    "lazy-operands-cpu": "lazy_operands --json",
    "linalg-cpu": "linalg --size 4096 8192 --out",
    "epilogs-cpu": "epilogs --out",
    "stateful-cpu": "stateful --out",
    "batches": "batches --out",
    "choices-cpu": "choices --json",
    "projects-cpu": "projects --json",
}


def main() -> int:
    """Run from the command line; return how many commands failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    if unknown := set(options.names) - set(COMMANDS):
        parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {', '.join(COMMANDS)}")
    options.results.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.names or COMMANDS:
        module, *given = COMMANDS[name].split()
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{module}",
            *given,
            str(options.results.resolve() / f"{name}.json"),
        ]
        print(" ".join(command), flush=True)
        failed += subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    if options.results.resolve() == RESULTS and not failed:
        subprocess.run([sys.executable, str(ROOT / "docs" / "make_plots.py")], check=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
