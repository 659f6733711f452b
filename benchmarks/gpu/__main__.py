"""The GPU benchmark's command: ``python -m benchmarks.gpu``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.cases import CLUSTER, ENGINES, PEERS, VARIANTS, Case, cases, scaling, sweep
from benchmarks.gpu.devices import QUIET, find_gpus
from benchmarks.gpu.team import NO_TIME, Crew, Team, describe, in_rounds
from benchmarks.harness import environment
from benchmarks.revision import revision

DISTRIBUTIONS = (
    *("numpy", "dask", "distributed", "dask_distmm", "dask-cuda", "distributed-ucxx-cu13", "ucxx-cu13", "rmm-cu13"),
    *("cupy-cuda13x", "nvmath-python", "nccl4py", "nvidia-cublasmp-cu13", "nvidia-nccl-cu13", "nvidia-cublas"),
    *("nvidia-cuda-runtime", "torch", "jax", "jaxlib"),
)
MEMBERS = {
    "cublas": "benchmarks.gpu.ranks:Cublas",
    "nvmath": "benchmarks.gpu.ranks:NvMath",
    "torch": "benchmarks.gpu.ranks:TorchFused",
    "jax": "benchmarks.gpu.mesh:Jax",
    "cluster": "benchmarks.gpu.clusters:Cluster",
}
# Peers with a process for each GPU, and those of them that see no other GPU.
RANKS, ALONE = ("cublas", "nvmath", "torch"), ("cublas", "nvmath")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--gpus", type=int, help="how many; all that are visible if not given")
    add("--sizes", type=int, nargs="+", default=[8192, 16384, 32768], help="rows of the square factors")
    add("--types", nargs="+", default=["bfloat16", "float64", "float32"], choices=["bfloat16", "float64", "float32"])
    add("--repeat", type=int, default=7, help="timings that count, after one that does not")
    add("--chunks", type=int, nargs="+", default=[2, 4, 8, 16], help="chunks per side, on the cluster")
    add("--peers", nargs="+", default=list(PEERS), choices=PEERS, help="what to measure, in this order")
    add("--tall", action="store_true", help="also a Gram product and a short and wide one, in float64")
    add("--sweep", action="store_true", help="also many shapes and numbers of GPUs, by each engine and method")
    add("--shapes", nargs="+", default=[""], help="of the sweep, by how their names begin; all if not given")
    add("--scaling", action="store_true", help="instead of all else strong and weak scaling over numbers of GPUs")
    add("--rounds", type=int, default=3, help="in which the cases of one product take turns, if swept or scaled")
    add("--counts", type=int, nargs="+", default=[2, 4], help="numbers of GPUs of the sweep, and to scale over")
    add("--protocol", default="ucx", help="of the cluster")
    add("--rmm-pool-size", help="of the cluster's workers, for CuPy too; none if not given")
    add("--seconds", type=float, default=1800.0, help="begin no case after so long")
    add("--timeout", type=float, default=120.0, help="seconds that a case, or the start of a peer, may take")
    add("--out", type=Path, help="JSON file; benchmarks/results/gpu-N.json for N GPUs if not given")
    options = parser.parse_args(arguments)
    if min(options.repeat, options.rounds, *options.sizes, *options.chunks, *options.counts) < 1:
        parser.error("--repeat, --rounds, --sizes, --chunks and --counts must be positive")
    return options


class Benchmark:
    """Asks each peer's team case by case, and writes all that is known after each.

    Parameters
    ----------
    options
        Of the command line, `gpus` and `out` set.
    devices
        What CUDA_VISIBLE_DEVICES calls the GPUs.
    document
        What is to be written beside the results.
    """

    def __init__(self, options: argparse.Namespace, devices: Sequence[str], document: dict[str, Any]) -> None:
        self.options, self.devices, self.document = options, list(devices), document
        self.began = time.time()
        self.results: list[dict[str, Any]] = []
        self.document |= {"peers": {}, "results": self.results}

    def run(self) -> None:
        """Measure everything that was asked for."""
        options = self.options
        groups = dict.fromkeys("cluster" if peer in CLUSTER else peer for peer in options.peers)
        counts = [count for count in options.counts if count <= options.gpus]
        for group in groups:
            peers = [peer for peer in options.peers if peer == group or (group == "cluster" and peer in CLUSTER)]
            if options.scaling:
                self._scale(group, peers, counts)
                continue
            with contextlib.closing(self._crew(group)) as crew:
                for case in (case for peer in peers for case in self._cases(peer)):
                    self._add(case, crew.ask(case))
        if options.sweep:
            with contextlib.closing(self._crew("cluster")) as crew:
                swept = sweep(options.types, options.chunks, counts, options.repeat, options.shapes)
                self._by_turns(crew, swept)

    def _scale(self, group: str, peers: Sequence[str], counts: Sequence[int]) -> None:
        """Measure strong and weak scaling: on the workers of one cluster, or by a team for each number of GPUs."""
        options = self.options
        found = [x for count in counts for peer in peers for x in scaling(peer, options.types, count, options.repeat)]
        if group != "cluster":
            for count, cases in itertools.groupby(found, lambda case: case.workers):
                with contextlib.closing(self._crew(group, count)) as crew:
                    for case in cases:
                        self._add(case, crew.ask(case))
            return
        with contextlib.closing(self._crew(group)) as crew:
            self._by_turns(crew, sorted(found, key=lambda case: (case.workers, case.dtype, case.shape.n)))

    def _by_turns(self, crew: Crew, every: Iterable[Case]) -> None:
        """Measure cases of which those of one product, on as many GPUs, follow each other."""
        for _, found in itertools.groupby(every, lambda case: dataclasses.replace(case, peer="", method="")):
            for case, answer in in_rounds(list(found), crew.ask, self.options.rounds):
                self._add(case, answer)

    def _cases(self, peer: str) -> Iterator[Case]:
        options = self.options
        return cases(peer, options.types, options.sizes, options.chunks, options.repeat, tall=options.tall)

    def _crew(self, group: str, gpus: int = 0) -> Crew:
        gpus = gpus or self.options.gpus
        return Crew(lambda: self._start(group, gpus), self.options.timeout, self.began + self.options.seconds)

    def _start(self, group: str, gpus: int) -> Team:
        """Start a team."""
        say(f"# {group} on {gpus} GPUs: starting, {time.time() - self.began:.0f} s after the beginning")
        devices = self.devices[:gpus]
        options = {
            "gpus": gpus,
            "devices": devices,
            "protocol": self.options.protocol,
            "rmm_pool_size": self.options.rmm_pool_size,
        }
        team = Team(
            MEMBERS[group],
            devices,
            size=gpus if group in RANKS else 1,
            own=group in ALONE,
            options=options,
            timeout=self.options.timeout,
        )
        self.document["peers"][group] = report.clean(team.info)
        return team

    def _add(self, case: Case, answer: dict[str, Any]) -> None:
        """Keep, say and write what became of a case."""
        try:
            found = report.rows(case, self.options.gpus, answer)
        except Exception as error:
            found = report.rows(case, self.options.gpus, {"failure": f"answer not understood: {describe(error)}"})
        self.results += found
        report.add_shares(self.results)
        for entry in found:
            say(report.line(entry))
        self.document["duration_seconds"] = round(time.time() - self.began, 1)
        report.write(self.document, self.options.out)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if dask_distmm failed or was wrong, 0 otherwise."""
    options = parse(arguments)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    names, gpu = find_gpus()
    options.gpus = options.gpus or len(names)
    if not 1 <= options.gpus <= len(names):
        say(f"{options.gpus} GPUs are wanted, {len(names)} were found")
        return 2
    options.out = options.out or Path("benchmarks/results") / f"gpu-{options.gpus}.json"
    kept = ("NCCL_", "UCX_", "CUBLASMP_", "NVSHMEM_", "TORCH_", "XLA_", "DASK_")
    document = {
        "schema_version": report.SCHEMA_VERSION,
        "benchmark": "gpu",
        "title": f"{options.gpus} x {gpu.get('name', 'GPU')}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision(),
        "settings": {key: value for key, value in vars(options).items() if key != "out"},
        "environment": report.clean({key: value for key, value in os.environ.items() if key.startswith(kept)}),
        "hardware": {**environment.hardware(), "gpus": options.gpus, "gpu": gpu},
        "software": environment.software(*DISTRIBUTIONS),
        "notes": report.NOTES,
        "variants": VARIANTS,
    }
    benchmark = Benchmark(options, names[: options.gpus], document)
    benchmark.run()
    say("\n" + report.table(benchmark.results))
    say("\n" + report.verdict(benchmark.results))
    if options.scaling:
        say("\n" + report.scaling(benchmark.results))
    try:
        report.plot(document, options.out.with_suffix(".png"))
    except (ImportError, ValueError) as error:
        say(f"no plot: {error}")
    failed = [e["failure"] for e in benchmark.results if e["peer"] in ENGINES and e["failure"]]
    return int(any(failure != NO_TIME for failure in failed))


if __name__ == "__main__":
    sys.exit(main())
