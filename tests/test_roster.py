"""Which engine and which workers: what the roster makes of what workers say of themselves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from conformance import make_problem

from dask_distmm import __version__
from dask_distmm.errors import EngineError, MissingEngineError, NoWorkersError, PlanError
from dask_distmm.planning import Demand, Worker, plan
from dask_distmm.planning.peer import PEER
from dask_distmm.runtime.freezing import Roster
from dask_distmm.runtime.messages import Description

GPUS = {name: {"nccl": "2.30.7"} for name in ("cublasmp", "nccl")}
GPUS |= {"peer": {"cuda": "13000"}, "numpy": {"numpy": "2"}}


def roster(*said):
    """A roster of workers that have said certain things."""
    names = [f"w{number}" for number in range(len(said))]
    workers = {
        name: SimpleNamespace(
            address=name,
            nthreads=1,
            memory_limit=10**9,
            memory=SimpleNamespace(unmanaged_old=0),
            status=SimpleNamespace(name="running"),
        )
        for name in names
    }
    found = Roster(SimpleNamespace(workers=workers, security=SimpleNamespace(require_encryption=False)))
    found._described.update((name, Description("OK", **one)) for name, one in zip(names, said, strict=True))
    return found


def gpu(number, count=4, host="h", engines=GPUS, reach=None):
    reach = [f"gpu{n}" for n in range(count) if n != number] if reach is None else reach
    links = {"peer": [f"gpu{number}", reach], "cublasmp": ["", []], "numpy": ["", []]}
    return {"version": __version__, "engines": engines, "memory": {"peer": 10**11}, "host": host, "links": links}


def cpu():
    missing = {"error": "No module named 'cupy'"}
    return gpu(0) | {"engines": {"peer": missing, "cublasmp": missing, "numpy": {"numpy": "2"}}, "links": {}}


def choose(found, engine="auto", array="cupy", wanted=None, dtype="float32", kind="product"):
    engines, workers = asyncio.run(found.choose(Demand(engine, array, (dtype,) * 3, wanted, kind=kind)))
    return engines, [worker.address for worker in workers]


def test_gpus_that_reach_each_other_have_a_choice():
    everyone = [f"w{i}" for i in range(4)]
    assert choose(roster(*map(gpu, range(4)))) == (("peer", "cublasmp"), everyone)
    assert choose(roster(*map(gpu, range(4))), "cublasmp") == (("cublasmp",), everyone)
    assert choose(roster(*map(gpu, range(4))), "peer", wanted=2) == (("peer",), ["w0", "w1"])
    # NumPy chunks go to GPUs where there are some.
    assert choose(roster(*map(gpu, range(4))), array="numpy") == (("peer", "cublasmp"), everyone)
    assert choose(roster(cpu(), cpu()), array="numpy") == (("numpy",), ["w0", "w1"])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([gpu(0), gpu(1, host="other")], "w0 is on host 'h', w1 on 'other'"),
        ([gpu(0, reach=[]), gpu(1)], r"GPU of w0 \(gpu0\) can't read the memory of that of w1 \(gpu1\)"),
        ([gpu(0), gpu(1, reach=["gpu2"])], r"GPU of w1 \(gpu1\) can't read"),
        ([gpu(0), gpu(1) | {"links": {}}], "w1 does not say which GPU"),
    ],
)
def test_others_do_not_and_asking_for_it_says_why(said, reason):
    assert choose(roster(*said)) == (("cublasmp",), ["w0", "w1"])
    without = [one | {"engines": one["engines"] | {"nccl": {"error": "no NCCL"}}} for one in said]
    with pytest.raises(EngineError, match=f"engine 'peer' is for GPUs of one host.*{reason}.*workers="):
        choose(roster(*without), "peer")
    assert choose(roster(*said), "peer", wanted=("w0",)) == (("peer",), ["w0"])
    if said[1]["links"]:
        # Products get what is on other islands by NCCL, if that is asked for.
        assert choose(roster(*said), "peer") == (("peer",), ["w0", "w1"])
        other = GPUS | {"nccl": GPUS["nccl"] | {"nccl": "2.31.0"}}
        with pytest.raises(EngineError, match="different versions of the libraries of engine 'nccl'"):
            choose(roster(said[0], said[1] | {"engines": other}), "peer")


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("array", ["cupy", "numpy"])
def test_factorizations_of_one_host_and_of_several(array, dtype):
    asked = {"array": array, "dtype": dtype, "kind": "factorization"}
    assert choose(roster(gpu(0), gpu(1)), **asked) == (("peer", "nccl"), ["w0", "w1"])
    apart = roster(gpu(0), gpu(1, host="other"))
    assert choose(apart, **asked) == (("nccl",), ["w0", "w1"])
    assert choose(apart, "nccl", **asked) == (("nccl",), ["w0", "w1"])
    with pytest.raises(EngineError, match=r"w0 is on host 'h', w1 on 'other'. Use engine='nccl', or name"):
        choose(apart, "peer", **asked)
    with pytest.raises(MissingEngineError, match="engine 'nccl' can't multiply .*; use engine='peer' or 'cublasmp'"):
        choose(apart, "nccl", array=array, dtype=dtype)
    lacking = GPUS | {"nccl": {"error": "no NCCL"}}
    without = roster(gpu(0, engines=lacking), gpu(1, host="other", engines=lacking))
    if array == "cupy":
        with pytest.raises(EngineError, match=r"for GPUs of one host.*engine='nccl'"):
            choose(without, **asked)
    else:
        assert choose(without, **asked) == (("numpy",), ["w0", "w1"])


def test_on_cpus_other_versions_are_fixed_without_the_libraries_for_gpus():
    other = cpu() | {"engines": cpu()["engines"] | {"numpy": {"numpy": "1"}}}
    with pytest.raises(EngineError, match="different versions of the libraries of engine 'numpy'") as caught:
        choose(roster(cpu(), other), array="numpy")
    assert "[cu" not in str(caught.value)
    assert "pip install" in str(caught.value)


@pytest.mark.parametrize("array", ["cupy", "numpy"])
def test_programs_run_on_gpus_that_can_not_read_each_other(array):
    apart = roster(gpu(0, reach=[]), gpu(1, reach=[]), gpu(2, host="other"), gpu(3) | {"links": {}})
    asked = {"array": array, "dtype": "float64", "kind": "program"}
    assert choose(apart, **asked) == (("peer",), ["w0", "w1", "w2", "w3"])
    assert choose(apart, "peer", **asked) == (("peer",), ["w0", "w1", "w2", "w3"])


def test_matrices_do_not_leave_a_host_where_encryption_is_required():
    found = roster(gpu(0), gpu(1, host="other"))
    found._scheduler.security.require_encryption = True
    with pytest.raises(EngineError, match=r"engine 'nccl' would send matrices between the hosts"):
        choose(found, kind="factorization")
    with pytest.raises(EngineError, match=r"engine 'peer' would send matrices between the hosts"):
        choose(found, "peer")
    demand = Demand("auto", "cupy", ("float64",) * 3, None, plaintext_nccl=True, kind="factorization")
    assert asyncio.run(found.choose(demand))[0] == ("nccl",)


def test_an_engine_that_more_workers_have_is_taken():
    lacking = GPUS | {"peer": {"error": "no cuda.bindings"}}
    found = roster(gpu(0), gpu(1), gpu(2, engines=lacking))
    assert choose(found) == (("cublasmp",), ["w0", "w1", "w2"])
    alone = GPUS | {"cublasmp": {"error": "no NCCL"}}
    assert choose(roster(gpu(0, engines=alone), gpu(1, engines=alone))) == (("peer",), ["w0", "w1"])


def test_what_is_not_there():
    with pytest.raises(MissingEngineError, match=r"no worker has engine 'peer'; w0 says: No module named 'cupy'"):
        choose(roster(cpu()), "peer")
    with pytest.raises(PlanError, match="workers=3, but the cluster has 2"):
        choose(roster(gpu(0), gpu(1)), wanted=3)
    with pytest.raises(EngineError, match="different versions of the libraries of engine 'peer'"):
        choose(roster(gpu(0), gpu(1, engines=GPUS | {"peer": {"cuda": "12090"}})), "peer")


def test_workers_that_are_named_and_can_not_take_part():
    """Those that are not there are an error; those that are paused are waited for."""
    found = roster(*[cpu()] * 12)
    with pytest.raises(PlanError, match="'gone' is not in the cluster; it has w0, w1, w10, .*, w5, 4 more"):
        choose(found, array="numpy", wanted=("w1", "gone"))
    found._scheduler.workers["w1"].status.name = "paused"
    with pytest.raises(NoWorkersError, match="workers='w1' was asked for, and that worker is paused"):
        choose(found, array="numpy", wanted=("w1",))
    allowed = set(), "workers=['nobody']"
    with pytest.raises(NoWorkersError, match=r"workers=\['nobody'\] was asked for .*; the cluster has w0, w10, w11"):
        asyncio.run(found.choose(Demand("auto", "numpy", ("float64",) * 3), allowed))


def test_two_workers_on_one_gpu_reach_each_other():
    shared = Worker("a", host="h", device="gpu0"), Worker("b", host="h", device="gpu0")
    assert PEER.unfit(shared, "product") == ""
    assert PEER.unfit((), "product") == ""


@pytest.mark.parametrize("n", [256, 8192, 16384, 32768])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_of_several_engines_the_quickest_is_planned(n, dtype):
    sizes = ((n // 4,) * 4, (n,)), ((n,), (n // 4,) * 4)
    where = np.arange(4, dtype=np.int32)
    workers = [Worker(f"w{i}", memory_limit=2**37) for i in range(4)]
    problem = make_problem(*sizes, dtype, array="cupy")
    alone = {
        e: plan(problem, workers, {"a": where, "b": where}, engine=e).estimate.seconds for e in ("peer", "cublasmp")
    }
    made = plan(problem, workers, {"a": where, "b": where}, engine=("peer", "cublasmp"))
    assert made.engine == min(alone, key=alone.get)
    if n >= 8192:
        assert made.engine == "peer"
        assert made.method in ("allgather", "summa")


def test_what_one_engine_can_not_do_the_other_does():
    """cuBLASMp's SUMMA has no FP8."""
    sizes = ((64, 64), (128,)), ((128,), (64, 64))
    where = np.zeros(2, np.int32)
    problem = make_problem(*sizes, "float8_e4m3fn", method="summa", array="cupy")
    made = plan(problem, [Worker(f"w{i}") for i in range(4)], {"a": where, "b": where}, engine=("peer", "cublasmp"))
    assert (made.engine, made.method) == ("peer", "summa")
    with pytest.raises(PlanError, match="no method 'summa' for FP8"):
        plan(problem, [Worker("w0"), Worker("w1")], {"a": where, "b": where}, engine=("cublasmp",))
