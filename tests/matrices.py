"""Matrices that many tests use, and waiting for what is to come."""

from __future__ import annotations

import time

import dask.array as da
import numpy as np

from dask_distmm.arrays.linalg.factorize import steps_of


def noise(rng, shape, dtype):
    found = rng.standard_normal(shape)
    return (found + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else found).astype(dtype)


def random(shape, dtype="float64"):
    return noise(np.random.default_rng(), shape, dtype)


def positive(n, dtype="float64"):
    x = random((n, n), dtype)
    return (x @ x.conj().T + n * np.eye(n)).astype(dtype)


def segments_of(axis, part: int) -> list[tuple[int, int, int]]:
    """List the segments of a part of an axis of a layout in local order: first index, local index, size."""
    mine = np.flatnonzero(axis.part == part)
    sizes = axis.bounds[mine + 1] - axis.bounds[mine]
    return list(zip(axis.bounds[mine].tolist(), axis.offset[mine].tolist(), sizes.tolist(), strict=True))


def numroc(n, nb, iproc, isrcproc, nprocs):
    """Rows or columns that a process holds, as ScaLAPACK's NUMROC counts them."""
    rounds, left = divmod(n, nb * nprocs)
    return rounds * nb + min(max(left - (iproc - isrcproc) % nprocs * nb, 0), nb)


def lazy(x):
    """A matrix in random chunks."""
    rng = np.random.default_rng()
    from conformance import random_chunks  # benchmarks import the rest of this module as tests.matrices

    return da.from_array(x, chunks=tuple(random_chunks(rng, size, 4) for size in x.shape))


def fresh(*shape, chunks=30, dtype="float64"):
    return da.from_array(random(shape, dtype), chunks=chunks)


def operands():
    """Return A and B of a product that takes several workers, and the same as Dask arrays."""
    a, b = random((300, 260)), random((260, 280))
    return a, b, da.from_array(a, chunks=60), da.from_array(b, chunks=70)


def is_collective(array):
    return any("distmm-barrier" in str(key) for key in array.dask)


def problem_of(x):
    """Return the last factorization or program that an array is made by, or None if there is none in its graph."""
    return next((problem for problem in steps_of(x) if problem.kind != "product"), None)


# Seconds in which happens what is bound to: on a busy machine it may take a hundred times as long as on an idle one.
LIMIT = 120


def until(done):
    """Wait until a condition comes true; return what it was."""
    deadline = time.monotonic() + LIMIT
    while not (result := done()):
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)
    return result


def assert_near(found, expected, rtol=1e-7):
    """Check what was computed in another order: an element near zero may be off by what large ones are rounded by."""
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.max(np.abs(expected), initial=0))


def assert_large_product(a, b, c):
    """Check ``c == a @ b`` times a random vector, where `assert_product` in extended precision would take minutes.

    No row may be outside of 16 eps ``|a| |b| |v|`` for a vector v, or NaN.
    """
    v, eps = np.random.default_rng().standard_normal(c.shape[1]), np.finfo(a.dtype).eps
    a, b, c = (x.astype(float) for x in (a, b, c))
    bound = 16 * eps * (abs(a) @ (abs(b) @ abs(v)))
    assert (abs(c @ v - a @ (b @ v)) <= bound).all(), "a product is wrong"
