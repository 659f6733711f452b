"""Calls of every function of ``da.linalg``, ``np.linalg`` and ``dask.array`` that ``enable()`` routes, and operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import dask
import dask.array as da
import numpy as np

Cut = Callable[[int], Any]


def operands(order: int, tall: tuple[int, int], cut: Cut, dtype: str = "float64") -> SimpleNamespace:
    """Return operands in chunks as `cut` makes them of the length of an axis; tall ones are cut along it only.

    Pivots of the square ones are on their diagonals, where stock Dask looks for them.
    """
    rng, (m, n) = np.random.default_rng(), tall
    square, long = rng.standard_normal((order, order)), rng.standard_normal(tall) * np.geomspace(1, 9, n)
    diagonal = np.diag(np.arange(2, order + 2))

    def lazy(x: Any, *chunks: Any) -> da.Array:
        x = (100 * x if np.dtype(dtype).kind == "i" else x).astype(dtype)
        return da.from_array(x, chunks=chunks or tuple(map(cut, x.shape))).map_blocks(np.positive, dtype=dtype)

    return SimpleNamespace(
        square=lazy(square / order + diagonal),
        positive=lazy(square @ square.T / order + diagonal),
        b=lazy(rng.standard_normal(order)),
        columns=lazy(rng.standard_normal((order, 5))),
        tall=lazy(long, cut(m), -1),
        wide=lazy(long.T, -1, cut(m)),
        c=lazy(rng.standard_normal(m)),
        targets=lazy(rng.standard_normal((m, 5))),
        stack=lazy(rng.standard_normal((6, 4, 4))),
    )


def persisted(x: SimpleNamespace) -> SimpleNamespace:
    """Return the same operands on the workers."""
    return SimpleNamespace(**dict(zip(vars(x), dask.persist(*vars(x).values()), strict=True)))


# By the name of the function, and what is passed. Each returns an array, or a tuple of them.
CALLS: dict[str, Callable[[SimpleNamespace], Any]] = {
    "da.cov": lambda x: da.cov(x.wide),
    "da.cov rowvar": lambda x: da.cov(x.tall, rowvar=False),
    "da.corrcoef": lambda x: da.corrcoef(x.wide),
    "da.linalg.cholesky": lambda x: da.linalg.cholesky(x.positive),
    "da.linalg.cholesky lower": lambda x: da.linalg.cholesky(x.positive, lower=True),
    "da.linalg.inv": lambda x: da.linalg.inv(x.square),
    "da.linalg.lstsq": lambda x: da.linalg.lstsq(x.tall, x.c),
    "da.linalg.lstsq 2-D": lambda x: da.linalg.lstsq(x.tall, x.targets),
    "da.linalg.lu": lambda x: da.linalg.lu(x.square),
    "da.linalg.norm 2": lambda x: da.linalg.norm(x.tall, 2),
    "da.linalg.norm -2": lambda x: da.linalg.norm(x.wide, -2),
    "da.linalg.norm nuc": lambda x: da.linalg.norm(x.tall, "nuc", keepdims=True),
    "da.linalg.norm": lambda x: da.linalg.norm(x.square),
    "da.linalg.qr": lambda x: da.linalg.qr(x.tall),
    "da.linalg.qr wide": lambda x: da.linalg.qr(x.wide),
    "da.linalg.solve": lambda x: da.linalg.solve(x.square, x.b),
    "da.linalg.solve 2-D": lambda x: da.linalg.solve(x.square, x.columns),
    "da.linalg.solve pos": lambda x: da.linalg.solve(x.positive, x.columns, assume_a="pos"),
    "da.linalg.solve_triangular": lambda x: da.linalg.solve_triangular(x.positive, x.b),
    "da.linalg.solve_triangular 2-D": lambda x: da.linalg.solve_triangular(x.positive, x.columns, lower=True),
    "da.linalg.svd": lambda x: da.linalg.svd(x.tall),
    "da.linalg.svd wide": lambda x: da.linalg.svd(x.wide),
    "da.linalg.svd signs": lambda x: da.linalg.svd(x.tall, coerce_signs=False),
    "da.linalg.svd_compressed": lambda x: da.linalg.svd_compressed(x.tall, 4, n_power_iter=1, seed=1),
    "da.linalg.svd_compressed wide": lambda x: da.linalg.svd_compressed(x.wide, 4, n_power_iter=1, seed=1),
    "da.linalg.svd_compressed QR": lambda x: da.linalg.svd_compressed(
        x.tall, 4, "QR", n_power_iter=1, seed=da.random.default_rng(1)
    ),
    "np.linalg.cholesky": lambda x: np.linalg.cholesky(x.positive),
    "np.linalg.cond": lambda x: np.linalg.cond(x.tall),
    "np.linalg.cond 1": lambda x: np.linalg.cond(x.square, 1),
    "np.linalg.cross": lambda x: np.linalg.cross(x.tall[:, :3], x.tall[:, 3:6]),
    "np.linalg.det": lambda x: np.linalg.det(x.square / 100),
    "np.linalg.diagonal": lambda x: np.linalg.diagonal(x.stack),
    "np.linalg.eig": lambda x: np.linalg.eig(x.square),
    "np.linalg.eigh": lambda x: np.linalg.eigh(x.positive),
    "np.linalg.eigvals": lambda x: np.linalg.eigvals(x.square),
    "np.linalg.eigvalsh": lambda x: np.linalg.eigvalsh(x.positive),
    "np.linalg.inv": lambda x: np.linalg.inv(x.square),
    "np.linalg.inv stack": lambda x: np.linalg.inv(x.stack),
    "np.linalg.lstsq": lambda x: np.linalg.lstsq(x.tall, x.targets),
    "np.linalg.lstsq rcond": lambda x: np.linalg.lstsq(x.tall, x.targets, rcond=1e-6),
    "np.linalg.matrix_norm": lambda x: np.linalg.matrix_norm(x.square),
    "np.linalg.matrix_norm 2": lambda x: np.linalg.matrix_norm(x.tall, ord=2),
    "np.linalg.matrix_power": lambda x: np.linalg.matrix_power(x.square / 100, 3),
    "np.linalg.matrix_power -1": lambda x: np.linalg.matrix_power(x.square, -1),
    "np.linalg.matrix_rank": lambda x: np.linalg.matrix_rank(x.tall),
    "np.linalg.matrix_transpose": lambda x: np.linalg.matrix_transpose(x.stack),
    "np.linalg.multi_dot": lambda x: np.linalg.multi_dot([x.wide, x.tall, x.wide[:, 0]]),
    "np.linalg.norm": lambda x: np.linalg.norm(x.tall, 2),
    "np.linalg.outer": lambda x: np.linalg.outer(x.b, x.b),
    "np.linalg.pinv": lambda x: np.linalg.pinv(x.tall),
    "np.linalg.qr": lambda x: np.linalg.qr(x.tall),
    "np.linalg.qr r": lambda x: np.linalg.qr(x.tall, mode="r"),
    "np.linalg.slogdet": lambda x: np.linalg.slogdet(x.square),
    "np.linalg.solve": lambda x: np.linalg.solve(x.square, x.b),
    "np.linalg.solve 2-D": lambda x: np.linalg.solve(x.square, x.columns),
    "np.linalg.svd": lambda x: np.linalg.svd(x.tall, full_matrices=False),
    "np.linalg.svd values": lambda x: np.linalg.svd(x.tall, compute_uv=False),
    "np.linalg.svdvals": lambda x: np.linalg.svdvals(x.tall),
    "np.linalg.trace": lambda x: np.linalg.trace(x.stack),
    "np.linalg.vecdot": lambda x: np.linalg.vecdot(x.tall, x.tall),
    "np.linalg.vector_norm": lambda x: np.linalg.vector_norm(x.tall, axis=1),
    "np.linalg.matmul": lambda x: np.linalg.matmul(x.wide, x.tall),
    "np.linalg.tensordot": lambda x: np.linalg.tensordot(x.wide, x.targets, axes=1),
    "np.cov": lambda x: np.cov(x.wide),
    "np.corrcoef": lambda x: np.corrcoef(x.wide),
    "np.inner": lambda x: np.inner(x.wide, x.wide),
    "np.kron": lambda x: np.kron(x.stack[0], x.stack[1]),
    "da.matmul": lambda x: da.matmul(x.wide, x.tall),
    "da.tensordot": lambda x: da.tensordot(x.square, x.columns, axes=1),
    "da.einsum": lambda x: da.einsum("ij,jk,kl->il", x.wide, x.tall, x.wide),
    "@": lambda x: x.tall @ x.wide[:, :3],
}  # fmt: skip


def parts(result: Any) -> Sequence[Any]:
    """Return what a call has returned as a sequence."""
    return result if isinstance(result, tuple) else (result,)


def about(result: Any) -> list[tuple[Any, ...]]:
    """Return shapes, chunks and types of results, and the classes, types and dimensions of their metas."""
    return [
        (x.shape, x.chunks, x.dtype, type(x._meta), x._meta.dtype, x._meta.ndim)
        for x in parts(result)
        if isinstance(x, da.Array)
    ]
