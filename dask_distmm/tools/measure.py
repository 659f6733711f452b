"""``dask distmm demo``, ``bench``, ``calibrate``: products are checked and timed, and the model's constants measured.

The demo has two jobs on a local cluster, each with its plan, its check against NumPy and its time. The first is a
principal component analysis of a real data set from a Zarr store, the second a product of two
random square matrices. Everything is timed next to Dask's own matmul, on the same inputs.

``dask distmm bench``: square products at common chunk grids, next to Dask's own matmul and NumPy.

``dask distmm calibrate`` writes a file of configuration. Rates are taken on all workers at once, as a run has them;
bandwidth and latency over Dask's comms between two workers, of one host and of two. Dask's own costs come from tiny
products of two numbers of chunks, by turns: the time around a run is linear in the number of chunks, that of Dask's own
tasks in the number of tasks.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
import os
import statistics
import textwrap
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.config
import numpy as np
import yaml
from dask.utils import format_bytes, format_time, parse_timedelta
from distributed import Client, get_worker, wait
from distributed.utils import sync
from distributed.worker import get_data_from_worker
from numpy.typing import NDArray

from dask_distmm import enabled, explain, matmul
from dask_distmm._version import __version__
from dask_distmm.arrays.fallback import dask_matmul
from dask_distmm.arrays.request import parse
from dask_distmm.compat import install_command, library_of
from dask_distmm.config import DaskCosts, Machine, setting
from dask_distmm.engines.numpy.blas import blas_threads, gemm
from dask_distmm.errors import DistMMError, PlanError
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning import ENGINES, Demand, Plan, Worker
from dask_distmm.planning.planner import tasks_estimate
from dask_distmm.runtime.client import ask_roster
from dask_distmm.runtime.keys import barrier_key
from dask_distmm.tools.local import available_memory, chunk_rows, computed, connected, running_cluster, use_gpus

Say = Callable[[str], None]

ROUNDS = 3
COMPONENTS = 32
# On the workers A, B and the product, and as much as one more of partial sums and tiles on their way; in this
# process A, B and the product by NumPy (for the check B and |B|).
MATRICES = 7
# In which the constants of the cost model are measured.
CALIBRATE_SECONDS = 6.0
# A Python process with Dask and NumPy; this process, with the first job's data everywhere.
WORKER_BYTES = 150 * 2**20
FIXED_BYTES = 512 * 2**20
# Of the strips in which results are checked.
STRIP_ROWS = 512


# ---------------------------------------------------------------------------------------------------------
# The machine


def memory_needed(size: int, workers: int) -> int:
    """Return the bytes that the demo needs at most, in all of its processes."""
    return MATRICES * 8 * size**2 + WORKER_BYTES * workers + FIXED_BYTES


def too_little_memory(size: int, workers: int, available: int) -> str | None:
    """Return why the demo does not fit in memory, with a size that would fit; None if it fits."""
    needed = memory_needed(size, workers)
    if needed <= available:
        return None
    spare = available - memory_needed(0, workers)
    if spare < MATRICES * 8:
        advice = "not even --size 1 fits: take fewer workers" if workers > 1 else "free some memory"
    else:
        advice = f"--size {math.isqrt(spare // (MATRICES * 8))} would fit"
    return (
        f"too little memory: --size {size} with {workers} workers needs about {format_bytes(needed)} "
        f"({MATRICES} matrices of {size} x {size} float64: A, B, product and partial sums on the workers, "
        f"3 here for NumPy; and {format_bytes(memory_needed(0, workers))} for the processes); "
        f"{format_bytes(available)} are available; {advice}"
    )


# ---------------------------------------------------------------------------------------------------------
# The check


def worst_error(a: NDArray[Any], b: NDArray[Any], magnitude_b: NDArray[Any], c: NDArray[Any]) -> float:
    """Return the largest error of ``c`` against NumPy's ``a @ b``, in units of the error that rounding may cause.

    The unit is ``k eps sum_k |a_ik| |b_kj|`` for each element: two sums of k products, in any order, differ by
    no more (Higham, Accuracy and Stability, 3.5). A multiple of eps without k, as testers take for random
    numbers, does not hold for data such as images: equal terms, of which there are many, round the same way
    and NumPy's own product is then several times outside. Above 1 the product is wrong; NaN is infinitely so.
    """
    error = np.abs(c - a @ b)
    bound = a.shape[1] * np.finfo(c.dtype).eps * (np.abs(a) @ magnitude_b)
    share = np.divide(error, bound, out=np.where(error == 0, 0.0, np.inf), where=bound > 0)
    return float(np.max(np.nan_to_num(share, nan=np.inf, posinf=np.inf)))


def check_product(a: da.Array, b: da.Array, c: da.Array) -> float:
    """Compare all of a product with NumPy's in this process, a strip of rows at a time; return the worst."""
    here = np.asarray(b.compute())
    magnitude = np.abs(here)
    worst = 0.0
    for start in range(0, c.shape[0], STRIP_ROWS):
        rows = slice(start, start + STRIP_ROWS)
        left, computed = dask.compute(a[rows], c[rows])
        worst = max(worst, worst_error(left, here, magnitude, computed))
    if worst > 1:
        raise DistMMError(f"the product is wrong: its largest error is {worst:.3g} times what rounding may do")
    return worst


# ---------------------------------------------------------------------------------------------------------
# The time


def side_by_side(ways: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the median time of each way to multiply; they take turns, after a first turn for warming up."""
    turns = [[timeit.timeit(way, number=1) for way in ways] for _ in range(ROUNDS + 1)]
    return [statistics.median(column) for column in zip(*turns[1:], strict=True)]


def both_ways(a: da.Array, b: da.Array) -> list[Callable[[], Any]]:
    """Return what takes a product from the expression into memory: with dask_distmm, and by Dask's own matmul."""
    return [lambda: computed(collective(a, b)), lambda: computed(dask_matmul(a, b))]


def estimate_text(what: str, seconds: float, measured: float) -> str:
    """Return an estimate, and which part of the measured time it is."""
    return f"{what} {format_time(seconds)}, {seconds / measured:.2f} of the measured time"


def machine_text(here: float, ours: float) -> str:
    """Return whether one machine is enough, by the times of NumPy in this process and of the cluster."""
    ratio = here / ours
    enough = "one machine is enough" if ratio < 0.95 else "the cluster pays"
    return f"NumPy in one process {format_time(here)}, {ratio:.2f} of dask_distmm's time: {enough}"


def ratio_text(ours: float, stock: float) -> str:
    """Return how two times compare, in words and figures."""
    ratio = stock / ours
    if 0.95 < ratio < 1.05:
        return f"{ratio:.2f}: as fast as Dask's own matmul"
    return f"{ratio:.2f} times the speed of Dask's own matmul" + ("" if ratio > 1 else " (slower)")


# ---------------------------------------------------------------------------------------------------------
# The jobs


def with_products(pixels: NDArray[Any]) -> NDArray[Any]:
    """Return columns and the products of all pairs of them, each with itself included."""
    left, right = np.triu_indices(pixels.shape[1])
    return np.concatenate([pixels, pixels[:, left] * pixels[:, right]], axis=1)


def digits(workers: int) -> da.Array:
    """Return scikit-learn's handwritten digits with products of pixels, standardised. Lazy."""
    pixels = library_of("demo", "sklearn.datasets", "the demo").load_digits().data
    count, width = pixels.shape
    features = width + width * (width + 1) // 2
    rows = chunk_rows(count, workers)
    source = da.from_array(pixels, chunks=(rows, width))
    table = source.map_blocks(with_products, chunks=(source.chunks[0], (features,)), dtype=pixels.dtype)
    table = table.rechunk((rows, chunk_rows(features, workers)))
    deviation = table.std(axis=0)
    # Pixels in the corners are never inked: their columns are constant, and become zeros.
    return (table - table.mean(axis=0)) / da.where(deviation > 0, deviation, 1.0)


def collective(a: da.Array, b: da.Array) -> da.Array:
    """Return ``a @ b`` with dask_distmm enabled. Lazy."""
    with enabled():
        product = a @ b
    if barrier_key(product.name) not in product.dask:
        raise DistMMError(f"dask_distmm did not take this product: {explain(a, b)!r}")
    return product


def checked(say: Say, title: str, a: da.Array, b: da.Array) -> da.Array:
    """Multiply; print the plan and the check; return the product, in the cluster's memory."""
    say(f"\n  {title}")
    say(textwrap.indent(repr(explain(a, b)), "    "))
    product = computed(collective(a, b))
    worst = check_product(a, b, product)
    say(
        f"    check     right: all {product.size:,} elements are as NumPy's, up to rounding; the largest"
        f"\n              error is {100 * worst:.2g} % of what rounding may do, k eps |A| |B|"
    )
    return product


def compare(say: Say, a: da.Array, b: da.Array) -> None:
    """Time a product of operands in memory next to Dask's own and NumPy's; print times, ratio and estimates."""
    with dask.config.set({"distmm.minimum-flops": None}):  # Dask's own tasks are estimated, too
        plan, here = explain(a, b), dask.compute(a, b)
    ours, stock, numpy = side_by_side([*both_ways(a, b), lambda: np.matmul(*here)])
    say(
        f"    time      dask_distmm {format_time(ours)}, Dask's own matmul {format_time(stock)} "
        f"(inputs in memory, medians of {ROUNDS})"
        f"\n    ratio     {ratio_text(ours, stock)}"
        f"\n    here      {machine_text(numpy, ours)}"
    )
    if isinstance(plan, Plan) and plan.by_tasks is not None:
        say(
            f"    estimate  {estimate_text('dask_distmm', plan.seconds, ours)}"
            f"\n              {estimate_text('Dask', plan.by_tasks.seconds, stock)}"
        )


def components(gram: NDArray[np.float64], count: int) -> tuple[NDArray[np.float64], float]:
    """Return the leading eigenvectors of a Gram matrix as columns, and their share of the variance."""
    values, vectors = np.linalg.eigh(gram)
    return vectors[:, ::-1][:, :count], float(values[-count:].sum() / values.sum())


def principal_components(say: Say, workers: int, folder: Path) -> None:
    """Run the job on real data."""
    store = folder / "digits.zarr"
    digits(workers).to_zarr(str(store))
    x = da.from_zarr(str(store))
    say("\n1. Principal components of real data")
    say(
        "  X: scikit-learn's handwritten digits, 1797 images of 64 pixels, with the products of all pairs\n"
        f"  of them, columns standardised: {x.shape[0]} x {x.shape[1]} {x.dtype}, {format_bytes(x.nbytes)}, "
        f"computed by Dask\n  and written to {store}"
    )
    gram = checked(say, "Gram matrix X.T @ X, from the store", x.T, x).compute()
    held = computed(x)
    compare(say, held.T, held)
    del held  # its keys are those of x: the next product would not read the store
    vectors, share = components(gram, COMPONENTS)
    say(f"\n  V: the {COMPONENTS} leading eigenvectors; they carry {100 * share:.1f} % of the variance")
    v = da.from_array(vectors, chunks=(x.chunks[1], COMPONENTS))
    checked(say, "Projection X @ V, from the store", x, v)
    compare(say, computed(x), computed(v))


def square_product(say: Say, size: int, workers: int) -> None:
    """Run the job on random matrices."""
    say("\n2. Square product")
    side = chunk_rows(size, workers)
    random = da.random.default_rng()
    a, b = (computed(random.standard_normal((size, size), chunks=(side, side))) for _ in range(2))
    checked(say, f"A @ B, {size} x {size} random numbers each, in memory", a, b)
    compare(say, a, b)


def run_demo(size: int, workers: int, say: Say) -> None:
    """Run the demo."""
    for name in ("sklearn", "zarr"):
        library_of("demo", name, "the demo")  # before a cluster is started
    # The scheduler is in this process, and tells of every worker that is stopped.
    logging.getLogger("dask_distmm").setLevel(logging.ERROR)
    say(f"dask_distmm {__version__} demo: {workers} {'GPU workers' if use_gpus() else 'workers of one thread'}")
    needed, available = format_bytes(memory_needed(size, workers)), format_bytes(available_memory())
    say(f"memory: at most about {needed} of {available} available")
    # Small products too, and whatever the user's configuration says.
    settings = {"distmm.minimum-flops": 0, "distmm.enabled": None}
    with dask.config.set(settings), running_cluster(workers, "demo") as (client, folder):
        page = client.dashboard_link.replace("/status", "/distmm")
        served = importlib.util.find_spec("bokeh") is not None
        say(f"dashboard: {f'{page} while this runs' if served else install_command('dashboard')}")
        costs = {f"distmm.{key}": x for key, x in flat(measure(client, CALIBRATE_SECONDS)).items()}
        say("estimates: by constants measured now; `dask distmm calibrate` keeps such in your configuration")
        with dask.config.set(costs):
            principal_components(say, workers, folder)
            square_product(say, size, workers)


# ``dask distmm bench``: square products at common chunk grids, next to Dask's own matmul and NumPy


CPU_SIZES, GPU_SIZES = (1024, 2048), (4096, 8192)
TITLES = ("N", "chunks", "dask_distmm s", "dask s", "x dask", "numpy s", "x numpy")


def run_bench(
    scheduler: str | None, workers: int | None, sizes: Sequence[int] | None, grids: Sequence[int], dtype: str
) -> Iterator[dict[str, Any]]:
    """Measure, size by size; yield the median seconds of each case. NumPy is measured only with local CPU workers."""
    settings = {"distmm.minimum-flops": 0, "distmm.enabled": None}
    with dask.config.set(settings), connected(scheduler, workers, "bench") as client:
        roster = ask_roster(client, Demand("auto", "numpy", (dtype, dtype, dtype)))
        assert roster is not None, "the client is synchronous"
        gpus = ENGINES[roster.engines[0]].on_gpus
        for size in sorted(sizes or (GPU_SIZES if gpus else CPU_SIZES)):
            numpy = _numpy_seconds(size, dtype) if scheduler is None and not gpus else None
            for grid in grids:
                ours, stock = _case(client, size, grid, dtype, "cupy" if gpus else "numpy")
                yield {"size": size, "chunks": grid, "dask_distmm": ours, "dask": stock, "numpy": numpy}


def _case(client: Client, size: int, grid: int, dtype: str, kind: str) -> list[float]:
    """Check one product, and time both ways by turns, on inputs in the cluster's memory."""
    side, random = -(-size // grid), da.random.default_rng()
    operands = (random.random((size, size), dtype=dtype, chunks=side) - np.dtype(dtype).type(0.5) for _ in "ab")
    a, b = (computed(x.to_backend(kind)) for x in operands)
    check_product(*(x.to_backend("numpy") for x in (a, b, computed(collective(a, b)))))
    return side_by_side(both_ways(a, b))


def _numpy_seconds(size: int, dtype: str) -> float:
    """Return the time of NumPy's product in this process, on all threads of its BLAS."""
    a, b = (np.random.default_rng().random((size, size), dtype=dtype) for _ in "ab")  # type: ignore[call-overload]
    return side_by_side([lambda: np.matmul(a, b)])[0]


def row_text(row: dict[str, Any]) -> str:
    """Return a case as a line under `TITLES`."""
    ours, stock, numpy = row["dask_distmm"], row["dask"], row["numpy"]
    beside = [] if numpy is None else [f"{numpy:.4f}", f"{numpy / ours:.2f}"]
    side = f"{row['chunks']} x {row['chunks']}"
    return line([str(row["size"]), side, f"{ours:.4f}", f"{stock:.4f}", f"{stock / ours:.2f}", *beside])


def line(cells: Sequence[str]) -> str:
    """Return the cells of a row in columns."""
    return "  ".join(cell.rjust(len(title)) for cell, title in zip(cells, TITLES, strict=False))


# The constants of the cost model
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
    for name, unit, base, numbers in (
        ("run", "chunk", "run", lambda count: 3 * count**2),
        ("task", "task", "start", _tasks),
    ):
        few, many = ((numbers(count), seconds[name, count]) for count in COUNTS[name])
        slopes[unit] = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
        slopes[base] = max(0.0, few[1] - few[0] * slopes[unit])
    return {name: f"{1e3 * slopes[name]:.3g}ms" for name in ("run", "chunk", "start", "task")}


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
