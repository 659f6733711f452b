"""Device memory between the ranks of a group, by NCCL. Ranks meet by a unique id that travels over Dask's comms.

Calls go to nccl4py's bindings where data moves: its buffer classes import every array library they find.
"""

from __future__ import annotations

from collections.abc import Iterable

import cupy as cp
import nccl.core as nccl
import numpy as np
from nccl.bindings import nccl as bindings

# Older ones hang over InfiniBand between hosts.
LEAST_NCCL = (2, 30, 7)

# The longest text (bytes) that a rank can tell the others when they agree on going on.
_MESSAGE_BYTES = 512
_BYTE = int(nccl.UINT8)


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL library that is loaded."""
    return version_of(int(bindings.get_version()))


def version_of(code: int) -> tuple[int, ...]:
    """Return the version that a library of NVIDIA says as a number."""
    return code // 10000, code // 100 % 100, code % 100


def make_unique_id() -> bytes:
    """Return a new id under which the ranks of one communicator find each other."""
    return bytes(nccl.get_unique_id())


class NcclComm:
    """A communicator over the ranks of one group. Making and closing it are collective."""

    def __init__(self, nranks: int, rank: int, unique_id: bytes, stream: cp.cuda.Stream) -> None:
        self.nranks, self.rank, self.stream = nranks, rank, stream
        self._comm = nccl.Communicator.init(nranks, rank, nccl.UniqueId.from_bytes(unique_id))
        self._message = cp.zeros(_MESSAGE_BYTES, cp.uint8)
        self._messages = cp.zeros(_MESSAGE_BYTES * nranks, cp.uint8)

    @property
    def handle(self) -> int:
        """The ncclComm_t."""
        return int(self._comm.ptr)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks can read each other's memory (one team of load/store access)."""
        return bool(self._comm.device_api_support) and int(self._comm.n_lsa_teams) == 1

    def exchange(self, send: Iterable[tuple[int, int, int]], receive: Iterable[tuple[int, int, int]]) -> None:
        """Send and receive device memory in one group: ``(peer, pointer, bytes)`` each. Returns at once."""
        bindings.group_start()
        for peer, pointer, size in send:
            bindings.send(pointer, size, _BYTE, peer, self.handle, self.stream.ptr)
        for peer, pointer, size in receive:
            bindings.recv(pointer, size, _BYTE, peer, self.handle, self.stream.ptr)
        bindings.group_end()

    def broadcast(self, pointer: int, size: int, root: int, stream: cp.cuda.Stream) -> None:
        """Copy bytes of device memory from the rank `root` to all others. Returns at once."""
        bindings.broadcast(pointer, pointer, size, _BYTE, root, self.handle, stream.ptr)

    def agree(self, problem: str = "") -> dict[int, str]:
        """Tell all ranks of a problem, if there is one, and return the problems of all by rank. Waits."""
        texts = [text.decode(errors="replace") for text in self._tell(problem.encode())]
        return {rank: text for rank, text in enumerate(texts) if text}

    def largest(self, value: int) -> int:
        """Return the largest of all ranks' values. Waits."""
        return max(map(int, self._tell(str(value).encode())))

    def meet(self) -> None:
        """Let what is queued behind this wait until all ranks have come here. Returns at once."""
        bindings.all_gather(
            self._message.data.ptr, self._messages.data.ptr, _MESSAGE_BYTES, _BYTE, self.handle, self.stream.ptr
        )

    def _tell(self, message: bytes) -> list[bytes]:
        """Exchange short messages without zero bytes."""
        padded = message[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        self._message.set(np.frombuffer(padded, np.uint8), stream=self.stream)
        self.meet()
        answers = self._messages.get(stream=self.stream)
        return [row.tobytes().rstrip(b"\0") for row in answers.reshape(self.nranks, -1)]

    def close(self) -> None:
        """Destroy the communicator, on all ranks."""
        self._comm.destroy()

    def __repr__(self) -> str:
        return f"NcclComm(rank {self.rank} of {self.nranks})"
