"""What it costs that several ranks share the eigenvalues of a Hermitian matrix, by way of a tridiagonal one. Pure.

::

    seconds    = reads + columns + products
    reads      = n^3 / 6 elements, of one triangle for each column that is eliminated  / (ranks * memory bandwidth)
    columns    = n * what a column takes beside that: launches, and an exchange between ranks
    products   = updates of the triangle, merges, reflectors: at a share of a product's rate
"""

from __future__ import annotations

import math

from dask_distmm.config import Machine
from dask_distmm.planning.factor.problem import Factorization

# The share of a product's rate at which products run.
_SHARE = 0.7
# Columns of vectors as long as the matrix that a rank has beside its block columns: reflectors twice, what belongs to
# them, a panel, and what columns are summed in.
_NARROW = 320
# Elements of the eigenvectors of a merge that are made at once.
_PANEL_ELEMENTS = 2**26


def shared_seconds(task: Factorization, ranks: int, threads: int, machine: Machine, column: float) -> float:
    """Return the seconds of the computation itself."""
    n, complexes = float(task.a_shape[0]), 4 if task.dtype.startswith("complex") else 1
    size = {"float32": 4, "float64": 8, "complex64": 8, "complex128": 16}[task.dtype]
    reads = n**3 / 6 * size / (ranks * machine.memory_bandwidth)
    columns = n * (column or (2 * machine.latency if ranks > 1 else 0.0))
    products = 2 / 3 * complexes * n**3 / machine.rate(task.dtype)
    if task.vectors:
        products += 4 / 3 * n**3 / machine.rate("float64") + 2 * complexes * n**3 / machine.rate(task.dtype)
    return reads + columns + products / (threads * _SHARE)


def shared_bytes(task: Factorization, ranks: int, itemsize: int, width: int) -> int:
    """Return the bytes that a rank holds beside its block columns of the matrix and of eigenvectors.

    Its rows of eigenvectors of the tridiagonal matrix, twice; a panel of those of a merge; panels of reflectors.
    """
    n = task.a_shape[0]
    narrow = n * (_NARROW + 2 * width) * itemsize
    if not task.vectors:
        return narrow
    return narrow + 8 * (2 * math.ceil(n / ranks) * n + min(_PANEL_ELEMENTS, n * n))
