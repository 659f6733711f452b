"""What Dask takes around a multiply: tiny products on two worker processes, from ``persist()`` to all of D in memory.

    python -m benchmarks.overhead [--chunks 1 2 4 8 16 32] [--repeat 9] [--stalls 183] [--json FILE]

Beside each other, by turns in one run: a product here, the same by Dask's own tasks, and one trivial task. Inputs are
fresh each time. Besides: inputs that are lazy, a chain of products, several clients at once. ``--stalls 183`` instead:
a product of 183 x 183 chunks each of A, B and D, 100,000 together, and how long it keeps the scheduler's event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, SchedulerPlugin, wait

from benchmarks.harness import environment
from benchmarks.revision import revision
from dask_distmm import matmul
from dask_distmm.arrays.fallback import dask_matmul
from dask_distmm.runtime.keys import barrier_name
from tests.conformance import assert_product

Multiply = Callable[[da.Array, da.Array], da.Array]
WAYS: dict[str, Multiply] = {"distmm": matmul, "dask": dask_matmul}
_SIDE = 32


def extents(chunks: int) -> tuple[int, Any]:
    """Return the length of a tiny matrix' sides and its chunks; for 1 there is one chunk a worker, of half its rows."""
    return (2 * _SIDE, (_SIDE, 2 * _SIDE)) if chunks == 1 else (_SIDE * chunks, _SIDE)


def operands(chunks: int, *, persisted: bool = True) -> tuple[da.Array, da.Array]:
    """Return two fresh random matrices."""
    n, sizes = extents(chunks)
    a, b = (da.random.random((n, n), chunks=sizes) for _ in range(2))
    if persisted:
        a, b = a.persist(), b.persist()
        wait([a, b])
    return a, b


def seconds(multiply: Multiply, a: da.Array, b: da.Array) -> tuple[float, da.Array]:
    """Return how long it takes until all of the product is in memory, and the product."""
    started = time.perf_counter()
    d = multiply(a, b).persist()
    wait(d)
    return time.perf_counter() - started, d


def trivial(client: Client) -> float:
    """Return how long one task takes that does nothing."""
    started = time.perf_counter()
    wait(client.submit(int, key=f"trivial-{time.perf_counter_ns()}"))
    return time.perf_counter() - started


def compare(client: Client, chunks: int, repeat: int, *, persisted: bool = True) -> dict[str, list[float]]:
    """Return the seconds of each way by turns, the first turn left out."""
    found: dict[str, list[float]] = {name: [] for name in (*WAYS, "task")}
    for turn in range(repeat + 1):
        for name, multiply in WAYS.items():
            a, b = operands(chunks, persisted=persisted)
            taken, d = seconds(multiply, a, b)
            if turn:
                found[name].append(taken)
            elif persisted:
                assert_product(a.compute(), b.compute(), d.compute())
            del a, b, d
            time.sleep(0.05)
        if turn:
            found["task"].append(trivial(client))
    return found


def chain(length: int, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of a chain of products of 2 x 2 chunks, each of which needs the one before."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(repeat + 1):
        for name, multiply in WAYS.items():
            a, b = operands(2)
            b = (b / (2 * _SIDE)).persist()
            wait(b)
            started = time.perf_counter()
            for _ in range(length):
                a = multiply(a, b)
            wait(a.persist())
            if turn:
                found[name].append(time.perf_counter() - started)
    return found


def clients(cluster: LocalCluster, count: int, each: int) -> dict[str, list[float]]:
    """Return the seconds in which several clients at once are through with so many products each, of 2 x 2 chunks."""
    found: dict[str, list[float]] = {}
    for name, multiply in WAYS.items():
        failures: list[BaseException] = []

        def work(multiply: Multiply = multiply, failures: list[BaseException] = failures) -> None:
            try:
                with Client(cluster, set_as_default=False) as client, client.as_current():
                    for _ in range(each):
                        seconds(multiply, *operands(2))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(count)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        found[name] = [time.perf_counter() - started]
    return found


class Watch(SchedulerPlugin):  # type: ignore[misc]
    """Notes how late the scheduler's event loop is, and when a barrier was parked and the last chunk of D there."""

    name = "watch"

    def __init__(self) -> None:
        self.gaps: list[tuple[float, float]] = []
        self.parked = self.done = 0.0

    async def start(self, scheduler: Any) -> None:
        """Begin to look."""
        self._ticker = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            if now - last > 1e-3:
                self.gaps.append((now, now - last))
            last = now

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note what belongs to a run."""
        if finish == "no-worker" and barrier_name(key) is not None:
            self.parked = time.perf_counter()
        elif finish == "memory" and isinstance(key, tuple) and key[0].startswith("matmul-"):
            self.done = time.perf_counter()

    async def close(self) -> None:
        """Stop looking."""
        self._ticker.cancel()


def stalls(side: int) -> None:
    """Print what a product of `side` x `side` tiny chunks costs the client, and the scheduler's event loop."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster),
    ):
        watch = Watch()
        a, b = (da.ones((2 * side, 2 * side), chunks=2).persist() for _ in "ab")
        b = (b + 1).persist()
        wait([a, b])
        cluster.scheduler.add_plugin(watch)
        cluster.loop.add_callback(watch.start, cluster.scheduler)
        time.sleep(1)
        started = time.perf_counter()
        d = matmul(a, b)
        built = time.perf_counter()
        d = d.persist()
        wait(d)
        ended = time.perf_counter()
        within = [gap for when, gap in watch.gaps if watch.parked < when - gap and when <= watch.done]
        chunks = 3 * side * side
        print(f"{chunks} chunks of A, B and D: built in {built - started:.2f} s, in memory {ended - built:.1f} s later")
        print(f"  the run, from its parked barrier to the last chunk: {watch.done - watch.parked:.2f} s")
        print(f"  the event loop was busy for {sum(within):.2f} s of them, {1e6 * sum(within) / chunks:.0f} us a chunk")
        print(f"  its longest stalls: {', '.join(f'{1e3 * gap:.0f} ms' for gap in sorted(within)[:-6:-1])}")


def measure(chunks: list[int], repeat: int) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield what was measured under its name, as soon as it was."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        compare(client, 2, 1)
        for count in chunks:
            yield f"{count} x {count} chunks" if count > 1 else "one chunk a worker", compare(client, count, repeat)
        for count in (2, 4):
            yield f"{count} x {count} chunks, lazy", compare(client, count, repeat, persisted=False)
        yield "chain of 20", chain(20, max(1, repeat // 3))
        yield "8 clients, 5 products each", clients(cluster, 8, 5)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="a side")
    parser.add_argument("--repeat", type=int, default=9, help="of which medians are taken")
    parser.add_argument("--json", help="file for all timings")
    parser.add_argument("--stalls", type=int, help="chunks a side of one product, in place of all else")
    options = parser.parse_args()
    if options.stalls:
        stalls(options.stalls)
        return
    found = {}
    print(f"{'milliseconds':28s} {'here':>9s} {'Dask':>9s} {'ratio':>6s} {'one task':>9s}")
    for name, timings in measure(options.chunks, options.repeat):
        found[name] = timings
        ours, own, task = (1e3 * statistics.median(timings.get(way) or [np.nan]) for way in (*WAYS, "task"))
        print(f"{name:28s} {ours:9.1f} {own:9.1f} {own / ours:6.2f} {task:9.1f}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            software = environment.software("numpy", "dask", "distributed", "dask_distmm")
            about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
            json.dump({**about, "seconds": found}, file, indent=1)


if __name__ == "__main__":
    main()
