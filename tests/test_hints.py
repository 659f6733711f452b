"""Where `enable` makes no run of a whole program the log says why, and what would change it: once for a client."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import dask
import dask.array as da
import pytest
from distributed import Client

import dask_distmm
from dask_distmm import PlanError
from dask_distmm.arrays import fallback


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fallback, "_left", {})
    with dask.config.set({"distmm.hints": True}), dask_distmm.enabled():
        yield


def hints(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "distmm.hints" in record.getMessage()]
    caplog.clear()
    return found


def small() -> da.Array:
    return da.random.random((20, 20), chunks=20)


def test_after_many_products_there_is_one_hint(inproc_client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with dask.config.set({"distmm.dask.run": "1h"}):
        for number in range(1, 60):
            small() @ (small() if number != 7 else da.random.random((20, 40), chunks=20))
            assert len(caplog.records) == (number >= 20)
        (text,) = hints(caplog)
        assert "no collective run" in text
        assert "largest of 20 products, (20, 20) @ (20, 40) of float64, is left to Dask's own tasks, as " in text
        assert "at most 90% of their time" in text
        assert "dask_distmm.explain(A, B) has both times" in text
        fallback._at_exit()
        assert not hints(caplog)


def test_a_program_that_ends_without_a_run_has_a_hint(inproc_client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with dask.config.set({"distmm.dask.run": "1h"}):
        small() @ small()
    assert not hints(caplog)
    fallback._at_exit()
    (text,) = hints(caplog)
    assert "The only product, (20, 20) @ (20, 20)" in text


def test_with_a_run_there_is_none(inproc_client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with dask.config.set({"distmm.dask.run": "1h"}):
        small() @ small()
        with dask.config.set({"distmm.minimum-flops": 0}):
            small() @ small()
        for _ in range(30):
            small() @ small()
    fallback._at_exit()
    assert not hints(caplog)


def test_with_a_region_there_is_none(
    inproc_client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that is left to Dask may be a part of what the scheduler makes a run."""
    x = da.random.random((40, 40), chunks=20).persist()
    with dask.config.set({"distmm.dask.run": "1h"}):
        small() @ small()
    before = fallback._left.copy()
    with dask.config.set({"distmm.dask.task": "1s", "distmm.minimum-flops": None}):
        (x @ x + 1).sum().compute()
    # That one was taken as a product, too.
    monkeypatch.setattr(fallback, "_left", before)
    with dask.config.set({"distmm.dask.run": "1h"}):
        for _ in range(30):
            small() @ small()
    assert not hints(caplog)
    fallback._at_exit()
    assert not hints(caplog)


def test_it_can_be_turned_off(inproc_client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with dask.config.set({"distmm.dask.run": "1h", "distmm.hints": False}):
        for _ in range(30):
            small() @ small()
        fallback._at_exit()
    assert not hints(caplog)
    with dask.config.set({"distmm.hints": "maybe"}), pytest.raises(PlanError, match=r"distmm\.hints is 'maybe'"):
        dask_distmm.matmul(small(), small())


@pytest.mark.parametrize(
    ("make", "why", "change"),
    [
        (lambda x: x.astype(object) @ x, "no engine multiplies numpy arrays of the types object", "convert them"),
        (lambda x: x.astype("int32") @ x.astype("int32"), "integers of fewer than 64 bits", "matmul keeps their type"),
        (lambda x: da.einsum("ij,jk->ik", x.persist(), x.persist()), "at most 90% of their time", "of more work"),
        (lambda x: da.linalg.qr(da.concatenate([x] * 9)), "they are expected to take", "products of more work"),
    ],
)
def test_each_reason_comes_with_what_would_change_it(
    make: object, why: str, change: str, inproc_client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with dask.config.set({"distmm.dask.run": "1h"}):
        make(small())
    fallback._at_exit()
    (text,) = hints(caplog)
    assert why in text
    assert change in text


def test_chunks_that_stream_are_to_be_persisted(inproc_client: Client, caplog: pytest.LogCaptureFixture) -> None:
    rows = da.random.random((400, 20), chunks=(20, 20))
    rows @ da.ones((20, 20), chunks=20).persist()
    fallback._at_exit()
    (text,) = hints(caplog)
    assert "chunks are still to be made" in text
    assert "persist() A and B" in text


def test_a_program_without_a_cluster_hears_of_it_as_it_ends() -> None:
    program = """
        import dask.array as da, dask_distmm
        dask_distmm.enable()
        x = da.ones((20, 20), chunks=10)
        print((x @ x).sum().compute())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "8000.0\n"
    assert done.stderr.count("\n") == 1
    assert "as no cluster is connected; create a distributed.Client. (The config distmm.hints" in done.stderr
