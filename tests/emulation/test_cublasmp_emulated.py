"""The GPU engine on emulated libraries: the same conformance suite as on GPUs, and the order of collective calls."""

from __future__ import annotations

import gc
import sys
import threading

import devices
import numpy as np
import pytest
from conformance import conformance, make_problem
from epilog_cases import ALL, Case, run_case

from dask_distmm.layout import Layout, redistribution
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import NamedMatrix, Worker, plan
from dask_distmm.planning.cublasmp import CUBLASMP, make_tiles
from dask_distmm.planning.problem import BlockCyclic, Slab

METHODS = ["local", "allgather", "reducescatter", "allreduce", "summa"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("orders", ["CC", "FF", "CF", "FC"])
def test_methods_and_orders(make, method, nranks, orders):
    ranks, _ = make()
    conformance(ranks, method, nranks, orders=orders, own_out_chunks=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64", "complex128"])
def test_types(make, method, dtype):
    ranks, _ = make()
    conformance(ranks, method, 3, dtype)


@pytest.mark.parametrize("nranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("method", "shape"), [("allgather", (3, 5, 70)), ("summa", (88, 50, 96)), ("summa", (47, 64, 72))]
)
def test_extents_of_16_bit_types(make, method, shape, nranks):
    """Where they are not multiples of 16 bytes the library may round parts of the sums; the emulation does."""
    ranks, _ = make()
    for orders in ("CC", "FC", "FF"):
        conformance(ranks, method, nranks, "bfloat16", shape=shape, orders=orders, most_chunks=3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (1, 40, 3), (64, 1, 9), (32, 16, 64)])
def test_shapes(make, method, shape):
    ranks, _ = make()
    conformance(ranks, method, 4, shape=shape, most_chunks=3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (True, True)])
def test_chunks_that_are_tiles(make, method, transposed):
    ranks, _ = make()
    conformance(ranks, method, 2, shape=(32, 32, 32), most_chunks=1, transposed=transposed)


@pytest.mark.parametrize("method", METHODS)
def test_numpy_chunks(make, method):
    ranks, _ = make(host=True)
    conformance(ranks, method, 3, "float32")


@pytest.mark.parametrize("method", METHODS)
def test_chunks_of_participants_that_are_no_ranks(make, method):
    ranks, _ = make()
    conformance(ranks, method, 2, sources=2)


@pytest.mark.parametrize("method", METHODS)
def test_two_types(make, method):
    ranks, _ = make()
    conformance(ranks, method, 2, "float32", b_dtype="float64")


@pytest.mark.parametrize("method", METHODS[1:])
def test_hosts_without_shared_memory(make, method):
    ranks, world = make(shares_memory=False)
    conformance(ranks, method, 3)
    assert world.open["workspace"] == 0


@pytest.mark.parametrize(
    ("distributions", "method"),
    [
        ((BlockCyclic((2, 2), (8, 9)), BlockCyclic((2, 2), (9, 7)), None), "summa"),
        ((None, BlockCyclic((2, 3), (5, 4)), BlockCyclic((2, 3), (40, 4))), "summa"),
        ((None, None, BlockCyclic((4, 1), (17, 59))), "summa"),
        ((Slab(1), Slab(0), Slab(0)), "reducescatter"),
        ((Slab(1), Slab(0), Slab(1)), "reducescatter"),
        ((Slab(0), Slab(1), Slab(1)), "allgather"),
        ((BlockCyclic((4, 1), (17, 71)), None, Slab(0)), "allgather"),
    ],
)
@pytest.mark.parametrize(("orders", "dtype"), [("CC", "float64"), ("FC", "float64"), ("CF", "bfloat16")])
def test_distributions_by_hand(make, distributions, method, orders, dtype):
    ranks, _ = make()
    count = 6 if BlockCyclic((2, 3), (5, 4)) in distributions else 4
    options = {"own_out_chunks": True, "sources": 1, "distributions": distributions}
    made = conformance(ranks, "auto", count, dtype, orders=orders, **options)
    assert made.method == method or (method == "summa" and made.grid[1] == 1)
    tiles = make_tiles(made)
    for tile, asked in zip((tiles.a, tiles.b, tiles.d), distributions, strict=True):
        assert asked is None or tile.layout.as_chunks()[0] == asked.layout(tile.layout.shape, count).as_chunks()[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("orders", "conjugated"),
    [("CC", (True, False)), ("FC", (False, True)), ("CF", (True, True)), ("FF", (True, True))],
)
def test_conjugates(make, method, orders, conjugated):
    """By op C where the library transposes the operand anyway, else on the tile, never on a chunk."""
    ranks, _ = make()
    options = {"orders": orders, "conjugated": conjugated, "most_chunks": 2}
    made = conformance(ranks, method, 3 if method != "local" else 1, "complex128", **options)
    tiles = make_tiles(made)
    for tile, wanted, by_library in zip((tiles.a, tiles.b), conjugated, tiles.conjugated, strict=True):
        assert tile.conjugated + by_library == wanted
        assert by_library == (wanted and tile.order != tiles.d.order and method != "allreduce")


@pytest.mark.parametrize("operands", ["a", "b", "ab"])
@pytest.mark.parametrize("method", METHODS)
def test_operands_that_are_everywhere(make, method, operands):
    ranks, _ = make()
    made = conformance(ranks, method, 4, everywhere=operands, sources=1, own_out_chunks=True)
    if operands == "ab" and method not in ("reducescatter", "allreduce"):
        delivered = redistribution(make_tiles(made).d.layout, Layout.of_chunks(made.problem.d.chunks)).traffic(None, 4)
        assert sum(job.received_bytes for job in ranks.jobs) <= delivered.sum() * 8


@pytest.mark.parametrize(("dtype", "host"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("method", METHODS)
def test_results_on_all_ranks(make, method, host, dtype):
    """All ranks bring what they lack; the library's all-reduce leaves it there, and nothing is exchanged."""
    ranks, _ = make(host=host)
    received = []
    for replicated in (False, True):
        made = conformance(ranks, method, 3, dtype, replicated=replicated, own_out_chunks=True, seed=5)
        received.append(sum(job.received_bytes for job in ranks.jobs))
        again = plan(made.problem, made.participants, made.where, engine="cublasmp")
        assert all(job.held_bytes <= again.projected_bytes[f"w{job.me}"] for job in ranks.jobs)
        ranks.jobs.clear()
    others = 0 if method in ("local", "allreduce") else 2
    size = made.problem.m * made.problem.n * made.problem.d.itemsize
    assert received[1] - received[0] == others * size
    assert made.replicas == 3


@pytest.mark.parametrize("epilog", ["", *ALL])
def test_epilogs(make, epilog):
    ranks, _ = make()
    case = Case(epilog, beta=0.5, alpha=2.0)
    d, aux = run_case(ranks, case, "auto", 3, 1, True)
    case.aux.pop("bgrada", None)
    case.aux.pop("bgradb", None)
    case.check(d, aux)
    kernels = [x for x in gc.get_objects() if type(x).__name__ == "Kernel" and hasattr(x, "is_fused")]
    assert kernels
    assert all(kernel.is_fused for kernel in kernels)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epilog", ["gelu_aux_bias", "drelu_bgrad"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_epilogs_of_types_and_methods(make, method, epilog, dtype):
    ranks, _ = make()
    case = Case(epilog, dtype, bias_axis=0, bias="row")
    case.check(*run_case(ranks, case, method, 4, 0, False))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bias", ["row", "column"])
@pytest.mark.parametrize("epilog", ["", "relu", "gelu", "bias", "relu_bias", "gelu_bias"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_library_does_itself(make, method, bias, epilog, dtype):
    """Where it can; a bias of the other axis, and other methods, go by the engine's own kernel."""
    ranks, world = make()
    case = Case(epilog, dtype, bias=bias, alpha=-1.5)
    case.check(*run_case(ranks, case, method, 3, 1, False, amax=False))
    name = CUBLASMP.native_epilog(ranks.jobs[-1].plan)
    kinds = set(world.epilogs)
    if not epilog:
        # SUMMA returns products of 16-bit matrices of odd extents before they are rounded.
        assert name == "" or method == "local" or (method, dtype) == ("summa", "bfloat16")
    elif epilog == "relu" and method in ("allgather", "reducescatter"):
        assert name == epilog
    elif dtype == "bfloat16" and method == "allgather":
        assert name is None
    elif epilog == "gelu" and method in ("allgather", "reducescatter"):
        assert name == epilog
    elif method in ("local", "summa", "allreduce"):
        assert name is None
    assert kinds <= {name.upper() if name else "", "ALLREDUCE"}


def test_the_bias_decides_which_way_is_cheaper():
    """All-gather of A into columns adds a value for each column, of B into rows a value for each row."""
    sizes = ((2048,) * 4, (8192,)), ((8192,), (2048,) * 4)
    for shape, grid in (((1, 8192), (1, 4, 1)), ((8192, 1), (4, 1, 1))):
        extra = NamedMatrix("bias", tuple((n,) for n in shape), "float32")
        problem = make_problem(
            *sizes, "float32", formula=Formula(epilog="relu_bias"), extras=(extra,), method="allgather"
        )
        made = plan(problem, [Worker(f"w{i}") for i in range(4)], engine="cublasmp")
        assert made.grid == grid
        assert CUBLASMP.native_epilog(made) == "relu_bias"
        assert "by cuBLASMp's epilog RELU_BIAS" in repr(made)


def test_epilog_of_numpy_chunks(make):
    ranks, _ = make(host=True)
    case = Case("relu_aux_bias", "float32", beta=-1.0)
    case.check(*run_case(ranks, case, "allgather", 2, 1, True))


def test_a_run_that_is_over_is_freed_at_once(make):
    make()[0].check_that_runs_are_freed()


def test_what_is_made_is_kept_and_freed(make):
    """Groups are used again; closing them on all ranks at once leaves nothing."""
    ranks, world = make()
    for method in ("allgather", "reducescatter", "summa", "allgather"):
        conformance(ranks, method, 4, shape=(16, 16, 16), seed=1)
    assert world.open["communicator"] % 4 == 0
    groups = sorted({number for engine in ranks.engines.values() for number in engine.groups})
    for number in groups:
        threads = [
            threading.Thread(target=engine.release, args=(number,))
            for engine in ranks.engines.values()
            if number in engine.groups
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    assert not {kind: count for kind, count in world.open.items() if count}


@pytest.mark.parametrize("size", [64, 67])
@pytest.mark.parametrize(
    ("method", "dtype"), [("allgather", "float64"), ("allgather", "bfloat16"), ("summa", "bfloat16")]
)
def test_what_is_held_is_counted(make, method, dtype, size):
    ranks, _ = make()
    made = conformance(ranks, method, 2, dtype, shape=(size, size, size), most_chunks=1)
    again = plan(made.problem, made.participants, made.where, engine="cublasmp")
    for job in ranks.jobs:
        assert 0 < job.held_bytes <= again.projected_bytes[f"w{job.me}"]


def test_a_rank_without_room_stops_all_before_the_collective(make, monkeypatch):
    ranks, world = make()
    from dask_distmm.engines.cublasmp import Group
    from dask_distmm.errors import EngineError

    real = Group.allocate

    def allocate(self, size):
        if self.comm.rank == 1:
            raise sys.modules["cupy"].cuda.memory.OutOfMemoryError("full")
        return real(self, size)

    monkeypatch.setattr(Group, "allocate", allocate)
    with pytest.raises(EngineError, match=r"w\d: no room for cuBLASMp's workspace"):
        conformance(ranks, "allgather", 3)
    assert not any(call[1] == "matmul" for call in world.calls)
    monkeypatch.setattr(Group, "allocate", real)
    conformance(ranks, "allgather", 3)


@pytest.mark.parametrize("method", ["allgather", "summa"])
def test_a_run_that_is_ended_inside_of_the_library_goes_through_on_all_ranks(make, monkeypatch, method):
    """Nobody leaves before the others, and the communicator is good for the next run."""
    ranks, world = make()
    from dask_distmm.engines.cublasmp import Group
    from dask_distmm.errors import EngineError

    real = Group.multiply

    def multiply(self, *arguments, **options):
        for job in ranks.jobs:
            job.abort(EngineError("it was cancelled"))
        real(self, *arguments, **options)

    monkeypatch.setattr(Group, "multiply", multiply)
    with pytest.raises(EngineError, match="it was cancelled"):
        conformance(ranks, method, 3)
    assert sum(call[1] == "matmul" for call in world.calls) == 3
    assert not any(job.timings.get("work") is None for job in ranks.jobs)
    monkeypatch.setattr(Group, "multiply", real)
    ranks.jobs.clear()
    conformance(ranks, method, 3)


def test_old_libraries_are_refused_with_the_command(make, monkeypatch):
    from dask_distmm.errors import EngineError

    ranks, _ = make()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0.0")
    assert ranks.module.ENGINE.versions()["nccl"] == "2.30.7"
    monkeypatch.setattr(sys.modules["nvmath.bindings"].cublasMp, "get_version", lambda: 900)
    with pytest.raises(EngineError, match=r"NCCL 2.30.7 and cuBLASMp 0.9.0 were found.*pip install.*cu13"):
        ranks.module.ENGINE.versions()


def test_poison_is_poison():
    assert np.isnan(devices.empty((2, 2))).all()
