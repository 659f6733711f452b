"""The cluster that a command starts on this machine."""

from __future__ import annotations

import logging
import signal
import sys
import time

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


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_is_not_lost_in_what_must_not_raise(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def __del__(self) -> None:
            fallen.append(True)
            signal.raise_signal(signal.SIGINT)

    def work() -> None:
        with local.quiet_failure():
            Interrupted()
            assert fallen
            time.sleep(30)

    fallen: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        work()
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # the program is ending


@pytest.mark.usefixtures("terminal")
def test_logging_ends_with_ctrl_c_at_once() -> None:
    def work() -> None:
        with local.quiet_failure():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                enabled.append(logging.getLogger("asyncio").isEnabledFor(logging.CRITICAL))

    enabled: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        work()
    assert enabled == [False]


@pytest.mark.usefixtures("terminal")
def test_what_ctrl_c_leaves_unawaited_is_not_told(recwarn: pytest.WarningsRecorder) -> None:
    async def request() -> None:
        pass

    def work() -> None:
        with local.quiet_failure():
            begun.append(request())
            signal.raise_signal(signal.SIGINT)

    begun: list[object] = []
    with pytest.raises(KeyboardInterrupt):
        work()
    begun.clear()
    assert not recwarn.list


@pytest.mark.usefixtures("terminal")
def test_other_errors_of_finalizers_are_told_and_all_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("broken")

    hook = sys.unraisablehook
    with local.quiet_failure():
        Broken()
    assert "ValueError: broken" in capsys.readouterr().err
    assert sys.unraisablehook is hook
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_waits_where_it_is_deferred() -> None:
    def work() -> None:
        with local.quiet_failure(), local.interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("to the end")

    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["to the end"]
