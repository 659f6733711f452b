"""Tall matrices that the workers can't hold: ranks make chunks, once for each pass, and drop them."""

from __future__ import annotations

import collections
import gc
import resource
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from conformance import run_jobs
from distributed import Client, LocalCluster
from matrices import is_collective, noise, problem_of, until
from residuals import assert_qr
from routed_calls import CALLS, operands, parts, persisted

import dask_distmm
from dask_distmm import linalg
from dask_distmm.arrays.linalg import factorize
from dask_distmm.engines.base import get_engine
from dask_distmm.engines.sources import Source, SourceChunk
from dask_distmm.errors import ProjectedMemoryError
from dask_distmm.planning.computation import Worker
from dask_distmm.planning.program import ProgramPlacement, ProgramProblem, plan_program

SMALL = {"threads_per_worker": 1, "memory_limit": "300MiB", "dashboard_address": "127.0.0.1:0"}

ROWS, OWNERS = (40, 0, 70, 11, 55), (0, 0, 1, 1, 2)


def run_by_ranks(
    result: da.Array, arrays: dict[str, Any], made: str
) -> tuple[dict[Any, Any], collections.Counter[Any], ProgramPlacement]:
    """Return what a program makes on ranks that make the chunks of operands `made`, and how often they make each."""
    problem = problem_of(result)
    assert isinstance(problem, ProgramProblem)
    problem = problem.made_by_ranks(made)
    where = {name: np.array(OWNERS, np.int32) for name in arrays if name not in made}
    plan = plan_program(problem, [Worker(f"w{number}") for number in range(3)], where, engine="numpy")
    plan = ProgramPlacement.from_wire(plan.to_wire())
    assert plan.owners == OWNERS
    cuts, counts = np.cumsum([0, *ROWS]), collections.Counter[Any]()
    chunks = {(name, i): x[cuts[i] : cuts[i + 1]] for name, x in arrays.items() for i in range(len(ROWS))}

    def sources(rank: int) -> dict[Any, SourceChunk]:
        def make(key: Any) -> Any:
            counts[key] += 1
            return chunks[key]

        mine = [key for key in chunks if key[0] in made and OWNERS[key[1]] == rank]
        return {key: SourceChunk(Source(lambda key=key: make(key)), lambda chunk: chunk) for key in mine}

    there = {key: chunk for key, chunk in chunks.items() if key[0] not in made}
    return run_jobs(get_engine("numpy"), plan, there, sources=sources), counts, plan


@pytest.mark.parametrize("dtype", ["float64", "complex64", "int32"])
def test_each_pass_makes_each_chunk_once(dtype: str) -> None:
    rng, n = np.random.default_rng(), 7
    wide = "complex128" if np.dtype(dtype).kind == "c" else "float64"
    for condition in (1, 1e12):
        u, v = (np.linalg.qr(noise(rng, (size, n), wide))[0] for size in (sum(ROWS), n))
        x = (1e4 * (u * np.geomspace(1, 1 / condition, n)) @ v.conj().T).astype(dtype)
        y = noise(rng, (len(x), 2), wide).astype(x.dtype)
        a, b = (da.from_array(one, chunks=(ROWS, -1)) for one in (x, y))
        for result, arrays, passes in (
            (linalg.qr(a, "r"), {"a": x}, 1),
            (linalg.qr(a).Q, {"a": x}, 2),
            (linalg.svd(a, full_matrices=False).U, {"a": x}, 2),
            (linalg.pca(a, 2)[1], {"a": x}, 1),
            (linalg.ridge(a, b, [1.0, 2.0]), {"a": x, "b": y}, 1),
            (linalg.lstsq(a, b, 1e-4)[0], {"a": x, "b": y}, 2),
            (linalg.pinv(a, 1e-5), {"a": x}, 2),
            (linalg.svd_compressed(a, 2, n_power_iter=1)[1], {"a": x}, 2),
        ):
            with dask.config.set(scheduler="sync"):
                expected, none, _ = run_by_ranks(result, arrays, "")
            assert not none
            for made in {"a", "ab"} if "b" in arrays else {"a"}:
                found, counts, plan = run_by_ranks(result, arrays, made)
                assert found.keys() == expected.keys()
                for key in expected:
                    np.testing.assert_array_equal(found[key], expected[key], strict=True)
                assert counts.keys() == {(name, number) for name in made for number in range(len(ROWS))}
                assert len(set(counts.values())) == 1
                assert plan.cost.passes == passes
                if condition == 1 and dtype != "int32":
                    assert set(counts.values()) == {passes}
                assert "made by the ranks for each pass" in repr(plan)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_tall_results_that_do_not_fit(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q by Dask's tasks, whose chunks come and go, and what is made of it."""

    def fits(problem: ProgramProblem, arrays: object) -> bool:
        if problem["a"].shape[0] > 200:
            raise ProjectedMemoryError("too large", {}, {})
        return True

    monkeypatch.setattr(factorize, "_fits", fits)
    x = (20 * noise(np.random.default_rng(), (900, 12), dtype)).astype(dtype)
    a, tolerance = da.from_array(x, chunks=(150, 5)), 1e-3 if dtype == "complex64" else 1e-9
    q, r = da.compute(*linalg.qr(a))
    assert_qr(x, q, r)
    assert linalg.qr(a, "r").chunks == ((5, 5, 2), (5, 5, 2))

    def short(*arrays: object) -> None:
        raise ProjectedMemoryError("too large", {}, {})

    with monkeypatch.context() as patch:
        patch.setattr(factorize, "reduced", short)  # what R is reduced to does not fit either
        r = linalg.qr(a, "r")
        assert r.chunks == ((5, 5, 2), (5, 5, 2))
        np.testing.assert_allclose(abs(r.compute()), abs(np.linalg.qr(x)[1]), rtol=0, atol=tolerance * 100)
    u, s, vh = da.compute(*linalg.svd(a, full_matrices=False))
    np.testing.assert_allclose((u * s) @ vh, x, rtol=0, atol=tolerance * 100)
    np.testing.assert_allclose(s, np.linalg.svd(x, compute_uv=False), rtol=tolerance)
    np.testing.assert_allclose(linalg.pinv(a).compute(), np.linalg.pinv(x), rtol=tolerance, atol=tolerance)
    _, leading, _ = linalg.svd_compressed(a, 2, n_power_iter=4)
    np.testing.assert_allclose(leading.compute(), s[:2], rtol=1e-2)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _fail(block: Any, block_info: Any = None) -> Any:
    if block_info[0]["chunk-location"][0] == 20:
        raise ValueError("no such file")
    return block


def noise_with_mean() -> da.Array:
    """Return 343 MiB of random numbers."""
    return da.random.default_rng(5).standard_normal((450_000, 100), chunks=(12_500, 50)) + 3


def test_workers_with_little_memory() -> None:
    """Matrices that are made chunk by chunk, of columns beside each other too, and are larger than the memory."""
    with (
        LocalCluster(n_workers=2, **SMALL) as cluster,
        Client(cluster) as client,
    ):
        da.ones(10, chunks=5).sum().compute()
        before = client.run(_peak)
        a = noise_with_mean()
        y = da.random.default_rng(6).standard_normal((450_000, 1), chunks=(12_500, 1))
        assert "made by the ranks for each pass" in str(linalg.explain(linalg.pca(a, 3)[0]))
        r, (components, variances, mean), weights = da.compute(
            linalg.qr(a - 3, "r"), linalg.pca(a, 3), linalg.ridge(a, y, np.arange(20.0))
        )
        np.testing.assert_allclose(r.T @ r / len(a), np.eye(100), atol=0.05)
        np.testing.assert_allclose(components @ components.T, np.eye(3), atol=1e-12)
        np.testing.assert_allclose(mean, 3, atol=0.01)
        assert (variances > 0.9).all()
        assert weights.shape == (20, 100, 1)
        assert all(client.run(_peak)[worker] - before[worker] < 100 * 2**20 for worker in before)
        with pytest.raises(ValueError, match="no such file") as caught:
            linalg.pca(a.map_blocks(_fail, dtype=a.dtype), 3)[0].compute()
        assert "chunk (20, 0) of A can't be made" in "".join(caught.value.__notes__)


def test_dask_makes_r_of_what_ranks_cannot_make() -> None:
    """Where all chunks need one thing. Dask spills meanwhile: a worker that is slow at it goes on."""
    with (
        dask.config.set({f"distributed.worker.memory.{limit}": False for limit in ("pause", "terminate")}),
        LocalCluster(n_workers=2, **SMALL) as cluster,
        Client(cluster),
    ):
        a = noise_with_mean()
        r = linalg.qr(a - a.mean(axis=0), "r").compute()
        np.testing.assert_allclose(r.T @ r / len(a), np.eye(100), atol=0.05)


# Of tall matrices: what computes all of one.
TALL = [
    *(name for name in CALLS if name.startswith(("da.co", "da.linalg.lstsq", "da.linalg.qr", "da.linalg.svd"))),
    *("da.linalg.norm 2", "da.linalg.norm -2", "da.linalg.norm nuc", "np.cov", "np.corrcoef", "np.linalg.cond"),
    *("np.linalg.matrix_rank", "np.linalg.norm", "np.linalg.qr", "np.linalg.svd", "np.linalg.svdvals"),
]


@pytest.fixture(scope="module")
def small_workers() -> Iterator[Client]:
    """Two workers that are slow to pause, and hold little beside what their processes do anyway."""
    limits = {f"distributed.worker.memory.{limit}": False for limit in ("pause", "terminate")}
    with (
        # What a process has imported counts from the start.
        dask.config.set({**limits, "distributed.worker.memory.recent-to-old-time": "0s"}),
        LocalCluster(n_workers=2, **SMALL) as cluster,
        Client(cluster) as client,
    ):
        x = da.random.default_rng().standard_normal((4000, 4), chunks=(400, 4))
        dask.compute(*linalg.svd(x, full_matrices=False))  # all that a worker imports
        yield client


@pytest.mark.cases(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("there", [False, True], ids=["lazy", "persisted"])
@pytest.mark.parametrize("name", TALL)
def test_routed_functions_beyond_memory(small_workers: Client, name: str, there: bool) -> None:
    """All results and one of them, where the workers can hold neither the matrix nor results as long as it."""
    (m, n), rows = (585_000, 40), 13_000
    noise = da.random.default_rng(7).standard_normal
    x = SimpleNamespace(
        tall=noise((m, n), chunks=(rows, n)),
        wide=noise((n, m), chunks=(n, rows)),
        c=noise(m, chunks=rows),
        targets=noise((m, 2), chunks=(rows, 2)),
    )
    x = persisted(x) if there else x
    call = CALLS[name]

    def sizes(results: Any) -> list[float]:
        return [float(size) for size in dask.compute(*(abs(one).sum() for one in parts(results)))]

    with dask_distmm.enabled():
        every, one = sizes(call(x)), parts(call(x))
    number = len(every) // 2
    np.testing.assert_allclose(sizes(one[number]), every[number], rtol=1e-6)
    np.testing.assert_allclose(sizes(parts(call(x))[number]), every[number], rtol=1e-6)


# Stock Dask's own: what SciPy deprecates, and functions of NumPy that gather.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning", "ignore:overflow")
def test_where_nothing_fits_routed_functions_are_stock_dasks() -> None:
    """Workers may hold next to nothing: no run is possible."""
    limits = {f"distributed.worker.memory.{limit}": False for limit in ("target", "spill", "pause")}
    config = {**limits, "distmm.memory.limit-fraction": 1e-9, "distmm.minimum-flops": 0}
    with (
        dask.config.set(config),
        LocalCluster(n_workers=1, processes=False, memory_limit="64GiB", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster),
    ):
        x, compared = operands(24, (600, 8), lambda size: size // 4 if size % 4 == 0 else size), 0
        for name, call in CALLS.items():
            try:
                expected = dask.compute(*parts(call(x)), scheduler="sync")
            except (TypeError, ValueError, NotImplementedError):
                continue
            with dask_distmm.enabled():
                results = parts(call(x))
            assert not any(is_collective(result) for result in results if isinstance(result, da.Array)), name
            for one, other in zip(dask.compute(*results, scheduler="sync"), expected, strict=True):
                np.testing.assert_allclose(np.sort(abs(one), axis=None), np.sort(abs(other), axis=None), rtol=1e-9)
            compared += 1
        assert compared > 50


def keep_garbage() -> None:
    """Hold much memory in a cycle that nothing refers to."""
    gc.disable()
    cycle: list[Any] = [np.ones(220 * 2**17)]
    cycle.append(cycle)


def test_garbage_of_processes_is_handed_back_before_a_run_is_refused() -> None:
    limits = {f"distributed.worker.memory.{limit}": False for limit in ("target", "spill", "pause", "terminate")}
    config = {**limits, "distributed.worker.memory.recent-to-old-time": "0s", "distmm.waves.mode": "off"}
    with (
        dask.config.set(config),
        LocalCluster(n_workers=1, **SMALL | {"memory_limit": "450MiB"}) as cluster,
        Client(cluster) as client,
    ):
        x, y = (da.random.default_rng().standard_normal((1500, 1500), chunks=500).persist() for _ in "xy")
        expected, product = x.compute() @ y.compute(), dask_distmm.matmul(x, y)
        client.run(keep_garbage)
        (address,) = client.scheduler_info()["workers"]
        until(lambda: client.scheduler_info()["workers"][address]["metrics"]["memory"] > 350 * 2**20)
        np.testing.assert_allclose(product.compute(), expected, rtol=1e-9, atol=1e-9)
