"""Batches and groups of products against stock Dask: ``python -m benchmarks.batches``."""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, wait

from benchmarks.harness import environment
from benchmarks.harness.protocol import scaled_error
from benchmarks.harness.runner import fresh_seed
from benchmarks.revision import revision

Pairs = list[tuple[da.Array, da.Array]]


@dataclass(frozen=True)
class Case:
    """Products to compute.

    Attributes
    ----------
    name
        What it is called in the report.
    shapes
        Shapes of A and B for each product; one of three dimensions is a batch.
    chunks
        Chunks of A and B for each.
    """

    name: str
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def flops(self) -> float:
        """Operations of all products."""
        return sum(2.0 * np.prod(a) * b[-1] for a, b in self.shapes)


def batch(count: int, size: int, items: int, chunk: int) -> Case:
    """Return a batch of square products: so many items a chunk, whose matrices are cut to `chunk`."""
    name = f"{count} x {size}^2, chunks {items} x {chunk}^2"
    return Case(name, (((count, size, size),) * 2,), (((items, chunk, chunk),) * 2,))


def group(name: str, sizes: Iterable[tuple[int, int, int]], chunk: int) -> Case:
    """Return products of several shapes (m, n, k) in chunks of up to `chunk` rows and columns."""
    shapes = tuple(((m, k), (k, n)) for m, n, k in sizes)
    chunks = tuple(tuple((min(chunk, r), min(chunk, c)) for r, c in pair) for pair in shapes)
    return Case(name, shapes, chunks)  # type: ignore[arg-type]


def cases(smoke: bool) -> list[Case]:
    """Return what is measured."""
    if smoke:
        return [
            batch(16, 32, 4, 32),
            batch(2, 128, 1, 64),
            group("group of 3", [(64, 32, 16), (96, 96, 96), (8, 8, 8)], 64),
        ]
    mixed = [(1536, 1536, 1536), *[(768, 512, 1024)] * 4, *[(256, 256, 256)] * 16, *[(64, 96, 128)] * 40]
    return [
        batch(256, 128, 16, 128),
        batch(256, 128, 1, 128),
        batch(2000, 64, 125, 64),
        batch(2000, 64, 4, 64),
        batch(4, 2048, 1, 512),
        batch(4, 2048, 1, 2048),
        batch(3, 2048, 1, 512),
        group("group of 61, 64 to 1536", mixed, 512),
        group("group of 9, 512 and 3072", [(3072, 3072, 3072), *[(512, 512, 512)] * 8], 768),
    ]


def distmm(pairs: Pairs) -> list[da.Array]:
    """Return the products by dask_distmm."""
    import dask_distmm

    if pairs[0][0].ndim > 2:
        return [dask_distmm.matmul(a, b) for a, b in pairs]
    return dask_distmm.matmul_grouped(pairs)


def stock(pairs: Pairs) -> list[da.Array]:
    """Return the products by Dask's own function."""
    found = [a @ b for a, b in pairs]
    # A plugin that someone's configuration enables would otherwise be compared with itself.
    if any("distmm" in str(layer) or "matmul-items" in str(layer) for one in found for layer in one.dask.layers):
        raise RuntimeError("dask_distmm has taken over A @ B: this would not measure stock Dask")
    return found


PEERS: dict[str, Callable[[Pairs], list[da.Array]]] = {"dask": stock, "distmm": distmm}


def inputs(client: Client, case: Case, seed: int) -> Pairs:
    """Return fresh random operands, persisted."""
    rng = da.random.default_rng(np.random.default_rng(seed).integers(2**63))
    pairs = [
        tuple(rng.random(shape, chunks=cut) - 0.5 for shape, cut in zip(shapes, cuts, strict=True))
        for shapes, cuts in zip(case.shapes, case.chunks, strict=True)
    ]
    held = client.persist([x for pair in pairs for x in pair])
    wait(held)
    return list(zip(held[::2], held[1::2], strict=True))


def error_of(client: Client, pairs: Pairs, products: Sequence[da.Array]) -> float:
    """Return the largest scaled error of some items or of some rows of some products."""
    worst = 0.0
    rng = np.random.default_rng()
    for number in rng.choice(len(pairs), size=min(4, len(pairs)), replace=False):
        (a, b), d = pairs[number], products[number]
        if a.ndim > 2:
            item = int(rng.integers(a.shape[0]))
            a, b, d = a[item], b[item], d[item]
        rows = np.sort(rng.choice(a.shape[0], size=min(8, a.shape[0]), replace=False))
        found = client.compute([a[rows], b, d[rows]], sync=True)
        worst = max(worst, scaled_error(*found))
    return worst


def once(client: Client, case: Case, peer: str, seed: int) -> tuple[float, float, float]:
    """Return seconds to build the lazy products, seconds until they are in memory, and the scaled error."""
    pairs = inputs(client, case, seed)
    started = time.perf_counter()
    lazy = PEERS[peer](pairs)
    built = time.perf_counter()
    products = client.persist(lazy)
    wait(products)
    done = time.perf_counter()
    error = error_of(client, pairs, products)
    # A NaN is not at most 1 either.
    if not error <= 1:
        raise ArithmeticError(f"{peer} on {case.name}: {error:.3g} times the rounding error that is possible")
    return built - started, done - built, error


def described(client: Client, case: Case, seed: int) -> str:
    """Return what dask_distmm chose."""
    import dask_distmm

    pairs = inputs(client, case, seed)
    made: Any = dask_distmm.explain(*pairs[0]) if pairs[0][0].ndim > 2 else dask_distmm.explain_grouped(pairs)
    return repr(made).partition("\n  each run")[0].partition("\n  0 ")[0]


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return what a report says of some timings."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": list(values)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything: in each round each peer once on fresh inputs, in turns; round 0 does not count."""
    from benchmarks.session import ClusterSession

    load, began = environment.load_average(), datetime.now(UTC)
    session = ClusterSession(options.workers, 1)
    results = []
    try:
        for number, case in enumerate(cases(options.smoke)):
            taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in PEERS}
            plan = described(session.client, case, fresh_seed(options.seed, number))
            for turn in range(options.repeat + 1):
                names = list(PEERS) if turn % 2 else list(PEERS)[::-1]
                for at, name in enumerate(names):
                    found = once(session.client, case, name, fresh_seed(options.seed, number, turn, at))
                    session.wait_until_empty()
                    if turn:
                        taken[name].append(found)
            entry: dict[str, Any] = {"case": case.name, "flops": case.flops, "plan": plan}
            for name, samples in taken.items():
                entry[name] = {
                    "seconds": summary([run for _, run, _ in samples]),
                    "with_build_seconds": summary([build + run for build, run, _ in samples]),
                    "error": max(error for _, _, error in samples),
                }
            for key in ("seconds", "with_build_seconds"):
                entry[f"ratio_{key}"] = entry["dask"][key]["median"] / entry["distmm"][key]["median"]
            results.append(entry)
            print(line(entry), flush=True)
    finally:
        session.close()
    return {
        "benchmark": "batches",
        "date": began.isoformat(timespec="seconds"),
        "duration_seconds": (datetime.now(UTC) - began).total_seconds(),
        "revision": revision(),
        "settings": {
            "seed": options.seed,
            "repeat": options.repeat,
            "workers": options.workers,
            "smoke": options.smoke,
        },
        "hardware": {
            **environment.hardware(),
            "load_average_before": load,
            "load_average_after": environment.load_average(),
        },
        "software": environment.software("numpy", "dask", "distributed", "dask_distmm"),
        "notes": "float64. ratio: median seconds of stock Dask over those of dask_distmm; above 1 that is faster.",
        "results": results,
    }


def line(entry: dict[str, Any]) -> str:
    """Return a result as a line of text."""
    seconds = [f"{entry[name]['seconds']['median']:.3f}" for name in PEERS]
    return (
        f"{entry['case']:<34} dask {seconds[0]} s, distmm {seconds[1]} s: {entry['ratio_seconds']:.2f} times as fast "
        f"({entry['ratio_with_build_seconds']:.2f} with building the graph); {entry['plan'].splitlines()[0]}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches", description=__doc__)
    add = parser.add_argument
    add("--repeat", type=int, default=7, help="timings that count, after one that does not")
    add("--workers", type=int, default=2, help="worker processes of one thread")
    add("--seed", type=int, default=None, help="of the random inputs; drawn afresh if not given")
    add("--smoke", action="store_true", help="tiny cases, to see that it works")
    add("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    options.seed = secrets.randbits(32) if options.seed is None else options.seed
    found = measure(options)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
