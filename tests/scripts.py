"""What programs that tests start need. Imports nothing: these set options before they import Dask's arrays."""

from __future__ import annotations


def count_runs(dask_scheduler) -> int:
    return dask_scheduler.plugins["distmm"].queue.newest if "distmm" in dask_scheduler.plugins else 0


def raises(kind, function) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind} was not raised")
