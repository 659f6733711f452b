"""JAX: one process for all GPUs."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

import numpy as np

from benchmarks.gpu.cases import Case
from benchmarks.gpu.ranks import checked


class Jax:
    """``jax.jit`` of a matmul over a mesh of all GPUs, in one process; wall-clock times."""

    def __init__(self, rank: int, size: int, port: int, options: dict[str, Any]) -> None:
        os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_ENABLE_X64": "1"}
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        devices = jax.devices()
        if len(devices) != options["gpus"]:
            raise RuntimeError(f"jax sees {len(devices)} devices, not {options['gpus']}: {devices[0].platform}")
        self.jax = jax
        mesh = Mesh(np.array(devices), ("x",))
        self.rows, self.cols = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x", None), (None, "x")))
        self.info = {"jax": jax.__version__, "devices": len(devices), "gpu": devices[0].device_kind}

    def measure(self, case: Case) -> dict[str, Any]:
        """Time A by rows times B by columns into D by rows."""
        jax, shape = self.jax, case.shape
        kind = getattr(jax.numpy, case.dtype)
        keys = jax.random.split(jax.random.key(secrets.randbits(31)))
        a = jax.jit(lambda key: jax.random.normal(key, (shape.m, shape.k), kind), out_shardings=self.rows)(keys[0])
        b = jax.jit(lambda key: jax.random.normal(key, (shape.k, shape.n), kind), out_shardings=self.cols)(keys[1])
        jax.block_until_ready((a, b))
        precision = jax.lax.Precision.HIGHEST if case.dtype == "float32" else None
        multiply = jax.jit(lambda x, y: jax.numpy.matmul(x, y, precision=precision), out_shardings=self.rows)
        seconds, d = [], None
        for _ in range(case.repeat + 1):
            d = None
            start = time.perf_counter()
            d = jax.block_until_ready(multiply(a, b))
            seconds.append(time.perf_counter() - start)
        v = np.random.default_rng(shape.n).standard_normal(shape.n)
        expected, found = self._times(a, self._times(b, v)), self._times(d, v)
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        return {"seconds": seconds[1:], "warmup_seconds": seconds[0], **checked(error, case.dtype)}

    def _times(self, x: Any, v: np.ndarray) -> np.ndarray:
        """Return a sharded matrix times a vector, in float64: shard by shard, so that no collective is needed."""
        result = np.zeros(x.shape[0])
        for shard in x.addressable_shards:
            rows, cols = shard.index
            part = self.jax.device_put(v[cols], shard.data.device)
            result[rows] += np.asarray(shard.data.astype("float64") @ part)
        return result

    def healthy(self) -> bool:
        """Start again after any failure: a runtime that ran out of memory keeps what it had."""
        return False

    def close(self) -> None:
        """Leave all to the end of the process."""
