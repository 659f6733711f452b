"""A page in a headless Chromium, driven by its DevTools protocol: live pages are never done loading otherwise."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = "--headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars --no-first-run"
# Bokeh has drawn all it has, and the page has what it loads.
_IDLE = "typeof Bokeh !== 'undefined' && Bokeh.documents.length > 0 && Bokeh.documents.every(d => d.is_idle)"


@contextmanager
def _chromium(folder: Path, size: tuple[int, int]) -> Iterator[str]:
    """Start a browser; give the address of its DevTools."""
    width, height = size
    command = [str(CHROMIUM), *_FLAGS.split(), f"--window-size={width},{height}", "--remote-debugging-port=0"]
    with open(folder / "chromium.log", "wb") as log:
        process = subprocess.Popen([*command, f"--user-data-dir={folder / 'profile'}", "about:blank"], stderr=log)
    try:
        active = folder / "profile" / "DevToolsActivePort"
        deadline = time.monotonic() + 120
        while not (active.exists() and len(active.read_text().split()) == 2):
            assert time.monotonic() < deadline, (folder / "chromium.log").read_text()
            assert process.poll() is None, (folder / "chromium.log").read_text()
            time.sleep(0.05)
        port, path = active.read_text().split()
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _visit(
    devtools: str, url: str, expression: str, meanwhile: Callable[[], object], ready: Callable[[Any], bool]
) -> tuple[Any, bytes]:
    from tornado.websocket import websocket_connect

    connection = await websocket_connect(devtools, max_message_size=2**26)
    numbers = itertools.count(1)

    async def call(method: str, session: str | None = None, **params: Any) -> Any:
        number = next(numbers)
        message = {"id": number, "method": method, "params": params}
        await connection.write_message(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            text = await connection.read_message()
            assert text is not None, "the browser is gone"
            answer = json.loads(text)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    async def evaluate(expression: str) -> Any:
        found = await call("Runtime.evaluate", session, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    try:
        target = (await call("Target.createTarget", url=url))["targetId"]
        session = (await call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        while not await evaluate(_IDLE):
            await asyncio.sleep(0.1)
        # Fonts and the first update after it.
        await asyncio.sleep(1)
        await asyncio.to_thread(meanwhile)
        deadline = time.monotonic() + 120
        while not ready(value := await evaluate(expression)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        shot = await call("Page.captureScreenshot", session, format="png")
        await call("Target.closeTarget", targetId=target)
        return value, base64.b64decode(shot["data"])
    finally:
        connection.close()
        # Until the browser has closed its side too; else the socket would be left to the garbage collector.
        while await connection.read_message() is not None:
            pass


def visit(
    url: str,
    expression: str,
    folder: Path,
    size: tuple[int, int] = (1300, 1000),
    meanwhile: Callable[[], object] = lambda: None,
    ready: Callable[[Any], bool] = lambda value: True,
) -> tuple[Any, bytes]:
    """Open a page with Bokeh's documents; return what an expression of JavaScript says there, and a PNG of it.

    Both are of the page after `meanwhile`, which is called while it is open, once what it says is `ready`.
    """
    with _chromium(folder, size) as devtools:
        return asyncio.run(asyncio.wait_for(_visit(devtools, url, expression, meanwhile, ready), 300))
