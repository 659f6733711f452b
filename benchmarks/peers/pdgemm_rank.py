"""One rank of the ScaLAPACK measurement; started by ``mpirun`` from `benchmarks.peers.pdgemm`.

BLACS starts and ends MPI by itself, so ctypes reaches everything and no compiler is needed. Each rank
writes its findings to ``DIRECTORY/rank-K.json``: the standard output of ranks can interleave.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import threadpoolctl

from benchmarks.harness.protocol import sample_rows, scaled_error, uniform_matrix

Matrix = npt.NDArray[Any]


def owned(n: int, block: int, coordinate: int, count: int) -> npt.NDArray[np.int64]:
    """Return the global indices that a coordinate of the process grid owns, block-cyclically."""
    indices = np.arange(n)
    mine: npt.NDArray[np.int64] = indices[(indices // block) % count == coordinate]
    return mine


def pointer(array: Matrix) -> ctypes.c_void_p:
    """Return the address of an array's data."""
    return ctypes.c_void_p(array.ctypes.data)


class Blacs:
    """The calling process's place in a BLACS process grid."""

    def __init__(self, library: str, grid: tuple[int, int], tuner: str | None) -> None:
        # Loaded first and globally, its `pilaenv_` is the one that the library then finds.
        self.tuner = ctypes.CDLL(tuner, mode=ctypes.RTLD_GLOBAL) if tuner else None
        # Open MPI loads plugins that look its symbols up globally.
        self.library = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        rank, ranks = ctypes.c_int(), ctypes.c_int()
        self.library.Cblacs_pinfo(ctypes.byref(rank), ctypes.byref(ranks))
        if ranks.value != grid[0] * grid[1]:
            raise RuntimeError(f"{ranks.value} ranks do not fill a grid of {grid}")
        self.rank, self.ranks = rank.value, ranks.value
        self.context = ctypes.c_int()
        self.library.Cblacs_get(-1, 0, ctypes.byref(self.context))
        self.library.Cblacs_gridinit(ctypes.byref(self.context), b"Row-major", *grid)
        sizes = [ctypes.c_int() for _ in range(4)]
        self.library.Cblacs_gridinfo(self.context, *(ctypes.byref(size) for size in sizes))
        self.row, self.column = sizes[2].value, sizes[3].value

    def algorithmic_block(self, wanted: int) -> int:
        """Ask for PBLAS's algorithmic block, and return the one in force: its own without a tuner."""
        if self.tuner is not None:
            ctypes.c_int.in_dll(self.tuner, "algorithmic_block").value = wanted
        return int(ctypes.CDLL(None).pilaenv_(ctypes.byref(self.context), b"D"))

    def barrier(self) -> None:
        """Wait for every rank of the grid."""
        self.library.Cblacs_barrier(self.context, b"All")

    def descriptor(self, n: int, block: int, local_rows: int) -> ctypes.Array[ctypes.c_int]:
        """Return the array descriptor of a square matrix in square blocks."""
        result = (ctypes.c_int * 9)()
        info = ctypes.c_int()
        # In order: rows, columns, row block, column block, source row, source column, context, leading.
        values = [n, n, block, block, 0, 0, self.context.value, max(1, local_rows)]
        self.library.descinit_(result, *(ctypes.byref(ctypes.c_int(value)) for value in values), ctypes.byref(info))
        if info.value:
            raise RuntimeError(f"descinit: argument {-info.value} is wrong")
        return result

    def gemm(self, n: int, desc: ctypes.Array[ctypes.c_int], a: Matrix, b: Matrix, c: Matrix) -> None:
        """Compute the local part of ``C = A B``."""
        single = a.dtype == np.float32
        routine = self.library.psgemm_ if single else self.library.pdgemm_
        real = ctypes.c_float if single else ctypes.c_double
        size, one = ctypes.byref(ctypes.c_int(n)), ctypes.byref(ctypes.c_int(1))
        alpha, beta = ctypes.byref(real(1.0)), ctypes.byref(real(0.0))
        at = (one, one, desc)
        routine(b"N", b"N", size, size, size, alpha, pointer(a), *at, pointer(b), *at, beta, pointer(c), *at)

    def exit(self) -> None:
        """Leave the grid and end MPI."""
        self.library.Cblacs_gridexit(self.context)
        self.library.Cblacs_exit(0)


def measure(blacs: Blacs, task: dict[str, Any], block: int) -> dict[str, Any]:
    """Time the product at one block size, and check the part of it that this rank holds."""
    n, grid = task["size"], task["grid"]
    # Every rank draws the whole of A and of B, then keeps its part: the check needs no communication.
    rows, columns = owned(n, block, blacs.row, grid[0]), owned(n, block, blacs.column, grid[1])
    a = uniform_matrix(n, task["dtype"], [task["seed"], 0])
    local_a = np.asfortranarray(a[np.ix_(rows, columns)])
    sampled = np.intersect1d(sample_rows(n, task["seed"]), rows)
    a_rows = a[sampled]
    del a
    b = uniform_matrix(n, task["dtype"], [task["seed"], 1])
    local_b = np.asfortranarray(b[np.ix_(rows, columns)])
    b_columns = b[:, columns]
    del b
    local_c = np.full(local_a.shape, np.nan, dtype=local_a.dtype, order="F")
    algorithmic = blacs.algorithmic_block(block)
    desc = blacs.descriptor(n, block, len(rows))
    for _ in range(task["warmups"]):
        blacs.gemm(n, desc, local_a, local_b, local_c)
    seconds = []
    for _ in range(task["timings"]):
        local_c.fill(np.nan)
        blacs.barrier()
        start = time.perf_counter()
        blacs.gemm(n, desc, local_a, local_b, local_c)
        blacs.barrier()
        seconds.append(time.perf_counter() - start)
    error = scaled_error(a_rows, b_columns, local_c[np.searchsorted(rows, sampled)])
    return {"block": block, "algorithmic_block": algorithmic, "seconds": seconds, "error": error}


def main() -> None:
    """Measure what the JSON text in the last argument asks for."""
    task = json.loads(sys.argv[1])
    grid = (task["grid"][0], task["grid"][1])
    blacs = Blacs(task["library"], grid, task["tuner"])
    found = {
        "ranks": blacs.ranks,
        "blocks": [measure(blacs, task, block) for block in task["blocks"]],
        "pools": threadpoolctl.threadpool_info(),
    }
    Path(task["directory"], f"rank-{blacs.rank}.json").write_text(json.dumps(found))
    blacs.barrier()
    blacs.exit()


if __name__ == "__main__":
    main()
