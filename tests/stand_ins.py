"""Stand-ins for parts of Dask, and for who sends messages."""

from __future__ import annotations

from types import SimpleNamespace

from dask_distmm.runtime import messages


class Loop:
    """Has all of a Dask worker that `WorkerService` needs."""

    address = "inproc://1"

    def __init__(self) -> None:
        self.handlers: dict = {}
        self.stream_handlers: dict = {}
        self.data: dict = {}

    def update_data(self, data, stimulus_id):
        self.data.update(data)

    def handle_stimulus(self, event) -> None:
        for key in event.keys:
            self.data.pop(key, None)


async def ask(side, handler, *args, **kwargs):
    """Call a handler of a `WorkerService` as others do; return the answer."""
    return await messages.ask(SimpleNamespace(**side.handlers), handler, side.epoch, *args, **kwargs)
