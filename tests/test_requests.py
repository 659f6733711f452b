"""A request by name is met or refused: nothing that was asked for is dropped without a word."""

from __future__ import annotations

import html

import dask
import dask.array as da
import numpy as np
import pytest
from dask.utils import format_time
from distributed import Client

from dask_distmm import (
    NotCollective,
    PlanError,
    Slab,
    enabled,
    explain,
    explain_grouped,
    linalg,
    matmul,
    matmul_grouped,
)
from dask_distmm.arrays.request import check_names
from dask_distmm.config import enabled_setting, minimum_flops, read_options

ONLY_BY_A_RUN = {
    "method": "summa",
    "engine": "cublasmp",
    "workers": 4,
    "distributions": [Slab(0), None, None],
    "compute_type": "tf32",
}


def ones(*shape: int, dtype: str = "float32") -> da.Array:
    return da.ones(shape, chunks=10, dtype=dtype)


@pytest.mark.parametrize("name", ONLY_BY_A_RUN)
@pytest.mark.parametrize("call", [matmul, explain])
def test_without_a_cluster_it_is_refused(name: str, call: object) -> None:
    option = {name: ONLY_BY_A_RUN[name]}
    if (name, call) == ("workers", explain):
        assert explain(ones(20, 20), ones(20, 20), **option).method  # imagined workers are no demand
        return
    with pytest.raises(PlanError, match=f"^{name}=.*no cluster is connected; create a distributed.Client"):
        call(ones(20, 20), ones(20, 20), **option)


def test_batches_and_groups_without_a_cluster() -> None:
    a = da.ones((3, 20, 20), chunks=10)
    for options in ({"batch": "collective"}, {"method": "local"}):
        with pytest.raises(PlanError, match="no cluster is connected"):
            matmul(a, a, **options)
    pairs = [(ones(20, 20), ones(20, 20))]
    for call in (matmul_grouped, explain_grouped):
        for options in ({"batch": "collective"}, {"engine": "numpy"}, {"workers": 2}):
            with pytest.raises(PlanError, match="product 0: .*no cluster is connected"):
                call(pairs, **options)


def test_on_a_cluster_what_no_engine_takes_is_refused(inproc_client: Client) -> None:
    a = ones(20, 20, dtype="object")
    for name in ("method", "workers", "engine"):
        with pytest.raises(PlanError, match=f"{name}=.* no engine multiplies numpy arrays of the types object"):
            matmul(a, a, **{name: ONLY_BY_A_RUN[name]})
    with pytest.raises(PlanError, match="epilog='allreduce' needs a collective run"):
        matmul(a, a, epilog="allreduce")
    assert isinstance(explain(a, a), NotCollective)
    np.testing.assert_array_equal(matmul(a, a).compute(), np.full((20, 20), 20, object))


def test_the_configuration_is_a_preference(inproc_client: Client) -> None:
    a = ones(20, 20, dtype="object")
    with dask.config.set({"distmm.method": "summa", "distmm.engine": "numpy", "distmm.compute-type": "tf32"}):
        assert matmul(a, a).compute()[0, 0] == 20
        with dask.config.set(scheduler="threads"):
            assert matmul(ones(20, 20), ones(20, 20)).compute()[0, 0] == 20


@pytest.mark.parametrize("name", ["fp32", None])
def test_usual_types_need_no_run(name: str | None) -> None:
    assert matmul(ones(20, 20), ones(20, 20), compute_type=name).compute()[0, 0] == 20


@pytest.mark.parametrize("options", [{}, {"alpha": 2.0}, {"epilog": "relu_aux"}])
def test_chunks_are_met_without_a_run(options: dict[str, object]) -> None:
    found = matmul(ones(20, 30), ones(30, 20), out_chunks=(5, 20), **options)
    d = found[0] if isinstance(found, tuple) else found
    assert d.chunks == ((5,) * 4, (20,))
    assert d.compute()[0, 0] == 30 * options.get("alpha", 1.0)


def test_workers_are_asked_for_and_the_computation_is_without_a_cluster(inproc_client: Client) -> None:
    d = matmul(ones(20, 20), ones(20, 20), workers=2)
    with pytest.raises(PlanError, match="workers=2 was asked for"):
        d.compute(scheduler="sync")
    assert matmul(ones(20, 20), ones(20, 20), workers=1).compute(scheduler="sync")[0, 0] == 20


def test_explain_says_what_the_operator_does(inproc_client: Client) -> None:
    a, b = da.random.random((10, 4000), chunks=1000), da.random.random((4000, 4000), chunks=1000)
    with enabled():
        taken = (a @ b).name.startswith("matmul-")
    found = explain(a, b)
    assert taken == (not found.left)
    first, second, *_ = repr(found).splitlines()
    assert first == f"A @ B under enable(): Dask's own tasks, as {found.left}"
    assert second.startswith("Plan: ")
    assert found._repr_html_().count(html.escape(first)) == 2
    # What `@` can't express is not compared with it.
    alone = explain(a, b, method="local")
    assert alone.left is None
    assert repr(alone).startswith("Plan: local on ")
    with dask.config.set({"distmm.minimum-flops": 1e15}):
        assert "too little work" in explain(a, b).left
    with dask.config.set({"distmm.minimum-flops": 0}), enabled():
        assert explain(a, b).left == ""
        assert repr(explain(a, b)).startswith("A @ B under enable(): a collective run, ")
        assert (a @ b).name.startswith("matmul-")


def test_the_verdict_has_both_times_and_the_margin(inproc_client: Client) -> None:
    a = da.random.random((60, 60), chunks=10).persist()
    verdicts = {}
    for cost in ("dask.run", "dask.start"):
        with dask.config.set({f"distmm.{cost}": "1h"}), enabled():
            plan = explain(a, a)
            verdicts[cost] = repr(plan).splitlines()[0]
            taken = (a @ a).name.startswith("matmul-")
            assert taken == (plan.left == "") == plan.worth_it
        for seconds in (plan.seconds, plan.by_tasks.seconds):
            assert format_time(seconds) in verdicts[cost]
    assert "Dask's own tasks, as they are expected to take" in verdicts["dask.run"]
    assert "a collective run, " in verdicts["dask.start"]
    assert all("a run has to take at most 90% of " in text for text in verdicts.values())


def test_explain_of_a_result_is_that_of_its_runs(inproc_client: Client) -> None:
    a = da.random.random((60, 60), chunks=20)
    product = matmul(a, a)
    plan = explain(product)
    assert (plan.method, plan.problem.name) == (linalg.explain(product).method, product.name)
    assert repr(plan) == repr(linalg.explain(product))
    several = explain(linalg.cholesky(matmul(a, a.T) + 60 * da.eye(60, chunks=20)))
    assert [run.problem.kind for run in several.runs] == ["product", "factorization"]
    d, aux = matmul(a, a, epilog="relu_aux")
    assert explain((d, aux["relu_aux"])).problem.formula.epilog == "relu_aux"
    assert explain(a + 1).method == "dask"
    for computed in (product.persist(), np.ones((3, 3))):
        with pytest.raises(PlanError, match="neither computed nor persisted"):
            explain(computed)
    with pytest.raises(PlanError, match="b is missing, and method= is for products"):
        explain(product, method="summa")


def test_explain_of_unknown_chunks(inproc_client: Client) -> None:
    a = da.random.random((20, 20), chunks=10)
    found = explain(a[a[:, 0] > 0], a)
    assert not found
    assert "compute_chunk_sizes()" in found.reason


@pytest.mark.parametrize("chunks", [(0, 1), (0, 20), (-2, 5), (7, -3), ((5, 5), (20,)), "much", (5, 5, 5), {0: 0}])
def test_chunks_that_do_not_fit(chunks: object) -> None:
    with pytest.raises(PlanError, match="out_chunks=.* does not fit the result's shape"):
        matmul(ones(20, 20), ones(20, 20), out_chunks=chunks)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("minimum-flops", "lots", "distmm.minimum-flops is 'lots'; expected a number"),
        ("minimum-flops", True, "distmm.minimum-flops is True"),
        ("minimum-flops", -1, "distmm.minimum-flops is -1"),
        ("enabled", "maybe", "distmm.enabled is 'maybe'; expected true, false or null"),
        ("method", "suma", "config distmm.method 'suma': did you mean 'summa'"),
        ("engine", "nunpy", "config distmm.engine 'nunpy': did you mean 'numpy'"),
        ("enabld", True, "key of the config distmm: 'enabld': did you mean 'enabled'"),
        ("timeouts.vot", "3s", "key of the config distmm.timeouts: 'vot': did you mean 'vote'"),
        ("machine.numpy.bandwith", 1, "key of the config distmm.machine.numpy: 'bandwith': did you mean 'bandwidth'"),
    ],
)
def test_mistakes_of_the_configuration_name_it(inproc_client: Client, key: str, value: object, reason: str) -> None:
    with dask.config.set({f"distmm.{key}": value}), pytest.raises(PlanError, match=reason):
        matmul(ones(20, 20), ones(20, 20))


def test_what_the_configuration_may_have() -> None:
    with dask.config.set({"distmm.minimum_flops": "1e9", "distmm.machine.numpy.gflops.bfloat16": 3}):
        assert minimum_flops() == 1e9
        read_options()
    with dask.config.set({"distmm.machine": {"mine": {"anything": 1}}}):
        read_options()
    for value in (True, False, None):
        with dask.config.set({"distmm.enabled": value}):
            assert enabled_setting() is value


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda a: matmul(a, a, bias=a), "epilog='bias' and epilog_inputs={'bias': ...}"),
        (lambda a: matmul(a, a, methd="summa"), "did you mean 'method'"),
        (lambda a: matmul_grouped(a, a), r"pass the pairs in one list, \[\(a, b\), ...\]"),
        (lambda a: matmul_grouped([(a, a)], bias=a), "call matmul for each"),
        (lambda a: matmul(a), "missing 1 required positional argument: 'b'"),
    ],
)
def test_calls_with_other_arguments_say_how_it_is_written(call: object, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        call(ones(20, 20))


@pytest.mark.parametrize(
    "wrong",
    [np.array(["x", "y"]), np.array(["2026-01-01"], "M8[D]"), np.array([1, 2], "m8[s]"), np.zeros(2, "i4,f8"), "text"],
    ids=["str", "datetime", "timedelta", "structured", "a text"],
)
def test_operands_that_are_no_numbers(wrong: object) -> None:
    with pytest.raises(PlanError, match="the first operand has the type .*; expected numbers"):
        matmul(wrong, ones(2, 2))


def test_data_frames_are_named() -> None:
    class DataFrame:
        columns = dtypes = shape = ndim = None

    with pytest.raises(PlanError, match=r"the second operand is a DataFrame; .*to_numpy\(\)"):
        matmul(ones(2, 2), DataFrame())


def test_an_engine_by_its_old_name_is_taken_and_says_so() -> None:
    with pytest.warns(FutureWarning, match=r"engine='cusolvermp' is 'nccl' now; 0\.3 will not know 'cusolvermp'"):
        assert check_names(None, "cusolvermp", kind="factorization") == ("auto", "nccl")
    with (
        dask.config.set({"distmm.engine": "cusolvermp"}),
        pytest.warns(FutureWarning, match=r"config distmm\.engine='cusolvermp' is 'nccl' now"),
    ):
        assert check_names(None, None, kind="factorization") == ("auto", "nccl")
