"""Checks of products, and of clusters after them."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray


def assert_large_product(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> None:
    """Check ``c == a @ b`` times a random vector, where `assert_product` in extended precision would take minutes.

    Parameters
    ----------
    a, b, c
        Matrices (m, k), (k, n) and (m, n) of float32 or float64.

    Raises
    ------
    AssertionError
        Some row is outside of 16 eps ``|a| |b| |v|`` for a vector v, or NaN.
    """
    v, eps = np.random.default_rng().standard_normal(c.shape[1]), np.finfo(a.dtype).eps
    a, b, c = (x.astype(float) for x in (a, b, c))
    bound = 16 * eps * (abs(a) @ (abs(b) @ abs(v)))
    assert (abs(c @ v - a @ (b @ v)) <= bound).all(), "a product is wrong"


def assert_product(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], *, factor: float = 16.0) -> None:
    """Check ``c == a @ b`` by the gate of the PBLAS testers.

    Elementwise ``|c - ref| <= factor * eps * sum_k |a_ik| |b_kj|`` plus half a unit in the last place of c's
    type, with eps of the type that is summed in or of c, whichever is coarser, and ref computed in a higher
    precision. Integers and bool must be equal (integers modulo their range, as NumPy's are).

    Parameters
    ----------
    a, b, c
        Matrices (m, k), (k, n), (m, n).
    factor
        Multiple of eps that is let through.

    Raises
    ------
    AssertionError
        Some element is outside the gate, or NaN where the reference is not; type or shape is wrong.
    """
    dtype = np.result_type(a.dtype, b.dtype)
    assert c.dtype == dtype, f"type {c.dtype}, expected {dtype}"
    assert c.shape == (a.shape[0], b.shape[1]), f"shape {c.shape}, expected {(a.shape[0], b.shape[1])}"
    if dtype.kind in "biu":
        np.testing.assert_array_equal(c, np.matmul(a.astype(dtype), b.astype(dtype)))
        return
    narrow = dtype.itemsize == 2
    high = np.clongdouble if dtype.kind == "c" else (np.float64 if narrow else np.longdouble)
    ref = np.matmul(a.astype(high), b.astype(high))
    real = np.float64 if narrow else np.longdouble
    magnitude = np.matmul(np.abs(a.astype(high)).astype(real), np.abs(b.astype(high)).astype(real))
    if narrow:
        eps = float(np.finfo(np.float32).eps)
        own = 2.0**-10 if dtype == np.float16 else 2.0**-7
        half_ulp = 0.5 * own * np.abs(ref) + (2.0**-25 if dtype == np.float16 else 0.0)
        bound = factor * eps * magnitude + half_ulp * (1 + factor * eps)
    else:
        eps = float(np.finfo(dtype).eps)
        bound = factor * eps * magnitude
    error = np.abs(c.astype(high) - ref)
    good = error <= bound
    assert good.all(), (
        f"{np.count_nonzero(~good)} of {good.size} elements are outside the gate; "
        f"worst: {float(np.nanmax(np.where(good, 0, error))):.3g}; NaN: {int(np.isnan(c.astype(high)).sum())}"
    )


def _left_on_worker(dask_worker: Any) -> dict[str, int]:
    side = dask_worker.extensions.get("distmm")
    names = ("runs", "chunks", "progress", "replicas")
    return {} if side is None else {name: len(getattr(side, name)) for name in names}


def _left_on_scheduler(dask_scheduler: Any) -> dict[str, int]:
    plugin = dask_scheduler.plugins.get("distmm")
    if plugin is None:
        return {}
    # A barrier that has failed is Dask's to forget, when nobody holds the exception any more.
    barriers = sum(barrier.ts.state != "erred" for barrier in plugin.barriers.values())
    return {"runs": len(plugin.queue), "barriers": barriers, "replicas": len(plugin.replicas)}


def assert_nothing_left(client: Any, timeout: float = 20.0) -> None:
    """Wait until neither workers nor scheduler keep anything of a multiply whose result nobody holds any more.

    Raises
    ------
    AssertionError
        Something is still there after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        gc.collect()
        found = {**client.run(_left_on_worker), "scheduler": client.run_on_scheduler(_left_on_scheduler)}
        left = {where: what for where, what in found.items() if any(what.values())}
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
