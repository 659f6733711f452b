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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import dask.array as da
import numpy as np
from dask.array.core import Array
from dask.array.linalg import compression_level
from dask.array.linalg import lstsq as dask_lstsq
from dask.array.random import RandomState
from dask.array.utils import svd_flip
from dask.utils import random_state_data

from dask_distmm.arrays.choice import PAYS, by_times
from dask_distmm.arrays.fallback import NO_CLUSTER, note_left, or_dask
from dask_distmm.arrays.kinds import rechunked
from dask_distmm.arrays.linalg import array_api, factors, leading, solutions
from dask_distmm.arrays.linalg.factorize import adjoint, common_type, goes_by_rows, steps_of
from dask_distmm.arrays.linalg.public import QRResult, SVDResult, named
from dask_distmm.arrays.linalg.stacks import RULES, by_one_task, by_tasks
from dask_distmm.config import dask_costs, minimum_flops, raises_beyond_memory, wave_budget
from dask_distmm.errors import NotSquareError, PlanError
from dask_distmm.numeric.sparse import sparse_package
from dask_distmm.planning.computation import Computation
from dask_distmm.planning.factor import FactorProblem
from dask_distmm.planning.placement import over_limit, spills
from dask_distmm.planning.planner import plan_computation, with_tasks
from dask_distmm.planning.program import ProgramProblem
from dask_distmm.runtime.chunks import array_kind, on_device
from dask_distmm.runtime.client import current_client, recent_snapshot

# The most random numbers that travel with a graph.
_DRAWN = 2**20
# Rows and columns of matrices for which a run, which begins after some 25 ms, takes longer than NumPy.
_SMALL = 512
# How Dask's own function is. "partial": it may be wrong, or NumPy's is called on whole matrices in this process;
# "absent": it raises.
StockSupport = Literal["full", "partial", "absent"]


def _cholesky(a: Any, lower: bool = False) -> Any:
    return take(lambda: factors.cholesky(a, lower=bool(lower)), a, stock="full" if _blocks(a) else "absent")


svd: Callable[..., Any] = factors.svd


def _lu(a: Any) -> Any:
    return take(lambda: factors.lu(a), a, stock=_by_lu(a, _blocks(a)))


def _qr(a: Any, mode: str = "reduced") -> Any:
    plain = mode == "reduced" and isinstance(a, Array) and a.ndim == 2
    in_rows = plain and len(a.chunks[1]) == 1
    if in_rows and (len(a.chunks[0]) == 1 or a.shape[0] < a.shape[1]):
        return NotImplemented
    if plain and len(a.chunks[0]) == 1 and a.chunks[0][0] <= a.chunks[1][0]:
        return NotImplemented  # Q is that of the first chunk: no run is as fast.
    stock: StockSupport = "full" if in_rows else "absent"
    return take(lambda: factors.qr(a, mode, check_finite=False), a, stock=stock)  # type: ignore[call-overload]


def _solve(a: Any, b: Any, sym_pos: Any = None, assume_a: Any = "gen") -> Any:
    if sym_pos is not None:
        return NotImplemented
    blocks = _blocks(a) if _chunks_match(a, b) else 0
    stock = _by_lu(a, blocks)
    if assume_a != "gen":
        stock = "full" if assume_a == "pos" and blocks else "absent"
    # Stacks take no structure, so none is passed where none was.
    structure = None if assume_a == "gen" else assume_a
    return take(lambda: solutions.solve(a, b, assume_a=structure), a, b, stock=stock)


def _solve_triangular(a: Any, b: Any, lower: bool = False) -> Any:
    stock: StockSupport = "full" if _chunks_match(a, b) else "absent"
    return take(lambda: solutions.solve_triangular(a, b, lower=bool(lower)), a, b, stock=stock)


def _inv(a: Any) -> Any:
    # Dask solves with an identity of float64.
    dtype = np.result_type(a.dtype, np.float64)
    return take(lambda: solutions.inv(a).astype(dtype), a, stock=_by_lu(a, _blocks(a)))


def _lstsq(a: Any, b: Any, rcond: float | None = None) -> Any:
    if not isinstance(a, Array) or a.ndim != 2:
        return take(lambda: solutions.lstsq(a, b, rcond), a, b, stock="absent")
    good = rcond is None and len(a.chunks[1]) == 1 and a.shape[0] >= a.shape[1]
    rows = _by_rows(a)

    def make() -> Any:
        # Dask's may be of any rank.
        limit = max(a.shape) * float(np.finfo(common_type({"a": a, "b": b})).eps) if good and rows else rcond
        x, residuals, rank, values = solutions.lstsq(a, b, limit)
        if isinstance(rank, int):
            rank = da.from_array(np.asarray(rank, np.int64))
        elif on_device(rank._meta):
            # Dask's is a number of the host's.
            rank = rank.map_blocks(_to_host, dtype=rank.dtype, meta=np.empty((), rank.dtype))
        return x, residuals, rank, values

    result = NotImplemented
    if rows or not good:
        result = take(make, a, b, stock="full" if good else "absent")
    # NumPy's argument, which Dask lacks.
    return dask_lstsq(a, b) if good and result is NotImplemented else result


def _to_host(block: Any) -> Any:
    return block.get()[()]


def _svd(a: Any, coerce_signs: bool = True, full_matrices: bool = False, *, compute_uv: bool = True) -> Any:
    if not isinstance(a, Array) or a.ndim != 2 or full_matrices or not compute_uv:
        # Stacks, and NumPy's arguments, which Dask lacks.
        return take(lambda: svd(a, full_matrices, compute_uv, check_finite=False), a, stock="absent")
    if 1 not in a.numblocks:
        make = functools.partial(factors.svd, a, full_matrices=False)
        return take(make, a, stock="absent") if coerce_signs else NotImplemented
    if a.dtype.kind == "c" and coerce_signs:
        return NotImplemented
    # Dask's signs are those of sums of right vectors: of a tall matrix the rank that has R knows them.
    if a.dtype.kind != "c" and a.numblocks[1] == 1 and _by_rows(a):
        return take(lambda: factors.svd_by_rows(a, True, {}, by_sum=coerce_signs), a, stock="full")
    if a.numblocks[0] != 1 or not _by_rows(a.T):
        return NotImplemented
    parts = take(lambda: factors.svd_by_rows(adjoint(a), True, {}), a, stock="full")
    if parts is NotImplemented:
        return parts
    u, s, v = adjoint(parts[2]), parts[1], adjoint(parts[0])
    u, v = svd_flip(u, v) if coerce_signs else (u, v)
    return u, s, v


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
    if iterator not in ("power", "QR") or not isinstance(
        seed, int | np.integer | da.random.Generator | RandomState | None
    ):
        return NotImplemented
    if not isinstance(a, Array) or a.ndim != 2 or not 1 <= k <= min(a.shape):
        return NotImplemented
    extra, host = compression_level(min(a.shape), k, n_oversamples) - k, _on_host(a)
    random = seed if isinstance(seed, RandomState) else da.random.default_rng(seed)
    alike = random._backend is np if host else random._backend is not np
    # On the host the random vectors are those of Dask, which travel with the graph.
    few = a.shape[1] * (k + extra) <= _DRAWN
    same_draws = not host or (a.dtype in (np.float32, np.float64) and few)
    # Rows of climate data are times, fewer than places: all that is long are vectors that each rank has, too.
    by_rows = _by_rows(a) or (few and len(a.chunks[1]) == 1 < len(a.chunks[0]))
    if alike and same_draws and by_rows:

        def make(seed: int | bytes) -> Any:
            return leading.compressed_by_rows(a, k, n_power_iter, extra, seed, {}, by_sum=coerce_signs)

        # Numbers are drawn if they are used.
        taken = take(lambda: make(0), a, stock="full")
        return taken if taken is NotImplemented else make(_drawn(random, a, k + extra))
    # Dask's own products are of NumPy's random vectors and CuPy's chunks.
    if host or alike or not coerce_signs:
        return NotImplemented
    seed = _seed_of(random, 1) if seed is None or random is seed else int(seed)
    ours = leading.svd_compressed
    return take(lambda: ours(a, k, n_power_iter=n_power_iter, n_oversamples=extra, seed=seed), a, stock="absent")


def _drawn(random: Any, a: Array, width: int) -> int | bytes:
    """Return the random vectors that Dask multiplies a matrix by; for those that GPUs would draw, a seed."""
    if not _on_host(a):
        return _seed_of(random, len(a.chunks[1]))
    vectors = random.standard_normal((a.shape[1], width), chunks=(a.chunks[1], -1))
    return bytes(vectors.astype(a.dtype).compute(scheduler="sync").tobytes())


def _seed_of(random: Any, draws: int) -> int:
    """Return a seed out of Dask's random numbers, which then go on as if they had been drawn for some chunks."""
    if isinstance(random, RandomState):
        return int(random_state_data(draws, random._numpy_state)[0][0])
    return int(random._bit_generator._seed_seq.spawn(draws)[0].generate_state(1)[0])


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
    return take(make, m, stock=stock) if _by_rows(m.T if rowvar else m) else NotImplemented


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
    if not isinstance(x, Array) or ord not in (2, -2, "nuc") or (x.ndim if axis is None else np.size(axis)) != 2:
        return NotImplemented
    stock: StockSupport = "full" if x.ndim < 3 and x.dtype.kind != "c" and 1 in x.numblocks else "absent"
    if stock == "full" and not (_by_rows(x) or _by_rows(x.T)):
        return NotImplemented
    return take(lambda: array_api.norm(x, ord, axis, keepdims), x, stock=stock)


DASKS: Mapping[str, Callable[..., Any]] = {
    function.__name__.removeprefix("_"): _checked(function)
    for function in (_cholesky, _inv, _lstsq, _lu, _norm, _qr, _solve, _solve_triangular, _svd, _svd_compressed)
}


def _pinv(a: Any, rcond: float | None = None, hermitian: bool = False, **options: Any) -> Any:
    rtol = options.get("rtol", rcond)
    if rtol is None:
        # NumPy's limit, and that of the array API.
        rtol = max(a.shape[-2:]) * float(np.finfo(common_type({"a": a})).eps) if options else 1e-15
    return take(lambda: solutions.pinv(a, rtol, hermitian, check_finite=False), a, stock="partial")


def _cond(x: Any, p: Any = None) -> Any:
    if p in (None, 2, -2):
        return take(lambda: array_api.cond(x, p), x, stock="partial")
    # Of singular matrices these are infinite, too.
    return take(lambda: by_tasks("(m,m)->()", functools.partial(np.linalg.cond, p=p), {"x": x}), x, stock="partial")


def _named_qr(a: Any, mode: str = "reduced") -> Any:
    parts = da.linalg.qr(a) if mode == "reduced" else _qr(a, mode)
    return QRResult(*parts) if isinstance(parts, tuple) else parts


def _named_svd(a: Any, full_matrices: bool | None = None, compute_uv: bool = True, hermitian: bool = False) -> Any:
    # By default without full_matrices, as Dask's: a square U of a tall matrix has no room.
    if hermitian:
        return NotImplemented
    if full_matrices or not compute_uv or a.dtype.kind == "c":
        stock: StockSupport = "absent" if full_matrices or not compute_uv else "partial"
        return take(lambda: svd(a, bool(full_matrices), compute_uv, check_finite=False), a, stock=stock)
    return SVDResult(*da.linalg.svd(a))


def _numpys(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ours as NumPy has it: elements that are NaN or infinite are computed."""
    listed = inspect.signature(ours).parameters
    # NumPy's refuse them in one case only.
    computed = "check_finite" in listed and ours not in (factors.eig, factors.eigvals)
    options, narrow = {"check_finite": False} if computed else {}, "engine" not in listed

    @functools.wraps(ours)
    def function(*args: Any, **kwargs: Any) -> Any:
        if ours.__name__ in RULES and not kwargs and minimum_flops() is None and _are_small(*args):
            return take(lambda: _of_small(ours.__name__, *args), *args, stock="partial")
        return take(lambda: ours(*args, **kwargs, **options), *args, stock="partial", narrow=narrow)

    return function


# Functions that are those of `np.linalg` of the same names, but for elements that are not finite.
_SAME = (
    "cross det diagonal eig eigh eigvals eigvalsh inv matrix_norm matrix_rank matrix_transpose outer slogdet solve "
    "svdvals trace vecdot vector_norm"
)
_OURS = {**vars(array_api), **vars(factors), **vars(solutions)}
# What `np.linalg` has; others of its functions end in Dask's of the same names.
_NUMPYS: dict[str, Callable[..., Any]] = {
    # NumPy's is L by default, Dask's U.
    "cholesky": lambda a, /, *, upper=False: da.linalg.cholesky(a, lower=not upper),
    "cond": _cond, "pinv": _pinv, "qr": _named_qr, "svd": _named_svd,
    **{name: _numpys(_OURS[name]) for name in _SAME.split()},
}  # fmt: skip


def _xarrays(name: str, a: Any, b: Any, dim: Any = None, ddof: int = 1, weights: Any = None) -> Any:
    """Return covariances or correlations of DataArrays that share only one axis: of products, not of all pairs."""
    import xarray
    from xarray.computation import computation

    pair = (a, b)
    if weights is not None or not isinstance(dim, str) or not all(isinstance(x, xarray.DataArray) for x in pair):
        return NotImplemented
    if {*a.dims} & {*b.dims} != {dim} or min(a.ndim, b.ndim) < 2 or not all(isinstance(x.data, Array) for x in pair):
        return NotImplemented
    if any(x.dtype.kind not in "iuf" or x.dtype.itemsize < 4 for x in pair):
        return NotImplemented
    a, b = xarray.align(*pair, join="inner", copy=False)
    # Axes, coordinates, name and attributes are those that xarray has for some of the elements.
    few = [x.isel({dim: slice(0, 2)}) for x in (a, b)]
    options = {"ddof": ddof} if name == "cov" else {}
    like = getattr(computation, name)(*few, dim=dim, **options)
    matrices = [x.transpose(dim, ...).data.reshape(x.sizes[dim], -1) for x in (a, b)]
    kind = np.result_type(*(x.dtype if x.dtype.kind == "f" else np.float64 for x in matrices))
    sides = [_valid_powers(x.astype(kind), 2 if name == "cov" else 3) for x in matrices]
    sums = da.concatenate(sides[0], axis=1).T @ da.concatenate(sides[1], axis=1)
    m, n = (x.shape[1] for x in matrices)
    block = {(p, q): sums[p * m : (p + 1) * m, q * n : (q + 1) * n] for p in range(3) for q in range(3)}
    count = block[0, 0]
    means = block[1, 0] / count, block[0, 1] / count
    result = block[1, 1] / count - means[0] * means[1]
    if name == "cov":
        result = result * (count / (count - ddof))
    else:
        squares = block[2, 0] / count - means[0] ** 2, block[0, 2] / count - means[1] ** 2
        result = result / (da.sqrt(squares[0]) * da.sqrt(squares[1]))
    return like.copy(data=result.astype(like.dtype).reshape(like.shape))


def _valid_powers(x: Array, count: int) -> list[Array]:
    """Return powers 0, 1 and 2 of the distances of elements from the means of columns; 0 where one is NaN."""
    valid = ~da.isnan(x)
    away = da.where(valid, x - da.nanmean(x, axis=0), 0)
    return [valid.astype(x.dtype), away, away * away][:count]


# Of xarray, whose own are means of the products of all pairs.
XARRAY: Mapping[str, Callable[..., Any]] = {
    "cov": lambda da_a, da_b, dim=None, ddof=1, weights=None: _xarrays("cov", da_a, da_b, dim, ddof, weights),
    "corr": lambda da_a, da_b, dim=None, weights=None: _xarrays("corr", da_a, da_b, dim, 0, weights),
}
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
    """Whether NumPy, which stock Dask gives all chunks to, or CuPy is done with matrices before a run would begin."""
    return all(
        isinstance(x, Array)
        and array_kind(x._meta) in ("numpy", "cupy")
        and max(x.shape, default=0) <= _SMALL
        and x.ndim < 3
        for x in operands
    )


def _of_small(name: str, a: Array, *b: Array) -> Any:
    """Return what one task makes of matrices, in the chunks in which a run would."""
    results, (rows, cols) = by_one_task(name, a, *b), a.chunks
    chunks = {"inv": (cols, rows), "solve": (cols, *(b and b[0].chunks[1:]))}.get(name, a.chunks)
    if not isinstance(results, tuple):
        return rechunked(results, chunks) if results.ndim == len(chunks) else results
    return type(results)(*(rechunked(x, chunks) if x.ndim == len(chunks) else x for x in results))


def _by_lu(a: Any, blocks: int) -> StockSupport:
    """Return how Dask's functions by LU are, of this many rows of square chunks."""
    return "absent" if not _on_host(a) or not blocks else "full" if blocks == 1 else "partial"


# Of what workers may hold, the share that a run in place of Dask's own function takes at most.
_ROOM = 0.85


def take(make: Callable[[], Any], *operands: Any, stock: StockSupport, narrow: bool = False) -> Any:
    """Return what `make` returns, or NotImplemented where Dask's own function is to be called; note which."""
    arrays = [x for x in operands if isinstance(x, Array)]
    # Of types of one or two bytes some of Dask's functions make float32, others float64.
    if not arrays or (not narrow and arrays[0].dtype.itemsize < 4):
        return NotImplemented
    # Of as many rows as columns or more, or of fewer: shapes of results depend on it.
    if np.isnan([size for x in arrays for size in x.shape]).any():
        return NotImplemented
    if stock == "full" and current_client() is None:
        # Before the run is planned, which takes longer than the tasks of small matrices.
        note_left("", 0.0, NO_CLUSTER)
        return NotImplemented

    def taken() -> Any:
        result = make()
        return NotImplemented if result is NotImplemented or _left(result, arrays, stock) else result

    raises = raises_beyond_memory() or stock == "absent"
    try:
        return or_dask(taken, raises=raises)
    except NotSquareError:
        raise  # Dask's own error names arguments of a function inside of it.
    except PlanError:
        return NotImplemented  # Dask's own function has the error to raise.


def _left(result: Any, operands: Sequence[Array], stock: StockSupport) -> bool:
    """Whether what was made of operands is left to Dask's own function; an error if a run of it does not fit."""
    arrays = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Array)]
    runs = list({run.name: run for x in arrays for run in steps_of(x, beside=operands)}.values())
    client, least = current_client(), minimum_flops()
    full, flops = stock == "full", sum(run.flops for run in runs)
    # Without a run Dask's own tasks make it, as the workers' memory is too small for one.
    if full and flops < (least or 1):
        small = f"it has fewer operations than the config distmm.minimum-flops, {least:g}" if least else "it is empty"
        note_left(_text(runs), flops, small)
        return True
    for run in runs if client is not None else ():
        if (snapshot := recent_snapshot(client, run)) is None:
            return False
        plan = plan_computation(run, snapshot.workers, engine=snapshot.engines)
        # Between the call and the run processes may grow: where memory is short, only what would not have Dask spill.
        if full and over_limit(plan, _ROOM):
            return True
        budget = wave_budget() if full and any(x.by_ranks for x in run.matrices) else None
        if budget is not None and spills(plan, budget):
            return True
        compared = with_tasks(plan, snapshot.workers, dask_costs()) if full and least is None else None
        if compared is not None and not compared.worth_it:
            note_left(_text(runs), flops, by_times(compared), PAYS)
            return True
    return False


def _text(runs: Sequence[Computation]) -> str:
    """Return what runs compute, for a hint."""
    if not runs or not isinstance(run := runs[0], FactorProblem | ProgramProblem):
        return ""
    kind = run.task.kind if isinstance(run, FactorProblem) else run.builder
    return f"{kind} of {run['a'].shape} of {run['a'].dtype}"
