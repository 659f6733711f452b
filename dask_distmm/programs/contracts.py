"""Contracts of kernels, whoever implements them: which arguments they read, update and write, and their flops.

Nothing else counts flops or knows roles. A tall argument is a chunk of rows, m x n; all others are small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from dask_distmm.programs.steps import Buffer, Call

Flops = Callable[..., float]


@dataclasses.dataclass(frozen=True, slots=True)
class Contract:
    """The promise of one kernel."""

    # r (read), u (updated) or w (written) for each argument; the last one is that of all that follow.
    roles: str
    # Takes the shapes of the arguments. Real operations; four times as many for complex types.
    flops: Flops


def _none(*shapes: tuple[int, int]) -> float:
    return 0.0


def _cubic(factor: float) -> Flops:
    return lambda r, *_: factor * r[0] * r[1] * min(r)


CONTRACTS: dict[str, Contract] = {
    # Chunks of rows.
    # C += A^H A, the lower triangle; C += A^H B; D = A X; Y = A X with C += A^H Y and G += Y^H Y; R = B - A X;
    # s += the squared norms of columns.
    "gram": Contract("ru", lambda a, g: a[0] * a[1] ** 2),
    "adjoint_times": Contract("rru", lambda a, b, c: 2 * a[0] * a[1] * b[1]),
    "times": Contract("rrw", lambda a, x, d: 2 * a[0] * a[1] * x[1]),
    "back_and_forth": Contract("rrwuu", lambda a, x, *_: 4 * a[0] * a[1] * x[1] + a[0] * x[1] ** 2),
    "residual": Contract("rrrw", lambda a, x, b, r: 2 * a[0] * a[1] * x[1]),
    "square_norms": Contract("ru", lambda r, s: 2 * r[0] * r[1]),
    # G += B^H B with B = A R^-1, which is not kept, or is Q; Q = Q R^-1, Q = Q W, X = W Q^H.
    "gram_of_quotient": Contract("rru", lambda r, a, g: 2 * a[0] * a[1] ** 2),
    "quotient_and_gram": Contract("rrwu", lambda r, a, q, g: 2 * a[0] * a[1] ** 2),
    "divide": Contract("ru", lambda r, q: q[0] * q[1] ** 2),
    "multiply": Contract("ru", lambda w, q: 2 * q[0] * q[1] ** 2),
    "times_adjoint": Contract("rrw", lambda w, q, x: 2 * q[0] * q[1] * w[0]),
    # R of [R; A]; Q and R of A, padded with zeros to n rows, and how many it has; [A B]; A - the mean of its columns.
    "reflect": Contract("ru", lambda a, r: 2 * (a[0] + r[0]) * r[0] ** 2),
    "factor": Contract("rwww", lambda a, *_: 4 * a[0] * a[1] ** 2),
    "append": Contract("rrw", _none),
    "centre": Contract("rrw", lambda a, mean, c: a[0] * a[1]),
    # The number of rows, the means of columns, and the Gram matrix of the centred rows, of more rows; of two parts.
    "moments": Contract("ruuu", lambda a, *_: a[0] * a[1] ** 2),
    "merge_moments": Contract("rrruuu", lambda c, mean, g, *_: 2 * g[0] ** 2),
    # Raise if a matrix is not finite, by R of [A B], or by A^H B where A^H A is.
    "check": Contract("r", _none),
    "check_right": Contract("rr", _none),
    # Small matrices, on one rank or on all.
    "add": Contract("ru", _none),
    "copy": Contract("rw", _none),
    "adjoint": Contract("rw", _none),
    "normal": Contract("w", _none),
    # R of a Gram matrix; whether that is R of A already, and whether it is good enough to divide by.
    "cholesky": Contract("rwww", _cubic(2)),
    # R2 of a Gram matrix of A R1^-1, R2 R1, and whether A (R2 R1)^-1 is orthonormal.
    "second_factor": Contract("rrwww", _cubic(2)),
    # R of stacked triangles, and how many rows it has; triangles become the blocks of the stack's Q.
    "stack": Contract("wwu", lambda r, _, *t: 2 * len(t) * r[0] ** 3),
    "orthonormalize": Contract("rw", _cubic(4)),
    "solve": Contract("ru", lambda r, b: r[0] ** 2 * b[1]),
    "quotient": Contract("rrw", lambda r, b, _: r[0] ** 2 * b[0]),
    "inverse": Contract("rw", _cubic(1)),
    "pseudo_inverse": Contract("rrw", _cubic(1)),
    "singular_values": Contract("rw", _cubic(3)),
    "singular_vectors": Contract("rwww", _cubic(20)),
    "covariance": Contract("rrw", _none),
    "hermitian": Contract("rrw", lambda s, vh, _: 2.0 * vh[0] ** 3),
    "principal": Contract("rrwww", _cubic(9)),
    "principal_of_r": Contract("rrww", _cubic(20)),
    # Least squares: from R and A^H B; one step of refinement; from R of [A B]. Ridge: from A^H A and A^H B, or that R.
    "solve_normal": Contract("rrw", lambda r, c, x: 2 * r[0] ** 2 * c[1]),
    "refine": Contract("rrrrww", lambda r, d, *_: 2 * r[0] ** 2 * d[1]),
    "full_rank": Contract("rww", _cubic(3)),
    "least_squares": Contract("rwwww", _cubic(20)),
    "ridge": Contract("rrwww", _cubic(1)),
    "refine_ridge": Contract("rrrw", _cubic(1)),
    "ridge_of_r": Contract("rw", _cubic(20)),
    # Iterations: a rank's rows of vectors are in one buffer, a chunk's from row `at` on. Numbers are on the host.
    "put": Contract("rw", _none),
    "take": Contract("rw", _none),
    "times_into": Contract("rrw", lambda a, x, y: 2 * a[0] * a[1] * x[1]),
    "apply": Contract("rw", _none),
    "assemble": Contract("wr", _none),
    "total": Contract("wr", _none),
    "dots": Contract("wr", lambda out, *x: sum(2 * one[0] * one[1] for one in x[::2])),
    "axpy": Contract("rru", lambda s, x, y: 2 * x[0] * x[1]),
    "xpay": Contract("rru", lambda s, x, y: 2 * x[0] * x[1]),
    "scale": Contract("ru", lambda s, x: x[0] * x[1]),
    "subtract": Contract("ru", lambda x, y: x[0] * x[1]),
    "diagonal_times": Contract("rrw", lambda d, x, y: x[0] * x[1]),
    "combine": Contract("rwr", lambda s, y, *x: 2 * len(x) * y[0] * y[1]),
    "adjoint_from": Contract("rru", lambda a, x, y: 2 * a[0] * a[1] * x[1]),
    "add_squares": Contract("rru", lambda s, x, y: 2 * x[0] * x[1]),
    "cg_start": Contract("rww", _none),
    "cg_step": Contract("ru", _none),
    "cg_next": Contract("ruu", _none),
    "info": Contract("rw", _none),
    "column_sums": Contract("wr", lambda out, *x: sum(one[0] * one[1] for one in x)),
    "add_polynomial": Contract("ur", lambda y, *x: 2 * len(x) * y[0] * y[1]),
    "exponential_start": Contract("rw", _none),
    "exponential_next": Contract("uw", _none),
    "row": Contract("rw", _none),
    "project": Contract("wrrr", lambda out, s, basis, w: 2 * basis[0] * basis[1]),
    "orthogonalize": Contract("rrru", lambda h, s, basis, w: 2 * basis[0] * basis[1]),
    "put_column": Contract("rru", _none),
    "basis_add": Contract("rru", lambda y, basis, x: 2 * basis[0] * basis[1]),
    "gmres_start": Contract("rwww", _none),
    "gmres_rotate": Contract("rruuuuu", _none),
    "gmres_solve": Contract("rrrw", _none),
    "gmres_restart": Contract("ruuuu", _none),
    "draw": Contract("w", _none),
    "rotate_basis": Contract("rru", lambda s, y, basis: 2 * basis[0] * y[0] * y[1]),
    "lanczos_start": Contract("rwww", _none),
    "lanczos_step": Contract("rruuu", _none),
    "lanczos_restart": Contract("u", lambda s, *_: 0.0),
    "lanczos_vector": Contract("rrw", _none),
    "lanczos_next": Contract("ru", _none),
    "lobpcg_gram": Contract("wrr", lambda out, s, t: 4 * s[0] * s[1] ** 2),
    "lobpcg_ritz": Contract("ruu", lambda g, *_: 30.0 * g[0] ** 3),
    "lobpcg_update": Contract("rruuw", lambda c, w, s, t, r: 4 * s[0] * c[0] * c[1]),
    "lobpcg_test": Contract("ruw", _none),
    "column_squares": Contract("wr", lambda out, r: 2 * r[0] * r[1]),
    "block_products": Contract("wrr", lambda out, s, w: 2 * w[0] * w[1] ** 2),
    "subtract_block": Contract("rru", lambda g, s, w: 2 * w[0] * w[1] ** 2),
    "put_block": Contract("ru", _none),
    "constant": Contract("w", _none),
    "minres_start": Contract("rww", _none),
    "minres_alpha": Contract("ru", _none),
    "minres_rotate": Contract("ru", _none),
    "minres_test": Contract("ruu", _none),
    "bidiagonal_beta": Contract("ru", _none),
    "bidiagonal_alpha": Contract("ru", lambda v, s: 2 * v[0]),
    "lsqr_start": Contract("ruw", _none),
    "lsqr_rotate": Contract("ruu", lambda w, s, go: 2 * w[0]),
    "lsmr_start": Contract("ruw", _none),
    "lsmr_rotate": Contract("u", _none),
    "lsmr_test": Contract("ruu", lambda x, s, go: 2 * x[0]),
}


def roles_of(call: Call) -> Iterator[tuple[Buffer, str]]:
    """Yield the arguments of a call, and what becomes of each: r, u or w."""
    roles = CONTRACTS[call.kernel].roles
    roles += roles[-1] * (len(call.arguments) - len(roles))
    yield from zip(call.arguments, roles, strict=True)


def flops_of(call: Call) -> float:
    """Return the floating-point operations of a call."""
    shapes = [tuple(max(0, size) for size in buffer.shape) for buffer in call.arguments]
    complexes = any(buffer.dtype.startswith("complex") for buffer in call.arguments)
    return CONTRACTS[call.kernel].flops(*shapes) * (4 if complexes else 1)
