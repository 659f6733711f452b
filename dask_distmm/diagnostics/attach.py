"""Puts the page on a scheduler's dashboard and the metrics beside Dask's."""

from __future__ import annotations

from typing import Any

from dask_distmm.diagnostics import metrics
from dask_distmm.engines.base import log


def attach(scheduler: Any, plugin: Any) -> None:
    """Show the plugin's runs on the scheduler's dashboard, where there is one. A failure stops no multiply."""
    try:
        metrics.register_metrics(plugin)
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
