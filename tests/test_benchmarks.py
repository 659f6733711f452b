"""The benchmark command at a small size, and its report on made-up figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import batches, cpu, stateful
from benchmarks.harness import report, runner, suite
from benchmarks.harness.protocol import Case, Sample, scaled_error, uniform_matrix
from benchmarks.harness.runner import Measured, measure_all

ROOT = Path(__file__).parents[1]


class Scripted:
    """A peer that takes a given time, and errs or fails as told."""

    def __init__(
        self, name: str, seconds: float, grids: tuple[int | None, ...], error: float | Exception = 0.0
    ) -> None:
        self.name, self.seconds, self._grids, self.error = name, seconds, grids, error
        self.seeds: list[int] = []

    def unavailable(self) -> str | None:
        return None

    def grids(self) -> tuple[int | None, ...]:
        return self._grids

    def measure(self, case: Case, seed: int, *, warmup: bool) -> Sample:
        self.seeds.append(seed)
        if isinstance(self.error, Exception):
            raise self.error
        memory = {"w": {"total_bytes": 3 << 20, "growth_bytes": 1 << 20, "ratio": 0.5}}
        return Sample(self.seconds * (case.grid or 1), self.error, {"memory": memory})

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def measure(*peers: Scripted, repeat: int = 2) -> list[Measured]:
    """Run peers at one size, silently."""
    return measure_all(peers, [100], dtype="float64", repeat=repeat, seed=1, progress=lambda line: None)


def test_ratios_are_to_each_reference_at_its_best_and_at_each_grid() -> None:
    base, chunked = Scripted("base", 1.0, (None,)), Scripted("chunked", 2.0, (2, 4))
    found = report.document(measure(base, chunked), ["base", "chunked"])
    first = found["results"][0]["ratios"]
    assert first == {"base": 1.0, "chunked@best": 4.0, "chunked@2x2": 4.0, "chunked@4x4": 8.0}
    assert found["results"][2]["ratios"]["chunked@best"] == 0.5
    assert found["results"][1]["memory"]["ratio_max"] == 0.5


def test_inputs_are_never_the_same_twice() -> None:
    base, chunked = Scripted("base", 1.0, (None,)), Scripted("chunked", 2.0, (2, 4))
    measure(base, chunked, repeat=3)
    seeds = base.seeds + chunked.seeds
    assert len(seeds) == len(set(seeds)) == 3 * 4


def test_a_benchmark_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])

    class Slow(Scripted):
        def measure(self, case: Case, seed: int, *, warmup: bool) -> Sample:
            now[0] += case.size / 100
            return super().measure(case, seed, warmup=warmup)

    said: list[str] = []
    peer = Slow("slow", 1.0, (None,))
    found = measure_all([peer], [100, 200, 400], dtype="float64", repeat=5, seed=1, progress=said.append, seconds=9.5)
    # Six rounds of a second; then a warm-up of two, after which one more would end at ten: but one always counts.
    assert [(one.case.size, len(one.samples)) for one in found] == [(100, 5)]
    assert said[-2:] == ["N=200: left out, it would take about 11 s", "N=400: left out, it would take about 64 s"]
    now[0] = 0.0
    found = measure_all([peer], [100, 200], dtype="float64", repeat=5, seed=1, progress=said.append, seconds=21.0)
    assert [(one.case.size, len(one.samples)) for one in found] == [(100, 5), (200, 5)]
    now[0] = 0.0
    found = measure_all([peer], [100, 200], dtype="float64", repeat=5, seed=1, progress=said.append, seconds=0.0)
    assert [(one.case.size, len(one.samples)) for one in found] == [(100, 1)]


def test_what_is_measured_outlives_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Scripted):
        def measure(self, case: Case, seed: int, *, warmup: bool) -> Sample:
            if case.size == 200:
                raise KeyboardInterrupt
            return super().measure(case, seed, warmup=warmup)

    def measured(sizes: list[int]) -> dict[str, Any]:
        peers = [Scripted("base", 1.0, (None,)), Stopped("stopped", 1.0, (None,))]
        return suite.measure(peers, sizes, ["base"], dtype="float64", repeat=2, seed=1, progress=lambda line: None)

    found = measured([100, 200])
    assert found["interrupted"]
    assert [(one["peer"], one["size"], len(one["seconds"])) for one in found["results"]] == [
        ("base", 100, 2),
        ("stopped", 100, 2),
    ]
    assert "N=100" in report.figures_table(found) or "100" in report.figures_table(found)
    assert not measured([100])["interrupted"]
    with pytest.raises(KeyboardInterrupt):
        measured([200])


@pytest.mark.parametrize("error", [float("nan"), 1.5, RuntimeError("broken")])
def test_a_wrong_or_failing_peer_is_reported_and_the_others_go_on(error: float | Exception) -> None:
    found = report.document(measure(Scripted("base", 1.0, (None,)), Scripted("bad", 1.0, (8,), error)), ["base"])
    good, bad = found["results"]
    assert good["seconds"] == [1.0, 1.0]
    assert bad["failure"]
    assert "median" not in bad
    assert "FAILED" in report.figures_table(found)
    json.dumps(found, allow_nan=False)


def test_a_lost_term_is_a_wrong_result() -> None:
    a, b = (uniform_matrix(256, "float64", [7, which]) for which in (0, 1))
    assert scaled_error(a[:3], b, (a @ b)[:3]) <= 1
    assert scaled_error(a[:3], b, (a[:, :-1] @ b[:-1])[:3]) > 1
    assert not scaled_error(a[:3], b, np.full((3, 256), np.nan)) <= 1


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = measure(Scripted("base", 1.0, (None,)), Scripted("chunked", 2.0, (2, 4)))
    report.plot(report.document(measured, ["base"]), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_bars_of_one_round_are_drawn(tmp_path: Path) -> None:
    """Seconds of which share * median / max rounds to more than the share, which would be a bar of negative length."""
    pytest.importorskip("matplotlib")
    for base, other in ((0.13522987986828883, 0.8475863032002955), (0.9392100136157321, 0.3818230334505242)):
        measured = measure(Scripted("base", base, (None,)), Scripted("chunked", other, (2,)))
        report.plot(report.document(measured, ["base"]), tmp_path / "plot.png")


def test_command_measures_numpy_and_dask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "cpu.json"
    peers, settings = ["--peers", "numpy", "dask"], ["--size", "256", "--repeat", "2", "--chunks", "2", "4"]
    assert cpu.main([*peers, *settings, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["schema_version"] == report.SCHEMA_VERSION
    assert found["settings"]["size"] == [256]
    assert found["hardware"]["cores_usable"] >= 1
    assert found["software"]["numpy"] == np.__version__
    assert [peer["name"] for peer in found["peers"]] == ["numpy", "dask"]
    assert [(one["peer"], one["grid"]) for one in found["results"]] == [
        ("numpy", None),
        ("dask", 2),
        ("dask", 4),
    ]
    for one in found["results"]:
        assert one["failure"] is None
        assert len(one["seconds"]) == 2
        assert 0 < one["min"] <= one["median"] <= one["max"]
        assert one["error"] <= 1
        assert set(one["ratios"]) == {"numpy", "dask@best", "dask@2x2", "dask@4x4"}
        assert one["peer"] in printed
    if sys.platform == "linux":
        for one in found["results"][1:]:
            assert all(len(details["memory"]) == 2 for details in one["details"])
    # A report is for others to read: it names no place on the machine that made it.
    assert str(ROOT) not in out.read_text()
    assert str(tmp_path) not in out.read_text()


def test_the_stateful_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "stateful.json"
    assert stateful.main(["--cpu", "--size", "96", "--repeat", "3", "--out", str(out)]) == 0
    (one,) = json.loads(out.read_text())["results"]
    assert one["error"] <= 1
    for way in ("stateless", "execute", "reset"):
        assert len(one[way]["seconds"]) == 3
        assert 0 < one[way]["min"] <= one[way]["median"] <= one[way]["max"]
    assert one["execute"]["stateless_over_this"] > 0
    assert str(tmp_path) not in out.read_text()


def test_the_batches_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "batches.json"
    assert batches.main(["--smoke", "--repeat", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert len(found["results"]) == 3
    for one in found["results"]:
        assert one["ratio_seconds"] > 0
        assert max(one["dask"]["error"], one["distmm"]["error"]) <= 1
        assert one["case"] in printed
    assert str(ROOT) not in out.read_text()


def test_the_verdict_of_a_sweep_compares_auto_with_the_best():
    from benchmarks.gpu.cases import SLABS, sweep
    from benchmarks.gpu.report import rows, verdict

    found, times = [], {"distmm": 1.1, "peer": 1.0, "cublasmp": 2.0}
    cases = list(sweep(["float32"], [4], [2, 4], 3))
    assert {case.variant for case in cases} == {SLABS, "4x4"}
    for case in cases:
        seconds = times[case.peer] * (1 if case.method in ("auto", "summa", "allgather") else 3)
        seconds /= 1.1 if case.peer == "distmm" and case.workers == 4 else 1
        took = {"engine": "peer", "method": "reducescatter"} if case.peer == "distmm" else {}
        found += rows(case, 4, {"seconds": [seconds], "run_seconds": [seconds]} | took)
    text = verdict(found)
    products = len(cases) // (1 + 2 * 3 + 1 + 2 * 4) * 2
    assert f"within 5 %: {products // 2} of {products}; the worst takes 1.100 of the best" in text
    assert "(peer allgather)" in text
    assert f"what it takes, if asked for, within 5 %: 0 of {products}; the worst takes 3.000" in text
    assert {case.shape.name for case in sweep(["float32"], [4], [2], 3, ["N=2", "odd"])} == {"N=2048", "odd 10007"}
    assert verdict([]) == ""


@pytest.mark.parametrize("name", ["gpu-2-sweep", "gpu-1-2-sweep"])
def test_the_cost_model_takes_what_was_measured_to_be_quickest(name):
    """Of the engines and methods of each product that a sweep has timed, within 5 %."""
    from benchmarks.gpu.cases import SWEPT, Case
    from benchmarks.gpu.model import plan_of

    shapes, products = {shape.name: shape for shape in SWEPT}, {}
    for entry in json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]:
        if entry["peer"] in ("peer", "cublasmp") and entry["kind"] == "run" and entry["failure"] is None:
            variant, method, gpus = entry["variant"].split(", ")
            count = int(gpus.removesuffix(" GPUs"))
            ways = products.setdefault((entry["dtype"], entry["case"], variant, count), {})
            # On one GPU all methods are the same thing.
            way = (entry["peer"], method if count > 1 else "local")
            ways[way] = min(entry["ms"], ways.get(way, entry["ms"]))
    assert len(products) >= 10
    for (dtype, case, variant, count), ways in products.items():
        asked = {way: Case(way[0], variant, dtype, shapes[case], 1, method=way[1]) for way in ways}
        expected = {way: plan_of(one, count).estimate.seconds for way, one in asked.items()}
        taken = min(expected, key=expected.get)
        assert ways[taken] <= 1.05 * min(ways.values()), (dtype, case, variant, count, taken, ways)


def test_operations_of_a_batch_lie_as_the_driver_reads_them():
    """Read by the structures of cuda.h, they copy what they are to copy."""
    import ctypes

    from benchmarks.gpu.batch import operations
    from dask_distmm.layout.rectangles import Span

    class Place(ctypes.Structure):
        _fields_ = [
            ("ptr", ctypes.c_uint64),
            ("row", ctypes.c_size_t),
            ("layer", ctypes.c_size_t),
            ("at", ctypes.c_int * 2),
        ]

    class Array(ctypes.Structure):
        _fields_ = [("array", ctypes.c_void_p), ("offset", ctypes.c_size_t * 3)]

    class Either(ctypes.Union):
        _fields_ = [("ptr", Place), ("array", Array)]

    class Operand(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("op", Either)]

    class Operation(ctypes.Structure):
        _fields_ = [("src", Operand), ("dst", Operand), ("extent", ctypes.c_size_t * 3), ("order", ctypes.c_int)]
        _fields_ += [("flags", ctypes.c_uint)]

    class Rectangle(NamedTuple):
        source: Span
        target: Span
        rows: int
        cols: int

    source, target = np.random.default_rng().integers(1, 256, (12, 40), np.uint8), np.zeros((20, 64), np.uint8)
    at = [x.__array_interface__["data"][0] for x in (source, target)]
    found = [
        Rectangle(Span(at[0] + 40 * r, 40, 1), Span(at[1] + 64 * (r + 3) + 5, 64, 1), rows, 40)
        for r, rows in ((0, 5), (5, 7))
    ]
    made = operations(found, overlap=True)
    assert made.dtype.itemsize == ctypes.sizeof(Operation)
    for one in (Operation * len(made)).from_address(made.__array_interface__["data"][0]):
        assert (one.src.type, one.dst.type, one.order, one.flags, one.extent[2]) == (1, 1, 1, 1, 1)
        for row in range(one.extent[1]):
            places = (place.op.ptr.ptr + row * place.op.ptr.row for place in (one.dst, one.src))
            ctypes.memmove(*places, one.extent[0])
    expected = np.zeros_like(target)
    expected[3:15, 5:45] = source
    np.testing.assert_array_equal(target, expected)


class Answers:
    """Teams that measure what they are told to."""

    def __init__(self, seconds: dict[str, Any]) -> None:
        self.seconds, self.asked, self.started = seconds, [], 0

    def start(self):
        self.started += 1
        return self

    def ask(self, case, timeout):
        from benchmarks.gpu.team import TeamError

        self.asked.append(case.method)
        what = self.seconds[case.method]
        if what == "ends":
            raise TeamError("process 0 died")
        if what == "wrong":
            return {"failure": "wrong result"}, True
        # Slower and slower, as a machine that gets warm.
        times = [what + 0.001 * len(self.asked)] * case.repeat
        return {"seconds": times, "run_seconds": times, "timings": {"multiply": times}, "method": case.method}, True

    def kill(self):
        pass

    close = kill


def test_cases_of_a_product_take_turns():
    from benchmarks.gpu.cases import SLABS, Case, square
    from benchmarks.gpu.team import Crew, in_rounds

    methods = {"auto": 1.0, "allgather": 1.1, "local": 3.0, "summa": "wrong", "reducescatter": "ends"}
    cases = [Case("peer", SLABS, "float64", square(8), 7, method=method) for method in methods]
    teams = Answers(methods)
    crew = Crew(teams.start, timeout=10, end=float("inf"))
    found = {case.method: answer for case, answer in in_rounds(cases, crew.ask, 3)}
    crew.close()
    # What is slow, or fails, is not asked again.
    assert teams.asked == [*methods, "allgather", "auto", "auto", "allgather"]
    assert {method: len(found[method].get("seconds", [])) for method in methods} == {
        **{"auto": 9, "allgather": 9, "local": 3},
        **{"summa": 0, "reducescatter": 0},
    }
    assert found["auto"]["timings"]["multiply"] == found["auto"]["run_seconds"] == found["auto"]["seconds"]
    assert found["summa"]["failure"] == "wrong result"
    assert found["reducescatter"]["failure"] == "process 0 died"
    # The team that was ended was started again.
    assert teams.started == 2
    # And when there is no time, what is known is told.
    crew = Crew(teams.start, timeout=10, end=0.0)
    assert {answer["failure"] for _, answer in in_rounds(cases, crew.ask, 3)} == {"no time left"}


def test_the_gpu_benchmark_asks_for_all_cases_and_writes_what_it_knows(tmp_path, monkeypatch, capsys):
    from benchmarks.gpu import __main__ as command

    teams = Answers({"auto": 1.0, "allgather": 1.2, "reducescatter": 1.3, "local": 9.0})
    started = []
    monkeypatch.setattr(command.Benchmark, "_start", lambda self, group, gpus: started.append(group) or teams.start())
    options = (
        "--gpus 2 --sweep --counts 2 4 --types float32 --sizes 64 --chunks 4 --repeat 6 --peers cublas peer distmm"
    )
    parsed = command.parse([*options.split(), "--out", str(tmp_path / "gpu.json")])
    benchmark = command.Benchmark(parsed, ["0", "1"], {})
    benchmark.run()
    assert started == ["cublas", "cluster", "cluster"]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["results"] == benchmark.results
    found = [(entry["peer"], entry["variant"]) for entry in written["results"] if entry["kind"] == "run"]
    assert len(found) == 3 + 2 * 2 + 9 * 2 * (1 + 2 * 3)
    assert {len(e["seconds"]) for e in written["results"] if e["variant"].endswith("local, 2 GPUs")} == {2}
    text = command.report.verdict(written["results"])
    assert "within 5 %: 18 of 18" in text
    assert "float32" in capsys.readouterr().out


def test_scaling_compares_with_one_gpu_and_with_the_bound(tmp_path, monkeypatch, capsys):
    from benchmarks.gpu import __main__ as command
    from benchmarks.gpu import scaling

    teams, started = Answers({"auto": 1.25, "allgather": 1.0, "summa": 1.3, "reducescatter": 1.5}), []
    monkeypatch.setattr(command.Benchmark, "_start", lambda self, *team: started.append(team) or teams.start())
    files = []
    for counts in ("1 2", "4 8"):
        files.append(str(tmp_path / f"{counts[0]}.json"))
        options = f"--gpus 8 --scaling --counts {counts} --types float32 --rounds 1 --peers cublas torch peer distmm"
        benchmark = command.Benchmark(command.parse([*options.split(), "--out", files[-1]]), list("01234567"), {})
        benchmark.run()
    teams_of = [("cublas", 4), ("cublas", 8), ("torch", 4), ("torch", 8), ("cluster", 8)]
    assert started == [("cublas", 1), ("cublas", 2), ("torch", 2), ("cluster", 8), *teams_of]
    found = [(e["gpus"], e["n"]) for e in benchmark.results if e["peer"] == "distmm" and e["kind"] == "wall"]
    # 4 x 10^9 elements an operand per 4 GPUs.
    assert found == [(4, 32768), (4, 63232), (8, 32768), (8, 89344)]
    capsys.readouterr()
    assert scaling.main([*files, "--plot", str(tmp_path / "scaling.png")]) == 0
    text = capsys.readouterr().out
    (row,) = [line.split() for line in text.splitlines() if line.startswith("float32  strong distmm (multiply)")]
    # These take the same time on however many GPUs, but for their drift. Rate, share of one GPU, of as many.
    rate = 2 * 32768**3 / 1.25e12
    numbers = [float(cell.rstrip("%")) for cell in row[4:10]]
    assert numbers == pytest.approx([rate, 100, 100, rate / 2, 50, 100], rel=0.05)
    assert "within 5 %: 2 of 8; the worst takes 1.2" in text
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda flow: flow[0] != flow[1]), max_size=12))
def test_flows_share_what_gpus_can_send_and_receive(flows):
    from benchmarks.gpu.model import even_shares

    rates = even_shares(flows, 60.0)
    for (source, target), rate in zip(flows, rates, strict=True):
        sent = [other for flow, other in zip(flows, rates, strict=True) if flow[0] == source]
        received = [other for flow, other in zip(flows, rates, strict=True) if flow[1] == target]
        assert max(sum(sent), sum(received)) < 60.0 + 1e-9
        # It could have more only at the cost of one that has no more than it.
        assert any(sum(side) > 60.0 - 1e-9 and rate > max(side) - 1e-9 for side in (sent, received))


def test_the_model_of_the_peer_engine_knows_the_bound_and_who_meets_whom():
    from benchmarks.gpu.model import SLABS, make_plan, rank_of, simulate

    def seconds(gpus, n, chunks, skew, **options):
        made = make_plan(gpus, n, chunks, "bfloat16", "allgather")
        ranks = [rank_of(made, rank) for rank in range(len(made.ranks))]
        assert sum(product.flops for rank in ranks for product in rank.products) == made.flops
        starts = [skew * rank for rank in range(gpus)]
        return max(simulate(ranks, starts, 400e9, 800e12, **options))

    assert seconds(1, 4096, SLABS, 0) == pytest.approx(2 * 4096**3 / 800e12)
    # Others' slabs come while a rank multiplies its own.
    assert seconds(4, 16384, SLABS, 0) == pytest.approx(2 * 16384**3 / 4 / 800e12)
    # With links that slow, pulls are all that counts.
    apart = seconds(4, 4096, 4, 1e-5, together=False)
    together = seconds(4, 4096, 4, 1e-5)
    assert together < 0.8 * apart
    assert seconds(4, 4096, 4, 0) == pytest.approx(together, rel=0.01)


def test_the_model_prints_shares(capsys):
    from benchmarks.gpu import model

    assert model.main(["--gpus", "2", "--sizes", "4096", "--chunks", "0", "4", "--type", "float64"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert "all at the same time" in first
    assert [row.split()[2:5] for row in rows] == [["N=4096", "one", "chunk"], ["N=4096", "4", "x"]]
    assert all(0 < float(share) < 1.01 for row in rows for share in row.split()[-2:])


def test_overhead_at_small_size(client):
    """Each way is timed as often as asked for, and its first product is checked."""
    from benchmarks import overhead

    found = overhead.compare(client, 2, 2)
    assert {name: len(taken) for name, taken in found.items()} == {"distmm": 2, "dask": 2, "task": 2}
    assert all(seconds > 0 for taken in found.values() for seconds in taken)
    assert overhead.extents(1) == (64, (32, 64))


def test_programs_of_enable(client):
    """There are sixty and more, under names of their own; each computes with and without."""
    from benchmarks import enabled

    names = [name for name, _, _ in enabled.programs(1.0)]
    assert len(set(names)) == len(names) >= 60
    for name, inputs, compute in enabled.programs(0.02):
        if "chain" in name or "diagonal" in name:
            for on in (True, False):
                seconds, grown = enabled.once(client, inputs, compute, on)
                assert seconds > 0 <= grown


def test_one_command_rebuilds_the_pages():
    """Each module has the option for its file, and the commands of the list are those of results that are there."""
    from benchmarks.__main__ import COMMANDS, RESULTS

    for name, command in COMMANDS.items():
        module, *_, option = command.split()
        assert f'"{option}"' in (ROOT / "benchmarks" / f"{module}.py").read_text()
        assert (RESULTS / f"{name}.json").is_file()
        assert f"python -m benchmarks.{module}" in (ROOT / "benchmarks" / "README.md").read_text()
