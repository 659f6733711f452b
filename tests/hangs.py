"""What a test that hangs leaves to read: the scheduler's view, and the stacks of all threads of all processes.

pytest-timeout shows the stacks of the tests' own process, and ends it. What hangs is mostly another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
from distributed import Scheduler
from distributed.client import _global_clients

# Seconds before the end of a test's time.
MARGIN = 60

# All processes that tests start dump their stacks when they are aborted.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")


def view(dask_scheduler: Scheduler) -> list[str]:
    """Return lines on workers, on tasks that are not in memory, and on what our plugin has noted last."""
    workers = dask_scheduler.workers.values()
    lines = [f"{ws.address} {ws.status} {[str(ts.key) for ts in ws.processing]}" for ws in workers]
    for key, ts in dask_scheduler.tasks.items():
        if ts.state != "memory":
            lines.append(f"{key} {ts.state} waits for {[str(one.key) for one in ts.waiting_on or ()][:5]}")
    return [*lines, *(str(event) for _, event in dask_scheduler.get_events("distmm")[-12:])]


def show() -> None:
    """Print all that, and abort the processes that this one has started."""
    for client in list(_global_clients.values()):
        with contextlib.suppress(Exception):
            print(client, *client.sync(client._run_on_scheduler, view, callback_timeout=30), sep="\n", file=sys.stderr)
    for child in psutil.Process().children(recursive=True)[::-1]:
        with contextlib.suppress(psutil.Error):
            print(f"aborted: {child.pid} {' '.join(child.cmdline())[:100]}", file=sys.stderr, flush=True)
            child.send_signal(signal.SIGABRT)
            # One after the other: they write to the same place.
            time.sleep(0.2)


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Show all if what is inside of the ``with`` block takes longer; then it has failed.

    What is being shown at the end of the block is shown to the end.
    """
    shown: list[Any] = []
    timer = threading.Timer(seconds, lambda: (shown.append(seconds), show()))
    timer.name, timer.daemon = "hangs", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    assert not shown, f"the test took longer than {seconds:.0f} s, and its processes were aborted"
