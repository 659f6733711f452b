"""Linear algebra on GPUs beside cuSOLVER on one of them and cuSOLVERMp on all: who is measured, in which order.

Each peer has its turn alone, in processes of its own, so that it has all of the memory. cuSOLVERMp has the best grid
and block size: at the smallest size each grid is tried with each block size, at the others the best ones of that. What
fails says why, and the next is tried; a hang is ended with its processes when its time is up.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from distributed import Client

from benchmarks.gpu.devices import QUIET, find_gpus
from benchmarks.gpu.solver_jobs import JOBS, SolverCase
from benchmarks.gpu.team import NO_TIME, Crew, Team, describe

PEERS = ("ours", "one_gpu", "cusolvermp")
DISTRIBUTIONS = (
    *("cupy-cuda13x", "nvmath-python", "nccl4py", "nvidia-cusolver", "nvidia-cublas", "nvidia-cublasmp-cu13"),
    *("nvidia-cusolvermp-cu13", "nvidia-nccl-cu13"),
)
# At sizes beyond the smallest one the next best is tried where the best one fails.
_RANKED = 2
# Who takes so many times longer than the best has one turn.
_SLOW = 3.0
# A larger product has the same rate, and takes long.
_LARGEST_GEMM = 32768


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of peers on GPUs."""
    add = parser.add_argument
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="on GPUs: what to measure, in this order")
    add("--blocks", type=int, nargs="+", default=[256, 512, 1024], help="sizes of cuSOLVERMp's blocks to try")
    add("--grids", type=_grid, nargs="+", help="of cuSOLVERMp, such as 1x2; if not given 1 x P, P x 1, near-square")
    add("--tries", type=int, default=2, help="repetitions of each peer but ours; the best counts, the first, too")
    add("--timeout", type=float, default=150.0, help="seconds that a case, or the start of a peer, may take on GPUs")
    add("--seconds", type=float, default=3600.0, help="on GPUs: begin nothing after so long")


def _grid(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    return int(rows), int(cols)


def grids(count: int) -> list[tuple[int, int]]:
    """Return the grids to try: one row, one column, and the one nearest to a square."""
    near = max(rows for rows in range(1, count + 1) if count % rows == 0 and rows * rows <= count)
    return list(dict.fromkeys([(1, count), (count, 1), (near, count // near)]))


class Contender(Protocol):
    """Who can be asked for a routine at some size."""

    def measure(self, kind: str, n: int, dtype: str) -> dict[str, Any]:
        """Return at least the ``seconds``, or the ``failure``."""

    def close(self) -> None:
        """End the processes."""


class OneGpu:
    """cuSOLVER, and gemm, on one GPU."""

    def __init__(self, options: argparse.Namespace, devices: Sequence[str], end: float) -> None:
        def start() -> Team:
            member = "benchmarks.gpu.one_gpu:OneGpu"
            return Team(member, devices, size=1, own=True, options={}, timeout=options.timeout)

        self._tries, self._crew = options.tries, Crew(start, options.timeout, end)
        self._gemm: dict[tuple[int, str], dict[str, Any]] = {}

    def measure(self, kind: str, n: int, dtype: str) -> dict[str, Any]:
        """Return the best time, and gemm's rate at that size, which is measured once."""
        size = min(n, _LARGEST_GEMM)
        if (size, dtype) not in self._gemm:
            self._gemm[size, dtype] = self._asked("gemm", size, dtype)
        gemm, found = self._gemm[size, dtype], self._asked(kind, n, dtype)
        rate = {"gemm_rate": 2.0 * size**3 / gemm["seconds"]} if "seconds" in gemm else {}
        return found | rate

    def _asked(self, kind: str, n: int, dtype: str) -> dict[str, Any]:
        answer = self._crew.ask(SolverCase(kind, n, dtype, (1, 1), n, self._tries, peer="one_gpu"))
        if "failure" in answer:
            return {"failure": answer["failure"]}
        return {"seconds": min(answer["seconds"]), "repetitions": answer["seconds"]}

    def close(self) -> None:
        """End the process."""
        self._crew.close()


class CusolverMp:
    """cuSOLVERMp. Its processes are started for the first case, and again where one has ended them.

    Parameters
    ----------
    options
        What `add_options` has added.
    devices
        What CUDA_VISIBLE_DEVICES calls the GPUs.
    end
        When no case is begun any more (`time.time`).
    start
        Makes the processes, if not one a GPU.
    """

    def __init__(
        self, options: argparse.Namespace, devices: Sequence[str], end: float, start: Callable[[], Any] | None = None
    ) -> None:
        self._options, self._devices = options, devices
        self._crew = Crew(start or self._start, options.timeout, end)
        self._ranked: dict[tuple[str, str], list[tuple[tuple[int, int], int]]] = {}

    def _start(self) -> Team:
        size, member = len(self._devices), "benchmarks.gpu.solver_ranks:SolverRank"
        return Team(member, self._devices, size=size, own=False, options={}, timeout=self._options.timeout)

    def measure(self, kind: str, n: int, dtype: str) -> dict[str, Any]:
        """Return the seconds of the best grid and block, which those are, and all that was tried; or the failure."""
        if kind not in JOBS:
            return {"failure": f"cuSOLVERMp has no {kind}"}
        swept = (kind, dtype) not in self._ranked
        ways = self._every() if swept else self._ranked[kind, dtype]
        if not ways:
            return {"failure": "no grid and block size worked at the smallest size"}
        tried: list[dict[str, Any]] = []
        for grid, block in ways:
            best = min((entry["seconds"] for entry in tried if "seconds" in entry), default=float("inf"))
            tried.append(self._asked(SolverCase(kind, n, dtype, grid, block, self._options.tries, _SLOW * best)))
            if not swept and "seconds" in tried[-1]:
                break
        good = sorted((entry for entry in tried if "seconds" in entry), key=lambda entry: float(entry["seconds"]))
        if swept:
            self._ranked[kind, dtype] = [(entry["grid"], entry["block"]) for entry in good[:_RANKED]]
        if not good:
            return {"failure": tried[-1]["failure"], "tried": tried}
        return good[0] | {"tried": tried}

    def _every(self) -> list[tuple[tuple[int, int], int]]:
        return list(itertools.product(self._options.grids or grids(len(self._devices)), self._options.blocks))

    def _asked(self, case: SolverCase) -> dict[str, Any]:
        answer, way = self._crew.ask(case), {"grid": case.grid, "block": case.block}
        about = f"  cusolvermp {case.kind} {case.n} {case.dtype} grid {case.grid[0]}x{case.grid[1]} block {case.block}:"
        if "failure" in answer:
            print(about, answer["failure"], flush=True)
            return way | {"failure": answer["failure"]}
        times = answer["seconds"]
        print(about, ", ".join(f"{seconds:.4g} s" for seconds in times), f"error {answer['error']:.2g}", flush=True)
        kept = {name: answer[name] for name in ("error", "workspace")}
        return way | {"seconds": min(times), "repetitions": times} | kept

    def close(self) -> None:
        """End the processes."""
        self._crew.close()


class Results:
    """What is known of each kind and size, printed and written at once.

    Parameters
    ----------
    options
        ``size``, ``kinds``, ``dtype`` and ``out`` of the command line.
    about
        What is written beside the results.
    flops
        Operations of a kind at some size, None if they are not told.
    count
        Number of GPUs.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        about: dict[str, Any],
        flops: Callable[[str, int], float] | None = None,
        count: int = 1,
    ) -> None:
        self._options, self._about, self._flops, self._count = options, about, flops, count
        self._known: dict[tuple[str, int], dict[str, Any]] = {}

    def add(self, kind: str, n: int, peer: str, found: dict[str, Any]) -> None:
        """Note what a peer took, or why it did not; entries of ``ours`` are those of the result itself."""
        one = self._known.setdefault((kind, n), {"size": n, "kind": kind, "dtype": self._options.dtype})
        if peer != "ours":
            one[peer] = found
        elif "failure" in found:
            one["failure"] = found["failure"]
        else:
            one |= found
        rate = one.get("one_gpu", {}).get("gemm_rate")
        if self._flops is not None and "run" in one:
            one["gflops"] = self._flops(kind, n) / one["run"] / 1e9
            if rate:
                one["share_of_gemm"] = one["gflops"] * 1e9 / self._count / rate
        texts = [f"{name} {value:.4g}" for name, value in found.items() if isinstance(value, float)]
        texts += [f"grid {found['grid'][0]}x{found['grid'][1]} block {found['block']}"] if "grid" in found else []
        texts += [f"failed: {found['failure']}"] if "failure" in found else []
        texts += [f"share of gemm {one['share_of_gemm']:.3f}"] if "share_of_gemm" in one else []
        print(f"{kind} {n} {self._options.dtype} {peer}:", *texts, flush=True)
        self.write()

    @property
    def known(self) -> list[dict[str, Any]]:
        """What is known of each kind and size."""
        return list(self._known.values())

    def write(self) -> None:
        """Write all that is known to the file, if there is one."""
        if self._options.out is not None:
            report = {"about": self._about, "results": self.known}
            self._options.out.write_text(json.dumps(report, indent=1) + "\n")

    def table(self) -> str:
        """Return a line for each kind and size: the seconds of all peers, and how many times ours theirs are."""
        rows: list[tuple[str, ...]] = [("kind", "N", "ours", "wall", "one_gpu", "cusolvermp", "grid, block", "ratio")]
        for (kind, n), one in self._known.items():
            mp, ours = one.get("cusolvermp", {}), one.get("run", one.get("wall"))
            ratio = f"{mp['seconds'] / ours:.2f}" if "seconds" in mp and ours else ""
            way = f"{mp['grid'][0]}x{mp['grid'][1]}, {mp['block']}" if "grid" in mp else ""
            seconds = (ours, one.get("wall"), one.get("one_gpu", {}).get("seconds"), mp.get("seconds"))
            rows.append((kind, str(n), *("" if x is None else f"{x:.4g}" for x in seconds), way, ratio))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep NVLink multicast off in all processes that are started meanwhile."""
    added = {name: value for name, value in QUIET.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def measure(
    options: argparse.Namespace,
    results: Results,
    cluster: Callable[[], contextlib.AbstractContextManager[Client]],
    ours: Callable[[Client, int, str], dict[str, Any]],
) -> None:
    """Let each peer have its turn, from the smallest size to the largest.

    Parameters
    ----------
    options
        Of the command line.
    results
        Where figures go.
    cluster
        Starts the cluster of our own turn.
    ours
        Returns our own figures: of a client, a size and a kind.
    """
    end, devices = time.time() + options.seconds, find_gpus()[0]
    cases = [(n, kind) for n in sorted(options.size) for kind in options.kinds]

    def own(client: Client, n: int, kind: str) -> dict[str, Any]:
        if time.time() > end:
            return {"failure": NO_TIME}
        try:
            return ours(client, n, kind)
        except Exception as error:
            return {"failure": describe(error)}

    with _quiet():
        for peer in options.peers:
            if peer == "ours":
                with cluster() as client:
                    for n, kind in cases:
                        results.add(kind, n, peer, own(client, n, kind))
                continue
            asked: Contender = (OneGpu if peer == "one_gpu" else CusolverMp)(options, devices, end)
            with contextlib.closing(asked):
                for n, kind in cases:
                    results.add(kind, n, peer, asked.measure(kind, n, options.dtype))
    print("\n" + results.table(), flush=True)
