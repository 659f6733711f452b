"""cuSOLVERMp as a peer of the benchmarks, over the stand-ins: one thread a rank."""

from __future__ import annotations

import argparse
import ctypes
import threading

import devices
import numpy as np
import pytest

from benchmarks.gpu import solver_ranks
from benchmarks.gpu.solver_jobs import JOBS, SolverCase
from benchmarks.gpu.team import free_port
from benchmarks.gpu_peers import CusolverMp, grids


def _by_bindings(self, name, kinds, arguments):
    """Call the stand-in as if through ctypes: each argument fits its place."""
    assert len(kinds) == len(arguments)
    routine, _, sizes = name.partition("_")
    if not sizes:
        getattr(self.bindings, routine)(self.handle, *arguments)
        return
    found = getattr(self.bindings, f"{routine}_buffer_size")(self.handle, *arguments[:-2])
    for size, pointer in zip(found, arguments[-2:], strict=True):
        ctypes.c_size_t.from_address(pointer).value = size


class Threads:
    """A team whose processes are threads."""

    def __init__(self, count):
        port, self.members = free_port(), {}
        self._all(lambda rank: self.members.__setitem__(rank, solver_ranks.SolverRank(rank, count, port, {})), count)

    def _all(self, work, count):
        errors = []

        def run(rank):
            try:
                work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def ask(self, case, timeout=0):
        answers = {}

        def work(rank):
            try:
                answers[rank] = self.members[rank].measure(case)
            except RuntimeError as error:
                answers[rank] = {"failure": str(error)}

        self._all(work, len(self.members))
        assert len({answer.get("failure") for answer in answers.values()}) == 1
        return answers[0], True

    def close(self):
        pass

    kill = close


@pytest.fixture
def world(monkeypatch, forget):
    monkeypatch.setattr(solver_ranks.Library, "_by_ctypes", _by_bindings)
    return devices.install(monkeypatch)


@pytest.mark.cases(4)
@pytest.mark.parametrize("grid", [(1, 2), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", JOBS)
def test_every_routine_is_right_and_is_checked(world, monkeypatch, kind, grid):
    count = grid[0] * grid[1]
    team = Threads(count)
    n = int(np.random.default_rng().integers(30, 60))
    for dtype in ("float32", "float64"):
        answer, _ = team.ask(SolverCase(kind, n, dtype, grid, 8))
        assert len(answer["seconds"]) == 2
        assert 0 <= answer["error"] < 1e-2 if dtype == "float32" else answer["error"] < 1e-10
    # Descriptors are let go; a wrong result is found.
    assert world.open["descriptor"] == 0
    run = solver_ranks.Library.run

    def wrong(self, call, dtype, work):
        run(self, call, dtype, work)
        if team.members[0].library is self:
            for part in spoiled[-3:]:
                part.local[...] = 2 * part.local + 1

    spoiled = []
    part_type = solver_ranks.JOBS[kind].part
    monkeypatch.setattr(
        solver_ranks.JOBS[kind], "part", lambda self, *args: spoiled.append(part_type(self, *args)) or spoiled[-1]
    )
    monkeypatch.setattr(solver_ranks.Library, "run", wrong)
    if kind not in ("eigvalsh", "svdvals"):
        answer, _ = team.ask(SolverCase(kind, n, "float64", grid, 8))
        assert "wrong result" in answer["failure"]


def test_what_fails_says_why_and_the_rest_goes_on(world, capsys):
    options = argparse.Namespace(blocks=[4, 8, 16], grids=None, tries=2, timeout=10.0)
    team = Threads(2)
    sizes = world_bindings().potrf_buffer_size

    def not_supported(*arguments):
        if world.handles[arguments[6]].blocks[0] == 8:
            raise RuntimeError("NOT_SUPPORTED")
        return sizes(*arguments)

    world_bindings().potrf_buffer_size = not_supported
    peer = CusolverMp(options, ["0", "1"], float("inf"), start=lambda: team)
    found = peer.measure("cholesky", 40, "float64")
    assert [entry["block"] for entry in found["tried"]] == [4, 8, 16] * 2
    assert [entry.get("failure", "") for entry in found["tried"]] == ["", "rank 0: RuntimeError: NOT_SUPPORTED", ""] * 2
    assert found["seconds"] == min(entry.get("seconds", 9) for entry in found["tried"])
    assert capsys.readouterr().out.count("NOT_SUPPORTED") == 2
    # At the next size the best way of the first one.
    assert [(entry["grid"], entry["block"]) for entry in peer.measure("cholesky", 50, "float64")["tried"]] == [
        (found["grid"], found["block"])
    ]
    assert "no gram" in peer.measure("gram", 40, "float64")["failure"]
    world_bindings().geqrf_buffer_size = lambda *arguments: 1 / 0
    assert "division" in peer.measure("qr", 40, "float64")["failure"]
    assert "no grid" in peer.measure("qr", 50, "float64")["failure"]


def world_bindings():
    import nvmath

    return nvmath.bindings.cusolverMp


def test_grids_to_try():
    assert grids(1) == [(1, 1)]
    assert grids(2) == [(1, 2), (2, 1)]
    assert grids(4) == [(1, 4), (4, 1), (2, 2)]
    assert grids(8) == [(1, 8), (8, 1), (2, 4)]
