"""What a person sees of runs: records, bars, the page of the dashboard, metrics."""

from __future__ import annotations

import io
import math
import threading
import urllib.request

import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import Client, Event, LocalCluster, futures_of, wait
from distributed import progress as dask_progress
from faults import inject, remove_faults
from hypothesis import given
from hypothesis import strategies as st
from run_events import events

import dask_distmm
from dask_distmm import PlanError, linalg, matmul
from dask_distmm import diagnostics as tables
from dask_distmm.diagnostics import as_html, as_lines, noted
from dask_distmm.errors import ProtocolError
from dask_distmm.runtime.messages import ProgressLine, arguments_of
from dask_distmm.runtime.plugin import DistMMSchedulerPlugin
from dask_distmm.runtime.run import PHASES, Records, Run, by_phase, progress_of

START = {"action": "start", "method": "summa", "engine": "numpy", "grid": (1, 2, 1), "flops": 4e9, "bound": 8e9}
START |= {"ranks": ("tcp://a", "tcp://b"), "projected_bytes": {"tcp://a": 2**20, "tcp://b": 2**21}}
RANKS = {
    "tcp://a": {"seconds": 1.0, "timings": {"multiply": 0.75, "deliver": 0.125, "total": 1.0}},
    "tcp://b": {"seconds": 2.0, "timings": {"multiply": 2.0}},
}
DONE = {"action": "done", "seconds": 2.0, "received_bytes": 100, "held_bytes": {"tcp://a": 2**19}, "ranks": RANKS}
PROGRESS = {"action": "progress", "share": 0.5, "received_bytes": 40}
ENDS = {"done": DONE, "restarted": {"action": "restart", "reason": "a worker is gone"}}
ENDS |= {"failed": {"action": "failed", "reason": "no <memory>\nat all"}, "released": {"action": "released"}}


def note(records, run, *events):
    for number, event in enumerate(events):
        records.note(100.0 + number, {"run": run, "name": "matmul-1f0c5e2a77", **event})


def test_a_run_that_is_done():
    records = Records()
    note(records, 7, START, PROGRESS)
    (record,) = records
    assert (record.outcome, record.share, record.received_bytes, record.rate) == ("running", 0.5, 40, 0)
    note(records, 7, DONE)
    assert (record.outcome, record.share, record.rate, record.share_of_bound) == ("done", 1.0, 2e9, 0.25)
    assert record.phases["tcp://a"] == dict.fromkeys(PHASES, 0.0) | {"multiply": 0.75, "deliver": 0.125, "other": 0.125}
    assert records.seconds["multiply"] == 2.0
    assert (records.flops, records.received_bytes) == (4e9, 100)
    assert records.of("matmul-1f0c5e2a77") is record
    assert records.of("another") is None


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(sorted(ENDS)), st.booleans()), max_size=20))
def test_sums_outlive_the_records(ends):
    """However many runs there are, and whether they ever began: all are counted, the last ones are kept."""
    records = Records(most=3)
    for number, (_, outcome, began) in enumerate(ends):
        begins = [START] if began or outcome == "done" else []
        note(records, number, *begins, ENDS[outcome])
    for outcome in ENDS:
        assert records.ended[outcome] == sum(end[1] == outcome for end in ends)
    assert [record.run_id for record in records] == list(range(len(ends)))[-3:]
    table = tables.runs(list(records), 200.0)
    assert table["run"] == [record.run_id for record in records][::-1]
    assert {len(column) for column in table.values()} == {len(records)}


@given(st.floats(0, 10), st.dictionaries(st.sampled_from([*PHASES, "total"]), st.floats(0, 10)))
def test_phases_cover_a_rank(seconds, timings):
    found = by_phase(seconds, timings)
    assert tuple(found) == PHASES
    assert min(found.values()) >= 0
    assert sum(found.values()) == pytest.approx(max(seconds, sum(found.values()) - found["other"]))


def test_the_columns_of_the_page():
    records = Records()
    note(records, 1, START, DONE)
    note(records, 2, START, ENDS["failed"])
    note(records, 3, START, PROGRESS)
    table = tables.runs(list(records), 111.0)
    assert table["outcome"] == ["running", "failed", "done"]
    assert table["name"] == ["matmul-1f0c5e2a"] * 3
    assert table["seconds"] == [11.0, None, 2.0]
    assert table["of_bound"] == [None, None, 0.25]
    assert table["reason"] == ["", "no <memory>", ""]
    assert table["speed"] == ["", "", "2 GFLOP/s"]
    # The current run is the one to look at, with the time so far.
    going = tables.shown(list(records), None)
    assert going.run_id == 3
    bars = tables.phase_bars(going, 111.0)
    assert (set(bars["phase"]), bars["right"]) == ({tables.RUNNING}, [11.0, 11.0])
    assert "running, 50% done (the newest that is running" in tables.caption(going, None)
    note(records, 3, ENDS["released"])
    record = tables.shown(list(records), None)
    assert record.run_id == 1
    assert tables.shown(list(records), 3).run_id == 3
    # Of a run that failed all of the reason.
    assert "no &lt;memory&gt;\nat all" in tables.caption(tables.shown(list(records), 2), 2)
    bars = tables.phase_bars(record, 111.0)
    assert bars["phase"] == ["multiply", "deliver", "other", "multiply"]
    assert set(bars["rank"]) == set(tables.rank_names(record)) == {"0: a", "1: b"}
    assert (bars["left"], bars["right"]) == ([0.0, 0.75, 0.875, 0.0], [0.75, 0.875, 1.0, 2.0])
    memory = tables.memory_bars(record, {"tcp://b": 2**22})
    assert memory["projected"] == [1.0, 2.0]
    assert (memory["held"][0], memory["process"][1]) == (0.5, 4.0)
    assert math.isnan(memory["held"][1])
    assert math.isnan(memory["process"][0])
    assert tables.rates(list(records))[1]["run"] == ["1"]
    assert "0 running, 1 done, 0 restarted, 1 failed" in tables.summary(records)
    assert tables.shown([], None) is None
    assert not tables.phase_bars(None, 0.0)["rank"]
    # Of a program the longest kernels, each in its colour; the others are part of "other".
    seconds = {f"kernel{number}()": float(number) for number in range(1, 9)}
    record.phases = {address: {**seconds, "wait": 2.0, "other": 1.0} for address in record.ranks}
    bars = tables.phase_bars(record, 111.0)
    shown = [f"kernel{number}()" for number in range(8, 3, -1)]
    assert bars["phase"] == [*shown, "wait", "other"] * 2
    assert bars["right"][-1] == sum(seconds.values()) + 3
    assert len(set(bars["colour"])) == 7


def test_reasons_begin_with_the_error():
    long = "run 5 of matmul-4be2 failed while voting on tcp://127.0.0.1:1, tcp://127.0.0.1:2: EngineError: a chunk"
    assert tables.short_reason(long + "\nmore") == "EngineError: a chunk"
    assert tables.short_reason("run 5 of m failed while running: no answer") == "no answer"
    assert tables.short_reason("a worker is gone") == "a worker is gone"


def test_rates_have_a_unit_that_suits():
    found = [tables.format_rate(rate) for rate in (1.96e9, 165e9, 51.6e12)]
    assert found == ["1.96 GFLOP/s", "165 GFLOP/s", "51.6 TFLOP/s"]
    records = Records()
    assert tables.rates(list(records))[0] == "GFLOP/s"
    note(records, 1, START | {"flops": 4e9, "bound": 8e9}, DONE)
    unit, last = tables.rates(list(records))
    assert (unit, last["rate"]) == ("GFLOP/s", [2.0])
    note(records, 2, START | {"flops": 1e14, "bound": 1e14}, DONE)
    unit, last = tables.rates(list(records))
    assert (unit, last["rate"]) == ("TFLOP/s", [0.002, 50.0])


def test_waves_are_one_product():
    records = Records()
    for number in range(4):
        records.expect(f"x-wave-{number:05d}")
    waves = records.waves["x"]
    assert (waves.count, waves.next, waves.told(0.0, 5.0)) == (4, 0, "0 of 4 waves, 0 B loaded")
    for number in range(2):
        start = {"run": number, "name": f"x-wave-{number:05d}"}
        records.note(10.0 + 5 * number, {**START, **start})
        records.note(15.0 + 5 * number, {**DONE, **start, "loaded_bytes": 2**30, "made_bytes": 2**20})
    assert waves.next == 2
    assert waves.told(0.5, 30.0) == "2 of 4 waves, 2.00 GiB loaded, 2.00 MiB of D made, 12.00 s left"
    records.expect("x-wave-00001")  # the same product again
    assert waves.next == 1


def test_waves_of_a_part():
    """Waves that a part of D does not need are not waited for, and a later part is counted anew."""
    records = Records()
    for number in (2, 3):
        records.expect(f"x-wave-{number:05d}")
    waves = records.waves["x"]
    assert (waves.count, waves.next) == (2, 2)
    for number in (2, 3):
        start = {"run": number, "name": f"x-wave-{number:05d}"}
        records.note(1.0, {**START, **start})
        records.note(2.0, {**DONE, **start, "loaded_bytes": 0, "made_bytes": 0})
    assert waves.next is None
    records.expect("x-wave-00000")
    assert (waves.count, waves.next) == (1, 0)
    assert tables.runs(list(records), 3.0)["name"] == ["x wave 3", "x wave 2"]


def test_what_a_participant_may_report():
    handler = DistMMSchedulerPlugin.hear_progress
    arguments_of(handler, {"run_id": 1, "share": 0.5, "received_bytes": 7})
    for turns in ({"turns": -1}, {"turns_in_all": 0.5}):
        with pytest.raises(ProtocolError, match=f"malformed message hear_progress: its field {min(turns)} is"):
            arguments_of(handler, {"run_id": 1, "share": 0.5} | turns)
    for share, received in [(math.nan, 7), (1.5, 7), (-0.1, 7), (0.5, -1), (0.5, 1.5), (None, 0), (0.5, None)]:
        with pytest.raises(ProtocolError, match="malformed message hear_progress: its field (share|received_bytes) is"):
            arguments_of(handler, {"run_id": 1, "share": share, "received_bytes": received})
    run = Run(1, "m", "k", frozenset("ab"), phase="running")
    for address, received in [("a", 5), ("b", 7), ("a", 3), ("stranger", 50)]:
        run.report(address, 0.1, 0.0, received)
    assert run.received == {"a": 5, "b": 7}
    assert run.received_bytes == 12


def test_turns_of_a_loop_and_the_time_that_is_left():
    run, words = Run(1, "m", "k", frozenset("ab"), phase="running"), []
    reports = [(0, 0, 1.0), (10, 100, 2.0), (30, 100, 4.0), (99, 100, 9.0), (100, 100, 9.5), (3, 0, 10.0), (8, 0, 11.0)]
    for turns, in_all, now in reports:
        run.report("a", 0.5, now, 0, turns, in_all)
        run.report("stranger", 0.5, now, 0, 1000, in_all)
        run.report("b", 0.5, now)
        words.append(progress_of(None, [run], Records(), "m").note)
    left = ["7.00 s", "78.65 ms"]
    assert words == [
        "", "turn 10 of 100", f"turn 30 of 100, {left[0]} left", f"turn 99 of 100, {left[1]} left", "turn 100 of 100",
        "turn 3", "turn 8",
    ]  # fmt: skip
    records = Records()
    records.note(1.0, {**START, "run": 1, "name": "m"})
    figures = {"share": 0.3, "received_bytes": 0, "turns": 7, "turns_in_all": 9, "seconds_left": 3.0}
    records.note(2.0, {"action": "progress", "run": 1, "name": "m", **figures})
    assert "30% done, turn 7 of 9, 3.00 s left" in tables.caption(tables.shown(list(records), None), None)


def test_bytes_arrive_while_the_share_stands_still():
    """As during a gather: what `progress` answers follows each report, not each hundredth of the work."""
    run = Run(1, "m", "k", frozenset("ab"), phase="running", expected_bytes=30)
    for received in (10, 20):
        run.report("a", 0.0, 0.0, received)
        line = progress_of(None, [run], Records(), "m")
        assert (line.phase, line.share, line.received_bytes, line.expected_bytes) == ("multiplying", 0.0, received, 30)


@pytest.mark.parametrize(
    ("received", "expected", "note"),
    [
        (2**29, 2**30, "512.00 MiB of 1.00 GiB received"),
        (0, 2**30, "0 B of 1.00 GiB received"),
        (2**30, 0, "1.00 GiB received"),
        (2**30, 2**29, "1.00 GiB received"),
        (0, 0, ""),
    ],
)
def test_bytes_beside_a_bar(received, expected, note):
    assert noted(ProgressLine("m-0", "multiplying", 0.5, 3, received, expected)).note == note


FOUND = [
    noted(ProgressLine("matmul-1f0c5e2a77", "multiplying", 0.5, 3, 2**30)),
    noted(ProgressLine("<b>-0", "failed", 0.0)),
    ProgressLine("results", "", 0.0, note="0 of 16"),
]


def test_bars():
    first, second, last = as_lines(FOUND)
    assert first == "matmul-1f0c5e2a  run 3  multiplying  [" + "#" * 15 + " " * 15 + "]  50%  1.00 GiB received"
    assert last.endswith("]   0%  0 of 16")
    assert len({line.index("[") for line in (first, second, last)}) == 1
    html = as_html(FOUND)
    assert "&lt;b&gt;-0" in html
    assert "<b>" not in html
    assert 'aria-valuenow="50"' in html
    assert as_lines([]) == []


# On a cluster


class Shown(io.StringIO):
    """Text that says when something was written."""

    def __init__(self, terminal=False):
        super().__init__()
        self.written, self.isatty = threading.Event(), lambda: terminal

    def write(self, text):
        self.written.set()
        return super().write(text)


def held(x, name):
    """Chunks that are not there before an event."""

    def later(block):
        Event(name).wait(120)
        return block

    return x.map_blocks(later, dtype=x.dtype, meta=np.empty((0, 0)))


def test_progress(client, capsys):
    """All multiplies that the results need, till they are done; Dask's own bar beside it."""
    a, b = np.random.default_rng().standard_normal((2, 300, 300))
    x, y = da.from_array(a, chunks=150), da.from_array(b, chunks=100)
    text, drawn = Shown(), Shown(terminal=True)
    go = Event("test-progress-go")
    # Nothing may be over before it was looked at: the first line lets the chunks go.
    opener = threading.Thread(target=lambda: text.written.wait(120) and go.set())
    opener.start()
    c = (matmul(matmul(held(x, go.name), y), y) + 1).persist()
    dask_distmm.progress(c, file=text)
    opener.join()
    assert {future.status for future in futures_of(c)} == {"finished"}
    dask_distmm.progress({"also": [c]}, file=drawn)
    dask_progress(c, notebook=False)
    assert "100% Completed" in capsys.readouterr().out
    lines = text.getvalue().splitlines()
    assert lines[-1].endswith(f"100%  {c.npartitions} of {c.npartitions}")
    assert sum(line.startswith("matmul-") and "  reading  " in line for line in lines) == 2
    assert sum(line.startswith("matmul-") and "  done  " in line for line in lines) == 2
    assert "\x1b[2Kresults" in drawn.getvalue()
    assert_product(a @ b, b, (c - 1).compute())


def test_progress_of_what_fails(client):
    """It ends, and leaves the error to whoever wants the result."""

    def bad(block):
        raise ValueError("no such chunk")

    x = da.ones((200, 200), chunks=100)
    c = matmul(x.map_blocks(bad, dtype=float, meta=np.empty((0, 0))), x).persist()
    text = Shown()
    dask_distmm.progress(c, file=text)
    assert text.getvalue().splitlines()[-1].startswith("results  failed")
    assert "  done  " not in text.getvalue()
    with pytest.raises(ValueError, match="no such chunk"):
        c.compute()


def test_progress_needs_something_to_watch(client):
    x = da.ones((200, 200), chunks=100)
    with pytest.raises(PlanError, match="persist"):
        dask_distmm.progress(matmul(x, x))


def get(cluster, path):
    # Not `dashboard_link`, which names the host as others see it.
    url = f"http://127.0.0.1:{cluster.scheduler.http_server.port}{path}"
    with urllib.request.urlopen(url, timeout=120) as answer:
        return answer.read().decode()


def test_phases_of_factorizations_and_programs(client):
    """Nearly all of a rank's time has a name: of a factorization its kinds of steps, of a program its kernels."""
    x = da.random.default_rng(0).random((4000, 20), chunks=(500, 20))
    spd = da.eye(900, chunks=300) + 0.001
    for array, phases in (
        (linalg.cholesky(spd, method="columns"), {"gather", "panel", "update", "deliver"}),
        (linalg.qr(x, "r", method="rows"), {"gram()", "wait"}),
    ):
        array.compute()
        done = client.get_events("distmm")[-1][1]
        assert done["action"] == "done"
        for rank in done["ranks"].values():
            assert phases <= set(rank["timings"])
            found = by_phase(**rank)
            assert all(found[phase] == rank["timings"][phase] for phase in phases)
            assert sum(found.values()) <= rank["seconds"] * (1 + 1e-9)


def test_phases_by_rank_are_in_the_events(client):
    x = da.random.random((300, 300), chunks=100)
    matmul(x, x, method="summa").compute()
    start, done = (events(client, action)[-1] for action in ("start", "done"))
    assert start["bound"] > 0
    assert set(start["ranks"]) == set(done["ranks"])
    assert all(0 < one["timings"]["multiply"] <= one["seconds"] <= done["seconds"] for one in done["ranks"].values())


def test_metrics():
    """Of the scheduler that a process has started last."""
    pytest.importorskip("prometheus_client")

    def scraped():
        lines = get(cluster, "/metrics").splitlines()
        found = (line.rsplit(" ", 1) for line in lines if line.startswith("dask_distmm_"))
        return {name: float(value) for name, value in found}

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster, Client(cluster):
        x = da.random.random((200, 200), chunks=100)
        matmul(x, x).compute()
        before = scraped()
        y = da.random.random((300, 300), chunks=100)
        matmul(y, y, method="summa").compute()
        after = scraped()
    assert after['dask_distmm_runs_total{outcome="done"}'] == before['dask_distmm_runs_total{outcome="done"}'] + 1
    assert after["dask_distmm_flops_total"] - before["dask_distmm_flops_total"] == 2 * 300**3
    assert after["dask_distmm_received_bytes_total"] > before["dask_distmm_received_bytes_total"]
    multiply = 'dask_distmm_phase_seconds_total{phase="multiply"}'
    assert after[multiply] > before[multiply]
    assert after["dask_distmm_live_runs"] == 0
    assert after["dask_distmm_restarts_total"] >= 0


# The table as it is drawn: the texts of its cells. Columns that Bokeh holds say nothing of what is seen.
CELLS = """(() => {
    const found = [];
    const walk = node => {
        if (node.shadowRoot) walk(node.shadowRoot);
        if (node.classList && node.classList.contains('slick-row'))
            found.push([...node.querySelectorAll('.slick-cell')].map(cell => cell.innerText).join('|'));
        for (const child of node.children || []) walk(child);
    };
    walk(document.documentElement);
    return found.join('\\n');
})()"""


def test_the_page_in_a_browser(process_cluster, client, tmp_path):
    bokeh = pytest.importorskip("bokeh")
    from browser import CHROMIUM, visit

    x = client.persist(da.random.random((300, 300), chunks=100))
    wait(matmul(x, x, method="summa").persist())
    # What fails while the page is made is answered with 500, which raises.
    for path in ("/distmm", "/status"):
        assert 'href="distmm"' in get(process_cluster, path)
    if CHROMIUM is None:
        pytest.skip("there is no Chromium to draw the page")
    url = f"http://127.0.0.1:{process_cluster.scheduler.http_server.port}/distmm"
    held = []

    def a_run_that_takes_a_while():
        """It is drawn while it goes on; the same row must say later that it is done."""
        client.run(inject, "execute", "sleep", seconds=3.0)
        try:
            held.append(matmul(x, x + 1, method="summa").persist())
            wait(held)
        finally:
            client.run(remove_faults)

    def says_done(drawn):
        return bokeh.__version__.startswith("3.9.") or drawn.splitlines()[0].split("|")[2] == "done"

    drawn, png = visit(url, CELLS, tmp_path, meanwhile=a_run_that_takes_a_while, ready=says_done)
    assert says_done(drawn)
    assert "GFLOP/s" in drawn
    assert png.startswith(b"\x89PNG")


def test_no_page_without_a_dashboard():
    """A scheduler without one multiplies as ever."""
    with (
        LocalCluster(
            1, processes=False, threads_per_worker=1, dashboard_address=":0", scheduler_kwargs={"dashboard": False}
        ) as cluster,
        Client(cluster) as c,
    ):
        x = da.random.random((100, 100), chunks=50)
        wait(matmul(x, x).persist())
        assert [event["action"] for event in events(c)] == ["start", "done"]
