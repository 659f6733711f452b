"""Random matrices on a cluster's GPUs, and the check of a product of them: where the chunks lie.

16-bit chunks lose their type when Dask moves them, so none is moved: workers make their chunks themselves, and
answer questions about what they hold in float64.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import accumulate, product
from typing import Any

import numpy as np

# Most elements that are made at once, and that the check takes at once.
_PIECE, _STRIP = 2**27, 2**26

Array = np.ndarray[Any, np.dtype[np.float64]]


def make_chunk(shape: tuple[int, int], dtype: str, seed: int) -> Any:
    """Return a standard normal matrix on this worker's GPU, made in pieces of whole rows."""
    import cupy

    cupy.random.seed(seed)
    found = cupy.empty(shape, as_dtype(dtype))
    step = max(1, _PIECE // max(1, shape[1]))
    made = dtype if dtype in ("float32", "float64") else "float32"
    for start in range(0, shape[0], step):
        size = (min(step, shape[0] - start), shape[1])
        found[start : start + step] = cupy.random.standard_normal(size, dtype=made).astype(found.dtype)
    cupy.cuda.Device().synchronize()
    return found


def make_block(dtype: str, seed: int, block_info: Any = None) -> Any:
    """Return one block of a matrix, for `map_blocks`."""
    rows, cols = block_info[None]["chunk-location"]
    return make_chunk(block_info[None]["chunk-shape"], dtype, (seed + 65537 * rows + cols) % 2**31)


def used_bytes() -> int:
    """Return how much of this worker's GPU is taken, by anybody."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def synchronize() -> None:
    """Wait for this worker's GPU: CuPy's tasks end before their kernels do."""
    import cupy

    cupy.cuda.Device().synchronize()


def free_pools() -> None:
    """Give back what CuPy keeps for later."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def keys_held(dask_worker: Any) -> int:
    """Return how many results a worker holds."""
    return len(dask_worker.data)


def take(wanted: Sequence[tuple[Any, list[int]]], axis: int, dask_worker: Any) -> dict[Any, Array]:
    """Return rows (or with axis 1 columns, as rows) of chunks that this worker holds, in float64 on the host."""
    import cupy

    found = {}
    for key, places in wanted:
        if places and key in dask_worker.data:
            chunk = dask_worker.data[key]
            lines = [chunk[i : i + 1] if axis == 0 else chunk[:, i : i + 1].T for i in places]
            found[key] = np.concatenate([cupy.asnumpy(_wide(line)) for line in lines])
    return found


def project(wanted: Sequence[tuple[Any, int, int]], left: Array, dask_worker: Any) -> dict[Any, tuple[Array, Array]]:
    """Return ``left @ B`` and ``|left| @ |B|`` for chunks of B that this worker holds, each with its part of k."""
    import cupy

    found = {}
    on_device = cupy.asarray(left)
    for key, begin, end in wanted:
        if key in dask_worker.data:
            chunk, part = dask_worker.data[key], on_device[:, begin:end]
            step, sums = max(1, _STRIP // max(1, chunk.shape[0])), []
            for at in range(0, chunk.shape[1], step):
                strip = _wide(chunk[:, at : at + step])
                sums.append((cupy.asnumpy(part @ strip), cupy.asnumpy(abs(part) @ abs(strip))))
            products, absolute = zip(*sums, strict=True)
            found[key] = np.concatenate(products, axis=1), np.concatenate(absolute, axis=1)
    return found


def _wide(x: Any) -> Any:
    """Return an array in float64; from 16-bit floats by way of float32."""
    return (x.astype(np.float32) if x.dtype.itemsize == 2 else x).astype(np.float64)


def as_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


# Asked by the client


def row_error(client: Any, a: Any, b: Any, d: Any, dtype: str, *, transposed: bool, count: int) -> float:
    """Return the largest error in some rows of ``D = A @ B`` over what rounding can do.

    That is 16 eps sum |a| |b| (64 eps for a Gram product), and half a unit in the last place of a 16-bit type.

    Parameters
    ----------
    client
        Of the cluster.
    a, b, d
        Persisted matrices.
    dtype
        Name of their type.
    transposed
        Whether A is the transpose of `a`.
    count
        Number of rows.
    """
    height, width = d.shape
    rows = sorted(secrets.randbelow(height) for _ in range(count))
    left, found = _lines(client, a, rows, axis=int(transposed)), _lines(client, d, rows, axis=0)
    expected, magnitude = np.zeros((count, width)), np.zeros((count, width))
    ks, ns = _edges(b)
    wanted = [((b.name, i, j), ks[i], ks[i + 1]) for i, j in _blocks(b)]
    for (_, _, j), (sums, absolute) in _together(client.run(project, wanted, left)).items():
        expected[:, ns[j] : ns[j + 1]] += sums
        magnitude[:, ns[j] : ns[j + 1]] += absolute
    eps = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    # The diagonal of a Gram product adds up numbers of one sign: the errors of so long a sum do not cancel.
    bound = (64 if transposed else 16) * eps * magnitude
    if dtype == "bfloat16":
        bound = bound + 0.5 * 2.0**-7 * (1 + 16 * eps) * abs(expected)
    return float(np.max(abs(found - expected) / bound))


def _lines(client: Any, x: Any, places: Sequence[int], axis: int) -> Array:
    """Return rows (or with axis 1 columns, as rows) of a persisted matrix in float64; NaN where there is none."""
    edges = _edges(x)

    def span(key: Sequence[int], along: int) -> slice:
        return slice(edges[along][key[along]], edges[along][key[along] + 1])

    def inside(key: Sequence[int]) -> list[int]:
        there = span(key, axis)
        return [number for number, place in enumerate(places) if there.start <= place < there.stop]

    wanted = [((x.name, *key), [places[at] - span(key, axis).start for at in inside(key)]) for key in _blocks(x)]
    result = np.full((len(places), x.shape[1 - axis]), np.nan)
    for (_, *key), part in _together(client.run(take, wanted, axis)).items():
        result[inside(key), span(key, 1 - axis)] = part
    return result


def _edges(x: Any) -> list[list[int]]:
    """Return where the chunks of a matrix begin and end along both axes."""
    return [list(accumulate(sizes, initial=0)) for sizes in x.chunks]


def _blocks(x: Any) -> Iterable[tuple[int, int]]:
    rows, cols = x.numblocks
    return product(range(rows), range(cols))


def _together(answers: dict[str, dict[Any, Any]]) -> dict[Any, Any]:
    """Return what the workers said, by chunk; the same chunk on two workers counts once."""
    return {key: value for found in answers.values() for key, value in found.items()}
