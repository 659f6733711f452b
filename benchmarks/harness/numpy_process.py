"""NumPy in one process of its own, on as many BLAS threads as the cluster has: no cluster, no copies."""

from __future__ import annotations

import multiprocessing
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import threadpoolctl

from benchmarks.harness.environment import blas_pools
from benchmarks.harness.protocol import Case, Contender, Quiet, Sample, sample_rows, scaled_error, uniform_matrix


def _measure(case: Case, seed: int, threads: int) -> tuple[Sample, list[dict[str, Any]]]:
    """Time one product; runs in the process of its own."""
    a = uniform_matrix(case.size, case.dtype, [seed, 0])
    b = uniform_matrix(case.size, case.dtype, [seed, 1])
    with threadpoolctl.threadpool_limits(threads, user_api="blas"):
        pools = blas_pools()
        # Untimed: the BLAS threads have slept and the caches are the other peers' since the last turn.
        np.matmul(a, b)
        start = time.perf_counter()
        c = np.matmul(a, b)
        seconds = time.perf_counter() - start
    rows = sample_rows(case.size, seed)
    return Sample(seconds, scaled_error(a[rows], b, c[rows])), pools


class NumpyProcess(Contender):
    """NumPy's matmul in a spawned process, which stays idle between its turns."""

    name = "numpy"

    def __init__(self, threads: int, quiet: Quiet = nullcontext) -> None:
        self.threads, self.quiet = threads, quiet
        self.pools: list[dict[str, Any]] = []
        # Spawned, not forked: a BLAS that the parent has already set up would come along with its threads.
        # Ctrl-C goes to all processes of a terminal; this one is ended by the program that started it.
        self.executor = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),
        )

    def measure(self, case: Case, seed: int, *, warmup: bool) -> Sample:
        """Time one product in the process."""
        with self.quiet():
            sample, self.pools = self.executor.submit(_measure, case, seed, self.threads).result()
        return sample

    def describe(self) -> dict[str, Any]:
        """Return the threads and the BLAS that the process used."""
        return {"threads": self.threads, "blas": self.pools}

    def close(self) -> None:
        """End the process."""
        self.executor.shutdown()
