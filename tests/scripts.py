"""What programs that tests start need. Imports nothing: these set options before they import Dask's arrays."""

from __future__ import annotations

# Exit statuses of a program that Ctrl-C (signal 2) has ended; a shell reports both as 130. The second is Python's own
# doing, also where the interrupt is caught: it fell into text that is executed, as in a dataclass of an import.
BY_CTRL_C = (130, -2)


def count_runs(dask_scheduler) -> int:
    return dask_scheduler.plugins["distmm"].live.newest if "distmm" in dask_scheduler.plugins else 0


def raises(kind, function) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind} was not raised")
