"""The memory of NumPy's temporaries while a run computes statement by statement."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time

# Of glibc: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, their default, and the most that all versions take (bytes).
_TRIM_AND_MMAP, _DEFAULT, _LARGE = (-1, -3), 2**17, 2**25


class ReusedHeap:
    """Keeps the C library from handing each large temporary back to the system, which clears its pages once more.

    Half of what NumPy takes for a few megabytes goes there. glibc adapts to sizes by itself, but not where its limits
    are in the environment, as Dask's nannies have them. What is free when the last run of this process ends is handed
    back then, unless that took more than a fiftieth of the time since.
    """

    def __init__(self) -> None:
        self._lock, self._runs = threading.Lock(), 0
        limits = [os.environ.get(f"MALLOC_{name}_THRESHOLD_") for name in ("TRIM", "MMAP")]
        self._library = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
        self._adapts = not any(limits)
        self._limits = [int(limit) if limit and limit.isdigit() else _DEFAULT for limit in limits]
        self._trimmed = self._took = 0.0

    def _limit(self, *limits: int) -> None:
        if self._library is not None and not self._adapts:
            for option, limit in zip(_TRIM_AND_MMAP, limits, strict=True):
                self._library.mallopt(option, limit)

    def trim(self) -> None:
        """Hand what is free back to the system."""
        if self._library is not None:
            self._library.malloc_trim(0)

    def __enter__(self) -> None:
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._limit(_LARGE, _LARGE)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._runs -= 1
            if self._runs:
                return
            self._limit(*self._limits)
            now = time.perf_counter()
            if not self._adapts and now - self._trimmed > 50 * self._took:
                self.trim()
                self._trimmed = time.perf_counter()
                self._took = self._trimmed - now


heap = ReusedHeap()
