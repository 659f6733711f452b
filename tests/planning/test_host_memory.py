"""Plans of NumPy chunks on GPUs: what is read from host memory, and the blocks of D."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conformance import make_problem

from dask_distmm import PlanError, ProjectedMemoryError
from dask_distmm.config import DaskCosts
from dask_distmm.planning import Plan, Worker, plan
from dask_distmm.planning.peer import PEER
from dask_distmm.planning.schedule import block_schedules, peer_reads
from dask_distmm.planning.waves import Budget, choose_scheme, wave_problem
from dask_distmm.runtime.client import plan_on
from dask_distmm.runtime.messages import Snapshot

GIB = 2**30
CHUNKS = (4096,) * 4
COSTS, BUDGET = DaskCosts(0.01, 0.0001, 0.01, 0.0005), Budget(0.6, 0.7, 5e8)


def problem(array="numpy", dtype="float64", **changes):
    """A product of three matrices of 2 GiB in float64."""
    return dataclasses.replace(make_problem((CHUNKS,) * 2, (CHUNKS,) * 2, dtype, array=array), **changes)


def gpus(count, limit, host=64 * GIB):
    names = [str(number) for number in range(count)]
    return [
        Worker(f"tcp://w{name}", 1, int(limit / 0.8), "host", name, tuple({*names} - {name}), host_limit=host)
        for name in names
    ]


def placed(count):
    return {name: np.arange(16, dtype=np.int32) % count for name in "ab"}


@pytest.mark.parametrize(
    ("count", "limit", "expected"), [(2, 100 * GIB, False), (2, 3.5 * GIB, True), (1, 1000 * GIB, True)]
)
def test_chunks_stay_in_host_memory_where_they_do_not_fit_or_a_rank_is_alone(count, limit, expected):
    made = plan(problem(), gpus(count, limit), placed(count), engine="peer")
    assert made.from_host is expected
    assert max(made.projected_bytes.values()) <= limit
    assert Plan.from_wire(made.to_wire()).from_host is expected
    if expected:
        # No participant maps chunks of another one, nor multiplies one as it lies.
        assert not any(read.any() for read in peer_reads(made, "ab").values())
        assert not any(any(one.in_place) for one in block_schedules(made))
        assert not PEER.independent(made)


def test_dasks_own_tasks_multiply_numpy_chunks_on_the_cpu():
    known = Snapshot("OK", engines=["peer"], workers=gpus(2, 100 * GIB))
    on_host, on_device = (plan_on(known, problem(array)) for array in ("numpy", "cupy"))
    assert on_host.by_tasks.compute_seconds > problem().flops / 1e12 > 10 * on_device.by_tasks.compute_seconds
    assert on_host.worth_it


@pytest.mark.parametrize("changes", [{"array": "cupy"}, {"gathered": "a"}])
def test_other_products_are_refused_as_before(changes):
    with pytest.raises(ProjectedMemoryError):
        plan(problem(**changes), gpus(2, 3.5 * GIB), placed(2), engine="peer")


def test_sums_of_16_bit_types_are_wide_rather_than_panels_streamed_again():
    made = plan(problem(dtype="bfloat16"), gpus(1, 100 * GIB), placed(1), engine="peer")
    (schedule,) = block_schedules(made)
    assert len(schedule.parts) == 2


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("limit", [1.3 * GIB, 2.2 * GIB])
def test_blocks_of_d_cover_it_once_and_fit(count, limit):
    whole, workers = problem(), gpus(count, limit / count + GIB / 2)
    scheme = choose_scheme(whole, workers, (False, False), BUDGET, COSTS, engine=["cublasmp", "peer"])
    assert scheme.name == "host"
    covered = np.zeros((4, 4), int)
    for number, (rows, cols, depth) in enumerate(scheme.waves):
        covered[rows[0] // 4096 : rows[1] // 4096, cols[0] // 4096 : cols[1] // 4096] += 1
        made = plan(wave_problem(whole, scheme, number), workers, engine="peer")
        assert max(made.projected_bytes.values()) <= limit / count + GIB / 2
        assert depth == (0, 16384)
    assert (covered == 1).all()
    assert scheme.read_bytes >= 2 * 16384**2 * 8


def test_what_can_not_be_made_in_blocks_says_why():
    # Ranks of cublasmp do not read host memory.
    for engine, limit in (("peer", GIB // 8), ("cublasmp", GIB)):
        with pytest.raises(ProjectedMemoryError, match="GPUs may hold"):
            choose_scheme(problem(), gpus(1, limit), (False, False), BUDGET, COSTS, engine=engine)
    with pytest.raises(PlanError, match="in memory already"):
        choose_scheme(problem(array="cupy"), gpus(1, GIB), (False, False), BUDGET, COSTS, engine="peer")


@pytest.mark.parametrize("host", [4 * GIB, 16 * GIB])
def test_lazy_numpy_chunks_on_gpus_are_loaded_into_host_memory(host):
    """The limit of the waves is that of the host; the GPUs have room."""
    workers = gpus(2, 100 * GIB, host)
    scheme = choose_scheme(problem(), workers, (True, True), BUDGET, COSTS, engine="peer")
    assert scheme.peak_bytes <= 0.6 * host
    assert scheme.budget_bytes == int(0.6 * host)
