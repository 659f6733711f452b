"""cuSOLVERMp with one process a GPU: its routines on random matrices, timed and checked, by any grid and block size.

Each rank has its blocks of a block-cyclic matrix, the columns one after the other. Nothing is gathered: results are
checked by products with a random vector, and by norms. The decompositions that nvmath-python does not bind are called
through ctypes.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Listener
from typing import Any

import numpy as np

from benchmarks.gpu.solver_jobs import JOBS, Call, Job, SolverCase
from benchmarks.gpu.team import describe

_MEETING = 60.0
# What the errors of a result may be, in units of n times the machine's precision.
_TOLERANCE = 10.0

# Arguments after the handle: pointers, (small) integers, 64-bit integers.
_UNBOUND = {"gesvd": "piiqqpqqpppqqppqqpi", "polar": "piqqpqqppqqpi"}
_C_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "q": ctypes.c_int64, "z": ctypes.c_size_t}
_STATUS = {
    **{1: "NOT_INITIALIZED", 2: "ALLOC_FAILED", 3: "INVALID_VALUE", 4: "ARCH_MISMATCH", 6: "EXECUTION_FAILED"},
    **{7: "INTERNAL_ERROR", 8: "MATRIX_TYPE_NOT_SUPPORTED", 9: "NOT_SUPPORTED"},
}


class Library:
    """The routines of cuSOLVERMp by their names."""

    def __init__(self, device: int, stream: int) -> None:
        from nvmath.bindings import cusolverMp

        self.bindings = cusolverMp
        self.handle = int(cusolverMp.create(device, stream))
        self.version = int(cusolverMp.get_version(self.handle))
        self._library: Any = None

    def sizes(self, call: Call, dtype: int) -> tuple[int, int]:
        """Return the bytes of the workspaces on the device and on the host."""
        arguments = call.arguments if call.for_size is None else call.for_size
        if call.name not in _UNBOUND:
            device, host = getattr(self.bindings, f"{call.name}_buffer_size")(self.handle, *arguments, dtype)
            return int(device), int(host)
        found = ctypes.c_size_t(0), ctypes.c_size_t(0)
        pointers = [ctypes.addressof(size) for size in found]
        self._by_ctypes(f"{call.name}_bufferSize", _UNBOUND[call.name] + "pp", (*arguments, dtype, *pointers))
        return found[0].value, found[1].value

    def run(self, call: Call, dtype: int, work: Sequence[int]) -> None:
        """Call a routine with ``work``: pointer and bytes on the device, the same on the host, pointer to info."""
        if call.name not in _UNBOUND:
            getattr(self.bindings, call.name)(self.handle, *call.arguments, dtype, *work)
        else:
            self._by_ctypes(call.name, _UNBOUND[call.name] + "pzpzp", (*call.arguments, dtype, *work))

    def _by_ctypes(self, name: str, kinds: str, arguments: Sequence[int]) -> None:
        if self._library is None:
            from cuda import pathfinder

            self._library = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cusolverMp").abs_path)
        function = self._library["cusolverMp" + name[0].upper() + name[1:]]
        function.restype, function.argtypes = ctypes.c_int, [_C_TYPES[kind] for kind in "p" + kinds]
        status = function(self.handle, *arguments)
        if status:
            raise RuntimeError(f"{name}: cuSOLVER status {status} {_STATUS.get(status, '')}")


class SolverRank:
    """One process of cuSOLVERMp."""

    def __init__(self, rank: int, size: int, port: int, options: dict[str, Any]) -> None:
        import cupy as cp

        from dask_distmm.comms.nccl import NcclComm, make_unique_id

        self.cp, self.rank, self.size = cp, rank, size
        self.index = rank if cp.cuda.runtime.getDeviceCount() > 1 else 0
        cp.cuda.Device(self.index).use()
        self.stream = cp.cuda.Stream(non_blocking=True)
        unique_id = _meet(rank, size, port, make_unique_id)
        with self.stream:
            self.comm = NcclComm(size, rank, unique_id, self.stream)
            self.library = Library(self.index, self.stream.ptr)
        self._grids: dict[tuple[int, int], int] = {}
        name = cp.cuda.runtime.getDeviceProperties(self.index)["name"]
        self.info = {"cusolvermp": self.library.version, "gpu": name.decode() if isinstance(name, bytes) else name}

    def grid(self, shape: tuple[int, int]) -> int:
        """Return the grid of processes of some shape, made once, by all ranks together."""
        if shape not in self._grids:
            mapping = int(self.library.bindings.GridMapping.COL_MAJOR)
            made = self.library.bindings.create_device_grid(self.library.handle, self.comm.handle, *shape, mapping)
            self._grids[shape] = int(made)
        return self._grids[shape]

    def together(self, work: Callable[[], Any]) -> Any:
        """Do something without the others, and fail on all ranks if it fails on one."""
        problem, found = "", None
        try:
            found = work()
        except Exception as error:
            problem = describe(error) or "failed"
        problems = self.comm.agree(problem)
        if problems:
            rank, text = next(iter(problems.items()))
            raise RuntimeError(f"rank {rank}: {text}")
        return found

    def measure(self, case: SolverCase) -> dict[str, Any]:
        """Return the seconds of the slowest rank in each repetition, and how large the error of the result is."""
        self._free()
        try:
            with self.stream:
                return self._measured(case)
        finally:
            self._free()

    def _measured(self, case: SolverCase) -> dict[str, Any]:
        grid = self.grid(case.grid)
        job: Job = self.together(lambda: JOBS[case.kind](self, case, grid))
        try:
            sizes = self.together(lambda: [self.library.sizes(call, job.code) for call in job.calls])
            device, host = (max(self.comm.largest(size[which]) for size in sizes) for which in (0, 1))
            buffers = self.together(lambda: (self.cp.empty(device + 16, "u1"), np.empty(host + 16, "u1")))
            info = self.cp.zeros(1, np.int32)
            work = buffers[0].data.ptr, device, buffers[1].ctypes.data, host, info.data.ptr
            expected, seconds = None, []
            for _ in range(case.repeat):
                self.together(job.fill)
                expected = job.expected() if expected is None else expected
                seconds.append(self._timed(job, work))
                if seconds[-1] > case.limit or self.comm.largest(int(time.time() > case.deadline)):
                    break
            for call in job.calls[job.timed :]:
                self._run(call, job, work)
            failed = self.comm.largest(abs(int(info.get()[0])))
            del buffers, work
            answer = {"seconds": seconds, "workspace": device}
            return answer | (self._checked(case, expected, job.found()) if not failed else _bad(f"info = {failed}"))
        finally:
            job.close()

    def _timed(self, job: Job, work: Sequence[int]) -> float:
        self.stream.synchronize()
        self.comm.agree()
        started = time.perf_counter()
        for call in job.calls[: job.timed]:
            self._run(call, job, work)
        return self.comm.largest(int((time.perf_counter() - started) * 1e9)) / 1e9

    def _run(self, call: Call, job: Job, work: Sequence[int]) -> None:
        self.library.run(call, job.code, work)
        self.stream.synchronize()

    def _checked(self, case: SolverCase, expected: Any, found: Any) -> dict[str, Any]:
        error = float(self.cp.linalg.norm(found - expected) / self.cp.linalg.norm(expected))
        bound = _TOLERANCE * case.n * float(np.finfo(case.dtype).eps)
        # A NaN is not below the bound either.
        return {"error": error} if error <= bound else _bad(f"wrong result: relative error {error:.3g}")

    def total(self, vector: Any) -> Any:
        """Return the sum of all ranks' vectors, on all of them."""
        parts = self.cp.empty((self.size, vector.size), vector.dtype)
        parts[self.rank] = vector
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.comm.exchange(
            [(rank, parts[self.rank].data.ptr, vector.nbytes) for rank in others],
            [(rank, parts[rank].data.ptr, vector.nbytes) for rank in others],
        )
        return parts.sum(0)

    def _free(self) -> None:
        gc.collect()
        self.cp.get_default_memory_pool().free_all_blocks()

    def healthy(self) -> bool:
        """Whether the GPU still works."""
        try:
            self.stream.synchronize()
            return float(self.cp.ones(1).sum()) == 1.0
        except Exception:
            return False

    def close(self) -> None:
        """Leave all to the end of the process."""


def _bad(text: str) -> dict[str, Any]:
    return {"failure": text}


def _meet(rank: int, size: int, port: int, make: Callable[[], bytes]) -> bytes:
    """Return what rank 0 makes, on all ranks."""
    if rank == 0:
        made = make()
        with Listener(("127.0.0.1", port)) as listener:
            for _ in range(size - 1):
                with listener.accept() as other:
                    other.send_bytes(made)
        return made
    end = time.monotonic() + _MEETING
    while True:
        try:
            with Client(("127.0.0.1", port)) as found:
                return found.recv_bytes()
        except (OSError, EOFError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
