"""What ``enable()`` does to programs: many products with and without it, by turns, in seconds and in memory.

    python -m benchmarks.enabled [--workers 2] [--scale 1] [--repeat 3] [--only NAME ...] [--json FILE]

The programs are small, skinny, with fine and coarse chunks, lazy and persisted, parts of products and chains. Of each
the medians of both ways are taken, and the largest growth of a worker's memory over all turns of a way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask.array as da
from distributed import Client, LocalCluster, wait

import dask_distmm
from benchmarks.harness import environment
from benchmarks.revision import revision

Program = Callable[[], Any]
# A program may be so much slower, and take so much more memory, before that is told.
_SLOWER, _MORE = 1.05, 1.2


def matrix(rows: int, cols: int, chunks: Any, *, lazy: bool = False) -> da.Array:
    """Return a random matrix."""
    x = da.random.random((rows, cols), chunks=chunks)
    if not lazy:
        x = x.persist()
        wait(x)
    return x


def programs(scale: float) -> Iterator[tuple[str, Callable[[], tuple[Any, ...]], Callable[..., Any]]]:
    """Yield name, inputs and what is computed of them; sizes are multiplied by `scale`."""

    def size(n: int) -> int:
        return max(8, int(n * scale) // 8 * 8)

    for n in (64, 512, 1024, 2048, 4096):
        for count in (1, 2, 4, 8):
            for lazy in (False, True):
                if n > 2048 and lazy:
                    continue
                m = size(n)
                cut = (m // 2, m) if count == 1 else -(-m // count)

                def inputs(m: int = m, cut: Any = cut, lazy: bool = lazy) -> tuple[da.Array, da.Array]:
                    return matrix(m, m, cut, lazy=lazy), matrix(m, m, cut, lazy=lazy)

                yield f"square {m} in {count}{', lazy' * lazy}", inputs, lambda a, b: a @ b
    tall, wide = size(65536), size(512)
    for count in (2, 16):
        rows = -(-tall // count)

        def tall_and(cols: int, rows: int = rows) -> Callable[[], tuple[da.Array, da.Array]]:
            return lambda: (matrix(tall, wide, (rows, wide)), matrix(wide, cols, -1))

        yield f"tall in {count} by small", tall_and(64), lambda a, b: a @ b
        yield f"tall in {count} by vector", tall_and(1), lambda a, b: a @ b[:, 0]
        yield f"Gram of tall in {count}", tall_and(8), lambda a, b: a.T @ a
        yield f"half-step of a subspace iteration, {count}", tall_and(32), lambda a, b: a.T @ (a @ b)
    four = size(4000)
    for count in (4, 8):
        cut = -(-four // count)

        def square(cut: int = cut) -> tuple[da.Array, da.Array]:
            return matrix(four, four, cut), matrix(four, four, cut)

        yield f"a slice of a product in {count}", square, lambda a, b: ((a @ b)[:100, :100] + 1).mean()
        yield f"an element of a product in {count}", square, lambda a, b: (a @ b)[7, 9]
        yield f"the diagonal of a product in {count}", square, lambda a, b: da.diag(a @ b).sum()
        yield f"a block of a product in {count}", square, lambda a, b: (a @ b).blocks[1, 1].sum()
        yield f"the sum of a product in {count}", square, lambda a, b: (a @ b).sum()
        yield f"a product and more in {count}", square, lambda a, b: (a @ b + a).std(axis=0)
    for count in (2, 4):
        cut = -(-size(1024) // count)

        def small(cut: int = cut) -> tuple[da.Array, da.Array]:
            return matrix(size(1024), size(1024), cut), matrix(size(1024), size(1024), cut)

        yield f"a chain of 5 in {count}", small, lambda a, b: a @ b @ a @ b @ a
        yield f"tensordot in {count}", small, lambda a, b: da.tensordot(a, b, axes=(0, 0))
        yield f"uneven chunks in {count}", small, lambda a, b: a @ b.rechunk({0: -(-size(1024) // 3)})


def peak() -> int:
    """Return the most bytes that this process has held since `forget_peak`."""
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1]) * 1024  # type: ignore[index]


def forget_peak() -> int:
    """Let the peak begin anew; return what this process holds."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def once(client: Client, inputs: Callable[[], Any], compute: Callable[..., Any], on: bool) -> tuple[float, int]:
    """Return seconds and the largest growth of a worker's memory in bytes."""
    arrays = inputs()
    before = client.run(forget_peak)
    with dask_distmm.enabled() if on else contextlib.nullcontext():
        started = time.perf_counter()
        result = compute(*arrays).persist()
        wait(result)
        seconds = time.perf_counter() - started
    grown = {address: most - before[address] for address, most in client.run(peak).items()}
    del result, arrays
    return seconds, max(0, *grown.values())


def main() -> None:
    """Run from the command line; exit with 1 if a program is slower, or takes more memory without being quicker."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--repeat", type=int, default=3, help="of which medians are taken")
    parser.add_argument("--only", nargs="+", default=[""], help="programs by how their names begin")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    found, worse = {}, []
    with (
        LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        print(f"{'milliseconds':44s} {'with':>9s} {'without':>9s} {'ratio':>6s} {'MiB with':>9s} {'without':>8s}")
        for name, inputs, compute in programs(options.scale):
            if not name.startswith(tuple(options.only)):
                continue
            taken: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
            for turn in range(options.repeat + 1):
                for on in (True, False) if turn % 2 else (False, True):
                    figures = once(client, inputs, compute, on)
                    if turn:
                        taken[on].append(figures)
                    time.sleep(0.05)
            (ours, held), (own, stock) = (
                (statistics.median(x for x, _ in taken[on]), max(x for _, x in taken[on])) for on in (True, False)
            )
            found[name] = {"with": taken[True], "without": taken[False]}
            verdict = " slower" * (ours > _SLOWER * own) + " more memory" * (
                held > _MORE * stock + 2**24 and ours > own
            )
            worse += [name] if verdict else []
            print(
                f"{name:44s} {1e3 * ours:9.1f} {1e3 * own:9.1f} {own / ours:6.2f} {held / 2**20:9.0f} "
                f"{stock / 2**20:8.0f}{verdict}",
                flush=True,
            )
    print(f"{len(found)} programs, {len(worse)} of them slower or larger: {', '.join(worse) or 'none'}")
    if options.json:
        with open(options.json, "w") as file:
            software = environment.software("numpy", "dask", "distributed", "dask_distmm")
            about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
            json.dump({**about, "programs": found}, file, indent=1)
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
