"""Whether a product is one run, or waves: its operands do not fit into memory together, or are made meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING

from dask_distmm.arrays.outputs import is_lazy, operands_under
from dask_distmm.arrays.request import Request
from dask_distmm.config import dask_costs, wave_settings
from dask_distmm.errors import PlanError, ProjectedMemoryError
from dask_distmm.graph.waves import can_be_made
from dask_distmm.planning import Plan, Problem
from dask_distmm.planning.footprint import held_bytes
from dask_distmm.planning.model import models_of
from dask_distmm.planning.waves import Budget, Scheme, WavePlan, choose_scheme, in_host, in_host_memory
from dask_distmm.runtime.client import Snapshot, snapshot

if TYPE_CHECKING:
    from distributed import Client

# Chunks that take so long to make (seconds) may be made by ranks, while they multiply. Whether that can be is seen in
# the graph, of which 1,500 chunks take half a second.
_LONG = 0.5


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a product is made: in waves, or by a plan for one run; neither where nothing is known of the cluster.

    With waves there is a plan if one run would do, too. `known` is what is known of the cluster, `left` why the product
    is left to Dask.
    """

    plan: Plan | None = None
    scheme: Scheme | None = None
    known: Snapshot | None = None
    left: str = ""

    @property
    def on_gpus(self) -> bool:
        """Whether GPUs multiply."""
        return self.known is not None and all(one.on_gpus for one in models_of(self.known.engines))


def decide(request: Request, problem: Problem, client: Client, known: Snapshot) -> Decision:
    """Return how a product is made, and log it."""
    made = run_or_waves(request, problem, client, known)
    whole = None if isinstance(made, WavePlan) else made
    if whole is not None:
        made = pipelined(request, problem, client, known, whole) or whole
    request.logger.info("%s, lazy\n%r", problem.name, made)
    return Decision(whole, made.scheme if isinstance(made, WavePlan) else None, known)


def run_or_waves(request: Request, problem: Problem, client: Client | None, known: Snapshot) -> Plan | WavePlan:
    """Return the plan for a product as one run, or its waves where it does not fit; parameters as for `decide`."""
    failure: ProjectedMemoryError | None = None
    made: Plan | None = None
    try:
        made = known.plan(problem, lazy=any(map(is_lazy, operands_under(request.a, request.b, problem))))
    except ProjectedMemoryError as error:
        failure = error
    waves = None if client is None else waves_now(request, problem, client, made)
    if failure is not None and waves is None:
        raise failure
    found = waves or made
    assert found is not None
    return found


def waves_now(request: Request, problem: Problem, client: Client, made: Plan | None) -> WavePlan | None:
    """Return the waves of a product that does not fit, or would spill, as one run; None if there are none."""
    budget = budget_now()
    if budget is None or (made is not None and not _spills(made, budget)):
        return None
    scheme = _scheme(request, problem, client, budget)
    return None if scheme is None else WavePlan(problem, scheme)


def pipelined(request: Request, problem: Problem, client: Client, known: Snapshot, made: Plan) -> WavePlan | None:
    """Return waves in which ranks make the chunks of a product that fits, unless that is expected to take longer.

    It takes less memory, too: chunks are dropped as soon as they are multiplied.
    """
    if (budget := budget_now()) is None:
        return None
    arrays = operands_under(request.a, request.b, problem)
    # What is lazy here may be in memory for another collection of the same name.
    lazy_a, lazy_b = (is_lazy(x) and (x.name, 0, 0) not in client.futures for x in arrays)
    lazy = [lazy_a, not problem.shared and lazy_b]
    sizes = problem.m * problem.k * problem.itemsize("a"), problem.k * problem.n * problem.itemsize("b")
    loading = sum(itertools.compress(sizes, lazy)) / (len(made.participants) * budget.rate(problem.array))
    if loading < _LONG or not all(one.makes for one in models_of([made.engine])):
        return None
    if not all(can_be_made(x, sampled=True) for x, yes in zip(arrays, lazy, strict=True) if yes):
        return None
    asked, both, engines = dataclasses.replace(problem, method=made.method), (lazy_a, lazy_b), known.engines
    try:
        scheme = choose_scheme(
            asked, known.workers, both, budget, dask_costs(), engine=engines, by_ranks=both, only_by_ranks=True
        )
    except (PlanError, ProjectedMemoryError) as error:
        request.logger.info("%s", error)
        return None
    return WavePlan(problem, scheme) if scheme.seconds <= loading + made.seconds else None


def budget_now() -> Budget | None:
    """Return the memory that waves may take; None if the configuration says that there are to be none."""
    settings = wave_settings()
    rates = settings.read_bandwidth, settings.device_bandwidth
    return Budget(settings.managed, settings.process, *rates) if settings.enabled else None


def _spills(made: Plan, budget: Budget) -> bool:
    """Whether Dask would move chunks to disk while a plan runs."""
    if in_host_memory(made.problem, made.engine):
        held = zip(held_bytes(made).tolist(), made.participants, strict=True)
        return any(size > budget.of(in_host(worker)) for size, worker in held)
    return any(made.projected_bytes[worker.address] > budget.of(worker) for worker in made.participants)


def _scheme(request: Request, problem: Problem, client: Client, budget: Budget) -> Scheme | None:
    """Return the waves of a product; None if it can't be made in waves, or does not fit in them either."""
    arrays = operands_under(request.a, request.b, problem)
    known = snapshot(client, problem, arrays)
    if known is None:
        return None
    lazy_a, lazy_b = (where is None for where in known.placed)
    can_a = lazy_a and can_be_made(arrays[0])
    can_b = can_a if problem.shared else lazy_b and can_be_made(arrays[1])
    given = problem, known.workers
    try:
        return choose_scheme(
            *given, (lazy_a, lazy_b), budget, dask_costs(), engine=known.engines, by_ranks=(can_a, can_b)
        )
    except (PlanError, ProjectedMemoryError) as error:
        reason = error
    if not (lazy_a and lazy_b):
        # Results that have no room in memory are on disk: Dask reads back those of a wave, and spills others for them.
        with contextlib.suppress(PlanError, ProjectedMemoryError):
            return choose_scheme(*given, (True, True), budget, dask_costs(), engine=known.engines)
    request.logger.info("%s", reason)
    return None
