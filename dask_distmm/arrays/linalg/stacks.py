"""Functions of `dask_distmm.linalg` are made public here, and take stacks of matrices, by a table of NumPy's functions.

The table has what NumPy's batched functions take and return. A stack is an array of more than two dimensions whose
last two are matrices; the others are broadcast as NumPy does it. One task computes all matrices of a chunk; the last
two axes become one chunk each. Matrices too large for a task, and those of a call with the options of a run, are runs,
one each.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import dask.array as da
import numpy as np
from dask.array.core import Array
from dask.utils import parse_bytes

from dask_distmm.arrays.kinds import any_kind, ndim_of, rechunked
from dask_distmm.arrays.linalg.factorize import common_type, op_of, operand
from dask_distmm.arrays.linalg.public import (
    HINTS,
    PANELS,
    Cost,
    EigResult,
    RunOptions,
    check_value,
    documented,
    hints_of,
    named,
)
from dask_distmm.arrays.product import output_meta, stacked
from dask_distmm.arrays.request import takes
from dask_distmm.config import parsed
from dask_distmm.errors import MatrixError, PlanError, check_square, not_finite
from dask_distmm.programs.factorizations import Factorization
from dask_distmm.runtime.chunks import array_kind

P = ParamSpec("P")
T = TypeVar("T")

# A core signature, and the function of a chunk of each operand.
Rule = tuple[str, Callable[..., Any]]


def _eigh(a: Array, UPLO: str = "L", lower: bool | None = None, eigvals_only: bool = False) -> Rule:
    uplo = UPLO if lower is None else "L" if lower else "U"
    if eigvals_only:
        return "(m,m)->(m)", functools.partial(np.linalg.eigvalsh, UPLO=uplo)
    return "(m,m)->(m),(m,m)", functools.partial(np.linalg.eigh, UPLO=uplo)


def _svd(a: Array, full_matrices: bool = True, compute_uv: bool = True) -> Rule:
    if not compute_uv:
        return "(m,n)->(k)", functools.partial(np.linalg.svd, compute_uv=False)
    shapes = "(m,m),(k),(n,n)" if full_matrices else "(m,k),(k),(k,n)"
    return f"(m,n)->{shapes}", functools.partial(np.linalg.svd, full_matrices=full_matrices)


def _qr(a: Array, mode: str = "reduced") -> Rule:
    shapes = {"reduced": "(m,k),(k,n)", "complete": "(m,m),(m,n)", "r": "(k,n)"}[mode]
    return f"(m,n)->{shapes}", functools.partial(np.linalg.qr, mode=mode)


def _cholesky(a: Array, upper: bool | None = None, lower: bool | None = None) -> Rule:
    up = upper if lower is None else not lower
    return "(m,m)->(m,m)", functools.partial(_triangle, upper=bool(up))


def _triangle(a: Any, upper: bool) -> Any:
    # Only one triangle is read; CuPy's function has no choice of it.
    factor = np.linalg.cholesky(a.swapaxes(-1, -2).conj() if upper else a)
    return factor.swapaxes(-1, -2).conj() if upper else factor


def _solve(a: Array, b: Array, transposed: bool = False) -> Rule:
    core = "(m,m),(m)->(m)" if b.ndim == 1 else "(m,m),(m,k)->(m,k)"
    return core, functools.partial(_solution, transposed=transposed)


def _solution(a: Any, b: Any, transposed: bool) -> Any:
    # CuPy's function does not broadcast, and takes other arrays for vectors.
    x = np.linalg.solve(*_spread(a.swapaxes(-1, -2) if transposed else a, b[..., None] if b.ndim == 1 else b))
    return x[..., 0] if b.ndim == 1 else x


def _spread(*stacks: Any) -> list[Any]:
    batch = np.broadcast_shapes(*(x.shape[:-2] for x in stacks))
    return [np.broadcast_to(x, batch + x.shape[-2:]) for x in stacks]


def _solve_triangular(
    a: Array, b: Array, trans: Any = 0, lower: bool = False, unit_diagonal: bool = False, right: bool = False
) -> Rule:
    core = "(m,m),(k,m)->(k,m)" if right else "(m,m),(m)->(m)" if b.ndim == 1 else "(m,m),(m,k)->(m,k)"
    return core, functools.partial(_substituted, op=op_of(trans), lower=lower, unit=unit_diagonal, right=right)


def _substituted(a: Any, b: Any, op: str, lower: bool, unit: bool, right: bool) -> Any:
    if op != "N":
        a, lower = a.swapaxes(-1, -2), not lower
    a = a.conj() if op == "C" else a
    if right:
        return _substituted(a, b.swapaxes(-1, -2), "T", lower, unit, False).swapaxes(-1, -2)
    if not unit and (np.diagonal(a, axis1=-2, axis2=-1) == 0).any():
        raise np.linalg.LinAlgError("an element of the diagonal is zero")
    a, columns = _spread(a, b[..., None] if b.ndim == 1 else b)
    options = {"lower": lower, "unit_diagonal": unit}
    if not columns.size:
        x = columns
    elif array_kind(a) == "cupy":
        from cupyx.scipy.linalg import solve_triangular

        x = solve_triangular(a, columns, **options)
    else:
        from scipy.linalg import solve_triangular

        x = np.empty_like(columns)
        for at in np.ndindex(x.shape[:-2]):
            x[at] = solve_triangular(a[at], columns[at], check_finite=False, **options)
    return x[..., 0] if b.ndim == 1 else x


def _lu(a: Array, permute_l: bool = False, p_indices: bool = False) -> Rule:
    call = functools.partial(_permuted_factors, permute_l=permute_l, p_indices=p_indices)
    shapes = "(m,r),(r,n)" if permute_l else f"({'m' if p_indices else 'm,m'}),(m,r),(r,n)"
    return f"(m,n)->{shapes}", functools.partial(on_host, function=call)


def _permuted_factors(a: Any, **options: Any) -> Any:
    first, *rest = by_scipy("lu", a, check_finite=False, **options)
    return first.astype(np.int64) if first.dtype.kind == "i" else first, *rest


def _factors(a: Any) -> Any:
    from scipy.linalg import get_lapack_funcs

    getrf: Any = get_lapack_funcs("getrf", (a,))
    lu, piv = np.empty_like(a), np.empty((*a.shape[:-2], min(a.shape[-2:])), np.int32)
    for at in np.ndindex(a.shape[:-2] if a.size else (0,)):
        lu[at], piv[at], _ = getrf(a[at])
    return lu, piv


def _pinv(a: Array, rcond: float | None = None, hermitian: bool = False, rtol: float | None = None) -> Rule:
    limit = _limit(a, rcond if rtol is None else rtol)
    # CuPy's function has no `hermitian`.
    options: dict[str, Any] = {"rcond": limit} | ({"hermitian": True} if hermitian else {})
    return "(m,n)->(n,m)", functools.partial(np.linalg.pinv, **options)


def _lstsq(a: Array, b: Array, rcond: float | None = None) -> Rule:
    call, residuals = functools.partial(_least_squares, limit=_limit(a, rcond)), a.shape[-2] > a.shape[-1]
    if b.ndim == 1:
        return f"(m,n),(m)->(n),({'one' if residuals else 'none'}),(),(r)", call
    return f"(m,n),(m,k)->(n,k),({'k' if residuals else 'none'}),(),(r)", call


def _least_squares(a: Any, b: Any, limit: float) -> tuple[Any, ...]:
    columns = b[..., None] if b.ndim == 1 else b
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    kept = s > limit * s[..., :1]
    inverse = np.where(kept, 1 / np.where(kept, s, s.dtype.type(1)), s.dtype.type(0))
    x = vh.swapaxes(-1, -2).conj() @ (inverse[..., None] * (u.swapaxes(-1, -2).conj() @ columns))
    residuals = (abs(columns - a @ x) ** 2).sum(axis=-2)
    if a.shape[-2] <= a.shape[-1]:
        residuals = residuals[..., :0]
    rank, s = np.broadcast_to(kept.sum(axis=-1), x.shape[:-2]), np.broadcast_to(s, x.shape[:-2] + s.shape[-1:])
    return x[..., 0] if b.ndim == 1 else x, residuals, rank, s


def _limit(a: Array, rcond: float | None) -> float:
    epsilon = float(np.finfo(common_type({"a": a})).eps)
    return max(a.shape[-2:]) * epsilon if rcond is None else epsilon if rcond < 0 else rcond


def _eig(a: Array, right: bool = True) -> Rule:
    return "(m,m)->(m),(m,m)" if right else "(m,m)->(m)", functools.partial(_eigenpairs, vectors=right)


def _eigenpairs(a: Any, vectors: bool) -> Any:
    function: Callable[[Any], Any] = np.linalg.eig if vectors else np.linalg.eigvals
    if array_kind(a) == "cupy":
        from cupyx.cusolver import check_availability

        if not check_availability("geev"):
            return on_host(a, functools.partial(_eigenpairs, vectors=vectors))
    # Complex, also if all are real.
    pairs, dtype = function(a), np.result_type(a.dtype, np.complex64)
    return EigResult(*(x.astype(dtype, copy=False) for x in pairs)) if vectors else pairs.astype(dtype, copy=False)


def by_scipy(name: str, *args: Any, **options: Any) -> Any:
    """Call a function of scipy.linalg, which takes long to import, where the chunk is."""
    import scipy.linalg

    return getattr(scipy.linalg, name)(*args, **options)


def refuse_not_finite(chunks: Mapping[str, Any]) -> None:
    """Raise for a chunk with elements that are not finite."""
    for name, chunk in chunks.items():
        if not np.isfinite(chunk).all():
            raise MatrixError(not_finite(name))


def on_host(a: Any, function: Callable[[Any], Any]) -> Any:
    """Return what a function of NumPy's arrays makes of a chunk, where the chunk is."""
    if array_kind(a) != "cupy":
        return function(a)
    result = function(a.get())
    return tuple(np.asarray(x, like=a) for x in result) if isinstance(result, tuple) else np.asarray(result, like=a)


def _each(kind: str, dtype: np.dtype | None = None, results: int = 1) -> Rule:
    """Return the rule of a decomposition that one worker makes: of one matrix after the other."""
    call = functools.partial(on_host, function=functools.partial(_decomposed, kind=kind, dtype=dtype))
    return f"(m,m)->{','.join(['(m,m)'] * results)}", call


def _decomposed(a: Any, kind: str, dtype: np.dtype | None) -> Any:
    from dask_distmm.engines.numpy.lapack import LapackKernels
    from dask_distmm.engines.programs.spectral import decompose

    dtype = dtype or a.dtype
    task = Factorization(kind, a.shape[-2:], dtype.name)
    results = [np.empty(a.shape[:-2] + output.shape, output.dtype) for output in task.outputs]
    for at in np.ndindex(a.shape[:-2]):
        computed = decompose(LapackKernels(), task, np.array(a[at], dtype, order="F"))
        for output, x in zip(task.outputs, results, strict=True):
            x[at] = computed[output.name]
    return tuple(results) if len(results) > 1 else results[0]


def _schur(a: Array, output: str = "real") -> Rule:
    dtype = common_type({"a": a})
    return _each("schur", np.result_type(dtype, np.complex64) if output[0] == "c" else dtype, 2)


# By name. A rule is called with the operands and the options of a call; options that it lacks a stack does not have.
RULES: Mapping[str, Callable[..., Rule]] = {
    "cholesky": _cholesky,
    "det": lambda a: ("(m,m)->()", np.linalg.det),
    "eig": _eig,
    "eigh": _eigh,
    "eigvals": lambda a: _eig(a, False),
    "eigvalsh": lambda a, UPLO="L", lower=None: _eigh(a, UPLO, lower, True),
    "expm": lambda A: ("(m,m)->(m,m)", functools.partial(on_host, function=functools.partial(by_scipy, "expm"))),
    "inv": lambda a: ("(m,m)->(m,m)", np.linalg.inv),
    "logm": lambda A: _each("logm"),
    "lstsq": _lstsq,
    "lu": _lu,
    "lu_factor": lambda a: ("(m,n)->(m,n),(r)", functools.partial(on_host, function=_factors)),
    "pinv": _pinv,
    "qr": _qr,
    "schur": _schur,
    "slogdet": lambda a: ("(m,m)->(),()", np.linalg.slogdet),
    "solve": _solve,
    "solve_triangular": _solve_triangular,
    "sqrtm": lambda A: _each("sqrtm"),
    "svd": _svd,
}


def public(options: type | None, cost: Cost = PANELS) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function public: see the module `public`. Options that have their defaults are not handed on.

    `options` is None for functions that Dask's own tasks compute. A function of the table takes stacks, too.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        if function.__doc__:  # not under python -OO
            function.__doc__ = documented(function.__doc__, options, cost)
        cast(Any, function).cost = cost
        allowed = typing.get_type_hints(function) | hints_of(options)
        # A program can register more engines than type checkers know.
        allowed["engine"] = str | None
        adapted, signature = any_kind(_of_stacks(function)), inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> T:
            try:
                values = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return function(*args, **kwargs)  # raises Python's own error, which names the function
            options_given = values.pop("how", {})
            for name, value in {**values, **options_given}.items():
                check_value(name, value, allowed[name])
            return adapted(*args, **{name: x for name, x in kwargs.items() if x is not defaults.get(name, checked)})

        shown = takes(options, HINTS)(cast(Callable[P, T], checked))
        listed = inspect.signature(shown).parameters
        defaults = {name: listed[name].default for name in hints_of(options)}
        return named(function.__name__)(shown)

    return decorate


def _of_stacks(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function of matrices that takes stacks of them too, if it is in the table."""
    if (rule := RULES.get(function.__name__)) is None:
        return function
    signature, accepted = inspect.signature(function), inspect.signature(rule).parameters
    names = [name for name in ("a", "A", "b") if name in accepted]

    @functools.wraps(function)
    def taken(*args: P.args, **kwargs: P.kwargs) -> T:
        values = signature.bind(*args, **kwargs).arguments
        if max(ndim_of(values[name]) for name in names) <= 2:
            return function(*args, **kwargs)
        how = values.pop("how", {})
        arrays = {name: operand(name, values.pop(name)) for name in names}
        stated = {name: x for name, x in values.items() if x is not signature.parameters[name].default}
        if lacking := stated.keys() - accepted.keys():
            raise PlanError(f"a stack of matrices has no {min(lacking)}=: leave it out, or loop over the matrices")
        if how.keys() & {"factor_dtype", *RunOptions.__annotations__} or _large(arrays):
            return cast(T, _by_runs(function, arrays, stated | how))
        core, call = rule(*arrays.values(), **stated)
        return cast(T, by_tasks(core, call, arrays, finite=how.get("check_finite", True)))

    return taken


def by_one_task(name: str, *operands: Any) -> Any:
    """Return what a function of the table returns of matrices, each of which one task can hold, without its options."""
    with named(name):
        arrays = {letter: operand(letter, x) for letter, x in zip("ab", operands, strict=False)}
        return by_tasks(*RULES[name](*arrays.values()), arrays)


def _large(arrays: Mapping[str, Array]) -> bool:
    """Whether one matrix is more than a task may hold."""
    limit = parsed("batch.task-bytes", parse_bytes)
    return any(x.itemsize * np.prod(x.shape[-2:]) > limit for x in arrays.values())


def _by_runs(function: Callable[..., Any], arrays: Mapping[str, Array], options: Mapping[str, Any]) -> Any:
    """Return what a function returns of each matrix, a run each, as stacks."""
    batch = _batch_of(arrays)
    cores = {name: x.shape[-2:] if x.ndim > 1 else x.shape for name, x in arrays.items()}
    spread = {name: da.broadcast_to(x, batch + cores[name]) for name, x in arrays.items()}
    results = [function(**{name: x[at] for name, x in spread.items()}, **options) for at in np.ndindex(batch)]
    if not results:
        raise PlanError(f"the stack is empty, {batch}: leave out the options of a run")
    if not isinstance(results[0], tuple):
        return stacked(results, batch)
    parts = [stacked(list(map(da.asarray, each)), batch) for each in zip(*results, strict=True)]
    return type(results[0])(*parts) if hasattr(results[0], "_fields") else tuple(parts)


def _batch_of(arrays: Mapping[str, Array]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*(x.shape[:-2] for x in arrays.values()))
    except ValueError:
        stacks = " and ".join(f"{name} is a stack of {x.shape[:-2]}" for name, x in arrays.items())
        raise PlanError(f"{stacks}: their lengths must be the same, or 1") from None


def by_tasks(
    core: str, call: Callable[..., Any], arrays: Mapping[str, Array], *, finite: bool = False, exact: bool = False
) -> Any:
    """Return what a function of chunks returns, by a task for each chunk of batch axes.

    `core` is its signature; `exact`: it takes all types as they are.
    """
    inputs = re.findall(r"\(([\w,]*)\)", core.partition("->")[0])
    dtype = np.result_type(*(x.dtype for x in arrays.values())) if exact else common_type(arrays)
    operands = [x.astype(dtype) for x in arrays.values()]
    sizes = _core_sizes(inputs, arrays)
    if not any(np.isnan(x.shape).any() for x in operands):
        _batch_of(arrays)
    elif len(operands) > 1:
        unknown = next(name for name, x in arrays.items() if np.isnan(x.shape).any())
        raise PlanError(f"{unknown} has unknown chunk sizes {arrays[unknown].chunks}; call its compute_chunk_sizes()")
    sizes |= {"r": min(sizes["m"], sizes.get("n", sizes["m"])), "one": 1, "none": 0}
    sizes.setdefault("k", sizes["r"])
    # Types and the kind of the result are those of small matrices.
    sample = call(*((np.eye if "," in letters else np.ones)(3, dtype=dtype) for letters in inputs))
    meta, several = operands[0]._meta, isinstance(sample, tuple)
    metas = [output_meta(meta, x.dtype) for x in (sample if several else [sample])]
    result = da.apply_gufunc(
        _of_chunks,
        core,
        *(_whole(x, letters.count(",") + 1) for x, letters in zip(operands, inputs, strict=True)),
        meta=tuple(metas) if several else metas[0],
        output_sizes={name: size for name, size in sizes.items() if name not in "".join(inputs)},
        allow_rechunk=all(x.size for x in operands),
        call=call,
        names=tuple(arrays) if finite else (),
    )
    return type(sample)(*result) if hasattr(sample, "_fields") else result


def _whole(x: Array, axes: int) -> Array:
    """Return a stack whose matrices are in one chunk each; if they were in several, a chunk has fewer of them."""
    first = x.ndim - axes
    if not x.size:
        return rechunked(x, -1)
    if set(x.numblocks[first:]) == {1}:
        return x
    batch = {} if np.isnan(x.shape).any() else dict.fromkeys(range(first), "auto")
    limit = x.itemsize * math.prod(map(max, x.chunks))
    return rechunked(x, batch | dict.fromkeys(range(first, x.ndim), -1), block_size_limit=limit if batch else None)


def _core_sizes(inputs: list[str], arrays: Mapping[str, Array]) -> dict[str, int]:
    """Return the lengths of the axes of matrices by their letters; those that do not fit are errors."""
    sizes: dict[str, int] = {}
    for letters, (name, x) in zip((text.split(",") for text in inputs), arrays.items(), strict=True):
        if x.ndim < len(letters):
            raise PlanError(f"{name} must be at least {len(letters)}-D, got {x.ndim}-D")
        shape, axis = x.shape[-len(letters) :], letters.index("m")
        if np.isnan(shape).any():
            raise PlanError(f"{name} has unknown chunk sizes {x.chunks}; call its compute_chunk_sizes() first")
        if letters == ["m", "m"]:
            check_square(name, shape)
        if sizes and shape[axis] != sizes["m"]:
            first, m, what = next(iter(arrays)), sizes["m"], ("rows", "columns")[axis]
            text = f"{first} is {m} x {sizes.get('n', m)}, so {name} must have {m} {what}; it has {shape[axis]}"
            raise PlanError(text)
        sizes |= dict(zip(letters, shape, strict=True))
    return sizes


def _of_chunks(*chunks: Any, call: Callable[..., Any], names: tuple[str, ...]) -> Any:
    """Call a function of NumPy or CuPy; errors are typed."""
    refuse_not_finite(dict(zip(names, chunks, strict=False)))
    try:
        if array_kind(chunks[0]) != "cupy":
            result = call(*chunks)
        else:
            import cupyx

            with cupyx.errstate(linalg="raise"):
                result = call(*chunks)
    except np.linalg.LinAlgError as error:
        remedy = "; pinv and lstsq take such matrices" if "ingular" in str(error) else ""
        raise MatrixError(f"a matrix of the stack: {error}{remedy}") from None
    return tuple(result) if isinstance(result, tuple) else result
