"""Workers as planning sees them (Worker), and what a multiply asks of them (Demand).

Both are frozen values of plain types, which cross the network as ``to_wire`` gives them and are checked by `from_wire`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dask_distmm.errors import ProtocolError

__all__ = ["Demand", "Worker"]


@dataclasses.dataclass(frozen=True, slots=True)
class Worker:
    """A worker as planning sees it.

    Parameters
    ----------
    address
        Its address in the Dask cluster.
    nthreads
        Number of its threads.
    memory_limit
        In bytes, of the memory that the chosen engine works in; 0 where it has none.
    host
        Name of its machine: workers of one host have the quicker links.
    device, reach
        Its GPU, and those whose memory that GPU can read, by names that are the same in all processes; empty where it
        has none.
    used
        Bytes of that memory which its process holds beside what Dask can spill.
    host_limit
        Where that is the memory of a GPU: the limit of its host memory in bytes, 0 where it has none.
    """

    address: str
    nthreads: int = 1
    memory_limit: int = 0
    host: str = ""
    device: str = ""
    reach: tuple[str, ...] = ()
    used: int = 0
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
    """The demand that a multiply makes on the workers of a cluster.

    Parameters
    ----------
    engine
        Name of the engine, or ``"auto"``.
    array
        What the chunks of D are: ``"numpy"`` or ``"cupy"``.
    dtypes
        Names of the types of A, B and D.
    workers
        Addresses, or how many, or None for all.
    plaintext_nccl
        Whether matrices may cross a network unencrypted though the cluster requires encryption.
    kind
        The kind of the computation, ``"product"`` or ``"factorization"``.
    """

    engine: str
    array: str
    dtypes: tuple[str, str, str]
    workers: tuple[str, ...] | int | None = None
    plaintext_nccl: bool = False
    kind: str = "product"

    def to_wire(self) -> tuple[str, str, list[str], list[str] | int | None, bool, str]:
        """As plain types."""
        workers = list(self.workers) if isinstance(self.workers, tuple) else self.workers
        return self.engine, self.array, list(self.dtypes), workers, self.plaintext_nccl, self.kind

    @classmethod
    def from_wire(cls, wire: Any) -> Demand:
        """Make it from what ``to_wire`` gave, checked.

        Raises
        ------
        ProtocolError
            Something is missing or of the wrong type.
        """
        try:
            engine, array, (a, b, d), workers, plaintext, kind = wire
            workers = tuple(map(str, workers)) if isinstance(workers, list | tuple) else workers
            return cls(str(engine), str(array), (str(a), str(b), str(d)), workers, bool(plaintext), str(kind))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"malformed demand: {error!r}") from error
