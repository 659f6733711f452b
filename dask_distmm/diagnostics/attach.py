"""Puts the page on a scheduler's dashboard and the metrics beside Dask's.

Prometheus metrics of runs, beside Dask's own on the scheduler's ``/metrics``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import dask

from dask_distmm.engines.base import log
from dask_distmm.runtime.run import Records

# Prometheus metrics of runs, beside Dask's own on the scheduler's ``/metrics``


class _Collector:
    """Reads the records when Prometheus asks. One for each process, as is Dask's.

    It sees the scheduler that came last, if a process has several one after the other.
    """

    def __init__(self) -> None:
        self.plugin: weakref.ref[Any] | None = None

    def describe(self) -> list[Any]:
        """Return nothing: names depend on the scheduler, so the registry must not ask for them now."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield all metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        plugin = self.plugin() if self.plugin is not None else None
        if plugin is None:
            return
        records: Records = plugin.records
        prefix = _prefix()
        runs = CounterMetricFamily(f"{prefix}_runs", "Runs that have ended, by outcome", labels=["outcome"])
        for outcome, count in records.ended.items():
            runs.add_metric([outcome], count)
        yield runs
        seconds = CounterMetricFamily(
            f"{prefix}_phase_seconds",
            "Seconds that the slowest rank of each run took, by phase; runs that are done",
            labels=["phase"],
        )
        for phase, value in records.seconds.items():
            seconds.add_metric([phase], value)
        yield seconds
        for name, text, total in (
            ("received_bytes", "Bytes of matrices that arrived from other workers", records.received_bytes),
            ("flops", "Floating-point operations of runs that are done", records.flops),
            ("restarts", "Runs that were started again as a worker was lost", records.ended["restarted"]),
        ):
            yield CounterMetricFamily(f"{prefix}_{name}", text, value=total)
        yield GaugeMetricFamily(
            f"{prefix}_live_runs",
            "Runs that wait or work now",
            value=sum(bool(run.key) for run in plugin.queue.values()),
        )


_collector = _Collector()


def register_metrics(plugin: Any) -> None:
    """Show the runs of this plugin of a scheduler; does nothing without ``prometheus_client``."""
    try:
        from prometheus_client import REGISTRY
    except ModuleNotFoundError:
        return
    first = _collector.plugin is None
    _collector.plugin = weakref.ref(plugin)
    if first:
        REGISTRY.register(_collector)


def _prefix() -> str:
    namespace = dask.config.get("distributed.dashboard.prometheus.namespace", default="")
    return f"{namespace}_distmm" if namespace else "distmm"


# Puts the page on a scheduler's dashboard and the metrics beside Dask's


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
    if dashboard is None or any("/distmm" in path for app in served.applications for path in _paths(app)):
        return
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables
    from tornado.ioloop import IOLoop

    from dask_distmm.diagnostics.page import distmm_doc

    variables = template_variables(scheduler)
    # Dask's own pages share this list: they link to ours.
    variables["pages"].insert(variables["pages"].index("info"), "distmm")
    application = BokehApplication({"/distmm": distmm_doc}, scheduler, dashboard.prefix, variables)
    served.add_application(application)
    application.initialize(IOLoop.current())
    application.start()


def _paths(application: Any) -> Any:
    return getattr(application, "app_paths", ())
