"""One run as Dask arrays: operands are checked, the graph is made, outputs become arrays."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from dask._task_spec import DependenciesMapping, Task
from dask.array.core import Array, blockwise, concatenate
from dask.array.linalg import tsqr
from dask.base import is_dask_collection, tokenize
from dask.core import toposort
from dask.highlevelgraph import MaterializedLayer
from dask.utils import format_bytes
from distributed.system import MEMORY_LIMIT

from dask_distmm.arrays.kinds import as_array, check_operand, rechunked
from dask_distmm.arrays.linalg.public import FactorOptions, ProductOptions, RunOptions, SolveOptions
from dask_distmm.arrays.product import multiply, run_output
from dask_distmm.arrays.request import check_names, check_workers, is_lazy, parse, without_axes
from dask_distmm.config import read_options, wave_budget
from dask_distmm.engines.sources import ChunkTasks
from dask_distmm.errors import DistMMError, PlanError, ProjectedMemoryError, advice, page
from dask_distmm.graph import TasksLayer, build_factor_graph, tasks_of_chunks
from dask_distmm.numeric.sparse import beside, compressed, dense, share_of, sparse_package
from dask_distmm.planning import ENGINES
from dask_distmm.planning.computation import Chunks, Computation, NamedMatrix, Worker
from dask_distmm.planning.factor import FactorProblem, reduced_mode
from dask_distmm.planning.many import ChainPlan
from dask_distmm.planning.placement import Placement, spills
from dask_distmm.planning.planner import plan_computation, problem_from_wire
from dask_distmm.planning.program import ProgramProblem
from dask_distmm.programs.composite import BUILDERS
from dask_distmm.programs.factorizations import Factorization
from dask_distmm.runtime.chunks import array_kind, on_device
from dask_distmm.runtime.client import ask_regions, ask_roster, current_client, imagined_snapshot, recent_snapshot
from dask_distmm.runtime.keys import barrier_name

Q = TypeVar("Q", FactorProblem, ProgramProblem)
# A matrix is tall if it has this many times as many rows as columns, and so has each chunk of rows, on average.
_ALL, _EACH = 4, 2
# A tall matrix that is smaller than this share of the workers' memory fits without a closer look.
_SMALL = 1 / 8
# By the characters of types; E is bfloat16.
_TYPES = {"e": np.float32, "E": np.float32, "f": np.float32, "d": np.float64, "F": np.complex64, "D": np.complex128}


def operand(name: str, x: Any, *, sparse: bool = False) -> Array:
    """Return an operand as an array of numbers; its chunks may be sparse only if that is said."""
    check_operand(name, x)
    if hasattr(x, "to_numpy") and not is_dask_collection(x):
        x = x.to_numpy()  # of pandas and the like
    try:
        array = as_array(x)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{name} is a {type(x).__name__} of which no array can be made: {error}") from error
    if array.dtype.kind not in "biufcV" or array.dtype.type is np.void:
        message = f"{name} is {array.dtype}; expected float32, float64, complex64 or complex128"
        fields = array.dtype.names
        raise PlanError(f"{message}: {f'pass one field, {name}[{fields[0]!r}]' if fields else 'convert it by astype'}")
    if sparse_package(array._meta):
        if not sparse:
            raise PlanError(
                f"the chunks of {name} are sparse ({type(array._meta).__name__}); expected dense ones: convert them by "
                f"{name}.map_blocks(lambda x: x.toarray()), todense() of the package sparse; or use what takes sparse "
                f"rows: {page('linear-algebra')}#sparse-rows"
            )
    elif (kind := array_kind(array._meta)) not in ("numpy", "cupy"):
        raise PlanError(
            f"the chunks of {name} are {kind}; expected numpy.ndarray or cupy.ndarray: convert by map_blocks"
        )
    return array


def filled(array: Array) -> Array:
    """Return an array without chunks of size 0 beside others, which Dask's ``max`` has no result for."""
    chunks = tuple(tuple(size for size in sizes if size) or (0,) for sizes in array.chunks)
    return array if chunks == array.chunks else rechunked(array, chunks)


def matrix(
    name: str,
    x: Any,
    *,
    vector: bool = False,
    unknown_rows: bool = False,
    stack: bool = False,
    sparse: bool | Literal["wide"] = False,
) -> Array:
    """Return an operand as a matrix of known chunks; with `unknown_rows` only those of columns are.

    With `sparse` its chunks may be, if it has not more columns than rows, or is allowed to.
    """
    array = operand(name, x, sparse=bool(sparse))
    if stack and array.ndim > 2:
        return array
    if array.ndim == 1 and vector:
        array = array[:, None]
    if array.ndim != 2:
        expected = "1-D or 2-D" if vector else "2-D"
        remedy = ": loop over the matrices of a stack" if array.ndim > 2 else ""
        if array.ndim == 1:
            remedy = f": pass {name}[:, None] for a column, {name}[None, :] for a row"
        raise PlanError(f"{name} must be {expected}, got {array.ndim}-D{remedy}")
    if any(np.isnan(size) for size in itertools.chain(*array.chunks[unknown_rows:])):
        raise PlanError(f"{name} has unknown chunk sizes {array.chunks}; call its compute_chunk_sizes() first")
    narrow = sparse == "wide" or array.shape[0] >= array.shape[1] > 0
    if sparse_package(array._meta) and not narrow:
        raise PlanError(
            f"{name} is sparse and {array.shape[0]} x {array.shape[1]}; expected columns, and not more of them than "
            "rows: transpose it, or make its chunks dense by map_blocks"
        )
    return array


def right_sides(a: Array, b: Any, *, unknown_rows: bool = False, stack: bool = False) -> Array:
    """Return right-hand sides as a matrix of as many rows as A; where that is not known, of as many chunks."""
    columns = matrix("b", b, vector=True, unknown_rows=unknown_rows, stack=stack)
    (m, n), rows = a.shape[-2:], columns.shape[-2]
    count, expected = columns.numblocks[-2], a.numblocks[-2]
    if np.isnan([rows, m]).any():
        if count != expected:
            raise PlanError(
                f"a has rows of unknown number in {expected} chunks, so b must have as many chunks; it has {count}: "
                "call compute_chunk_sizes() of both first"
            )
    elif rows != m:
        raise PlanError(f"a is {m} x {n}, so b must have {m} rows; it has {rows}")
    return columns


# The axes of an output by their letters: m and n are those of A, r the shorter of these, a point is none; those of
# capitals are in one chunk. "mr" is a matrix, ".N" a row, "n." a column.
Axes = Mapping[str, tuple[int, ...]]


def _axes_of(a: Array, more: Axes | None) -> Axes:
    m, n = a.shape
    rows, cols = a.chunks
    return {"m": rows, "n": cols, "r": cols if n <= m else rows, ".": (), **(more or {})}


def _chunks_of(letters: str, axes: Axes) -> Chunks:
    rows, cols = (axes[x] if x in axes else (sum(axes[x.lower()]),) for x in letters)
    return rows, cols


def _output(name: str, chunks: Chunks, dtype: str) -> NamedMatrix:
    axes, (rows, cols) = tuple(axis for axis in (0, 1) if chunks[axis]), _known(chunks)
    return NamedMatrix(name, (rows or (1,), cols or (1,)), dtype, axes)


def computed(name: str, x: Any, *, sparse: bool = False) -> Array:
    """Return an operand as a matrix of the type in which it is computed, for products and Dask's functions."""
    array = matrix(name, x, sparse=sparse)
    return array.astype(common_type({name: array}))


def common_type(arrays: Mapping[str, Array]) -> np.dtype:
    """Return the type in which all is computed: float64 for integers, float32 for types of two bytes."""
    kind = np.result_type(*(array.dtype for array in arrays.values()))
    if kind.kind in "biu":
        return np.dtype(np.float64)
    if kind.char not in _TYPES:
        names = ", ".join(f"{name} is {array.dtype}" for name, array in arrays.items())
        raise PlanError(f"{names}; expected float32, float64, complex64 or complex128: convert by astype")
    return np.dtype(_TYPES[kind.char])


def unchecked(how: RunOptions | SolveOptions) -> SolveOptions:
    """Return the options for matrices that were made here of others."""
    return SolveOptions(**{**how, "check_finite": False})


def factorize(
    kind: str,
    operands: Mapping[str, Array],
    wanted: Mapping[str, str],
    *,
    how: RunOptions | SolveOptions | FactorOptions,
    axes: Axes | None = None,
    dtype: np.dtype | None = None,
    **options: Any,
) -> tuple[Array, ...]:
    """Return outputs of a factorization, all of them of one run; `wanted` has the letters of their axes."""
    for name, x in operands.items():
        operand(name, x)
    dtype = dtype or common_type(operands)
    shapes, finite = {name: x.shape for name, x in operands.items()}, bool(how.get("check_finite", True))
    options |= _types_of_factors(dtype, list(shapes.values()), how)
    if options.get("factor_dtype") and kind in ("cholesky", "lu"):
        dtype = few_bits(dtype)
        options["factor_dtype"] = options["factor_dtype"].replace("float32", "")
    task = Factorization(kind, shapes["a"], dtype.name, shapes.get("b"), check_finite=finite, **options)
    types, lengths = {output.name: output.dtype for output in task.outputs}, _axes_of(operands["a"], axes)
    outputs = tuple(_output(name, _chunks_of(letters, lengths), types[name]) for name, letters in wanted.items())
    method = how.get("method") or "auto"
    if method == "rows":
        raise PlanError("method='rows' is for qr, lstsq, and svd without full_matrices: pass 'columns' or 'local'")
    facts = {"task": task, "method": method}
    problem, arrays = lazy_problem(FactorProblem, kind, operands, how, outputs, [task], [method], **facts)
    if (advised := reduced_mode(task)) and current_client() is None:
        _check_results(problem, advised)
    return program_arrays(problem, arrays, {})


def few_bits(dtype: np.dtype) -> np.dtype:
    """Return the type of factors of few bits."""
    return np.dtype(np.complex64 if dtype.kind == "c" else np.float32)


def _types_of_factors(dtype: np.dtype, shapes: Sequence[tuple[int, ...]], how: Any) -> dict[str, str]:
    """Return the option of factors of few bits; of empty matrices there are none."""
    name = how.get("factor_dtype")
    if name is None or not all(map(all, shapes)):
        return {}
    if name == "float32" and dtype == few_bits(dtype):
        raise PlanError(f"factor_dtype='float32' has as many bits as a has, {dtype}: leave it out")
    engine = how.get("engine")
    if engine in (None, "auto") and current_client() is None:
        engine = "numpy"
    offered = ENGINES[engine].factor_dtypes if engine in ENGINES else (name,)
    if name not in offered:
        has = f"has {' and '.join(map(repr, offered))}" if offered else "has none"
        raise PlanError(f"factor_dtype={name!r} is for GPUs of one host, engine {engine!r} {has}: leave it out")
    return {"factor_dtype": name}


def _check_results(problem: FactorProblem, advised: Sequence[str]) -> None:
    """Refuse full matrices of a factorization that this process can't hold."""
    size, task = sum(int(x.bytes.sum()) for x in problem.wanted), problem.task
    if size > MEMORY_LIMIT:
        advised = [*advised, "compute it with a distributed.Client of workers that have more memory"]
        raise ProjectedMemoryError(
            f"the results of {task.kind} of a matrix of {' x '.join(map(str, task.a_shape))} ({task.dtype}) take "
            f"{format_bytes(size)}; this process may hold {format_bytes(MEMORY_LIMIT)}. {advice(advised)}",
            {"": size},
            {"": int(MEMORY_LIMIT)},
        )


def by_program(
    builder: str,
    operands: Mapping[str, Array],
    wanted: Mapping[str, str],
    *,
    how: RunOptions | FactorOptions | ProductOptions,
    axes: Axes | None = None,
    dtype: Any = None,
    **options: Any,
) -> tuple[Array, ...]:
    """Return outputs of a program as lazy arrays, all of them of one run.

    `wanted` has the letters of their axes, and their types behind those: that of the computation by default, "real" the
    real one. A is brought into chunks of rows, and the other operands into the same. Where the workers can't hold the
    operands ranks make the chunks of those that are lazy, for each pass; `ProjectedMemoryError` if that can't be, or is
    too much.
    """
    dtype, lengths = dtype or common_type(operands), _axes_of(operands["a"], axes)
    named = {"": dtype.name, "real": np.empty(0, dtype).real.dtype.name}
    a = rows_of(operands["a"])
    # In the run only the rows of A are in chunks.
    inside = {**{x: sizes and (sum(sizes),) for x, sizes in lengths.items() if x != "m"}, "m": a.chunks[0]}
    specified = [(name, *text.partition(" ")[::2]) for name, text in wanted.items()]
    outputs = tuple(_output(name, _chunks_of(x, inside), named.get(kind, kind)) for name, x, kind in specified)
    options["finite"] = bool(how.get("check_finite", True))
    facts = {"builder": builder, "options_of_builder": options, "dtype": dtype.name}
    cut = {name: a if name == "a" else cut_as(a, x) for name, x in operands.items()}
    problem, arrays = lazy_problem(ProgramProblem, builder, cut, how, outputs, facts.values(), **facts)
    try:
        problem, tasks = made_of(problem, arrays)
    except ProjectedMemoryError:
        by_rows = any("m" in x for _, x, _ in specified)
        centred = BUILDERS[builder].centred or options.get("centred")
        if any(x.sparse for x in problem.matrices) or centred or len(arrays[0].chunks[0]) == 1 or by_rows:
            raise
        # R of A and B beside each other has the same R, solutions, residuals and singular values.
        small = dict(zip(operands, reduced(*arrays)[1:], strict=True))
        return by_program(builder, small, wanted, how=how, axes={"n": lengths["n"], **(axes or {})}, **options)
    results = zip(program_arrays(problem, arrays, tasks), (x.replace(".", "") for _, x, _ in specified), strict=True)
    return tuple(
        rechunked(x, {i: lengths.get(y, -1) for i, y in enumerate(letters) if y != "m"}) for x, letters in results
    )


def made_of(problem: ProgramProblem, arrays: Sequence[Array]) -> tuple[ProgramProblem, dict[str, ChunkTasks]]:
    """Return a problem of which ranks make the operands that do not fit into memory, and the tasks of these."""
    failure: ProjectedMemoryError | None = None
    tasks: dict[str, ChunkTasks] = {}
    try:
        try:
            if _fits(problem, arrays):
                return problem, tasks
        except ProjectedMemoryError as error:
            failure = error
        lazy = {name: x for name, x in zip(problem.operands, arrays, strict=True) if is_lazy(x)}
        chains = {name: tasks_of_chunks(x) for name, x in lazy.items() if not sparse_package(x._meta)}
        if tasks := {name: chain for name, chain in chains.items() if chain is not None}:
            problem = problem.made_by_ranks(tasks)
            _fits(problem, arrays)
        elif failure is not None:
            raise failure
    except ProjectedMemoryError:
        raise
    except DistMMError:
        pass  # It is said when the result is computed, if it is still so.
    return problem, tasks


def _fits(problem: ProgramProblem, arrays: Sequence[Array]) -> bool:
    """Whether the workers can hold a program's matrices, and Dask would spill none of those that are still to be made.

    True where that is not known; `ProjectedMemoryError` if they can't.
    """
    sizes = [array.nbytes * (share_of(array.shape[1]) if sparse_package(array._meta) else 1) for array in arrays]
    client, size = current_client(), sum(sizes)
    snapshot = None if client is None or np.isnan(size) else recent_snapshot(client, problem)
    if snapshot is None or size <= _SMALL * sum(worker.memory_limit for worker in snapshot.workers):
        return True
    there = {name: x for name, x in zip(problem.operands, arrays, strict=True) if not is_lazy(x)}
    # The workers' memory and chunks at this moment, not those of the last heartbeat.
    snapshot = (client and ask_roster(client, problem.demand, list(there.values()))) or snapshot
    placed = zip(there, snapshot.placed, strict=False)
    where = {name: np.frombuffer(raw, np.int32) for name, raw in placed if raw is not None}
    plan = plan_computation(problem, snapshot.workers, where, engine=snapshot.engines, sources=snapshot.sources)
    budget = wave_budget() if len(there) < len(arrays) else None
    return budget is None or not spills(plan, budget)


def left_beyond_memory(a: Array) -> contextlib.AbstractContextManager[None]:
    """Let what does not fit into memory go on behind a with block; of sparse rows it is an error."""
    return contextlib.nullcontext() if sparse_package(a._meta) else contextlib.suppress(ProjectedMemoryError)


def reduced(a: Array, *beside: Array) -> tuple[Array, ...]:
    """Return Q and, column by column, R of tall matrices beside each other, by Dask's tasks: chunks come and go."""
    dtype = common_type({str(number): x for number, x in enumerate((a, *beside))})
    columns = np.cumsum([x.shape[1] for x in (a, *beside)])
    q, r = tsqr(rechunked(concatenate([rows_of(x).astype(dtype) for x in (a, *beside)], axis=1), {1: -1}))
    return q, *(r[:, start:stop] for start, stop in itertools.pairwise((0, *columns)))


def rows_of(a: Array) -> Array:
    """Return a matrix in chunks of rows."""
    if len(a.chunks[1]) == 1 or not sparse_package(a._meta):
        return a if len(a.chunks[1]) == 1 else rechunked(a, {1: -1})
    meta = compressed(a._meta)
    new = {"n": a.shape[1]}
    return blockwise(_beside, "mn", a, "mk", new_axes=new, concatenate=False, dtype=a.dtype, meta=meta)


def cut_as(a: Array, x: Array) -> Array:
    """Return an operand in the chunks of rows of A; as many of them where their rows are not known."""
    return rows_of(x) if np.isnan([a.shape[0], x.shape[0]]).any() else in_rows(x, a.chunks[0])


def in_rows(x: Array, rows: tuple[int, ...]) -> Array:
    """Return a matrix in certain chunks of rows."""
    if not sparse_package(x._meta):
        return rechunked(x, (rows, -1))
    x = rows_of(x)
    if x.chunks[0] == rows:
        return x
    # By tasks Dask cuts compressed rows, and puts them together.
    return x.map_blocks(compressed, dtype=x.dtype, meta=compressed(x._meta)).rechunk((rows, -1), method="tasks")


def _beside(blocks: Sequence[Any]) -> Any:
    return beside(list(map(compressed, blocks)))


def goes_by_rows(a: Array, how: RunOptions | FactorOptions) -> bool:
    """Whether a matrix is worked on in chunks of rows: if asked for, or if it is tall."""
    (m, n), method = a.shape, how.get("method") or "auto"
    engine = ENGINES.get(how.get("engine") or "")
    able = engine is None or ProgramProblem.kind in engine.computes
    if sparse_package(a._meta):
        if method not in ("auto", "rows") or not able:
            option = f"method={method!r}" if able else f"engine={how.get('engine')!r}"
            raise PlanError(f"{option} is not for sparse rows: leave it out")
        return True
    if method not in ("auto", "rows") or (method == "auto" and not able):
        return False
    if method == "rows" and not 0 < n <= m and not np.isnan(m):
        raise PlanError(f"method='rows' of {m} rows and {n} columns: expected columns, and not more of them than rows")
    return bool(n and (method == "rows" or np.isnan(m) or m >= n * max(_ALL, _EACH * len(a.chunks[0]))))


def _known(chunks: Chunks) -> Chunks:
    """Return chunk sizes with -1 in place of those that are not known."""
    rows, cols = (tuple(-1 if np.isnan(size) else int(size) for size in sizes) for sizes in chunks)
    return rows, cols


def lazy_problem(
    kind: type[Q],
    title: str,
    operands: Mapping[str, Array],
    how: RunOptions | FactorOptions | ProductOptions,
    outputs: tuple[NamedMatrix, ...],
    facts: Iterable[Any],
    last_facts: Iterable[Any] = (),
    **fields: Any,
) -> tuple[Q, list[Array]]:
    """Return a computation, and its operands in the machine's order of bytes, which a type's name does not tell.

    Its name follows from these, and from facts before and behind those of all kinds of computations.
    """
    arrays = {name: x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("=")) for name, x in operands.items()}
    _, engine = check_names(None, how.get("engine"), kind=kind.kind)
    request: dict[str, Any] = {
        "matrices": tuple(
            NamedMatrix(name, _known(x.chunks), x.dtype.name, without_axes(x)[1], sparse=bool(sparse_package(x._meta)))
            for name, x in arrays.items()
        ),
        "wanted": outputs,
        "options": read_options(),
        "engine": engine,
        "workers": check_workers(how.get("workers")),
        "array": "cupy" if any(on_device(x._meta) for x in arrays.values()) else "numpy",
        "overwrite_a": bool(how.get("overwrite_a")),
    }
    token = tokenize(repr(([x.name for x in arrays.values()], *facts, request, *last_facts)))
    return kind(name=f"{title}-{token}", **fields, **request), list(arrays.values())


def program_arrays(
    problem: FactorProblem | ProgramProblem, arrays: Sequence[Array], tasks: Mapping[str, ChunkTasks]
) -> tuple[Array, ...]:
    """Return the outputs of a run as lazy arrays; `made` has the tasks of operands whose chunks ranks make."""
    graph = build_factor_graph(problem, [without_axes(x)[0] for x in arrays], tasks)
    prototype = next(dense(x._meta) for x in arrays if on_device(x._meta) == (problem.array == "cupy"))
    return tuple(run_output(problem, output, graph, prototype) for output in problem.outputs)


def adjoint(a: Array) -> Array:
    """Return the conjugate transpose; of a real matrix without the copy that Dask's ``conj`` makes."""
    transposed: Array = (a.conj() if a.dtype.kind == "c" else a).T
    return transposed


def plus_identity(x: Array) -> Array:
    """Return matrices with 1 added to each element of their diagonals."""
    return x.map_blocks(_plus_ones, dtype=x.dtype, meta=x._meta)


def _plus_ones(block: Any, block_info: Any = None) -> Any:
    row, column = (start for start, _ in block_info[0]["array-location"][-2:])
    return plus_ones(block, row - column)


def plus_ones(block: Any, offset: int) -> Any:
    """Return a chunk with 1 added to the elements ``[..., i, i + offset]``.

    CuPy's `eye` does not take all that NumPy's passes to it, so the ones are made by a comparison.
    """
    rows, cols = (np.arange(size, like=block) for size in block.shape[-2:])
    return block + (rows[:, None] + offset == cols)


def op_of(trans: Literal["N", "T", "C"] | int) -> Literal["N", "T", "C"]:
    """Return SciPy's `trans` by its letter."""
    ops: dict[Any, Literal["N", "T", "C"]] = {0: "N", 1: "T", 2: "C", "T": "T", "C": "C"}
    return ops.get(trans, "N")


def mirrored(a: Array, *, lower: bool, hermitian: bool) -> Array:
    """Return a matrix with one triangle mirrored over the other one."""
    a = rechunked(a, {1: a.chunks[0]})
    return a.map_blocks(_mirror, a.T, lower, hermitian, dtype=a.dtype, meta=a._meta)


def _mirror(block: Any, mirror: Any, lower: bool, hermitian: bool, block_id: tuple[int, int]) -> Any:
    i, j = block_id
    if i == j:
        strict, diagonal = np.tril(block, -1) if lower else np.triu(block, 1), np.diagonal(block)
        mirrored = strict + (strict.conj() if hermitian else strict).T
        return mirrored + np.diag(diagonal.real if hermitian else diagonal).astype(block.dtype)
    if (i > j) == lower:
        return block
    return mirror.conj() if hermitian else mirror


def times(a: Array, b: Array, how: RunOptions) -> Array:
    """Return ``a @ b`` as a collective run on the workers of `how`; without a cluster as Dask's own tasks.

    An engine that is for factorizations alone is left out.
    """
    named: Any = {name: value for name, value in how.items() if name not in ("method", "overwrite_a", "check_finite")}
    engine = ENGINES.get(named.get("engine") or "")
    if engine is not None and "product" not in engine.computes:
        del named["engine"]
    product: Array = multiply(parse(a, b, **(named if current_client() is not None else {})))
    return product


def steps_of(x: Array, beside: Sequence[Array] = ()) -> Iterator[Computation]:
    """Yield the computations of the runs in the graph of an array, the last one first; without those of others."""
    before = {name for array in beside for name in array.dask.layers}
    for name in reversed(x.dask._toposort_layers()):
        layer = x.dask.layers[name]
        if name in before or not isinstance(layer, MaterializedLayer | TasksLayer):
            continue
        barriers = [key for key in layer if barrier_name(key) is not None]
        if len(barriers) > 1:
            # A graph that has been optimized is one layer.
            tasks = dict(layer)
            inside = {key: needs & tasks.keys() for key, needs in DependenciesMapping(tasks).items()}
            barriers = [key for key in toposort(tasks, dependencies=inside) if barrier_name(key) is not None]
        yield from (problem_from_wire(layer[key].args[0]) for key in reversed(barriers))


def explain_result(x: Any) -> Placement | ChainPlan:
    """Return the plan of the runs that a lazy array, or several, come from."""
    arrays = [as_array(part) for part in (x if isinstance(x, tuple) else (x,)) if is_dask_collection(part)]
    if not any(map(_lazy, arrays)):
        raise PlanError(f"expected a lazy result, neither computed nor persisted; got {type(x).__name__}")
    problems = {problem.name: problem for part in arrays for problem in reversed(list(steps_of(part)))}
    answer = ask_regions(arrays)
    # Products that are part of a region have no run of their own.
    inside = {name for region in answer.regions if region.chosen for name in region.products}
    runs = tuple(_plan_of(problem) for name, problem in problems.items() if name not in inside)
    regions = answer.regions if inside or any(region.chosen for region in answer.regions) or len(runs) != 1 else ()
    return ChainPlan(runs, tuple(regions), answer.left if regions else {}) if len(runs) != 1 or regions else runs[0]


def _lazy(x: Array) -> bool:
    layers = x.dask.layers.values()
    return any(not layer.is_materialized() or any(isinstance(x, Task) for x in layer.values()) for layer in layers)


def _plan_of(problem: Computation) -> Placement:
    client = current_client()
    snapshot = ask_roster(client, problem.demand) if client is not None else None
    if snapshot is None:
        snapshot = imagined_snapshot(problem, [Worker("here")])
    return plan_computation(problem, snapshot.workers, engine=snapshot.engines)
