"""Eigenvalues and singular values of a matrix that one rank has: by one call of LAPACK or cuSOLVER.

Vectors are unique but for a factor of modulus one. It is chosen so that the first one of the largest components of each
eigenvector is real and positive; of singular vectors that of the shorter ones (right ones of a square matrix).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.errors import MatrixError
from dask_distmm.planning.factor.problem import Factorization


def decompose(kernels: Kernels, task: Factorization, a: Any, b: Any = None) -> dict[str, Any]:
    """Return the outputs of a spectral task by name; vectors of values are 1-dimensional."""
    try:
        if task.kind == "svd":
            return _svd(kernels, task, a)
        return _eigh(kernels, task, a, b)
    except MatrixError:
        raise
    except np.linalg.LinAlgError as error:
        raise MatrixError(f"{task.kind} of A, {task.a_shape}: {error}; scale A, or compute in a wider type") from error


def _svd(kernels: Kernels, task: Factorization, a: Any) -> dict[str, Any]:
    svd = kernels.xp.linalg.svd
    if not task.vectors:
        return {"s": svd(a, compute_uv=False)}
    u, s, vh = svd(a, full_matrices=task.mode == "complete")
    # Both vectors of a pair get the factor that makes the shorter one right: it cancels in u s v^H.
    pairs, (m, n) = len(s), a.shape
    left, right = unit_factors(kernels, u), unit_factors(kernels, vh.conj().T)
    left[:pairs] = right[:pairs] = right[:pairs] if m >= n else left[:pairs]
    u *= left
    vh *= right.conj()[:, None]
    return {"s": s, "u": u, "vh": vh}


def _eigh(kernels: Kernels, task: Factorization, a: Any, b: Any) -> dict[str, Any]:
    _complete(kernels, a)
    if b is not None:
        _complete(kernels, b)
        # A v = w B v with B = L L^H is (L^-1 A L^-H) y = w y with y = L^H v.
        if order := int(kernels.host(kernels.potrf(b))[0]):
            raise MatrixError(
                f"the leading minor of order {order} of B is not positive: B is not positive definite; pass one that is"
            )
        kernels.trsm(b, a, right=False, lower=True, op="N", unit=False)
        kernels.trsm(b, a, right=True, lower=True, op="C", unit=False)
    w, v = kernels.eigh(a, task.subset, vectors=task.vectors)
    if v is None:
        return {"w": w}
    if b is not None:
        v = kernels.xp.asfortranarray(v)
        kernels.trsm(b, v, right=False, lower=True, op="C", unit=False)
    v *= unit_factors(kernels, v)
    return {"w": w, "v": v}


def _complete(kernels: Kernels, a: Any) -> None:
    """Overwrite the upper triangle of a Hermitian matrix with the mirror image of the lower one."""
    below = kernels.xp.tril(a, -1)
    a[...] = kernels.xp.tril(a)
    a += below.conj().T


def not_finite(name: str) -> str:
    """Return the text for a matrix with elements that are NaN or infinite."""
    return f"{name} must not contain infs or NaNs: replace them, or use dask_distmm.linalg with check_finite=False"


def unit_factors(kernels: Kernels, v: Any) -> Any:
    """Return the factors of modulus one that make the largest component of each column real and positive."""
    xp = kernels.xp
    if not v.size:
        return xp.ones(v.shape[1], v.dtype)
    largest = v[abs(v).argmax(axis=0), xp.arange(v.shape[1])]
    return largest.conj() / abs(largest)
