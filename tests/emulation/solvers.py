"""cuSOLVERMp for the stand-ins in `devices`: matrices are put together from all ranks' local arrays by their
descriptors, LAPACK does the work, and the result is taken apart.

What the library leaves undefined is poisoned: the triangle that a Cholesky factorization has not read, the matrix whose
eigenvectors were asked for. Pivots and factors of reflectors lie beside the local columns that they belong to.
"""

from __future__ import annotations

import ctypes
import types

import numpy as np
import scipy.linalg

NO_TRANSPOSE = 0
LOWER = 0


def bindings(world, grid_type, matrix_type):
    """Return the stand-in of ``nvmath.bindings.cusolverMp``, and what cuBLASMp's has for triangular systems."""

    def at(pointer, dtype, count):
        """Device memory as an array."""
        size = count * np.dtype(dtype).itemsize
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), (size,)).view(dtype)

    def sizes(matrix):
        # Each rank asks for another size; all must bring the largest.
        return 4096 - 64 * matrix.rank, 256 + 16 * matrix.rank

    def check(matrix, work):
        _, device, _, host, *info = work
        assert device >= 4096, "the workspace is not the largest of all ranks"
        assert host >= 256 + 16 * (matrix.grid.comm.nranks - 1)
        at(work[0], np.uint8, device)[...] = 0xFF
        return at(info[0], np.int32, 1) if info else None

    def together(name, matrices, work, *more):
        """Let rank 0 call ``work`` with the whole matrices; put what it has left in them, and give all its answer.

        ``more`` are arrays of this rank for each of the first matrix's columns: ``work`` gets them for all columns.
        """
        first = matrices[0][0]
        comm = first.grid.comm
        brought = [(matrix, matrix.tile(pointer)) for matrix, pointer in matrices], more

        def all_ranks(ranks):
            found = []
            for index in range(len(matrices)):
                whole = np.full(ranks[0][0][index][0].shape, np.nan, ranks[0][0][index][0].dtype)
                for rank, (theirs, _) in enumerate(ranks):
                    matrix, tile = theirs[index]
                    assert matrix.blocks[0] == matrix.blocks[1], "blocks must be square"
                    whole[np.ix_(*matrix.places(rank))] = tile
                found.append(whole)
            beside = []
            for index in range(len(more)):
                whole = np.zeros(first.shape[1], more[index].dtype)
                for rank, (theirs, arrays) in enumerate(ranks):
                    cols = theirs[0][0].places(rank)[1]
                    whole[cols] = arrays[index][: len(cols)]
                beside.append(whole)
            answer = work(*found, *beside)
            for rank, (theirs, arrays) in enumerate(ranks):
                for (matrix, tile), whole in zip(theirs, found, strict=True):
                    tile[...] = whole[np.ix_(*matrix.places(rank))]
                cols = theirs[0][0].places(rank)[1]
                for mine, whole in zip(arrays, beside, strict=True):
                    mine[: len(cols)] = whole[cols]
            return answer

        answer = comm.hub.together(comm.rank, brought, all_ranks)
        world.calls.append((comm.rank, name, *first.shape))
        return answer

    def place(pointer, row, col, number, shape=None):
        matrix = world.handles[number]
        assert (row, col) == (1, 1)
        assert pointer
        assert shape is None or matrix.shape == shape
        return matrix, pointer

    def columns(matrix):
        return matrix.local()[1]

    def potrf(handle, uplo, n, a, ia, ja, da, kind, *work):
        x, info = place(a, ia, ja, da, (n, n)), check(world.handles[da], work)

        def factor(whole):
            assert uplo == LOWER
            lower, failed = scipy.linalg.get_lapack_funcs("potrf", (whole,))(np.tril(whole), lower=True)
            whole[...] = np.tril(lower) + np.triu(np.full_like(whole, np.nan), 1)
            return failed

        # The library (0.9.1) does not say which leading minor it was.
        if together("potrf", [x], factor):
            raise RuntimeError("INTERNAL_ERROR (7)")
        info[0] = 0

    def potrs(handle, uplo, n, nrhs, a, ia, ja, da, b, ib, jb, db, kind, *work):
        x, y, info = place(a, ia, ja, da, (n, n)), place(b, ib, jb, db, (n, nrhs)), check(world.handles[da], work)

        def solve(whole, rhs):
            assert uplo == LOWER
            rhs[...] = scipy.linalg.cho_solve((np.tril(whole), True), rhs, check_finite=False)
            return 0

        info[0] = together("potrs", [x, y], solve)

    def getrf(handle, m, n, a, ia, ja, da, pivots, kind, *work):
        x, info = place(a, ia, ja, da, (m, n)), check(world.handles[da], work)

        def factor(whole, beside):
            found, rows, failed = scipy.linalg.get_lapack_funcs("getrf", (whole,))(whole)
            whole[...] = found
            beside[: len(rows)] = rows + 1
            return failed

        info[0] = together("getrf", [x], factor, at(pivots, np.int64, columns(x[0])))

    def getrs(handle, trans, n, nrhs, a, ia, ja, da, pivots, b, ib, jb, db, kind, *work):
        x, y, info = place(a, ia, ja, da, (n, n)), place(b, ib, jb, db, (n, nrhs)), check(world.handles[da], work)

        def solve(whole, rhs, beside):
            assert trans == NO_TRANSPOSE, "getrs has no transposes"
            rhs[...] = scipy.linalg.lu_solve((whole, beside - 1), rhs, check_finite=False)
            return 0

        info[0] = together("getrs", [x, y], solve, at(pivots, np.int64, columns(x[0])))

    def geqrf(handle, m, n, a, ia, ja, da, tau, kind, *work):
        x, info = place(a, ia, ja, da, (m, n)), check(world.handles[da], work)

        def factor(whole, beside):
            found, factors, _, failed = scipy.linalg.get_lapack_funcs("geqrf", (whole,))(whole)
            whole[...] = found
            beside[: len(factors)] = factors
            return failed

        info[0] = together("geqrf", [x], factor, at(tau, x[0].dtype, columns(x[0])))

    def orgqr(handle, m, n, k, a, ia, ja, da, tau, kind, *work):
        x, info = place(a, ia, ja, da, (m, n)), check(world.handles[da], work)

        def make(whole, beside):
            assert m >= n >= k
            name = "ungqr" if whole.dtype.kind == "c" else "orgqr"
            whole[...] = scipy.linalg.get_lapack_funcs(name, (whole,))(whole, beside[:k])[0]
            return 0

        info[0] = together("orgqr", [x], make, at(tau, x[0].dtype, columns(x[0])))

    def ormqr(handle, side, trans, m, n, k, a, ia, ja, da, tau, c, ic, jc, dc, kind, *work):
        x, y, info = place(a, ia, ja, da), place(c, ic, jc, dc, (m, n)), check(world.handles[da], work)

        def apply(whole, other, beside):
            assert side == 0, "only from the left"
            assert trans in ((0, 2) if whole.dtype.kind == "c" else (0, 1))
            name = "unmqr" if whole.dtype.kind == "c" else "ormqr"
            call = scipy.linalg.get_lapack_funcs(name, (whole,))
            way = "N" if trans == 0 else "C" if whole.dtype.kind == "c" else "T"
            other[...] = call("L", way, whole[:, :k], beside[:k], other, max(1, 64 * n))[0]
            return 0

        info[0] = together("ormqr", [x, y], apply, at(tau, x[0].dtype, columns(x[0])))

    def syevd(handle, job, uplo, n, a, ia, ja, da, values, q, iq, jq, dq, kind, *work):
        x, info = place(a, ia, ja, da, (n, n)), check(world.handles[da], work)
        wanted = ctypes.string_at(job, 1)
        assert wanted in (b"N", b"V")
        matrices = [x, place(q, iq, jq, dq, (n, n))] if wanted == b"V" else [x]

        def decompose(whole, *vectors):
            assert uplo == LOWER
            if not np.isfinite(np.tril(whole)).all():
                return np.full(n, np.nan, whole.real.dtype)
            w, v = np.linalg.eigh(np.tril(whole), UPLO="L")
            for one in vectors:
                one[...] = v
            whole[...] = np.nan
            return w

        at(values, x[0].dtype.char.lower(), n)[...] = together("syevd", matrices, decompose)
        info[0] = 0

    def gesvd(handle, desc, jobu, jobvt, m, n, a, ia, ja, da, s, u, iu, ju, du, vt, ivt, jvt, dvt, kind, *work):
        x, info = place(a, ia, ja, da, (m, n)), check(world.handles[da], work)
        matrices = [x, *([place(u, iu, ju, du), place(vt, ivt, jvt, dvt)] if jobu else [])]

        def decompose(whole, *vectors):
            left, values, right = np.linalg.svd(whole, full_matrices=False)
            for one, found in zip(vectors, (left, right), strict=bool(vectors)):
                one[...] = found
            whole[...] = np.nan
            return values

        at(s, x[0].dtype.char.lower(), min(m, n))[...] = together("gesvd", matrices, decompose)
        info[0] = 0

    def polar(handle, desc, uplo, m, n, a, ia, ja, da, h, ih, jh, dh, kind, *work):
        x, y, info = place(a, ia, ja, da, (m, n)), place(h, ih, jh, dh, (n, n)), check(world.handles[da], work)

        def decompose(whole, hermitian):
            whole[...], hermitian[...] = scipy.linalg.polar(whole)

        together("polar", [x, y], decompose)
        info[0] = 0

    def trsm(handle, side, uplo, trans, diag, m, n, alpha, a, ia, ja, da, b, ib, jb, db, compute, *work):
        x, y = place(a, ia, ja, da), place(b, ib, jb, db)
        check(x[0], work)
        assert side == 0
        assert world.handles[handle] == "cublasMp"
        assert at(alpha, x[0].dtype, 1)[0] == 1
        assert compute == (68 if x[0].dtype.char in "fF" else 70)

        def solve(whole, rhs):
            triangle, kind = whole[:m, :m], "NTC"[trans]
            with np.errstate(all="ignore"):
                rhs[:m] = scipy.linalg.solve_triangular(
                    triangle, rhs[:m], kind, lower=uplo == LOWER, unit_diagonal=bool(diag), check_finite=False
                )

        together("trsm", [x, y], solve)

    # Which argument describes the first matrix.
    routines = {
        **{"potrf": (potrf, 6), "potrs": (potrs, 7), "getrf": (getrf, 6), "getrs": (getrs, 7), "geqrf": (geqrf, 6)},
        **{"orgqr": (orgqr, 7), "ormqr": (ormqr, 9), "syevd": (syevd, 7), "gesvd": (gesvd, 9), "polar": (polar, 8)},
    }

    def buffer_size(which):
        return lambda *arguments: sizes(world.handles[arguments[which]])

    found = {name: routine for name, (routine, _) in routines.items()}
    found |= {f"{name}_buffer_size": buffer_size(which) for name, (_, which) in routines.items()}
    triangular = {"trsm": trsm, "trsm_buffer_size": buffer_size(11)}
    return triangular, types.SimpleNamespace(
        GridMapping=types.SimpleNamespace(COL_MAJOR=0, ROW_MAJOR=1),
        create=lambda device, stream: world.keep("handle", "cusolverMp"),
        destroy=lambda handle: world.drop("handle", handle),
        get_version=lambda handle: 901,
        create_device_grid=lambda handle, comm, p, q, mapping: world.keep(
            "grid", grid_type(p, q, mapping, world.handles[comm])
        ),
        destroy_grid=lambda grid: world.drop("grid", grid),
        create_matrix_desc=lambda grid, kind, m, n, mb, nb, rsrc, csrc, lld: world.keep(
            "descriptor", matrix_type(m, n, mb, nb, rsrc, csrc, lld, kind, grid)
        ),
        destroy_matrix_desc=lambda number: world.drop("descriptor", number),
        **found,
    )
