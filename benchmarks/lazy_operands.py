"""What ``enable()`` does to products of operands of all kinds, and to parts of them: with and without, by turns.

    python -m benchmarks.lazy_operands [--workers 2] [--size 4000] [--chunks 4] [--repeat 5] [--only NAME ...] [--gpu]

Operands are in memory, or still to be made: random numbers, chunks of a Zarr store, results of ``map_blocks``, and
these cut otherwise.
Of each product the whole, a slice, a block, an element and the trace are computed; of small products the whole and an
element. A row is good if it takes at most 1.05 times what it takes without, and 10 ms. Each turn has fresh operands.
With ``--gpu`` chunks are CuPy's, and none come from a store.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask.array as da
import numpy as np
import zarr
from distributed import futures_of, wait

import dask_distmm
from benchmarks.harness import environment
from benchmarks.harness.cluster import started
from benchmarks.revision import revision

# A program may be so much slower, and take so many seconds more.
_SLOWER, _MORE = 1.05, 0.01

PARTS: dict[str, Callable[[da.Array], Any]] = {
    "whole": lambda d: d,
    "slice": lambda d: d[: len(d) // 20, -len(d) // 20 :].mean(),
    "block": lambda d: d.blocks[-1, 0].sum(),
    "element": lambda d: d[17, -17],
    "trace": da.trace,
}


def plus_one(part: Any) -> Any:
    """Return a chunk and one: a function of the user."""
    return part + 1.0


class Operands:
    """Makes operands of each kind, fresh ones each time."""

    def __init__(self, size: int, chunks: int, folder: str, gpu: bool) -> None:
        self.size, self.chunk, self.folder, self.gpu = size, -(-size // chunks), folder, gpu
        self._seeds = itertools.count()

    def random(self) -> da.Array:
        """Random numbers that are still to be made."""
        if self.gpu:
            import cupy

            state = da.random.RandomState(next(self._seeds), RandomState=cupy.random.RandomState)
            return state.random_sample((self.size, self.size), chunks=self.chunk)
        return da.random.default_rng(next(self._seeds)).random((self.size, self.size), chunks=self.chunk)

    def persisted(self) -> da.Array:
        """Random numbers in memory."""
        x = self.random().persist()
        wait(x)
        return x

    def zarr(self) -> da.Array:
        """Chunks of a store; of two that are written once, the array's name is new each time."""
        number = next(self._seeds)
        path = f"{self.folder}/{self.size}-{self.chunk}-{number % 2}.zarr"
        with contextlib.suppress(FileExistsError, zarr.errors.ContainsArrayError):
            shape, chunks = (self.size, self.size), (self.chunk, self.chunk)
            stored = zarr.create_array(path, shape=shape, chunks=chunks, dtype=float)
            stored[...] = np.random.default_rng(number).random(shape)
        return da.from_zarr(path, name=f"stored-{self.size}-{number}")

    def mapped(self) -> da.Array:
        """Results of a function."""
        return self.random().map_blocks(plus_one, dtype=float)

    def rechunked(self) -> da.Array:
        """Random numbers that are cut into columns."""
        return self.random().rechunk((self.size, self.chunk))

    def in_memory_rechunked(self) -> da.Array:
        """Random numbers in memory that are cut into columns."""
        return self.persisted().rechunk((self.size, self.chunk))


def programs(options: argparse.Namespace, folder: str) -> Iterator[tuple[str, Callable[[], da.Array], Any]]:
    """Yield name, a function that makes an operand, and what is computed of a product."""
    kinds = ("persisted", "random", "zarr", "mapped", "rechunked", "in_memory_rechunked")
    large = Operands(options.size, options.chunks, folder, options.gpu)
    for kind, part in itertools.product(kinds, PARTS):
        if options.gpu and kind == "zarr":
            continue
        yield f"{kind.replace('_', ' ')}, {part}", getattr(large, kind), PARTS[part]
    for size, chunks in ((64, 2), (512, 2), (1024, 2), (1024, 4)):
        small = Operands(size, chunks, folder, options.gpu)
        for kind, part in itertools.product(("random", "mapped"), ("whole", "element")):
            yield f"small {size} in {chunks} x {chunks}, {kind}, {part}", getattr(small, kind), PARTS[part]


def once(make: Callable[[], da.Array], compute: Callable[[da.Array], Any], on: bool) -> float:
    """Return the seconds of building and computing a part of a product."""
    with dask_distmm.enabled() if on else contextlib.nullcontext():
        a, b = make(), make()
        started = time.perf_counter()
        result = compute(a @ b).persist()
        wait(result)
        seconds = time.perf_counter() - started
    if bad := [future for future in futures_of(result) if future.status != "finished"]:
        raise bad[0].exception()
    return seconds


def main() -> None:
    """Run from the command line; exit with 1 if a program is slower."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", type=int, default=4000, help="rows and columns of the operands")
    parser.add_argument("--chunks", type=int, default=4, help="along each axis")
    parser.add_argument("--repeat", type=int, default=5, help="of which medians are taken")
    parser.add_argument("--only", nargs="+", default=[""], help="programs by how their names begin")
    parser.add_argument("--without", nargs="+", default=(), help="programs by how their names end")
    parser.add_argument("--gpu", action="store_true", help="CuPy chunks, UCX between workers")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    found, worse = {}, []
    with (
        tempfile.TemporaryDirectory() as folder,
        started(gpu=options.gpu, workers=options.workers, dashboard_address="127.0.0.1:0"),
    ):
        print(f"{'milliseconds':44s} {'with':>9s} {'without':>9s} {'ratio':>6s}")
        for name, make, compute in programs(options, folder):
            if not name.startswith(tuple(options.only)) or name.endswith(tuple(options.without)):
                continue
            taken: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(options.repeat + 1):
                for on in (True, False) if turn % 2 else (False, True):
                    seconds = once(make, compute, on)
                    if turn:
                        taken[on].append(seconds)
                    time.sleep(0.05)
            ours, stock = statistics.median(taken[True]), statistics.median(taken[False])
            found[name] = {"with": taken[True], "without": taken[False]}
            slower = ours > _SLOWER * stock + _MORE
            worse += [name] if slower else []
            print(
                f"{name:44s} {1e3 * ours:9.1f} {1e3 * stock:9.1f} {stock / ours:6.2f}{' slower' * slower}", flush=True
            )
    print(f"{len(found)} programs, {len(worse)} of them slower: {', '.join(worse) or 'none'}")
    if options.json:
        with open(options.json, "w") as file:
            software = environment.software("numpy", "dask", "distributed", "zarr", "dask_distmm")
            about = {"hardware": environment.hardware(), "software": software, "revision": revision()}
            json.dump({**about, "programs": found}, file, indent=1)
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
