"""The engine that pulls, on emulated devices: the conformance suite, little room, memory that comes and goes."""

from __future__ import annotations

import collections
import gc
import itertools
import sys
import threading
import types

import dask
import devices
import numpy as np
import pytest
from conformance import assert_product, conformance, make_problem, random_chunks, random_matrix, run_jobs
from epilog_cases import Case, run_case
from narrow_cases import PAIRS
from test_narrow_emulated import run_narrow

from dask_distmm.errors import EngineError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning import ENGINES, Worker, plan
from dask_distmm.planning import schedule as block_schedule
from dask_distmm.planning import schedule as schedules
from dask_distmm.planning.footprint import operand_needs
from dask_distmm.planning.problem import BlockCyclic, Slab

METHODS = ["local", "allgather", "reducescatter", "allreduce", "summa"]


@pytest.fixture
def tight(monkeypatch):
    """Little room for buffers, so that panels are narrow; `cut` says what goes if that is not enough."""

    def set_to(size, cut="depth"):
        monkeypatch.setattr(schedules, "_LEAST_DEPTH", 16 if cut == "depth" else 10**6)
        monkeypatch.setattr(schedules, "_LEAST_WIDTH", 8)
        monkeypatch.setattr(schedules, "_LEAST_BLOCK", 8)
        monkeypatch.setattr(schedules, "_LEAST_ROWS", 4)
        return dask.config.set({"distmm.peer.buffer-bytes": size})

    return set_to


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("nranks", "orders"), [(1, "CF"), (2, "CC"), (3, "FF"), (4, "FC"), (6, "CC")])
def test_methods_and_orders(make_peers, method, nranks, orders):
    ranks, world = make_peers()
    conformance(ranks, method, nranks, orders=orders, own_out_chunks=True)
    # The one rank of "local" may happen to have it all.
    assert nranks == 1 or method == "local" or world.memory.most_mapped


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("size", "cut", "dtype"),
    [
        (2**14, "depth", "float64"),
        (2**12, "depth", "float64"),
        (2**13, "rows", "bfloat16"),
        (2**12, "depth", "bfloat16"),
    ],
)
def test_little_room_for_buffers(make_peers, tight, method, size, cut, dtype):
    ranks, _ = make_peers()
    with tight(size, cut):
        made = conformance(ranks, method, 3, dtype, own_out_chunks=True)
    schedule = schedules.block_schedules(made)[0]
    if method == "local" and not schedule.in_place[schedule.stationary]:
        assert len(schedule.depth if cut == "depth" and dtype == "float64" else schedule.parts) > 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex128"])
def test_types(make_peers, method, dtype):
    ranks, _ = make_peers()
    conformance(ranks, method, 3, dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (1, 40, 3)])
def test_shapes(make_peers, method, shape):
    ranks, _ = make_peers()
    conformance(ranks, method, 4, shape=shape, most_chunks=3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("transposed", [(False, False), (True, False)])
def test_chunks_that_are_used_as_they_lie(make_peers, method, transposed):
    ranks, _ = make_peers()
    conformance(ranks, method, 2, shape=(32, 32, 32), most_chunks=1, transposed=transposed)


@pytest.mark.parametrize("method", METHODS)
def test_numpy_chunks_of_two_types(make_peers, method):
    ranks, _ = make_peers(host=True)
    conformance(ranks, method, 3, "float32", b_dtype="float64")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("nranks", "orders"), [(1, "CF"), (2, "CC"), (3, "FF"), (4, "FC")])
@pytest.mark.parametrize("size", [2**12, 2**14, 2**30])
def test_operands_in_host_memory(make_peers, tight, method, nranks, orders, size):
    ranks, _ = make_peers(host=True)
    ranks.from_host = True
    with tight(size):
        conformance(ranks, method, nranks, orders=orders, own_out_chunks=True)
    uploaded = {key[0] for job in ranks.jobs for key, x in job.chunks.items() if isinstance(x, devices.ndarray)}
    assert not uploaded & {"a", "b"}


@pytest.mark.parametrize(
    ("dtype", "b_dtype"),
    [("float32", "float64"), ("float16", None), ("bfloat16", None), ("complex64", None), ("complex128", "float64")],
)
@pytest.mark.parametrize("method", METHODS)
def test_types_in_host_memory(make_peers, tight, method, dtype, b_dtype):
    ranks, _ = make_peers(host=True)
    ranks.from_host = True
    with tight(2**13):
        conformance(ranks, method, 3, dtype, b_dtype=b_dtype)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (1, 40, 3), (64, 1, 9), (96, 80, 112)])
def test_shapes_in_host_memory(make_peers, shape, transposed):
    ranks, _ = make_peers(host=True)
    ranks.from_host = True
    conformance(ranks, "summa", 4, shape=shape, most_chunks=3, transposed=transposed)


@pytest.mark.parametrize("method", METHODS)
def test_memory_that_can_not_be_exported_is_copied_once(make_peers, method):
    ranks, world = make_peers()
    world.memory.not_exportable.update(["w0", "w2"])
    conformance(ranks, method, 3)


@pytest.mark.parametrize("method", METHODS)
def test_memory_that_ucx_maps_is_not_mapped(make_peers, monkeypatch, method):
    """The driver lets one library of a process map an allocation; UCX may have those that chunks lie in."""
    ranks, world = make_peers()
    module, runtime = sys.modules["dask_distmm.engines.peer.memory"], sys.modules["cupy"].cuda.runtime
    monkeypatch.setattr(module, "maps_for_itself", lambda address: address in ("w0", "w2"))
    real = runtime.ipcOpenMemHandle

    def open_handle(handle):
        if handle[:2] in (b"w0", b"w2") and handle.rstrip(b"\0").decode() in world.memory.pooled:
            raise runtime.CUDARuntimeError("cudaErrorAlreadyMapped: resource already mapped")
        return real(handle)

    monkeypatch.setattr(runtime, "ipcOpenMemHandle", open_handle)
    conformance(ranks, method, 3)
    conformance(ranks, method, 3, "float16", own_out_chunks=True)


@pytest.mark.parametrize(
    ("address", "transports", "maps"),
    [
        ("tcp://127.0.0.1:1", "all", False),
        ("ucx://127.0.0.1:1", "all", True),
        ("ucx://127.0.0.1:1", "tcp,cuda_copy,cuda_ipc", True),
        ("ucx://127.0.0.1:1", "tcp,cuda_copy", False),
        ("ucx://127.0.0.1:1", "^cuda_ipc", False),
        ("ucx://127.0.0.1:1", "^ib", True),
        ("ucx://127.0.0.1:1", None, True),
    ],
)
def test_what_ucx_may_map(peer_engine, monkeypatch, address, transports, maps):
    config = {} if transports is None else {"TLS": transports}
    monkeypatch.setitem(sys.modules, "ucxx", types.SimpleNamespace(get_config=lambda: config))
    maps_for_itself = sys.modules["dask_distmm.engines.peer.memory"].maps_for_itself
    maps_for_itself.cache_clear()
    assert maps_for_itself(address) is maps


@pytest.mark.parametrize("method", ["local", "allgather", "reducescatter"])
def test_participants_that_are_no_ranks(make_peers, method):
    """One offers its memory, one has none to offer: its chunks come over Dask's comms."""
    ranks, _ = make_peers()
    ranks.silent.add("s1")
    conformance(ranks, method, 2, sources=2)
    conformance(ranks, method, 2, "float32", b_dtype="float64", sources=2)


@pytest.mark.parametrize(
    "distributions", [(Slab(0), None, Slab(0)), (BlockCyclic((2, 2), (34, 36)), BlockCyclic((2, 2), (36, 30)), None)]
)
def test_distributions_by_hand(make_peers, distributions):
    ranks, _ = make_peers()
    conformance(ranks, "auto", 4, own_out_chunks=True, distributions=distributions)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("epilog", "dtype"), [("gelu_aux_bias", "float32"), ("drelu_bgrad", "bfloat16")])
def test_epilogs(make_peers, method, epilog, dtype):
    ranks, _ = make_peers()
    case = Case(epilog, dtype, alpha=2.0, beta=0.5, bias_axis=0, bias="row")
    case.check(*run_case(ranks, case, method, 3, 1, True))


@pytest.mark.parametrize("method", ["allgather", "reducescatter"])
@pytest.mark.parametrize("bias", ["row", "column"])
@pytest.mark.parametrize("epilog", ["", "relu", "gelu", "bias", "relu_bias", "gelu_bias"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_library_does_itself(make_peers, method, bias, epilog, dtype):
    """Where it is exact: a bias by columns, no 16-bit types, no gelu of float64, no sums of several products."""
    ranks, world = make_peers()
    case = Case(epilog, dtype, bias=bias, alpha=-1.5)
    del world.epilogs[:]
    case.check(*run_case(ranks, case, method, 3, 1, False, amax=False))
    made = ranks.jobs[-1].plan
    name = schedules.native(made)
    exact = dtype == "float32" or (dtype == "float64" and "gelu" not in epilog)
    possible = made.grid[2] == 1 and (not epilog or (exact and ("bias" not in epilog or bias == "column")))
    assert (name == epilog) if possible else name is None
    assert set(world.epilogs) == {epilog.upper() if possible else ""}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_long_sums_of_16_bit_types_are_cut(make_peers, monkeypatch, method, dtype):
    """And added up in float32."""
    monkeypatch.setattr(schedules, "_MOST_DEPTH", 32)
    monkeypatch.setattr(schedules, "_LEAST_BLOCK", 16)
    ranks, _ = make_peers()
    made = conformance(ranks, method, 3, dtype, shape=(64, 48, 300), own_out_chunks=True)
    depths = [
        end - start for schedule in schedules.block_schedules(made) for start, end in itertools.pairwise(schedule.depth)
    ]
    assert (max(depths) <= 32) == (dtype != "float32")
    assert schedules.sums_in(made) == "float32"


@pytest.mark.parametrize("epilog", ["relu_bias", "gelu"])
def test_sums_of_several_products_are_finished_by_the_kernel(make_peers, tight, epilog):
    ranks, world = make_peers()
    case = Case(epilog, "float32", alpha=-1.5)
    for _ in range(10):  # Chunks are drawn: a sum can be one product, which the library finishes.
        del world.epilogs[:]
        with tight(2**10):
            case.check(*run_case(ranks, case, "allgather", 3, 1, False, amax=False))
        depths = [len(schedule.depth) for schedule in schedules.block_schedules(ranks.jobs[-1].plan)]
        if min(depths) > 2:
            break
    assert min(depths) > 2
    assert set(world.epilogs) == {""}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("orders", ["CC", "FF"])
def test_fp8(make_peers, tight, method, orders):
    ranks, world = make_peers()
    del world.calls[:]
    with tight(2**13):
        run_narrow(ranks, method, 3, PAIRS[0], "bfloat16", orders=orders)
    assert {call[1] for call in world.calls} == {"lt"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "nranks", "orders"), [("float16", 2, "CC"), ("float16", 3, "FC"), ("float64", 4, "FF")]
)
def test_extents_that_gemms_are_slow_with_are_padded(make_peers, monkeypatch, tight, method, dtype, nranks, orders):
    monkeypatch.setattr(schedules, "_LEAST_PADDED", 0)
    products = sys.modules["dask_distmm.engines.peer.products"]
    shapes = []

    class Noted(products.Gemm):
        def __init__(self, shape, *args, **kwargs):
            shapes.append(shape[:3])
            super().__init__(shape, *args, **kwargs)

    monkeypatch.setattr(products, "Gemm", Noted)
    for size in (2**11, 2**24):
        with tight(size):
            conformance(make_peers()[0], method, nranks, dtype, orders=orders, own_out_chunks=True)
    assert shapes
    assert not any(extent % 16 for shape in shapes for extent in shape)


@pytest.mark.parametrize("epilog", ["", "bias", "gelu_aux_bias", "dgelu"])
def test_formulas_of_padded_products(make_peers, monkeypatch, epilog):
    monkeypatch.setattr(schedules, "_LEAST_PADDED", 0)
    case = Case(epilog, "float16", alpha=1.5)
    case.check(*run_case(make_peers()[0], case, "allgather", 3, 1, False, amax=False))


@pytest.mark.parametrize("pair", PAIRS[1:])
def test_fp8_pairs(make_peers, pair):
    ranks, _ = make_peers(host=pair == PAIRS[1])
    run_narrow(ranks, "auto", 3, pair, "float8_e4m3fn", lazy=True, sources=1)


def test_fp8_on_old_gpus_says_what_is_needed(make_peers):
    ranks, world = make_peers()
    world.compute_capability = "80"
    with pytest.raises(EngineError, match=r"FP8 needs compute capability 8\.9"):
        run_narrow(ranks, "allgather", 2, PAIRS[0], "float32")


def test_a_run_that_is_over_is_freed_at_once(make_peers):
    make_peers()[0].check_that_runs_are_freed()


@pytest.mark.parametrize("method", METHODS)
def test_what_is_held_is_as_projected(make_peers, tight, method):
    ranks, _ = make_peers()
    with tight(2**16):
        made = conformance(ranks, method, 2, shape=(64, 64, 64), most_chunks=3)
        again = plan(made.problem, made.participants, made.where, engine="peer")
    for job in [job for job in ranks.jobs if job.rank is not None]:
        assert 0 < job.held_bytes <= again.projected_bytes[f"w{job.me}"] + 4096  # rows are padded


def test_what_the_exporter_has_freed_is_unmapped(make_peers):
    ranks, world = make_peers()
    counts = []
    for _ in range(3):
        conformance(ranks, "allgather", 3, seed=5)
        counts.append(len(world.memory.mapped))
        # As if all pools were emptied: what comes next lies in other allocations, at other addresses or not.
        for process in ("w0", "w1", "w2"):
            world.memory.drop(process)
        ranks.placed.clear()
    assert counts[0] == counts[1] == counts[2] > 0


def test_what_a_panel_has_of_several_is_pulled_from_all_of_them_at_the_same_time(make_peers, monkeypatch):
    """Ranks that pull from one after the other meet at the same one sooner or later, and stay together."""
    ranks, _ = make_peers()
    runtime, used = sys.modules["cupy"].cuda.runtime, set()
    for name in ("memcpyAsync", "memcpy2DAsync"):
        real = getattr(runtime, name)

        def copy(*arguments, real=real):
            used.add(arguments[-1])
            real(*arguments)

        monkeypatch.setattr(runtime, name, copy)
    n, count = 96, 4
    columns = (n,), (n // count,) * count
    problem = make_problem(columns, columns, "float64", method="allgather", array="cupy")
    where = np.arange(count, dtype=np.int32)
    made = plan(problem, [Worker(f"w{i}") for i in range(count)], {"a": where, "b": where}, engine="peer")
    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, n, n))
    chunks = {(op, i): x for op, v in (("a", a), ("b", b)) for i, x in enumerate(np.hsplit(v, count))}
    found = run_jobs(ranks, made, chunks)
    assert_product(a, b, np.hstack([found["", i] for i in range(count)]))
    pulling = [{stream.ptr for stream in engine.pulls(count - 1)} for engine in ranks.engines.values()]
    assert [len(streams) for streams in pulling] == [count - 1] * count
    assert all(streams <= used for streams in pulling)
    # A little was read before that, so that links are awake.
    assert {engine.looking.ptr for engine in ranks.engines.values()} <= used


@pytest.mark.parametrize("method", ["local", "allgather", "reducescatter"])
def test_what_is_multiplied_before_the_vote_is_over_when_a_run_is_given_up(make_peers, monkeypatch, method):
    """Its memory goes back to the pool then, and to somebody else."""
    ranks, _ = make_peers()
    kind, looked_at = sys.modules["dask_distmm.engines.peer.engine"].PeerJob, []

    def accept(self, offers):
        if self.early is not None:
            blocks = [np.asarray(x).view(np.uint8) for name, x in self.arrays.items() if name[:2] in ("d.", "su")]
            assert self.engine.stream.queue, "nobody waits for it before"
            self.abort(EngineError("not all voted for it"))
            looked_at.append([block.copy() for block in blocks])
            self.engine.stream.synchronize()
            assert all((one == other).all() for one, other in zip(blocks, looked_at[-1], strict=True))
            assert any((block != 0xFF).any() for block in blocks)
        accept_really(self, offers)

    accept_really = kind.accept
    monkeypatch.setattr(kind, "accept", accept)

    def until_a_rank_has_at_home_what_it_begins_with():
        while not looked_at:
            conformance(ranks, method, 2, "float64", shape=(64, 48, 56), most_chunks=2)

    with pytest.raises(EngineError, match="not all voted"):
        until_a_rank_has_at_home_what_it_begins_with()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("method", ["local", "allgather", "summa", "reducescatter"])
def test_first_products_that_ran_before_are_a_graph(make_peers, monkeypatch, method, dtype):
    ranks, _ = make_peers()
    monkeypatch.setattr(sys.modules["dask_distmm.engines.peer.products"], "_LEAST_SECONDS", 1.0)
    nranks, captured = (1 if method == "local" else 2), 0
    for seed in range(30):
        for _ in range(2):
            conformance(ranks, method, nranks, dtype, shape=(64, 48, 56), most_chunks=2, seed=seed)
            captured += sum(job.first is not None for job in ranks.jobs[-nranks:])
        if captured > 2:
            return
    raise AssertionError(f"{captured} of 30 problems began with what a rank has at home")


@pytest.mark.parametrize(("least", "most", "begun"), [(0.0, 1.0, True), (1.0, 5.0, False), (0.0, 1e-12, False)])
def test_what_takes_too_little_or_too_much_is_not_begun_before_the_vote(make_peers, monkeypatch, least, most, begun):
    ranks, _ = make_peers()
    module = sys.modules["dask_distmm.engines.peer.products"]
    monkeypatch.setattr(module, "_LEAST_SECONDS", least)
    monkeypatch.setattr(module, "_MOST_SECONDS", most)
    for again in (False, True):
        conformance(ranks, "local", 1, seed=5)
        assert (ranks.jobs[-1].early is not None) == begun
        assert ("ahead" in ranks.jobs[-1].timings) == begun
        # Products that have run before are captured instead.
        assert not again or (ranks.jobs[-1].first is not None) == (not begun and most == 5.0)


def test_a_job_that_is_dropped_has_its_products_over_with(make_peers, monkeypatch):
    ranks, _ = make_peers()
    kind = sys.modules["dask_distmm.engines.peer.engine"].PeerJob

    def fail(self, offers):
        raise ZeroDivisionError("before it began")

    with monkeypatch.context() as patch:
        patch.setattr(kind, "accept", fail)
        patch.setattr(kind, "abort", lambda self, error: None)
        with pytest.raises(ZeroDivisionError, match="before it began"):
            conformance(ranks, "local", 1, seed=5)
    stream = ranks.engines["w0"].stream
    assert stream.queue
    for job in ranks.jobs:
        job.comm.jobs = None
        del job
    ranks.jobs.clear()
    gc.collect()
    assert not stream.queue


def test_only_so_much_stays_mapped(make_peers, monkeypatch):
    ranks, world = make_peers()
    monkeypatch.setattr(sys.modules["dask_distmm.engines.peer.memory"], "_MOST_MAPPED", 0)
    conformance(ranks, "allgather", 3)
    assert not world.memory.mapped
    conformance(ranks, "allgather", 3)


@pytest.mark.parametrize("method", ["allgather", "reducescatter", "allreduce"])
def test_a_rank_that_fails_ends_the_run_for_all(make_peers, monkeypatch, method):
    """The others wait for its sums at most until they are told."""
    ranks, _ = make_peers()
    kind = sys.modules["dask_distmm.engines.peer.products"].PeerJob
    real = kind._multiply

    def fail(self, products):
        if self.rank == 1:
            raise ZeroDivisionError("in the middle")
        real(self, products)

    monkeypatch.setattr(kind, "_multiply", fail)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        conformance(ranks, method, 3)
    monkeypatch.setattr(kind, "_multiply", real)
    conformance(ranks, method, 3)


def test_products_are_launched_as_soon_as_their_own_pulls_are(make_peers, monkeypatch):
    """Not when all pulls are: the host takes as long for these as GPUs do."""
    ranks, _ = make_peers()
    kind, launched = sys.modules["dask_distmm.engines.peer.products"].PeerJob, collections.defaultdict(list)

    def log(name):
        real = getattr(kind, name)

        def call(self, what):
            # Products that were begun before the vote are not launched again.
            launched[id(self)] += [what] if name == "_issue" or what.works else []
            return real(self, what)

        monkeypatch.setattr(kind, name, call)

    log("_issue")
    log("_multiply")
    sizes = ((20,) * 4,) * 2
    problem = make_problem(sizes, sizes, method="allgather")
    where = np.tile(np.arange(4) % 2, 4).astype(np.int32)
    made = plan(problem, [Worker(f"w{i}") for i in range(2)], {"a": where, "b": where}, engine="peer")
    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, 80, 80))
    parts = {(i, j): (slice(20 * i, 20 * i + 20), slice(20 * j, 20 * j + 20)) for i in range(4) for j in range(4)}
    chunks = {(op, 4 * i + j): x[at].copy() for op, x in (("a", a), ("b", b)) for (i, j), at in parts.items()}
    found = run_jobs(ranks, made, chunks)
    assert_product(a, b, np.block([[found["", 4 * i + j] for j in range(4)] for i in range(4)]))
    for job in ranks.jobs[-2:]:
        loaded, products, between = set(), 0, 0
        for what in launched[id(job)]:
            if hasattr(what, "place"):
                loaded.add(what)
                # Pieces of what stays come one by one.
                between += products > 0 and what.place.name.endswith(".0")
                continue
            products += 1
            before = [step for step in job.steps[: job.steps.index(what)] if hasattr(step, "place")]
            needed = {x.name for x in what.call.arguments}
            assert {load for load in before if load.place.name in needed} <= loaded
        assert between, "all pulls of the first step came before its products"


@pytest.mark.parametrize("when", ["before", "after", "unmapped"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_rank_that_is_gone_is_missed_where_it_was_needed(make_peers, monkeypatch, when, dtype):
    """Its chunks are nobody's. Others lack those that it had to add to, unless it has done so; all else is right."""
    ranks, _ = make_peers()
    kind, runtime = sys.modules["dask_distmm.engines.peer.engine"].PeerJob, sys.modules["cupy"].cuda.runtime
    execute, open_handle, dead = kind.execute, runtime.ipcOpenMemHandle, threading.Event()

    def die(self):
        if self.rank == 1:
            if when != "before":
                execute(self)
            dead.set()
            for job in ranks.jobs[-4:]:
                job.lose(self.me)
            return {}
        if self.rank is not None:
            dead.wait(120)
        return execute(self)

    def open_of_the_living(handle):
        if dead.is_set() and when == "unmapped":
            raise runtime.CUDARuntimeError("cudaErrorInvalidResourceHandle")
        return open_handle(handle)

    monkeypatch.setattr(kind, "execute", die)
    monkeypatch.setattr(runtime, "ipcOpenMemHandle", open_of_the_living)
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(shape).astype(dtype_from_name(dtype)) for shape in ((60, 40), (40, 30)))
    # D's chunks go across the ranks' parts: the second rank adds to some that others own.
    problem = make_problem(
        ((30, 30), (40,)), ((40,), (15, 15)), dtype, method="allgather", out_chunks=((28, 4, 28), (30,)),
        formula=Formula(epilog="relu_aux"),
    )  # fmt: skip
    chunks = {("a", 0): a[:30], ("a", 1): a[30:], ("b", 0): b[:, :15], ("b", 1): b[:, 15:]}
    # Nothing of a rank's is mapped before its part of D is needed.
    workers, elsewhere = [Worker(f"w{i}") for i in range(3)], np.full(2, 3, np.int32)
    made = plan(problem, workers, dict.fromkeys("ab", elsewhere), sources=[Worker("s")], engine="peer")
    chunks = {key: np.ascontiguousarray(chunk) for key, chunk in chunks.items()}
    found = run_jobs(ranks, made, chunks)
    assert made.owners.tolist() == [0, 1, 2]
    assert all(1 in dict(made.final_holders(i)) for i in range(3))
    missing = {job.rank: job.missing for job in ranks.jobs[-4:] if job.missing}
    assert missing == ({} if when == "after" else {0: [0], 2: [2]})
    there = {0, 2} if when == "after" else set()
    assert set(found) == {(name, i) for name in ("", "relu_aux") for i in there}
    for index in there:
        r0, r1, _, _ = made.chunk_rect(index)
        x = a[r0:r1].astype(float) @ b.astype(float)
        assert_product(a[r0:r1], b, np.where(found["relu_aux", index], found["", index], x).astype(a.dtype))
        assert (np.asarray(found["", index] > 0) == found["relu_aux", index]).all()


def test_a_rank_that_never_finishes_its_sums_is_named(make_peers, monkeypatch):
    ranks, _ = make_peers()
    kind = sys.modules["dask_distmm.engines.peer.products"].PeerJob
    real = kind._publish_step
    monkeypatch.setattr(kind, "_publish_step", lambda self, step: self.rank == 2 or real(self, step))
    with (
        dask.config.set({"distmm.timeouts.transfer": "0.3s"}),
        pytest.raises(EngineError, match=r"worker w\d has not finished its sums for"),
    ):
        conformance(ranks, "reducescatter", 3)


def test_who_can_reach_whom_is_told(make_peers, monkeypatch):
    ranks, world = make_peers()
    engine = ranks.module.PeerEngine()
    world.devices, world.reached = ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"], ["0000:03:00.0"]
    assert engine.links() == ("0000:01:00.0", ("0000:03:00.0",))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    assert engine.versions() == {"cuda": "13000", "nvmath": "1.0"}
    # An allocator whose memory can't be exported is no reason: results are put elsewhere.
    world.memory.not_exportable.add(world.memory.process)
    assert engine.versions() == {"cuda": "13000", "nvmath": "1.0"}
    world.devices = []
    with pytest.raises(EngineError, match="no NVIDIA GPU is visible"):
        engine.versions()
    world.devices = ["0000:01:00.0"]
    driver = sys.modules["cuda.bindings.driver"]
    monkeypatch.setattr(driver, "cuPointerGetAttribute", lambda name, pointer: (801, None))
    with pytest.raises(EngineError, match="does not let other processes map"):
        engine.versions()


def test_memory_that_can_not_be_mapped_says_what_to_do(make_peers, monkeypatch):
    ranks, _ = make_peers()
    runtime = sys.modules["cupy"].cuda.runtime

    def refuse(handle):
        raise runtime.CUDARuntimeError("cudaErrorMapBufferObjectFailed")

    monkeypatch.setattr(runtime, "ipcOpenMemHandle", refuse)
    with pytest.raises(EngineError, match=r"can't be mapped \(cudaErrorMapBufferObjectFailed\).*engine='cublasmp'"):
        conformance(ranks, "allgather", 3, seed=3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("orders", ["CC", "FF"])
def test_conjugates(make_peers, method, orders):
    ranks, _ = make_peers()
    conformance(ranks, method, 3, "complex128", conjugated=(True, True), orders=orders)
    conformance(ranks, method, 2, "complex64", conjugated=(False, True), orders=orders, shape=(32,) * 3, most_chunks=1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("everywhere", "replicated"), [("a", False), ("b", True)])
def test_replicas(make_peers, method, everywhere, replicated):
    """All of D is fetched over Dask's comms afterwards: that is no part of the engine's."""
    ranks, _ = make_peers()
    conformance(ranks, method, 3, everywhere=everywhere, replicated=replicated, own_out_chunks=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64"])
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_one_triangle_of_a_gram_matrix(make_peers, monkeypatch, nranks, dtype, method):
    monkeypatch.setattr(block_schedule, "_LEAST_SQUARE", 16)
    monkeypatch.setattr(block_schedule, "_NARROWEST", 8)
    monkeypatch.setattr(schedules, "_LEAST_BLOCK", 8)
    ranks, _ = make_peers()
    rng, n, k = np.random.default_rng(), 75, 90
    x = random_matrix(rng, (k, n), dtype_from_name(dtype), "C")
    rows, cols = random_chunks(rng, k, 4), random_chunks(rng, n, 4)
    conjugated = np.dtype(x.dtype).kind == "c"
    problem = make_problem(
        (cols, rows), (rows, cols), dtype, method=method, arrays=("x", "x"), transposed=(True, False),
        conjugated=(conjugated, False), out_chunks=(random_chunks(rng, n, 3), random_chunks(rng, n, 3)),
    )  # fmt: skip
    where = rng.integers(0, nranks, (len(rows), len(cols))).astype(np.int32)
    homes = {"a": where.T.ravel(), "b": where.ravel()}
    made = plan(problem, [Worker(f"w{index}") for index in range(nranks)], homes, engine="peer")
    parts = {
        (i, j): np.ascontiguousarray(part)
        for i, strip in enumerate(np.split(x, np.cumsum(rows)[:-1]))
        for j, part in enumerate(np.split(strip, np.cumsum(cols)[:-1], axis=1))
    }
    chunks = {("b", i * len(cols) + j): part for (i, j), part in parts.items()}
    chunks |= {("a", j * len(rows) + i): part.T for (i, j), part in parts.items()}
    found = run_jobs(ranks, made, chunks)
    across = len(problem.d.chunks[1])
    d = np.block([[found["", i * across + j] for j in range(across)] for i in range(len(problem.d.chunks[0]))])
    assert_product(x.conj().T if conjugated else x.T, x, d)
    halved = [block_schedule.square_on_diagonal(made, rank, None) is not None for rank in range(len(made.ranks))]
    assert any(halved) or made.grid[:2] != (1, 1)


# Ranks on several islands: GPUs that read each other's memory, and none of the others'


def exchanged(ranks):
    """Whether the ranks of the last run have chunks by NCCL; those that ranks have come in no other way."""
    count = len(ranks.jobs[-1].plan.participants)
    jobs = [job for job in ranks.jobs[-count:] if job.rank is not None]
    asked = {peer for job in jobs for peer, kind, _ in job.comm.requests if kind == "input"}
    assert not asked & {*jobs[0].plan.ranks}
    return any(job.exchange.imported is not None for job in jobs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("nranks", "islands", "orders"), [(2, 2, "CF"), (4, 2, "CC"), (3, 3, "FC"), (5, 2, "FF")])
def test_islands(make_peers, method, nranks, islands, orders):
    ranks, _ = make_peers()
    ranks.islands, came = islands, False
    for _ in range(3):
        conformance(ranks, method, nranks, orders=orders, own_out_chunks=True)
        came = came or exchanged(ranks)
    # Chunks are anywhere.
    assert came or method == "local"


@pytest.mark.parametrize("method", ["allgather", "summa", "reducescatter", "allreduce"])
@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "bfloat16", "transposed": (True, False)},
        {"dtype": "complex128", "conjugated": (True, True), "orders": "CF"},
        {"dtype": "float32", "b_dtype": "float64", "sources": 3},
        {"dtype": "float16", "everywhere": "b"},
        {"dtype": "float64", "shape": (3, 2, 5), "most_chunks": 3},
        {"dtype": "float64", "replicated": True},
    ],
    ids=str,
)
def test_islands_of_types_and_chunks(make_peers, tight, method, how):
    ranks, _ = make_peers()
    ranks.islands = 2
    with tight(2**12):
        conformance(ranks, method, 4, own_out_chunks=True, **how)


@pytest.mark.parametrize("from_host", [False, True])
def test_islands_of_numpy_chunks(make_peers, from_host):
    ranks, _ = make_peers(host=True)
    ranks.islands, ranks.from_host = 2, from_host
    for method in METHODS:
        conformance(ranks, method, 4, "float32", sources=1)
        # In host memory they are asked for.
        assert from_host or not exchanged(ranks) or method != "local"


@pytest.mark.parametrize("method", ["summa", "allreduce"])
@pytest.mark.parametrize("epilog", ["relu_aux_bias", "dgelu_bgrad"])
def test_islands_of_formulas(make_peers, method, epilog):
    ranks, _ = make_peers()
    ranks.islands = 2
    case = Case(epilog, "float32", alpha=1.5)
    case.check(*run_case(ranks, case, method, 4, 1, True, amax=False))
    run_narrow(ranks, method, 3, PAIRS[0], "bfloat16")


@pytest.mark.parametrize("method", METHODS)
def test_what_islands_hold_is_as_projected(make_peers, method):
    ranks, _ = make_peers()
    ranks.islands = 2
    for _ in range(3):
        made = conformance(ranks, method, 4, shape=(64, 64, 64), most_chunks=3)
        # As the ranks have it, who know their hosts.
        own = next(job.plan for job in ranks.jobs[::-1] if job.rank is not None)
        model = ENGINES["peer"]
        most = model.memory(own, {name: operand_needs(own, name) for name in "ab"})
        for job in [job for job in ranks.jobs[-len(own.participants) :] if job.rank is not None]:
            # Rows are padded, and chunks begin at multiples.
            assert 0 < job.held_bytes <= most[job.me] + 8192
        assert made.workers == own.workers


@pytest.mark.parametrize("method", ["allgather", "summa"])
def test_a_rank_that_fails_before_the_gate_lets_no_rank_in(make_peers, monkeypatch, method):
    ranks, world = make_peers()
    ranks.islands = 2
    kind = sys.modules["dask_distmm.engines.peer.products"].PeerJob
    execute = kind.execute

    def fail(self):
        if self.rank == 1:
            raise ZeroDivisionError("before the gate")
        return execute(self)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "execute", fail)
        with pytest.raises(ZeroDivisionError, match="before the gate"):
            conformance(ranks, method, 4, most_chunks=8)
    assert not world.open["communicator"]
    conformance(ranks, method, 4, most_chunks=8)
    assert exchanged(ranks)
    assert world.open["communicator"] == 4


def test_a_process_whose_streams_never_end_has_to(make_peers, monkeypatch):
    """What waits for a rank that is gone is on all streams: no later run would get through."""
    ranks, _ = make_peers()
    ranks.islands = 2
    module, dogs = sys.modules["dask_distmm.engines.entry"], []
    monkeypatch.setattr(module, "watchdog", lambda seconds, what: dogs.append(what))
    transport = sys.modules["dask_distmm.engines.gpu.collective"].GroupTransport
    monkeypatch.setattr(transport, "settled", lambda self: False)
    conformance(ranks, "allgather", 3)
    assert len(dogs) == 3
    assert all("a collective of which a rank is gone" in what for what in dogs)
