"""Plans of factorizations on GPUs of several hosts, whose panels are broadcast, and of those that ranks share."""

from __future__ import annotations

import dataclasses

import dask.array as da
import numpy as np
import pytest
from matrices import problem_of

from dask_distmm import linalg
from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.planning import ENGINES, Worker, factor, plan_computation
from dask_distmm.planning.factor import FactorPlacement, plan_factorization

HOSTS = [Worker(f"w{i}", memory_limit=2**36, host=f"h{i}") for i in range(4)]


def problem(function, *shapes, **options):
    arrays = {name: da.zeros(shape, chunks=2048) for name, shape in zip("ab", shapes, strict=False)}
    made = function(**arrays, **options)
    return problem_of(made[0] if isinstance(made, tuple) else made)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (linalg.cholesky, [(16384, 16384)]),
        (linalg.lu, [(16384, 8192)]),
        (linalg.qr, [(8192, 16384)]),
        (linalg.solve, [(16384, 16384), (16384, 5)]),
        (linalg.solve_triangular, [(16384, 16384), (16384, 5)]),
        (linalg.lstsq, [(8192, 16384), (8192, 3)]),
    ],
)
def test_all_hosts_take_part_if_they_are_to(function, shapes):
    task = problem(function, *shapes, method="columns", engine="nccl")
    made = plan_factorization(task, HOSTS, engine="nccl")
    assert len(made.ranks) == 4
    again = FactorPlacement.from_wire(made.to_wire())
    assert again.columns == made.columns
    assert {one.name: again.output_layout(one.name) for one in task.outputs} == {
        one.name: made.output_layout(one.name) for one in task.outputs
    }
    assert "the owner of a panel factorizes it" in repr(made)
    again.check_boxes("enter", np.array([[3, 0, 0, 0, 0, 0]]))
    with pytest.raises(ProtocolError, match="wants to enter"):
        again.check_boxes("enter", np.array([[4, 0, 0, 0, 0, 0]]))


def test_the_network_counts():
    near = [Worker(w.address, memory_limit=w.memory_limit, host="h") for w in HOSTS]
    task = problem(linalg.qr, (16384, 16384), method="columns")
    apart, together = (plan_factorization(task, some, engine="nccl").estimate for some in (HOSTS, near))
    assert apart.transfer_seconds > together.transfer_seconds
    assert apart.compute_seconds == together.compute_seconds


@pytest.mark.parametrize("n", [500, 2000])
def test_ranks_of_one_host_exchange_columns_without_dask(n):
    """Each column takes two messages; beside them both take the same."""
    task, times = problem(linalg.eigh, (n, n), method="columns"), []
    for hosts in (("x", "x"), ("x", "y")):
        made = plan_computation(task, [Worker(f"{i}", host=host) for i, host in enumerate(hosts)], engine=("numpy",))
        assert (len(made.ranks), made.shared) == (2, True)
        times.append(made.seconds)
    near, far = times
    assert far - near == pytest.approx(n * 2 * 1.9e-3)
    assert near < 1.2e-3 * n


def test_eigenvalues_that_one_gpu_can_not_hold_are_shared():
    task = problem(linalg.eigh, (8192, 8192))
    for gib, expected in ((40, "local"), (2, "columns")):
        workers = [Worker(w.address, memory_limit=gib * 2**30, host="h") for w in HOSTS]
        made = plan_computation(task, workers, engine=("peer", "nccl"))
        assert (made.engine, made.method) == ("peer", expected)
    # Large ones are, as that is quicker, and one GPU goes that way, too; so do those that ask for block columns.
    for n, workers, expected in ((12288, HOSTS, "columns"), (12288, HOSTS[:1], "local"), (16384, HOSTS[:1], "columns")):
        made = plan_computation(problem(linalg.eigh, (n, n)), workers, engine=("peer",))
        assert (made.method, made.shared, len(made.ranks)) == (expected, expected == "columns", len(workers)), n
    asked = problem(linalg.eigh, (512, 512), method="columns")
    assert plan_computation(asked, HOSTS, engine=("peer",)).method == "columns"
    pair = problem(linalg.eigh, (512, 512), (512, 512))
    assert plan_computation(pair, HOSTS, engine=("peer", "nccl")).method == "local"


def test_few_panels_go_to_one_gpu():
    """One panel comes after the other: a small matrix is factorized by one GPU, a large one by all of them."""
    for function in (linalg.cholesky, linalg.lu_factor, linalg.qr):
        small, large = (plan_computation(problem(function, (n, n)), HOSTS, engine=("peer",)) for n in (4096, 65536))
        assert (small.method, large.method) == ("local", "columns"), function


def test_what_ranks_share():
    decomposes = ENGINES["peer"].decomposes
    assert decomposes(problem(linalg.eigh, (9, 9)).task)
    assert not decomposes(problem(linalg.eigh, (9, 9), (9, 9)).task)
    assert not decomposes(problem(linalg.svd, (9, 9), method="local").task)
    with pytest.raises(
        PlanError, match="eigh in this form is computed by one worker: expected method 'auto' or 'local'"
    ):
        problem(linalg.eigh, (900, 900), method="columns", engine="nccl")


def test_plans_are_kept_for_other_matrices_of_the_same_shape(monkeypatch):
    """Only names differ; other places of chunks, or other workers, are another plan."""
    counts = []
    monkeypatch.setattr(factor, "_costed", lambda *of, do=factor._costed: counts.append(of) or do(*of))
    task = problem(linalg.cholesky, (10240, 10240), engine="numpy")
    renamed = dataclasses.replace(
        task, name="again", matrices=tuple(dataclasses.replace(x, array="other") for x in task.matrices)
    )
    where = {"a": (np.arange(25) % 4).astype(np.int32)}
    first = plan_computation(task, HOSTS, where, engine=["numpy"])
    planned = len(counts)
    again = plan_computation(renamed, HOSTS, where, engine=["numpy"])
    assert len(counts) == planned > 0
    assert again.problem is renamed
    assert (again.ranks, again.projected_bytes, again.seconds) == (first.ranks, first.projected_bytes, first.seconds)
    plan_computation(task, HOSTS, {"a": where["a"][::-1].copy()}, engine=["numpy"])
    plan_computation(task, HOSTS[:2], {"a": where["a"] // 2}, engine=["numpy"])
    assert len(counts) > planned
