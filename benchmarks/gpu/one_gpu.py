"""One GPU alone: cuSOLVER and cuBLAS, called through CuPy, in a process of its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.solver_jobs import SolverCase


def shape_of(kind: str, n: int) -> tuple[int, int]:
    """Return rows and columns of the matrix of a kind: ``"tall"`` has as many elements as the square ones."""
    return (16 * n, n // 16) if kind == "tall" else (n, n)


def calls(cp: Any, linalg: Any) -> dict[str, Callable[[Any], Any]]:
    """Return what is called for each kind, of CuPy and of its ``cupyx.scipy.linalg``."""

    def polar(a: Any) -> Any:
        u, s, vh = cp.linalg.svd(a)
        return u @ vh, (vh.T * s) @ vh

    return {
        "cholesky": cp.linalg.cholesky,
        "lu": linalg.lu_factor,
        "solve": lambda a: cp.linalg.solve(a, a[:, 0]),
        "qr": lambda a: cp.linalg.qr(a, mode="r"),
        "tall": cp.linalg.qr,
        "gram": lambda a: a.T @ a,
        "gemm": lambda a: a @ a,
        "eigh": cp.linalg.eigh,
        "eigvalsh": cp.linalg.eigvalsh,
        "svd": cp.linalg.svd,
        "svdvals": lambda a: cp.linalg.svd(a, compute_uv=False),
        "polar": polar,
    }


class OneGpu:
    """The process."""

    def __init__(self, rank: int, size: int, port: int, options: dict[str, Any]) -> None:
        import cupy as cp
        import cupyx.scipy.linalg

        self.cp, self._calls = cp, calls(cp, cupyx.scipy.linalg)
        self.info = {"cupy": cp.__version__}

    def measure(self, case: SolverCase) -> dict[str, Any]:
        """Return the seconds of each repetition; the first one counts, too."""
        cp = self.cp
        self._free()
        try:
            a = cp.random.default_rng(case.n).standard_normal(shape_of(case.kind, case.n), dtype=case.dtype)
            if case.kind == "cholesky":
                cp.fill_diagonal(a, 2 * case.n)
            seconds = []
            for _ in range(case.repeat):
                cp.cuda.Device().synchronize()
                started = time.perf_counter()
                self._calls[case.kind](a)
                cp.cuda.Device().synchronize()
                seconds.append(time.perf_counter() - started)
                if time.time() > case.deadline:
                    break
            return {"seconds": seconds}
        finally:
            a = None
            self._free()

    def _free(self) -> None:
        gc.collect()
        self.cp.get_default_memory_pool().free_all_blocks()

    def healthy(self) -> bool:
        """Whether the GPU still works."""
        try:
            return float(self.cp.ones(1).sum()) == 1.0
        except Exception:
            return False

    def close(self) -> None:
        """Leave all to the end of the process."""
