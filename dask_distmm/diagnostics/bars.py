"""``dask_distmm.progress``: how far runs are, in a terminal or a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, TextIO

from dask.utils import format_bytes

from dask_distmm.errors import PlanError, ProtocolError
from dask_distmm.runtime.keys import wave_of
from dask_distmm.runtime.messages import ProgressLine, ask
from dask_distmm.runtime.scheduler.plugin import DistMMSchedulerPlugin

if TYPE_CHECKING:
    from distributed import Client, Future

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
    return watched if client.asynchronous else _until_done(client, watched)


def _until_done(client: Client, watched: Coroutine[Any, Any, None]) -> None:
    client.sync(lambda: watched)


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

            made = DistMMSchedulerPlugin()
            await client.scheduler.register_scheduler_plugin(plugin=dumps(made), name=made.name, idempotent=True)
            continue
        if answer.status != "OK":
            raise ProtocolError(answer.message)
        lines = list(answer.found)
        if answer.known:
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


def as_lines(found: Sequence[ProgressLine]) -> list[str]:
    """Return bars as lines of text."""
    heads = [_line_head(line) for line in found]
    width = max(map(len, heads), default=0)
    lines = []
    for head, line in zip(heads, found, strict=True):
        full = int(_WIDTH * line.share)
        note = line.note
        lines.append(f"{head:<{width}}  [{'#' * full:<{_WIDTH}}] {line.share:4.0%}" + (f"  {note}" if note else ""))
    return lines


def as_html(found: Sequence[ProgressLine]) -> str:
    """Return bars as an HTML table; no script, nothing from elsewhere."""
    rows = []
    for line in found:
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


def _line_head(line: ProgressLine) -> str:
    run = f"  run {line.run}" if line.run else ""
    return f"{short_name(line.name)}{run}" + (f"  {line.phase}" if line.phase else "")


def _written(file: TextIO) -> Show:
    """Return what writes bars: over and over in the same place of a terminal; elsewhere a line for each new phase."""
    phases: dict[str, str] = {}
    drawn = 0

    def show(found: Sequence[ProgressLine]) -> None:
        nonlocal drawn
        lines = as_lines(found)
        if file.isatty():
            up = f"\x1b[{drawn}A" if drawn else ""
            file.write(up + "".join(f"\r\x1b[2K{line}\n" for line in lines))
            drawn = len(lines)
        else:
            for text, line in zip(lines, found, strict=True):
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
    return lambda found: handle.update(HTML(as_html(found)))
