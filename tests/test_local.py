"""The cluster that a command starts on this machine."""

from __future__ import annotations

import pytest

from dask_distmm.planning import ENGINES
from dask_distmm.tools import local


def test_there_is_no_gpu_cluster_without_a_gpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "gpu_count", lambda: 8)
    monkeypatch.setattr(local, "ENGINES", {"numpy": ENGINES["numpy"]})
    assert not local.use_gpus()
    assert local.default_workers() >= 2


@pytest.mark.parametrize(("gpus", "chosen"), [(0, False), (3, True)])
def test_gpus_are_used_where_dask_cuda_and_an_engine_can(
    monkeypatch: pytest.MonkeyPatch, gpus: int, chosen: bool
) -> None:
    monkeypatch.setattr(local, "gpu_count", lambda: gpus)
    monkeypatch.setattr(local, "ENGINES", {"cublasmp": ENGINES["cublasmp"]})
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda name: object())
    assert local.use_gpus() is chosen
    if chosen:
        assert local.default_workers() == 3
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda name: None)
    assert not local.use_gpus()


@pytest.mark.parametrize(
    ("length", "workers", "rows"), [(4096, 2, 1024), (4096, 16, 512), (1, 2, 1), (10, 2, 3), (10**6, 2, 4096)]
)
def test_chunks_suit_length_and_workers(length: int, workers: int, rows: int) -> None:
    assert local.chunk_rows(length, workers) == rows
