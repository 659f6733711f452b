"""Peers with one process a GPU: cuBLAS alone, nvmath-python, PyTorch. All use PyTorch's tensors and streams."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.cases import Case, split

# Largest error of D v against A (B v), in the 2-norm and relative; TF32 in place of float32 would be found.
TOLERANCES = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5, "float64": 1e-12}


class Part(NamedTuple):
    """A rank's part of a matrix, and where it begins."""

    local: Any
    row: int = 0
    col: int = 0


class Product(NamedTuple):
    """A multiply that is ready to run: the call, its inputs, and where this rank's part of D begins."""

    call: Callable[[], Any]
    a: Part | None = None
    b: Part | None = None
    row: int = 0
    col: int = 0


def checked(error: float, dtype: str) -> dict[str, Any]:
    """Return the entries of an answer for an error that was found."""
    if not error <= TOLERANCES[dtype]:  # a NaN is not either
        return {"failure": f"wrong result: relative error {error:.3g}", "error": str(error)}
    return {"error": error}


class TorchRank:
    """One process of a peer that runs on PyTorch's tensors, streams and NCCL."""

    def __init__(self, rank: int, size: int, port: int, options: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank, self.size = torch, dist, rank, size
        # One GPU is visible to each process, or all are.
        self.index = rank if torch.cuda.device_count() > 1 else 0
        self.device = torch.device("cuda", self.index)
        torch.cuda.set_device(self.device)
        torch.set_float32_matmul_precision("highest")
        torch.cuda.seed()
        dist.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=self.device
        )
        self._flag = torch.zeros(1, device=self.device)
        dist.all_reduce(self._flag)
        torch.cuda.synchronize()
        self.info = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "gpu": torch.cuda.get_device_name(self.device),
        }
        self.set_up()

    def set_up(self) -> None:
        """Do what the peer needs once."""

    def product(self, case: Case) -> contextlib.AbstractContextManager[Product]:
        """Make fresh inputs and what multiplies them."""
        raise NotImplementedError

    def normal(self, rows: int, cols: int, dtype: str, order: str = "C") -> Any:
        """Return a random matrix on this GPU."""
        shape, kind = ((rows, cols) if order == "C" else (cols, rows)), getattr(self.torch, dtype)
        found = self.torch.randn(shape, dtype=kind, device=self.device)
        return found if order == "C" else found.t()

    def cut(self, length: int) -> tuple[int, int]:
        """Return where this rank's part of an axis begins, and its length."""
        sizes = split(length, self.size)
        return list(accumulate(sizes, initial=0))[self.rank], sizes[self.rank]

    def measure(self, case: Case) -> dict[str, Any]:
        """Time a product between two events; all ranks leave an all-reduce just before the first one."""
        cuda = self.torch.cuda
        with self.product(case) as product:
            seconds, result = [], None
            for _ in range(case.repeat + 1):
                result = None
                start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
                cuda.synchronize()
                self.dist.all_reduce(self._flag)
                start.record()
                result = product.call()
                end.record()
                end.synchronize()
                seconds.append(start.elapsed_time(end) / 1e3)
            answer: dict[str, Any] = {"seconds": seconds[1:], "warmup_seconds": seconds[0]}
            if product.a is not None and product.b is not None:
                error = self._error(case, product.a, product.b, Part(result, product.row, product.col))
                answer |= checked(error, case.dtype)
        del product, result
        cuda.empty_cache()
        return answer

    def _error(self, case: Case, a: Part, b: Part, d: Part) -> float:
        """Return how far D v is from A (B v), for a random vector that all ranks know."""
        torch, shape = self.torch, case.shape
        v = torch.from_numpy(np.random.default_rng(shape.n).standard_normal(shape.n)).to(self.device)
        expected = self._times(a, self._times(b, v, shape.k), shape.m)
        found = self._times(d, v, shape.m)
        return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))

    def _times(self, part: Part, v: Any, rows: int) -> Any:
        """Return a distributed matrix times a vector, in float64, on all ranks."""
        height, width = part.local.shape
        result = self.torch.zeros(rows, dtype=self.torch.float64, device=self.device)
        result[part.row : part.row + height] = part.local.double() @ v[part.col : part.col + width]
        self.dist.all_reduce(result)
        return result

    def healthy(self) -> bool:
        """Whether the GPU still works."""
        try:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
            return float(self.torch.ones(1, device=self.device).sum()) == 1.0
        except Exception:
            return False

    def close(self) -> None:
        """Leave all to the end of the process."""


class Cublas(TorchRank):
    """The bound: each GPU multiplies its part alone, all at the same time; nothing is moved."""

    @contextlib.contextmanager
    def product(self, case: Case) -> Iterator[Product]:
        """Cut m, n or k into one part a GPU."""
        shape = case.shape
        m, n, k = shape.m, shape.n, shape.k
        if case.variant == "rows":
            m = -(-m // self.size)
        elif case.variant == "columns":
            n = -(-n // self.size)
        else:
            k = -(-k // self.size)
        a, b = self.normal(m, k, case.dtype, "F" if shape.gram else "C"), self.normal(k, n, case.dtype)
        d = a.new_empty(m, n)
        yield Product(lambda: self.torch.matmul(a, b, out=d))


class NvMath(TorchRank):
    """nvmath-python's distributed matmul, planned once; only ``execute()`` is timed."""

    def set_up(self) -> None:
        """Initialise nvmath over PyTorch's process group, and leave the legacy default stream."""
        import nvmath
        import nvmath.distributed
        from nvmath.bindings import cublasMp

        group = nvmath.distributed.TorchProcessGroup(device_id=self.index)
        nvmath.distributed.initialize(self.index, group, backends=["nccl"])
        self.torch.cuda.set_stream(self.torch.cuda.Stream())
        self.info |= {"nvmath": nvmath.__version__, "cublasmp": int(cublasMp.get_version())}

    @contextlib.contextmanager
    def product(self, case: Case) -> Iterator[Product]:
        """Cut m and n (AllGather + Matmul) or k (Matmul + ReduceScatter); all in Fortran order, as nvmath wants.

        nvmath expects D by columns from ReduceScatter; cuBLASMp has it by rows too.

        A Gram product's A is stored as X and transposed by the library.
        """
        from nvmath.distributed.distribution import Slab
        from nvmath.distributed.linalg.advanced import Matmul, matrix_qualifiers_dtype

        shape, dtype = case.shape, case.dtype
        (m0, m), (n0, n), (k0, k) = (self.cut(length) for length in (shape.m, shape.n, shape.k))
        gather = case.variant.startswith("all-gather")
        d_rows = gather or case.variant.endswith("D by rows")
        make = self._symmetric if "symmetric" in case.variant else self.normal
        b = make(shape.k, n, dtype, "F") if gather else make(k, shape.n, dtype, "F")
        own = (m, shape.k) if gather else (shape.m, k)
        a = b if shape.gram else self.normal(*own, dtype, "F")
        qualifiers = np.zeros((3,), dtype=matrix_qualifiers_dtype)
        qualifiers[0]["is_transpose"] = shape.gram
        # The part of A is cut along its rows if m is cut, and along the other axis as it is stored transposed.
        distributions = [
            Slab.X if gather != shape.gram else Slab.Y,
            Slab.Y if gather else Slab.X,
            Slab.X if d_rows else Slab.Y,
        ]
        multiply = Matmul(a, b, distributions=distributions, qualifiers=qualifiers)
        try:
            multiply.plan()
            first = a.t() if shape.gram else a
            yield Product(
                multiply.execute,
                Part(first, m0, 0) if gather else Part(first, 0, k0),
                Part(b, 0, n0) if gather else Part(b, k0, 0),
                m0 if d_rows else 0,
                0 if d_rows else n0,
            )
        finally:
            self.torch.cuda.synchronize()
            multiply.free()

    def _symmetric(self, rows: int, cols: int, dtype: str, order: str) -> Any:
        """Return a random matrix in memory of NCCL's, which nvmath can register for the other ranks to read."""
        import nccl.core

        values = self.normal(rows, cols, dtype, order)
        size = values.numel() * values.element_size()
        memory = self.torch.from_dlpack(nccl.core.mem_alloc(size, self.index))
        found = memory[:size].view(values.dtype).view(cols, rows).t()
        found.copy_(values)
        return found


class TorchFused(TorchRank):
    """PyTorch's fused operators over symmetric memory (all GPUs are visible to each process)."""

    def set_up(self) -> None:
        """Find the operators."""
        from torch.distributed import _symmetric_memory

        self.group = self.dist.group.WORLD.group_name
        with warnings.catch_warnings(), contextlib.suppress(AttributeError):
            warnings.simplefilter("ignore")  # newer versions need no such call, and say so
            _symmetric_memory.enable_symm_mem_for_group(self.group)
        self.ops = self.torch.ops.symm_mem

    @contextlib.contextmanager
    def product(self, case: Case) -> Iterator[Product]:
        """Gather A's rows (D by columns), or cut k and scatter the sums (D by rows)."""
        shape, dtype = case.shape, case.dtype
        (m0, m), (n0, n), (k0, k) = (self.cut(length) for length in (shape.m, shape.n, shape.k))
        if case.variant == "all-gather":
            a, b = self.normal(m, shape.k, dtype), self.normal(shape.k, n, dtype)
            # With its default, return_A=True, it never takes the path by NVLink multicast.
            yield Product(
                lambda: self.ops.fused_all_gather_matmul(a, [b], 0, self.group)[1][0],
                Part(a, m0),
                Part(b, 0, n0),
                0,
                n0,
            )
            return
        b = self.normal(k, shape.n, dtype)
        a = b.t() if shape.gram else self.normal(shape.m, k, dtype)
        yield Product(
            lambda: self.ops.fused_matmul_reduce_scatter(a, b, "sum", 0, self.group), Part(a, 0, k0), Part(b, k0), m0
        )
