"""Decompositions and functions of a matrix that one rank has: by one call of LAPACK or cuSOLVER.

Vectors are unique but for a factor of modulus one. It is chosen so that the first one of the largest components of each
eigenvector is real and positive; of singular vectors that of the shorter ones (right ones of a square matrix).

Square roots and logarithms are those of the triangular factor of the Schur decomposition: the root is made of products
and Sylvester equations, by halves (Deadman, Higham, Ralha 2013); the logarithm is that of a root that is close to the
identity, by its Pade approximant (Higham, Functions of Matrices, 2008, algorithm 11.9). Diagonals are computed from the
eigenvalues, so that no digits are lost where many roots are taken (Al-Mohy, Higham 2012).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy.linalg

from dask_distmm.engines.programs.blas import Kernels
from dask_distmm.errors import MatrixError
from dask_distmm.programs.factorizations import Factorization


def decompose(kernels: Kernels, task: Factorization, a: Any, b: Any = None) -> dict[str, Any]:
    """Return the outputs of a spectral task by name; vectors of values are 1-dimensional."""
    try:
        return FUNCTIONS[task.kind](kernels, task, a, *(() if b is None else (b,)))
    except MatrixError:
        raise
    except np.linalg.LinAlgError as error:
        raise MatrixError(f"{task.kind} of A, {task.a_shape}: {error}; scale A, or compute in a wider type") from error


def _svd(kernels: Kernels, task: Factorization, a: Any) -> dict[str, Any]:
    u, s, vh = kernels.svd(a, vectors=task.vectors, full=task.mode == "complete")
    if not task.vectors:
        return {"s": s}
    # Both vectors of a pair get the factor that makes the shorter one right: it cancels in u s v^H.
    pairs, (m, n) = len(s), a.shape
    left, right = unit_factors(kernels, u), unit_factors(kernels, vh.conj().T)
    left[:pairs] = right[:pairs] = right[:pairs] if m >= n else left[:pairs]
    u *= left
    vh *= right.conj()[:, None]
    return {"s": s, "u": u, "vh": vh}


def _eigh(kernels: Kernels, task: Factorization, a: Any, b: Any = None) -> dict[str, Any]:
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


def _eig(kernels: Kernels, task: Factorization, a: Any) -> dict[str, Any]:
    w, *sides = kernels.eig(a, left=task.left, right=task.vectors)
    vectors = {name: v * unit_factors(kernels, v) for name, v in zip(("vl", "v"), sides, strict=True) if v is not None}
    return {"w": w, **vectors}


# Triangles of a larger order are computed by halves.
_HALVED = 64
# Up to these distances from the identity a Pade approximant of the logarithm of 1, 2, ... terms has double precision.
_DISTANCES = (1.1e-5, 1.82e-3, 1.62e-2, 5.39e-2, 0.114, 0.187, 0.264)
# Square roots of what is finite are that close long before.
_ROOTS = 100


def _schur(kernels: Kernels, task: Factorization, a: Any) -> dict[str, Any]:
    t, z = kernels.on_host.gees(np.asfortranarray(kernels.host(a)))
    return {"t": t, "z": z}


def _sqrtm(kernels: Kernels, task: Factorization, a: Any) -> dict[str, Any]:
    return {"x": _of_triangle(kernels, a, _root)}


def _logm(kernels: Kernels, task: Factorization, a: Any) -> dict[str, Any]:
    return {"x": _of_triangle(kernels, a, _logarithm)}


def _of_triangle(kernels: Kernels, a: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return a function of a matrix by that of its triangular factor."""
    # Of a real matrix from the real one, so that real eigenvalues are exactly real: the negative ones are on the cut.
    t, z = kernels.on_host.gees(np.asfortranarray(kernels.host(a)))
    t, z = scipy.linalg.rsf2csf(t, z, check_finite=False)
    with np.errstate(all="ignore"):  # what is not finite is looked for
        return z @ function(kernels.on_host, np.triu(t)) @ z.conj().T


def _root(host: Any, t: Any) -> Any:
    """Return the principal square root of a triangle."""
    roots = np.sqrt(np.diagonal(t))
    root = _root_by_halves(host, t, roots)
    if (roots == 0).sum() > 1:
        error = abs(root @ root - t).max(initial=0)
        if not error <= np.finfo(t.dtype).eps ** 0.5 * abs(t).max():
            raise MatrixError("the matrix is singular, and has no square root")
    return root


def _root_by_halves(host: Any, t: Any, roots: Any) -> Any:
    n, half = len(t), len(t) // 2
    root = np.zeros(t.shape, t.dtype, order="F")
    if n > _HALVED:
        upper, lower = slice(0, half), slice(half, n)
        root[upper, upper] = _root_by_halves(host, t[upper, upper], roots[upper])
        root[lower, lower] = _root_by_halves(host, t[lower, lower], roots[lower])
        root[upper, lower] = t[upper, lower]
        _sylvester(host, root[upper, upper], root[lower, lower], root[upper, lower])
        return root
    least = max(float(abs(roots).max(initial=0)) * np.finfo(t.dtype).eps, np.finfo(t.dtype).tiny)
    for j in range(n):
        # (R + r I) x = t of the triangle R to the left of the column.
        divisor, column = root[:j, :j].copy(order="F"), root[:j, j : j + 1]
        sums = roots[:j] + roots[j]
        divisor[np.arange(j), np.arange(j)] = np.where(sums == 0, least, sums)
        column[...] = t[:j, j : j + 1]
        host.trsm(divisor, column, right=False, lower=False, op="N", unit=False)
        root[j, j] = roots[j]
    return root


def _sylvester(host: Any, a: Any, b: Any, c: Any) -> None:
    """Overwrite C with the solution of A X + X B = C, of triangles, by halves."""
    (m, n), size = c.shape, max(c.shape)
    if size <= _HALVED:
        host.trsyl(a, b, c)
    elif m >= n:
        upper, lower = slice(0, m // 2), slice(m // 2, m)
        _sylvester(host, a[lower, lower], b, c[lower])
        host.gemm(a[upper, lower], c[lower], c[upper], alpha=-1, beta=1)
        _sylvester(host, a[upper, upper], b, c[upper])
    else:
        left, right = slice(0, n // 2), slice(n // 2, n)
        _sylvester(host, a, b[left, left], c[:, left])
        host.gemm(c[:, left], b[left, right], c[:, right], alpha=-1, beta=1)
        _sylvester(host, a, b[right, right], c[:, right])


def _logarithm(host: Any, t: Any) -> Any:
    """Return the principal logarithm of a triangle."""
    n, diagonal = len(t), np.arange(len(t))
    if (t[diagonal, diagonal] == 0).any():
        raise MatrixError("the matrix is singular, and has no logarithm")
    logarithms, root, again = np.log(t[diagonal, diagonal]), t, 0
    for count in range(_ROOTS):
        rest = root.copy(order="F")
        rest[diagonal, diagonal] = np.expm1(logarithms / 2**count)
        distance = np.linalg.norm(rest, 1) if n else 0.0
        if distance <= _DISTANCES[-1]:
            terms, fewer = (1 + np.searchsorted(_DISTANCES, x) for x in (distance, distance / 2))
            again += 1
            if terms - fewer <= 1 or again == 2:
                break
        root = _root_by_halves(host, root, np.exp(logarithms / 2 ** (count + 1)))
    else:
        raise MatrixError("the logarithm of the matrix did not converge")
    total, (nodes, weights) = np.zeros_like(rest), np.polynomial.legendre.leggauss(int(terms))
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        term, divisor = (weight * rest).astype(rest.dtype), (node * rest).astype(rest.dtype)
        divisor[diagonal, diagonal] += 1
        host.trsm(divisor, term, right=False, lower=False, op="N", unit=False)
        total += term
    total *= 2**count
    total[diagonal, diagonal] = logarithms
    return total


# By the kinds of `programs.factorizations.KINDS`.
FUNCTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "eigh": _eigh,
    "svd": _svd,
    "eig": _eig,
    "schur": _schur,
    "sqrtm": _sqrtm,
    "logm": _logm,
}


def unit_factors(kernels: Kernels, v: Any) -> Any:
    """Return the factors of modulus one that make the largest component of each column real and positive."""
    xp = kernels.xp
    if not v.size:
        return xp.ones(v.shape[1], v.dtype)
    largest = v[abs(v).argmax(axis=0), xp.arange(v.shape[1])]
    return largest.conj() / abs(largest)
