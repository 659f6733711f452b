"""The one model: what each engine can do, and how long a machine takes for what it has to do.

All that is estimated, be it a run of any engine, waves, batches or Dask's own tasks, says its `Work`: phases, at the
end of each of which all ranks meet. The roofline of a phase on one rank::

    compute  = max(flops / rate + touched / memory bandwidth, least)
    pulled   = the sum over links of bytes that come while it computes / bandwidth
    transfer = max(pulled - compute, 0) + exposed * pulled  +  the sum over links of bytes that it waits for / bandwidth

A phase lasts as long as the rank with the largest sum takes. The seconds of the work are those of its phases, of its
messages, and those that it has whatever the machine.

An engine is two things. Its `EngineModel` is known to every process: which arrays it takes, which memory it works in,
how it cuts a product, and the work and the memory of a plan. The object that multiplies (`engines.base.Engine`) is
imported on workers, from `EngineModel.module`. So a new engine is one module, which registers its model, derived from
that of the engine which it is like::

    class Mine(NumpyModel):
        def takes(self, array, dtypes):
            return array == "numpy"

    register(Mine("mine", "package.module"))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dask_distmm.config import Machine
from dask_distmm.errors import EngineError
from dask_distmm.numeric.types import takes_on_cpus, takes_on_gpus

# A number for each rank, or one for all of them.
Numbers = Any


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """The work of ranks until all of them meet; see the roofline above."""

    # Floating-point operations, and those that a rank does in a second.
    flops: Numbers = 0.0
    rate: Numbers = 1.0
    # Bytes that it reads and writes in memory beside them, and the seconds that it takes in any case.
    touched: Numbers = 0.0
    least: Numbers = 0.0
    # Bytes by link: those that come while it computes, and those that it waits for. The links are ``"ranks"``,
    # ``"near"`` (ranks of one host), ``"far"`` (others), ``"dask"`` (Dask's own connections), ``"host"`` (a GPU's own
    # host), ``"memory"``, ``"messages"``, and ``"seconds"``, which are worked out already.
    pulled: Mapping[str, Numbers] = dataclasses.field(default_factory=dict)
    waited: Mapping[str, Numbers] = dataclasses.field(default_factory=dict)
    # The share of what is pulled that is not hidden.
    exposed: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """All that ranks do."""

    phases: Sequence[Phase]
    # Messages beside the phases; seconds whatever the machine; bytes that travel between workers in all.
    messages: float = 0.0
    seconds: float = 0.0
    moved: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """The cost model's estimate of one way to run a problem."""

    # Name of the method and its p x q x s; of a batch its route, and the number of tasks or runs.
    method: str
    grid: tuple[int, int, int]
    # Estimated time: in all, multiplying, and receiving and adding up.
    seconds: float
    compute_seconds: float
    transfer_seconds: float
    # Bytes that travel between workers, all ranks together.
    bytes_moved: int
    # The largest projection of a worker's memory; of a batch of plain tasks that of a task.
    peak_bytes: int

    @property
    def rest_seconds(self) -> float:
        """Estimated time of all else: messages, having tasks."""
        return max(0.0, self.seconds - self.compute_seconds - self.transfer_seconds)


def speeds(machine: Machine, hosts: Collection[str] = ()) -> dict[str, float]:
    """Return what a link of each kind brings in a second to a worker of one of some hosts."""
    far = machine.network_bandwidth or machine.bandwidth
    ranks = far if len(hosts) > 1 else machine.bandwidth
    return {
        "ranks": ranks,
        "near": machine.bandwidth,
        "far": far,
        "dask": machine.dask_bandwidth or ranks,
        "host": machine.host_bandwidth or ranks,
        "memory": machine.memory_bandwidth,
        "messages": 1 / machine.latency if machine.latency else math.inf,
        "seconds": 1.0,
    }


def estimate(
    work: Work, machine: Machine, method: str, grid: tuple[int, int, int], peak: float = 0, hosts: Collection[str] = ()
) -> Estimate:
    """Return what work takes on a machine, by the roofline at the top of this module."""
    speed, compute, transfer = speeds(machine, hosts), 0.0, 0.0

    def coming(sizes: Mapping[str, Numbers]) -> Numbers:
        return sum((size / speed[link] for link, size in sizes.items()), 0.0)

    for phase in work.phases:
        own = np.maximum(phase.flops / phase.rate + phase.touched / speed["memory"], phase.least)
        pulled = coming(phase.pulled)
        moving = np.maximum(pulled - own, 0.0) + phase.exposed * pulled + coming(phase.waited)
        worst = np.argmax(own + moving)
        own, moving = (x.flat[worst] if np.size(x) > 1 else np.max(x) for x in (own, moving))
        compute, transfer = compute + float(own), transfer + float(moving)
    seconds = compute + transfer + work.messages * machine.latency + work.seconds
    return Estimate(method, grid, seconds, compute, transfer, int(work.moved), int(peak))


@dataclasses.dataclass(frozen=True)
class EngineModel:
    """What planning, clients and the scheduler know of an engine; a class of its own for each engine."""

    # Its name, and the module whose attribute ``ENGINE`` multiplies.
    name: str
    module: str
    # The kinds of computations that it runs: ``"product"``, ``"factorization"``, ``"program"``, ``"region"``.
    computes: frozenset[str] = frozenset(["product"])
    # The least and the most columns of a block of a factorization.
    widths: tuple[int, int] = (32, 256)
    # Whether it works in the memory of GPUs: then ranks keep something of each other between runs, and the memory order
    # of chunks matters.
    on_gpus: bool = False
    # Whether its ranks read the memory of each other's GPUs, and of their host.
    reads_peers: bool = False
    # Whether its ranks meet in a library, with a communicator in which they have an order, that TLS does not cover.
    collective: bool = False
    # Whether its ranks can make chunks of A and B themselves, when they need them.
    makes: bool = False
    # Whether ranks multiply what they have in panels, as `numpy` does: they copy small chunks into panels
    # (`footprint.packing`), add to earlier sums where these lie, which are of no use once a run has begun, return the
    # chunks of `Problem.gathered` that they fetch, and hand on a single right-hand side (`FactorPlacement.carried`).
    by_panels: bool = False
    # The library that does epilogs, for texts.
    library: str = ""

    # Shares of a product's rate at which factorizations run on one rank, and on several: ``"cholesky"``, ``"lu"``,
    # ``"qr"``, ``""`` for triangular systems, ``"eigh"``, ``"svd"``, ``"values"``. On CPUs: two workers of one thread,
    # float64, N = 4096 and 8192.
    shares: ClassVar[Mapping[str, tuple[float, float]]] = {
        "cholesky": (0.85, 0.85),
        "lu": (0.75, 0.75),
        "qr": (0.7, 0.7),
        "": (0.8, 0.8),
    }
    # What a panel of the widest takes until the next one can begin on another rank.
    panel_seconds: ClassVar[Mapping[str, float]] = {}
    # What a column takes beside reads of memory and messages in shared eigenvalues.
    column_seconds: ClassVar[float] = 0.0

    def takes(self, array: str, dtypes: Sequence[str]) -> bool:
        """Whether it multiplies arrays of ``"numpy"`` or ``"cupy"`` chunks, with these types of A, B and D."""
        return (takes_on_gpus if self.on_gpus else takes_on_cpus)(array, dtypes)

    def unfit(self, workers: Sequence[Any], kind: str, *, joined: bool = False) -> str:
        """Return why it can't run a kind of computation on some workers (`Worker`) that have it; empty if it can.

        `joined`: NCCL may join ranks that can't read each other's memory.
        """
        return ""

    # Products

    def has_method(self, problem: Any, method: str) -> bool:
        """Whether it has a method for a problem."""
        return True

    def cuts(self, problem: Any, candidate: Any) -> list[Any]:
        """Return the cuts of m, n and k, and of D or None, that a candidate may have; none for the planner's own."""
        return []

    def least(self, problem: Any, candidate: Any) -> Work:
        """Return what a candidate takes beside its operations wherever chunks are: a part of the work of its plans."""
        return Work([])

    def tiles(self, plan: Any) -> Any:
        """Return the tiles of A, B and D of a plan, for an engine that lays matrices out anew; else None."""
        return None

    def steps(self, plan: Any, rank: int, *, begun: Collection[int], usable: Callable[[int, int], bool]) -> Any:
        """Return the steps of a rank of a plan.

        It adds to the chunks of D that were `begun`; `usable` says which chunks of A (0) and B (1), by number, can be
        multiplied as they are.
        """
        raise NotImplementedError

    def misfit(self, problem: Any, grid: tuple[int, int, int]) -> str | None:
        """Return why an engine with tiles can't have the distributions that were asked for, or None."""
        return None

    def memory(self, plan: Any, needs: Any) -> Any:
        """Return the bytes that each participant holds at most; `needs` has `footprint.operand_needs` of A and B."""
        raise NotImplementedError

    def work(self, plan: Any, needs: Any) -> Work:
        """Return the work of a plan whose ranks have been matched to workers."""
        raise NotImplementedError

    def native_epilog(self, plan: Any) -> str | None:
        """Return the epilog that the library does in a plan, ``""`` for only a factor, None for nothing."""
        return None

    def independent(self, plan: Any) -> bool:
        """Whether the ranks of a plan need nothing of each other but what was there before the run."""
        return False

    def all_reduced(self, plan: Any) -> bool:
        """Whether a plan's multiply itself leaves all of D on every rank."""
        return False

    def describe(self, plan: Any) -> list[tuple[str, str]]:
        """Return what `explain` is to say of the engine's own ways in a plan: titles and facts."""
        return []

    # Factorizations

    @property
    def factor_dtypes(self) -> tuple[str, ...]:
        """The types of factors that it has, with which solutions are refined."""
        if self.collective:
            return ()
        return ("float32", "tf32", "float16", "bfloat16") if self.on_gpus else ("float32",)

    def decomposes(self, task: Any) -> bool:
        """Whether several of its ranks can compute a spectral decomposition (`Factorization`); otherwise one does."""
        return bool(task.shareable) and not self.collective

    def share(self, algorithm: str, ranks: int) -> float:
        """Return the share of a product's rate at which a factorization runs on some ranks; 0 where none is known."""
        return self.shares.get(algorithm, (0.0, 0.0))[ranks > 1]

    def shares_eigh_from(self, dtype: str, workers: int) -> int | None:
        """Return from which order on ``method="auto"`` has eigenvalues by way of block columns; None for never."""
        return None


# In the order in which they are preferred. Those for the same arrays on the same workers are chosen by the cost model.
ENGINES: dict[str, EngineModel] = {}


def register(model: EngineModel) -> None:
    """Make an engine known to this process; it is the last one that is asked for by ``engine="auto"``."""
    ENGINES[model.name] = model


def models_of(names: Sequence[str]) -> list[EngineModel]:
    """Return the models of some engines."""
    if unknown := [name for name in names if name not in ENGINES]:
        raise EngineError(f"unknown engine {unknown[0]!r}; known are {', '.join(map(repr, ENGINES))}")
    return [ENGINES[name] for name in names]


def engine_alone(array: str, kind: str = "product") -> str:
    """Return the name of the engine for chunks of a kind without a cluster: it needs no peers.

    Factorizations by one process need none of the libraries that several share.
    """
    able = [model for model in ENGINES.values() if model.on_gpus == (array == "cupy") and kind in model.computes]
    shared = [model.name for model in able if model.collective and "product" in model.computes]
    return shared[-1] if shared else able[0].name
