"""A product in waves of a million chunks on 1,024 workers, planned and taken apart without a cluster.

    python -m benchmarks.wave_scale [--workers 1024] [--chunks 1000000] [--json FILE]

The Gram matrix of a tall X whose chunks ranks make themselves. Measured are the choice of the scheme, the graph of a
million chunks, the plan of one wave, its messages and their bytes, and the memory that the tasks take in the
scheduler, where barriers carry them: Dask has a state for each run and chunk of D, and none for a chunk of X.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc

import dask.array as da
from distributed.protocol.pickle import dumps

from benchmarks.harness import environment
from benchmarks.revision import revision
from dask_distmm.arrays.request import parse
from dask_distmm.config import dask_costs, wave_budget
from dask_distmm.graph import build_graph
from dask_distmm.planning import Worker, plan
from dask_distmm.planning.waves import choose_scheme, wave_problem
from dask_distmm.runtime.chunks import pack_tasks
from dask_distmm.runtime.keys import barrier_key

_ROWS, _COLS, _LIMIT = 1000, 500, 4 * 2**30


def measure(count: int, chunks: int) -> dict[str, float]:
    """Return the figures by name: seconds, bytes and numbers."""
    workers = [Worker(f"tcp://10.0.{n // 256}.{n % 256}:40000", 1, _LIMIT, used=_LIMIT // 10) for n in range(count)]
    # Not of random numbers: to make and to name a million generators takes Dask longer than all that is measured.
    x = da.ones((chunks * _ROWS, _COLS), chunks=(_ROWS, _COLS))
    request = parse(x.T, x)
    problem = request.problem
    budget = wave_budget()
    assert budget is not None, "distmm.waves.mode is off"
    found: dict[str, float] = {"workers": count, "chunks": chunks}
    started = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal started
        found[name] = time.perf_counter() - started
        started = time.perf_counter()

    scheme = choose_scheme(problem, workers, (True, True), budget, dask_costs(), by_ranks=(True, True))
    lap("seconds to choose the scheme")
    found["waves"] = len(scheme.waves)
    layer = build_graph(problem, *request.lying, scheme=scheme).layers[problem.name]
    tracemalloc.start()
    tasks = dict(layer)
    found["bytes of the tasks in the scheduler"] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    lap("seconds to make the graph, traced")
    found["tasks that Dask sees"] = len(tasks)
    one = wave_problem(problem, scheme, 1)
    made = plan(one, workers)
    lap("seconds to plan a wave")
    wire = made.to_wire()
    sources = {name: tasks[barrier_key(one.name)].args[1].tasks for name in "ab"}
    packed = pack_tasks(made, sources)
    lap("seconds to pack a wave's tasks")
    found["messages of a wave"] = 5 * len(made.participants)  # asked and answered twice, and told of the end
    found["bytes of a plan"] = len(dumps(wire))
    found["most bytes of a rank's tasks"] = max(map(len, packed.values()))
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    figures = measure(options.workers, options.chunks)
    for name, value in figures.items():
        print(f"{name:40s} {value:16,.3f}" if isinstance(value, float) else f"{name:40s} {value:16,d}")
    if options.json:
        about = {"hardware": environment.hardware(), "revision": revision()}
        with open(options.json, "w") as file:
            json.dump({**about, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
