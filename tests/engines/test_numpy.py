"""The conformance suite on the numpy engine, and its faults."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from conformance import (
    LocalComm,
    assert_product,
    conformance,
    make_problem,
    random_chunks,
    random_matrix,
    run_jobs,
)

from dask_distmm.config import read_options
from dask_distmm.engines.base import Side, get_engine
from dask_distmm.engines.numpy import engine
from dask_distmm.engines.numpy.blas import gemm
from dask_distmm.errors import EngineError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning import EVERYWHERE, METHODS, Worker, plan
from dask_distmm.planning.problem import BlockCyclic, NamedMatrix, Slab

ENGINE = get_engine("numpy")
DTYPES = (
    "float16 bfloat16 float32 float64 longdouble complex64 complex128 clongdouble bool "
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
).split()


@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("pack_below", [0, 384], ids=["as they lie", "packed"])
def test_methods(method, nranks, pack_below):
    made = conformance(ENGINE, method, nranks, shape=(67, 59, 471), pack_below=pack_below, sources=nranks % 3)
    if method not in ("auto", "local"):
        assert len(made.ranks) == nranks


@pytest.mark.parametrize("pack_below", [0, 384], ids=["as they lie", "packed"])
@pytest.mark.parametrize(
    "distributions",
    [
        (Slab(0), None, None),
        (None, Slab(1), Slab(1)),
        (Slab(1), Slab(0), Slab(0)),
        (Slab(1), Slab(0), Slab(1)),
        (None, None, BlockCyclic((3, 2), (23, 30))),
        (BlockCyclic((2, 3), (34, 5)), BlockCyclic((2, 3), (7, 20)), None),
    ],
)
def test_distributions_by_hand(distributions, pack_below):
    conformance(ENGINE, "auto", 6, own_out_chunks=True, sources=1, pack_below=pack_below, distributions=distributions)


@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("method", ["allgather", "reducescatter", "allreduce", "summa"])
def test_orders_and_transposes(method, orders, transposed):
    for pack_below in (0, 384):
        conformance(ENGINE, method, 4, orders=orders, transposed=transposed, pack_below=pack_below)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["allgather", "reducescatter", "allreduce", "summa"])
def test_dtypes(method, dtype):
    for pack_below in (0, 384):
        conformance(ENGINE, method, 3, dtype, pack_below=pack_below)


@pytest.mark.parametrize(
    ("a", "b"), [("float32", "float64"), ("int8", "float32"), ("bfloat16", "float32"), ("int32", "complex64")]
)
def test_mixed_dtypes(a, b):
    conformance(ENGINE, "summa", 4, a, b_dtype=b)
    conformance(ENGINE, "reducescatter", 4, b, b_dtype=a)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 50, 40), (50, 1, 40), (50, 40, 1), (2, 3, 500), (500, 3, 2)])
@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_thin_shapes(method, shape):
    conformance(ENGINE, method, 4, shape=shape, own_out_chunks=True)


@pytest.mark.parametrize("method", ["allgather", "reducescatter", "allreduce", "summa"])
def test_out_chunks_of_their_own(method):
    for pack_below in (0, 384):
        conformance(ENGINE, method, 5, own_out_chunks=True, most_chunks=9, pack_below=pack_below)


@pytest.mark.parametrize("conjugated", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
def test_conjugates(conjugated, orders):
    for pack_below in (0, 384):
        method = METHODS[np.random.default_rng().integers(len(METHODS))]
        options = {"orders": orders, "conjugated": conjugated, "pack_below": pack_below}
        conformance(ENGINE, method, 4, "complex64", own_out_chunks=True, **options)
    conformance(ENGINE, "summa", 3, "clongdouble", conjugated=conjugated)


@pytest.mark.parametrize("operands", ["a", "b", "ab"])
@pytest.mark.parametrize("method", METHODS)
def test_operands_that_are_everywhere(method, operands):
    for pack_below in (0, 384):
        made = conformance(ENGINE, method, 4, everywhere=operands, sources=1, pack_below=pack_below)
        wheres = made.where
        assert all((wheres[operand] == EVERYWHERE).all() == (operand in operands) for operand in "ab")


def setup(nranks=3, size=60, **changes):
    rng = np.random.default_rng()
    sizes = (size // 3,) * 3
    problem = make_problem((sizes, sizes), (sizes, sizes), **changes)
    where = rng.integers(0, nranks, 9).astype(np.int32)
    made = plan(problem, [Worker(f"w{i}") for i in range(nranks)], where={"a": where, "b": where})
    chunks = {(op, i): rng.standard_normal((size // 3, size // 3)) for op in "ab" for i in range(9)}
    return made, chunks


@pytest.mark.parametrize("method", ["allgather", "reducescatter", "summa"])
def test_a_rank_that_fails_ends_all(method, monkeypatch):
    made, chunks = setup(method=method)
    monkeypatch.setattr("dask_distmm.engines.numpy.engine.gemm", fail_in_one_thread())
    with pytest.raises(ZeroDivisionError):
        run_jobs(ENGINE, made, chunks)


def fail_in_one_thread():
    first: list[int] = []
    lock = threading.Lock()

    def gemm(a, b, c, conjugated) -> None:
        with lock:
            first.append(threading.get_ident())
        if first[0] == threading.get_ident():
            raise ZeroDivisionError

    return gemm


def test_aborted_while_waiting():
    """A rank that waits for a peer that never answers ends with the error it is given."""
    made, chunks = setup(2, method="allgather")
    jobs = []
    comm = LocalComm(jobs, hook=lambda peer, kind: threading.Event().wait(1) and None)
    mine = {key: chunk for key, chunk in chunks.items() if made.where["a"][key[1]] == made.ranks[0]}
    job = ENGINE.job(Side(made, made.ranks[0], mine, comm))
    other = ENGINE.job(Side(made, made.ranks[1], {}, comm))
    jobs.extend([job, other] if made.ranks[0] == 0 else [other, job])
    job.prepare()
    threading.Timer(0.3, job.abort, [EngineError("enough")]).start()
    with pytest.raises((EngineError, KeyError)):
        job.execute()
    comm.close()


def test_wrong_chunks_are_refused():
    made, chunks = setup(1)
    chunks["a", 0] = [[1.0]]
    with pytest.raises(EngineError, match="map_blocks"):
        ENGINE.job(Side(made, 0, chunks, None))


def cut_up(x, rows, cols):
    """Yield the parts of a matrix with the numbers of their chunks along rows and columns."""
    for i, strip in enumerate(np.split(x, np.cumsum(rows)[:-1])):
        for j, part in enumerate(np.split(strip, np.cumsum(cols)[:-1], axis=1)):
            yield i, j, part.copy()


def test_unknown_engine():
    with pytest.raises(EngineError, match="'numpy'"):
        get_engine("abacus")


@pytest.mark.parametrize("method", ["allgather", "summa", "reducescatter"])
def test_requests_grow_with_workers_and_panels_not_with_chunks(method):
    """Few messages for many chunks: one to each peer for each panel."""
    counts = []
    for pieces in (4, 24):
        sizes = (240 // pieces,) * pieces
        problem = make_problem((sizes, sizes), (sizes, sizes), method=method)
        where = (np.arange(pieces**2) % 3).astype(np.int32)
        made = plan(problem, [Worker(f"w{i}") for i in range(3)], where={"a": where, "b": where})
        rng = np.random.default_rng()
        chunks = {(op, i): rng.standard_normal((240 // pieces,) * 2) for op in "ab" for i in range(pieces**2)}
        seen: list[LocalComm] = []

        class Spy(LocalComm):
            def __init__(self, jobs) -> None:
                super().__init__(jobs)
                seen.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("conformance.LocalComm", Spy)
            run_jobs(ENGINE, made, chunks)
        counts.append(len(seen[0].requests))
    assert counts[1] <= counts[0] + 6


@pytest.mark.parametrize("own_out_chunks", [False, True])
@pytest.mark.parametrize("pack_below", [0, 384], ids=["as they lie", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "complex128", "int32", "bfloat16"])
@pytest.mark.parametrize("method", ["local", "allgather", "reducescatter"])
@pytest.mark.parametrize("begun", [False, True])
def test_gram_matrices(monkeypatch, method, dtype, pack_below, own_out_chunks, begun):
    """Half of the operations where a rank has all of D; of what an earlier run has begun no chunk is lost."""
    rng, nranks, n, k = np.random.default_rng(), 2, 300, 260
    x = random_matrix(rng, (k, n), dtype_from_name(dtype), "C")
    rows, cols = random_chunks(rng, k, 3), random_chunks(rng, n, 3)
    across, down = (random_chunks(rng, n, 3) for _ in range(2)) if own_out_chunks else (cols, cols)
    complexes = x.dtype.kind == "c"
    # Sums of bfloat16 have another type, and do not go on in place.
    begun &= dtype != "bfloat16"
    problem = make_problem(
        (cols, rows), (rows, cols), dtype, method=method, arrays=("x", "x"), transposed=(True, False),
        conjugated=(complexes, False), out_chunks=(across, down),
        options=dataclasses.replace(read_options(), pack_below=pack_below),
        formula=Formula(partial=begun), extras=(NamedMatrix("partial", (across, down), dtype),) * begun,
    )  # fmt: skip
    where = rng.integers(0, nranks, (len(rows), len(cols))).astype(np.int32)
    homes = {"a": where.T.ravel(), "b": where.ravel()}
    parts = list(cut_up(x, rows, cols))
    chunks = {("b", i * len(cols) + j): part for i, j, part in parts}
    chunks |= {("a", j * len(rows) + i): part.T for i, j, part in parts}
    left, right = x.conj().T if complexes else x.T, x
    if begun:
        earlier = random_matrix(rng, (n, n), x.dtype, "C")
        earlier = earlier + earlier.conj().T
        homes["partial"] = rng.integers(0, nranks, len(across) * len(down)).astype(np.int32)
        chunks |= {("partial", i * len(down) + j): part for i, j, part in cut_up(earlier, across, down)}
    made = plan(problem, [Worker(f"w{index}") for index in range(nranks)], homes, engine="numpy", orders=("F", "C"))
    counted = []

    def counting(a, b, c, conjugated):
        counted.append(a.shape[0] * a.shape[1] * b.shape[1])
        gemm(a, b, c, conjugated)

    monkeypatch.setattr(engine, "gemm", counting)
    found = run_jobs(ENGINE, made, chunks)
    d = np.block([[found["", i * len(down) + j] for j in range(len(down))] for i in range(len(across))])
    if begun:
        left, right = np.hstack([left, earlier]), np.vstack([right, np.eye(n, dtype=x.dtype)])
    assert_product(left, right, d)
    if made.grid[:2] == (1, 1) and x.dtype.kind in "fcV" and not (begun or own_out_chunks):
        # Products on the diagonal are none of these, unless they are small.
        assert sum(counted) <= 0.55 * n * n * k
