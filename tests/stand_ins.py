"""What tests use in place of parts of Dask."""

from __future__ import annotations


class Loop:
    """What `WorkerSide` needs of a Dask worker."""

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
