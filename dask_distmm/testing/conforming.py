"""The conformance suite: one random problem, and everything checked about its result."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.config import read_options
from dask_distmm.engines.base import ChunkKey, Engine
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning import EVERYWHERE, Chunks, Plan, Problem, Worker, plan
from dask_distmm.planning.distribution import FREE, Distributions
from dask_distmm.testing.assertions import assert_product
from dask_distmm.testing.network import run_jobs
from dask_distmm.testing.problems import make_problem, random_chunks, random_matrix


@dataclasses.dataclass(frozen=True)
class RandomProblem:
    """A kind of problem that an engine has to multiply.

    Parameters
    ----------
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
    """

    dtype: str = "float64"
    b_dtype: str | None = None
    shape: tuple[int, int, int] = (67, 59, 71)
    orders: str = "CC"
    transposed: tuple[bool, bool] = (False, False)
    most_chunks: int = 5
    own_out_chunks: bool = False
    sources: int = 0
    pack_below: int = 384
    distributions: Distributions = FREE
    everywhere: str = ""
    replicated: bool = False
    conjugated: tuple[bool, bool] = (False, False)
    seed: int | None = None

    def problem(self, rng: np.random.Generator, method: str) -> Problem:
        """Return the problem in random chunks."""
        (m, n, k), most = self.shape, self.most_chunks
        a_chunks = (random_chunks(rng, m, most), random_chunks(rng, k, most))
        b_chunks = (random_chunks(rng, k, most), random_chunks(rng, n, most))
        out = (a_chunks[0], b_chunks[1])
        if self.own_out_chunks:
            out = (random_chunks(rng, m, most), random_chunks(rng, n, most))
        return make_problem(
            a_chunks,
            b_chunks,
            self.dtype,
            b_dtype=self.b_dtype,
            method=method,
            out_chunks=out,
            options=dataclasses.replace(read_options(), pack_below=self.pack_below, panel_bytes=2**14),
            distributions=self.distributions,
            conjugated=self.conjugated,
            formula=Formula(epilog="allreduce" if self.replicated else ""),
        )

    def matrices(self, rng: np.random.Generator, problem: Problem) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return random A and B."""
        a, b = (
            random_matrix(rng, size, dtype_from_name(name), order)
            for size, name, order in (
                ((problem.m, problem.k), problem.a_dtype, self.orders[0]),
                ((problem.k, problem.n), problem.b_dtype, self.orders[1]),
            )
        )
        return a, b

    def owners(self, rng: np.random.Generator, problem: Problem, participants: int) -> list[NDArray[np.int32]]:
        """Return for A and B which participant has each chunk."""
        found = []
        for operand, sizes in (("a", problem.a_chunks), ("b", problem.b_chunks)):
            where = rng.integers(0, participants, size=len(sizes[0]) * len(sizes[1])).astype(np.int32)
            found.append(np.full_like(where, EVERYWHERE) if operand in self.everywhere else where)
        return found


def conformance(engine: Engine | Any, method: str, nranks: int, dtype: str = "float64", **options: Any) -> Plan:
    """Multiply one random problem with an engine and check everything about the result.

    Parameters
    ----------
    engine, method, nranks, dtype
        The engine that is tested, a method, a number of ranks, and the type of A and D. For an engine that needs
        processes, instead of it a function ``run(problem, nranks, chunks, where)`` that returns the chunks of D by
        number.
    options
        The other fields of `RandomProblem`.

    Returns
    -------
    Plan
        The plan that ran.
    """
    case = RandomProblem(dtype, **options)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if case.seed is None else case.seed
    rng = np.random.default_rng(seed)
    problem = case.problem(rng, method)
    a, b = case.matrices(rng, problem)
    chunks = _with_guards("a", a, problem.a_chunks, case.transposed[0])
    chunks |= _with_guards("b", b, problem.b_chunks, case.transposed[1])
    before = {key: _checksum(chunk.base) for key, chunk in chunks.items()}
    where = case.owners(rng, problem, nranks + case.sources)
    made = plan(
        problem,
        [Worker(f"w{index}") for index in range(nranks)],
        dict(zip("ab", where, strict=True)),
        sources=[Worker(f"s{index}") for index in range(case.sources)],
        engine="numpy" if callable(engine) else engine.name,
        replica_runs=(int("a" in case.everywhere), int("b" in case.everywhere)),
    )
    made = Plan.from_wire(made.to_wire())
    try:
        if callable(engine):
            result = engine(problem, nranks, chunks, where)
        else:
            result = {number: chunk for (name, number), chunk in run_jobs(engine, made, chunks).items() if not name}
        left, right = (x.conj() if conj else x for x, conj in zip((a, b), case.conjugated, strict=True))
        assert_product(left, right, _whole(made, result))
        after = {key: _checksum(chunk.base) for key, chunk in chunks.items()}
        assert after == before, "inputs or the guard zones around them were changed"
    except AssertionError as error:
        raise AssertionError(f"{error} (seed={seed}, {made!r})") from error
    return made


def _whole(made: Plan, chunks: dict[int, NDArray[Any]]) -> NDArray[Any]:
    """Put D together from its chunks, each of which has to be there in its shape."""
    nrows, ncols = made.problem.chunk_counts("d")
    assert sorted(chunks) == list(range(nrows * ncols)), "chunks are missing"
    for index, chunk in chunks.items():
        r0, r1, c0, c1 = made.chunk_rect(index)
        assert chunk.shape == (r1 - r0, c1 - c0)
    return np.block([[chunks[i * ncols + j] for j in range(ncols)] for i in range(nrows)])


def _with_guards(operand: str, matrix: NDArray[Any], sizes: Chunks, transposed: bool) -> dict[ChunkKey, NDArray[Any]]:
    """Cut a matrix into chunks that lie in larger, poisoned arrays."""
    found: dict[ChunkKey, NDArray[Any]] = {}
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
            found[operand, i * len(sizes[1]) + j] = view.T if transposed else view
    return found


def _checksum(data: NDArray[Any] | None) -> int:
    assert data is not None
    return zlib.crc32(data.tobytes())
