"""The numeric gate, problems and matrices for tests, a network in memory, and the conformance suite of engines.

Every engine must pass `conformance`: fresh random inputs, every method, all chunk grids, orders and types,
outputs and guard zones poisoned, inputs unchanged.
"""

from __future__ import annotations

import dataclasses
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.config import read_options
from dask_distmm.engines.base import ChunkKey, Engine, Job, ResultKey, Side
from dask_distmm.engines.sources import SourceChunk
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import dtype_from_name, operand_dtype
from dask_distmm.planning import EVERYWHERE, Chunks, NamedMatrix, Placement, Plan, Problem, Worker, plan
from dask_distmm.planning.placement import GATHERED, REPLICA
from dask_distmm.planning.problem import FREE, Distributions

# Random chunks and matrices of any supported type, and Problems of them


def random_chunks(rng: np.random.Generator, length: int, most: int) -> tuple[int, ...]:
    """Cut a length into up to `most` uneven chunks."""
    cuts = np.unique(rng.integers(0, length + 1, size=int(rng.integers(0, most))))
    return tuple(int(x) for x in np.diff([0, *cuts[(cuts > 0) & (cuts < length)], length]))


def random_matrix(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype, order: str) -> NDArray[Any]:
    """Return a random matrix of any supported type, in C or F order."""
    data: NDArray[Any]
    if dtype.kind == "b":
        data = rng.random(shape) < 0.1
    elif dtype.kind in "iu":
        info = np.iinfo(dtype)
        data = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    elif dtype.kind == "c":
        data = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    else:
        data = rng.standard_normal(shape)
    return np.asarray(data.astype(dtype), order=order)  # type: ignore[call-overload, no-any-return]


def make_problem(
    a_chunks: Chunks, b_chunks: Chunks, dtype: str = "float64", *, b_dtype: str | None = None, **changes: Any
) -> Problem:
    """Return a Problem with the configuration's options; `changes` overrides fields.

    `changes` may also have the chunks of D as ``out_chunks``, its type as ``out_dtype``, what a formula reads as
    ``extras``, and pairs of what A and B are: ``arrays``, ``transposed``, ``conjugated``, ``by_ranks``.
    """
    b_dtype = b_dtype or dtype
    d_dtype = changes.pop("out_dtype", operand_dtype(dtype_from_name(dtype), dtype_from_name(b_dtype)).name)
    d = NamedMatrix("", changes.pop("out_chunks", (a_chunks[0], b_chunks[1])), d_dtype)
    what = {"arrays": "array", "transposed": "transposed", "conjugated": "conjugated", "by_ranks": "by_ranks"}
    pairs = {field: changes.pop(name) for name, field in what.items() if name in changes}
    a, b = (
        NamedMatrix(name, chunks, kind, **{field: pair[at] for field, pair in pairs.items()})
        for at, (name, chunks, kind) in enumerate((("a", a_chunks, dtype), ("b", b_chunks, b_dtype)))
    )
    matrices = (a, b, *changes.pop("extras", ()))
    fields: dict[str, Any] = {"name": "test", "options": read_options(), "matrices": matrices, "wanted": (d,)}
    return Problem(**(fields | changes))


# Checks of products


def assert_product(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], *, factor: float = 16.0) -> None:
    """Check ``c == a @ b`` by the gate of the PBLAS testers.

    Elementwise ``|c - ref| <= factor * eps * sum_k |a_ik| |b_kj|`` plus half a unit in the last place of c's
    type, with eps of the type that is summed in or of c, whichever is coarser, and ref computed in a higher
    precision. Integers and bool must be equal (integers modulo their range, as NumPy's are).

    Parameters
    ----------
    a, b, c
        Matrices (m, k), (k, n), (m, n).
    factor
        Multiple of eps that is let through.

    Raises
    ------
    AssertionError
        Some element is outside the gate, or NaN where the reference is not; type or shape is wrong.
    """
    dtype = np.result_type(a.dtype, b.dtype)
    assert c.dtype == dtype, f"type {c.dtype}, expected {dtype}"
    assert c.shape == (a.shape[0], b.shape[1]), f"shape {c.shape}, expected {(a.shape[0], b.shape[1])}"
    if dtype.kind in "biu":
        np.testing.assert_array_equal(c, np.matmul(a.astype(dtype), b.astype(dtype)))
        return
    narrow = dtype.itemsize == 2
    high = np.clongdouble if dtype.kind == "c" else (np.float64 if narrow else np.longdouble)
    ref = np.matmul(a.astype(high), b.astype(high))
    real = np.float64 if narrow else np.longdouble
    magnitude = np.matmul(np.abs(a.astype(high)).astype(real), np.abs(b.astype(high)).astype(real))
    eps = float(np.finfo(np.float32 if narrow else dtype).eps)
    # Of types of two bytes, which are summed in float32, and rounded once more.
    own, least = (2.0**-10, 2.0**-25) if dtype == np.float16 else (2.0**-7, 0.0)
    half_ulp = 0.5 * own * np.abs(ref) + least if narrow else 0.0
    bound = factor * eps * magnitude + half_ulp * (1 + factor * eps)
    error = np.abs(c.astype(high) - ref)
    good = error <= bound
    assert good.all(), (
        f"{np.count_nonzero(~good)} of {good.size} elements are outside the gate; "
        f"worst: {float(np.nanmax(np.where(good, 0, error))):.3g}; NaN: {int(np.isnan(c.astype(high)).sum())}"
    )


# A network in memory, and runs of a plan over it with a thread for each participant


class LocalComm:
    """A network in memory: `Comm` for jobs that run as threads of one process.

    Parameters
    ----------
    jobs
        Filled by the caller, one job for each participant.
    hook
        Called as ``hook(peer, kind)`` before a request is served; may raise or wait, to inject faults.
    """

    def __init__(self, jobs: Sequence[Job[Any]], hook: Callable[[int, str], None] = lambda peer, kind: None) -> None:
        self.jobs, self.hook = jobs, hook
        self.pool = ThreadPoolExecutor(8, thread_name_prefix="local-comm")
        self.requests: list[tuple[int, str, int]] = []
        self.received_bytes = 0
        self._lock = threading.Lock()

    def fetch(self, peer: int, kind: str, boxes: Boxes) -> Future[Sequence[NDArray[Any]]]:
        """Ask a peer, which checks the request; answered by a thread once the peer is ready."""
        answer: Future[Sequence[NDArray[Any]]] = Future()
        with self._lock:
            self.requests.append((peer, kind, len(boxes)))

        def serve(ready: Future[None]) -> None:
            try:
                ready.result()
                self.hook(peer, kind)
                self.jobs[peer].plan.check_boxes(kind, boxes)
                # Copies, as a network makes: a peer must not see later changes of ours.
                answer.set_result([x.copy(order="K") for x in self.jobs[peer].serve(kind, boxes)])
            except BaseException as error:
                answer.set_exception(error)

        self.jobs[peer].available(kind, boxes).add_done_callback(lambda ready: self.pool.submit(serve, ready))
        return answer

    def close(self) -> None:
        """Stop the threads."""
        self.pool.shutdown()


def run_jobs(
    engine: Engine,
    placement: Placement,
    chunks: Mapping[ChunkKey, NDArray[Any]],
    timeout: float = 120.0,
    sources: Callable[[int], Mapping[ChunkKey, SourceChunk]] = lambda rank: {},
) -> dict[ResultKey, NDArray[Any]]:
    """Run a plan with one thread a participant; return the chunks of its outputs by name and number, D's name is "".

    Replicas that ranks bring are compared with the chunks of the owners, gathered chunks with those that were given.
    `sources` returns the chunks that a rank makes itself.
    """
    jobs: list[Job[Any]] = []
    comm = LocalComm(jobs)
    where = placement.where
    try:
        for me in range(len(placement.participants)):
            mine = {key: chunk for key, chunk in chunks.items() if where[key[0]][key[1]] in (me, EVERYWHERE)}
            making = sources(placement.ranks.index(me)) if me in placement.ranks else {}
            jobs.append(engine.job(Side(placement, me, {**mine, **making}, comm)))
        for job in jobs:
            job.prepare()
        # Who has nothing to do is not asked.
        offers = [job.offer if job.rank is not None or job.chunks else None for job in jobs]
        for job in jobs:
            job.accept(offers)
        with ThreadPoolExecutor(len(jobs)) as pool:
            futures = [pool.submit(job.execute) for job in jobs]
            result: dict[ResultKey, NDArray[Any]] = {}
            replicas: list[tuple[int, NDArray[Any]]] = []
            finished, waiting = wait(futures, timeout, return_when=FIRST_EXCEPTION)
            failed = [error for future in finished if (error := future.exception())]
            if failed or waiting:
                error = failed[0] if failed else TimeoutError(f"{len(waiting)} jobs hang")
                for job in jobs:
                    job.abort(error)
                raise error
            for future in futures:
                part = dict(future.result())
                copies = [key for key in part if key[0] == REPLICA]
                replicas += [(key[1], part.pop(key)) for key in copies]
                for number in [number for name, number in part if name == GATHERED]:
                    gathered = part.pop((GATHERED, number))
                    np.testing.assert_array_equal(gathered, chunks[placement.kept[-1], number], strict=True)
                own = [key for key in part if not key[0]]
                assert not copies or len(own) + len(copies) == placement.problem.outputs[0].count, "a rank lacks chunks"
                assert not set(part) & set(result), "two ranks own one chunk"
                result.update(part)
            for index, copy in replicas:
                assert copy.dtype == result["", index].dtype
                assert copy.shape == result["", index].shape
                assert copy.tobytes("C") == result["", index].tobytes("C"), f"the replica of chunk {index} differs"
        return result
    finally:
        comm.close()


# The conformance suite: one random problem, and everything checked about its result


def conformance(
    engine: Engine | Any,
    method: str,
    nranks: int,
    dtype: str = "float64",
    *,
    b_dtype: str | None = None,
    shape: tuple[int, int, int] = (67, 59, 71),
    orders: str = "CC",
    transposed: tuple[bool, bool] = (False, False),
    most_chunks: int = 5,
    own_out_chunks: bool = False,
    sources: int = 0,
    pack_below: int = 384,
    distributions: Distributions = FREE,
    everywhere: str = "",
    replicated: bool = False,
    conjugated: tuple[bool, bool] = (False, False),
    seed: int | None = None,
) -> Plan:
    """Multiply one random problem with an engine and check everything about the result.

    Parameters
    ----------
    engine, method, nranks
        The engine that is tested, a method, and a number of ranks. For an engine that needs processes, instead of it a
        function ``run(problem, nranks, chunks, where)`` that returns the chunks of D by number.
    dtype, b_dtype
        Type of A, and of B; B's is A's if it is None.
    shape
        m, n, k.
    orders
        Memory order of the chunks of A and B, ``"C"`` or ``"F"`` each.
    transposed
        Whether chunks are views of a transposed matrix (as Dask's ``A.T`` gives), of A and B.
    most_chunks
        Up to this many uneven chunks along each axis.
    own_out_chunks
        Give D chunks of its own instead of those of A and B.
    sources
        Participants that hold chunks but are not ranks.
    pack_below
        The option of that name, in bytes: with 0 the engine uses all chunks as they lie.
    distributions
        Asked for A, B and D.
    everywhere
        Operands that all participants have, as ``"a"``, ``"b"`` or ``"ab"``.
    replicated
        Whether all of D is to be on all workers in the end.
    conjugated
        Whether the conjugates of A and B are multiplied.
    seed
        Of the inputs; fresh if None (and named if something fails).

    Returns
    -------
    Plan
        The plan that ran.
    """
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    rng = np.random.default_rng(seed)
    m, n, k = shape
    a_chunks = (random_chunks(rng, m, most_chunks), random_chunks(rng, k, most_chunks))
    b_chunks = (random_chunks(rng, k, most_chunks), random_chunks(rng, n, most_chunks))
    own = (random_chunks(rng, m, most_chunks), random_chunks(rng, n, most_chunks))
    problem = make_problem(
        a_chunks,
        b_chunks,
        dtype,
        b_dtype=b_dtype,
        method=method,
        out_chunks=own if own_out_chunks else (a_chunks[0], b_chunks[1]),
        options=dataclasses.replace(read_options(), pack_below=pack_below, panel_bytes=2**14),
        distributions=distributions,
        conjugated=conjugated,
        formula=Formula(epilog="allreduce" if replicated else ""),
    )
    a = random_matrix(rng, (m, k), dtype_from_name(problem.a.dtype), orders[0])
    b = random_matrix(rng, (k, n), dtype_from_name(problem.b.dtype), orders[1])
    chunks = _with_guards("a", a, problem.a.chunks, transposed[0])
    chunks |= _with_guards("b", b, problem.b.chunks, transposed[1])
    before = {key: _checksum(chunk.base) for key, chunk in chunks.items()}
    where = []
    for operand, counts in (("a", problem.a.counts), ("b", problem.b.counts)):
        holders = rng.integers(0, nranks + sources, size=counts[0] * counts[1]).astype(np.int32)
        where.append(np.full_like(holders, EVERYWHERE) if operand in everywhere else holders)
    chosen = plan(
        problem,
        [Worker(f"w{index}") for index in range(nranks)],
        dict(zip("ab", where, strict=True)),
        sources=[Worker(f"s{index}") for index in range(sources)],
        engine="numpy" if callable(engine) else engine.name,
        replica_runs=(int("a" in everywhere), int("b" in everywhere)),
    )
    chosen = Plan.from_wire(chosen.to_wire())
    try:
        if callable(engine):
            result = engine(problem, nranks, chunks, where)
        else:
            result = {number: chunk for (name, number), chunk in run_jobs(engine, chosen, chunks).items() if not name}
        left, right = (x.conj() if conj else x for x, conj in zip((a, b), conjugated, strict=True))
        assert_product(left, right, _whole(chosen, result))
        after = {key: _checksum(chunk.base) for key, chunk in chunks.items()}
        assert after == before, "inputs or the guard zones around them were changed"
    except AssertionError as error:
        raise AssertionError(f"{error} (seed={seed}, {chosen!r})") from error
    return chosen


def _whole(plan: Plan, chunks: dict[int, NDArray[Any]]) -> NDArray[Any]:
    """Put D together from its chunks, each of which has to be there in its shape."""
    nrows, ncols = plan.problem.d.counts
    assert sorted(chunks) == list(range(nrows * ncols)), "chunks are missing"
    for index, chunk in chunks.items():
        r0, r1, c0, c1 = plan.chunk_rect(index)
        assert chunk.shape == (r1 - r0, c1 - c0)
    return np.block([[chunks[i * ncols + j] for j in range(ncols)] for i in range(nrows)])


def _with_guards(operand: str, matrix: NDArray[Any], sizes: Chunks, transposed: bool) -> dict[ChunkKey, NDArray[Any]]:
    """Cut a matrix into chunks that lie in larger, poisoned arrays."""
    views: dict[ChunkKey, NDArray[Any]] = {}
    rows, cols = (np.concatenate([[0], np.cumsum(s)]) for s in sizes)
    for i in range(len(sizes[0])):
        for j in range(len(sizes[1])):
            part = matrix[rows[i] : rows[i + 1], cols[j] : cols[j + 1]]
            order = "F" if matrix.flags.f_contiguous and not matrix.flags.c_contiguous else "C"
            part = part.T if transposed else part
            poison = np.nan if matrix.dtype.kind in "fcV" else 1
            padded = np.full((part.shape[0] + 2, part.shape[1] + 2), poison, matrix.dtype, order=order)  # type: ignore[call-overload]
            padded[1:-1, 1:-1] = part
            view = padded[1:-1, 1:-1]
            views[operand, i * len(sizes[1]) + j] = view.T if transposed else view
    return views


def _checksum(data: NDArray[Any] | None) -> int:
    assert data is not None
    return zlib.crc32(data.tobytes())
