"""The abilities of each engine: all that planning, clients and the scheduler know of engines.

An engine is two things. Its `Abilities` are known to every process; planning asks them which types it takes, what a way
to multiply costs on it and how much memory that needs. The object that multiplies (`engines.base.Engine`) is imported
on workers, from `Abilities.module`. So a new engine is one module, which registers its abilities::

    register(Abilities("mine", "package.module", takes=lambda array, dtypes: array == "numpy"))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dask_distmm.errors import EngineError


@dataclasses.dataclass(frozen=True)
class Abilities:
    """The abilities of an engine."""

    # Its name.
    name: str
    # The module whose attribute ``ENGINE`` multiplies.
    module: str
    # Whether it multiplies arrays: what their chunks are (``"numpy"`` or ``"cupy"``), and names of the types of A, B
    # and D.
    takes: Callable[[str, Sequence[str]], bool]
    # The kinds of computations that it runs: ``"product"``, ``"factorization"``.
    computes: frozenset[str] = frozenset(["product"])
    # The least and the most columns of a block of a factorization.
    widths: tuple[int, int] = (32, 256)
    # Whether ranks of a factorization can hand on a right-hand side (`planning.factor.phases`).
    carries: bool = False
    # Returns whether several of its ranks can compute a spectral decomposition (`Factorization`); otherwise one does.
    decomposes: Callable[[Any], bool] = lambda task: False
    # Returns the share of a product's rate at which a factorization (``"cholesky"``, ``"lu"``, ``"qr"``, ``""`` for
    # triangular systems, ``"eigh"``, ``"svd"``, ``"values"``) runs on this many ranks; 0 for that of CPUs.
    share: Callable[[str, int], float] = lambda way, ranks: 0.0
    # Returns the elements that its library holds on a rank beside the matrices of a `FactorPlan`, if it is
    # `collective`.
    workspace: Callable[[Any, int], int] = lambda work, rank: 0
    # For each factorization (``"cholesky"``, ``"lu"``, ``"qr"``) what a panel of the widest takes until the next one
    # can begin on another rank: the panel itself, its way there, what it is applied to first.
    panel_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Takes the name of a type, and the number of workers, and returns from which order of a matrix on
    # ``method="auto"`` has its eigenvalues by way of block columns, on all workers: one, too; None for never. Of an
    # engine that is not `collective`.
    shares_eigh_from: Callable[[str, int], int | None] | None = None
    # On that way, what a column takes beside reads of memory; 0 for two messages.
    column_seconds: float = 0.0
    # Whether it works in the memory of GPUs.
    on_gpus: bool = False
    # Whether its ranks read the memory of each other's GPUs.
    reads_peers: bool = False
    # Whether its ranks call a library together, with a communicator in which they have an order.
    collective: bool = False
    # Whether its ranks keep something of each other between runs.
    keeps: bool = False
    # Whether all that it sends goes through Dask's own comms, which TLS covers.
    encrypted: bool = True
    # Whether it matters which memory order the chunks have.
    minds_order: bool = False
    # Whether it adds a product to earlier sums where these lie, so that they are of no use once a run has begun.
    in_place: bool = False
    # Whether its ranks can make chunks of A and B themselves, when they need them.
    makes: bool = False
    # Whether its ranks can read NumPy chunks of A and B from host memory while they multiply on GPUs
    # (`Plan.from_host`).
    reads_host: bool = False
    # Whether it copies small chunks into panels before it multiplies (`memory.packing`).
    packs: bool = False
    # Whether its ranks return the chunks of `Problem.gathered` that they fetch in order to multiply.
    keeps_gathered: bool = False
    # The library that does epilogs, for texts.
    library: str = ""
    # Returns why it can't run on some workers (`Worker`) that have it; empty if it can.
    unfit: Callable[[Sequence[Any]], str] = lambda workers: ""
    # Returns whether it has a method for a problem.
    has_method: Callable[[Any, str], bool] = lambda problem, method: True
    # Return bytes by worker address, and an `Estimate`, of a plan whose ranks have been matched to workers, from the
    # bytes that each rank needs and those that it has; None for those of panels that come over Dask's comms
    # (`numpy.costs`).
    project: Callable[[Any], dict[str, int]] | None = None
    estimate: Callable[..., Any] | None = None
    # Makes a plan of one way in the engine's own manner, in place of all that the planner does; None for the
    # planner's.
    consider: Callable[..., Any] | None = None
    # Returns the epilog that the library does in a plan, ``""`` for a factor only, None for none.
    native_epilog: Callable[[Any], str | None] = lambda plan: None
    # Returns whether the ranks of a plan need nothing of each other but what was there before the run.
    independent: Callable[[Any], bool] = lambda plan: False
    # Returns whether a plan's multiply itself leaves all of D on every rank.
    all_reduced: Callable[[Any], bool] = lambda plan: False
    # Returns the tiles of A, B and D of a plan, for an engine that lays matrices out anew.
    tiles: Callable[[Any], Any] | None = None
    # Returns why a way (problem, p x q x s) of an engine with tiles can't have the distributions that were asked for,
    # or None.
    misfit: Callable[[Any, tuple[int, int, int]], str | None] = lambda problem, grid: None
    # Returns lines for `explain`, of what is peculiar to the engine in a plan.
    describe: Callable[[Any], list[str]] = lambda plan: []


# In the order in which they are preferred. Those for the same arrays on the same workers are chosen by the cost model.
ENGINES: dict[str, Abilities] = {}


def register(abilities: Abilities) -> None:
    """Make an engine known to this process; it is the last one that is asked for by ``engine="auto"``."""
    ENGINES[abilities.name] = abilities


def abilities_of(names: Sequence[str]) -> list[Abilities]:
    """Return the abilities of some engines."""
    if unknown := [name for name in names if name not in ENGINES]:
        raise EngineError(f"unknown engine {unknown[0]!r}; known are {', '.join(map(repr, ENGINES))}")
    return [ENGINES[name] for name in names]


def engine_alone(array: str, kind: str = "product") -> str:
    """Return the name of the engine for chunks of a kind where there is no cluster to choose by: it needs no peers.

    Factorizations by one process need none of the libraries that several share.
    """
    found = [one for one in ENGINES.values() if one.on_gpus == (array == "cupy") and kind in one.computes]
    shared = [one.name for one in found if one.collective and "product" in one.computes]
    return shared[-1] if shared else found[0].name
