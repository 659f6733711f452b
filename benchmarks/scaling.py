"""Programs on 1, 2, 4 GPUs and more: ``python -m benchmarks.scaling --gpus 4 --counts 4 2 1 --out FILE``.

Tall matrices have as many rows on each GPU (weak scaling, with chunks on as many GPUs as compute); square ones are the
same (strong scaling). ``wall`` is the median of some rounds on fresh chunks, from the call until all results are in the
GPUs' memory, ``run`` what of it is the run itself, and ``share`` the run's operations beside cuBLAS' on as many GPUs.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
from distributed import Client, futures_of, wait

from benchmarks.harness import environment
from benchmarks.harness.cluster import started, synchronize
from benchmarks.revision import revision
from dask_distmm import linalg, matmul

ROWS, COLUMNS, CHUNK = 500_000, 512, 125_000
SIZES = 16384, 32768


def gemm_rate(n: int = SIZES[0]) -> float:
    """Return the operations in a second of a product in float64 on one GPU."""
    import cupy

    a, b = (cupy.random.standard_normal((n, n)) for _ in "ab")
    a @ b
    synchronize()
    began = time.perf_counter()
    a @ b
    synchronize()
    return float(2 * n**3 / (time.perf_counter() - began))


class Turn:
    """Measures on some of the workers."""

    def __init__(self, client: Client, workers: list[str], gemm: float, rounds: int) -> None:
        self.client, self.workers, self.gemm, self.rounds = client, workers, gemm, rounds
        self.found: list[dict[str, Any]] = []

    def fresh(self, shape: tuple[int, int], chunks: tuple[int, int], *, positive: bool = False) -> Any:
        """Return random numbers in the memory of these GPUs; if asked the lower triangle is of a positive matrix."""
        import cupy

        random = da.random.RandomState(RandomState=cupy.random.RandomState)
        with dask.annotate(workers=self.workers):
            x = random.standard_normal(shape, chunks=chunks)
            if positive:
                x = x + 8 * shape[0] ** 0.5 * da.eye(shape[0], chunks=chunks[0]).to_backend("cupy")
            x = x.persist(optimize_graph=False)
        wait(x)
        self.client.run(synchronize)
        return x

    def measure(self, name: str, make: Callable[[], tuple[Any, ...]], call: Callable[..., Any], flops: float) -> None:
        """Measure a function of fresh operands."""
        walls, runs, size = [], [], 0
        for _ in range(self.rounds + 1):
            operands = make()
            size, since, began = operands[0].shape[0], time.time(), time.perf_counter()
            made = call(*operands)
            results = dask.persist(*(made if isinstance(made, list | tuple) else [made]))
            wait(results)
            self.client.run(synchronize)
            walls.append(time.perf_counter() - began)
            for future in (future for one in results for future in futures_of(one)):
                if future.status != "finished":
                    raise future.exception()
            events = [event for moment, event in self.client.get_events("distmm") if moment > since]
            runs.append(sum(event["seconds"] for event in events if event["action"] == "done"))
            del operands, made, results
        wall, run = (statistics.median(one[1:]) for one in (walls, runs))
        share = flops / run / self.gemm / len(self.workers)
        self.found.append(
            {"name": name, "gpus": len(self.workers), "size": size, "wall": wall, "run": run, "share": share}
        )
        told = f" {share:.2f} of gemm's rate" if flops else ""
        print(
            f"{name:15} {len(self.workers)} GPUs {size:8} wall {1e3 * wall:7.1f} run {1e3 * run:7.1f} ms{told}",
            flush=True,
        )

    def tall(self, columns: int = COLUMNS) -> Any:
        """Return a tall matrix."""
        return self.fresh((ROWS * len(self.workers), columns), (CHUNK, columns))

    def squares(self, n: int, chunks: int, count: int = 1, *, positive: bool = False) -> tuple[Any, ...]:
        """Return square matrices in this many chunks of rows, and as many of columns."""
        return tuple(self.fresh((n, n), (n // chunks,) * 2, positive=positive) for _ in range(count))

    def all(self) -> None:
        """Measure all functions."""
        some, last = self.workers, SIZES[-1]
        one: list[tuple[str, Callable[..., Any]]] = [
            ("qr, R", lambda a: linalg.qr(a, "r", workers=some)),
            ("qr, Q and R", lambda a: linalg.qr(a, workers=some)),
            ("svd", lambda a: linalg.svd(a, full_matrices=False, workers=some)),
            ("svd_compressed", lambda a: linalg.svd_compressed(a, 10, n_power_iter=1, seed=1, workers=some)),
            ("pca", lambda a: linalg.pca(a, 5, workers=some)),
        ]
        for name, call in one:
            self.measure(name, lambda: (self.tall(),), call, 0)
        both = functools.partial(linalg.lstsq, workers=some)
        self.measure("lstsq", lambda: (self.tall(), self.tall(1)), lambda a, b: both(a, b)[0], 0)
        for n in SIZES:
            pair = functools.partial(self.squares, n, 4, 2)
            self.measure("product", pair, lambda a, b: matmul(a, b, workers=some), 2 * n**3)
        factored: list[tuple[str, Callable[..., Any], float]] = [
            ("cholesky", lambda a: linalg.cholesky(a, lower=True, workers=some), 1 / 3),
            ("lu", lambda a: linalg.lu(a, p_indices=True, workers=some), 2 / 3),
            ("qr", lambda a: linalg.qr(a, "r", workers=some), 4 / 3),
        ]
        for name, call, share in factored:
            make = functools.partial(self.squares, last, 8, positive=name == "cholesky")
            self.measure(name, make, call, share * last**3)
        make = functools.partial(self.squares, SIZES[0], 8, positive=True)
        self.measure("eigh", make, lambda a: linalg.eigh(a, workers=some), 0)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 1], help="numbers of GPUs to compute on")
    parser.add_argument("--protocol", default="tcp", help="of the cluster")
    parser.add_argument("--rounds", type=int, default=3, help="that count, after one that does not")
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args()
    with started(gpu=True, workers=options.gpus, protocol=options.protocol) as client:
        every = sorted(client.scheduler_info(n_workers=-1)["workers"])
        gemm = client.submit(gemm_rate, workers=every[:1]).result()
        found: list[dict[str, Any]] = []
        for count in options.counts:
            turn = Turn(client, every[:count], gemm, options.rounds)
            turn.all()
            found += turn.found
            if options.out:
                software = environment.software("dask", "distributed", "dask_distmm", "cupy-cuda13x", "nvidia-cusolver")
                about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
                about |= {"protocol": options.protocol}
                text = json.dumps({"about": about, "gemm": gemm, "results": found}, indent=1)
                Path(options.out).write_text(f"{text}\n")


if __name__ == "__main__":
    main()
