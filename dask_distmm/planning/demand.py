"""Workers as planning sees them (Worker), and what a multiply asks of them (Demand).

Both are frozen values of plain types, which cross the network as ``to_wire`` gives them and are checked by `from_wire`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dask_distmm.errors import ProtocolError


@dataclasses.dataclass(frozen=True, slots=True)
class Worker:
    """A worker as planning sees it."""

    # Its address in the Dask cluster.
    address: str
    # Number of its threads.
    nthreads: int = 1
    # In bytes, of the memory that the chosen engine works in; 0 where it has none.
    memory_limit: int = 0
    # Name of its machine: workers of one host have the faster links.
    host: str = ""
    # Its GPU, and those whose memory that GPU can read, by names that are the same in all processes; empty where it
    # has none.
    device: str = ""
    reach: tuple[str, ...] = ()
    # Bytes of that memory which its process holds beside what Dask can spill.
    used: int = 0
    # Where that is the memory of a GPU: the limit of its host memory in bytes, 0 where it has none.
    host_limit: int = 0

    def to_wire(self) -> tuple[str, int, int, str, str, list[str], int, int]:
        """As plain types."""
        described = self.host, self.device, list(self.reach)
        return (self.address, self.nthreads, self.memory_limit, *described, self.used, self.host_limit)

    @classmethod
    def from_wire(cls, wire: Any) -> Worker:
        """Make it from what ``to_wire`` gave, checked."""
        address, nthreads, memory, host, device, reach, used, host_limit = wire
        if not isinstance(address, str):
            raise ProtocolError(f"a worker's address is a str, found {address!r}")
        links = str(host), str(device), tuple(map(str, reach))
        return cls(address, int(nthreads), int(memory), *links, int(used), int(host_limit))


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """The demand that a multiply makes on the workers of a cluster."""

    # Name of the engine, or ``"auto"``.
    engine: str
    # What the chunks of D are: ``"numpy"`` or ``"cupy"``.
    array: str
    # Names of the types of A, B and D.
    dtypes: tuple[str, str, str]
    # Addresses, or how many, or None for all.
    workers: tuple[str, ...] | int | None = None
    # Whether matrices may cross a network unencrypted though the cluster requires encryption.
    plaintext_nccl: bool = False
    # The kind of the computation, ``"product"`` or ``"factorization"``.
    kind: str = "product"

    def to_wire(self) -> tuple[str, str, list[str], list[str] | int | None, bool, str]:
        """As plain types."""
        workers = list(self.workers) if isinstance(self.workers, tuple) else self.workers
        return self.engine, self.array, list(self.dtypes), workers, self.plaintext_nccl, self.kind

    @classmethod
    def from_wire(cls, wire: Any) -> Demand:
        """Make it from what ``to_wire`` gave, checked."""
        try:
            engine, array, (a, b, d), workers, plaintext, kind = wire
            workers = tuple(map(str, workers)) if isinstance(workers, list | tuple) else workers
            return cls(str(engine), str(array), (str(a), str(b), str(d)), workers, bool(plaintext), str(kind))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"malformed demand: {error!r}") from error
