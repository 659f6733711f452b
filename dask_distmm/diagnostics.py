"""Shows runs to users, during them and afterwards: bars, a page of the dashboard, metrics.

`progress` tells in a terminal or a notebook how far runs are. The page ``/distmm`` of the scheduler's dashboard has
runs, their phases by rank, bytes, speed and memory; Bokeh is imported for it only. Prometheus metrics of runs are
beside Dask's own on the scheduler's ``/metrics``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, TextIO, cast

import dask
from dask.utils import format_bytes, format_time

from dask_distmm.engines.base import log
from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.runtime.keys import wave_of
from dask_distmm.runtime.messages import NAME, ProgressLine, ask
from dask_distmm.runtime.plugin import DistMMSchedulerPlugin
from dask_distmm.runtime.run import PHASES, Record, Records, progress_of, turns_in_words

if TYPE_CHECKING:
    from distributed import Client, Future

# Bars


# How often the scheduler is asked (seconds), and how wide a bar is.
_ASK = 0.25
_WIDTH = 30


Show = Callable[[Sequence[ProgressLine]], None]


def progress(*x: Any, notebook: bool | None = None, file: TextIO | None = None) -> Any:
    """Show how far the multiplies are that collections or futures need, until all of these are done.

    There is a line for each multiply with its phase (reading, waiting, voting, multiplying, done, failed),
    the share of that phase's work which is done, and the bytes that have travelled; and a line for all results.
    ``distributed.progress``, which shows tasks, can be used beside it.

    Parameters
    ----------
    *x : dask collection, distributed.Future, or nested lists or dicts of these
        The running computation: ``x = C.persist()`` or ``x = client.compute(C)``.
    notebook : bool, optional
        Whether to show HTML in a notebook and return at once. By default, whether this is a Jupyter kernel.
    file : file object, optional
        Where text goes; standard error by default. If it is not a terminal, a line is written for each new phase.

    Returns
    -------
    None or awaitable
        In a notebook it returns at once, else when all is done, well or not: errors are raised by ``x.result()`` or
        ``x.compute()`` as always. With an asynchronous client it returns an awaitable.

    Raises
    ------
    PlanError
        Nothing in `x` is being computed on a cluster.

    See Also
    --------
    explain, matmul

    Examples
    --------
    >>> C = dask_distmm.matmul(A, B).persist()    # doctest: +SKIP
    >>> dask_distmm.progress(C)                   # doctest: +SKIP
    matmul-1f0c5e2a  run 3  multiplying  [##################            ]  61%  1.2 GiB
    results                              [                              ]   0%  0 of 16
    """
    from distributed import futures_of
    from distributed.utils import is_kernel

    futures = futures_of(list(x))
    if not futures:
        raise PlanError(
            "progress() found nothing that is being computed on a cluster; "
            "start it first: x = x.persist() or x = client.compute(x)"
        )
    client = futures[0].client
    if is_kernel() if notebook is None else notebook:
        watched = _watch(client, futures, _displayed())
        if client.asynchronous:
            return watched
        threading.Thread(target=_in_background, args=(client, watched), daemon=True, name="distmm-progress").start()
        return None
    watched = _watch(client, futures, _written(file or sys.stderr))
    return watched if client.asynchronous else client.sync(lambda: watched)


def _in_background(client: Client, watched: Coroutine[Any, Any, None]) -> None:
    # The client may be closed first: there is nobody then to tell.
    with contextlib.suppress(Exception):
        client.sync(lambda: watched)


async def _watch(client: Client, futures: Sequence[Future], show: Show) -> None:
    """Ask the scheduler again and again, and show its answers."""
    names: list[str] | None = None
    while True:
        done = sum(future.status != "pending" for future in futures)
        keys = [future.key for future in futures] if names is None else []
        answer = await ask(client.scheduler, DistMMSchedulerPlugin.answer_progress, "", names, keys)
        if answer is None:
            # No multiply has told the scheduler of us yet, so that it does not know the call.
            from distributed.protocol.pickle import dumps

            plugin = DistMMSchedulerPlugin()
            await client.scheduler.register_scheduler_plugin(plugin=dumps(plugin), name=plugin.name, idempotent=True)
            continue
        if answer.status != "OK":
            raise ProtocolError(answer.message)
        lines = list(answer.lines)
        if answer.all_present:
            names = [line.name for line in lines]
        finished = sum(future.status == "finished" for future in futures)
        if finished == len(futures):
            # For a user who has the results it does not matter that chunks of them are still moved or freed.
            lines = [replace(line, phase="done", share=1.0) if line.phase != "failed" else line for line in lines]
        phase = "failed" if any(future.status == "error" for future in futures) else ""
        count = f"{finished} of {len(futures)}"
        show([*map(noted, lines), ProgressLine("results", phase, finished / len(futures), note=count)])
        if done == len(futures):
            return
        await asyncio.sleep(_ASK)


def noted(line: ProgressLine) -> ProgressLine:
    """Return the line of a multiply with a note behind its bar: the bytes that have travelled, or how far waves are."""
    note = f"{format_bytes(line.received_bytes)} received" if line.received_bytes else ""
    # A plan counts the bytes of A, B and D; those of an epilog's inputs come on top.
    if line.phase == "multiplying" and 0 < line.expected_bytes >= line.received_bytes:
        note = f"{format_bytes(line.received_bytes)} of {format_bytes(line.expected_bytes)} received"
    return replace(line, note=line.note or note)


def as_lines(progress: Sequence[ProgressLine]) -> list[str]:
    """Return bars as lines of text."""
    named = [f"{short_name(line.name)}  run {line.run}" if line.run else short_name(line.name) for line in progress]
    heads = [f"{name}  {line.phase}" if line.phase else name for name, line in zip(named, progress, strict=True)]
    width = max(map(len, heads), default=0)
    lines = []
    for head, line in zip(heads, progress, strict=True):
        full, note = int(_WIDTH * line.share), line.note
        lines.append(f"{head:<{width}}  [{'#' * full:<{_WIDTH}}] {line.share:4.0%}" + (f"  {note}" if note else ""))
    return lines


def as_html(progress: Sequence[ProgressLine]) -> str:
    """Return bars as an HTML table; no script, nothing from elsewhere."""
    rows = []
    for line in progress:
        colour = {"failed": "#D55E00", "done": "#009E73"}.get(line.phase, "#0072B2")
        label = f"{line.name} {line.phase} {line.share:.0%}"
        bar = (
            f'<div role="progressbar" aria-label="{escape(label)}" aria-valuenow="{100 * line.share:.0f}" '
            'style="width: 16em; height: 0.9em; border: 1px solid #999">'
            f'<div style="width: {100 * line.share:.1f}%; height: 100%; background: {colour}"></div></div>'
        )
        run = f"run {line.run}" if line.run else ""
        cells = (escape(short_name(line.name)), run, line.phase, bar, f"{line.share:.0%}", escape(line.note))
        style = "text-align: left; padding: 0 0.4em"
        rows.append("<tr>" + "".join(f'<td style="{style}">{cell}</td>' for cell in cells) + "</tr>")
    return f'<table style="border-collapse: collapse">{"".join(rows)}</table>'


def short_name(name: str) -> str:
    """Return a multiply's name with only the first digits of its token, and the number of a wave."""
    if (wave := wave_of(name)) is not None:
        return f"{short_name(wave[0])} wave {wave[1]}"
    front, _, token = name.rpartition("-")
    return f"{front}-{token[:8]}" if front else name


def _written(file: TextIO) -> Show:
    """Return what writes bars: over and over in the same place of a terminal; elsewhere a line for each new phase."""
    phases: dict[str, str] = {}
    drawn = 0

    def show(progress: Sequence[ProgressLine]) -> None:
        nonlocal drawn
        lines = as_lines(progress)
        if file.isatty():
            up = f"\x1b[{drawn}A" if drawn else ""
            file.write(up + "".join(f"\r\x1b[2K{line}\n" for line in lines))
            drawn = len(lines)
        else:
            for text, line in zip(lines, progress, strict=True):
                mark = line.phase or ("done" if line.share == 1 else "")
                if mark and phases.get(line.name) != mark:
                    phases[line.name] = mark
                    file.write(text + "\n")
        file.flush()

    return show


def _displayed() -> Show:
    """Return what shows bars in the output of the notebook's cell that runs now."""
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return lambda progress: handle.update(HTML(as_html(progress)))


# The contents of the page, as columns of plain values


Columns = dict[str, list[Any]]

# Number of runs that have a bar; more could not be told apart.
_BARS = 20
_NAN = float("nan")
_MIB = 2**20
# The time of the current run: its phases are known when it is done.
RUNNING = "so far"
# Okabe and Ito's colours, which everybody can tell apart; grey for "other".
_COLOURS = {
    "gate": "#CC79A7", "gather": "#E69F00", "redistribute": "#E69F00", "multiply": "#0072B2", "panel": "#D55E00",
    "update": "#0072B2", "compute": "#0072B2", "wait": "#F0E442", "deliver": "#56B4E9", "replicate": "#009E73",
    "other": "#BBBBBB", RUNNING: "#F0E442",
}  # fmt: skip
# Those of a program's longest kernels. The legend has room for this many; other kernels are part of "other".
_KERNELS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7A5195")


def _columns(fields: str, rows: Sequence[Sequence[Any]]) -> Columns:
    names = fields.split()
    return dict(zip(names, map(list, zip(*rows, strict=True)) if rows else ([] for _ in names), strict=True))


def summary(records: Records) -> str:
    """Return the page's first line, as HTML."""
    running = sum(record.outcome == "running" for record in records)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in records.ended.items())
    received = format_bytes(records.received_bytes)
    return f"<b>Runs</b>: {running} running, {counts}; {received} received by runs that are done"


def runs(records: Sequence[Record], now: float) -> Columns:
    """Return the table of all runs, the newest first."""
    rows = []
    for record in reversed(records):
        done, grid = record.outcome == "done", " x ".join(map(str, record.grid))
        seconds = record.seconds if done else now - record.started if record.outcome == "running" else None
        when = time.strftime("%H:%M:%S", time.localtime(record.started))
        speed, share = (format_rate(record.rate), record.share_of_bound) if done else ("", None)
        rows.append((
            record.run_id, short_name(record.name), record.outcome, record.share, grid and f"{record.method}, {grid}",
            record.engine, when, seconds, format_bytes(record.received_bytes), speed, share,
            short_reason(record.reason),
        ))  # fmt: skip
    return _columns("run name outcome share how engine when seconds moved speed of_bound reason", rows)


def format_rate(rate: float) -> str:
    """Return floating-point operations a second as text, in a unit that suits the size."""
    name, unit = rate_unit(rate)
    return f"{rate / unit:.3g} {name}"


def rate_unit(rate: float) -> tuple[str, float]:
    """Return the unit in which a rate is written, and its size: of CPUs GFLOP/s, of GPUs TFLOP/s."""
    return ("TFLOP/s", 1e12) if rate >= 1e12 else ("GFLOP/s", 1e9)


def short_reason(reason: str) -> str:
    """Return why a run ended, in a line that begins with the error: run, phase and workers are in other columns."""
    line = reason.partition("\n")[0]
    return re.sub(r"^run \d+ of \S+ failed while \w+( on [^ ]+(, [^ ]+)*)?: ", "", line)


def shown(records: Sequence[Record], picked: int | None) -> Record | None:
    """Return the run whose ranks are shown: the one that was picked; or the newest that is running, or has times."""
    for record in records:
        if record.run_id == picked:
            return record
    running = [record for record in records if record.outcome == "running" and record.ranks]
    candidates = running or [record for record in records if record.phases] or list(records)
    return candidates[-1] if candidates else None


def caption(record: Record | None, picked: int | None) -> str:
    """Return the line above the pictures of one run, as HTML."""
    if record is None:
        return "No run has begun yet."
    newest = "the newest that is running" if record.outcome == "running" else "the newest with times"
    why = "picked in the table" if record.run_id == picked else f"{newest}; click a row for another"
    running = f", {record.share:.0%} done" + (f", {turns}" if (turns := turns_in_words(record)) else "")
    states = {"done": f", {format_time(record.seconds)}", "running": running}
    state = record.outcome + states.get(record.outcome, "")
    text = f"<b>Run {record.run_id}</b> of {escape(record.name)}: {state} ({why})"
    if record.reason:
        text += f'<div style="white-space: pre-wrap; overflow-wrap: anywhere">{escape(record.reason)}</div>'
    return text


def rank_names(record: Record | None) -> list[str]:
    """Return the labels of a run's ranks, from the bottom up: the first is on top."""
    return [f"{rank}: {_short(address)}" for rank, address in enumerate(record.ranks)][::-1] if record else []


def _short(address: str) -> str:
    return address.rpartition("://")[2]


def phase_bars(record: Record | None, now: float) -> Columns:
    """Return the bars of the time line: the phases of each rank; of the current run the time so far."""
    bars = []
    kernels = collections.Counter[str]()
    for phases in record.phases.values() if record else ():
        kernels.update({phase: seconds for phase, seconds in phases.items() if phase not in _COLOURS})
    named = [kernel for kernel, _ in kernels.most_common(len(_KERNELS))]
    colours = _COLOURS | dict(zip(named, _KERNELS, strict=False))
    for rank, address in enumerate(record.ranks if record else ()):
        assert record is not None
        phases = dict.fromkeys((*PHASES[:7], *named, *PHASES[7:]), 0.0)
        for phase, seconds in record.phases.get(address, {}).items():
            phases[phase if phase in phases else PHASES[-1]] += seconds
        if record.outcome == "running":
            phases[RUNNING] = now - record.started
        left = 0.0
        for phase, seconds in phases.items():
            if seconds > 0:
                bars.append((f"{rank}: {_short(address)}", phase, left, left + seconds, seconds, colours[phase]))
                left += seconds
    return _columns("rank phase left right seconds colour", bars)


def memory_bars(record: Record | None, process: Mapping[str, int]) -> Columns:
    """Return the MiB of each worker: of its process now, and of the run, projected and held (nan: not known)."""
    projected: Mapping[str, float] = record.projected_bytes if record else dict.fromkeys(sorted(process), _NAN)
    held = record.held_bytes if record else {}
    rows = [
        (_short(address), process.get(address, _NAN) / _MIB, size / _MIB, held.get(address, _NAN) / _MIB)
        for address, size in projected.items()
    ]
    return _columns("worker process projected held", rows)


def rates(records: Sequence[Record]) -> tuple[str, Columns]:
    """Return the unit of speeds, and MiB moved, speed and bound of the last runs that are done."""
    last = [record for record in records if record.outcome == "done"][-_BARS:]
    name, unit = rate_unit(max((record.rate for record in last), default=0.0))
    rows = [
        (str(rate.run_id), rate.received_bytes / _MIB, rate.rate / unit, rate.bound / unit, format_rate(rate.rate),
         format_rate(rate.bound), rate.share_of_bound)
        for rate in last
    ]  # fmt: skip
    return name, _columns("run moved rate bound speed most of_bound", rows)


# The tables and plots of the page


_UPDATE_MILLISECONDS = 500
# Pixels of the table: ten rows; further ones are scrolled to.
_TABLE = 280
# The least height of a row of plots, which has room for the legend of a program.
_FIGURES = 240
# Number of products in waves that have a line.
_PRODUCTS = 4
_OUTCOME = """<span style="color:
<%= {done: '#007a5a', failed: '#b34a00', restarted: '#b34a00'}[value] || 'inherit' %>"><%= value %></span>"""


def _table(source: Any) -> Any:
    """Return the table of all runs."""
    from bokeh.models import DataTable, HTMLTemplateFormatter, NumberFormatter, TableColumn

    numbers = functools.partial(NumberFormatter, text_align="right", nan_format="")
    columns = [
        ("run", "Run", 50, None),
        ("name", "Result", 200, None),
        ("outcome", "State", 80, HTMLTemplateFormatter(template=_OUTCOME)),
        ("share", "Done", 50, numbers(format="0%")),
        ("how", "Method and ranks", 150, None),
        ("engine", "Engine", 70, None),
        ("when", "Began", 70, None),
        ("seconds", "Seconds", 70, numbers(format="0,0.000")),
        ("moved", "Received", 80, None),
        ("speed", "Speed", 110, None),
        ("of_bound", "Of bound", 70, numbers(format="0%")),
        ("reason", "Reason (click for all of it)", 250, None),
    ]
    heads = [
        TableColumn(field=field, title=title, width=width, **({"formatter": form} if form else {}))
        for field, title, width, form in columns
    ]
    return DataTable(source=source, columns=heads, index_position=None, height=_TABLE, sizing_mode="stretch_width")


def _figure(title: str, tips: Mapping[str, str], **kwargs: Any) -> Any:
    """Return a plot that takes what the window has, and shows some values of what is pointed at."""
    from bokeh.models import HoverTool
    from bokeh.plotting import figure

    plot = figure(title=title, tools="", toolbar_location=None, sizing_mode="stretch_both", **kwargs)
    plot.add_tools(HoverTool(tooltips=list(tips.items())))
    return plot


def _timeline(source: Any) -> Any:
    tips = {"rank": "@rank", "phase": "@phase", "seconds": "@seconds{0.0000}"}
    plot = _figure("Phases of each rank", tips, y_range=[], x_axis_label="seconds since the run began")
    sides = {"y": "rank", "left": "left", "right": "right", "height": 0.8}
    plot.hbar(**sides, color="colour", legend_field="phase", source=source)
    return plot


def _memory_plot(source: Any) -> Any:
    shown = {"process now": "process", "run, projected": "projected", "run, held": "held"}
    tips = {"worker": "@worker", **{label: f"@{field}{{0,0.0}} MiB" for label, field in shown.items()}}
    plot = _figure("Memory of each worker", tips, y_range=[], x_axis_label="MiB")
    bars = {"y": "worker", "line_color": None, "source": source}
    projected = {"fill_color": None, "line_color": "#222222", "line_width": 2, "legend_label": "run, projected"}
    plot.hbar(**bars, right="process", height=0.8, color="#BBBBBB", legend_label="process now")
    plot.hbar(**bars, right="held", height=0.5, color="#0072B2", legend_label="run, held")
    plot.hbar(**bars | projected, right="projected", height=0.5)
    return plot


def _bytes_plot(source: Any) -> Any:
    tips = {"run": "@run", "received": "@moved{0,0.0} MiB"}
    plot = _figure("MiB moved between workers", tips, x_range=[], x_axis_label="run")
    plot.vbar(x="run", top="moved", width=0.8, color="#E69F00", source=source)
    return plot


def _rate_plot(source: Any) -> Any:
    tips = {"run": "@run", "speed": "@speed", "bound": "@most", "share": "@of_bound{0%}"}
    plot = _figure("Speed", tips, x_range=[], x_axis_label="run")
    plot.vbar(x="run", top="rate", width=0.8, color="#0072B2", source=source)
    plot.scatter(x="run", y="bound", marker="dash", size=16, line_width=2, color="#D55E00", source=source)
    return plot


def distmm_doc(scheduler: Any, extra: Mapping[str, Any], doc: Any) -> None:
    """Fill a document of Bokeh's with the page; called once for each viewer."""
    import bokeh
    from bokeh.layouts import column, row
    from bokeh.models import ColumnDataSource, Div
    from distributed.dashboard.components.scheduler import BOKEH_THEME, env

    # The notice where tables are not renewed; the plots continue.
    still = (
        f" <b>Bokeh {bokeh.__version__} does not renew tables</b>: reload the page, or install another Bokeh (not 3.9)."
    )
    still *= bokeh.__version__.startswith("3.9.")
    plugin, picked = scheduler.plugins[NAME], None
    first, waves, chosen = (Div(styles={"font-size": "14px", "margin": margin}) for margin in ("8px", "0 8px", "8px"))
    empty = runs([], 0.0), phase_bars(None, 0.0), memory_bars(None, {}), rates([])[1]
    table, phases, memory, speeds = (ColumnDataSource(data=data) for data in empty)
    by_rank, by_worker = _timeline(phases), _memory_plot(memory)
    for plot in (by_rank, by_worker):
        plot.x_range.start = 0
        plot.add_layout(plot.legend[0], "right")
    moved, speed = _bytes_plot(speeds), _rate_plot(speeds)
    for plot in (moved, speed):
        plot.y_range.start = 0

    def update() -> None:
        """Show the latest records."""
        records = list(plugin.records)
        first.text = summary(plugin.records) + still
        # The progress of the last products in waves, the newest first.
        names, queued = list(plugin.records.waves)[: -_PRODUCTS - 1 : -1], list(plugin.queue.values())
        lines = [noted(progress_of(scheduler, queued, plugin.records, name)) for name in names]
        waves.text = as_html(lines) if lines else ""
        rows = runs(records, time.time())
        if rows != table.data:
            indices = [rows["run"].index(picked)] if picked in rows["run"] else []
            table.data = rows
            table.selected.indices = indices
        record = shown(records, picked)
        chosen.text = caption(record, picked)
        by_rank.y_range.factors = rank_names(record)
        phases.data = phase_bars(record, time.time())
        memory.data = memory_bars(record, {address: ws.memory.process for address, ws in scheduler.workers.items()})
        by_worker.y_range.factors = memory.data["worker"][::-1]
        unit, speeds.data = rates(records)
        speed.title.text = f"{unit}; the line is the bound of the cost model"
        for plot in (moved, speed):
            plot.x_range.factors = speeds.data["run"]

    def pick(attribute: str, old: list[int], new: list[int]) -> None:
        nonlocal picked
        picked = table.data["run"][new[0]] if new else None
        update()

    table.selected.on_change("indices", pick)
    update()
    rows = (
        row(*plots, sizing_mode="stretch_both", min_height=_FIGURES) for plots in ((by_rank, by_worker), (moved, speed))
    )
    doc.add_root(column(first, waves, _table(table), chosen, *rows, sizing_mode="stretch_both"))
    doc.title = "Dask: collective runs"
    doc.add_periodic_callback(update, _UPDATE_MILLISECONDS)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


# Metrics, and what puts both on a scheduler


# The scheduler's plugin whose runs are shown: that of the scheduler which came last, if a process has several.
_plugin: weakref.ref[Any] | None = None


def describe() -> list[Any]:
    """Return nothing: names depend on the scheduler, so the registry must not ask for them now."""
    return []


def collect() -> Iterator[Any]:
    """Yield all metrics: this module is what Prometheus asks, once in each process, as is Dask's."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    plugin = _plugin() if _plugin is not None else None
    if plugin is None:
        return
    records: Records = plugin.records
    namespace = dask.config.get("distributed.dashboard.prometheus.namespace", default="")
    prefix = f"{namespace}_distmm" if namespace else "distmm"
    slowest = "Seconds that the slowest rank of each run took, by phase; runs that are done"
    for name, text, label, values in (
        ("runs", "Runs that have ended, by outcome", "outcome", records.ended),
        ("phase_seconds", slowest, "phase", records.seconds),
    ):
        family = CounterMetricFamily(f"{prefix}_{name}", text, labels=[label])
        for key, value in values.items():
            family.add_metric([key], value)
        yield family
    for name, text, total in (
        ("received_bytes", "Bytes of matrices that arrived from other workers", records.received_bytes),
        ("flops", "Floating-point operations of runs that are done", records.flops),
        ("restarts", "Runs that were started again as a worker was lost", records.ended["restarted"]),
    ):
        yield CounterMetricFamily(f"{prefix}_{name}", text, value=total)
    live = sum(bool(run.key) for run in plugin.queue.values())
    yield GaugeMetricFamily(f"{prefix}_live_runs", "Runs that wait or work now", value=live)


def register_metrics(plugin: Any) -> None:
    """Show the runs of this plugin of a scheduler; does nothing without ``prometheus_client``."""
    global _plugin
    try:
        from prometheus_client import REGISTRY
    except ModuleNotFoundError:
        return
    first, _plugin = _plugin is None, weakref.ref(plugin)
    if first:
        REGISTRY.register(cast(Any, sys.modules[__name__]))


def attach(scheduler: Any, plugin: Any) -> None:
    """Show the plugin's runs on the scheduler's dashboard, where there is one. A failure stops no multiply."""
    try:
        register_metrics(plugin)
        _add_page(scheduler)
    except Exception:
        log.warning("the dashboard has no page /distmm, or no metrics", exc_info=True)


def _add_page(scheduler: Any) -> None:
    served: Any = getattr(scheduler, "http_application", None)
    # Only the Bokeh application of Dask's dashboard has these; without Bokeh there is none.
    dashboard = next((app for app in served.applications if hasattr(app, "app_paths")), None) if served else None
    paths = (path for app in served.applications for path in getattr(app, "app_paths", ())) if served else ()
    if dashboard is None or any("/distmm" in path for path in paths):
        return
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables
    from tornado.ioloop import IOLoop

    variables = template_variables(scheduler)
    # Dask's own pages share this list: they link to ours.
    variables["pages"].insert(variables["pages"].index("info"), "distmm")
    application = BokehApplication({"/distmm": distmm_doc}, scheduler, dashboard.prefix, variables)
    served.add_application(application)
    application.initialize(IOLoop.current())
    application.start()
