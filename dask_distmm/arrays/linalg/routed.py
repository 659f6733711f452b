"""Functions of ``dask.array.linalg`` and ``np.linalg`` under `dask_distmm.enable`; NotImplemented where Dask's stay.

Each means the same as Dask's: results have its types and chunks. A function comes here

- where Dask has none, or refuses the chunks;
- where Dask is wrong: it looks for pivots of LU only inside each diagonal block, so that results have large
  errors, or matrices pass for singular;
- otherwise where a run is expected to be faster than Dask's tasks.

What Dask does without an error never ends in one here: least squares may be of any rank where Dask has them, and
``np.linalg.pinv`` stays Dask's. Elements that are NaN or infinite are refused under the names of Dask's functions that
refuse them, and computed under NumPy's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import dask.array as da
import numpy as np
from dask.array.core import Array
from dask.array.linalg import compression_level
from dask.array.linalg import lstsq as dask_lstsq
from dask.array.utils import svd_flip

from dask_distmm.arrays.choice import PAYS, by_times
from dask_distmm.arrays.fallback import NO_CLUSTER, note_left, note_taken, or_dask
from dask_distmm.arrays.linalg import array_api, factors, leading, solutions, spectral
from dask_distmm.arrays.linalg.factorize import common_type, goes_by_rows, problem_of
from dask_distmm.arrays.linalg.public import QRResult, SVDResult, named
from dask_distmm.arrays.linalg.stacks import RULES, by_one_task, by_tasks
from dask_distmm.config import dask_costs, minimum_flops, raises_beyond_memory
from dask_distmm.errors import NotSquareError, PlanError
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.planning.factor import FactorProblem
from dask_distmm.planning.planner import plan_computation
from dask_distmm.planning.program import ProgramProblem
from dask_distmm.planning.tasks import with_tasks
from dask_distmm.runtime.client import current_client, recent_snapshot

# The most random numbers that travel with a graph.
_DRAWN = 2**17
# Rows and columns of matrices for which a run, which begins after some 25 ms, takes longer than NumPy.
_SMALL = 512
# How Dask's own function is. "partial": it may be wrong, or NumPy's is called on whole matrices in this process;
# "absent": it raises.
StockSupport = Literal["full", "partial", "absent"]


def _cholesky(a: Any, lower: bool = False) -> Any:
    return _take(lambda: factors.cholesky(a, lower=bool(lower)), a, stock="full" if _blocks(a) else "absent")


svd: Callable[..., Any] = spectral.svd


def _numpys_cholesky(a: Any, /, *, upper: bool = False) -> Any:
    # NumPy's is L by default, Dask's U.
    return da.linalg.cholesky(a, lower=not upper)


def _lu(a: Any) -> Any:
    return _take(lambda: factors.lu(a), a, stock=_by_lu(a, _blocks(a)))


def _qr(a: Any, mode: str = "reduced") -> Any:
    plain = mode == "reduced" and isinstance(a, Array) and a.ndim == 2
    if plain and len(a.chunks[1]) == 1 and (len(a.chunks[0]) == 1 or a.shape[0] < a.shape[1]):
        return NotImplemented
    if plain and len(a.chunks[0]) == 1 and a.chunks[0][0] <= a.chunks[1][0]:
        # Q is that of the first chunk: no run is as fast.
        return NotImplemented
    stock: StockSupport = "full" if plain and len(a.chunks[1]) == 1 else "absent"
    return _take(lambda: factors.qr(a, mode, check_finite=False), a, stock=stock)  # type: ignore[call-overload]


def _solve(a: Any, b: Any, sym_pos: Any = None, assume_a: Any = "gen") -> Any:
    if sym_pos is not None:
        return NotImplemented
    blocks = _blocks(a) if _chunks_match(a, b) else 0
    stock = _by_lu(a, blocks)
    if assume_a != "gen":
        stock = "full" if assume_a == "pos" and blocks else "absent"
    # Stacks take no structure, so none is passed where none was.
    given = None if assume_a == "gen" else assume_a
    return _take(lambda: solutions.solve(a, b, assume_a=given), a, b, stock=stock)


def _solve_triangular(a: Any, b: Any, lower: bool = False) -> Any:
    stock: StockSupport = "full" if _chunks_match(a, b) else "absent"
    return _take(lambda: solutions.solve_triangular(a, b, lower=bool(lower)), a, b, stock=stock)


def _inv(a: Any) -> Any:
    # Dask solves with an identity of float64.
    dtype = np.result_type(a.dtype, np.float64)
    return _take(lambda: solutions.inv(a).astype(dtype), a, stock=_by_lu(a, _blocks(a)))


def _lstsq(a: Any, b: Any, rcond: float | None = None) -> Any:
    if not isinstance(a, Array) or a.ndim != 2:
        return _take(lambda: solutions.lstsq(a, b, rcond), a, b, stock="absent", run=False)
    good = rcond is None and len(a.chunks[1]) == 1 and a.shape[0] >= a.shape[1]
    rows = _by_rows(a)

    def make() -> Any:
        # Dask's may be of any rank.
        limit = max(a.shape) * float(np.finfo(common_type({"a": a, "b": b})).eps) if good and rows else rcond
        x, residuals, rank, values = solutions.lstsq(a, b, limit)
        if isinstance(rank, int):
            rank = da.from_array(np.asarray(rank, np.int64, like=x._meta))
        return x, residuals, rank, values

    found = NotImplemented
    if rows or not good:
        found = _take(make, a, b, stock="full" if good else "absent", run=rows or rcond is None)
    # NumPy's argument, which Dask lacks.
    return dask_lstsq(a, b) if good and found is NotImplemented else found


def _svd(a: Any, coerce_signs: bool = True, full_matrices: bool = False, *, compute_uv: bool = True) -> Any:
    if not isinstance(a, Array) or a.ndim != 2 or full_matrices or not compute_uv:
        # Stacks, and NumPy's arguments, which Dask lacks.
        return _take(lambda: svd(a, full_matrices, compute_uv, check_finite=False), a, stock="absent", run=False)
    if 1 not in a.numblocks:
        make = functools.partial(spectral.svd, a, full_matrices=False)
        return _take(make, a, stock="absent", run=False) if coerce_signs else NotImplemented
    # Dask's signs are those of sums of right vectors: of a tall matrix the rank that has R knows them.
    if a.dtype.kind != "c" and a.numblocks[1] == 1 and _by_rows(a):
        return _take(lambda: spectral.svd_by_rows(a, True, {}, by_sum=coerce_signs), a, stock="full")
    if (a.dtype.kind != "c" or not coerce_signs) and a.numblocks[0] == 1 and _by_rows(a.T):
        found = _take(functools.partial(spectral.svd, a, full_matrices=False), a, stock="full")
        if not coerce_signs or found is NotImplemented:
            return found
        u, v = svd_flip(found[0], found[2])
        return u, found[1], v
    return NotImplemented


def _svd_compressed(
    a: Any,
    k: int,
    iterator: str = "power",
    n_power_iter: int = 0,
    n_oversamples: int = 10,
    seed: Any = None,
    compute: bool = False,
    coerce_signs: bool = True,
) -> Any:
    if iterator not in ("power", "QR") or not isinstance(seed, int | np.integer | None):
        return NotImplemented
    if not isinstance(a, Array) or a.ndim != 2 or not 1 <= k <= min(a.shape):
        return NotImplemented
    extra = compression_level(min(a.shape), k, n_oversamples) - k
    if _on_host(a):
        small = a.dtype in (np.float32, np.float64) and a.shape[1] * (k + extra) <= _DRAWN

        def make() -> Any:
            drawn = da.random.default_rng(seed).standard_normal((a.shape[1], k + extra), chunks=(a.chunks[1], -1))
            vectors = drawn.astype(a.dtype).compute(scheduler="sync").tobytes()
            return leading.compressed_by_rows(a, k, n_power_iter, extra, vectors, {}, by_sum=coerce_signs)

        return _take(make, a, stock="full") if small and _by_rows(a) else NotImplemented
    # Dask's own makes NumPy's random vectors for any chunks.
    if not coerce_signs:
        return NotImplemented
    seed = int(np.random.default_rng(seed).integers(2**31)) if seed is None else int(seed)
    ours = leading.svd_compressed
    return _take(
        lambda: ours(a, k, n_power_iter=n_power_iter, n_oversamples=extra, seed=seed), a, stock="absent", run=False
    )


def _cov(m: Any, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: Any = None, **weights: Any) -> Any:
    if any(x is not None for x in weights.values()) or not isinstance(ddof, int | None):
        return NotImplemented
    return _covariances(lambda: leading.cov(m, None, bool(rowvar), bool(bias), ddof), m, y, rowvar, ddof or 1)


def _corrcoef(x: Any, y: Any = None, rowvar: bool = True) -> Any:
    return _covariances(lambda: leading.corrcoef(x, None, bool(rowvar)), x, y, rowvar, 1)


def _covariances(make: Callable[[], Any], m: Any, y: Any, rowvar: Any, ddof: int) -> Any:
    if y is not None or not isinstance(m, Array) or m.ndim != 2 or not m.shape[bool(rowvar)] > ddof:
        return NotImplemented
    stock: StockSupport = "absent" if sparse_package(m._meta) else "full"
    return _take(make, m, stock=stock) if _by_rows(m.T if rowvar else m) else NotImplemented


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leaves calls with unknown arguments to Dask's own, whose error names the argument."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            return NotImplemented
        with named(function.__name__.removeprefix("_")):
            return function(*args, **kwargs)

    return checked


def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    if (
        not isinstance(x, Array)
        or (x.ndim < 3 and x.dtype.kind != "c")
        or ord not in (2, -2, "nuc")
        or (x.ndim if axis is None else np.size(axis)) != 2
    ):
        return NotImplemented
    return _take(lambda: array_api.norm(x, ord, axis, keepdims), x, stock="absent", run=False)


DASKS: Mapping[str, Callable[..., Any]] = {
    function.__name__.removeprefix("_"): _checked(function)
    for function in (_cholesky, _inv, _lstsq, _lu, _norm, _qr, _solve, _solve_triangular, _svd, _svd_compressed)
}


def _pinv(a: Any, rcond: float | None = None, hermitian: bool = False, **given: Any) -> Any:
    rtol = given.get("rtol", rcond)
    if rtol is None:
        # NumPy's limit, and that of the array API.
        rtol = max(a.shape[-2:]) * float(np.finfo(common_type({"a": a})).eps) if given else 1e-15
    return _take(lambda: solutions.pinv(a, rtol, hermitian, check_finite=False), a, stock="partial")


def _cond(x: Any, p: Any = None) -> Any:
    if p in (None, 2, -2):
        return _take(lambda: array_api.cond(x, p), x, stock="partial")
    # Of singular matrices these are infinite, too.
    return _take(
        lambda: by_tasks("(m,m)->()", functools.partial(np.linalg.cond, p=p), {"x": x}), x, stock="partial", run=False
    )


def _named_qr(a: Any, mode: str = "reduced") -> Any:
    found = da.linalg.qr(a) if mode == "reduced" else _qr(a, mode)
    return QRResult(*found) if isinstance(found, tuple) else found


def _named_svd(a: Any, full_matrices: bool | None = None, compute_uv: bool = True, hermitian: bool = False) -> Any:
    # By default without full_matrices, as Dask's: a square U of a tall matrix has no room.
    if hermitian:
        return NotImplemented
    if full_matrices or not compute_uv or a.dtype.kind == "c":
        return _take(lambda: svd(a, bool(full_matrices), compute_uv, check_finite=False), a, stock="partial")
    return SVDResult(*da.linalg.svd(a))


def _numpys(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ours as NumPy has it: elements that are NaN or infinite are computed."""
    listed = inspect.signature(ours).parameters
    # NumPy's refuse them in one case only.
    computed = "check_finite" in listed and ours not in (spectral.eig, spectral.eigvals)
    options, run = {"check_finite": False} if computed else {}, "engine" in listed

    @functools.wraps(ours)
    def function(*args: Any, **kwargs: Any) -> Any:
        if ours.__name__ in RULES and not kwargs and minimum_flops() is None and _are_small(*args):
            return _take(lambda: by_one_task(ours.__name__, *args), *args, stock="partial", run=False)
        return _take(lambda: ours(*args, **kwargs, **options), *args, stock="partial", run=run, narrow=not run)

    return function


# Functions that are those of `np.linalg` of the same names, but for elements that are not finite.
_SAME = (
    "cross det diagonal eig eigh eigvals eigvalsh inv matrix_norm matrix_rank matrix_transpose outer slogdet solve "
    "svdvals trace vecdot vector_norm"
)
_OURS = {**vars(array_api), **vars(spectral), **vars(solutions)}
# What `np.linalg` has; others of its functions end in Dask's of the same names.
_NUMPYS: dict[str, Callable[..., Any]] = {
    "cholesky": _numpys_cholesky, "cond": _cond, "pinv": _pinv, "qr": _named_qr, "svd": _named_svd,
    **{name: _numpys(_OURS[name]) for name in _SAME.split()},
}  # fmt: skip


# Of ``dask.array``.
STATISTICS: Mapping[str, Callable[..., Any]] = {"cov": _checked(_cov), "corrcoef": _checked(_corrcoef)}
NUMPYS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(np.linalg, name): function for name, function in _NUMPYS.items()},
    np.kron: _numpys(array_api.kron),
}


# What the array API has, as ``array_api_compat.dask.array.linalg`` lacks it or has it otherwise.
ARRAY_API: Mapping[str, Callable[..., Any]] = {
    **DASKS,
    **_NUMPYS,
    "matrix_power": _numpys(array_api.matrix_power),
    "pinv": lambda x, /, *, rtol=None: _pinv(x, rtol=rtol),
    "svd": lambda x, /, *, full_matrices=True: _named_svd(x, full_matrices),
}


def _blocks(a: Any) -> int:
    """Return how many rows of chunks a matrix has whose chunks are squares of one size, as Dask needs it; else 0."""
    if not isinstance(a, Array) or a.ndim != 2 or len({*a.chunks[0], *a.chunks[1]}) != 1:
        return 0
    return len(a.chunks[0])


def _chunks_match(a: Any, b: Any) -> bool:
    """Whether Dask's functions take the chunks of a square matrix and a right-hand side."""
    if not isinstance(a, Array) or not isinstance(b, Array) or a.ndim != 2 or not b.ndim:
        return False
    return bool(a.chunks[0] == a.chunks[1] == b.chunks[0])


def _by_rows(a: Any) -> bool:
    """Whether a matrix is worked on in chunks of rows."""
    return isinstance(a, Array) and a.ndim == 2 and goes_by_rows(a, {})


def _on_host(a: Any) -> bool:
    """Whether chunks are NumPy's: some of Dask's functions combine them with NumPy's arrays, or pass them to SciPy."""
    return isinstance(a, Array) and isinstance(a._meta, np.ndarray)


def _are_small(*operands: Any) -> bool:
    """Whether NumPy, which stock Dask gives all chunks to, is done with matrices before a run would begin."""
    return all(
        isinstance(x, Array) and _on_host(x) and x.ndim < 3 and max(x.shape, default=0) <= _SMALL for x in operands
    )


def _by_lu(a: Any, blocks: int) -> StockSupport:
    """Return how Dask's functions by LU are, of this many rows of square chunks."""
    return "absent" if not _on_host(a) or not blocks else "full" if blocks == 1 else "partial"


def _take(make: Callable[[], Any], *operands: Any, stock: StockSupport, run: bool = True, narrow: bool = False) -> Any:
    """Return what `make` returns, or NotImplemented where Dask's own function is to be called; note which."""
    found = _taken(make, *operands, stock=stock, run=run, narrow=narrow)
    if found is not NotImplemented:
        note_taken()
    return found


def _taken(make: Callable[[], Any], *operands: Any, stock: StockSupport, run: bool, narrow: bool) -> Any:
    arrays = [x for x in operands if isinstance(x, Array)]
    # Of types of one or two bytes some of Dask's functions make float32, others float64.
    if not arrays or (not narrow and arrays[0].dtype.itemsize < 4):
        return NotImplemented
    # Of as many rows as columns or more, or of fewer: shapes of results depend on it.
    if np.isnan([size for x in arrays for size in x.shape]).any():
        return NotImplemented
    try:
        made = or_dask(make, raises=True)
    except NotSquareError:
        raise  # Dask's own error names arguments of a function inside of it.
    except PlanError:
        return NotImplemented  # Dask's own function has the error to raise.
    if not run or made is NotImplemented:
        return made
    problem, raises = problem_of(made[0] if isinstance(made, tuple) else made), raises_beyond_memory()
    if problem is None:
        # Larger than the workers' memory: made of Dask's own tasks.
        return NotImplemented if stock == "full" else made
    return or_dask(lambda: NotImplemented if _left(problem, stock) else made, raises=stock == "absent" or raises)


def _left(problem: FactorProblem | ProgramProblem, stock: StockSupport) -> bool:
    """Whether a factorization or a program is left to Dask's own function."""
    client, least = current_client(), minimum_flops()
    kind = problem.task.kind if isinstance(problem, FactorProblem) else problem.builder
    what = f"{kind} of {problem['a'].shape} of {problem['a'].dtype}"
    if stock == "full" and (client is None or problem.flops < (least or 1)):
        small = f"it has fewer operations than the config distmm.minimum-flops, {least:g}" if least else "it is empty"
        note_left(what, problem.flops, NO_CLUSTER if client is None else small)
        return True
    known = recent_snapshot(client, problem) if client is not None else None
    if known is None:
        return False
    made = plan_computation(problem, known.workers, engine=known.engines)
    if stock != "full" or least is not None:
        return False
    compared = with_tasks(made, known.workers, dask_costs())
    if compared.worth_it:
        return False
    note_left(what, problem.flops, by_times(compared), PAYS)
    return True
