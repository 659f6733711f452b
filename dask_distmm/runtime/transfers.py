"""Matrices over Dask's own comms, and so by the protocol and with the encryption that the cluster uses.

Between workers of one host large matrices do not travel at all: they are read out of the other worker's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from dask_distmm.comms import cross_memory
from dask_distmm.comms.base import Boxes, PeerLostError
from dask_distmm.engines.base import log
from dask_distmm.errors import EngineError, ProtocolError
from dask_distmm.runtime.messages import Fetch
from dask_distmm.runtime.wire import ask

if TYPE_CHECKING:
    from distributed import Worker


def address_of(worker: Worker) -> str:
    """Return the address under which everybody else knows a worker; it may listen under another one."""
    return str(getattr(worker, "contact_address", None) or worker.address)


class DaskComm:
    """The `Comm` of one run on one worker."""

    def __init__(
        self,
        worker: Worker,
        run_id: int,
        addresses: Sequence[str],
        timeout: float,
        *,
        epoch: str = "",
        cross_memory: bool = False,
    ) -> None:
        self._worker, self._run_id, self._addresses, self._timeout = worker, run_id, addresses, timeout
        self._epoch, self._cross_memory = epoch, cross_memory
        self.received_bytes = 0

    def fetch(self, peer: int, kind: str, boxes: Boxes, flat: bool) -> Future[Sequence[NDArray[Any]]]:
        """Ask a participant for boxes of its matrices; see `Comm.fetch`."""
        request = self._request(self._addresses[peer], kind, boxes, flat)
        try:
            return asyncio.run_coroutine_threadsafe(request, self._worker.loop.asyncio_loop)
        except RuntimeError:  # the event loop is closed: this process ends
            request.close()
            raise PeerLostError(f"worker {address_of(self._worker)} is closing") from None

    async def _request(self, address: str, kind: str, boxes: Boxes, flat: bool) -> Sequence[NDArray[Any]]:
        place = cross_memory.process_name() if self._cross_memory else ""
        request = Fetch(self._run_id, kind, boxes.tobytes(), flat, place)
        call = ask(self._worker.rpc(address), request, self._epoch)
        try:
            # Sums are there when the peer has multiplied, which may take any time; chunks are there now.
            answer = await asyncio.wait_for(call, self._timeout if kind == "input" else None)
        except TimeoutError:
            raise EngineError(
                f"worker {address} did not deliver its chunks within {self._timeout:g} s (config "
                "distmm.timeouts.transfer)"
            ) from None
        except OSError as error:  # CommClosedError among them
            raise PeerLostError(f"worker {address}: {error}") from error
        if answer is None or answer.status in ("gone", "lost"):
            # Either the run was ended, or another process has taken the worker's place, perhaps without the plugin yet.
            message = "it does not know the run" if answer is None else answer.message
            raise PeerLostError(f"worker {address}: {message}")
        if answer.status != "OK":
            raise ProtocolError(f"worker {address} refused a request of run {self._run_id}: {answer.message}")
        data: Sequence[NDArray[Any]] = answer.data
        if answer.loan:
            try:
                data = await asyncio.to_thread(cross_memory.borrow, answer.loan)
            except OSError as error:
                log.info("worker %s sends what can't be read in its memory: %s", address, error)
                self._cross_memory = False
                return await self._request(address, kind, boxes, flat)
        if kind != "enter":
            self.received_bytes += sum(x.nbytes for x in data)
        return data
