"""Chunks that ranks of the engine `peer` make themselves, on emulated devices whose streams run when they like."""

from __future__ import annotations

import collections
import gc
import sys
import threading
import time
import weakref

import dask
import numpy as np
import pytest
import shared
from conformance import assert_product, make_problem, random_chunks, random_matrix, run_jobs
from matrices import LIMIT, until

from dask_distmm.engines.sources import Source, SourceChunk
from dask_distmm.errors import EngineError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning import NamedMatrix, Worker, plan
from dask_distmm.planning import schedule as block_schedule
from dask_distmm.planning import schedule as schedules
from dask_distmm.runtime.chunks import _view

METHODS = ["local", "allgather", "reducescatter", "allreduce", "summa"]


@pytest.fixture
def sizes(monkeypatch):
    """Set from which size on chunks are joined (seconds of a product), and how large buffers are."""

    def set_to(seconds, buffers=2**31):
        monkeypatch.setattr(block_schedule, "_LEAST_SECONDS", seconds)
        monkeypatch.setattr(block_schedule, "_LEAST_EXTENT", 8)
        return dask.config.set({"distmm.peer.buffer-bytes": buffers})

    return set_to


def split(matrix, chunks):
    """Return the chunks of a matrix by their numbers."""
    strips = np.split(matrix, np.cumsum(chunks[0])[:-1])
    parts = [part for strip in strips for part in np.split(strip, np.cumsum(chunks[1])[:-1], axis=1)]
    return dict(enumerate(parts))


class Kernels:
    """Sources whose chunks are filled by "kernels": by the current stream of their thread, when that comes to it."""

    def __init__(self, order="C", host=False):
        self.order, self.host, self.made, self.lock = order, host, collections.Counter(), threading.Lock()
        self.threads = set()

    def source(self, name, values):
        def make():
            with self.lock:
                self.made[name] += 1
                self.threads.add(threading.get_ident())
            if self.host:
                return np.array(values, order=self.order)
            cupy = sys.modules["cupy"]
            chunk = cupy.empty(values.shape, values.dtype, order=self.order)
            stream = cupy.cuda.get_current_stream()
            assert stream is not cupy.cuda.Stream.null
            # It writes to where the chunk was, whoever has that memory then.
            target = np.asarray(chunk).view(np.ndarray)
            shared.on_stream(stream.ptr, lambda: np.copyto(target, values))
            return chunk

        return Source(make)


def run(ranks, problem, a, b, nranks, kernels, *, x=None, others=0, threads=2, extras=None, engine="peer"):
    """Multiply on `nranks` ranks, which make the chunks that the problem says; return the plan and D.

    `x` is the array of a Gram matrix, whose chunks are made once for both operands.
    """
    rng = np.random.default_rng()
    workers = [Worker(f"w{index}", threads, device="gpu", reach=("gpu",)) for index in range(nranks)]
    matrices, given, where = {"a": a, "b": b, **(extras or {})}, {}, {}
    for name in problem.operands:
        if name in "ab" and problem[name].by_ranks:
            continue
        found = split(matrices[name], problem[name].chunks)
        given |= {(name, number): np.ascontiguousarray(part) for number, part in found.items()}
        where[name] = rng.integers(0, nranks + others, len(found)).astype(np.int32)
    more = [Worker(f"s{index}", device="gpu", reach=("gpu",)) for index in range(others)]
    made = plan(problem, workers, where, sources=more, engine=engine)
    made = type(made).from_wire(made.to_wire())

    def sources(rank):
        own, mine = {}, {}
        for name in "ab":
            if not problem[name].by_ranks:
                continue
            parts = split(matrices[name], problem[name].chunks)
            for number in made.needed(rank, name).tolist():
                i, j = divmod(number, problem[name].counts[1])
                transposed = problem[name].transposed
                at = (name, i, j) if x is None else ("x", *((j, i) if transposed else (i, j)))
                part = parts[number]
                part = part.T if transposed else part
                if at not in own:
                    own[at] = kernels.source((rank, at), part)
                mine[name, number] = SourceChunk(own[at], lambda made_, n=name, k=number: _view(made, n, k, made_))
        return mine

    result = run_jobs(ranks, made, given, sources=sources)
    across = len(problem.d.chunks[1])
    d = np.block([[result["", i * across + j] for j in range(across)] for i in range(len(problem.d.chunks[0]))])
    return made, np.asarray(d).view(np.ndarray), result


def problem_of(rng, shape, a_dtype, by_ranks, method, most=5, b_dtype=None, **changes):
    m, n, k = shape
    a_chunks = random_chunks(rng, m, most), random_chunks(rng, k, most)
    b_chunks = random_chunks(rng, k, most), random_chunks(rng, n, most)
    out = random_chunks(rng, m, 3), random_chunks(rng, n, 3)
    fields = {"out_chunks": out, "by_ranks": by_ranks, "method": method, "array": "cupy"} | changes
    return make_problem(a_chunks, b_chunks, a_dtype, b_dtype=b_dtype, **fields)


def matrices(rng, problem):
    return [
        random_matrix(rng, shape, dtype_from_name(name), "C")
        for shape, name in (((problem.m, problem.k), problem.a.dtype), ((problem.k, problem.n), problem.b.dtype))
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("by_ranks", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize(("nranks", "order"), [(1, "C"), (2, "F"), (3, "C")])
@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["apart", "joined"])
def test_methods(make_peers, sizes, method, by_ranks, nranks, order, seconds):
    ranks, _ = make_peers()
    rng, kernels = np.random.default_rng(), Kernels(order)
    with sizes(seconds):
        problem = problem_of(rng, (67, 59, 71), "float64", by_ranks, method)
        a, b = matrices(rng, problem)
        made, d, _ = run(ranks, problem, a, b, nranks, kernels, others=1)
    assert_product(a, b, d)
    # Each rank makes a chunk once.
    assert set(kernels.made.values()) == {1}
    assert len(made.ranks) == nranks or method == "local"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("by_ranks", [(True, True), (True, False), (False, True)], ids=str)
def test_little_room(make_peers, sizes, method, by_ranks):
    """Chunks are cut where a buffer would be too large; few are held at a time."""
    ranks, _ = make_peers()
    rng, kernels = np.random.default_rng(), Kernels()
    with sizes(0.0, 2**14):
        problem = problem_of(rng, (67, 59, 211), "float64", by_ranks, method, 3)
        a, b = matrices(rng, problem)
        made, d, _ = run(ranks, problem, a, b, 2, kernels)
    assert_product(a, b, d)
    for job in ranks.jobs:
        if job.rank is not None:
            stream = block_schedule.load_schedules(made)[job.rank]
            assert 0 < job.most_held <= stream.held_bytes


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"])
@pytest.mark.parametrize("by_ranks", [(True, True), (True, False)], ids=str)
@pytest.mark.parametrize("host", [False, True])
def test_types(make_peers, sizes, dtype, by_ranks, host):
    ranks, _ = make_peers(host)
    rng, kernels = np.random.default_rng(), Kernels(host=host)
    for seconds, order in ((0.0, "C"), (1.0, "F")):
        kernels.order = order
        with sizes(seconds):
            problem = problem_of(rng, (40, 50, 90), dtype, by_ranks, "auto", array="numpy" if host else "cupy")
            a, b = matrices(rng, problem)
            _, d, result = run(ranks, problem, a, b, 2, kernels)
        assert_product(a, b, d)
        assert all((type(chunk) is np.ndarray) == host for chunk in result.values())


@pytest.mark.parametrize(("dtype", "b_dtype"), [("float32", "float64"), ("complex64", "float32"), ("int8", "int8")])
@pytest.mark.parametrize("by_ranks", [(True, True), (False, True)], ids=str)
def test_two_types(make_peers, dtype, b_dtype, by_ranks):
    ranks, _ = make_peers()
    rng, kernels = np.random.default_rng(), Kernels()
    changes = {"out_dtype": "int32"} if dtype == "int8" else {}
    problem = problem_of(rng, (40, 50, 90), dtype, by_ranks, "auto", b_dtype=b_dtype, **changes)
    a, b = matrices(rng, problem)
    _, d, _ = run(ranks, problem, a, b, 2, kernels)
    assert_product(a.astype(d.dtype), b.astype(d.dtype), d)


@pytest.mark.parametrize("conjugated", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("by_ranks", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("order", "CF")
def test_conjugates(make_peers, sizes, conjugated, by_ranks, order):
    ranks, _ = make_peers()
    rng, kernels = np.random.default_rng(), Kernels(order)
    for seconds in (0.0, 1.0):
        with sizes(seconds):
            problem = problem_of(rng, (40, 50, 90), "complex128", by_ranks, "auto", conjugated=conjugated)
            a, b = matrices(rng, problem)
            _, d, _ = run(ranks, problem, a, b, 2, kernels)
        assert_product(a.conj() if conjugated[0] else a, b.conj() if conjugated[1] else b, d)


@pytest.mark.parametrize("by_ranks", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float64", "float8_e4m3fn"])
def test_extents_are_padded(make_peers, sizes, monkeypatch, by_ranks, dtype):
    monkeypatch.setattr(schedules, "_LEAST_PADDED", 0)
    ranks, _ = make_peers()
    rng, kernels = np.random.default_rng(), Kernels()
    fp8 = dtype.startswith("float8")
    for seconds, buffers in ((0.0, 2**31), (1.0, 2**31), (0.0, 2**13)):
        with sizes(seconds, buffers):
            changes = {"out_dtype": "float32"} if fp8 else {}
            problem = problem_of(rng, (67, 59, 171), dtype, by_ranks, "auto", **changes)
            assert schedules.extent_multiple(problem) == 16
            a, b = matrices(rng, problem)
            bare = [x.view(np.uint8) if fp8 else x for x in (a, b)]
            _, d, _ = run(ranks, problem, *bare, 3, kernels)
        assert_product(a.astype("f4") if fp8 else a, b.astype("f4") if fp8 else b, d)


def gram_problem(rng, n, k, dtype, method, most, **changes):
    rows, cols = random_chunks(rng, k, most), random_chunks(rng, n, changes.pop("wide", 3))
    conjugated = np.dtype(dtype_from_name(dtype)).kind == "c"
    fields = {
        "arrays": ("x", "x"), "transposed": (True, False), "conjugated": (conjugated, False), "array": "cupy",
        "out_chunks": (random_chunks(rng, n, 3), random_chunks(rng, n, 3)), "by_ranks": (True, True), "method": method,
    }  # fmt: skip
    return make_problem((cols, rows), (rows, cols), dtype, **(fields | changes))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64"])
@pytest.mark.parametrize("order", "CF")
def test_gram_matrices(make_peers, sizes, monkeypatch, method, nranks, dtype, order):
    """A chunk is made once, and multiplied by itself; one triangle is multiplied where a rank has a square."""
    monkeypatch.setattr(block_schedule, "_LEAST_SQUARE", 16)
    monkeypatch.setattr(block_schedule, "_NARROWEST", 8)
    ranks, _ = make_peers()
    rng = np.random.default_rng()
    for seconds, wide in ((0.0, 1), (0.0, 4), (1.0, 3)):
        kernels = Kernels(order)
        with sizes(seconds):
            problem = gram_problem(rng, 75, 190, dtype, method, 9, wide=wide)
            x = random_matrix(rng, (190, 75), dtype_from_name(dtype), "C")
            made, d, _ = run(ranks, problem, x.T, x, nranks, kernels, x=x)
        assert_product(x.conj().T if dtype == "complex64" else x.T, x, d)
        assert set(kernels.made.values()) == {1}
        if made.grid[:2] == (1, 1):
            down, across = problem.b.counts
            # Chunks through which a cut between ranks goes are made by both.
            assert len(kernels.made) <= (down + len(made.ranks) - 1) * across
            halved = [
                block_schedule.square_on_diagonal(made, rank, None) is not None for rank in range(len(made.ranks))
            ]
            assert all(halved)


@pytest.mark.parametrize("transposed", [(False, True), (True, False)])
def test_gram_matrices_of_rows(make_peers, sizes, transposed):
    ranks, _ = make_peers()
    rng, kernels = np.random.default_rng(), Kernels()
    x = random_matrix(rng, (40, 150), np.dtype(complex), "C")
    rows, cols = (12, 28), random_chunks(rng, 150, 6)
    conjugated = (False, True) if transposed[1] else (True, False)
    chunks = ((rows, cols), (cols, rows))
    problem = make_problem(
        *chunks, "complex128", arrays=("x", "x"), transposed=transposed, conjugated=conjugated, by_ranks=(True, True),
        array="cupy", method="reducescatter",
    )  # fmt: skip
    a, b = x, x.T
    with sizes(0.0):
        _, d, _ = run(ranks, problem, a, b, 2, kernels, x=x)
    assert_product(a.conj() if conjugated[0] else a, b.conj() if conjugated[1] else b, d)


def test_formula_and_earlier_sums(make_peers):
    ranks, _ = make_peers()
    rng = np.random.default_rng()
    out = (30, 37), (20, 39)
    for method in ("reducescatter", "allgather"):
        problem = problem_of(
            rng, (67, 59, 71), "float32", (True, True), method, out_chunks=out,
            formula=Formula(alpha=(2.0, 0.0), beta=(-1.0, 0.0), epilog="relu", partial=True),
            extras=(NamedMatrix("c", out, "float32"), NamedMatrix("partial", out, "float32")),
        )  # fmt: skip
        a, b = matrices(rng, problem)
        c, sums = rng.standard_normal((2, 67, 59)).astype("f4")
        _, d, _ = run(ranks, problem, a, b, 2, Kernels(), extras={"c": c, "partial": sums})
        exact = np.maximum(2 * (a.astype(float) @ b + sums) - c, 0)
        np.testing.assert_allclose(d, exact, rtol=1e-4, atol=1e-4)


def few_chunks(count=12, rows=10, **changes):
    k, n = (rows,) * count, (8,)
    fields = {"arrays": ("x", "x"), "transposed": (True, False), "by_ranks": (True, True), "array": "cupy"}
    return make_problem((n, k), (k, n), "float64", **(fields | changes))


def test_an_error_of_a_task_ends_the_run_and_nothing_is_left(make_peers):
    ranks, world = make_peers()
    problem, kernels = few_chunks(), Kernels()
    real = kernels.source

    def source(name, values):
        if name[1][1] == 7:

            def fail():
                raise OSError("it is torn")

            return Source(fail)
        return real(name, values)

    kernels.source = source
    x = np.random.default_rng().standard_normal((120, 8))
    kept = held_by_engines(ranks, world, x)
    with pytest.raises(OSError, match="it is torn"):
        run(ranks, problem, x.T, x, 1, kernels, x=x, threads=1)
    nothing_else_is_held(ranks, world, kept)
    # Those after it are not made, but for the ones that were begun.
    assert len(kernels.made) < 12


def blocks(world):
    return sum(arena.blocks for arena in world.memory.arenas)


def held_by_engines(ranks, world, x, nranks=1):
    """Return how many arrays engines keep between runs, after one that has succeeded."""
    run(ranks, few_chunks(len(x) // 10), x.T, x, nranks, Kernels(), x=x)
    forget(ranks)
    return blocks(world)


def forget(ranks):
    for job in ranks.jobs:
        job.comm.jobs = None
        del job
    ranks.jobs.clear()
    gc.collect()


def nothing_else_is_held(ranks, world, kept):
    """All memory of runs that are over is free."""
    forget(ranks)
    for engine in ranks.engines.values():
        for stream in engine.making(2):
            stream.synchronize()  # as kernels end by themselves
    until(lambda: blocks(world) <= kept)


def test_a_run_that_is_ended_makes_no_more_and_frees_all(make_peers):
    ranks, world = make_peers()
    problem, kernels, begun, over = few_chunks(200), Kernels(), threading.Event(), threading.Event()
    real, active = kernels.source, []

    def source(name, values):
        made = real(name, values)

        def make():
            active.append(name)
            if name[1][1] > 10:
                begun.set()
                assert over.wait(LIMIT)
            values = made.make()
            active.remove(name)
            return values

        return Source(make)

    kernels.source = source
    x = np.random.default_rng().standard_normal((2000, 8))
    kept, errors = held_by_engines(ranks, world, x, 2), []

    def start():
        try:
            run(ranks, problem, x.T, x, 2, kernels, x=x, threads=1)
        except EngineError as error:
            errors.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    assert begun.wait(LIMIT)
    for job in list(ranks.jobs):
        job.abort(EngineError("cancelled"))
    del job
    over.set()
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert errors == ["cancelled"]
    # Tasks that are on are not stopped.
    until(lambda: not active)
    made = sum(kernels.made.values())
    time.sleep(0.2)
    assert sum(kernels.made.values()) == made < 200
    nothing_else_is_held(ranks, world, kept)


def test_few_chunks_are_there_at_a_time(make_peers, sizes, monkeypatch):
    """Made ahead, in the making and in use: as projected."""
    ranks, world = make_peers()
    most, now, lock, size = [0], [0], threading.Lock(), 65 * 8 * 8
    allocate = world.memory.allocate

    def free():
        with lock:
            now[0] -= size

    def counted(wanted, **options):
        block = allocate(wanted, **options)
        if wanted == size:
            with lock:
                now[0] += size
                most[0] = max(now[0], most[0])
            weakref.finalize(block, free)
        return block

    monkeypatch.setattr(world.memory, "allocate", counted)
    x = np.random.default_rng().standard_normal((6500, 8))
    with sizes(0.0, 2**14):
        made, d, _ = run(ranks, few_chunks(100, 65), x.T, x, 1, Kernels(), x=x, threads=2)
    assert_product(x.T, x, d)
    (stream,) = block_schedule.load_schedules(made)
    assert 0 < most[0] <= stream.held_bytes + stream.making_bytes < x.nbytes / 8


@pytest.mark.parametrize("how", ["use", "with"])
def test_tasks_that_change_their_threads_stream(make_peers, how):
    """For good, or for a while, after which CuPy forgets what `use` had set before."""
    ranks, _ = make_peers()
    problem, kernels = few_chunks(), Kernels()
    real = kernels.source

    def source(name, values):
        made = real(name, values)

        def make():
            cupy = sys.modules["cupy"]
            with ranks.memory.as_process("w0"):
                stream = cupy.cuda.Stream()
            if how == "use":
                stream.use()
            else:
                with stream:
                    pass
            return made.make()

        return Source(make)

    kernels.source = source
    x = np.random.default_rng().standard_normal((120, 8))
    _, d, _ = run(ranks, problem, x.T, x, 1, kernels, x=x, threads=2)
    assert_product(x.T, x, d)


@pytest.mark.parametrize("what", ["a list", "three dimensions", "another shape"])
def test_what_is_no_chunk_is_refused(make_peers, what):
    ranks, _ = make_peers()
    kernels, found = (
        Kernels(),
        {"a list": [1], "three dimensions": np.ones((10, 8, 1)), "another shape": np.ones((8, 8))},
    )
    kernels.source = lambda name, values: Source(lambda: found[what])
    x = np.random.default_rng().standard_normal((120, 8))
    with pytest.raises(EngineError, match=r"chunk \(.*\) of . is"):
        run(ranks, few_chunks(), x.T, x, 1, kernels, x=x)


def test_what_is_held_is_as_projected(make_peers, sizes):
    ranks, _ = make_peers()
    rng = np.random.default_rng()
    for by_ranks in ((True, True), (True, False)):
        with sizes(1.0, 2**20):
            problem = problem_of(rng, (96, 96, 480), "float64", by_ranks, "auto", 6)
            a, b = matrices(rng, problem)
            made, d, _ = run(ranks, problem, a, b, 2, Kernels())
            assert_product(a, b, d)
            again = plan(problem, made.participants, made.where, engine="peer")
        for job in ranks.jobs[-2:]:
            assert job.rank is None or 0 < job.held_bytes <= again.projected_bytes[f"w{job.me}"] + 4096
