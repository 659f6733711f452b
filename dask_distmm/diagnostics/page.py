"""The page ``/distmm`` of the scheduler's dashboard: runs, their phases by rank, bytes, speed and memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import bokeh
from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    DataTable,
    Div,
    HoverTool,
    HTMLTemplateFormatter,
    NumberFormatter,
    TableColumn,
)
from bokeh.plotting import figure
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from dask_distmm.diagnostics import tables
from dask_distmm.diagnostics.bars import as_html, noted
from dask_distmm.runtime.messages import NAME
from dask_distmm.runtime.run import Record, progress_of

_UPDATE_MILLISECONDS = 500
# The notice where tables are not renewed; the plots continue.
_STILL = (
    f" <b>Bokeh {bokeh.__version__} does not renew tables</b>: reload the page, or install another Bokeh (not 3.9)."
    if bokeh.__version__.startswith("3.9.")
    else ""
)
# Pixels of the table: ten rows; further ones are scrolled to.
_TABLE = 280
# The least height of a row of plots, which has room for the legend of a program.
_FIGURES = 240
# Number of products in waves that have a line.
_PRODUCTS = 4
_OUTCOME = """<span style="color:
<%= {done: '#007a5a', failed: '#b34a00', restarted: '#b34a00'}[value] || 'inherit' %>"><%= value %></span>"""


def distmm_doc(scheduler: Any, extra: Mapping[str, Any], doc: Any) -> None:
    """Fill a document of Bokeh's with the page; called once for each viewer."""
    doc.title = "Dask: collective runs"
    page = Page(scheduler)
    page.update()
    doc.add_periodic_callback(page.update, _UPDATE_MILLISECONDS)
    doc.add_root(page.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


class Page:
    """The page as one viewer has it."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._plugin = scheduler.plugins[NAME]
        self._summary = Div(styles={"font-size": "14px", "margin": "8px"})
        self._waves = Div(styles={"font-size": "14px", "margin": "0 8px"})
        self._chosen = Div(styles={"font-size": "14px", "margin": "8px"})
        self._runs, self._phases, self._memory, self._rates = (
            ColumnDataSource(data=empty)
            for empty in (tables.runs([], 0.0), tables.phase_bars(None, 0.0), *tables.empty())
        )
        self._picked: int | None = None
        self._run_axes: list[Any] = []
        self._runs.selected.on_change("indices", self._pick)
        self.root = column(
            self._summary,
            self._waves,
            self._table(),
            self._chosen,
            row(self._timeline(), self._memory_plot(), sizing_mode="stretch_both", min_height=_FIGURES),
            row(self._bytes_plot(), self._rate_plot(), sizing_mode="stretch_both", min_height=_FIGURES),
            sizing_mode="stretch_both",
        )

    def _table(self) -> Any:
        share = NumberFormatter(format="0%", text_align="right")
        columns = [
            ("run", "Run", 50, None),
            ("name", "Result", 200, None),
            ("outcome", "State", 80, HTMLTemplateFormatter(template=_OUTCOME)),
            ("share", "Done", 50, share),
            ("how", "Method and ranks", 150, None),
            ("engine", "Engine", 70, None),
            ("when", "Began", 70, None),
            ("seconds", "Seconds", 70, NumberFormatter(format="0,0.000", text_align="right", nan_format="")),
            ("moved", "Received", 80, None),
            ("speed", "Speed", 110, None),
            ("of_bound", "Of bound", 70, NumberFormatter(format="0%", text_align="right", nan_format="")),
            ("reason", "Reason (click for all of it)", 250, None),
        ]
        made = [
            TableColumn(field=f, title=title, width=width, **({"formatter": form} if form else {}))
            for f, title, width, form in columns
        ]
        return DataTable(
            source=self._runs, columns=made, index_position=None, height=_TABLE, sizing_mode="stretch_width"
        )

    def _timeline(self) -> Any:
        plot = _figure("Phases of each rank", y_range=[], x_axis_label="seconds since the run began")
        sides = {"y": "rank", "left": "left", "right": "right", "height": 0.8}
        plot.hbar(**sides, color="colour", legend_field="phase", source=self._phases)
        plot.x_range.start = 0
        plot.add_tools(HoverTool(tooltips=[("rank", "@rank"), ("phase", "@phase"), ("seconds", "@seconds{0.0000}")]))
        plot.add_layout(plot.legend[0], "right")
        self._rank_axis = plot.y_range
        return plot

    def _memory_plot(self) -> Any:
        plot = _figure("Memory of each worker", y_range=[], x_axis_label="MiB")
        projected = {"fill_color": None, "line_color": "#222222", "line_width": 2, "legend_label": "run, projected"}
        bars = {"y": "worker", "line_color": None, "source": self._memory}
        plot.hbar(**bars, right="process", height=0.8, color="#BBBBBB", legend_label="process now")
        plot.hbar(**bars, right="held", height=0.5, color="#0072B2", legend_label="run, held")
        plot.hbar(**bars | projected, right="projected", height=0.5)
        plot.x_range.start = 0
        shown = {"process now": "process", "run, projected": "projected", "run, held": "held"}
        tips = [(label, f"@{field}{{0,0.0}} MiB") for label, field in shown.items()]
        plot.add_tools(HoverTool(tooltips=[("worker", "@worker"), *tips]))
        plot.add_layout(plot.legend[0], "right")
        self._worker_axis = plot.y_range
        return plot

    def _bytes_plot(self) -> Any:
        plot = self._by_run("MiB moved between workers")
        plot.vbar(x="run", top="moved", width=0.8, color="#E69F00", source=self._rates)
        plot.add_tools(HoverTool(tooltips=[("run", "@run"), ("received", "@moved{0,0.0} MiB")]))
        return plot

    def _rate_plot(self) -> Any:
        plot = self._by_run("Speed")
        self._rate_title = plot.title
        plot.vbar(x="run", top="rate", width=0.8, color="#0072B2", source=self._rates)
        plot.scatter(x="run", y="bound", marker="dash", size=16, line_width=2, color="#D55E00", source=self._rates)
        tips = [("run", "@run"), ("speed", "@speed"), ("bound", "@most"), ("share", "@of_bound{0%}")]
        plot.add_tools(HoverTool(tooltips=tips))
        return plot

    def _by_run(self, title: str) -> Any:
        plot = _figure(title, x_range=[], x_axis_label="run")
        plot.y_range.start = 0
        self._run_axes.append(plot.x_range)
        return plot

    def _pick(self, attribute: str, old: list[int], new: list[int]) -> None:
        self._picked = self._runs.data["run"][new[0]] if new else None
        self.update()

    def update(self) -> None:
        """Show the latest records."""
        records = list(self._plugin.records)
        self._summary.text = tables.summary(self._plugin.records) + _STILL
        self._waves.text = self._in_waves()
        table = tables.runs(records, time.time())
        if table != self._runs.data:
            picked = [table["run"].index(self._picked)] if self._picked in table["run"] else []
            self._runs.data = table
            self._runs.selected.indices = picked
        shown = tables.shown(records, self._picked)
        self._chosen.text = tables.caption(shown, self._picked)
        self._show(shown, records)

    def _in_waves(self) -> str:
        """Return the progress of the last products in waves, the newest first, as HTML."""
        found, runs = self._plugin.records, list(self._plugin.queue.values())
        names = list(found.waves)[: -_PRODUCTS - 1 : -1]
        return as_html([noted(progress_of(self._scheduler, runs, found, name)) for name in names]) if names else ""

    def _show(self, shown: Record | None, records: list[Record]) -> None:
        self._rank_axis.factors = tables.rank_names(shown)
        self._phases.data = tables.phase_bars(shown, time.time())
        process = {address: ws.memory.process for address, ws in self._scheduler.workers.items()}
        self._memory.data = tables.memory_bars(shown, process)
        self._worker_axis.factors = list(reversed(self._memory.data["worker"]))
        self._rates.data = tables.rates(records)
        self._rate_title.text = f"{tables.rates_unit(records)[0]}; the line is the bound of the cost model"
        for axis in self._run_axes:
            axis.factors = self._rates.data["run"]


def _figure(title: str, **kwargs: Any) -> Any:
    """Return a plot that takes what the window has."""
    return figure(title=title, tools="", toolbar_location=None, sizing_mode="stretch_both", **kwargs)
