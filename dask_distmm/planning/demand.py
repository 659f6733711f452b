"""Workers as planning sees them (Worker), and what a multiply asks of them (Demand).

Both are frozen values, which cross the network.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from dask_distmm.planning.wire import Wired


@dataclasses.dataclass(frozen=True, slots=True)
class Worker(Wired):
    """A worker as planning sees it."""

    what: ClassVar[str] = "worker"

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


@dataclasses.dataclass(frozen=True, slots=True)
class Demand(Wired):
    """The demand that a multiply makes on the workers of a cluster."""

    what: ClassVar[str] = "demand"

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
