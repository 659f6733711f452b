"""The kernels of factorizations, as `programs.steps` names them, in terms of `Kernels`: the same on all devices.

Gram matrices, and what is made of them: QR of matrices with many more rows than columns, if that is safe. CholeskyQR2
(Yamamoto, Nakatsukasa, Yanagisawa, Fukaya 2015) is made of products of matrices; `programs.composite` has its steps.
Matrices that are ill-conditioned (beyond about 10^7 in float64), of lower rank, or whose squares overflow go to
Householder's reflections.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from dask_distmm.engines.programs.blas import Kernels, assign, diagonal_view, solve_by_halves
from dask_distmm.engines.programs.spectral import decompose
from dask_distmm.errors import MatrixError
from dask_distmm.programs.factorizations import Factorization

# Gram matrices, and what is made of them


# If Q1^H Q1 differs from the identity by less in the 2-norm, Q is orthonormal up to rounding (section 3 there). The
# norm of Frobenius, which is computed, is not below that.
_NEAR = 5 / 64
# A triangle is made in this many parts of its columns, unless they have fewer columns than this.
_PARTS, _COLUMNS = 2, 128
# The diagonal of U is at least 1 in modulus, if each sign is chosen when its column is eliminated. Here all are chosen
# before, so that is looked at.
_AWAY = 0.5
# Bytes of a part of a chunk of rows, on GPUs and in the caches of a CPU.
_DEVICE_BYTES, _HOST_BYTES = 2**29, 2**22


def add_gram(kernels: Kernels, a: Any, g: Any) -> None:
    """Add the lower triangle of ``A^H A``, of a matrix of any memory order, to that of a column-major matrix."""
    a = a if min(a.strides) == a.itemsize else kernels.xp.array(a, order="C")
    if _by_columns(a) or g.dtype.kind != "c":
        _gram(kernels, a, g, beta=1)
        return
    # Of a row-major matrix it is the conjugate.
    gram = kernels.empty(g.shape, g.dtype)
    gram[...] = 0
    _gram(kernels, a, gram)
    g += kernels.xp.conjugate(gram, out=gram)


def is_near(kernels: Kernels, gram: Any) -> bool:
    """Whether a Gram matrix is so near to the identity that one more division makes its matrix orthonormal."""
    with np.errstate(all="ignore"):
        # NaN is not near.
        return bool(kernels.host(kernels.distance(gram) < _NEAR**2))


def strips_of(kernels: Kernels, a: Any) -> Iterator[slice]:
    """Yield slices of the rows of a matrix, of a size that is worth a call of BLAS."""
    size = _DEVICE_BYTES if kernels.asynchronous else _HOST_BYTES
    step = max(a.shape[1], size // max(1, a.dtype.itemsize * a.shape[1]))
    for start in range(0, a.shape[0], step):
        yield slice(start, start + step)


def upper_of(kernels: Kernels, factor: Any) -> Any:
    """Return the conjugate transpose of a lower triangle, column-major, with zeros below the diagonal."""
    upper = kernels.empty(factor.shape, factor.dtype)
    upper[...] = kernels.triangle(factor, lower=True, unit=False).conj().T
    return upper


def gram_reflectors(kernels: Kernels, a: Any) -> Any:
    """Overwrite a column-major matrix with R and reflectors and return T, as `Kernels.geqrt`, by CholeskyQR2.

    The reflectors are reconstructed (Ballard, Demmel, Grigori, Jacquelin, Nguyen, Solomonik 2014)::

        Q - [S; 0] = V U        T = -U S V1^-H        A = (I - V T V1^H) S R

    S has the signs that keep the diagonal of Q - S away from zero, and V1 is the upper block of V. Of Q only the upper
    block is computed: the rows of V below are those of ``Q1 (U R2)^-1``.
    """
    (m, n), xp = a.shape, kernels.xp
    if not 0 < n <= m:
        return None
    # Beside products of large matrices each kernel of a GPU waits for its turn: the fewer, the better.
    q, top = kernels.empty((m, n), a.dtype), kernels.empty((n, n), a.dtype)
    first, second, product, divisor = (kernels.empty((n, n), a.dtype) for _ in range(4))
    assign(q, a)
    # Each look at a device is a wait for it: it computes all, and is asked once whether that was safe.
    with np.errstate(all="ignore"):
        _gram(kernels, q, first)
        infos = [kernels.potrf(first)]
        kernels.trsm(first, q, right=True, lower=True, op="C", unit=False)
        _gram(kernels, q, second)
        distance = kernels.distance(second)
        infos.append(kernels.potrf(second))
        assign(top, q[:n])
        kernels.trsm(second, top, right=True, lower=True, op="C", unit=False)
        diagonal = diagonal_view(xp, top)
        signs = xp.copysign(1, -diagonal.real)
        diagonal -= signs
        kernels.getrf(top, pivoting=False)
        pivots = kernels.diagonal(top)
        good = kernels.host(distance) < _NEAR**2 and not any(kernels.host(info)[0] for info in infos)
        if not good or not (abs(kernels.host(pivots)) > _AWAY).all():
            return None
    upper, l1, l2 = (
        kernels.triangle(part, lower=lower, unit=False) for part, lower in ((top, False), (first, True), (second, True))
    )
    kernels.gemm(upper, l2, divisor, "N", "C", alpha=1, beta=0)
    assign(a[n:], q[n:])
    kernels.trsm(divisor, a[n:], right=True, lower=False, op="N", unit=False)
    # T is made where U is.
    upper *= -signs
    kernels.trsm(top, upper, right=True, lower=True, op="C", unit=True)
    kernels.gemm(l1, l2, product, alpha=1, beta=0)
    assign(a[:n], xp.where(xp.tri(n, k=-1, dtype=bool), top, signs[:, None] * product.conj().T))
    return upper


def _columns(n: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the parts that n columns are computed in."""
    step = max(_COLUMNS, -(-n // _PARTS))
    for start in range(0, n, step):
        yield start, min(n, start + step)


def _by_columns(a: Any) -> bool:
    return bool(a.strides[0] < a.strides[1])


def _gram(kernels: Kernels, q: Any, gram: Any, beta: int = 0) -> None:
    """Write the lower triangle of ``Q^H Q`` to a column-major matrix of zeros; of a row-major Q the conjugate of that.

    Where calls are asynchronous the matrix may hold anything. With `beta` 1 it is added to what is there.
    """
    n, columns = q.shape[1], _by_columns(q)
    if columns or kernels.asynchronous:
        # In float32 cuBLAS' syrk takes ten times as long as its gemm (1 H200, 32768 x 512: 2.8 and 0.3 ms).
        for start, stop in _columns(n):
            strip, below, target = q[:, start:stop], q[:, start:], gram[start:, start:stop]
            if columns:
                kernels.gemm(below, strip, target, "C", "N", alpha=1, beta=beta)
            else:
                kernels.gemm(below.T, strip.T, target, "N", "C", alpha=1, beta=beta)
    else:
        kernels.herk(q.T, gram, alpha=1)


# Panels, and what they are applied to


# One GEMM of several block columns has a higher rate than one of each. It computes elements above the diagonal, too: at
# most this share of the others (2 H200, float64, N = 32768: the run with 1/12, 1/24, 1/48 takes 192, 185, 181 ms). If
# tensor cores compute in few bits, calls take longer than these elements.
_BESIDE = 1 / 48, 1 / 8
# A matrix with this many rows is multiplied by the inverses of triangles of this order, rather than solved with them:
# other products have more of the GPU meanwhile (1 H200, float64, 32768 x 512: cuBLAS' trsm takes 1.0 ms from them).
_ROWS, _INVERTED = 16384, 256
# Of products in fewer bits, this many rows or columns; their calls are fewer with triangles of up to this order.
_MANY, _INVERTED_AT_ONCE = 1024, 1024
# Rows that one GEMM adds up at a time. One block of a GEMM that adds up 32768 rows takes 1 ms, and the small kernels of
# a panel wait for it one by one (1 H200, a QR panel of 32768 x 512: alone 7 ms, beside that 31, beside parts 19; the
# parts take 6 % more).
_DEPTH, _WIDE = 4096, 2048


class FactorKernels:
    """The kernels that `programs.factor` calls: those of `Kernels`, and compositions of them."""

    # The share of the run's progress that kernels report themselves.
    reported = 0.0

    def __init__(self, blas: Kernels) -> None:
        self.blas = blas
        # Looks at what was computed, and at which arrays: they wait for these, so that where calls are asynchronous
        # they come last.
        self._looks: list[tuple[Callable[..., None], Sequence[Any]]] = []
        # Seconds of the parts of what ranks share.
        self.timings: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blas, name)

    def complete(self) -> None:
        """Run the deferred checks on results copied to the host, after all work is queued."""
        with self.blas.on("join"):
            arrays_on_host = iter(self.blas.hosts([array for _, arrays in self._looks for array in arrays]))
        for look, arrays in self._looks:
            look(*itertools.islice(arrays_on_host, len(arrays)))

    def _look(self, look: Callable[..., None], *arrays: Any) -> None:
        if self.blas.asynchronous:
            self._looks.append((look, arrays))
        else:
            look(*self.blas.hosts(arrays))

    def check_minor(self, info: Any, *, start: int, copied: bool = False) -> None:
        """Raise if the Cholesky factorization of a diagonal block, which begins at `start`, has found it indefinite."""

        def look(info: Any) -> None:
            if order := int(info.flat[0]):
                raise MatrixError(indefinite(start + order))

        self._look(look, self.blas.diagonal(info[:, None]) if copied and self.blas.asynchronous else info)

    def ldlt(self, a: Any, *, start: int) -> Any:
        """Overwrite the lower triangle of a Hermitian block with L and D of L D L^H, without pivots; return D."""
        kernels, lower = self.blas, self.blas.triangle(a, lower=True, unit=False)
        kernels.adjoint(lower, a)
        a += lower
        diagonal_view(kernels.xp, a)[...] = diagonal_view(kernels.xp, lower).real
        with np.errstate(all="ignore"):
            # U of L U is D L^H.
            kernels.getrf(a, pivoting=False)
        d = kernels.diagonal(a)

        def look(d: Any) -> None:
            if len(zeros := np.flatnonzero(d == 0)):
                raise MatrixError(no_pivot(start + int(zeros[0])))

        self._look(look, d)
        return d.real.astype(a.dtype)[:, None]

    def divide_columns(self, b: Any, d: Any) -> None:
        """Divide each column by a number."""
        b /= d[:, 0]

    def concatenate(self, *parts: Any) -> NDArray[Any]:
        """Return real parts of columns as one array on the host."""
        return np.concatenate([x.real.ravel() for x in self.blas.hosts(parts)])

    def check_diagonal(self, rows: Any, *, start: int, size: int) -> None:
        """Raise if the diagonal of a panel, of all rows, shows that the matrix is singular.

        It does if an element is zero; with the larger side of the matrix (`size`), if it is rounding of its column.
        """
        kernels, stop, longest = self.blas, start + rows.shape[1], max(size, len(rows))

        def look(diagonal: Any, *parts: Any) -> None:
            modulus = abs(diagonal)
            # Without a size, of nothing.
            norms = np.hypot(*parts) if parts else np.zeros_like(modulus)
            if (small := modulus <= size * np.finfo(norms.dtype).eps * norms).any():
                limit = longest * float(np.finfo(norms.dtype).eps)
                raise MatrixError(singular(start + int(np.argmax(small)), limit, rank=size > 0))

        arrays = [kernels.diagonal(rows[start:])]
        if size:
            # The norm of R's column is that of A's: what is left of it is rounding if the columns before it span it.
            norm = kernels.xp.linalg.norm
            arrays.append(norm(rows[:start], axis=0))
            arrays.append(norm(kernels.triangle(rows[start:stop], lower=False, unit=False), axis=0))
        self._look(look, *arrays)

    def copied(self, a: Any) -> Any:
        """Return a column-major copy."""
        return a.copy()

    def clear(self, a: Any) -> None:
        """Set A to zero."""
        assign(a, 0)

    def identity(self, a: Any, *, start: int) -> None:
        """Set A to columns of an identity, from `start` on."""
        assign(a, 0)
        at = np.arange(a.shape[1])
        a[start + at, at] = 1

    def decompose(self, *matrices: Any, task: Factorization) -> tuple[Any, ...]:
        """Return a spectral decomposition, or a function, of the whole matrix."""
        outputs = decompose(self.blas, task, *matrices)
        return tuple(outputs[output.name] for output in task.outputs)

    # By the pivots of all panels, each counted from 0 and from the first row of its panel

    def pivots(self, *pivots: Any, starts: Sequence[int], count: int = 0) -> NDArray[np.int32]:
        """Concatenate panels' pivots to 0-based rows of A."""
        numbers = [x + np.int32(start) for x, start in zip(self.blas.hosts(pivots), starts, strict=True)]
        return np.concatenate(numbers or [np.zeros(0, np.int32)])

    def permutation(self, *pivots: Any, starts: Sequence[int], count: int) -> NDArray[np.int64]:
        """Return the permutation of pivoting: row i of L U is row p[i] of A."""
        rows, every = np.arange(count, dtype=np.float64)[:, None], self.pivots(*pivots, starts=starts)
        return np.argsort((scipy.linalg.lapack.dlaswp(rows, every) if len(every) else rows)[:, 0]).astype(np.int64)

    def determinant(self, *factors: Any, starts: Sequence[int], form: str, dtype: str) -> NDArray[Any]:
        """Compute the determinant, or its sign and log-modulus, from pivots and panels' diagonals."""
        pivots = self.pivots(*factors[: len(starts)], starts=starts)
        diagonal = np.concatenate([*self.blas.hosts(factors[len(starts) :]), np.ones(0, dtype)])
        size = abs(diagonal)
        with np.errstate(all="ignore"):
            if form == "logdet":
                return np.asarray(np.log(size).sum(dtype=dtype))
            if (size == 0).any():
                return np.zeros((), dtype)
            odd = np.count_nonzero(pivots != np.arange(len(pivots))) % 2
            factor = diagonal if form == "det" else diagonal / size
            return np.asarray(np.prod(factor, dtype=dtype) * (-1 if odd else 1), dtype)

    def swap_rows(
        self, a: Any, part: Any, *pivots: Any, starts: Sequence[int], blocks: Sequence[tuple[int, int]]
    ) -> None:
        """Copy block columns of L and U, the rows of L in the order into which later panels have swapped theirs.

        Of each block `blocks` has the columns, and the row at which its panel ends.
        """
        every, at = self.pivots(*pivots, starts=starts), 0
        later = _rows_later(every, starts, len(a)) if self.blas.asynchronous else {}
        for width, stop in blocks:
            source, target = (x[:, at : at + width] for x in (a, part))
            at += width
            if stop in later and stop < len(every):
                # One swap after the other would take longer on a GPU than picking all rows at once.
                assign(target[:stop], source[:stop])
                xp = self.blas.xp
                assign(target[stop:], xp.take(source[stop:].T, xp.asarray(later[stop]), axis=1).T)
            else:
                assign(target, source)
                if stop < len(every):
                    self.blas.laswp(target[stop:], every[stop:] - np.int32(stop))

    def trsm(self, a: Any, b: Any, *, right: bool, compute: str = "", **how: Any) -> None:
        """Overwrite `b` with the solution of ``op(a) x = b``, or of ``x op(a) = b``."""
        kernels, order, vectors = self.blas, len(a), len(b) if right else b.shape[1]
        # Products in reduced precision on tensor cores are so fast that triangular solves are slow beside them.
        inverted = vectors >= _MANY if compute else right and vectors >= _ROWS
        if not (kernels.asynchronous and inverted and order >= _INVERTED):
            kernels.trsm(a, b, right=right, compute=compute, **how)
        elif order > (_INVERTED_AT_ONCE if compute else 2 * _INVERTED - 1):
            solve_by_halves(self, a, b, right=right, compute=compute, **how)
        else:
            inverse = kernels.xp.eye(order, dtype=a.dtype, order="F")
            kernels.trsm(a, inverse, right=False, **how)
            copy = kernels.operand(b, compute, right=not right, changes=True)
            inverse = kernels.operand(inverse, compute, right=right, ranged=True)
            first, second = (copy, inverse) if right else (inverse, copy)
            kernels.gemm(first, second, b, alpha=1, beta=0, compute=compute)

    def column_norms(self, x: Any, norms: Any) -> None:
        """Compute squared norms of columns."""
        norms[...] = self.blas.xp.linalg.norm(x, axis=0)[None] ** 2

    def geqrt(self, a: Any) -> Any:
        """Overwrite A with R and reflectors V; return T."""
        # cuSOLVER's geqrf of a panel takes longer than its update (1 H200, 32768 x 512: 12 and 10 ms). On CPUs LAPACK's
        # recursive geqrt3 is faster than the Gram matrix (4096 x 256, float64, one thread: 34 and 62 ms).
        t = gram_reflectors(self.blas, a) if self.blas.asynchronous else None
        return self.blas.geqrt(a) if t is None else t

    def larfb(self, panel: Any, t: Any, columns: Any, *, op: str) -> None:
        """Multiply columns by ``I - V T V^H`` (``op="N"``), or by its conjugate transpose (``"C"``)."""
        kernels, size, width = self.blas, t.shape[0], columns.shape[1]
        if not size or not width:
            return
        # V has ones on its diagonal and zeros above it; R is there in the panel.
        top, rest = kernels.triangle(panel[:size], lower=True, unit=True), panel[size:]
        first = kernels.empty((size, width), columns.dtype)
        kernels.gemm(top, columns[:size], first, "C", alpha=1, beta=0)
        below = columns[size:]
        depth = _DEPTH if kernels.asynchronous and width >= _WIDE else max(1, len(rest))
        for at in range(0, len(rest), depth):
            kernels.gemm(rest[at : at + depth], below[at : at + depth], first, "C", alpha=1, beta=1)
        second = kernels.empty((size, width), columns.dtype)
        kernels.gemm(t, first, second, op, alpha=1, beta=0)
        kernels.gemm(top, second, columns[:size], alpha=-1, beta=1)
        kernels.gemm(rest, second, below, alpha=-1, beta=1)

    def update_lower(
        self, rows: Any, columns: Any, *middle: Any, blocks: Sequence[tuple[int, int]], compute: str = ""
    ) -> None:
        """Apply a panel of L, and D in the `middle` if there is one, to block columns of A, in the lower triangle.

        Rows of both begin with the diagonal block of the first one.
        """
        kernels, at = self.blas, 0
        if kernels.asynchronous:
            # Calls cost time, too: one for several block columns, and some operations too many around the diagonal.
            # GEMMs that take no operand transposed are faster, by more than to transpose it takes.
            beside = kernels.empty((rows.shape[1], columns.shape[1]), rows.dtype)
            kernels.adjoint(_side_by_side(kernels, rows, blocks), beside)
            for d in middle:
                beside *= d
            left, right = (kernels.operand(x, compute, right=at) for x, at in ((rows, False), (beside, True)))
            for group in _grouped(blocks, len(rows), _BESIDE[bool(compute)]):
                first, width = group[0][0], sum(stop - start for start, stop in group)
                some = slice(at, at + width)
                kernels.gemm(left[first:], right[:, some], columns[first:, some], alpha=-1, beta=1, compute=compute)
                at += width
            return
        for first, stop in blocks:
            block, beside = columns[:, at : at + stop - first], rows[first:stop]
            at += stop - first
            below = first if middle else stop
            if middle:
                beside = kernels.empty(beside.shape, beside.dtype)
                np.multiply(rows[first:stop], middle[0].T, out=beside)
            else:
                kernels.herk(beside, block[first:stop])
            kernels.gemm(rows[below:], beside, block[below:], "N", "C", alpha=-1, beta=1, compute=compute)


def _side_by_side(kernels: Kernels, rows: Any, blocks: Sequence[tuple[int, int]]) -> Any:
    """Gather blocks of rows into one matrix; evenly spaced blocks by one strided copy."""
    (first, stop), strided = blocks[0], kernels.xp.lib.stride_tricks.as_strided
    if len(blocks) == 1:
        return rows[first:stop]
    width, apart = stop - first, blocks[1][0] - first
    even = [(first + at * apart, stop + at * apart) == block for at, block in enumerate(blocks)]
    count = even.index(False) if False in even else len(even)
    gathered = kernels.empty((sum(stop - first for first, stop in blocks), rows.shape[1]), rows.dtype)
    (down, across), (_, beside), shape = rows.strides, gathered.strides, (rows.shape[1], count, width)
    source = strided(rows[first:].T, shape, (across, apart * down, down))
    strided(gathered.T, shape, (beside, width * down, down))[...] = source
    at = count * width
    for row, end in blocks[count:]:
        assign(gathered[at : at + end - row], rows[row:end])
        at += end - row
    return gathered


def _grouped(blocks: Sequence[tuple[int, int]], end: int, beside: float) -> list[list[tuple[int, int]]]:
    """Group block columns of a lower triangle, as long as at most the share `beside` is above the diagonal."""
    groups: list[list[tuple[int, int]]] = []
    for block in blocks:
        group = [*groups[-1], block] if groups else [block]
        above = sum((first - group[0][0]) * (stop - first) for first, stop in group)
        if groups and above <= beside * sum((end - first) * (stop - first) for first, stop in group):
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _rows_later(pivots: NDArray[np.int32], starts: Sequence[int], count: int) -> dict[int, NDArray[np.int64]]:
    """Return, for the ends of panels, the order of the rows below after all later swaps."""
    rows, selected = np.arange(count - len(pivots)), dict[int, NDArray[np.int64]]()
    for start, stop in reversed([*itertools.pairwise((*starts, len(pivots)))]):
        selected[stop] = rows
        # LAPACK swaps numbers.
        numbers = np.arange(count - start, dtype=np.float64)[:, None]
        swaps = pivots[start:stop] - np.int32(start)
        swapped = scipy.linalg.lapack.dlaswp(numbers, swaps, overwrite_a=True)[:, 0].astype(np.int64)
        rows = np.concatenate([swapped[: stop - start], swapped[stop - start :][rows]])
    return selected


def indefinite(order: int) -> str:
    """Return the text for a matrix whose leading minor of some order is not positive."""
    return (
        f"the leading minor of order {order} is not positive: the matrix is not positive definite; pass one that is, "
        "or factorize by lu or qr"
    )


def no_pivot(at: int) -> str:
    """Return the text for a matrix of which L D L^H without pivots has a zero in D."""
    return (
        f"element {at} of D is exactly zero: the matrix has no factorization L D L^H without pivots; factorize by lu, "
        "or by eigh"
    )


def singular(at: int, limit: float, *, rank: bool) -> str:
    """Return the text for a diagonal element of a triangular factor that is zero; `rank`: or rounding of its column.

    `limit` is NumPy's for singular values that count as zero.
    """
    if rank:
        return (
            f"column {at} depends on those before it: the matrix is not of full rank; pass rcond={limit:.1e}, for "
            "example: singular values up to that share of the largest one count as zero"
        )
    return (
        f"the matrix is singular: diagonal element {at} of its triangular factor is exactly zero; "
        f"dask_distmm.linalg.lstsq and pinv with rcond={limit:.1e}, and ridge take such matrices"
    )
