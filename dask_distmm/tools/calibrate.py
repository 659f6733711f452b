"""``dask distmm calibrate``: measure the constants of the cost model on a cluster, and write a file of configuration.

Rates are taken on all workers at once, as a run has them; bandwidth and latency over Dask's comms between two workers,
of one host and of two. Dask's own costs come from tiny products of two numbers of chunks, by turns: the time around a
run is linear in the number of chunks, that of Dask's own tasks in the number of tasks.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dask.array as da
import dask.config
import numpy as np
import yaml
from dask.utils import parse_timedelta
from distributed import Client, get_worker, wait
from distributed.utils import sync
from distributed.worker import get_data_from_worker

from dask_distmm import matmul
from dask_distmm.arrays.fallback import dask_matmul
from dask_distmm.arrays.request import parse
from dask_distmm.config import DaskCosts, Machine, setting
from dask_distmm.engines.numpy.blas import blas_threads, gemm
from dask_distmm.errors import PlanError
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning import ENGINES, Demand, Worker
from dask_distmm.planning.tasks import tasks_estimate
from dask_distmm.runtime.client import ask_roster
from dask_distmm.tools.local import computed, connected

SECONDS = 20.0
# Dask reads all files of its folder in the order of their names: what users write into distmm.yaml wins.
NAME = "distmm-measured.yaml"
HEADER = "# Constants of the cost model, measured by `dask distmm calibrate`, which replaces this file.\n"

# Key of the rate, type of the operands, rows for one thread, and operations for each term of a sum.
RATES = (
    ("float32", "float32", 1024, 2),
    ("float64", "float64", 1024, 2),
    ("complex64", "complex64", 768, 8),
    ("complex128", "complex128", 768, 8),
    ("other", "int64", 192, 2),
)
# Chunks along each side of the tiny products that are runs, and that are Dask's own tasks; and their rows.
COUNTS, SIDE = {"run": (2, 8), "task": (2, 5)}, 32
LARGE = 2**25

# A machine on which work costs nothing, and Dask takes a second for each task: what is left is their number.
_FREE, _ONE_A_TASK = Machine((("other", 1e30),), 1e30, 1e30, 0.0), DaskCosts(0.0, 0.0, 0.0, 1.0)


# On a worker


def gemm_rate(dtype: str, rows: int, flops: int, seconds: float) -> float:
    """Return 10^9 operations per second and thread of this worker."""
    threads, kind, rng = int(get_worker().state.nthreads), dtype_from_name(dtype), np.random.default_rng()
    size = round(rows * math.cbrt(threads))
    a, b, c = ((rng.random((size, size)) * 10).astype(kind) for _ in range(3))
    with blas_threads(threads):
        return flops * size**3 * _per_second(lambda: gemm(a, b, c), seconds) / threads / 1e9


def memory_rate(seconds: float) -> float:
    """Return the bytes of result per second of a sum of two matrices that do not fit a cache."""
    a, b = np.ones(2**23), np.ones(2**23)
    return a.nbytes * _per_second(lambda: np.add(a, b, out=a), seconds)


def _per_second(work: Callable[[], Any], seconds: float) -> float:
    """Return how often something is done in a second; the first time is for warming up."""
    work()
    started = time.perf_counter()
    for count in itertools.count(1):
        work()
        if (elapsed := time.perf_counter() - started) >= seconds:
            return count / elapsed
    raise AssertionError


def fetch_seconds(address: str, key: str) -> float:
    """Return how long it takes to get a value from another worker."""
    worker = get_worker()

    async def get() -> None:
        await get_data_from_worker(worker.rpc, [key], address, who=worker.address)

    started = time.perf_counter()
    sync(worker.loop, get)
    return time.perf_counter() - started


# On the client


def measure(client: Client, seconds: float) -> dict[str, Any]:
    """Return the constants as the configuration has them below ``distmm``, measured in about this time."""
    deadline, each = time.monotonic() + seconds, seconds / 40
    roster = ask_roster(client, Demand("auto", "numpy", ("float64",) * 3))
    assert roster is not None, "the client is synchronous"
    options: dict[str, Any] = {}
    if not ENGINES[roster.engines[0]].on_gpus:
        addresses = [worker.address for worker in roster.workers]
        rates = {name: _mean(client, addresses, gemm_rate, *about, each) for name, *about in RATES}
        options["machine"] = {
            "numpy": {"gflops": rates, "memory-bandwidth": _mean(client, addresses, memory_rate, each)}
            | _links(client, roster.workers, each)
        }
    options["dask"] = costs(_turns(client, deadline))
    return options


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _mean(client: Client, addresses: Sequence[str], function: Callable[..., float], *arguments: Any) -> float:
    """Call a function on all workers at once; return the mean."""
    tasks = [client.submit(function, *arguments, workers=[address], pure=False) for address in addresses]
    return _rounded(statistics.mean(client.gather(tasks)))


def _links(client: Client, workers: Sequence[Worker], seconds: float) -> dict[str, float]:
    """Return bandwidth and latency between two workers of one host, and of two, where there are such."""
    rates: dict[str, float] = {}
    for worker, two in itertools.combinations(workers, 2):
        name = "bandwidth" if worker.host == two.host else "network-bandwidth"
        if name not in rates:
            small, large = (_fetched(client, worker.address, two.address, size, seconds) for size in (1, LARGE))
            rates |= {name: _rounded(LARGE / max(large - small, 1e-9)), "latency": _rounded(small)}
    if "network-bandwidth" in rates:
        rates.setdefault("bandwidth", rates["network-bandwidth"])
    return rates


def _fetched(client: Client, source: str, target: str, size: int, seconds: float) -> float:
    """Return the seconds in which a worker gets some bytes of another one: the median."""
    taken: list[float] = []
    until = time.monotonic() + 2 * seconds
    data = client.submit(np.ones, size, "u1", workers=[source], pure=False)
    wait(data)
    while len(taken) < 3 or time.monotonic() < until:
        task = client.submit(fetch_seconds, source, data.key, workers=[target], pure=False)
        taken.append(task.result())
    return float(statistics.median(taken))


Turn = dict[tuple[str, int], float]


def _turns(client: Client, deadline: float) -> Turn:
    """Return the medians of the seconds around runs and of Dask's own tasks, by the number of chunks."""
    rounds: list[Turn] = []
    # The first turn is for warming up.
    while len(rounds) < 2 or time.monotonic() < deadline:
        turn: Turn = {}
        for name, count in ((name, count) for name, counts in COUNTS.items() for count in counts):
            a, b = (computed(da.random.random((SIDE * count, SIDE * count), chunks=SIDE)) for _ in "ab")
            started = time.perf_counter()
            d = (matmul(a, b) if name == "run" else dask_matmul(a, b)).persist()
            wait(d)
            taken = time.perf_counter() - started
            runs = [event for _, event in client.get_events("distmm") if event["name"] == d.name]
            turn[name, count] = taken - (runs[-1]["seconds"] if runs else 0.0)
        rounds.append(turn)
    return {key: statistics.median(turn[key] for turn in rounds[1:]) for key in rounds[0]}


def costs(seconds: Turn) -> dict[str, str]:
    """Return Dask's costs, from the seconds around runs and of its own tasks for two numbers of chunks."""
    slopes = {}
    # What a product has more of, with the number of chunks; and what it costs without.
    for name, unit, base, numbers in (("run", "chunk", "run", _chunks), ("task", "task", "start", _tasks)):
        few, many = ((numbers(count), seconds[name, count]) for count in COUNTS[name])
        slopes[unit] = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
        slopes[base] = max(0.0, few[1] - few[0] * slopes[unit])
    return {name: f"{1e3 * slopes[name]:.3g}ms" for name in ("run", "chunk", "start", "task")}


def _chunks(count: int) -> float:
    return 3 * count**2


def _tasks(count: int) -> float:
    a, b = (da.ones((SIDE * count, SIDE * count), chunks=SIDE) for _ in "ab")
    return tasks_estimate(parse(a, b).problem, [Worker("a"), Worker("b")], _FREE, _ONE_A_TASK).seconds


# The command


def flat(options: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their keys, joined by dots."""
    values: dict[str, Any] = {}
    for key, value in options.items():
        values |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return values


def compared(options: Mapping[str, Any]) -> str:
    """Return a line for each constant: what the configuration has, what was measured, and their ratio."""
    lines = [f"{'distmm.':<34}{'configured':>12}{'measured':>12}{'ratio':>8}"]
    for key, value in flat(options).items():
        had = setting(key)
        ratio = parse_timedelta(value) / (parse_timedelta(had) or 1) if key.startswith("dask.") else value / (had or 1)
        shown = [value if isinstance(value, str) else f"{value:.3g}" for value in (had, value)]
        lines.append(f"{key:<34}{shown[0]:>12}{shown[1]:>12}" + (f"{ratio:8.2f}" if had else "       -"))
    return "\n".join(lines)


def target(out: Path | None) -> Path:
    """Return the file to write; refuse one that something else has written."""
    path = out or Path(dask.config.PATH) / NAME
    if out is None and path.parent.is_file():
        raise PlanError(f"DASK_CONFIG names a file, {path.parent}: name another one to write by --out")
    if path.exists() and not path.read_text().startswith(HEADER):
        raise PlanError(f"{path} was not written by this command: name another file by --out")
    return path


def run_calibrate(scheduler: str | None, workers: int | None, out: Path | None, say: Callable[[str], None]) -> None:
    """Measure, compare with the configuration, write."""
    path = target(out)
    with connected(scheduler, workers, "calibrate") as client:
        say(f"measuring for about {SECONDS:.0f} s; other programs on these machines would be measured, too")
        options = measure(client, SECONDS)
    say(compared(options))
    if "machine" not in options:
        say("rates of GPUs are not measured: distmm.machine stays as it is")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}.{os.getpid()}")
    whole.write_text(HEADER + yaml.safe_dump({"distmm": options}, sort_keys=False))
    whole.replace(path)
    say(f"written to {path}" + ("; programs that start from now on read it" if out is None else ""))
