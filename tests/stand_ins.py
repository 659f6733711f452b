"""Stand-ins for parts of Dask, and for who sends messages."""

from __future__ import annotations


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


async def ask(side, request):
    """Give a request to the handler that a `WorkerService` has for it; return the answer."""
    wire = {**request.to_wire(), "epoch": side.epoch}
    return request.answer.from_wire(await side.handlers[request.operation](**wire))
