"""Products larger than memory by cubed, which writes every partial product to storage: one case, in this process.

    python -m benchmarks.peers.by_cubed CASE ROWS COLS MEMORY FOLDER [--zarr FOLDER]

Two processes; prints one line of JSON: seconds, and the most memory of a process (bytes). `benchmarks.waves` starts it.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

import psutil

_SAMPLED = 0.05
# What a process of cubed with its libraries holds before it has any chunk.
_RESERVED = "150MB"


def product(case: str, rows: int, cols: int, memory: int, folder: str, stored: str | None) -> Any:
    """Return the lazy result of a case of `benchmarks.waves`, by its first word: ``gram``, ``tall``, ``square``."""
    import cubed
    import cubed.array_api as xp
    import cubed.random
    import numpy as np

    spec = cubed.Spec(
        folder,
        allowed_mem=memory,
        reserved_mem=_RESERVED,
        executor_name="processes",
        executor_options={"max_workers": 2},
        zarr_compressor=None,
    )

    def generated() -> Any:
        return cubed.random.random((rows, cols), chunks=(2000, 1000) if case != "square" else (1000, 1000), spec=spec)

    x = generated() if stored is None else cubed.from_zarr(stored, spec=spec)
    if case == "gram":
        return xp.sum(xp.matmul(xp.permute_dims(x, (1, 0)), x))
    if case == "tall":
        small = np.random.default_rng(2).random((cols, 50))
        return xp.matmul(x, cubed.from_array(small, chunks=(cols, 50), spec=spec))
    return xp.matmul(x, generated())


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=["gram", "tall", "square"])
    parser.add_argument("rows", type=int)
    parser.add_argument("cols", type=int)
    parser.add_argument("memory", type=int, help="bytes that a task may take")
    parser.add_argument("folder")
    parser.add_argument("--zarr")
    options = parser.parse_args()
    peak, end = [0], threading.Event()

    def look() -> None:
        me = psutil.Process()
        while not end.wait(_SAMPLED):
            for child in me.children(recursive=True):
                try:
                    peak[0] = max(peak[0], child.memory_info().rss)
                except psutil.Error:
                    continue

    threading.Thread(target=look, daemon=True).start()
    started = time.perf_counter()
    found = product(options.case, options.rows, options.cols, options.memory, options.folder, options.zarr)
    if options.case == "gram":
        found.compute()
    else:
        import cubed

        cubed.to_zarr(found, f"{options.folder}/d.zarr")
    end.set()
    print(json.dumps({"seconds": time.perf_counter() - started, "peak": peak[0]}))


if __name__ == "__main__":
    main()
